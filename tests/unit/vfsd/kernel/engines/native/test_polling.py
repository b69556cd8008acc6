"""When the native engine polls for the next request and when it sleeps, with a simulated clock and machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine
from vfsd.kernel.engines.native.wakeups import Poller, RunnableThreads

US = 1e-6
A_POLL_S = 0.5 * US  # what poll(0) takes
CPUS = 2


class Machine:
    """A clock that advances with every poll, and requests that arrive at set times."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.next_s = float("inf")
        self.runnable = 1
        self.slept = 0
        self.polls = 0
        self.counts = 0
        self.loses_cpu_at = -1  # the number of a question
        self.poller = Poller(self.poll, runnable=self.count, cpus=CPUS, clock=lambda: self.now_s)

    def count(self) -> int:
        self.counts += 1
        return self.runnable

    def poll(self, milliseconds: int) -> list[object]:
        if milliseconds == 0:
            self.polls += 1
            self.now_s += A_POLL_S + (3e-3 if self.polls == self.loses_cpu_at else 0)
        elif self.next_s > self.now_s:
            self.slept += 1
            self.now_s = min(self.now_s + milliseconds / 1000, self.next_s)
        return [object()] if self.next_s <= self.now_s else []

    def request_after(self, gap_s: float) -> bool:
        """Wait for a request that arrives `gap_s` after the last answer; return whether the poller did not sleep."""
        slept, answered = self.slept, self.now_s
        self.next_s = answered + gap_s
        while not self.poller.wait(answered, 1):
            pass
        self.poller.check_invariants()
        return self.slept == slept

    def burst(self, requests: int = 20) -> None:
        for _ in range(requests):
            self.request_after(4 * US)


def test_a_burst_is_answered_without_sleep() -> None:
    machine = Machine()
    machine.burst()
    assert all(machine.request_after(4 * US) for _ in range(50))


def test_what_is_there_already_is_found_with_one_question() -> None:
    machine = Machine()
    machine.burst()
    polls = machine.polls
    assert machine.request_after(0)
    assert machine.polls == polls + 1


def test_rare_requests_are_slept_for() -> None:
    machine = Machine()
    machine.burst()
    for _ in range(10):
        machine.request_after(500 * US)
    polls = machine.polls
    for _ in range(10):
        assert not machine.request_after(500 * US)
    assert machine.polls == polls + 10  # one before each sleep


def test_an_occasional_pause_does_not_end_a_burst() -> None:
    machine = Machine()
    machine.burst()
    for _ in range(20):
        machine.request_after(200 * US)
        assert all([machine.request_after(4 * US) for _ in range(9)][1:])


def test_where_every_other_request_is_late_nothing_is_spun_for() -> None:
    machine = Machine()
    polls = machine.polls
    for _ in range(50):
        machine.request_after(4 * US)
        machine.request_after(200 * US)
    assert machine.polls <= polls + 100 + 20 * US / A_POLL_S  # one spin, to learn it


def test_silence_is_not_spun_through() -> None:
    machine = Machine()
    machine.burst()
    machine.next_s = float("inf")
    polls, began = machine.polls, machine.now_s
    assert not machine.poller.wait(machine.now_s, 1)
    assert machine.polls - polls <= 20 * US / A_POLL_S + 2
    assert machine.now_s - began < 1.1e-3


def test_more_runnable_threads_than_cpus_end_the_spin_until_they_are_gone() -> None:
    machine = Machine()
    machine.burst()
    machine.runnable = CPUS + 1
    machine.request_after(1500 * US)  # time for a look
    machine.burst(10)
    assert not any(machine.request_after(4 * US) for _ in range(20))
    machine.runnable = CPUS
    machine.request_after(25e-3)
    machine.burst()
    assert machine.request_after(4 * US)


def test_looks_are_rare() -> None:
    machine = Machine()
    machine.burst()
    began, looks = machine.now_s, machine.counts
    machine.burst(1000)
    assert machine.counts - looks <= (machine.now_s - began) * 1000 + 1


