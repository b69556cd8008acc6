"""Convert a caller's path to a path relative to the workspace's root.

Paths are bytes and the conversion is lexical, so names that are not UTF-8 and files that do not exist work as well.
The file system is consulted only for a path outside of the mountpoint, which may lead into it through a symlink, or be
in another mount of the workspace.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Final

from vfsd.machine.mountinfo import find_mount, mount_at, resolve
from vfsd.wire.messages import wire_path

UserPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_DELETED: Final = b" (deleted)"  # the suffix in proc_pid_cwd(5) if the directory was removed


def current_directory() -> bytes:
    """Return the current directory, even if it was removed (by a restore, for example); b"/" if it is unknown."""
    try:
        return os.getcwdb()
    except FileNotFoundError:
        pass
    try:
        return os.readlink(b"/proc/self/cwd").removesuffix(_DELETED)
    except OSError:
        return b"/"


def workspace_path(path: UserPath, mountpoint: str, cwd: bytes | None = None, *, place: str = "workspace at") -> bytes:
    """Return `path` relative to the root of the workspace at `mountpoint`; b"" is the root.

    An absolute path must be under the mountpoint.  A relative path is relative to `cwd` if that is inside the mount,
    else to the root.  Another mount of the workspace, such as the one that `vfsd run` makes, counts as well.
    ValueError if the path leads out of the workspace; the message calls it `place` MOUNTPOINT.
    """
    raw = os.fsencode(path)
    root = os.path.normpath(os.fsencode(mountpoint))
    if os.path.isabs(raw):
        inside = _below(os.path.normpath(raw), root)
        if inside is None:
            inside = _below(_resolved(raw), _resolved(root))
        if inside is None:
            inside = _below_other_mount(raw, root)
    else:
        start = root
        if cwd is not None and _below(cwd, root) is not None:
            start = cwd
        elif cwd is not None:
            start = os.path.join(root, _below_other_mount(cwd, root) or b"")
        inside = _below(os.path.normpath(os.path.join(start, raw)), root)
    if inside is None:
        raise ValueError(f"{os.fsdecode(raw)!r} is not in the {place} {mountpoint}")
    return inside


def wire_paths(paths: Iterable[UserPath], mountpoint: str, cwd: bytes | None = None) -> list[str]:
    """Convert `paths` to wire paths.  The result is empty, for the whole workspace, if one of them is its root.

    OSError (EINVAL) for a path outside the workspace, and for an empty path: it is usually an unset variable, and must
    not mean the whole workspace.
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
    """Return `path` (normalized, absolute) relative to `root`, or None if it is not under it."""
    if path == root:
        return b""
    prefix = root.rstrip(b"/") + b"/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def _below_other_mount(path: bytes, root: bytes) -> bytes | None:
    """Return the absolute `path` relative to another mount of the workspace at `root`, or None if it is in none."""
    try:
        mount, own = find_mount(os.fsdecode(path)), mount_at(os.fsdecode(root))
        if mount is None or own is None or not mount.is_vfsd or (mount.device, mount.root) != (own.device, own.root):
            return None
        return _below(os.path.normpath(_resolved(path)), os.fsencode(mount.mountpoint))
    except OSError:  # a cycle of symlinks
        return None


def _resolved(path: bytes) -> bytes:
    """Resolve the symlinks in `path` up to the first FUSE mount; the rest is kept as written."""
    return os.fsencode(resolve(os.fsdecode(path)))
