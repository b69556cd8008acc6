"""The control socket's listening side: accepts and refuses clients, and notices when they disconnect.

Runs on the daemon's serving loop and never blocks it; handlers do long work in worker threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import trio

from vfsd.daemon.control.calls import CallContext, Handler, error_line
from vfsd.daemon.control.connection import Budget, ClientConnection, ConnectionLimits, SpareDescriptors
from vfsd.operations.catalogue import OPERATIONS
from vfsd.wire.messages import OPERATION_FAILED, ErrorData
from vfsd.wire.sockets import BoundSocket, bind, peer_credentials

# Errors of accept(2) that a later attempt may not have: the process or the system lacks a resource.
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_PAUSE_S: Final = 0.1
_REFUSAL_S: Final = 1.0  # a new socket's buffer is empty, so the text is sent at once or never

_PAUSE_POLL_S: Final = 0.002

_logger = logging.getLogger(__name__)


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
        self._budget = Budget(self._limits.held_bytes)
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
        spares = SpareDescriptors()
        try:
            bound.sock.setblocking(False)
            listener = trio.socket.from_stdlib_socket(bound.sock)
            with _Hangups() as hangups:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(hangups.run)
                    task_status.started()
                    await self._accept_clients(listener, nursery, hangups, spares)
        finally:
            spares.release()
            if self._is_handed_over:
                bound.sock.close()  # the path belongs to another daemon
            else:
                bound.close()

    async def _accept_clients(
        self, listener: trio.socket.SocketType, nursery: trio.Nursery, hangups: _Hangups, spares: SpareDescriptors
    ) -> None:
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
                await self._make_room(spares, error)
                continue
            spares.refill()
            self._accepting = False
            refusal = self._refusal(sock)
            if refusal is not None:
                await _refuse(sock, refusal)
            else:
                # Counted here, not in the new task, so that the next accept counts it.
                pid = peer_credentials(sock).pid or None  # 0: the process is in another pid namespace
                connection = ClientConnection(sock, self._methods, self._limits, self._budget, spares, client=pid)
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

    async def _make_room(self, spares: SpareDescriptors, error: OSError) -> None:
        """After accept(2) failed with `error` for lack of a resource, free a descriptor or wait."""
        if error.errno == errno.EMFILE:
            # First, because spare descriptors are for running calls, not for clients without a request.
            if self._drop_longest_idle():
                await self._closed.wait()
                return
            if spares.release():
                return
        _logger.warning("control: cannot accept a client: %s", error.strerror)
        await trio.sleep(_ACCEPT_PAUSE_S)
        spares.refill()

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
