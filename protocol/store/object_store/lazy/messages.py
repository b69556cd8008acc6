"""The messages between a daemon and its helper, which fetches blobs: MessagePack with a length in front.

The first message of the daemon is `Start`, and the helper answers `Opened` or `Failed` with number 0.  After that the
daemon sends `Fetch`, and gets one `Blobs` or `Failed` for each, in any order; and `Progress` now and then.  The helper
ends with the connection.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

_LENGTH: Final = struct.Struct("<I")
_MOST_BYTES: Final = 1 << 30
BlobKind = Literal["tree", "data"]


class Start(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Open the snapshot `name` of the store at `url`; None: the only one.

    With `root`, the digest of a root listing, an older generation of `name` that has it is preferred.  `record` is that
    of the snapshot if it was opened before: then `name` is not looked up again.
    """

    url: str
    options: dict[str, str]
    name: str | None
    root: bytes | None
    record: bytes | None
    created_s: float  # the store's time of the record, or 0.0
    timeout_s: float
    cache_directory: str | None
    index_directory: str | None
    cache_bytes: int
    prefetch: bool


class Opened(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The snapshot: its name, its record as it is stored, and the store's time of that."""

    name: str
    record: bytes
    created_s: float


class Fetch(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Fetch blobs, and then those in `ahead`, which the daemon will probably need next."""

    number: int
    kind: BlobKind
    digests: list[bytes]
    ahead: list[bytes]


class Blobs(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The blobs of a `Fetch`. Each has been compared with its digest."""

    number: int
    blobs: list[bytes]


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The error of a `Fetch`, or of `Start`.  `is_damage`: the store answered, and what it has is wrong or gone."""

    number: int
    code: int
    text: str
    is_damage: bool


class Progress(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """What was transferred so far, and what the prefetch has done of all it has to do.

    `prefetch`: its state.  `cache_failure`: why the cache cannot be written, or "".
    """

    transferred_bytes: int
    done_bytes: int
    total_bytes: int
    prefetch: str
    cache_failure: str = ""


Request: TypeAlias = Start | Fetch
Reply: TypeAlias = Opened | Blobs | Failed | Progress
_encoder: Final = msgspec.msgpack.Encoder()
requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
replies: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)


def send(connection: socket.socket, message: Request | Reply) -> None:
    """Send a message.  OSError."""
    data = _encoder.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def received(connection: socket.socket) -> Iterator[bytes]:
    """Yield the encoded messages that arrive, until the other end closes the connection.  OSError."""
    while True:
        head = _exactly(connection, _LENGTH.size)
        if head is None:
            return
        (length,) = _LENGTH.unpack(head)
        body = _exactly(connection, length) if length <= _MOST_BYTES else None
        if body is None:
            return
        yield body


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    """Receive `length` bytes; None if the connection ends before."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)
