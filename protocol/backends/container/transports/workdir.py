"""open_workdir: opens the workspace directory below a container's root, by the path resolution of a process inside.

Symlinks on the way resolve as in the container: absolute ones start at its root, ".." at its root stays there, and
links of /proc lead nowhere (RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS, openat2(2)).  A missing directory is created in
an open parent, by a single name, so a concurrent replacement is never followed."""

from __future__ import annotations

import errno
import os
from typing import Final

from protocol.linux.beneath import open_beneath
from protocol.linux.portable import proc_path
from protocol.linux.syscalls import RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS, openat2

_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ATTEMPTS: Final = 16  # EAGAIN: the kernel cannot tell a concurrent rename or mount from an escape
_MODE: Final = 0o755


def open_workdir(root: int, workdir: str, owner: tuple[int, int]) -> int:
    """An O_PATH descriptor of the directory `workdir` in the root directory of descriptor `root`.

    Missing directories are created and belong to `owner` (user and group, in the host's ids).  OSError with advice:
    EROFS if a directory is missing on a read-only file system.
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
        return  # created concurrently, or a dangling symlink, which the next attempt reports
    if os.geteuid() != 0:
        return
    # By descriptor: the name may have been replaced by a file whose owner must not change.
    made = open_beneath(directory, name, os.O_PATH | os.O_DIRECTORY)
    try:
        if os.fstat(made).st_uid == 0:
            os.chown(proc_path(made), *owner)
    finally:
        os.close(made)


def _explained(error: OSError, workdir: str) -> OSError:
    reason = {
        errno.EROFS: "does not exist in the container, whose root is read-only; name a volume's place with --workdir",
        errno.ENOTDIR: "is not a directory in the container",
        errno.ENOENT: "is a dangling symlink in the container",
        errno.EACCES: "is not accessible to this user from outside the container; use --transport agent",
    }.get(error.errno or 0, error.strerror)
    return OSError(error.errno, f"the working directory {reason}", workdir)


def _in_root(root: int, path: bytes) -> int:
    left = _ATTEMPTS
    while True:
        left -= 1
        try:
            return openat2(root, path, _FLAGS, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
        except BlockingIOError:
            if not left:
                raise
