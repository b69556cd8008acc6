"""When idle CPUs are kept awake, with a simulated clock, machine and client."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vfsd.kernel.engines.native.wakeups import MAX_BUDGET_S, MAX_CREDIT_S, Wakeups, make_wakeups
from vfsd.machine.resources import IdleCpus

US = 1e-6
HALTING = IdleCpus(is_guest=True, driver="haltpoll", polls_ns=0)


class Machine:
    """A clock, a device that records what is written to it, and a client that waits for each answer."""

    def __init__(self, *, wake_up_s: float = 70 * US) -> None:
        self.now_s = 50.0
        self.wake_up_s = wake_up_s  # what a request takes longer while the CPUs halt
        self.runnable = 1
        self.written: list[bool] = []
        self.error: OSError | None = None
        self.is_closed = False
        self.wakeups = Wakeups(self, runnable=lambda: self.runnable, count=2, clock=lambda: self.now_s)

    def keep_awake(self, awake: bool) -> None:
        if self.error is not None:
            raise self.error
        self.written.append(awake)

    def close(self) -> None:
        self.is_closed = True

    def requests(self, count: int, *, gap_s: float = 10 * US) -> None:
        """As the engine's loop: one answer each; the client asks again after `gap_s`."""
        for _ in range(count):
            left_s = gap_s if self.wakeups.is_awake else gap_s + self.wake_up_s
            patience_s = self.wakeups.answered(1)
            self.wakeups.check_invariants()
            if patience_s and patience_s < left_s:
                self.now_s += patience_s
                left_s -= patience_s
                self.wakeups.rest()
                self.wakeups.check_invariants()
            self.now_s += left_s

    def pause(self, seconds: float) -> None:
        patience_s = self.wakeups.answered(0)
        if patience_s:
            self.now_s += min(patience_s, seconds)
            self.wakeups.rest()
        self.now_s += seconds
        self.wakeups.answered(0)
        self.wakeups.check_invariants()

    def learn(self) -> None:
        """Make the bursts whose trials decide whether there is a gain."""
        for _ in range(24):
            self.requests(200)
            self.pause(0.2)


@pytest.fixture
def machine() -> Machine:
    made = Machine()
    made.learn()
    made.written.clear()
    return made


def test_a_burst_keeps_the_cpus_awake_until_ten_milliseconds_after_it(machine: Machine) -> None:
    machine.requests(500)
    assert machine.written == [True]
    assert 0 < machine.wakeups.answered(0) <= MAX_CREDIT_S
    machine.pause(1)
    assert machine.written == [True, False]


def test_single_requests_do_not(machine: Machine) -> None:
    for _ in range(100):
        machine.requests(3)
        machine.pause(0.01)
    assert machine.written == []


def test_a_client_that_computes_for_longer_than_it_gains_hardly_keeps_them_awake(machine: Machine) -> None:
    before_s, began_s = machine.wakeups.awake_s, machine.now_s
    machine.requests(5000, gap_s=190 * US)
    assert machine.wakeups.awake_s - before_s < 0.2 * (machine.now_s - began_s)
    machine.written.clear()
    machine.requests(5000, gap_s=400 * US)
    assert machine.written == []


def test_more_runnable_threads_than_cpus_mean_that_no_cpu_is_idle(machine: Machine) -> None:
    machine.runnable = 3
    machine.requests(1000)
    assert machine.written == []
    machine.runnable = 1
    machine.pause(0.1)
    machine.requests(1000)
    assert machine.written == [True]
    machine.runnable = 3
    machine.requests(1000)
    assert machine.written == [True, False]


def test_the_budget_is_twenty_seconds_and_then_a_quarter_of_the_time(machine: Machine) -> None:
    machine.pause(100)
    before_s, began_s = machine.wakeups.awake_s, machine.now_s
    while machine.now_s < began_s + 80:
        machine.requests(1000, gap_s=90 * US)
    awake_s = machine.wakeups.awake_s - before_s
    assert MAX_BUDGET_S < awake_s < MAX_BUDGET_S + 0.25 * 80 + 5


def test_without_a_gain_it_pauses_for_longer_and_longer_and_tries_again() -> None:
    machine = Machine(wake_up_s=0)
    pauses = []
    for _ in range(4):
        machine.written.clear()
        began_s = machine.now_s
        while not machine.written:
            machine.requests(200)
            machine.pause(0.2)
        pauses.append(machine.now_s - began_s)
        machine.learn()
    assert pauses[1] > 5
    assert pauses[3] > pauses[2] > pauses[1]


def test_short_bursts_are_served_with_the_cpus_awake_before_anything_is_known() -> None:
    machine = Machine()
    for _ in range(20):
        machine.requests(30)
        machine.pause(0.1)
    assert machine.written.count(True) >= 15


def test_with_a_gain_it_goes_on(machine: Machine) -> None:
    for _ in range(200):
        machine.written.clear()
        machine.requests(300)
        assert machine.written == [True]
        machine.pause(0.2)


def test_a_device_that_fails_ends_it(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.error = OSError(19, "No such device")
    machine.requests(1000)
    assert machine.is_closed
    assert machine.wakeups.answered(1000) == 0
    assert "No such device" in machine.wakeups.state
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_end_lets_the_cpus_halt(machine: Machine) -> None:
    machine.requests(500)
    machine.wakeups.close()
    assert machine.written == [True, False]
    assert machine.is_closed
    machine.wakeups.close()
    assert machine.wakeups.answered(100) == 0


@pytest.mark.parametrize("seed", range(20))
def test_invariants_hold_for_any_client_and_clock(seed: int) -> None:
    chance = random.Random(seed)
    machine = Machine(wake_up_s=chance.choice([0, 70 * US, 500 * US]))
    for _ in range(300):
        match chance.randrange(4):
            case 0:
                machine.requests(chance.randrange(1, 300), gap_s=chance.choice([0, 5, 90, 250, 2000]) * US)
            case 1:
                machine.pause(chance.choice([0, 0.0001, 0.009, 0.5, 30, 1e6]))
            case 2:
                machine.runnable = chance.randrange(5)
            case _:
                machine.now_s -= chance.choice([0, 0.001, 10])  # a clock that is not monotonic
                assert machine.wakeups.answered(chance.randrange(50)) >= 0


# -- the choice ------------------------------------------------------------------------------------------
def refused() -> Machine:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("choice", "idle", "open_device", "state", "warns"),
    [
        ("off", HALTING, Machine, "--wakeups off", False),
        ("auto", IdleCpus(is_guest=False, driver="intel_idle"), Machine, "not a virtual machine", False),
        ("auto", HALTING, Machine, "kept awake during bursts", False),
        ("on", IdleCpus(is_guest=False, driver="intel_idle"), Machine, "kept awake during bursts", False),
        ("auto", HALTING, refused, "Permission denied", False),
        ("on", HALTING, refused, "Permission denied", True),
    ],
)
def test_the_state_says_what_is_done_and_why(
    choice: str, idle: IdleCpus, open_device: Callable[[], Machine], state: str, warns: bool
) -> None:
    wakeups, warning = make_wakeups(choice, find=lambda: idle, open_device=open_device)
    assert state in wakeups.state
    assert (warning is not None) == warns
    wakeups.close()
