"""Check mountpoints, detect mounts whose daemon died, and unmount workspaces.

Nothing here hangs on a mount whose daemon is alive but does not answer: this process sends no request to a mount.

Threading: all functions block, and `unmount` waits for the daemon; the daemon calls them from a worker thread.

Source: fusermount3(1), umount(8).
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from typing import Final

from vfsd.machine.dead_mounts import PROBE_TIMEOUT_S, is_dead
from vfsd.machine.holders import holders
from vfsd.machine.mountinfo import Mount, mount_at, nested_mounts
from vfsd.machine.runtime import no_socket, read_records

UNMOUNT_TIMEOUT_S: Final = 30.0
_BUSY_PAUSES_S: Final = (0.02, 0.1, 0.2)  # before umount(2) is called again


# -- before mounting --------------------------------------------------------------------------------
def check_mountpoint(path: str) -> Mount | None:
    """Check that a workspace can be mounted at `path`.  Return the dead vfsd mount to clear first, if there is one.

    FileNotFoundError, NotADirectoryError, PermissionError, OSError (ENOTEMPTY), or OSError (EBUSY) that names the
    existing mount.
    """
    mount = mount_at(path)
    if mount is not None:
        if mount.is_vfsd and is_dead(path):
            return mount
        is_lost = mount.is_vfsd and all(record.mountpoint != mount.mountpoint for record in read_records())
        lost = f", which has {no_socket(mount)}" if is_lost else ""
        raise OSError(errno.EBUSY, f"already a mountpoint, of {mount.describe()}{lost}", path)
    _check_directory(path)
    return None


def _check_directory(path: str) -> None:
    try:
        with os.scandir(path) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "the mountpoint does not exist; make it with mkdir", path) from None
    except NotADirectoryError:
        raise NotADirectoryError(errno.ENOTDIR, "the mountpoint is not a directory", path) from None
    if first is not None:
        reason = f"the mountpoint is not empty (it contains {first.name!r}), and a mount would hide that"
        raise OSError(errno.ENOTEMPTY, reason, path)
    if not os.access(path, os.W_OK, effective_ids=True):  # fusermount3 requires it; root always can
        raise PermissionError(errno.EACCES, "you cannot write to the mountpoint, which fusermount3 requires", path)


def clear_dead_mount(path: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> Mount | None:
    """Unmount the dead vfsd mount at `path` and return it; None if there is none.

    OSError (EBUSY) for a mount that is alive, is not vfsd's, or has another mount below it.
    """
    cleared: Mount | None = None
    while (mount := mount_at(path)) is not None:
        if not mount.is_vfsd or not is_dead(path, timeout_s=timeout_s):
            if cleared is not None:
                break  # the mount under the dead one is not vfsd's to remove
            raise OSError(errno.EBUSY, f"not a dead workspace but {mount.describe()}", path)
        nested = nested_mounts(path)
        if nested:
            where = ", ".join(f"{below.describe()} at {below.mountpoint}" for below in nested)
            raise OSError(errno.EBUSY, f"the dead {mount.describe()} has mounts below it: {where}", path)
        if mount_at(path) == mount and not _detach(mount.mountpoint, lazy=True):  # unchanged since the probe
            raise busy_error(mount.mountpoint)
        cleared = mount
    return cleared


# -- unmounting -------------------------------------------------------------------------------------
def unmount(path: str, *, lazy: bool = False) -> None:
    """Unmount the workspace at `path`; `lazy` detaches it now and ends it when no process uses it any more.

    Waits a moment for programs that look at every mount (df, a monitor, `vfsd doctor`).

    OSError: EINVAL if no workspace is mounted there; EBUSY, naming the processes that use it.
    """
    mountpoint = _mountpoint_of(path)
    for pause_s in _BUSY_PAUSES_S:
        if _detach(mountpoint, lazy=lazy):
            return
        time.sleep(pause_s)
    if not _detach(mountpoint, lazy=lazy):
        raise busy_error(mountpoint)


def unmount_unused(path: str) -> bool:
    """Unmount the workspace at `path` unless it is used; return whether it was unmounted.

    Faster than `unmount` where it is used, because nothing looks for the processes.
    OSError (EINVAL) if no workspace is mounted there.
    """
    return _detach(_mountpoint_of(path), lazy=False)


def _mountpoint_of(path: str) -> str:
    mount = mount_at(path)
    if mount is None:
        raise OSError(errno.EINVAL, "nothing is mounted there", path)
    if not mount.is_vfsd:
        raise OSError(errno.EINVAL, f"not a workspace but {mount.describe()}", path)
    return mount.mountpoint


def busy_error(mountpoint: str) -> OSError:
    """Return an EBUSY that names the processes and mounts that keep the mount busy."""
    held = [holder.describe() for holder in holders(mountpoint)]
    held += [f"{below.describe()} mounted at {below.mountpoint}" for below in nested_mounts(mountpoint)]
    reason = "; ".join(held) if held else "a process that only its owner or root can see"
    return OSError(errno.EBUSY, f"busy: held by {reason}", mountpoint)


def _detach(mountpoint: str, *, lazy: bool) -> bool:
    """Return whether it was detached; False if it is busy."""
    command = _unmount_command(lazy=lazy)
    try:
        done = subprocess.run(
            [*command, "--", mountpoint],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={**os.environ, "LC_ALL": "C"},
            timeout=UNMOUNT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"{command[0]} did not finish within {UNMOUNT_TIMEOUT_S:.0f} s"
        raise OSError(errno.ETIMEDOUT, reason, mountpoint) from None
    if done.returncode == 0:
        return True
    said = done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"
    if "busy" in said.lower():
        return False
    code = errno.EPERM if "permi" in said.lower() else errno.EIO
    raise OSError(code, f"{command[0]}: {said.splitlines()[-1]}", mountpoint)


def _unmount_command(*, lazy: bool) -> list[str]:
    # fusermount3 first, for root too: it accesses only the parent directory, never a mount that hangs.
    if shutil.which("fusermount3"):
        return ["fusermount3", "-u", *(["-z"] if lazy else [])]
    if shutil.which("umount"):
        return ["umount", "--internal-only", "--no-canonicalize", *(["--lazy"] if lazy else [])]
    raise FileNotFoundError(errno.ENOENT, "neither fusermount3 nor umount was found; install fuse3")
