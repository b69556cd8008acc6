"""The server's side of one connection: it reads requests, runs calls, and writes answers, all within limits.

A client holds at most this much memory: one request line, `calls_at_once` running requests, and as many answers as wait
for it to read.  The large requests of all clients share one budget, which counts what a request takes once it is
decoded.  They are decoded one at a time, in a worker thread.  A client that stops reading is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import trio

from protocol.values import Value
from vfsd.daemon.control.calls import (
    CallContext,
    Handler,
    answer,
    busy_line,
    decode_params,
    decode_request,
    decoded_bytes,
    error_line,
    request_id,
    result_line,
)
from vfsd.operations.catalogue import OPERATIONS
from vfsd.wire.messages import (
    CANCEL_METHOD,
    CLOSING_METHOD,
    INVALID_PARAMS,
    INVALID_REQUEST,
    MAX_REQUEST_BYTES,
    METHOD_NOT_FOUND,
    RECEIVE_BYTES,
    CancelParams,
    CancelResult,
    CancelState,
    LineBuffer,
    Request,
)

_logger = logging.getLogger(__name__)
_SMALL_BYTES: Final = 16 * 1024  # a request of this size always fits in the budget
_MOST_SPARES: Final = 32
_SPARE_SHARE: Final = 4  # at most this fraction of the limit: 12 of 48


class ConnectionLimits(Value):
    """Limits of one client, and of all of them together."""

    connections: int = 256  # when one more client connects, the connection that is idle for longest is closed
    calls_at_once: int = 8  # of one connection; its next request waits
    request_bytes: int = MAX_REQUEST_BYTES
    held_bytes: int = 16 * 1024 * 1024  # of all requests that are being read or run, without small ones
    idle_s: float = 600.0  # without a running call and without a byte; clients reconnect
    stall_s: float = 30.0  # without reading a byte of waiting output
    progress_s: float = 0.1  # between two progress messages of a connection


class Budget:
    """The bytes of requests that all connections hold together.

    The first _SMALL_BYTES of each request are free, so small requests are accepted even if the budget is used up.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self.decoding = trio.CapacityLimiter(1)  # a request that is refused for its size takes memory until then

    def resize(self, held: int, wanted: int) -> bool:
        """Change a reservation from `held` to `wanted` bytes; False, without a change, if they do not fit."""
        more = max(0, wanted - _SMALL_BYTES) - max(0, held - _SMALL_BYTES)
        if more > self._left:
            return False
        self._left -= more
        return True


