"""Turns: clients in rotation, bounds on what waits and on what is not read, and cancelled work that ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, cast

import pytest
import trio
import trio.testing

from vfsd.daemon.control.calls import CallCancelledError, CallContext
from vfsd.daemon.control.handlers.fs import Slices, Turns


class FakeCall:
    """What `Turns` asks of a `CallContext`."""

    def __init__(self, client: Hashable) -> None:
        self.client = client
        self.dropped: str | None = None
        self.after: list[Callable[[], None]] = []

    def after_answer(self, callback: Callable[[], None]) -> None:
        self.after.append(callback)

    def drop_client(self, reason: str) -> None:
        self.dropped = reason
        self.answered()

    def answered(self) -> None:
        while self.after:
            self.after.pop()()


def of(client: Hashable) -> CallContext:
    return cast("CallContext", FakeCall(client))


async def take(turns: Turns, client: str, order: list[str], nursery: trio.Nursery) -> None:
    """Queue a piece of work of `client`, and return when it waits or runs."""

    async def work() -> None:
        async with turns.turn(of(client)):
            order.append(client)
            await trio.lowlevel.checkpoint()

    nursery.start_soon(work)
    await trio.testing.wait_all_tasks_blocked()


async def test_a_client_with_much_to_do_does_not_keep_another_waiting() -> None:
    turns, order = Turns(1), list[str]()
    async with trio.open_nursery() as nursery, turns.turn(of("first")):
        for _ in range(50):
            await take(turns, "greedy", order, nursery)
        for name in ("a", "b", "a"):
            await take(turns, name, order, nursery)
    assert order[:6] == ["greedy", "a", "b", "greedy", "a", "greedy"]
    assert len(order) == 53


async def test_calls_of_one_client_run_in_the_order_in_which_they_came() -> None:
    turns, order = Turns(1), list[int]()

    async def work(number: int) -> None:
        async with turns.turn(of("many")):
            order.append(number)

    async with trio.open_nursery() as nursery, turns.turn(of("first")):
        for number in range(100):
            nursery.start_soon(work, number)
            await trio.lowlevel.checkpoint()  # else trio starts them in any order
    assert order == list(range(100))


async def test_only_so_many_run_at_a_time_and_all_get_their_turn() -> None:
    turns, running, most = Turns(2), 0, 0

    async def work(client: int) -> None:
        nonlocal running, most
        async with turns.turn(of(client)):
            running += 1
            most = max(most, running)
            await trio.testing.wait_all_tasks_blocked()
            running -= 1

    async with trio.open_nursery() as nursery:
        for client in range(10):
            nursery.start_soon(work, client % 3)
    assert (running, most) == (0, 2)


async def test_work_that_is_cancelled_while_it_waits_leaves_its_place() -> None:
    turns, order = Turns(1), list[str]()
    async with trio.open_nursery() as nursery, turns.turn(of("first")), trio.open_nursery() as leaving:
        for _ in range(5):
            await take(turns, "gone", order, leaving)
        await take(turns, "stays", order, nursery)
        leaving.cancel_scope.cancel()
    assert order == ["stays"]
    async with turns.turn(of("gone")):
        pass


async def test_unread_answers_stop_new_work_until_they_are_read() -> None:
    turns, order = Turns(2, held_bytes=100), list[str]()
    reader = FakeCall("reader")
    async with turns.turn(cast("CallContext", reader)):
        pass
    turns.hold(cast("CallContext", reader), 100)
    async with trio.open_nursery() as nursery:
        await take(turns, "other", order, nursery)
        assert order == []
        reader.answered()
    assert order == ["other"]
    assert reader.dropped is None


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """Jumps on whenever nothing else happens."""
    return trio.testing.MockClock(autojump_threshold=0)


async def test_a_client_that_does_not_read_while_others_wait_is_dropped(clock: trio.testing.MockClock) -> None:
    turns, order = Turns(2, held_bytes=100), list[str]()
    stalled, reader = FakeCall("stalled"), FakeCall("reader")
    turns.hold(cast("CallContext", stalled), 60)
    await trio.sleep(1)
    turns.hold(cast("CallContext", reader), 60)
    await trio.sleep(100)  # nobody waits for them
    assert stalled.dropped is None
    async with turns.turn(of("other")):
        order.append("other")
    assert order == ["other"]
    assert (stalled.dropped is not None, reader.dropped) == (True, None)


async def test_in_slices_a_short_computation_does_not_wait_for_a_long_one() -> None:
    slices, ended = Slices(), list[str]()
    both_run, stop = threading.Barrier(2), threading.Event()

    def long() -> None:
        def keep_going() -> None:
            if stop.is_set():
                raise CallCancelledError

        with slices.computing(keep_going) as go_on:
            both_run.wait()
            while True:
                time.sleep(0.001)  # as if it computed, without the interpreter lock
                go_on()

    def short() -> None:
        both_run.wait()
        with slices.computing(lambda: None) as go_on:
            go_on()
        ended.append("short")

    async def run(function: Callable[[], Any]) -> None:
        try:
            await trio.to_thread.run_sync(function)
        except CallCancelledError:
            ended.append("long")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, long)
        await trio.to_thread.run_sync(short)
        stop.set()
    assert ended == ["short", "long"]
