"""Release a daemon that was killed and does not end, because one of its threads waits for its own mount."""

from __future__ import annotations

import errno
import logging
import os

from vfsd.kernel.engines.native import abandoned
from vfsd.machine.logs import log_failure

_logger = logging.getLogger(__name__)


def release(pid: int, device: int, memory_fd: int) -> None:
    """Answer the requests of the threads of `pid` with EIO, if that process was killed and does not end.

    No process serves the mount.  `memory_fd`: see `abandoned.fail`.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
        if state != "Z":
            return
        threads = {int(thread) for thread in os.listdir(f"/proc/{pid}/task")}
        try:
            count = abandoned.answer(device, threads)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel that does not send requests again
                raise
            count = abandoned.fail(device, memory_fd)
    except OSError as error:  # ENODEV: the mount is gone, and its requests with it
        log_failure(_logger, "releasing the dead daemon", error, level=logging.INFO)
        return
    if count:
        _logger.warning("%d requests of the dead daemon itself were answered with EIO", count)
