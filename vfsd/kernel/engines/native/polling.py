"""Waiting for the next request: awake for a moment, then asleep.

A client that has its answer mostly asks again within microseconds.  To fall asleep in between and be woken costs
more than the answer: where the scheduler puts client and daemon on two CPUs, as it does on an idle machine, a round
trip takes 1.5 times as long.  So the daemon goes on asking for some microseconds ("busy polling", KVM's "halt
polling"), where that pays and nobody else wants the CPU:

- A credit grows with each request that comes within the spin and falls with each that does not, so a client that
  computes between its calls, or makes few of them, costs what it costs without spinning.
- Once in a while a look at the number of runnable threads: with more of them than CPUs a spin would take a turn
  away from somebody, and the daemon would have used up its fair share of the CPU when the next request comes.
- A spin that lost the CPU all the same (a cgroup's quota, the host of a virtual machine) ends the spinning for a while.

Threading: the trio loop's thread alone.  Nothing here awaits.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from time import monotonic
from typing import Final

__all__ = ["Poller", "RunnableThreads"]

_SPIN_S: Final = 20e-6
_MOST_CREDIT: Final = 8
_FORFEIT: Final = 4  # what a late request costs: the spin pays where four of five come in time
_LOOK_EVERY_S: Final = 0.001  # a look takes less than a microsecond
_LOST_CPU_S: Final = 300e-6  # between two questions; an interrupt takes less
_PAUSE_S: Final = 0.02


class RunnableThreads:
    """How many threads of the machine run or want to, from /proc/loadavg (proc(5)).  Call it; 0 where nothing tells."""

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
        except (OSError, ValueError):  # in a container it may be another file system's (lxcfs), which may be gone
            return 0


class Poller:
    """Says whether a descriptor is readable, and learns how to wait for it.

    `poll(milliseconds)` is `select.poll().poll` with the descriptor in it, `runnable()` the number of threads that
    want a CPU, of which there are `cpus`; `clock` gives seconds.
    """

    __slots__ = ("_clock", "_cpus", "_credit", "_look_at", "_poll", "_runnable", "_spin_from", "at_once")

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
        self.at_once = False  # whether there was no need to wait the last time
        self._look_at = self._spin_from = clock()  # when to look next, and when to spin again

    def check_invariants(self) -> None:
        """Credit has bounds, so that neither trust nor distrust lasts longer than a few requests."""
        assert -_MOST_CREDIT <= self._credit <= _MOST_CREDIT

    def ready(self) -> object:
        """Whether there is something to read; never waits."""
        return self._poll(0)

    def wait(self, since: float, sleep_ms: int) -> object:
        """Something true once there is something to read; something false after `sleep_ms` without.

        `since` is when the last request was answered, by the same clock.
        """
        poll = self._poll
        if ready := poll(0):
            self.at_once = True
            return ready
        self.at_once = False
        until = since + _SPIN_S
        if self._credit > 0 and (ready := self._spin(until)):
            self._credit = min(self._credit + 1, _MOST_CREDIT)
            return ready
        ready = poll(sleep_ms)
        if self._clock() < until:
            self._credit = min(self._credit + 1, _MOST_CREDIT)
        else:
            self._credit = max(self._credit - _FORFEIT, -_MOST_CREDIT)
        return ready

    def _spin(self, until: float) -> object:
        poll, clock = self._poll, self._clock
        now = clock()
        if now >= self._look_at:
            self._look(now)
        if now < self._spin_from:
            return None
        while now < until:
            if ready := poll(0):
                return ready
            before, now = now, clock()
            if now - before > _LOST_CPU_S:
                self._spin_from = now + _PAUSE_S
        return None

    def _look(self, now: float) -> None:
        self._look_at = now + _LOOK_EVERY_S
        if self._runnable() > self._cpus:
            self._look_at = self._spin_from = now + _PAUSE_S
