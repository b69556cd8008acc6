"""The connection to a Podman service: what its refusals mean."""

from __future__ import annotations

import errno
import json
import socket

import pytest
import trio

from protocol.backends.container.podman.http_connection import PodmanConnection

REMOVED = "retrieving exec session a1 from container b2: container b2 does not exist in database: no such container"


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (404, "no container with that name", errno.ENOENT),
        (500, REMOVED, errno.ENOENT),
        (409, "can only create exec sessions on running containers: container state improper", errno.ENOTCONN),
        (409, "the container is paused", errno.EBUSY),
        (500, "out of luck", errno.EIO),
    ],
)
def test_a_refusal_is_the_error_that_it_means(status: int, message: str, code: int) -> None:
    async def main() -> None:
        body = json.dumps({"message": message}).encode()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            theirs.sendall(b"HTTP/1.1 %d Refused\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
            connection = PodmanConnection(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), ours)
            with pytest.raises(OSError, match=message) as caught:
                await connection.request("GET", "/exec/a1/json")
            await connection.aclose()
        assert caught.value.errno == code

    trio.run(main)
