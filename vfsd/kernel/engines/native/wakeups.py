"""Measures of the loop against slow wake-ups: it polls for the next request, and keeps idle CPUs awake during bursts.

On a virtual machine most of a request's time is the wake-up of two halted CPUs: the daemon's and then the client's.
`Wakeups` decides when to keep the CPUs awake; `vfsd.machine.resources` has the kernel's interface for it.

- **Bursts only.**  A credit grows with each request and falls with the time that passes.  The CPUs are kept awake from
  a few requests in quick succession on, until the credit is used up: at most 10 ms after the last request, and soon
  for a client that computes between its calls for longer than it gains.  After a burst that was too short to pay
  there is a pause.
- **A limited share of the time.**  A budget allows 20 s without a break, then a quarter of the time.
- **Only where it helps.**  More runnable threads than CPUs mean that no CPU is idle.  With "auto", every so often a
  burst is first served without and then with the CPUs awake.  If the medians of these trials show no gain, there is a
  pause, twice as long each time.

Invariants (`check_invariants`): the credit and the budget are within their bounds; the CPUs are kept awake only while
there is credit.

`Poller` waits for the next request.  A client that has its answer mostly asks again within microseconds.  Sleeping in
between costs more than the answer: if the scheduler puts client and daemon on two CPUs, as on an idle machine, a round
trip takes 1.5 times as long.  So the daemon polls for some microseconds ("busy polling", KVM's "halt polling") if that
pays and no other thread needs the CPU:

- A credit grows with each request that arrives during the polling and falls with each that does not.  So a client that
  computes between its calls, or makes few of them, costs no more than without polling.
- Once in a while the poller reads the number of runnable threads.  If there are more of them than CPUs, polling would
  take time from another thread, and the daemon would have used up its fair share of the CPU when the next request
  arrives.
- If the poller loses the CPU nevertheless (a cgroup's quota, the host of a virtual machine), it stops polling for a
  while.

Threading: only the trio loop's thread.  Nothing here awaits or raises.
"""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import os
import statistics
from collections.abc import Callable
from time import monotonic
from typing import Final, Literal, Protocol

from vfsd.machine.resources import CPU_LATENCY_DEVICE, CpuLatency, IdleCpus, idle_cpus

_logger = logging.getLogger(__name__)

Choice = Literal["auto", "on", "off"]

GAIN_S: Final = 100e-6  # the credit for a request with the CPUs awake: what it gains
QUICK_S: Final = 300e-6  # the credit for one without, whose time includes two wake-ups
MAX_CREDIT_S: Final = 0.01
_START_S: Final = 300e-6  # the credit at which the CPUs are kept awake
_FIRST_CREDIT_S: Final = 0.001  # the most credit at that moment, so that a client with long gaps uses it up soon
_MIN_BURST: Final = 4  # requests
_MIN_AWAKE: Final = 16  # requests that pay for the two calls of the kernel
MAX_BUDGET_S: Final = 20.0
_SHARE: Final = 0.25
_LEAST_BUDGET_S: Final = 1.0  # to begin with, so that an exhausted budget does not mean many short holds
_COUNT_EVERY_S: Final = 0.005
_SHORT_PAUSE_S: Final = 0.02

# Trials.
_FIRST_TRIALS_EVERY: Final = 4  # bursts; the others are served with the CPUs awake
_TRIAL_EVERY: Final = 16
_TRIAL_REQUESTS: Final = 32  # in each of its two halves
_TRIALS: Final = 5  # that decide
_REST_S: Final = 0.06  # CPUs stay fast for about 50 ms after they were kept awake
_MAX_GAIN: Final = 0.9  # the time of a request that counts as a gain, as a share of the time without
_FIRST_PAUSE_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 600.0


class KeepsAwake(Protocol):
    """`vfsd.machine.resources.CpuLatency`, or a test's own."""

    def keep_awake(self, awake: bool) -> None: ...

    def close(self) -> None: ...


