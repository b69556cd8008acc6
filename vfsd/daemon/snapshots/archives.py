"""Content from outside of a workspace: an archive, or a snapshot of another workspace."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from protocol.tree import CHUNK_BYTES, ByteProgress, Chunk, Hole, Tree, TreeEntry, no_progress
from protocol.values import Value
from protocol.volume_extensions import ImportStage, StagingVolume

if TYPE_CHECKING:
    from protocol.store import Store

Reserve: TypeAlias = Callable[[int], None]

# An entry without content counts as much as its header in a tar archive.
_ENTRY_BYTES: Final = 512
_REPORT_EVERY_BYTES: Final = 256 * 1024


def unlimited(_size_bytes: int) -> None:
    """A `Reserve` of a workspace without a memory limit."""


class Origin(Value):
    """A source of content; `name` is used in messages, the shorter `label` in the undo history.

    `opened(progress, check_content, reserve)` opens it as a tree, checked on entry; `progress` reports the check in
    bytes.  Without `check_content` a file's content is checked when it is read.  `reserve` is called with the bytes of
    memory that are needed to enter the block, and may raise.  Any thread.
    """

    name: str
    label: str
    opened: Callable[[ByteProgress, bool, Reserve], AbstractContextManager[Tree]]


def archive(path: str) -> Origin:
    """The content of the ZIP file `path`.  ArchiveError, OSError."""

    def opened(progress: ByteProgress, check_content: bool, reserve: Reserve) -> AbstractContextManager[Tree]:
        # Start-up: the mount answers before the archive code is imported.
        from protocol.archive import open_archive  # noqa: PLC0415

        return open_archive(path, progress=progress, check_content=check_content, reserve=reserve)

    return Origin(path, os.path.basename(path), opened)


def snapshot_of(store: Store, key: str, name: str, shown: str) -> Origin:
    """Snapshot `name` of workspace `key` in `store`, called `shown` in messages.  SnapshotNotFoundError."""
    return Origin(shown, name, lambda _, _check, _reserve: store.tree(key, name))


def read_origin(
    origin: Origin,
    volume: StagingVolume,
    progress: ByteProgress = no_progress,
    reserve_inodes: Callable[[int], Any] = lambda _: None,
) -> ImportStage:
    """Unpack `origin` into a stage of `volume`, within that volume's limits.  Any thread.  ArchiveError, OSError.

    The caller ends the stage (`ImportStage.give_back`).  `reserve_inodes` is `PreparingVolume.reserve_inodes`, called
    on its loop.
    """
    stage = volume.new_stage()
    try:
        unpack(origin, stage, progress, reserve_inodes)
    except BaseException:
        stage.give_back()
        raise
    return stage


def unpack(
    origin: Origin,
    stage: ImportStage,
    progress: ByteProgress = no_progress,
    reserve_inodes: Callable[[int], Any] = lambda _: None,
) -> None:
    """Unpack `origin` into `stage`, which is empty.  Any thread.  ArchiveError, OSError.

    The limits of `stage` apply, so an archive that unpacks to more than the machine's memory does not end the daemon.
    After an error `stage` is half filled.
    """
    try:
        with ExitStack() as opened:
            with stage.reserving() as reserve:
                # Content is checked while it is read: if it is damaged, the caller discards the stage.
                tree = opened.enter_context(origin.opened(no_progress, False, reserve))
            counted = CountedTree(tree, progress)
            stage.fill(counted, reserve_inodes(counted.entries))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, error.strerror, origin.name) from None


class CountedTree:
    """A tree that reports how much of it was read.  It is walked and read once, in chunks.

    `report` is called with (bytes done, bytes in total).  `entries` is the number of entries in the tree.
    """

    def __init__(self, tree: Tree, report: Callable[[int, int], None]) -> None:
        self._tree = tree
        self._report = report
        self._done = self._last_reported = 0
        self.entries = 0
        size = 0
        for entry in tree.walk():
            self.entries += 1
            size += entry.size if entry.is_file else 0
        self._total = size + _ENTRY_BYTES * self.entries

    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`, as for the other methods."""
        return self._tree.entry(path)

    def children(self, path: bytes) -> list[bytes]:
        return self._tree.children(path)

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        for entry in self._tree.walk(path):
            self._add(_ENTRY_BYTES)
            yield entry

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        for chunk in self._tree.chunks(path, size):
            self._add(0 if isinstance(chunk, Hole) else len(chunk))
            yield chunk

    def touched(self, other: Tree) -> Collection[bytes] | None:
        return self._tree.touched(other)

    def _add(self, size: int) -> None:
        self._done += size
        if self._done - self._last_reported >= _REPORT_EVERY_BYTES:
            self._last_reported = self._done
            self._report(min(self._done, self._total), self._total)
