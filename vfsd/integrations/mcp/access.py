"""Who may use `vfsd mcp --http`: loopback addresses, tokens, and the check of each request.  No import of the SDK."""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

PATH: Final = "/mcp"
_TOKEN_BYTES: Final = 4096  # of a file with a token
_SHORTEST_TOKEN: Final = 16

_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Application = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Address:
    """A loopback address; port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """The address as a URL and the header Host write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.authority}{PATH}"


def parse_address(text: str) -> Address:
    """Parse "PORT" or "HOST:PORT".  ValueError for an address that other machines can reach."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"not a port: {port!r}; give a number up to 65535, or 0 for any free port")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ValueError(f"{host!r} is not a loopback address: give 127.0.0.1, ::1, or the port alone")
    return Address(host, int(port))


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(32)


def read_token(path: str) -> str:
    """Return the token in the file `path`: one line.

    OSError if it cannot be read, PermissionError if other users may read it, ValueError for a file without a token.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # the open of a fifo does not wait
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if found.st_mode & 0o077:
            raise PermissionError(f"other users may use the token file {path}: `chmod 600` it")
        content = file.read(_TOKEN_BYTES + 1)
    token = content.decode("ascii", "replace").strip()
    if not _SHORTEST_TOKEN <= len(token) <= _TOKEN_BYTES or not token.isascii() or len(token.split()) != 1:
        raise ValueError(f"{path} has no token: it needs one word of {_SHORTEST_TOKEN} or more ASCII characters")
    return token


class TokenRequired:
    """An ASGI application: `inner` for requests with the token, 401 for the others.  It does not read their bodies."""

    def __init__(self, inner: _Application, token: str) -> None:
        self._inner = inner
        self._token = token.encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """See the ASGI specification."""
        if scope["type"] == "http" and not self._has_token(scope["headers"]):
            await _refuse(send)
        else:
            await self._inner(scope, receive, send)

    def _has_token(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        # In constant time, so that the time of an answer does not tell how much of a guess is right.
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


async def _refuse(send: _Send) -> None:
    text = "this server needs the header `Authorization: Bearer TOKEN`; `vfsd mcp --http` printed the token"
    body = json.dumps({"error": "invalid_token", "error_description": text}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b'Bearer error="invalid_token"'),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
