"""The control socket's listening side: who may connect, how many, and who has gone away.

Runs on the daemon's serving loop and never blocks it; what takes long belongs in a handler's worker thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
from collections.abc import Iterator, Mapping
from typing import Final

import trio

from vfsd.daemon.control.call_context import CallCancelledError, CallContext, Handler
from vfsd.daemon.control.connection import Budget, ClientConnection, ConnectionLimits, error_line
from vfsd.daemon.control.descriptors import SpareDescriptors
from vfsd.wire.messages import OPERATION_FAILED, ErrorData, InvalidParamsError
from vfsd.wire.sockets import bind, peer_credentials

__all__ = ["CallCancelledError", "CallContext", "ConnectionLimits", "ControlServer", "Handler", "InvalidParamsError"]

# accept(2): the process or the system is out of something; it may have it again in a moment.
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_PAUSE_S: Final = 0.1
_REFUSAL_S: Final = 1.0  # a new socket's buffer is empty: the text goes out at once or never

_logger = logging.getLogger(__name__)


class ControlServer:
    """Serves `methods` (names of METHODS) at `socket_path` to `allowed_uids` (default: this user and root)."""

    def __init__(
        self,
        socket_path: str,
        methods: Mapping[str, Handler],
        *,
        allowed_uids: frozenset[int] | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._path = socket_path
        self._methods = methods
        self._allowed = frozenset({os.getuid(), 0}) if allowed_uids is None else allowed_uids
        self._limits = limits or ConnectionLimits()
        self._budget = Budget(self._limits.held_bytes)
        self._connections: dict[ClientConnection, None] = {}  # the oldest first
        self._closed = trio.Event()  # set when the next one is
        self._full = False

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return len(self._connections)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; started when clients can connect.

        Binds with mode 0600, and removes the socket again unless another has taken its place.
        FileExistsError where a living daemon serves that path, or where something else is in the way.
        """
        bound = bind(self._path)
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
            spares.close()
            bound.close()

    async def _accept_clients(
        self, listener: trio.socket.SocketType, nursery: trio.Nursery, hangups: _Hangups, spares: SpareDescriptors
    ) -> None:
        while True:
            # First, because without free descriptors accept(2) fails with EMFILE though no client is there.
            await trio.lowlevel.wait_readable(listener)
            await self._wait_for_place()
            try:
                sock, _ = await listener.accept()
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                await self._make_room(spares, error)
                continue
            spares.refill()  # what was given for it, if connections have closed since
            refusal = self._refusal(sock)
            if refusal is not None:
                await _refuse(sock, refusal)
            else:
                # Counted here, not in the task: the next accept must see it.
                pid = peer_credentials(sock).pid or None  # 0: of a process that this pid namespace does not see
                connection = ClientConnection(
                    sock, self._methods, self._limits, self._budget, client=pid, spares=spares
                )
                connection.is_reserved = self._used() >= self._limits.connections
                self._connections[connection] = None
                nursery.start_soon(self._serve_client, sock, connection, hangups)

    async def _wait_for_place(self) -> None:
        """Wait while all connections are in use and those that are idle may still send their first request.

        The next client is accepted after `ConnectionLimits.first_request_s` at the latest.
        """
        while self._used() >= self._limits.connections:
            idle = [each.closable_in_s for each in self._connections if not each.is_leaving and each.is_idle]
            if not idle or min(idle) == 0:
                return
            with trio.move_on_after(min(idle)):
                await self._closed.wait()

    async def _make_room(self, spares: SpareDescriptors, error: OSError) -> None:
        """After an accept(2) that `error` says lacked a descriptor, or memory: have one for the next attempt."""
        if error.errno == errno.EMFILE:
            # Young ones too: the spare descriptors are for calls that run, not for clients that may ask something.
            if self._drop_longest_idle(even_young=True):
                await self._closed.wait()
                return
            if spares.take_one():
                return
        _logger.warning("control: cannot accept a client: %s", error.strerror)
        await trio.sleep(_ACCEPT_PAUSE_S)
        spares.refill()

    def _used(self) -> int:
        return sum(not connection.is_leaving for connection in self._connections)

    def _drop_longest_idle(self, *, even_young: bool = False) -> bool:
        """Close the connection that has had no call for the longest time; False where none may be closed.

        With `even_young` also one that is within `ConnectionLimits.first_request_s` of its start.
        """
        for connection in sorted(self._connections, key=lambda each: each.idle_since):
            may_close = even_young or connection.closable_in_s == 0
            if may_close and not connection.is_leaving and connection.is_idle:
                connection.drop_idle()
                return True
        return False

    def _refusal(self, sock: trio.socket.SocketType) -> bytes | None:
        """Why this client is not served, or None when it is."""
        peer = peer_credentials(sock)
        if peer.uid not in self._allowed:
            _logger.warning("control: refused uid %d (pid %d)", peer.uid, peer.pid)
            text = f"uid {peer.uid} may not control this workspace: only its owner and root may"
            return error_line(None, OPERATION_FAILED, text, ErrorData("EACCES"))
        used, limits = self._used(), self._limits
        if used < limits.connections or self._drop_longest_idle():
            self._full = False
            return None
        # One line of log for each time it becomes full, not for each of a thousand clients.
        if not self._full:
            _logger.warning("control: all %d connections are in use by calls that run", limits.connections)
        self._full = True
        if used < limits.connections + limits.reserved:
            return None
        text = f"all {limits.connections} connections to this workspace are in use by calls that run; try again"
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
            if not connection.is_reserved:
                self._promote()

    def _promote(self) -> None:
        """Give the place of an ordinary connection that has ended to one that has a reserved place."""
        for connection in self._connections:
            if connection.is_reserved:
                connection.is_reserved = False
                return


async def _refuse(sock: trio.socket.SocketType, line: bytes) -> None:
    with sock, trio.move_on_after(_REFUSAL_S):
        try:
            await sock.send(line)
        except OSError:
            pass  # it has gone already


class _Hangups:
    """Tells connections that their client has closed, also while they do not read.

    Reading would show it too, but a connection whose calls are all in use leaves its requests in the kernel's
    buffer.  One epoll descriptor watches all clients for EPOLLHUP alone, which epoll_ctl(2) always reports:
    a client that only shut down its writing side gives EPOLLRDHUP, and is still answered.
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
        """Have `connection` hang up when the peer of `sock` closes."""
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
