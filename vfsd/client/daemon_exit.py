"""Wait until a daemon has exited.  It answers "unmount" before its name and mountpoint are free again."""

from __future__ import annotations

import contextlib
import functools
import os
import select
from collections.abc import Callable, Iterator
from typing import Final

# After the unmount a daemon only removes some files.
END_TIMEOUT_S: Final = 10.0
# A daemon whose mount was detached while in use serves the programs that use it.  Some only look at every mount (df).
HELD_TIMEOUT_S: Final = 1.0


@contextlib.contextmanager
def daemon_end(pid: int) -> Iterator[Callable[..., None]]:
    """Watch process `pid`, and yield a function that waits until it has exited, for at most `timeout_s` (10) seconds.

    The process must be alive on entry: later its number may belong to another process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        # The process is gone, or the kernel or sandbox has no pidfd_open(2): do not wait.
        yield lambda _timeout_s=0: None
        return
    try:
        yield functools.partial(_wait_readable, descriptor)
    finally:
        os.close(descriptor)


def _wait_readable(descriptor: int, timeout_s: float = END_TIMEOUT_S) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)  # pidfd_open(2): readable once the process has terminated
    poll.poll(timeout_s * 1000)
