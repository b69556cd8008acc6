"""The sizes and modification times that the kernel keeps of regular files, corrected after a change behind its back.

With a write-back cache the kernel ignores the volume's size and times of a file that it has cached, and
FUSE_NOTIFY_INVAL_INODE does not change that (fuse_get_cache_mask, fs/fuse/inode.c).  Files that nobody has open are
evicted (`NativeEngine.prune`).  For the others a thread sets size and time through the mount, and the daemon answers
the requests of this thread without changing the volume.  ctime is then the time of the correction.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple


class FileState(NamedTuple):
    """The size and time that the volume has for a regular file.  `path` is relative to the root."""

    inode: int
    path: bytes
    size: int
    mtime_ns: int


def refresh_files(open_root: Callable[[], int], files: Sequence[FileState]) -> None:
    """Give the kernel the sizes and times of `files` on the mount whose root `open_root` opens.  Raises as that does.

    Skips a file that is gone, that the daemon's user may not write, or that is being executed (ETXTBSY).
    """
    root = open_root()
    try:
        for file in files:
            with suppress(OSError):
                _refresh(root, file)
    finally:
        os.close(root)


def _refresh(root: int, file: FileState) -> None:
    found = os.stat(file.path, dir_fd=root, follow_symlinks=False)
    if found.st_ino != file.inode or not stat.S_ISREG(found.st_mode):
        return
    size_differs = found.st_size != file.size
    if size_differs:
        descriptor = os.open(file.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            os.ftruncate(descriptor, file.size)
        finally:
            os.close(descriptor)
    if size_differs or found.st_mtime_ns != file.mtime_ns:
        os.utime(file.path, ns=(found.st_atime_ns, file.mtime_ns), dir_fd=root, follow_symlinks=False)
