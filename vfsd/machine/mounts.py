"""Check mountpoints, detect mounts whose daemon died, and unmount workspaces.

Nothing here hangs on a mount whose daemon is alive but does not answer: this process sends no request to a mount.  Only
a request can show that a daemon is dead, so a child process sends one, and is abandoned after a timeout.

Threading: all functions block, and `unmount` waits for the daemon; the daemon calls them from a worker thread.

Source: fusermount3(1), umount(2); fs/fuse/dev.c (ENOTCONN once /dev/fuse is closed).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from typing import Final

from vfsd.machine.mountinfo import Mount, mount_at, nested_mounts
from vfsd.machine.processes import holders
from vfsd.machine.runtime import no_socket, read_records

PROBE_TIMEOUT_S: Final = 2.0
_HELD_TIMEOUT_S: Final = 0.5
# ENOTCONN: the connection was closed.  ECONNABORTED: it was closed while the request was pending.
_DEAD_ERRNOS: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED})

# statvfs always reaches the daemon, whereas attributes of a dead mount may come from the kernel's cache.
# Without allow_other the kernel sends requests of the mount's owner only, not even root's, so the child takes its ids.
# It opens an O_PATH descriptor first, which needs no daemon, because the owner may lack access to a parent directory.
# The exit status is the errno, which no locale translates.
_PROBE: Final = """
import posix, sys
path, uid, gid = sys.argv[1:]
try:
    mount = posix.open(path, posix.O_PATH)
    if posix.geteuid() == 0:
        posix.setresgid(int(gid), int(gid), int(gid))
        posix.setresuid(int(uid), int(uid), int(uid))
    posix.fstatvfs(mount)
except OSError as error:
    sys.exit(error.errno)
"""
_OWNER: Final = re.compile(r"user_id=(\d+),group_id=(\d+)")
UNMOUNT_TIMEOUT_S: Final = 30.0
_HELPER: Final = "fusermount3"
_MNT_DETACH: Final = 2  # linux/fs.h
# umount2(2) with UMOUNT_NOFOLLOW, for root and in user namespaces.  The exit status is the errno.
_UNMOUNT: Final = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(libc.umount2(os.fsencode(sys.argv[1]), 8 | int(sys.argv[2])) and ctypes.get_errno())
"""
_BUSY_PAUSES_S: Final = (0.02, 0.1, 0.2)  # before umount(2) is called again


# -- dead mounts ------------------------------------------------------------------------------------
def is_dead(mountpoint: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether the daemon of the FUSE mount at `mountpoint` died.  A daemon that does not answer counts as alive.

    False if there is no FUSE mount.  Takes at most about `timeout_s`; longer where a child waits for a CPU.
    """
    mount = mount_at(mountpoint)
    return mount is not None and mount.is_fuse and _probe(mount, timeout_s) in _DEAD_ERRNOS


def is_held(mountpoint: str) -> bool:
    """Whether a process has the descriptor of the FUSE mount at `mountpoint`, so that programs do not get ENOTCONN.

    Takes at most about half a second.
    """
    mount = mount_at(mountpoint)
    return mount is not None and mount.is_fuse and _probe(mount, _HELD_TIMEOUT_S) not in _DEAD_ERRNOS


def _probe(mount: Mount, timeout_s: float) -> int | None:
    """Return the errno of a statvfs on `mount`, 0 if it succeeded, None if it timed out."""
    # A process instead of a thread: a thread that waits for a daemon can keep this process from exiting.
    owner = _OWNER.search(mount.options)
    uid, gid = owner.groups() if owner else ("0", "0")
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROBE, mount.mountpoint, uid, gid],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    seen = b""
    while True:
        try:
            return child.wait(timeout_s / 2)
        except subprocess.TimeoutExpired:
            # Where the machine is overloaded, an interpreter needs seconds to start.
            status = _status(child.pid)
            if status == seen and b"\nState:\tR" not in status:
                break
            seen = status
    child.kill()
    try:
        child.wait(PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # The daemon has read the request and does not answer; not even SIGKILL ends that wait
        # (request_wait_answer in fs/fuse/dev.c).  Init reaps the child; the return code silences Popen's warning.
        child.returncode = -1
    return None


def _status(pid: int) -> bytes:
    """A child that was not reaped, as the kernel shows it: its state, and how often it was stopped and continued."""
    with open(f"/proc/{pid}/status", "rb") as file:
        return file.read()


_SYS_ADMIN: Final = 1 << 21  # CAP_SYS_ADMIN; include/uapi/linux/capability.h


def why_no_mount() -> str | None:
    """Return a clause on why this user can mount nothing here, as in a container; None if no reason is known."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return "/dev/fuse is missing" if error.errno == errno.ENOENT else f"/dev/fuse: {error.strerror}"
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        status = dict(line.rstrip().split(":\t", 1) for line in file if line.startswith(("CapEff:", "NoNewPrivs:")))
    if int(status["CapEff"], 16) & _SYS_ADMIN:
        return None
    if shutil.which("fusermount3") is None:
        return "fusermount3, which mounts for users, is not installed"
    return "this process cannot gain privileges (NoNewPrivs)" if status.get("NoNewPrivs") == "1" else None


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
        if mount_at(path) == mount and not detach(mount.mountpoint, lazy=True):  # unchanged since the probe
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
        if detach(mountpoint, lazy=lazy):
            return
        time.sleep(pause_s)
    if not detach(mountpoint, lazy=lazy):
        raise busy_error(mountpoint)


def unmount_unused(path: str) -> bool:
    """Unmount the workspace at `path` unless it is used; return whether it was unmounted.

    Faster than `unmount` where it is used, because nothing looks for the processes.
    OSError (EINVAL) if no workspace is mounted there.
    """
    return detach(_mountpoint_of(path), lazy=False)


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


def detach(mountpoint: str, *, lazy: bool) -> bool:
    """Unmount whatever is mounted on top at `mountpoint`; return whether it was unmounted, False if it is busy.

    OSError: EPERM if this user may not; ETIMEDOUT.
    """
    # A child in both cases, because umount(2) may wait for the daemon.  It accesses only the parent directory.
    has_helper = shutil.which(_HELPER) is not None
    if has_helper:
        command = [_HELPER, "-u", *(["-z"] if lazy else []), "--", mountpoint]
    else:
        command = [sys.executable, "-I", "-S", "-c", _UNMOUNT, mountpoint, str(_MNT_DETACH if lazy else 0)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={**os.environ, "LC_ALL": "C"},
            timeout=UNMOUNT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        name = _HELPER if has_helper else "umount(2)"
        raise OSError(errno.ETIMEDOUT, f"{name} did not finish within {UNMOUNT_TIMEOUT_S:.0f} s", mountpoint) from None
    if done.returncode == 0:
        return True
    if not has_helper:
        if done.returncode == errno.EBUSY:
            return False
        needs = f"; install {_HELPER} (package fuse3), or unmount as root" if done.returncode == errno.EPERM else ""
        raise OSError(done.returncode, f"umount(2) failed: {os.strerror(done.returncode)}{needs}", mountpoint)
    said = done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"
    if "busy" in said.lower():
        return False
    code = errno.EPERM if "permi" in said.lower() else errno.EIO
    advice = " (`vfsd doctor` says what to do)" if "/etc/mtab" in said else ""
    raise OSError(code, f"{_HELPER}: {said.splitlines()[-1].removeprefix(f'{_HELPER}: ')}{advice}", mountpoint)
