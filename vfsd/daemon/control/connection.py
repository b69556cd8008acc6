"""The server's side of one connection: lines in, calls run, lines out, all of it bounded.

Memory that one client can hold: one request line, `calls_at_once` running requests, and as many answers as
wait for the client to read; all clients' large requests together are held within one budget.  A client that
stops reading is dropped; one that stops writing in mid-line too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import trio

from protocol.errors import errno_of
from vfsd.daemon.control.call_context import CallCancelledError, CallContext, Encoded, Handler
from vfsd.daemon.control.descriptors import SpareDescriptors
from vfsd.machine.tracebacks import clear_frames
from vfsd.wire.lines import RECEIVE_BYTES, LineBuffer
from vfsd.wire.messages import (
    CANCEL_METHOD,
    CLOSING_METHOD,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LONG_METHODS,
    MAX_REQUEST_BYTES,
    METHOD_NOT_FOUND,
    METHODS,
    OPERATION_FAILED,
    PARSE_ERROR,
    CancelParams,
    CancelResult,
    CancelState,
    ErrorData,
    ErrorObject,
    InvalidParamsError,
    Request,
    Response,
    wire_path,
)

__all__ = ["Budget", "ClientConnection", "ConnectionLimits", "error_line"]

_logger = logging.getLogger(__name__)
_requests = msgspec.json.Decoder(Request)

# Numbers with two names get the one that man pages of file system calls use.
_ERRNO_NAMES: Final = {**errno.errorcode, errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EDEADLK: "EDEADLK"}

_SMALL_BYTES: Final = 16 * 1024  # of a request that always find room

_FEW: Final = 16  # pieces of an answer that are sent as one
_NO_THREAD: Final = "the daemon cannot start a thread: a limit of processes is reached (ulimit -u); try again"

RequestId = int | str | None


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client, and all of them together, may ask of the server."""

    connections: int = 256  # at most; for another one the longest idle is closed
    first_request_s: float = 1.0  # which a connection has for its first request before it is closed for another one
    reserved: int = 16  # more, while all of those run calls; they take no LONG_METHODS
    calls_at_once: int = 8  # of one connection; its next request waits
    request_bytes: int = MAX_REQUEST_BYTES
    held_bytes: int = 32 * 1024 * 1024  # of all requests that are being read or run, small ones not counted
    line_s: float = 30.0  # from a line's first byte to its newline
    idle_s: float = 600.0  # without a request, running or begun; clients connect again
    stall_s: float = 30.0  # in which a client that has something to read takes not a byte
    progress_s: float = 0.1  # between two progress messages of a connection


