"""Content from elsewhere on its way into a workspace: an archive's, or a snapshot's of another workspace."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from protocol.archive import Progress, open_archive, untold
from protocol.backends.memory import MemoryVolume
from protocol.store import Store
from protocol.tree import Tree
from vfsd.snapshots.counted import CountedTree

__all__ = ["Origin", "archive", "read_archive", "read_origin", "snapshot_of"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where content comes from: `name` is what errors call it.

    `opened` gives it for the length of a block, checked when that is entered; it is told how far that is, in bytes.
    Any thread.
    """

    name: str
    opened: Callable[[Progress], AbstractContextManager[Tree]]


def archive(path: str) -> Origin:
    """What the ZIP file `path` holds.  ArchiveError, OSError."""
    return Origin(path, lambda progress: open_archive(path, progress=progress))


def snapshot_of(store: Store, key: str, name: str, shown: str) -> Origin:
    """The snapshot `name` that `store` has of the workspace `key`; `shown` says that.  SnapshotNotFoundError."""
    return Origin(shown, lambda _: store.tree(key, name))


def read_archive(path: str, max_bytes: int | None, max_inodes: int | None, progress: Progress = untold) -> MemoryVolume:
    """As `read_origin`, of the ZIP file `path`."""
    return read_origin(archive(path), max_bytes, max_inodes, progress)


def read_origin(
    origin: Origin, max_bytes: int | None, max_inodes: int | None, progress: Progress = untold
) -> MemoryVolume:
    """What `origin` has, validated and unpacked into a volume of its own.  Any thread.  ArchiveError, OSError.

    So the serving loop has only to put it in place.  What it may take is what the workspace may: an archive that
    unpacks to more than the machine has would otherwise end the daemon, and the workspace with it.
    `progress` is told of both passes over the content, the check and the unpacking, as halves of the whole.
    """
    staged = MemoryVolume(max_bytes, max_inodes)
    try:
        with origin.opened(lambda done, total: progress(done // 2, total)) as tree:
            counted = CountedTree(tree, lambda done, total: progress((total + done) // 2, total))
            staged.import_tree(counted, replace=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        reason = f"No space left: that is more than the workspace may hold ({_limits(max_bytes, max_inodes)})"
        raise OSError(errno.ENOSPC, reason, origin.name) from None
    return staged


def _limits(max_bytes: int | None, max_inodes: int | None) -> str:
    return ", ".join(f"{limit:,} {what}" for limit, what in ((max_bytes, "bytes"), (max_inodes, "inodes")) if limit)
