"""The server: Hypercorn under trio, at a loopback address.

At its end Hypercorn waits for what it sends to a client, however long the client does not read.  So the connections
that are left after `_GRACE_S` are shut down.

Threading: the thread that runs the event loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import stat
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, cast

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve
from starlette.types import ASGIApp

from vfsd.wire.sockets import listen_at_loopback

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

HOST: Final = "127.0.0.1"
_GRACE_S: Final = 0.5  # for running requests, when the server ends
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def listening(port: int) -> socket.socket:
    """Listen at a loopback port; 0 is any free one.  OSError."""
    return listen_at_loopback(HOST, port)


async def serve(app: ASGIApp, sock: socket.socket, ended: Callable[[], Awaitable[None]]) -> None:
    """Serve `app` on a listening socket until `ended` returns.  Runs under trio."""
    address = sock.getsockname()
    config = Config()
    config.bind = [f"fd://{os.dup(sock.fileno())}"]  # Hypercorn closes it
    config.graceful_timeout = _GRACE_S
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("vfsd.web.server")
    async with trio.open_nursery() as nursery:

        async def ending() -> None:
            await ended()
            nursery.start_soon(_disconnect, address)

        # Starlette describes the messages of ASGI as dicts, Hypercorn as TypedDicts.
        await hypercorn_serve(cast("ASGIFramework", app), config, shutdown_trigger=ending, mode="asgi")
        nursery.cancel_scope.cancel()


async def _disconnect(address: tuple[str, int]) -> None:
    """Shut down the connections at `address` of this process, until cancelled."""
    while True:
        await trio.sleep(_GRACE_S)
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(number))) as found:
                    if found.family == socket.AF_INET and found.getsockname() == address:
                        found.shutdown(socket.SHUT_RDWR)


def serve_until_signal(app: ASGIApp, sock: socket.socket) -> int:
    """Serve `app` until SIGINT or SIGTERM arrives, and return the signal's number.  Main thread."""
    ended_by: list[int] = []

    async def ended() -> None:
        with trio.open_signal_receiver(*_SIGNALS) as signals:
            async for number in signals:
                ended_by.append(number)
                return

    trio.run(serve, app, sock, ended)
    return ended_by[0]
