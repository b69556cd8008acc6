"""The server: Hypercorn under trio, at a loopback address; and the routes of the application that it serves.

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
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from vfsd.web import actions, api, pages
from vfsd.web.access import Access, Credentials
from vfsd.web.actions import Outcomes
from vfsd.web.api import Events
from vfsd.web.rendering import answer_problem
from vfsd.web.sources import Sources
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


# -- routes ----------------------------------------------------------------------------------------
def application(sources: Sources, credentials: Credentials, port: int) -> ASGIApp:
    """Return the application for a server that listens at the loopback port `port`."""
    routes: list[BaseRoute] = [
        Route("/", pages.home),
        Route("/events", Events().answer),
        Route("/w/{key}/", pages.show_timeline),
        Route("/w/{key}/tree", pages.show_tree),
        Route("/w/{key}/file", pages.show_file),
        Route("/w/{key}/changes", pages.show_changes),
        Route("/w/{key}/compare", pages.show_comparison),
        Route("/w/{key}/conflicts", actions.show_conflicts),
        Route("/w/{key}/done", actions.show_done),
        Route("/w/{key}/snapshot", actions.take_snapshot, methods=["POST"]),
        Route("/api/openapi.json", api.openapi),
        Route("/api/filesystem/meta", api.meta),
        Route("/api/filesystem/tree", api.tree),
        Route("/api/filesystem/file", api.file),
        Route("/api/filesystem/archive", api.archive),
        Mount("/static", StaticFiles(packages=[("vfsd.web", "static")])),
    ]
    for name, ask, act in (
        ("restore", actions.confirm_restore, actions.restore),
        ("drop", actions.confirm_drop, actions.drop),
        ("fork", actions.ask_fork, actions.fork),
        ("merge", actions.confirm_merge, actions.merge),
        ("revert", actions.confirm_revert, actions.revert),
        ("adopt", actions.confirm_adopt, actions.adopt),
        ("apply", actions.confirm_apply, actions.apply),
        ("discard", actions.confirm_discard, actions.discard),
    ):
        routes += [Route(f"/w/{{key}}/{name}", ask), Route(f"/w/{{key}}/{name}", act, methods=["POST"])]
    handlers = dict.fromkeys((HTTPException, OSError, ValueError, Exception), answer_problem)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.sources, app.state.credentials, app.state.outcomes = sources, credentials, Outcomes()
    return Access(app, credentials, port)
