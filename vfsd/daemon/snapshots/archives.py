"""Content from elsewhere on its way into a workspace: an archive's, or a snapshot's of another workspace."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from protocol.archive import ByteProgress, no_progress, open_archive
from protocol.backends.memory import MemoryVolume, ReservedInodes
from protocol.store import Store
from protocol.tree import Tree
from vfsd.daemon.snapshots.counted import CountedTree

__all__ = ["Origin", "Reserve", "archive", "read_origin", "snapshot_of", "unlimited", "unpack"]

Reserve: TypeAlias = Callable[[int], None]


def unlimited(_size_bytes: int) -> None:
    """A `Reserve` of a workspace whose memory has no limit."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where content comes from: `name` is what errors call it.

    `opened(progress, check_content, reserve)` gives it for the length of a block, checked when that is entered;
    `progress` is told how far that is, in bytes.  Without `check_content` a file's content is checked when it is read.
    `reserve` is called with the bytes of memory that are needed to enter the block, and may raise.  Any thread.
    """

    name: str
    opened: Callable[[ByteProgress, bool, Reserve], AbstractContextManager[Tree]]


def archive(path: str) -> Origin:
    """What the ZIP file `path` holds.  ArchiveError, OSError."""
    return Origin(
        path,
        lambda progress, check, reserve: open_archive(path, progress=progress, check_content=check, reserve=reserve),
    )


def snapshot_of(store: Store, key: str, name: str, shown: str) -> Origin:
    """The snapshot `name` that `store` has of the workspace `key`; `shown` says that.  SnapshotNotFoundError."""
    return Origin(shown, lambda _, _check, _reserve: store.tree(key, name))


def read_origin(
    origin: Origin,
    volume: MemoryVolume,
    progress: ByteProgress = no_progress,
    reserve_inodes: Callable[[int], ReservedInodes] | None = None,
) -> MemoryVolume:
    """What `origin` has, unpacked into a volume of its own, within the limits of `volume`.  See `unpack`.

    So the serving loop has only to put it in place.  Memory is lent by `volume`, which has less of it until the content
    is put there, or the caller gives it back (`MemoryVolume.give_back`).  With `reserve_inodes`, which calls that of
    `volume` on its loop, a preparation takes the inodes over instead of copying them.
    """
    staged = MemoryVolume(volume.max_bytes, volume.max_inodes)
    staged.borrow_from(volume)
    try:
        with _opened(origin, staged) as tree:
            counted = CountedTree(tree, progress)
            staged.fill(counted, reserve_inodes(counted.entries) if reserve_inodes is not None else None)
    except BaseException:
        staged.give_back()
        raise
    return staged


def unpack(origin: Origin, volume: MemoryVolume, progress: ByteProgress = no_progress) -> None:
    """Put what `origin` has, validated, into `volume`, which is new.  Any thread.  ArchiveError, OSError.

    What it may take is what `volume` may: an archive that unpacks to more than the machine has would otherwise end the
    daemon, and the workspace with it.
    `progress` is told how much of it is unpacked.  On an error the volume is half filled.
    """
    # Content is checked while it is read, into a place that is thrown away if it turns out to be damaged.
    with _opened(origin, volume) as tree:
        volume.fill(CountedTree(tree, progress))


@contextmanager
def _opened(origin: Origin, volume: MemoryVolume) -> Iterator[Tree]:
    """The tree of `origin`, opened within the memory of `volume`.  ENOSPC names the limits that were reached."""
    try:
        with ExitStack() as opened:
            with volume.reserving() as reserve:
                tree = opened.enter_context(origin.opened(no_progress, False, reserve))
            yield tree
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        reason = f"No space left: that is more than the workspace may hold ({_limits(volume)})"
        raise OSError(errno.ENOSPC, reason, origin.name) from None


def _limits(volume: MemoryVolume) -> str:
    limits = ((volume.max_bytes, "bytes"), (volume.max_inodes, "inodes"), (volume.max_memory, "bytes of memory"))
    return ", ".join(f"{limit:,} {what}" for limit, what in limits if limit)
