"""How the daemon's process is set up for serving: memory in large pieces, rare collections, short turns.

Each figure was measured; `docs/performance.md` has them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Mapping
from typing import Final

__all__ = ["environment", "set_up"]

# Memory that the kernel hands out page by page costs more to get than to fill: with huge pages a write of 1 MiB
# takes a quarter of the time.  glibc reads this when a process starts (GNU libc manual, "Memory Allocation Tunables");
# other C libraries take no notice.
_TUNABLES: Final = "GLIBC_TUNABLES"
_HUGE_PAGES: Final = "glibc.malloc.hugetlb=1"

_M_TRIM_THRESHOLD: Final = -1  # mallopt(3)
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_HEAP_STEP_BYTES: Final = 16 << 20  # huge pages need whole ones, 2 MiB on x86
_MMAP_BYTES: Final = 32 << 20  # the most that glibc takes; blocks of content come from the heap

# Inodes and blocks hang together by numbers, not by references, so there are next to no cycles to be found among
# them; by Python's default (700) a burst of creations would look for some every few hundred files.
_COLLECT_AFTER: Final = (10_000, 20, 10)
# A thread that computes (an export, a diff) holds the interpreter for so long at a time: that is what a
# request through the mount waits for, up to four times over.  Python's own default is 5 ms.
_SWITCH_INTERVAL_S: Final = 0.00002
# By as much a wait may be longer than asked for, so that one interrupt serves several (prctl(2)); the kernel's own
# default, 50 us, is more than the wait for the interpreter.
_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment for a daemon to be started: `inherited`, and huge pages unless it says something of them."""
    tunables = inherited.get(_TUNABLES, "")
    if "glibc.malloc.hugetlb" in tunables:
        return dict(inherited)
    return {**inherited, _TUNABLES: f"{tunables}:{_HUGE_PAGES}" if tunables else _HUGE_PAGES}


def set_up() -> None:
    """Set up this process.  What the C library does not know it leaves as it is."""
    if os.environ.get(_TUNABLES) == _HUGE_PAGES:
        del os.environ[_TUNABLES]  # it was meant for this process, not for those that it starts
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # modules live as long as the process
    gc.set_threshold(*_COLLECT_AFTER)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS))  # threads to come inherit it
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TOP_PAD, _HEAP_STEP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 4 * _HEAP_STEP_BYTES)
