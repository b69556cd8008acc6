"""The messages between the old daemon and the new one, on a SOCK_SEQPACKET socket with descriptors (SCM_RIGHTS).

    old                                 new
                                        Hello     its version, and the format of a handover that it takes
    Begin    options, [image, log, anchor]; no image if the state is not in memory
                                        Loaded    the state at the beginning
    Follow   the end of the log
                                        Followed  (these two, until little is missing)
    -- the old daemon answers what it has read, and reads no further request --
    OpenFiles  files that only it can open, [their descriptors]  (any number of these)
    Finish   what else is needed, [device, control socket, rest of the state, ...]
                                        Prepared  it could serve now, [its keeper's memory]
    Go       [lock of the journal]      from here on the old daemon serves only if the new one is gone
                                        Serving

Who serves if one of them dies:

- The new one before Serving: the old one goes on.  If the new one has a keeper by then (`KEEPS` in its keeper's
  memory), that restarts it, and the old one ends.
- The old one before Go: its keeper restarts it, and the new one ends; without a keeper the new one serves, if it has
  everything (Finish).  `RELEASED` in the memory of the old keeper is set before Go is sent; if the new one finds it
  set, that keeper will restart nothing, and the new one serves.
- `Abort`, or `Failed`: the old one goes on, and the new one ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
import trio

from protocol.volume_durability import JournalEnd
from vfsd.wire.sockets import receive_descriptors

MAX_BYTES: Final = 192 * 1024  # below the send buffer of a Unix socket (net.core.wmem_default)
MAX_DESCRIPTORS: Final = 200  # below SCM_MAX_FD


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The new daemon's version, and the format of `Resume` and of these messages that it takes."""

    version: str
    format: int


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The image and the log follow.  `options` is the result of `handshake.encode_options`.

    `keeper`: the process that restarts the old daemon if it dies, and when it was started; 0 for none.  `starter`: the
    process that started the first daemon.  `below`: what identifies the lower layer of an overlay, or the directory of
    `host:`.  `reopening`: how to open that layer (`vfsd.daemon.backends.Backend`).  `has_anchor`: the last descriptor
    is `Backend.anchor`.  `pid`: of the old daemon.  `credentials`: those of `protocol.linux.credentials`.  Every
    program of the user could read them in the environment with which the new daemon is started.
    """

    version: str
    options: str
    start: JournalEnd
    keeper: int
    keeper_start_ticks: int
    starter: int
    below: str = ""
    reopening: bytes = b""
    has_anchor: bool = False
    pid: int = 0
    credentials: dict[str, str] = {}


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The image was read."""


class Follow(msgspec.Struct, frozen=True, tag=True):
    """The log is written up to `end`."""

    end: int


class Followed(msgspec.Struct, frozen=True, tag=True):
    """It was read up to there."""


class OpenFiles(msgspec.Struct, frozen=True, tag=True):
    """Files that no name leads to.  Descriptors: one of each of these inodes, at most `MAX_DESCRIPTORS`."""

    inodes: list[int]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Nothing changes any more.  Descriptors: the device, the listening socket, the rest of the volume's state, the
    encoded `Resume`, with `Begin.keeper` the memory of the old keeper, and with `has_family` the table of its memory.

    `journal`: the directory of the journal to continue; None without one.
    """

    end: JournalEnd
    socket_device: int
    socket_inode: int
    journal: str | None
    has_family: bool


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The new daemon, with this process id, waits for Go.  Descriptor: the memory of its keeper, if it has one.

    `main`: the process of the keeper, or without one of the daemon.
    """

    pid: int
    main: int


class Go(msgspec.Struct, frozen=True, tag=True):
    """Serve.  Descriptor: the lock of the journal, if there is one."""


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The new daemon serves."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The old daemon goes on."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The new daemon cannot take over."""

    reason: str


Message = Hello | Begin | Loaded | Follow | Followed | OpenFiles | Finish | Prepared | Go | Serving | Abort | Failed
M = TypeVar("M", bound=msgspec.Struct)


class TakeOverError(OSError):
    """The other side cannot go on: its reason."""


class PeerEndedError(ConnectionError):
    """The other side has closed the channel: it has ended."""


def encode(message: Message) -> bytes:
    """Encode a message as one packet.  ValueError if it is too long."""
    # The standard library keeps the lone surrogates that represent bytes that are not UTF-8.
    data = json.dumps(msgspec.to_builtins(message)).encode()
    if len(data) > MAX_BYTES:
        raise ValueError("the options of the workspace are too long for an upgrade")
    return data


def decode(data: bytes) -> Message:
    """Decode the result of `encode`.  ValueError for anything else."""
    message: Message = msgspec.convert(json.loads(data), Message)
    return message


class Channel:
    """One end of the socket.  Its methods may be used before trio runs, or within it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message.  The messages of this protocol fit into the socket's buffer.  PeerEndedError."""
        try:
            socket.send_fds(self._sock, [encode(message)], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            raise PeerEndedError from None

    async def send_when_ready(self, message: Message, descriptors: Sequence[int]) -> None:
        """Send one of many messages: wait while the other side has many to receive.  OSError, PeerEndedError."""
        while True:
            try:
                return self.send(message, descriptors)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._sock)

    async def receive(self, kind: type[M]) -> tuple[M, list[int]]:
        """Return the next message, which is of this kind, and its descriptors.

        TakeOverError if the other side reports a failure instead; PeerEndedError.
        """
        while True:
            await trio.lowlevel.wait_readable(self._sock)
            with contextlib.suppress(BlockingIOError):
                return _expected(self.receive_now(), kind)

    def receive_now(self) -> tuple[Message, list[int]]:
        """Return the message that has arrived.  BlockingIOError without one; PeerEndedError."""
        try:
            data, found = receive_descriptors(self._sock, MAX_BYTES, MAX_DESCRIPTORS)
        except ConnectionResetError:
            raise PeerEndedError from None
        if not data:
            raise PeerEndedError
        return decode(data), found


def _expected(received: tuple[Message, list[int]], kind: type[M]) -> tuple[M, list[int]]:
    message, descriptors = received
    if isinstance(message, kind):
        return message, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    if isinstance(message, Failed):
        raise TakeOverError(message.reason)
    if isinstance(message, Abort):
        raise TakeOverError("the old daemon goes on")
    raise TakeOverError(f"an unexpected message: {type(message).__name__}")
