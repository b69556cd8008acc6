"""The control socket in the daemon: accepts clients, reads requests, runs calls and writes answers, within limits.

A client holds at most this much memory: one request line, `calls_at_once` running requests, and as many answers as wait
for it to read.  All clients together have `large_calls` large requests, which are being read or are run; they are
decoded one at a time, in a worker thread.  A client that stops reading is dropped.

Runs on the daemon's serving loop and never blocks it; handlers do long work in worker threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import trio

from protocol.values import Value
from vfsd.daemon.control.calls import (
    CallContext,
    Handler,
    answer,
    decode_params,
    decode_request,
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
    OPERATION_FAILED,
    RECEIVE_BYTES,
    CancelParams,
    CancelResult,
    CancelState,
    ErrorData,
    LineBuffer,
    Request,
)
from vfsd.wire.sockets import BoundSocket, bind, peer_credentials

_logger = logging.getLogger(__name__)
_SMALL_BYTES: Final = 16 * 1024  # a request of this size is decoded on the loop, and always has room
_MOST_SPARES: Final = 32
_SPARE_SHARE: Final = 4  # at most this fraction of the limit: 12 of 48
_BUSY: Final = "the daemon has too many large requests; try again"
_FOLLOWED: Final = "too many clients follow this workspace: end a `vfsd log --follow`, or another client that does"


class ConnectionLimits(Value):
    """Limits of one client, and of all of them together."""

    connections: int = 256  # when one more client connects, the connection that is idle for longest is closed
    followed_calls: int = 240  # of all connections, such as `vfsd log --follow`: the others are for calls that end
    calls_at_once: int = 8  # of one connection; its next request waits
    request_bytes: int = MAX_REQUEST_BYTES
    large_calls: int = 8  # of all connections; each takes at most some 3 MB once it is decoded
    idle_s: float = 600.0  # without a running call and without a byte; clients reconnect
    stall_s: float = 30.0  # without reading a byte of waiting output
    progress_s: float = 0.1  # between two progress messages of a connection


_Found: TypeAlias = bytes | tuple[Handler, Any]  # an error line, or a request's handler and its decoded parameters


class _Line(Value):
    pieces: Sequence[bytes]
    sent: Callable[[], None] | None = None


# Sent before an idle connection is closed: a request that crosses it is not run, so the client may send it again on
# another connection.
_CLOSING_LINE: Final = b'{"jsonrpc":"2.0","method":"%s","params":{}}\n' % CLOSING_METHOD.encode()


class SpareDescriptors:
    """Descriptors that are kept open, and closed when a call or accept(2) needs descriptors.  Serving loop only.

    With them calls work even if the process has used all others.  Requests through the mount may use them first; then
    the call fails with EMFILE.
    """

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._count = _MOST_SPARES if soft == resource.RLIM_INFINITY else min(_MOST_SPARES, soft // _SPARE_SHARE)
        self._held: list[int] = []

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


class _Shared:
    """The resources of all connections of a server: places for large requests and for calls that never end."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.decoding = trio.CapacityLimiter(1)
        self.large = trio.Semaphore(limits.large_calls)
        self.followed = trio.Semaphore(limits.followed_calls)
        self.spares = SpareDescriptors()


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
        shared: _Shared,
        *,
        client: Hashable = None,
    ) -> None:
        self._sock = sock
        self._client = self if client is None else client
        self.is_leaving = False  # `drop_idle` was called
        self.idle_since = trio.current_time()
        self._writing = False
        self._has_request = False  # one that has not become a call yet
        self._shared = shared
        self._is_large = False  # the request that is being read holds a place of `large`
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
            self._give_room_back()
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
                    self._give_room_back()
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
                return self._lines.take_rest() or None
            self._lines.feed(data)
            self._lines.skip_empty_lines()
            if not await self._find_room(self._lines.partial_bytes):
                return None
        self._lines.skip_empty_lines()
        if len(line) > self._limits.request_bytes:
            await self._refuse_length()
            return None
        return line

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

    async def _find_room(self, size_bytes: int) -> bool:
        """Wait until the request that is being read has a place among the large ones, if it needs one.

        False, after an error line, if none becomes free in time.
        """
        if size_bytes > _SMALL_BYTES and not self._is_large:
            with trio.move_on_after(self._limits.stall_s):
                await self._shared.large.acquire()
                self._is_large = True
            if not self._is_large:
                await self._send(error_line(None, OPERATION_FAILED, _BUSY, ErrorData("EBUSY")))
                return False
        return True

    def _give_room_back(self) -> None:
        if self._is_large:
            self._shared.large.release()
        self._is_large = False

    async def _take_line(self, line: bytes, calls: trio.Nursery) -> None:
        if not line.strip():
            return
        if not await self._find_room(len(line)):
            return
        if len(line) <= _SMALL_BYTES:
            request, found = self._decoded(line)
        else:
            request, found = await trio.to_thread.run_sync(self._decoded, line, limiter=self._shared.decoding)
        del line
        if isinstance(request, bytes):
            await self._send(request)
            return
        if request.method == CANCEL_METHOD:
            found = self._cancel(request)
        if isinstance(found, bytes):
            if request.id is not msgspec.UNSET:
                await self._send(found)
            return
        # While all slots are in use nothing is read: the kernel's buffer fills, and the client waits.
        await self._slots.acquire()
        if OPERATIONS[request.method].is_followed:
            try:
                self._shared.followed.acquire_nowait()
            except trio.WouldBlock:
                self._slots.release()
                await self._send(error_line(request_id(request), OPERATION_FAILED, _FOLLOWED, ErrorData("EBUSY")))
                return
        request = msgspec.structs.replace(request, params=msgspec.Raw(b""))  # which has the line
        call = self._new_call(request)
        self._running[call] = request.method
        self._unanswered.add(call)
        calls.start_soon(self._run, call, request, self._is_large, *found)
        self._is_large = False  # `_run` gives the place back

    def _decoded(self, line: bytes) -> tuple[Request | bytes, _Found]:
        """Return the request in `line`, or an error line if it is none; and what `_find` finds.  Any thread."""
        request = decode_request(line)
        return request, b"" if isinstance(request, bytes) or request.method == CANCEL_METHOD else self._find(request)

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

    async def _run(self, call: CallContext, request: Request, is_large: bool, handler: Handler, params: Any) -> None:
        call.task = trio.lowlevel.current_task()
        self._shared.spares.release()
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
            self._shared.spares.refill()
            self._running.pop(call, None)
            self.idle_since = trio.current_time()
            self._slots.release()
            if is_large:
                self._shared.large.release()
            if OPERATIONS[request.method].is_followed:
                self._shared.followed.release()

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


