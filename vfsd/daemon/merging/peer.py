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

from vfsd.operations.declaration import Peer
from vfsd.wire.messages import ATTEMPTS, RECEIVE_BYTES, ClosingError, ControlError, Exchange, LineBuffer, from_wire_path
from vfsd.wire.sockets import connect, peer_credentials

_SILENCE_S: Final = 60.0  # without any message; the other daemon reports progress several times a second


async def call_peer(
    peer: Peer, method: str, params: msgspec.Struct, on_output: Callable[[bytes], None] = lambda _: None
) -> Any:
    """Call `method` of `peer` and return its result.

    OSError: the error that the other daemon answered; ECONNREFUSED if it does not run, EPERM if it belongs to another
    user, ECONNRESET if it ended meanwhile, ETIMEDOUT if it is silent.
    """
    for _ in range(ATTEMPTS):
        exchange = Exchange(1, method, params, on_output=on_output)
        with _connected(peer) as sock:
            try:
                return await _answer(sock, exchange, peer)
            except ControlError as error:
                raise OSError(error.errno or errno.EIO, f"workspace {peer.name!r}: {error}") from None
            except ClosingError:
                continue
            except (ConnectionError, trio.BrokenResourceError):
                break
    raise _ended(peer)


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


async def _answer(sock: trio.socket.SocketType, exchange: Exchange, peer: Peer) -> Any:
    left = memoryview(exchange.request)
    while left:
        left = left[await sock.send(left) :]
    lines = LineBuffer()
    while not exchange.done:
        while (line := lines.next_line()) is None:
            with trio.move_on_after(_SILENCE_S) as waiting:
                data = await sock.recv(RECEIVE_BYTES)
            if waiting.cancelled_caught:
                text = f"the daemon of workspace {peer.name!r} does not answer; nothing was changed"
                raise TimeoutError(errno.ETIMEDOUT, text)
            if not data:
                raise _ended(peer)
            lines.feed(data)
        exchange.take(line)
    return exchange.result


def _ended(peer: Peer) -> OSError:
    return OSError(errno.ECONNRESET, f"the daemon of workspace {peer.name!r} ended; nothing was changed")
