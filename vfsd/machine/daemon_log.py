"""The log of a workspace's daemon, in the runtime directory."""

from __future__ import annotations

import fcntl
import os

from protocol.linux.regular_file import open_regular
from vfsd.machine.runtime import ensure_socket_dir


def log_path(name: str) -> str:
    """Return the path of the log of workspace `name`.  The previous log has the suffix ".1"."""
    return os.path.join(ensure_socket_dir(), name + ".log")


def open_log(path: str) -> tuple[int, bool]:
    """Open an empty log; return its descriptor and whether it is locked.  The previous log is kept as ".1".

    The daemon inherits the lock for its life, so a second start of the same name, which the daemon will refuse, does
    not move the log of a running workspace away.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    descriptor = open_regular(path, flags)
    if not _lock(descriptor):
        return descriptor, False
    if os.fstat(descriptor).st_nlink == 0:  # `remove_old_logs` removed it before it was locked
        os.close(descriptor)
        return open_log(path)
    if os.fstat(descriptor).st_size == 0:
        return descriptor, True
    os.replace(path, path + ".1")
    os.close(descriptor)
    descriptor = open_regular(path, flags)
    return descriptor, _lock(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
