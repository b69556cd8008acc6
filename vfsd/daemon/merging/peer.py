"""Calls of this daemon on the daemon of another workspace, over its control socket.

Only a daemon of the same user is called.  Each call has a connection of its own; a cancelled call closes it, which
cancels it on the other side too.

Threading: the serving loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, Final

import msgspec
import trio

from vfsd.wire.base import Peer
from vfsd.wire.lines import RECEIVE_BYTES, LineBuffer
from vfsd.wire.messages import METHODS, OUTPUT_METHOD, ErrorObject, Output, Request, from_wire_path
from vfsd.wire.sockets import connect, peer_credentials

_ID: Final = 1
_SILENCE_S: Final = 60.0  # without any message; the other daemon reports progress several times a second


class _Message(msgspec.Struct):
    """An answer, or a notification about the call."""

    method: str | None = None
    params: msgspec.Raw = msgspec.Raw(b"{}")
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: ErrorObject | msgspec.UnsetType = msgspec.UNSET


_messages: Final = msgspec.json.Decoder(_Message)
_outputs: Final = msgspec.json.Decoder(Output)


async def call_peer(
    peer: Peer, method: str, params: msgspec.Struct, on_output: Callable[[bytes], None] = lambda _: None
) -> Any:
    """Call `method` of `peer` and return its result.

    OSError: the error that the other daemon answered; ECONNREFUSED if it does not run, EPERM if it belongs to another
    user, ECONNRESET if it ended meanwhile, ETIMEDOUT if it is silent.
    """
    with _connected(peer) as sock:
        request = Request("2.0", method, msgspec.Raw(msgspec.json.encode(params)), _ID)
        try:
            return await _answer(sock, msgspec.json.encode(request) + b"\n", METHODS[method][1], on_output, peer)
        except (ConnectionError, trio.BrokenResourceError):
            raise _ended(peer) from None


def _connected(peer: Peer) -> trio.socket.SocketType:
    try:
        sock = connect(os.fsdecode(from_wire_path(peer.socket)), 0)
    except (ConnectionRefusedError, FileNotFoundError):
        raise OSError(errno.ECONNREFUSED, f"workspace {peer.name!r} is not running; nothing was changed") from None
    if peer_credentials(sock).uid != os.geteuid():
        sock.close()
        raise OSError(errno.EPERM, f"workspace {peer.name!r} belongs to another user, whose changes cannot be merged")
    sock.setblocking(False)
    return trio.socket.from_stdlib_socket(sock)


async def _answer(
    sock: trio.socket.SocketType, request: bytes, kind: type[Any], on_output: Callable[[bytes], None], peer: Peer
) -> Any:
    left = memoryview(request)
    while left:
        left = left[await sock.send(left) :]
    lines = LineBuffer()
    while True:
        while (line := lines.next_line()) is None:
            with trio.move_on_after(_SILENCE_S) as waiting:
                data = await sock.recv(RECEIVE_BYTES)
            if waiting.cancelled_caught:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"the daemon of workspace {peer.name!r} does not answer; nothing was changed",
                )
            if not data:
                raise _ended(peer)
            lines.feed(data)
        message = _messages.decode(line)
        if message.method == OUTPUT_METHOD:
            on_output(_outputs.decode(message.params).data)
        elif not isinstance(message.error, msgspec.UnsetType):
            raise _error(message.error, peer)
        elif not isinstance(message.result, msgspec.UnsetType):
            return msgspec.json.decode(message.result, type=kind)


def _error(error: ErrorObject, peer: Peer) -> OSError:
    name = None if error.data is None else error.data.errno
    number = getattr(errno, name, errno.EIO) if name else errno.EIO
    return OSError(number, f"workspace {peer.name!r}: {error.message}")


def _ended(peer: Peer) -> OSError:
    return OSError(errno.ECONNRESET, f"the daemon of workspace {peer.name!r} ended; nothing was changed")