def test_a_spin_that_loses_the_cpu_is_followed_by_a_pause() -> None:
    machine = Machine()
    machine.burst()
    machine.loses_cpu_at = machine.polls + 3
    machine.request_after(10e-3)
    machine.burst(10)
    assert not any(machine.request_after(4 * US) for _ in range(20))
    machine.request_after(25e-3)
    machine.burst()
    assert machine.request_after(4 * US)


def test_any_sequence_keeps_the_invariants() -> None:
    chance = random.Random(1)
    machine = Machine()
    gaps: tuple[Callable[[], float], ...] = (
        lambda: 0,
        lambda: 4 * US,
        lambda: chance.random() * 50 * US,
        lambda: 0.5e-3,
    )
    for _ in range(3000):
        machine.runnable = chance.choice((0, 1, 2, 3, 9))
        machine.loses_cpu_at = machine.polls + chance.randrange(100)
        machine.request_after(chance.choice(gaps)())


def test_the_machine_tells_how_many_threads_want_a_cpu() -> None:
    with RunnableThreads() as runnable:
        assert runnable() >= 0


@pytest.mark.parametrize("said", [b"", b"no such thing", b"0.1 0.2 0.3 many/700 1\n", None])
def test_where_the_machine_does_not_tell_nobody_else_wants_a_cpu(tmp_path: Path, said: bytes | None) -> None:
    if said is not None:
        (tmp_path / "loadavg").write_bytes(said)
    with RunnableThreads(tmp_path / "loadavg") as runnable:
        assert runnable() == 0


def test_the_fourth_number_is_what_counts(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_bytes(b"0.61 0.50 0.44 3/417 12345\n")
    with RunnableThreads(tmp_path / "loadavg") as runnable:
        assert runnable() == 3


def test_a_file_that_can_no_longer_be_read_is_no_error(tmp_path: Path) -> None:
    with RunnableThreads(tmp_path) as runnable:  # a directory cannot be read at all
        assert runnable() == 0


# -- how the engine uses the poller -------------------------------------------------------------------
class ScriptedPoller:
    """A poller that answers from a list, and records for how long it was allowed to wait."""

    def __init__(self, answers: list[bool], *, late: bool = False) -> None:
        self.answers = answers
        self.late = late
        self.waits_ms: list[int] = []
        self.at_once = False

    def wait(self, since: float, sleep_ms: int) -> bool:
        self.waits_ms.append(sleep_ms)
        found = self.answers.pop(0) if self.answers else False
        self.at_once = found and not self.late
        return found


@pytest.fixture
def engine() -> NativeEngine:
    class Silent(NativeEngine):
        def _respond(self, *_: object) -> None:  # type: ignore[override]
            pass

    return Silent(MemoryVolume(), EngineSettings("/nowhere", "polling"))


def answered(engine: NativeEngine, poller: ScriptedPoller, reads: list[int | None]) -> bool:
    return engine._answer_slice(lambda _buffer: reads.pop(0), -1, poller)  # type: ignore[arg-type]


def test_a_request_after_one_that_was_there_at_once_is_read_without_polling(engine: NativeEngine) -> None:
    poller = ScriptedPoller([True])
    assert answered(engine, poller, reads := [40, 40, 40, None])
    assert len(poller.waits_ms) == 2  # before the first request, and after the read that found none
    assert reads == []


def test_a_request_after_one_that_was_late_is_waited_for(engine: NativeEngine) -> None:
    poller = ScriptedPoller([True, True, True], late=True)
    assert answered(engine, poller, [40, 40, 40])
    assert len(poller.waits_ms) == 4


def test_the_loop_does_not_wait_for_requests_while_answers_are_pending(engine: NativeEngine) -> None:
    engine._pending[1] = object()  # type: ignore[assignment]
    poller = ScriptedPoller([True], late=True)
    assert answered(engine, poller, [40])
    assert poller.waits_ms == [0, 0]


def test_a_wait_of_no_time_neither_spins_nor_sleeps() -> None:
    machine = Machine()
    machine.burst()
    polls, slept = machine.polls, machine.slept
    machine.next_s = float("inf")
    assert not machine.poller.wait(machine.now_s, 0)
    assert (machine.polls, machine.slept) == (polls + 1, slept)
