"""The clock from which the kernel takes the timestamps of files: it advances by a tick at a time."""

from __future__ import annotations

import time
from typing import Final

_CLOCK_REALTIME_COARSE: Final = 5  # linux/time.h
_TICK_MS: Final = 10  # at its slowest (CONFIG_HZ=100)


def now_ns() -> int:
    """Return the timestamp that a file would get now."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def outlast_tick(ctime_ns: int) -> None:
    """Wait until the clock is past `ctime_ns`, if that lies within its last tick.

    A later change of the file then gets another ctime, even if it keeps the size.  Waits one tick at most: a ctime
    further ahead comes from another machine's clock.
    """
    for _ in range(_TICK_MS):
        if not 0 <= ctime_ns - now_ns() < _TICK_MS * 1_000_000:
            return
        time.sleep(0.001)
