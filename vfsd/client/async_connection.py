"""The client of the control socket for trio.  It makes the calls of `connection`, several in parallel."""

from __future__ import annotations

import inspect
import math
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import trio

from vfsd.client.connection import ATTEMPTS, ClosingError, Exchange, no_daemon, timed_out, vanished
from vfsd.wire.lines import RECEIVE_BYTES, LineBuffer
from vfsd.wire.messages import Output, ProgressReport
from vfsd.wire.sockets import connect, is_closed_by_peer

__all__ = ["AsyncControlClient"]

_BACKLOG_PAUSE_S: Final = 0.05


class AsyncControlClient:
    """Calls a daemon's methods.

    Each running call has a connection of its own, which a later call reuses.  Cancelling a call closes its connection,
    so the daemon cancels exactly that call.
    `timeout_s` bounds each silence (no answer, no progress, no output), not the whole call.
    """

    def __init__(self, socket_path: str, *, timeout_s: float | None = None) -> None:
        self._path = socket_path
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._last_id = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the idle connections; later calls open others."""
        while self._idle:
            self._idle.pop().close()

    async def call(
        self,
        method: str,
        params: msgspec.Struct | None = None,
        *,
        on_progress: Callable[[ProgressReport], object] | None = None,
        on_output: Callable[[bytes], object] | None = None,
    ) -> Any:
        """As `ControlClient.call`; awaits a callback that returns an awaitable."""
        for _ in range(ATTEMPTS):
            try:
                return await self._call(method, params, on_progress, on_output)
            except ClosingError:
                continue
        raise vanished(self._path, method)

    async def _call(
        self,
        method: str,
        params: msgspec.Struct | None,
        on_progress: Callable[[ProgressReport], object] | None,
        on_output: Callable[[bytes], object] | None,
    ) -> Any:
        self._last_id += 1
        exchange = Exchange(self._last_id, method, params)
        connection = await self._connected()
        finished = False
        try:
            await connection.send(exchange)
            async with aclosing(connection.received(exchange)) as lines:
                async for line in lines:
                    event = exchange.take(line)
                    if isinstance(event, ProgressReport) and on_progress is not None:
                        await _finish(on_progress(event))
                    elif isinstance(event, Output) and on_output is not None:
                        await _finish(on_output(event.data))
                    if exchange.done:
                        break
            finished = True
        finally:
            if finished or exchange.done:
                self._idle.append(connection)
            else:
                connection.close()
        return exchange.result

    async def _connected(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.stale:
                return connection
            connection.close()
        while True:
            await trio.lowlevel.checkpoint()
            try:
                return _Connection(self._path, connect(self._path, 0), self._timeout_s)
            except BlockingIOError:
                # The daemon's backlog is full.  No event reports that it has room again: connect(2), EAGAIN.
                await trio.sleep(_BACKLOG_PAUSE_S)
            except OSError as error:
                raise no_daemon(self._path, error) from error


async def _finish(value: object) -> None:
    if inspect.isawaitable(value):
        await value


class _Connection:
    """One connection, used by one call at a time."""

    def __init__(self, path: str, sock: socket.socket, timeout_s: float | None) -> None:
        sock.setblocking(False)
        self._path = path
        self._timeout_s = timeout_s
        self._raw = sock
        self._sock = trio.socket.from_stdlib_socket(sock)
        self._lines = LineBuffer()

    @property
    def stale(self) -> bool:
        """Whether the daemon closed the connection: it closes idle ones, and may have been restarted."""
        return is_closed_by_peer(self._raw)

    def close(self) -> None:
        self._sock.close()

    async def send(self, exchange: Exchange) -> None:
        left = memoryview(exchange.request)
        while left:
            try:
                with self._time_limit():
                    left = left[await self._sock.send(left) :]
            except ConnectionError:
                return  # refused: the daemon's message can still be read
            except trio.TooSlowError:
                raise timed_out(self._path, exchange.method, self._timeout_s) from None

    async def received(self, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        while True:
            while (line := self._lines.next_line()) is not None:
                yield line
            self._lines.feed(await self._receive(exchange))

    async def _receive(self, exchange: Exchange) -> bytes:
        try:
            with self._time_limit():
                data = await self._sock.recv(RECEIVE_BYTES)
        except trio.TooSlowError:
            raise timed_out(self._path, exchange.method, self._timeout_s) from None
        except ConnectionError:
            data = b""
        if not data:
            raise vanished(self._path, exchange.method)
        return data

    def _time_limit(self) -> AbstractContextManager[object]:
        return trio.fail_after(math.inf if self._timeout_s is None else self._timeout_s)
