"""Turns: which client's work runs next, so that no client keeps the others waiting.

A worker thread that computes holds the interpreter lock, and every thread more delays the loop that serves the mount.
So few run at a time, and clients take turns: the client that waited longest since its last turn is next, however much
the others have queued.  A client is a process (its pid), because one program may open many connections.

Answers that wait to be read are bounded as well: while `held_bytes` of them are unread no work starts, and if others
wait for that, the client that has left an answer unread for the longest time is dropped.

Invariants, on the serving loop, where everything here runs:
- at most `at_once` turns are taken, and a turn that is taken is given back, whatever ends the work;
- `_queues` holds exactly the clients with waiting work, the next one first;
- while work waits, either all turns are taken or the unread answers fill the limit.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from time import monotonic
from typing import Final, ParamSpec, TypeVar

import trio

from vfsd.daemon.control.call_context import CallContext

__all__ = ["Slices", "Turns"]

_SLICE_S: Final = 0.01
_PATIENCE_S: Final = 2.0  # how long an unread answer may keep others from starting

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """Work of one kind: `at_once` pieces of it run at a time, each in a worker thread."""

    def __init__(self, at_once: int, *, queued_per_client: int = 256, held_bytes: int = 64 << 20) -> None:
        """`queued_per_client` bounds what waits for one client, `held_bytes` all answers that are not read yet."""
        self.threads = trio.CapacityLimiter(at_once)  # not trio's own, which the mount's upkeep needs
        self._free = at_once
        self._most_queued = queued_per_client
        self._queues: OrderedDict[Hashable, deque[trio.Event]] = OrderedDict()
        self._limit_bytes = held_bytes
        self._held_bytes = 0
        self._unread: dict[CallContext, tuple[float, int]] = {}  # since when, and how many bytes; the oldest first

    async def run(self, call: CallContext, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in a worker thread when it is the client's turn.  OSError (EBUSY): it has too much queued.

        The thread is waited for also when cancelled: `function` calls `call.raise_if_cancelled` now and then.
        """
        async with self.turn(call):
            return await trio.to_thread.run_sync(partial(function, *args, **kwargs), limiter=self.threads)

    @asynccontextmanager
    async def turn(self, call: CallContext) -> AsyncIterator[None]:
        """Wait for a turn, and have it for the length of the block.  OSError (EBUSY)."""
        granted = self._enqueue(call.client)
        self._grant()
        try:
            while not granted.is_set():
                with trio.move_on_after(_PATIENCE_S):
                    await granted.wait()
                self._drop_slowest_reader()
        except BaseException:
            if not self._dequeue(call.client, granted):
                self._give_back()
            raise
        try:
            yield
        finally:
            self._give_back()

    def hold(self, call: CallContext, size_bytes: int) -> None:
        """Count an answer of `size_bytes` until it is read, or its client has gone."""
        self._unread[call] = trio.current_time(), size_bytes
        self._held_bytes += size_bytes
        call.after_answer(partial(self._let_go, call))

    def _let_go(self, call: CallContext) -> None:
        self._held_bytes -= self._unread.pop(call)[1]
        self._grant()

    # -- the queue ------------------------------------------------------------------------------------
    def _enqueue(self, client: Hashable) -> trio.Event:
        queue = self._queues.setdefault(client, deque())
        if len(queue) >= self._most_queued:
            text = f"{self._most_queued} calls of this program wait already; wait for their answers, then try again"
            raise OSError(errno.EBUSY, text)
        granted = trio.Event()
        queue.append(granted)
        return granted

    def _dequeue(self, client: Hashable, granted: trio.Event) -> bool:
        """Take out what no longer waits; False where it has had its turn already."""
        if granted.is_set():
            return False
        queue = self._queues[client]
        queue.remove(granted)
        if not queue:
            del self._queues[client]
        return True

    def _grant(self) -> None:
        while self._free and self._queues and self._held_bytes < self._limit_bytes:
            client, queue = self._queues.popitem(last=False)
            queue.popleft().set()
            self._free -= 1
            if queue:
                self._queues[client] = queue  # at the end: after everybody else

    def _give_back(self) -> None:
        self._free += 1
        self._grant()

    def _drop_slowest_reader(self) -> None:
        """If unread answers keep others waiting: drop the client of the oldest one."""
        if self._held_bytes < self._limit_bytes or not self._unread:
            return
        call, (since, _) = next(iter(self._unread.items()))
        if trio.current_time() - since >= _PATIENCE_S:
            call.drop_client(f"its answer waited to be read for {_PATIENCE_S:g} s while others waited for their turn")


class Slices:
    """Lets one of several worker threads compute at a time, for some milliseconds each, in rotation.

    Threads that compute at once gain nothing from it: they pass the interpreter lock to and fro, which costs more than
    half of the time (`vfsd.machine.interpreter` makes the switches frequent, for the mount's sake).  In rotation a
    short search does not wait for the end of a long one either.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def computing(self, keep_going: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Compute in the block, which calls the function it gets often, in place of `keep_going`."""
        self._take()
        until_s = monotonic() + _SLICE_S

        def go_on() -> None:
            nonlocal until_s
            keep_going()
            if self._waiting and monotonic() >= until_s:
                self._pass_on()
                self._take()
                until_s = monotonic() + _SLICE_S

        try:
            yield go_on
        finally:
            self._pass_on()

    def _take(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            handed_over = threading.Lock()
            handed_over.acquire()
            self._waiting.append(handed_over)
        handed_over.acquire()

    def _pass_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
