"""Async tests under trio, with a control server to talk to and clients that need not behave."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.waiting import readable
from vfsd.daemon.control.calls import CallContext, Handler
from vfsd.daemon.control.connection import ConnectionLimits, ControlServer
from vfsd.operations.declaration import Empty


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests; one that takes the `clock` fixture runs under that clock."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    trio.run(functools.partial(pyfuncitem.obj, **arguments), clock=arguments.get("clock"))
    return True


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """Stands still until a test calls `jump`."""
    return trio.testing.MockClock()


@pytest.fixture
def path(workdir: Path) -> str:
    return str(workdir / "x.sock")


async def ping(params: Empty, call: CallContext) -> Empty:
    return Empty()


@contextlib.asynccontextmanager
async def serving(
    path: str,
    methods: Mapping[str, Handler] | None = None,
    *,
    limits: ConnectionLimits | None = None,
    allowed_uids: frozenset[int] | None = None,
) -> AsyncIterator[ControlServer]:
    """A running server with `ping` and `methods`, cancelled at the end."""
    server = ControlServer(path, {"ping": ping, **(methods or {})}, limits=limits, allowed_uids=allowed_uids)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        yield server
        nursery.cancel_scope.cancel()


class Peer:
    """A client that sends whatever bytes a test likes."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""

    async def send(self, *values: object) -> None:
        """Each of `values` as one line: bytes as they are, anything else as JSON."""
        lines = (value if isinstance(value, bytes) else json.dumps(value).encode() for value in values)
        await self.stream.send_all(b"".join(line + b"\n" for line in lines))

    async def call(self, method: str, request_id: Any = 1, **params: Any) -> None:
        await self.send({"jsonrpc": "2.0", "method": method, "id": request_id, "params": params})

    async def receive(self) -> dict[str, Any] | None:
        """The next message, or None where the server has closed the connection."""
        while b"\n" not in self._buffer:
            try:
                data = await self.stream.receive_some()
            except trio.BrokenResourceError:  # closed with something of ours unread
                data = b""
            if not data:
                assert self._buffer == b"", "the server closed in the middle of a line"
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        assert message["jsonrpc"] == "2.0"
        return message

    def has_something_to_read(self) -> bool:
        return bool(self._buffer) or readable(self.stream.socket.fileno(), 0)

    async def error(self) -> dict[str, Any]:
        """The next message's error object."""
        message = await self.receive()
        assert message is not None, "the server closed the connection"
        assert "result" not in message
        error: dict[str, Any] = message["error"]
        return error

    async def is_alive(self) -> bool:
        """Whether the server still answers here."""
        await self.call("ping", "alive?")
        return await self.receive() == {"jsonrpc": "2.0", "id": "alive?", "result": {}}


@contextlib.asynccontextmanager
async def peer(path: str) -> AsyncIterator[Peer]:
    async with await trio.open_unix_socket(path) as stream:
        yield Peer(stream)
