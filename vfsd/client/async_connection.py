"""The client of the control socket for asyncio and trio.  It makes the calls of `connection`, several in parallel.

No call blocks the loop for long: large answers are decoded and converted in worker threads.  Nothing is shared between
two calls, so an await in one of them breaks no invariant of another.

Blocking work runs in worker threads, with defined effects of cancellation.  `finish` is for work that changes
something: it returns or raises only when the thread has ended, or the work was never begun.  anyio guarantees that for
cancellation by its own scopes and by trio, but asyncio's `Task.cancel` (which `asyncio.timeout` and `asyncio.wait_for`
use) ends an await on a thread at once, and the thread would go on: a write could follow a restore.  `abandon` is for
work that only reads: it leaves the thread alone.
"""

from __future__ import annotations

import errno
import inspect
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Generic, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from vfsd.client import results as results  # noqa: PLC0414 its import takes 10 ms, which the first call must not wait for
from vfsd.client.cancelling import ANSWER_S, CancelledCall
from vfsd.client.connection import connected, timed_out, vanished
from vfsd.client.requests import RemoteCall
from vfsd.wire.messages import ATTEMPTS, RECEIVE_BYTES, ClosingError, ControlError, Exchange, LineBuffer, ProgressReport

T = TypeVar("T")
_BACKLOG_PAUSE_S: Final = 0.05
# A longer answer is interpreted in a worker thread.  More than one message with output, which is 256 KiB at most.
_LARGE_BYTES: Final = 512 * 1024


