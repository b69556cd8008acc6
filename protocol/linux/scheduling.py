"""How threads that compute for long share the CPUs with those that answer requests.

A thread that wakes up may have to wait until the one on its CPU has had its turn (Linux's EEVDF: 0.75 to 3 ms),
whatever their nice values; with all CPUs compressing, that is what a stat through the mount then takes.  Only a thread
that asked for longer turns is interrupted at once by those with shorter ones (kernel/sched/fair.c, PREEMPT_SHORT).
It keeps its share by weight, because it may hold a lock that others wait for: idle-time scheduling (SCHED_IDLE)
would leave it next to nothing on a busy machine, and with the interpreter lock in its hand everybody would wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from typing import Final

__all__ = ["give_way"]

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # system call numbers; glibc has no function
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQ")  # sched_attr(2) without the clamps: its first version
_TURN_NS: Final = 10_000_000
_NICER: Final = 10
_NICEST: Final = 19


def give_way() -> None:
    """Let others go before this thread from now on, for good.  Before Linux 6.12 it is nicer, and no more."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a courtesy: where a sandbox forbids it, things go on without
        nice = min(os.getpriority(os.PRIO_PROCESS, thread) + _NICER, _NICEST)
        if not _take_longer_turns(thread, nice):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def _take_longer_turns(thread: int, nice: int) -> bool:
    call = _SCHED_SETATTR.get(os.uname().machine)
    # Another policy (chrt(1), CPUSchedulingPolicy=) was chosen by somebody, and stays.
    if call is None or os.sched_getscheduler(thread) != os.SCHED_OTHER:
        return False
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, _TURN_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(call, thread, attributes, 0) == 0)