class SpareDescriptors:
    """Descriptors that are kept open, and closed when a call or accept(2) needs descriptors.  Serving loop only.

    With them calls work even if the process has used all others.  Requests through the mount may use them first; then
    the call fails with EMFILE.
    """

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._count = _MOST_SPARES if soft == resource.RLIM_INFINITY else min(_MOST_SPARES, soft // _SPARE_SHARE)
        self._held: list[int] = []
        self.refill()

    def release(self) -> bool:
        """Close all spares; False if there is none."""
        had_any = bool(self._held)
        while self._held:
            os.close(self._held.pop())
        return had_any

    def refill(self) -> None:
        """Open the missing spares, as far as the limit allows."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:  # dup(2) is four times as fast as open(2)
                opened = os.dup(self._held[0]) if self._held else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                self._held.append(opened)


_Found: TypeAlias = bytes | tuple[Handler, Any]  # an error line, or a request's handler and its decoded parameters


class _Line(Value):
    pieces: Sequence[bytes]
    sent: Callable[[], None] | None = None


# Sent before an idle connection is closed: a request that crosses it is not run, so the client may send it again on
# another connection.
_CLOSING_LINE: Final = b'{"jsonrpc":"2.0","method":"%s","params":{}}\n' % CLOSING_METHOD.encode()


class ClientConnection:
    """One client.  `serve` runs until the connection ends; `hang_up` and `drop_idle` end it from outside.

    The caller closes the socket.  `client` is equal for the connections of one program.  `idle_since`: when its last
    call ended, or it was opened, on trio's clock.
    """

    def __init__(
        self,
        sock: trio.socket.SocketType,
        methods: Mapping[str, Handler],
        limits: ConnectionLimits,
        budget: Budget,
        spares: SpareDescriptors,
        *,
        client: Hashable = None,
    ) -> None:
        self._sock = sock
        self._client = self if client is None else client
        self._spares = spares
        self.is_leaving = False  # `drop_idle` was called
        self.idle_since = trio.current_time()
        self._writing = False
        self._has_request = False  # one that has not become a call yet
        self._budget = budget
        self._buffered = 0  # what `budget` holds for `lines`
        self._methods = methods
        self._limits = limits
        self._scope = trio.CancelScope()
        self._lines = LineBuffer()
        self._slots = trio.Semaphore(limits.calls_at_once, max_value=limits.calls_at_once)
        # No buffer: a sender waits until the line before is written.
        self._outbox, self._out = trio.open_memory_channel[_Line](0)
        self._running: dict[CallContext, str] = {}  # each with its method
        self._unanswered: set[CallContext] = set()
        self._progressed: set[CallContext] = set()
        self._progress = trio.Event()

    def hang_up(self) -> None:
        """Drop the client: cancel its calls and their threads, and send nothing more."""
        self._abandon_calls()
        self._scope.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether no call runs and no complete request waits, so that closing it loses nothing."""
        busy = self._running or self._unanswered or self._writing or self._has_request
        return not (busy or self._has_unread())

    def running(self, besides: CallContext | None = None) -> list[str]:
        """Return the methods of the calls that run, without that of `besides`."""
        return [method for call, method in self._running.items() if call is not besides]

    def has(self, call: CallContext) -> bool:
        """Whether this client made `call`, which runs."""
        return call in self._running

    def _has_unread(self) -> bool:
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def drop_idle(self) -> None:
        """Close the idle connection.  The client may send a request again that crossed this."""
        self.is_leaving = True
        # No request is read after this: the reading task checks for cancellation next.
        with contextlib.suppress(OSError):
            os.write(self._sock.fileno(), _CLOSING_LINE)
        self._scope.cancel()

    def has_only(self, is_waiting: Callable[[CallContext, str], bool]) -> bool:
        """Whether `is_waiting` holds for each of its calls, and no answer is on its way to the client."""
        is_answering = self._writing or self._has_request or not self._unanswered <= self._running.keys()
        return not is_answering and all(is_waiting(call, method) for call, method in self._running.items())

    def ask_again(self) -> None:
        """Close the connection and cancel its calls, which have done nothing; the client makes them again."""
        self._abandon_calls()
        self.drop_idle()

    async def serve(self) -> None:
        """Answer requests until the client disconnects or violates the protocol."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_lines)
                    async with self._outbox, trio.open_nursery() as inner:
                        inner.start_soon(self._send_progress)
                        await self._answer_requests()
                        inner.cancel_scope.cancel()
        finally:
            self._budget.resize(self._buffered, 0)
            for call in self._unanswered:
                call.answered()
            # Calls refer to their connection: without this their memory waits for the garbage collector.
            self._unanswered.clear()
            self._progressed.clear()

    # -- in -------------------------------------------------------------------------------------------
    async def _answer_requests(self) -> None:
        async with trio.open_nursery() as calls:
            try:
                while (line := await self._read_line()) is not None:
                    # For each line, so that a flood of them does not block other clients; and it raises after
                    # `drop_idle`, before a request is run that the client may send again.
                    await trio.lowlevel.checkpoint()
                    self._has_request = True
                    await self._take_line(line, calls)
                    self._has_request = False
                # The client may have closed only its writing side: complete its calls.
                for _ in range(self._limits.calls_at_once):
                    await self._slots.acquire()
            finally:
                self._abandon_calls()

    async def _read_line(self) -> bytes | None:
        """Return the next line; None at the end, after an error line if the client violated the protocol."""
        while (line := self._lines.next_line()) is None:
            if self._lines.partial_bytes > self._limits.request_bytes:
                await self._refuse_length()
                return None
            data = await self._receive()
            if data is None:
                return None
            if not data:
                # A request without a newline: complete, as `printf | nc` sends it, or truncated.  Both are answered.
                line = self._lines.take_rest()
                self._account()
                return line or None
            self._lines.feed(data)
            self._lines.skip_empty_lines()
            if not self._account():
                await self._send(busy_line(None))
                return None
        self._lines.skip_empty_lines()
        self._account()
        if len(line) > self._limits.request_bytes:
            await self._refuse_length()
            return None
        return line

    def _account(self) -> bool:
        """Reserve the buffered bytes; False if they do not fit in the budget."""
        buffered = self._lines.partial_bytes
        if not self._budget.resize(self._buffered, buffered):
            return False
        self._buffered = buffered
        return True

    async def _refuse_length(self) -> None:
        text = f"the request is longer than {self._limits.request_bytes} bytes"
        await self._send(error_line(None, INVALID_REQUEST, text))

    async def _receive(self) -> bytes | None:
        """Receive some bytes; b"" at the end of the stream, None if the client sent nothing for too long."""
        while True:
            with trio.move_on_after(self._limits.idle_s):
                try:
                    return await self._sock.recv(RECEIVE_BYTES)
                except ConnectionError:
                    return b""
            if not self._running:
                if self.is_idle:
                    self.drop_idle()
                return None

    async def _take_line(self, line: bytes, calls: trio.Nursery) -> None:
        if not line.strip():
            return
        held_bytes = len(line)
        self._budget.resize(0, held_bytes)  # `_account` has just returned as much
        try:
            request, found, size_bytes = await self._decoded(line)
            del line
            if isinstance(request, bytes):
                await self._send(request)
                return
            if request.method == CANCEL_METHOD:
                found = self._cancel(request)
            if not isinstance(found, bytes) and not self._budget.resize(held_bytes, size_bytes):
                found = busy_line(request_id(request))
            if isinstance(found, bytes):
                if request.id is not msgspec.UNSET:
                    await self._send(found)
                return
            held_bytes = size_bytes
            # While all slots are in use nothing is read: the kernel's buffer fills, and the client waits.
            await self._slots.acquire()
            request = msgspec.structs.replace(request, params=msgspec.Raw(b""))  # which has the line
            call = self._new_call(request)
            self._running[call] = request.method
            self._unanswered.add(call)
            calls.start_soon(self._run, call, request, held_bytes, *found)
            held_bytes = 0  # `_run` gives it back
        finally:
            self._budget.resize(held_bytes, 0)

    async def _decoded(self, line: bytes) -> tuple[Request | bytes, _Found, int]:
        """Return the request in `line`, what `_find` finds, and the bytes that the request takes once it is decoded.

        An error line in place of the request if it is none; as what is found, if it cannot be run.
        """

        def decode() -> tuple[Request | bytes, _Found, int]:
            request = decode_request(line)
            if isinstance(request, bytes) or request.method == CANCEL_METHOD:
                return request, b"", 0
            found = self._find(request)
            return request, found, 0 if isinstance(found, bytes) else max(len(line), decoded_bytes(found[1]))

        if len(line) <= _SMALL_BYTES:
            return decode()
        return await trio.to_thread.run_sync(decode, limiter=self._budget.decoding)

    def _cancel(self, request: Request) -> bytes:
        """Cancel a call, and return the answer at once, without waiting for the call."""
        number = request_id(request)
        try:
            params = msgspec.json.decode(request.params, type=CancelParams)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return error_line(number, INVALID_PARAMS, f"{request.method}: {error}")
        state: CancelState = "unknown"
        for call in self._running:
            if call.request_id == params.id:
                state = "stopping" if call.cancel() else "finishing"
        return b"".join(result_line(number, [msgspec.json.encode(CancelResult(state))]))

    def _find(self, request: Request) -> _Found:
        """Return the handler of `request` and its decoded parameters, or an error line.  Any thread."""
        number = request_id(request)
        handler = self._methods.get(request.method)
        if handler is None or request.method not in OPERATIONS:
            return error_line(number, METHOD_NOT_FOUND, f"no such method: {request.method}")
        params = decode_params(request)
        return params if isinstance(params, bytes) else (handler, params)

    # -- calls ----------------------------------------------------------------------------------------
    def _new_call(self, request: Request) -> CallContext:
        return CallContext(
            request_id(request),
            silent=request.id is msgspec.UNSET,
            send=self._send,
            progress_ready=self._progress_ready,
            client=self._client,
            drop_client=self.hang_up,
        )

    async def _run(self, call: CallContext, request: Request, size_bytes: int, handler: Handler, params: Any) -> None:
        call.task = trio.lowlevel.current_task()
        self._spares.release()
        try:
            pieces = await answer(request, handler, params, call)
            if request.id is msgspec.UNSET:
                self._answered(call)
                return
            figures = call.take_progress()
            if figures is not None:
                await self._send(figures)
            await self._outbox.send(_Line(pieces, lambda: self._answered(call)))
        finally:
            self._spares.refill()
            self._running.pop(call, None)
            self.idle_since = trio.current_time()
            self._slots.release()
            self._budget.resize(size_bytes, 0)

    def _answered(self, call: CallContext) -> None:
        self._unanswered.discard(call)
        call.answered()

    def _abandon_calls(self) -> None:
        for call in self._running:
            call.abandon()

    # -- out ------------------------------------------------------------------------------------------
    async def _send(self, line: bytes) -> None:
        await self._outbox.send(_Line([line]))

    async def _write_lines(self) -> None:
        async with self._out:
            async for line in self._out:
                self._writing = True
                for piece in line.pieces:
                    if not await self._write(piece):
                        self.hang_up()
                        return
                self._writing = False
                if line.sent is not None:
                    line.sent()

    async def _write(self, data: bytes) -> bool:
        """Write all of `data`; False if the client disconnected or does not read."""
        left = memoryview(data)
        while left:
            with trio.move_on_after(self._limits.stall_s) as timeout:
                try:
                    left = left[await self._sock.send(left) :]
                except OSError:
                    return False
            if timeout.cancelled_caught:
                _logger.warning("control: dropped a client that did not read for %g s", self._limits.stall_s)
                return False
        return True

    def _progress_ready(self, call: CallContext) -> None:
        self._progressed.add(call)
        self._progress.set()

    async def _send_progress(self) -> None:
        while True:
            await self._progress.wait()
            self._progress = trio.Event()
            reported, self._progressed = self._progressed, set()
            # A call that was answered meanwhile has sent its last figures itself.
            for call in reported & self._running.keys():
                figures = call.take_progress()
                if figures is not None:
                    await self._send(figures)
            await trio.sleep(self._limits.progress_s)