class AsyncControlClient:
    """Calls a daemon's methods.

    Each call has a connection of its own.  Cancelling a call cancels exactly that call in the daemon.  A call that
    changes something, or runs a command, then waits for the outcome for up to 3 s (`ANSWER_S`): `on_cancelled` is
    called with it, and the cancellation's exception gets it as a note.  Other calls are left at once.

    `timeout_s` bounds each silence (no answer, no progress, no output), not the whole call.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        instance: str = "",
        timeout_s: float | None = None,
        on_cancelled: Callable[[CancelledCall], object] | None = None,
    ) -> None:
        self._path = socket_path
        self._instance = instance
        self._timeout_s = timeout_s
        self._on_cancelled = on_cancelled

    async def run(self, call: RemoteCall[T]) -> T:
        """Send `call` and return its converted answer.  Errors as for `call`."""
        answer, received_bytes = await self._call(call.method, call.params, call.on_progress, call.on_output)
        if received_bytes < _LARGE_BYTES:
            return call.result(answer)
        return await anyio.to_thread.run_sync(call.result, answer)

    async def call(
        self,
        method: str,
        params: msgspec.Struct | None = None,
        *,
        on_progress: Callable[[ProgressReport], object] | None = None,
        on_output: Callable[[bytes], object] | None = None,
    ) -> Any:
        """As `ControlClient.call`; awaits a callback that returns an awaitable."""
        answer, _ = await self._call(method, params, on_progress, on_output)
        return answer

    async def stream(self, call: RemoteCall[Any]) -> AsyncGenerator[bytes]:
        """As `ControlClient.stream`."""
        pieces: list[bytes] = []
        exchange = Exchange(0, call.method, call.params, None, pieces.append)
        with await self._connected() as sock:
            conversation = _Conversation(sock, exchange, self._timeout_s, self._path)
            await conversation.send(exchange.request)
            while not exchange.done:
                await conversation.receive_line()
                for piece in pieces:
                    yield piece
                pieces.clear()

    async def _call(
        self,
        method: str,
        params: msgspec.Struct | None,
        on_progress: Callable[[ProgressReport], object] | None,
        on_output: Callable[[bytes], object] | None,
    ) -> tuple[Any, int]:
        """Return the answer, and the number of bytes received."""
        for attempt in range(ATTEMPTS):
            exchange = Exchange(attempt, method, params, on_progress, on_output)
            with await self._connected() as sock:
                conversation = _Conversation(sock, exchange, self._timeout_s, self._path)
                try:
                    await conversation.send(exchange.request)
                    await conversation.receive_answer()
                except ClosingError:
                    continue
                except anyio.get_cancelled_exc_class() as error:
                    await self._stop(conversation, error)
                    raise
            return exchange.result, conversation.received_bytes
        raise vanished(self._path, method)

    async def _connected(self) -> socket.socket:
        while True:
            await anyio.lowlevel.checkpoint()
            try:
                sock = connected(self._path, 0, instance=self._instance)
            except BlockingIOError:
                # The daemon's backlog is full.  No event reports that it has room again: connect(2), EAGAIN.
                await anyio.sleep(_BACKLOG_PAUSE_S)
            else:
                sock.setblocking(False)
                return sock

    async def _stop(self, conversation: _Conversation, error: BaseException) -> None:
        """Cancel a call in the daemon and report what became of it.  `error` is the cancellation."""
        exchange = conversation.exchange
        operation = exchange.operation
        if not operation.stopped or not conversation.is_sent:
            return  # closing the connection is enough
        outcome = None
        try:
            with anyio.move_on_after(ANSWER_S, shield=True):
                exchange.mute()
                try:
                    await conversation.send(exchange.cancel_request)
                    await conversation.receive_answer()
                    outcome = CancelledCall.completed(operation)
                except ControlError as answer:
                    if answer.errno == errno.ECANCELED:
                        outcome = CancelledCall.stopped(operation)
                    else:
                        outcome = CancelledCall(operation.name, "stopped", f"{operation.noun} failed: {answer}")
        except OSError:  # the daemon is gone
            outcome = CancelledCall.left(operation, None)
        finally:  # also if asyncio's `Task.cancel` is called a second time
            if outcome is None:
                outcome = CancelledCall.left(operation, exchange.cancel_state)
            error.add_note(str(outcome))
            if self._on_cancelled is not None:
                self._on_cancelled(outcome)


class _Conversation:
    """One call on one connection."""

    def __init__(self, sock: socket.socket, exchange: Exchange, timeout_s: float | None, path: str) -> None:
        self.exchange: Final = exchange
        self.is_sent = False  # all of the request
        self.received_bytes = 0
        self._sock = sock
        self._timeout_s = timeout_s
        self._path = path
        self._lines = LineBuffer()

    async def send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._sock.send(left) :]
            except BlockingIOError:
                await self._silence_limited(anyio.wait_writable)
            except ConnectionError:
                break  # refused: the daemon's message can still be read
        self.is_sent = not left

    async def receive_answer(self) -> None:
        """Receive until the exchange is done."""
        while not self.exchange.done:
            await self.receive_line()

    async def receive_line(self) -> None:
        """Receive one message, and interpret it."""
        line = await self._next_line()
        if len(line) < _LARGE_BYTES:
            answered = self.exchange.take(line)
        else:
            answered = await anyio.to_thread.run_sync(self.exchange.take, line)
        if inspect.isawaitable(answered):
            await answered

    async def _next_line(self) -> bytes:
        while (line := self._lines.next_line()) is None:
            await self._silence_limited(anyio.wait_readable)
            try:
                data = self._sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                continue  # a spurious event
            except ConnectionError:
                data = b""
            if not data:
                raise vanished(self._path, self.exchange.method)
            self.received_bytes += len(data)
            self._lines.feed(data)
        return line

    async def _silence_limited(self, wait: Callable[[socket.socket], Any]) -> None:
        if self._timeout_s is None:
            await wait(self._sock)
            return
        try:
            with anyio.fail_after(self._timeout_s):
                await wait(self._sock)
        except TimeoutError:
            raise timed_out(self._path, self.exchange.method, self._timeout_s) from None


_POLL_S: Final = 0.002


async def finish(work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Run `work` in a worker thread, to its end.

    If the caller is cancelled meanwhile, and so cannot get the result, `undo` is called with it in a worker thread.
    """
    job = _Job(work)
    try:
        return await anyio.to_thread.run_sync(job.run)
    except BaseException:
        if not job.was_begun():
            raise
        with anyio.CancelScope(shield=True):
            while not job.ended.is_set():
                await anyio.sleep(_POLL_S)
            if undo is not None and job.results:
                await anyio.to_thread.run_sync(undo, job.results[0])
        raise


async def abandon(work: Callable[[], T]) -> T:
    """Run `work`, which changes nothing, in a worker thread.  A cancelled caller does not wait for its end."""
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


class _Job(Generic[T]):
    """`work`, and whether it was begun: the thread begins, or the caller leaves.  `_claim` decides."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._claim = threading.Lock()
        self.ended = threading.Event()
        self.results: list[T] = []

    def run(self) -> T:
        """Run the work.  Worker thread."""
        if not self._claim.acquire(blocking=False):
            raise RuntimeError("the caller was cancelled before the work began")  # nobody receives this
        try:
            self.results.append(self._work())
            return self.results[0]
        finally:
            self.ended.set()

    def was_begun(self) -> bool:
        """Return whether the thread has begun; if it has not, it will do nothing.  Loop."""
        return not self._claim.acquire(blocking=False)
