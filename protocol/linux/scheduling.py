"""Lower the scheduling priority of threads that compute for long, in favor of threads that answer requests.

A thread that wakes up may have to wait until the thread on its CPU has used its time slice (Linux's EEVDF: 0.75 to
3 ms), independent of their nice values.  If all CPUs compress data, a stat through the mount takes that long.  Only a
thread with a longer slice is preempted at once by threads with shorter ones (kernel/sched/fair.c, PREEMPT_SHORT).  The
thread keeps its share of CPU time, because it may hold a lock that others wait for: with idle-time scheduling
(SCHED_IDLE) it would almost never run on a busy machine, and if it held the interpreter lock, all threads would wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from typing import Final

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # system call numbers; glibc has no function
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQ")  # sched_attr(2) without the clamps: its first version
_SLICE_NS: Final = 10_000_000
_NICE_STEP: Final = 10
_NICE_MAX: Final = 19


def lower_priority() -> None:
    """Lower the priority of this thread for the rest of its life.  Before Linux 6.12 only its nice value changes."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # only an optimization, which some sandboxes forbid
        nice = min(os.getpriority(os.PRIO_PROCESS, thread) + _NICE_STEP, _NICE_MAX)
        if not _set_longer_slice(thread, nice):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def _set_longer_slice(thread: int, nice: int) -> bool:
    call = _SCHED_SETATTR.get(os.uname().machine)
    # Keep another policy, which the user chose (chrt(1), CPUSchedulingPolicy=).
    if call is None or os.sched_getscheduler(thread) != os.SCHED_OTHER:
        return False
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(call, thread, attributes, 0) == 0)
