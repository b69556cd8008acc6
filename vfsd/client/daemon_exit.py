"""Waiting until a daemon has ended: its answer to "unmount" comes before its name and place are free again."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["daemon_end"]

# A daemon that has unmounted has only files to remove; one that takes longer is not worth waiting for.
_TIMEOUT_S: Final = 10.0


@contextlib.contextmanager
def daemon_end(pid: int) -> Iterator[Callable[[], None]]:
    """Watch process `pid` from now on; the function given waits until it has ended, or for ten seconds.

    To be entered while the process is known to live: later its number may be another's.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        # Gone already; or a kernel or sandbox without pidfd_open(2), where nobody waits.
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
