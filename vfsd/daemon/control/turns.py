"""Turns: fair scheduling of clients' work, so that no client delays the others for long.

A worker thread that computes holds the interpreter lock, and each further thread delays the loop that serves the mount.
So only a few run at a time, and clients take turns in rotation, however much each has queued.  A client is a process
(its pid), because one program may open many connections.

Unread answers are bounded too: while they hold `held_bytes`, no work starts.  If work waits for that, the client whose
answer is unread for longest is dropped.

Invariants, on the serving loop, where `Turns` runs:
- at most `at_once` turns are taken, and each is given back, however the work ends;
- `_queues` holds exactly the clients with waiting work, the next one first;
- while work waits, either all turns are taken or the unread answers reach the limit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from time import monotonic
from typing import Final

import trio

from vfsd.daemon.control.calls import CallContext

_SLICE_S: Final = 0.01
_PATIENCE_S: Final = 2.0  # for which an unread answer may delay other clients


class Turns:
    """Work of one kind: `at_once` pieces run at a time, each in a worker thread."""

    def __init__(self, at_once: int, *, held_bytes: int = 64 << 20) -> None:
        """`held_bytes` bounds all unread answers."""
        self.threads = trio.CapacityLimiter(at_once)  # not trio's own limiter, whose threads the mount itself needs
        self._free = at_once
        self._queues: OrderedDict[Hashable, deque[trio.Event]] = OrderedDict()
        self._limit_bytes = held_bytes
        self._held_bytes = 0
        self._unread: dict[CallContext, tuple[float, int]] = {}  # start of the wait and size in bytes; the oldest first

    @asynccontextmanager
    async def turn(self, call: CallContext) -> AsyncIterator[None]:
        """Wait for a turn, and hold it for the length of the block, which works in one thread of `threads`."""
        granted = trio.Event()
        self._queues.setdefault(call.client, deque()).append(granted)
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
        """Count an answer of `size_bytes` until the client has read it or disconnects."""
        self._unread[call] = trio.current_time(), size_bytes
        self._held_bytes += size_bytes
        call.after_answer(partial(self._let_go, call))

    def _let_go(self, call: CallContext) -> None:
        self._held_bytes -= self._unread.pop(call)[1]
        self._grant()

    # -- the queue ------------------------------------------------------------------------------------
    def _dequeue(self, client: Hashable, granted: trio.Event) -> bool:
        """Remove cancelled work from the queue; False if it has its turn already."""
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
                self._queues[client] = queue  # at the end, after all other clients

    def _give_back(self) -> None:
        self._free += 1
        self._grant()

    def _drop_slowest_reader(self) -> None:
        """If unread answers delay other clients for too long, drop the client of the oldest one."""
        if self._held_bytes < self._limit_bytes or not self._unread:
            return
        call, (since, _) = next(iter(self._unread.items()))
        if trio.current_time() - since >= _PATIENCE_S:
            call.drop_client(f"its answer waited to be read for {_PATIENCE_S:g} s while others waited for their turn")


class Slices:
    """Lets several worker threads compute in rotation, one at a time, for some milliseconds each.

    If they computed in parallel, passing the interpreter lock would cost more than half of the time, because
    `vfsd.machine.interpreter` makes the switches frequent for the mount.  In rotation a short search does not wait for
    the end of a long one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def computing(self, keep_going: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Compute inside the block, which calls the returned function regularly instead of `keep_going`."""
        self._take()
        until_s = monotonic() + _SLICE_S

        def checkpoint() -> None:
            nonlocal until_s
            keep_going()
            if self._waiting and monotonic() >= until_s:
                self._pass_on()
                self._take()
                until_s = monotonic() + _SLICE_S

        try:
            yield checkpoint
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
