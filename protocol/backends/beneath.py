"""Opening what lies beneath a directory, and nothing else: no symlink is followed, no ".." leads out.

Source: openat2(2), include/uapi/linux/openat2.h; the number of the call is the same on every architecture.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

from protocol.errors import fail

__all__ = ["Handle", "open_beneath", "proc_path"]

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_SYS_OPENAT2: Final = 437
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RESOLVE_BENEATH: Final = 0x08
_RESOLVE: Final = _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
_OPEN_HOW: Final = struct.Struct("=QQQ")  # flags, mode, resolve
# Kernels before 5.6 have no openat2, and some sandboxes refuse what they do not know.  EAGAIN: a rename anywhere
# meanwhile, which the kernel cannot tell from an escape by "..".
_OTHERWISE: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EAGAIN})

_syscall = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    use_errno=True,
)(("syscall", _LIBC))


class Handle:
    """A descriptor that is closed when nobody refers to it any more: so a cache may drop what a thread still reads."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def proc_path(descriptor: int) -> bytes:
    """A path of the very inode that a descriptor is open on, for calls that take none, or none of O_PATH."""
    return b"/proc/self/fd/%d" % descriptor


def open_beneath(directory: int, path: bytes, flags: int) -> int:
    """A descriptor of `path`, relative to the directory of descriptor `directory`.  ELOOP, EXDEV, as open(2).

    `path` has no ".." and no empty component; none of its components is a symlink (but with O_PATH the last one may
    be: then the descriptor is the symlink's own).
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    how = _OPEN_HOW.pack(flags, 0, _RESOLVE)
    descriptor: int = _syscall(_SYS_OPENAT2, directory, path, how, _OPEN_HOW.size)
    if descriptor >= 0:
        return descriptor
    code = ctypes.get_errno()
    if code not in _OTHERWISE:
        raise fail(code, path.decode("utf-8", "backslashreplace"))
    return _one_by_one(directory, path, flags)


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
