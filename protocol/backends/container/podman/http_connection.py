"""PodmanConnection: an HTTP/1.1 connection to a Podman service that may become a plain two-way stream (Upgrade).

podman-py, which does everything else, has no such stream.  h11 implements HTTP/1.1 without I/O, so data that was read
beyond the head of the upgraded reply stays available.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any, Final

import h11
import trio

from protocol.backends.container.podman.service import PodmanService

API: Final = "/v4.0.0/libpod"  # supported by every Podman since 4.0
_RECEIVE_BYTES: Final = 64 * 1024
_MOST_REPLY_BYTES: Final = 4 * 1024 * 1024
_ERRNO_OF: Final = {400: errno.EINVAL, 404: errno.ENOENT, 409: errno.EBUSY}
_NOT_RUNNING: Final = "container state improper"
_REMOVED: Final = "no such container"  # also with status 500, for a command whose container is removed meanwhile


class PodmanConnection:
    """Requests one after the other over `stream`, which wraps the non-blocking socket `plain`."""

    def __init__(self, stream: trio.SocketStream, plain: socket.socket) -> None:
        self.plain: Final = plain
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_RECEIVE_BYTES)

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the JSON of the answer, None if it is empty.

        FileNotFoundError: no such container; OSError with ENOTCONN: it is not running; other OSErrors.
        """
        await self._send(method, path, body, ())
        status, data = await self._reply()
        if status >= 400:
            raise _refusal(status, data)
        try:
            return json.loads(data) if data else None
        except ValueError as error:
            raise OSError(errno.EPROTO, f"the Podman service does not answer with JSON: {error}") from None

    async def upgrade(self, path: str, body: Mapping[str, Any]) -> tuple[trio.SocketStream, bytes]:
        """Upgrade to a plain stream; return it with the data already read from it.  OSErrors as for `request`."""
        await self._send("POST", path, body, ((b"Connection", b"Upgrade"), (b"Upgrade", b"tcp")))
        event = await self._event()
        while isinstance(event, h11.InformationalResponse) and event.status_code != 101:
            event = await self._event()
        if isinstance(event, h11.Response) and event.status_code >= 400:
            raise _refusal(event.status_code, await self._body())
        if not isinstance(event, h11.InformationalResponse):
            raise OSError(errno.EPROTO, "the Podman service does not upgrade the connection")
        return self._stream, bytes(self._http.trailing_data[0])

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, more: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        headers = [
            (b"Host", b"d"),
            (b"Content-Type", b"application/json"),
            (b"Content-Length", b"%d" % len(data)),
            *more,
        ]
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        message = self._http.send(h11.Request(method=method, target=API + path, headers=headers)) or b""
        message += (self._http.send(h11.Data(data=data)) or b"") + (self._http.send(h11.EndOfMessage()) or b"")
        try:
            await self._stream.send_all(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise _lost() from None

    async def _reply(self) -> tuple[int, bytes]:
        event = await self._event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._event()
        assert isinstance(event, h11.Response)
        return event.status_code, await self._body()

    async def _body(self) -> bytes:
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > _MOST_REPLY_BYTES:
                raise OSError(errno.EMSGSIZE, "the Podman service's answer is too long")
        return bytes(body)

    async def _event(self) -> object:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(bytes(await self._stream.receive_some(_RECEIVE_BYTES)))
        except h11.RemoteProtocolError as error:
            raise OSError(errno.EPROTO, f"the Podman service does not speak HTTP: {error}") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise _lost() from None
        if isinstance(event, h11.ConnectionClosed):
            raise _lost()
        return event

    async def aclose(self) -> None:
        """Close the connection."""
        await trio.aclose_forcefully(self._stream)


def _lost() -> OSError:
    return OSError(errno.ECONNRESET, "the Podman service closed the connection")


def _refusal(status: int, data: bytes) -> OSError:
    """The error for a request that the service refused, with the text of its JSON."""
    message = data.decode("utf-8", "replace").strip()
    try:
        answer = json.loads(data)
        message = str(answer.get("message") or answer.get("cause") or message)
    except (ValueError, AttributeError):
        pass
    code = _ERRNO_OF.get(status, errno.EIO)
    if _NOT_RUNNING in message:
        code = errno.ENOTCONN
    elif _REMOVED in message:
        code = errno.ENOENT
    return OSError(code, message[:1000] or f"HTTP status {status}")


async def connect(service: PodmanService) -> PodmanConnection:
    """Connect to `service`.  OSError that says what to do."""
    # Held by the first of two: the thread that made the socket, and the caller if it was cancelled.
    wanted = threading.Lock()
    made: list[socket.socket] = []

    def make() -> None:
        plain = service.connect()
        made.append(plain)
        if not wanted.acquire(blocking=False):
            plain.close()

    try:
        # In a thread: an ssh tunnel may have to be started first.
        await trio.to_thread.run_sync(make, abandon_on_cancel=True)
    except trio.Cancelled:
        if not wanted.acquire(blocking=False):
            made[0].close()
        raise
    (plain,) = made
    plain.setblocking(False)
    return PodmanConnection(trio.SocketStream(trio.socket.from_stdlib_socket(plain)), plain)
