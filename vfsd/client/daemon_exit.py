"""Wait until a daemon has exited.  It answers "unmount" before its name and mountpoint are free again."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["daemon_end"]

# After the unmount a daemon only removes some files.
_TIMEOUT_S: Final = 10.0


@contextlib.contextmanager
def daemon_end(pid: int) -> Iterator[Callable[[], None]]:
    """Watch process `pid`, and yield a function that waits until it has exited, for at most ten seconds.

    The process must be alive on entry: later its number may belong to another process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        # The process is gone, or the kernel or sandbox has no pidfd_open(2): do not wait.
        yield lambda: None
        return
    try:
        yield lambda: _wait_readable(descriptor)
    finally:
        os.close(descriptor)


def _wait_readable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)  # pidfd_open(2): readable once the process has terminated
    poll.poll(_TIMEOUT_S * 1000)
