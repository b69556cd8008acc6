"""open_workdir: the workspace directory below a container's root, reached as a process inside would reach it.

Symlinks on the way are the container's: an absolute one begins at its root, ".." at its root stays there, and no
link of /proc leads anywhere (RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS, openat2(2)).  What is made is made in a
directory that is held open, under a name that is one step, so nothing that is put in its place meanwhile is followed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

__all__ = ["open_workdir"]

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_SYS_OPENAT2: Final = 437  # the same on every architecture
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_IN_ROOT: Final = 0x10
_OPEN_HOW: Final = struct.Struct("=QQQ")  # flags, mode, resolve
_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ATTEMPTS: Final = 16  # EAGAIN: a rename or mount anywhere meanwhile, which the kernel cannot tell from an escape
_MODE: Final = 0o755

_syscall = ctypes.CFUNCTYPE(
    ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, use_errno=True
)(("syscall", _LIBC))


def open_workdir(root: int, workdir: str, owner: tuple[int, int]) -> int:
    """An O_PATH descriptor of the directory `workdir` in the root directory of descriptor `root`.

    What is missing of it is made, and belongs to `owner` (user and group, as the host calls them).  OSError with what
    to do: EROFS where it would have to be made on what is read-only.
    """
    at = b"/"
    descriptor = _in_root(root, at)
    for name in os.fsencode(workdir).split(b"/"):
        if not name:
            continue
        at = os.path.join(at, name)
        try:
            below = _in_root(root, at)
        except FileNotFoundError:
            try:
                _make(descriptor, name, owner)
                below = _in_root(root, at)
            except OSError as error:
                raise _explained(error, workdir) from None
        except OSError as error:
            raise _explained(error, workdir) from None
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


def _make(directory: int, name: bytes, owner: tuple[int, int]) -> None:
    try:
        os.mkdir(name, _MODE, dir_fd=directory)
    except FileExistsError:
        return  # somebody was faster; or a symlink that leads nowhere, which the next attempt tells
    if os.geteuid() == 0:
        os.chown(name, *owner, dir_fd=directory, follow_symlinks=False)


def _explained(error: OSError, workdir: str) -> OSError:
    reason = {
        errno.EROFS: "does not exist in the container, whose root is read-only; name a volume's place with --workdir",
        errno.ENOTDIR: "is no directory in the container",
        errno.ENOENT: "is a symlink in the container that leads nowhere",
    }.get(error.errno or 0, error.strerror)
    return OSError(error.errno, f"the working directory {reason}", workdir)


def _in_root(root: int, path: bytes) -> int:
    how = _OPEN_HOW.pack(_FLAGS, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_ATTEMPTS):
        descriptor: int = _syscall(_SYS_OPENAT2, root, path, how, _OPEN_HOW.size)
        if descriptor >= 0:
            return descriptor
        code = ctypes.get_errno()
        if code != errno.EAGAIN:
            break
    raise OSError(code, os.strerror(code), os.fsdecode(path))