class Wakeups:
    """Decides when `cpus` keeps idle CPUs awake.  `why_off`: why it never does; then `cpus` is None.

    `runnable()` returns the number of runnable threads of the machine, which has `count` CPUs.  Without `has_trials` it
    is taken for granted that waking CPUs is slow.
    """

    def __init__(
        self,
        cpus: KeepsAwake | None,
        *,
        runnable: Callable[[], int] = lambda: 0,
        count: int = 1,
        has_trials: bool = True,
        why_off: str = "",
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._cpus = cpus
        self._why_off = why_off
        self.runnable = runnable
        self._count = count
        self._has_trials = has_trials
        self._clock = clock
        self.is_awake = False
        self._total_s = 0.0
        self._now = now = clock()
        self._credit_s = 0.0
        self._burst = 0  # requests since the credit was last used up
        self._awake_requests = 0  # since the CPUs are kept awake
        self._budget_s = MAX_BUDGET_S
        self._not_before = now  # no hold until then: the CPUs are busy, or there was no gain
        self._count_at = now
        self._released_at = now - _REST_S
        self._bursts = 0
        self._trial: _Trial | None = None
        self._ratios: collections.deque[float] = collections.deque(maxlen=_TRIALS)
        self._pause_s = _FIRST_PAUSE_S

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert 0 <= self._credit_s <= MAX_CREDIT_S
        assert self._budget_s <= MAX_BUDGET_S
        assert not self.is_awake or (self._cpus is not None and self._credit_s > 0)

    @property
    def state(self) -> str:
        """One line for `vfsd status`."""
        if self._cpus is None:
            return f"idle CPUs may halt: {self._why_off}"
        return f"idle CPUs are kept awake during bursts of requests, for {self.awake_s:.1f} s so far"

    @property
    def awake_s(self) -> float:
        """How long the CPUs have been kept awake so far."""
        return self._total_s + (max(0.0, self._clock() - self._now) if self.is_awake else 0.0)

    def answered(self, requests: int) -> float:
        """Note `requests` more answers.  Return how long to wait for the next one before `rest`; 0 without a limit."""
        if self._cpus is None:
            return 0.0
        now = self._clock()
        elapsed = max(0.0, now - self._now)
        self._now = now
        self._account(elapsed)
        if self._trial is not None:
            self._trial.add(requests, elapsed, awake=self.is_awake)
        credit = self._credit_s + requests * (GAIN_S if self.is_awake else QUICK_S) - elapsed
        if credit <= 0:
            self._credit_s = 0.0
            self._end_burst()
            return 0.0
        self._credit_s = min(credit, MAX_CREDIT_S)
        self._burst += requests
        if self.is_awake:
            self._awake_requests += requests
            if self._budget_s <= 0 or not self._has_idle_cpus(now):
                self._end_burst()
        elif self._credit_s >= _START_S and self._burst >= _MIN_BURST:
            self._begin(now)
        return self._credit_s if self.is_awake else 0.0

    def rest(self) -> None:
        """Let the CPUs halt: no request came within the time that `answered` returned."""
        if self.is_awake:
            now = self._clock()
            self._account(max(0.0, now - self._now))
            self._now = now
            self._credit_s = 0.0
            self._end_burst()

    def close(self) -> None:
        """Let the CPUs halt for good."""
        self.rest()
        cpus, self._cpus = self._cpus, None
        self._why_off = "the workspace is not served"
        if cpus is not None:
            cpus.close()

    # -- decisions -------------------------------------------------------------------------------
    def _account(self, elapsed: float) -> None:
        if self.is_awake:
            self._total_s += elapsed
            self._budget_s -= (1 - _SHARE) * elapsed
        else:
            self._budget_s = min(MAX_BUDGET_S, self._budget_s + _SHARE * elapsed)

    def _begin(self, now: float) -> None:
        if now < self._not_before or self._budget_s < _LEAST_BUDGET_S or not self._has_idle_cpus(now):
            return
        if self._trial is None:
            self._bursts += 1
            every = _FIRST_TRIALS_EVERY if len(self._ratios) < _TRIALS else _TRIAL_EVERY
            if self._has_trials and self._bursts % every == 0 and now - self._released_at >= _REST_S:
                self._trial = _Trial()
        if self._trial is None or self._trial.has_first_half:
            self._awake_requests = 0
            self._credit_s = min(self._credit_s, _FIRST_CREDIT_S)
            self._keep_awake(True)

    def _end_burst(self) -> None:
        self._burst = 0
        trial, self._trial = self._trial, None
        if self.is_awake:
            self._keep_awake(False)
            self._released_at = self._now
            if self._awake_requests < _MIN_AWAKE:
                self._not_before = max(self._not_before, self._now + _SHORT_PAUSE_S)
        if trial is not None and trial.ratio is not None:
            self._learn(trial.ratio)

    def _learn(self, ratio: float) -> None:
        self._ratios.append(ratio)
        if len(self._ratios) < _TRIALS:
            return
        if statistics.median(self._ratios) > _MAX_GAIN:
            self._not_before = self._now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._ratios.clear()
        else:
            self._pause_s = _FIRST_PAUSE_S

    def _has_idle_cpus(self, now: float) -> bool:
        if now >= self._count_at:
            self._count_at = now + _COUNT_EVERY_S
            if self.runnable() > self._count:
                self._count_at = self._not_before = max(self._not_before, now + _SHORT_PAUSE_S)
        return now >= self._not_before

    def _keep_awake(self, awake: bool) -> None:
        self.is_awake = awake
        assert self._cpus is not None
        try:
            self._cpus.keep_awake(awake)
        except OSError as error:
            _logger.warning("cannot keep idle CPUs awake any more: %s", error)
            self.is_awake = False
            self._why_off = f"{CPU_LATENCY_DEVICE} failed: {error.strerror or error}"
            self._cpus.close()
            self._cpus = None


class _Trial:
    """One burst that is served without and then with the CPUs awake."""

    def __init__(self) -> None:
        self._requests = [0, 0]  # without, with
        self._seconds = [0.0, 0.0]

    def add(self, requests: int, elapsed: float, *, awake: bool) -> None:
        if self._requests[awake] < _TRIAL_REQUESTS:
            self._requests[awake] += requests
            self._seconds[awake] += elapsed

    @property
    def has_first_half(self) -> bool:
        return self._requests[False] >= _TRIAL_REQUESTS

    @property
    def ratio(self) -> float | None:
        """The time of a request with the CPUs awake, as a share of the time without; None if the burst was short."""
        if min(self._requests) < _TRIAL_REQUESTS or not self._seconds[False]:
            return None
        return (self._seconds[True] / self._requests[True]) / (self._seconds[False] / self._requests[False])


def make_wakeups(
    choice: Choice,
    *,
    find: Callable[[], IdleCpus] = idle_cpus,
    open_device: Callable[[], KeepsAwake] = CpuLatency,
) -> tuple[Wakeups, str | None]:
    """Return the wake-up policy for `--wakeups CHOICE`, and a warning if it cannot do what was asked for."""
    why_off = "--wakeups off" if choice == "off" else find().why_awake if choice == "auto" else None
    warning = None
    device: KeepsAwake | None = None
    if why_off is None:
        try:
            device = open_device()
        except OSError as error:
            why_off = f"cannot open {CPU_LATENCY_DEVICE} ({error.strerror or error}); `vfsd doctor` says what to do"
            warning = f"--wakeups on has no effect: {why_off}" if choice == "on" else None
    wakeups = Wakeups(device, count=os.cpu_count() or 1, has_trials=choice == "auto", why_off=why_off or "")
    return wakeups, warning


# -- polling ------------------------------------------------------------------------------------------------
_SPIN_S: Final = 20e-6
_MAX_CREDIT: Final = 8
_LATE_COST: Final = 4  # the credit that a late request costs: polling pays if four of five requests are in time
_COUNT_THREADS_EVERY_S: Final = 0.001  # counting the runnable threads takes less than a microsecond
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
        self._count_at = now + _COUNT_THREADS_EVERY_S
        if self._runnable() > self._cpus:
            self._count_at = self._spin_from = now + _PAUSE_S
