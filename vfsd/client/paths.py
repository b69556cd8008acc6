"""Which path of a workspace a caller means: from what was typed to a path relative to its root.

Everything here is bytes and lexical, so that names that are no UTF-8, and files that are gone, are as
good as any other; the disk is asked only for an absolute path that does not begin with the mountpoint,
which may reach it through a symlink.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Final

from vfsd.machine.mounts import resolve
from vfsd.wire.messages import wire_path

__all__ = ["UserPath", "current_directory", "wire_paths", "workspace_path"]

UserPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_DELETED: Final = b" (deleted)"  # what proc_pid_cwd(5) ends in when the directory is gone


def current_directory() -> bytes:
    """The current directory, also when it was removed, as a restore may have done; b"/" when nobody knows."""
    try:
        return os.getcwdb()
    except FileNotFoundError:
        pass
    try:
        return os.readlink(b"/proc/self/cwd").removesuffix(_DELETED)
    except OSError:
        return b"/"


def workspace_path(path: UserPath, mountpoint: str, cwd: bytes | None = None) -> bytes:
    """`path` relative to the root of the workspace at `mountpoint`; b"" is the root.

    An absolute path must be under the mountpoint.  A relative one counts from `cwd` when that is inside
    the mount, else from the root.  ValueError when it leads out of the workspace.
    """
    raw = os.fsencode(path)
    root = os.path.normpath(os.fsencode(mountpoint))
    if os.path.isabs(raw):
        inside = _below(os.path.normpath(raw), root)
        if inside is None:
            inside = _below(_resolved(raw), _resolved(root))
    else:
        start = root if cwd is None or _below(cwd, root) is None else cwd
        inside = _below(os.path.normpath(os.path.join(start, raw)), root)
    if inside is None:
        raise ValueError(f"{os.fsdecode(raw)!r} is not in the workspace at {mountpoint}")
    return inside


def wire_paths(paths: Iterable[UserPath], mountpoint: str, cwd: bytes | None = None) -> list[str]:
    """`paths` as the control socket takes them; empty, for the whole workspace, when one is its root.

    A ValueError becomes an OSError (EINVAL): a path outside the workspace is an operation that failed.  So does an
    empty path: it is mostly a variable that is not set, and must not mean the whole workspace.
    """
    paths = list(paths)
    if any(not os.fspath(path) for path in paths):
        raise OSError(errno.EINVAL, "a path is an empty string; give no path for the whole workspace")
    try:
        found = [workspace_path(path, mountpoint, cwd) for path in paths]
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from None
    return [] if b"" in found else [wire_path(path) for path in found]


def _below(path: bytes, root: bytes) -> bytes | None:
    """`path` (normal, absolute) relative to `root`, or None when it is not under it."""
    if path == root:
        return b""
    prefix = root.rstrip(b"/") + b"/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def _resolved(path: bytes) -> bytes:
    """`path` free of symlinks up to the first FUSE mount on its way; what lies in that is left as it is written."""
    return os.fsencode(resolve(os.fsdecode(path)))
