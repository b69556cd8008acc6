"""Serve MCP over streamable HTTP on a loopback address, for clients that have the token.

Every request needs the header "Authorization: Bearer TOKEN".  The SDK checks the headers Host and Origin, so a web page
cannot reach the server through a name that resolves to this machine.
"""

from __future__ import annotations

import logging
import signal
import socket
from typing import Any, Final

import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings

from vfsd.integrations.mcp.access import PATH, Address, TokenRequired
from vfsd.wire.sockets import listen_at_loopback

_SESSIONS: Final = 64
_BODY_BYTES: Final = 64 << 20  # a request that writes a file of 32 MiB, with room for what JSON escapes
_GRACE_S: Final = 1  # for running calls, when the server ends
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def listen(address: Address) -> tuple[socket.socket, Address]:
    """Listen at `address`.  Return the socket, and the address with the port that was chosen.  OSError."""
    sock = listen_at_loopback(address.host, address.port)
    return sock, Address(address.host, sock.getsockname()[1])


async def serve_http(server: Server[Any], sock: socket.socket, address: Address, token: str) -> int | None:
    """Serve clients that connect to `sock`, until a signal arrives, and return its number.  Main thread.

    Calls that run then are cancelled after a second.
    """
    names = (address.authority, f"localhost:{address.port}")
    application = server.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=_BODY_BYTES,
        max_sessions=_SESSIONS,
        transport_security=TransportSecuritySettings(
            allowed_hosts=list(names), allowed_origins=[f"http://{name}" for name in names]
        ),
    )
    config = uvicorn.Config(
        TokenRequired(application, token),
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=_GRACE_S,
    )
    serving = uvicorn.Server(config)
    # uvicorn logs each request that it cancels when it ends, with a traceback.
    logging.getLogger("uvicorn.error").addFilter(lambda _: not serving.should_exit)
    ended_by: list[int] = []
    # uvicorn handles the signals, and raises them again when it has ended.
    before = {number: signal.signal(number, lambda number, _: ended_by.append(number)) for number in _SIGNALS}
    try:
        await serving.serve([sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return ended_by[0] if ended_by else None
