"""read_archive: the content of a ZIP file, unpacked in memory."""

from __future__ import annotations

import errno

from protocol.archive import Progress, open_archive, untold
from protocol.backends.memory import MemoryVolume
from vfsd.snapshots.counted import CountedTree

__all__ = ["read_archive"]


def read_archive(path: str, max_bytes: int | None, max_inodes: int | None, progress: Progress = untold) -> MemoryVolume:
    """The content of a ZIP file, validated and unpacked into a volume of its own.  Any thread.  ArchiveError, OSError.

    So the serving loop has only to put it in place.  What it may take is what the workspace may: an archive that
    unpacks to more than the machine has would otherwise end the daemon, and the workspace with it.
    `progress` is told of both passes over the content, the check and the unpacking, as halves of the whole.
    """
    staged = MemoryVolume(max_bytes, max_inodes)
    try:
        with open_archive(path, progress=lambda done, total: progress(done // 2, total)) as tree:
            counted = CountedTree(tree, lambda done, total: progress((total + done) // 2, total))
            staged.import_tree(counted, replace=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        reason = f"No space left: the archive holds more than the workspace may ({_limits(max_bytes, max_inodes)})"
        raise OSError(errno.ENOSPC, reason, path) from None
    return staged


def _limits(max_bytes: int | None, max_inodes: int | None) -> str:
    return ", ".join(f"{limit:,} {what}" for limit, what in ((max_bytes, "bytes"), (max_inodes, "inodes")) if limit)
