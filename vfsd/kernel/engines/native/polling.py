"""Waiting for the next request: busy polling for some microseconds, then sleeping.

A client that has its answer mostly asks again within microseconds.  Sleeping in between costs more than the answer: if
the scheduler puts client and daemon on two CPUs, as on an idle machine, a round trip takes 1.5 times as long.  So the
daemon polls for some microseconds ("busy polling", KVM's "halt polling") if that pays and no other thread needs the
CPU:

- A credit grows with each request that arrives during the polling and falls with each that does not.  So a client that
  computes between its calls, or makes few of them, costs no more than without polling.
- Once in a while the poller reads the number of runnable threads.  If there are more of them than CPUs, polling would
  take time from another thread, and the daemon would have used up its fair share of the CPU when the next request
  arrives.
- If the poller loses the CPU nevertheless (a cgroup's quota, the host of a virtual machine), it stops polling for a
  while.

Threading: only the trio loop's thread.  Nothing here awaits.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from time import monotonic
from typing import Final

_SPIN_S: Final = 20e-6
_MAX_CREDIT: Final = 8
_LATE_COST: Final = 4  # the credit that a late request costs: polling pays if four of five requests are in time
_COUNT_EVERY_S: Final = 0.001  # counting the runnable threads takes less than a microsecond
_LOST_CPU_S: Final = 300e-6  # between two polls; an interrupt takes less
_PAUSE_S: Final = 0.02


class RunnableThreads:
    """Callable that returns the machine's number of runnable threads, from /proc/loadavg (proc(5)); 0 if unknown."""

    def __init__(self, path: str | os.PathLike[str] = "/proc/loadavg") -> None:
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = io.FileIO(path)

    def __enter__(self) -> RunnableThreads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self) -> int:
        if self._file is None:
            return 0
        try:
            _, _, _, threads, _ = os.pread(self._file.fileno(), 100, 0).split(b" ")
            return int(threads.partition(b"/")[0])
        except (OSError, ValueError):  # in a container the file may be on lxcfs, which may be gone
            return 0


class Poller:
    """Waits for a descriptor to become readable, and learns whether busy polling pays.

    `poll(milliseconds)` is the `poll` of a `select.poll()` object that watches the descriptor.  `runnable()` returns
    the number of runnable threads, `clock()` seconds.
    """

    __slots__ = ("_clock", "_count_at", "_cpus", "_credit", "_poll", "_runnable", "_spin_from", "at_once")

    def __init__(
        self,
        poll: Callable[[int], object],
        *,
        runnable: Callable[[], int],
        cpus: int | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._poll = poll
        self._runnable = runnable
        self._cpus = cpus or len(os.sched_getaffinity(0))
        self._clock = clock
        self._credit = 0
        # The last `wait` found the descriptor readable at once; the caller clears this if a read finds nothing.
        self.at_once = False
        self._count_at = self._spin_from = clock()  # when to count threads next, and when to spin again

    def check_invariants(self) -> None:
        """The credit is bounded, so that a change of the client's habits takes effect after a few requests."""
        assert -_MAX_CREDIT <= self._credit <= _MAX_CREDIT

    def wait(self, since: float, sleep_ms: int) -> object:
        """Return a true value once the descriptor is readable, a false one after `sleep_ms`.  0 does not wait at all.

        `since` is when the last request was answered, by `clock`.
        """
        poll = self._poll
        if ready := poll(0):
            self.at_once = True
            return ready
        self.at_once = False
        if not sleep_ms:
            return None
        until = since + _SPIN_S
        if self._credit > 0 and (ready := self._spin(until)):
            self._credit = min(self._credit + 1, _MAX_CREDIT)
            return ready
        ready = poll(sleep_ms)
        if self._clock() < until:
            self._credit = min(self._credit + 1, _MAX_CREDIT)
        else:
            self._credit = max(self._credit - _LATE_COST, -_MAX_CREDIT)
        return ready

    def _spin(self, until: float) -> object:
        poll, clock = self._poll, self._clock
        now = clock()
        if now >= self._count_at:
            self._count_threads(now)
        if now < self._spin_from:
            return None
        while now < until:
            if ready := poll(0):
                return ready
            before, now = now, clock()
            if now - before > _LOST_CPU_S:
                self._spin_from = now + _PAUSE_S
        return None

    def _count_threads(self, now: float) -> None:
        self._count_at = now + _COUNT_EVERY_S
        if self._runnable() > self._cpus:
            self._count_at = self._spin_from = now + _PAUSE_S
