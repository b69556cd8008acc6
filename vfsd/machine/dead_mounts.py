"""Find out whether the daemon of a mount is dead.

Only a request can show that, so a child process sends one, and is abandoned after a timeout: this process sends no
request to a mount, and does not hang.

Threading: all functions block.

Source: fs/fuse/dev.c (ENOTCONN once /dev/fuse is closed).
"""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from typing import Final

from vfsd.machine.mountinfo import Mount, mount_at

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
    """What the kernel shows of a child that was not reaped: its state, and how often it has stopped and gone on."""
    with open(f"/proc/{pid}/status", "rb") as file:
        return file.read()