# Errors of accept(2) that a later attempt may not have: the process or the system lacks a resource.
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_PAUSE_S: Final = 0.1
_REFUSAL_S: Final = 1.0  # a new socket's buffer is empty, so the text is sent at once or never

_PAUSE_POLL_S: Final = 0.002


class ControlServer:
    """Serves `methods` (names of OPERATIONS) at `socket_path` to `allowed_uids` (default: this user and root)."""

    def __init__(
        self,
        socket_path: str,
        methods: Mapping[str, Handler],
        *,
        allowed_uids: frozenset[int] | None = None,
        limits: ConnectionLimits | None = None,
        given: BoundSocket | None = None,
    ) -> None:
        """`given`: the socket at that path, which another daemon hands over."""
        self.bound = given
        self._path = socket_path
        self._methods = methods
        self._allowed = frozenset({os.getuid(), 0}) if allowed_uids is None else allowed_uids
        self._limits = limits or ConnectionLimits()
        self._shared = _Shared(self._limits)
        self._connections: dict[ClientConnection, None] = {}  # the oldest first
        self._closed = trio.Event()  # set when the next connection closes
        self._accepting = False
        self._going_on: trio.Event | None = None  # while the server pauses
        self._is_handed_over = False

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return len(self._connections)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; reports `started` when clients can connect.

        Binds with mode 0600, and removes the socket at the end unless another daemon replaced it.
        FileExistsError if a running daemon serves that path, or if a file of another type exists there.
        """
        bound = self.bound = self.bound or bind(self._path)
        self._shared.spares.refill()
        try:
            bound.sock.setblocking(False)
            listener = trio.socket.from_stdlib_socket(bound.sock)
            with _Hangups() as hangups:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(hangups.run)
                    task_status.started()
                    await self._accept_clients(listener, nursery, hangups)
        finally:
            self._shared.spares.release()
            if self._is_handed_over:
                bound.sock.close()  # the path belongs to another daemon
            else:
                bound.close()

    async def _accept_clients(self, listener: trio.socket.SocketType, nursery: trio.Nursery, hangups: _Hangups) -> None:
        while True:
            # First, because without free descriptors accept(2) fails with EMFILE even if no client waits.
            await trio.lowlevel.wait_readable(listener)
            if self._going_on is not None:
                await self._going_on.wait()
                continue
            self._accepting = True
            try:
                sock, _ = await listener.accept()
            except OSError as error:
                self._accepting = False
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                await self._make_room(error)
                continue
            self._shared.spares.refill()
            self._accepting = False
            refusal = self._refusal(sock)
            if refusal is not None:
                await _refuse(sock, refusal)
            else:
                # Counted here, not in the new task, so that the next accept counts it.
                pid = peer_credentials(sock).pid or None  # 0: the process is in another pid namespace
                connection = ClientConnection(sock, self._methods, self._limits, self._shared, client=pid)
                self._connections[connection] = None
                nursery.start_soon(self._serve_client, sock, connection, hangups)

    # -- a handover to another daemon --------------------------------------------------------------
    def running(self, besides: CallContext) -> list[str]:
        """Return the methods of the calls that run, without `besides`, and those that wait or that clients repeat."""
        found = [method for connection in self._connections for method in connection.running(besides)]
        return [method for method in found if not (OPERATIONS[method].is_followed or OPERATIONS[method].waits)]

    async def pause(self, besides: CallContext, is_waiting: Callable[[CallContext], bool]) -> None:
        """Accept no client, and return when no other call than `besides` runs and no other connection is open.

        Clients that wait, or whose idle connections were closed, are served after `go_on`, or by another daemon.  So
        are those whose calls `is_waiting` names, which have done nothing yet: they are asked to call again.
        """

        def waits(call: CallContext, method: str) -> bool:
            return OPERATIONS[method].waits or (call.is_repeatable and is_waiting(call))

        self._going_on = trio.Event()
        while True:
            others = [connection for connection in self._connections if not connection.has(besides)]
            if not others and not self._accepting and not self.running(besides):
                return
            for connection in others:
                if connection.is_leaving:
                    continue
                if connection.is_idle:
                    connection.drop_idle()
                elif running := set(connection.running()):
                    if all(OPERATIONS[method].is_followed for method in running):
                        connection.hang_up()
                    elif connection.has_only(waits):
                        connection.ask_again()
            await trio.sleep(_PAUSE_POLL_S)

    def go_on(self) -> None:
        """End the pause, if there is one."""
        going_on, self._going_on = self._going_on, None
        if going_on is not None:
            going_on.set()

    def hand_over(self) -> None:
        """Leave the socket's path to another daemon, which has a duplicate of the socket."""
        self._is_handed_over = True

    async def _make_room(self, error: OSError) -> None:
        """After accept(2) failed with `error` for lack of a resource, free a descriptor or wait."""
        if error.errno == errno.EMFILE:
            # First, because spare descriptors are for running calls, not for clients without a request.
            if self._drop_longest_idle():
                await self._closed.wait()
                return
            if self._shared.spares.release():
                return
        _logger.warning("control: cannot accept a client: %s", error.strerror)
        await trio.sleep(_ACCEPT_PAUSE_S)
        self._shared.spares.refill()

    def _drop_longest_idle(self) -> bool:
        """Close the connection that is idle for longest; False if all are in use."""
        for connection in sorted(self._connections, key=lambda each: each.idle_since):
            if not connection.is_leaving and connection.is_idle:
                connection.drop_idle()
                return True
        return False

    def _refusal(self, sock: trio.socket.SocketType) -> bytes | None:
        """Return the error line that refuses this client, or None to accept it."""
        peer = peer_credentials(sock)
        if peer.uid not in self._allowed:
            _logger.warning("control: refused uid %d (pid %d)", peer.uid, peer.pid)
            text = f"uid {peer.uid} may not control this workspace: only its owner and root may"
            return error_line(None, OPERATION_FAILED, text, ErrorData("EACCES"))
        used, limit = sum(not connection.is_leaving for connection in self._connections), self._limits.connections
        if used < limit or self._drop_longest_idle():
            return None
        text = f"all {limit} connections to this workspace are in use by calls that run; try again"
        return error_line(None, OPERATION_FAILED, text, ErrorData("EBUSY"))

    async def _serve_client(
        self, sock: trio.socket.SocketType, connection: ClientConnection, hangups: _Hangups
    ) -> None:
        try:
            with sock, hangups.watching(sock, connection):
                await connection.serve()
        except Exception:
            _logger.exception("control: a connection failed unexpectedly")
        finally:
            del self._connections[connection]
            self._closed.set()
            self._closed = trio.Event()


async def _refuse(sock: trio.socket.SocketType, line: bytes) -> None:
    with sock, trio.move_on_after(_REFUSAL_S):
        try:
            await sock.send(line)
        except OSError:
            pass  # the client disconnected


class _Hangups:
    """Notices that a client disconnected, even while its connection does not read.

    A connection does not read while it runs as many calls as it may.  One epoll descriptor watches all clients for
    EPOLLHUP, which epoll_ctl(2) always reports.  A client that shut down only its writing side causes EPOLLRDHUP
    instead, and is still answered.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, ClientConnection] = {}

    def __enter__(self) -> _Hangups:
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()

    @contextlib.contextmanager
    def watching(self, sock: trio.socket.SocketType, connection: ClientConnection) -> Iterator[None]:
        """Inside the block, make `connection` hang up when the peer of `sock` closes."""
        descriptor = sock.fileno()
        self._watched[descriptor] = connection
        self._epoll.register(descriptor, select.EPOLLONESHOT)
        try:
            yield
        finally:
            self._epoll.unregister(descriptor)
            del self._watched[descriptor]

    async def run(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for descriptor, _ in self._epoll.poll(0):
                self._watched[descriptor].hang_up()
