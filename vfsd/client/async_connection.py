"""The client of the control socket for trio.  It makes the calls of `connection`, several in parallel."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import trio

from vfsd.client.connection import ATTEMPTS, ClosingError, Exchange, connected, timed_out, vanished
from vfsd.wire.lines import RECEIVE_BYTES, LineBuffer
from vfsd.wire.messages import ProgressReport

_BACKLOG_PAUSE_S: Final = 0.05


class AsyncControlClient:
    """Calls a daemon's methods.

    Each call has a connection of its own.  Cancelling a call closes its connection, so the daemon cancels exactly that
    call.
    `timeout_s` bounds each silence (no answer, no progress, no output), not the whole call.
    """

    def __init__(self, socket_path: str, *, timeout_s: float | None = None) -> None:
        self._path = socket_path
        self._timeout_s = timeout_s

    async def call(
        self,
        method: str,
        params: msgspec.Struct | None = None,
        *,
        on_progress: Callable[[ProgressReport], object] | None = None,
        on_output: Callable[[bytes], object] | None = None,
    ) -> Any:
        """As `ControlClient.call`; awaits a callback that returns an awaitable."""
        for attempt in range(ATTEMPTS):
            exchange = Exchange(attempt, method, params, on_progress, on_output)
            with await self._connected() as sock:
                try:
                    await self._send(sock, exchange)
                    await self._receive(sock, exchange)
                except ClosingError:
                    continue
            return exchange.result
        raise vanished(self._path, method)

    async def _connected(self) -> trio.socket.SocketType:
        while True:
            await trio.lowlevel.checkpoint()
            try:
                return trio.socket.from_stdlib_socket(connected(self._path, 0))
            except BlockingIOError:
                # The daemon's backlog is full.  No event reports that it has room again: connect(2), EAGAIN.
                await trio.sleep(_BACKLOG_PAUSE_S)

    async def _send(self, sock: trio.socket.SocketType, exchange: Exchange) -> None:
        left = memoryview(exchange.request)
        while left:
            try:
                with self._time_limit(exchange):
                    left = left[await sock.send(left) :]
            except ConnectionError:
                return  # refused: the daemon's message can still be read

    async def _receive(self, sock: trio.socket.SocketType, exchange: Exchange) -> None:
        """Receive until the exchange is done."""
        lines = LineBuffer()
        while True:
            while (line := lines.next_line()) is not None:
                answered = exchange.take(line)
                if inspect.isawaitable(answered):
                    await answered
                if exchange.done:
                    return
            try:
                with self._time_limit(exchange):
                    data = await sock.recv(RECEIVE_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                raise vanished(self._path, exchange.method)
            lines.feed(data)

    @contextmanager
    def _time_limit(self, exchange: Exchange) -> Iterator[None]:
        try:
            with trio.fail_after(math.inf if self._timeout_s is None else self._timeout_s):
                yield
        except trio.TooSlowError:
            raise timed_out(self._path, exchange.method, self._timeout_s) from None
