"""Opening what lies beneath a directory, and nothing else: no symlink is followed, no ".." leads out.

Source: openat2(2).
"""

from __future__ import annotations

import errno
import os
from typing import Final

from protocol.linux.syscalls import (
    RESOLVE_BENEATH,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS,
    RESOLVE_NO_XDEV,
    openat2,
)

__all__ = ["Handle", "open_beneath", "proc_path"]

_PATH_MAX: Final = 4096  # with its NUL, linux/limits.h
_RESOLVE: Final = RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH
# Kernels before 5.6 have no openat2, and some sandboxes refuse what they do not know.  EAGAIN: a rename anywhere
# meanwhile, which the kernel cannot tell from an escape by "..".
_OTHERWISE: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EAGAIN})


class Handle:
    """A descriptor that is closed when nobody refers to it any more: so a cache may drop what a thread still reads."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def proc_path(descriptor: int) -> bytes:
    """A path of the very inode that a descriptor is open on, for calls that take no descriptor, or none of O_PATH."""
    return b"/proc/self/fd/%d" % descriptor


def open_beneath(directory: int, path: bytes, flags: int, *, same_mount: bool = False) -> int:
    """A descriptor of `path`, relative to the directory of descriptor `directory`.  ELOOP, EXDEV, as open(2).

    `path` has no ".." and no empty component; none of its components is a symlink (but with O_PATH the last one may
    be: then the descriptor is the symlink's own).  With `same_mount` what another mount has there is refused (EXDEV),
    as far as the kernel knows how.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    if len(path) >= _PATH_MAX:
        return _in_hops(directory, path, flags, same_mount=same_mount)
    try:
        return openat2(directory, path, flags, _RESOLVE | RESOLVE_NO_XDEV if same_mount else _RESOLVE)
    except OSError as error:
        if error.errno not in _OTHERWISE:
            raise
    return _one_by_one(directory, path, flags)


def _in_hops(directory: int, path: bytes, flags: int, *, same_mount: bool) -> int:
    """`open_beneath` of a path that is too long for one system call: by directories on the way."""
    at = directory
    try:
        while len(path) >= _PATH_MAX:
            cut = path.rfind(b"/", 0, _PATH_MAX - 1)
            if cut <= 0:
                break  # a component that no file system has: the kernel says so
            below = open_beneath(at, path[:cut], os.O_PATH | os.O_DIRECTORY, same_mount=same_mount)
            if at != directory:
                os.close(at)
            at, path = below, path[cut + 1 :]
        try:
            return openat2(at, path, flags, _RESOLVE | RESOLVE_NO_XDEV if same_mount else _RESOLVE)
        except OSError as error:
            if error.errno not in _OTHERWISE:
                raise
        return _one_by_one(at, path, flags)
    finally:
        if at != directory:
            os.close(at)


def _one_by_one(directory: int, path: bytes, flags: int) -> int:
    *above, name = path.split(b"/")
    at = directory
    try:
        for part in above:
            below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            if at != directory:
                os.close(at)
            at = below
        return os.open(name, flags, dir_fd=at)
    finally:
        if at != directory:
            os.close(at)
