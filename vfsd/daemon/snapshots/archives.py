"""Content from outside of a workspace: an archive, or a snapshot of another workspace.

`PreparedImport` puts it in place in two parts: entries that are built in slices, while the mount answers, and one step
that shows them.  The checkpoint after each slice lets programs change the volume; the step itself has none.

Threading: `PreparedImport` on the serving loop, the rest on any thread.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import trio

from protocol.tree import CHUNK_BYTES, ByteProgress, Chunk, Hole, Tree, TreeEntry, no_progress
from protocol.values import Value
from protocol.volume_extensions import CacheInvalidation, ImportStage, PreparingVolume, StagingVolume
from vfsd.daemon.snapshots.base import CallObserver, Staged, entered, in_bytes, in_thread

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
            stage.fill(counted, reserve_inodes(counted.count))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, error.strerror, origin.name) from None


class CountedTree:
    """A tree that reports how much of it was read.  It is walked and read once, in chunks.

    `report` is called with (bytes done, bytes in total).  `count` is the number of entries in the tree.
    """

    def __init__(self, tree: Tree, report: Callable[[int, int], None]) -> None:
        self._tree = tree
        self._report = report
        self._done = self._last_reported = 0
        self.count = 0
        size = 0
        for entry in tree.walk():
            self.count += 1
            size += entry.size if entry.is_file else 0
        self._total = size + _ENTRY_BYTES * self.count

    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`, as for the other methods."""
        return self._tree.entry(path)

    def entries(self, path: bytes) -> Iterable[TreeEntry]:
        return self._tree.entries(path)

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


_SLICE_S: Final = 0.004  # a request through the mount waits for one slice at most
_CLOCK_EVERY: Final = 16  # steps


class PreparedImport:
    """An import whose new entries are built in slices, between which the mount answers, and then shown in one step.

    Call `prepare`, `put` and, in any case, `discard`.  Between the first two no snapshot may be taken.
    """

    def __init__(self, volume: PreparingVolume, staged: Staged, extent: Mapping[str, Any]) -> None:
        """`extent`: arguments of `import_tree`."""
        self._volume = volume
        self._staged = staged
        self._preparation = volume.preparation(staged.tree, **extent)
        self._import_all = functools.partial(volume.import_tree, staged.tree, **extent)
        self._view = ExitStack()
        self._is_abandoned = False
        self._is_done = False

    async def prepare(self, observer: CallObserver) -> None:
        """Build the entries.  If they do not fit in memory now, `put` does everything: it may free some."""
        self._view.enter_context(self._volume.tree())  # while it is open, a file that changes gets a new version
        try:
            await _in_slices(self._observed(self._preparation.steps(), observer))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._is_abandoned = True
            await self.discard()

    def put(self) -> CacheInvalidation:
        """Put everything in place, all or nothing.  Raises what `SnapshotableVolume.import_tree` raises."""
        if self._is_abandoned or not self._preparation.is_valid:
            for _ in self._preparation.discard():
                pass
            return self._import_all()
        self._is_done = True
        return self._volume.import_prepared(self._preparation)

    async def discard(self) -> None:
        """Remove the entries that were built and not put in place."""
        self._view.close()
        if not self._is_done:
            with trio.CancelScope(shield=True):
                await _in_slices(self._preparation.discard())

    def _observed(self, steps: Iterator[int], observer: CallObserver) -> Iterator[None]:
        total = self._staged.files
        done = 0
        for count in steps:
            done += count
            observer.raise_if_cancelled()
            observer.progress_nowait(min(done, total), total, "files")
            yield


async def _in_slices(steps: Iterator[None]) -> None:
    """Run `steps`, with a checkpoint after each slice."""
    until_s = time.perf_counter() + _SLICE_S
    for count, _ in enumerate(steps):
        if count % _CLOCK_EVERY == 0 and time.perf_counter() > until_s:
            await trio.sleep(0)
            until_s = time.perf_counter() + _SLICE_S


@asynccontextmanager
async def checked(origin: Origin, observer: CallObserver) -> AsyncIterator[Staged]:
    """Open `origin` with its content checked, and count its files and bytes."""
    async with entered(origin.opened(in_bytes(observer), True, unlimited)) as tree:
        yield await in_thread(_counted, origin, tree)


def _counted(origin: Origin, tree: Tree) -> Staged:
    files = total_bytes = 0
    for entry in tree.walk():
        files += not entry.is_dir
        total_bytes += entry.size if entry.is_file else 0
    return Staged(origin.name, origin.label, tree, files, total_bytes)