class Budget:
    """The bytes of requests that all connections hold together.

    The first _SMALL_BYTES of each are free: whoever fills the budget cannot keep small requests from others.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes

    def resize(self, held: int, wanted: int) -> bool:
        """Hold `wanted` bytes where `held` were; False, and nothing changed, when there is no room."""
        more = max(0, wanted - _SMALL_BYTES) - max(0, held - _SMALL_BYTES)
        if more > self._left:
            return False
        self._left -= more
        return True


@dataclass(frozen=True, slots=True)
class _Line:
    pieces: Sequence[bytes]
    sent: Callable[[], None] | None = None


# Sent before a connection is closed that no call is using: a request that crosses it is not run, so the client may
# send it again on another connection.
_CLOSING_LINE: Final = b'{"jsonrpc":"2.0","method":"%s","params":{}}\n' % CLOSING_METHOD.encode()


class ClientConnection:
    """One client.  `serve` returns when it is done with; `hang_up` and `drop_idle` end it from outside.

    The socket is the caller's to close.  `client` is equal for the connections of one program.  `is_reserved`: it has
    one of the reserved places.  `idle_since`: when its last call ended, or it was opened; trio's clock.
    """

    def __init__(
        self,
        sock: trio.socket.SocketType,
        methods: Mapping[str, Handler],
        limits: ConnectionLimits,
        budget: Budget,
        *,
        client: Hashable = None,
        spares: SpareDescriptors | None = None,
    ) -> None:
        self._sock = sock
        self._client = self if client is None else client
        self._spares = spares or SpareDescriptors(0)
        self.is_reserved = False
        self.is_leaving = False  # `drop_idle` was called
        self.idle_since = trio.current_time()
        self._had_call = False
        self._writing = False
        self._has_request = False  # that is no call yet
        self._budget = budget
        self._buffered = 0  # what `budget` holds for `lines`
        self._methods = methods
        self._limits = limits
        self._scope = trio.CancelScope()
        self._lines = LineBuffer()
        self._line_deadline: float | None = None
        self._slots = trio.Semaphore(limits.calls_at_once, max_value=limits.calls_at_once)
        # No buffer: whoever has a line to send waits until the one before it is out.
        self._outbox, self._out = trio.open_memory_channel[_Line](0)
        self._running: set[CallContext] = set()
        self._unanswered: set[CallContext] = set()
        self._progressed: set[CallContext] = set()
        self._progress = trio.Event()

    def hang_up(self) -> None:
        """Drop the client: cancel its calls, tell their threads, send nothing more."""
        self._abandon_calls()
        self._scope.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether closing it loses nothing: no call runs, no request waits to be read.  Half a request is none."""
        busy = self._running or self._unanswered or self._writing or self._has_request
        return not (busy or self._has_unread())

    @property
    def closable_in_s(self) -> float:
        """How long an idle connection is not to be closed for another one: its first request may be on its way."""
        if self._had_call:
            return 0.0
        return max(0.0, self.idle_since + self._limits.first_request_s - trio.current_time())

    def _has_unread(self) -> bool:
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def drop_idle(self) -> None:
        """Close it while it is idle.  The client learns that it may send again a request that crossed this."""
        self.is_leaving = True
        # It reads nothing after this: the next thing that its reading task does is a checkpoint.
        with contextlib.suppress(OSError):
            os.write(self._sock.fileno(), _CLOSING_LINE)
        self._scope.cancel()

    async def serve(self) -> None:
        """Answer requests until the client is gone or has broken the rules."""
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
            # Calls refer to their connection: what they hold is freed now, not when the collector comes by.
            self._unanswered.clear()
            self._progressed.clear()

    # -- in -------------------------------------------------------------------------------------------
    async def _answer_requests(self) -> None:
        async with trio.open_nursery() as calls:
            try:
                while (line := await self._read_line()) is not None:
                    # One for each line, so that a flood of blank ones takes turns with everybody else; and after
                    # `drop_idle` this raises, before a request is looked at that the client may send again.
                    await trio.lowlevel.checkpoint()
                    self._has_request = True
                    await self._take_line(line, calls)
                    self._has_request = False
                # A client may close its writing side and still read: what it asked for is finished.
                for _ in range(self._limits.calls_at_once):
                    await self._slots.acquire()
            finally:
                self._abandon_calls()

    async def _read_line(self) -> bytes | None:
        """The next line, or None when there is none to come, with the client told why if it was at fault."""
        while (line := self._lines.next_line()) is None:
            if self._lines.partial_bytes > self._limits.request_bytes:
                await self._refuse_length()
                return None
            data = await self._receive()
            if data is None:
                return None
            if not data:
                # A request whose newline is missing: whole, as `printf | nc` sends it, or cut off.  Both answer.
                return self._lines.take_rest() or None
            self._lines.feed(data)
            if not self._account():
                await self._send(_busy_line(None))
                return None
        self._account()
        self._line_deadline = None
        if len(line) > self._limits.request_bytes:
            await self._refuse_length()
            return None
        return line

    def _account(self) -> bool:
        """Tell the budget what is buffered; False when it has no room for it."""
        buffered = self._lines.partial_bytes
        if not self._budget.resize(self._buffered, buffered):
            return False
        self._buffered = buffered
        return True

    async def _refuse_length(self) -> None:
        text = f"the request is longer than {self._limits.request_bytes} bytes"
        await self._send(error_line(None, INVALID_REQUEST, text))

    async def _receive(self) -> bytes | None:
        """What comes next; b"" at the end of the stream, None when the client was too slow."""
        while True:
            partial = self._lines.partial_bytes > 0
            with trio.move_on_at(self._read_deadline(partial)):
                try:
                    return await self._sock.recv(RECEIVE_BYTES)
                except ConnectionError:
                    return b""
            if partial:
                text = f"the request was not complete after {self._limits.line_s:g} s"
                await self._send(error_line(None, INVALID_REQUEST, text))
                return None
            if not self._running:
                if self.is_idle:
                    self.drop_idle()
                return None

    def _read_deadline(self, partial: bool) -> float:
        if not partial:
            return trio.current_time() + self._limits.idle_s
        if self._line_deadline is None:
            self._line_deadline = trio.current_time() + self._limits.line_s
        return self._line_deadline

    async def _take_line(self, line: bytes, calls: trio.Nursery) -> None:
        if not line.strip():
            return
        request = _decode_request(line)
        if isinstance(request, bytes):
            await self._send(request)
            return
        found = self._cancel(request) if request.method == CANCEL_METHOD else self._find(request)
        if isinstance(found, bytes):
            if request.id is not msgspec.UNSET:
                await self._send(found)
            return
        if not self._budget.resize(0, len(line)):
            await self._send(_busy_line(_id_of(request)))
            return
        try:
            # While all slots are taken nothing more is read: the kernel's buffer fills, and the client waits.
            await self._slots.acquire()
        except trio.Cancelled:
            self._budget.resize(len(line), 0)
            raise
        call = self._new_call(request)
        self._had_call = True
        self._running.add(call)
        self._unanswered.add(call)
        calls.start_soon(self._run, call, request, len(line), *found)

    def _cancel(self, request: Request) -> bytes:
        """Do what a "cancel" asks for, and give its answer; at once, without waiting for the call itself."""
        request_id = _id_of(request)
        try:
            params = msgspec.json.decode(request.params, type=CancelParams)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return error_line(request_id, INVALID_PARAMS, f"{request.method}: {error}")
        state: CancelState = "unknown"
        for call in self._running:
            if call.request_id == params.id:
                state = "stopping" if call.cancel() else "finishing"
        return b"".join(_result_line(request_id, [msgspec.json.encode(CancelResult(state))]))

    def _find(self, request: Request) -> bytes | tuple[Handler, Any]:
        """The handler of `request` and its decoded parameters, or the line that says what is wrong."""
        request_id = _id_of(request)
        handler = self._methods.get(request.method)
        if handler is None or request.method not in METHODS:
            return error_line(request_id, METHOD_NOT_FOUND, f"no such method: {request.method}")
        if self.is_reserved and request.method in LONG_METHODS:
            text = "all connections to this workspace run calls, and those in reserve take short ones only; try again"
            return error_line(request_id, OPERATION_FAILED, text, ErrorData("EBUSY"))
        try:
            return handler, msgspec.json.decode(request.params, type=METHODS[request.method][0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return error_line(request_id, INVALID_PARAMS, f"{request.method}: {error}")

    # -- calls ----------------------------------------------------------------------------------------
    def _new_call(self, request: Request) -> CallContext:
        return CallContext(
            _id_of(request),
            silent=request.id is msgspec.UNSET,
            send=self._send,
            progress_ready=self._progress_ready,
            client=self._client,
            drop_client=self.hang_up,
        )

    async def _run(self, call: CallContext, request: Request, size_bytes: int, handler: Handler, params: Any) -> None:
        try:
            with self._spares.lent():
                answer = await _answer(request, handler, params, call)
            if request.id is msgspec.UNSET:
                self._answered(call)
                return
            figures = call.take_progress()
            if figures is not None:
                await self._send(figures)
            await self._outbox.send(_Line(answer, lambda: self._answered(call)))
        finally:
            self._running.discard(call)
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
        """Write all of `data`; False when the client is gone or reads nothing."""
        left = memoryview(data)
        while left:
            with trio.move_on_after(self._limits.stall_s) as patience:
                try:
                    left = left[await self._sock.send(left) :]
                except OSError:
                    return False
            if patience.cancelled_caught:
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
            ready, self._progressed = self._progressed, set()
            # A call that has answered meanwhile has sent its last figures itself.
            for call in ready & self._running:
                figures = call.take_progress()
                if figures is not None:
                    await self._send(figures)
            await trio.sleep(self._limits.progress_s)


# -- requests and answers as lines --------------------------------------------------------------------
def _id_of(request: Request) -> RequestId:
    return None if isinstance(request.id, msgspec.UnsetType) else request.id


def _decode_request(line: bytes) -> Request | bytes:
    """The request in `line`, or the error line that answers it.

    A batch (JSON-RPC 2.0, section 6) is refused as one invalid request: a client sends its requests one a line.
    """
    try:
        return _requests.decode(line)
    except msgspec.ValidationError as error:
        shape_error = str(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return error_line(None, PARSE_ERROR, f"not JSON: {error}")
    # It stopped at the first wrong type: whether the rest is JSON, and whose request it was, is still open.
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return error_line(None, PARSE_ERROR, f"not JSON: {error}")
    if isinstance(value, list):
        return error_line(None, INVALID_REQUEST, "batches are not taken: send one request a line")
    request_id = value.get("id") if isinstance(value, dict) else None
    known = isinstance(request_id, int | str) and not isinstance(request_id, bool)
    return error_line(request_id if known else None, INVALID_REQUEST, shape_error)


async def _answer(request: Request, handler: Handler, params: Any, call: CallContext) -> Sequence[bytes]:
    """The line that answers `request`, in pieces."""
    request_id = _id_of(request)
    try:
        with call.scope:
            result = await handler(params, call)
            encoded = result if isinstance(result, Encoded) else [msgspec.json.encode(result)]
            return _result_line(request_id, encoded)
        # Cancelled by its client before it had committed to a change.
        return [_cancelled_line(request_id, request.method)]
    except Exception as group:  # noqa: BLE001 (a failing handler ends its own call, not the daemon)
        try:
            return [_error_line_of(request, _only_error(group), is_cancelled=call.cancelled)]
        finally:
            clear_frames(group)


def _error_line_of(request: Request, error: Exception, *, is_cancelled: bool) -> bytes:
    if isinstance(error, CallCancelledError) and is_cancelled:
        return _cancelled_line(_id_of(request), request.method)
    return _failure_line(_id_of(request), request.method, error)


def _result_line(request_id: RequestId, encoded: Sequence[bytes]) -> list[bytes]:
    """The pieces of the line that answers a request, around those of its result: copied nowhere."""
    line = msgspec.json.encode(Response(request_id, result=msgspec.Raw(b"null")))
    assert line.endswith(b"null}")
    pieces = [line.removesuffix(b"null}"), *encoded, b"}\n"]
    return pieces if len(pieces) > _FEW else [b"".join(pieces)]


def _cancelled_line(request_id: RequestId, method: str) -> bytes:
    became = "its command was ended" if method.endswith("exec") else "nothing was changed"
    text = f"{method} was cancelled: {became}"
    return error_line(request_id, OPERATION_FAILED, text, ErrorData("ECANCELED"))


def _only_error(error: Exception) -> Exception:
    """The error itself where a handler's nursery wrapped a single one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _failure_line(request_id: RequestId, method: str, error: Exception) -> bytes:
    if isinstance(error, InvalidParamsError):
        return error_line(request_id, INVALID_PARAMS, f"{method}: {error}")
    code = errno_of(error)
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        # From the threading module, where the kernel refuses a thread: ulimit -u, TasksMax=, pids.max.
        code, error = errno.EAGAIN, OSError(errno.EAGAIN, _NO_THREAD)
    if code is None and not isinstance(error, OSError):
        _logger.error("control: %s failed unexpectedly", method, exc_info=error)
        return error_line(request_id, INTERNAL_ERROR, f"{method}: an error in vfsd itself; its log has the details")
    text, path = _text_and_path(error, code)
    data = ErrorData(_ERRNO_NAMES.get(code) if code else None, path)
    return error_line(request_id, OPERATION_FAILED, text, data)


def _text_and_path(error: Exception, code: int | None) -> tuple[str, str | None]:
    """What a person reads, and the path it is about as it stands on the wire."""
    if not isinstance(error, OSError):
        return str(error) or os.strerror(code or 0), None
    text = error.strerror or str(error)
    if code == errno.EMFILE:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text = f"{text}: the daemon may have {soft:,} files open; close some, or mount with a higher limit (ulimit -n)"
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return text, None
    path = wire_path(os.fsencode(error.filename))
    return f"{text}: {path}", path


def _busy_line(request_id: RequestId) -> bytes:
    text = "the daemon is holding too many large requests; try again"
    return error_line(request_id, OPERATION_FAILED, text, ErrorData("EBUSY"))


def error_line(request_id: RequestId, code: int, message: str, data: ErrorData | None = None) -> bytes:
    """An error response, newline included."""
    # Text of an exception may hold surrogates (a file name that is no UTF-8), which JSON cannot.
    readable = message.encode("utf-8", "backslashreplace").decode()
    return msgspec.json.encode(Response(request_id, error=ErrorObject(code, readable, data))) + b"\n"
