"""Records: the name, time and root of a snapshot, at the end of its pack."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import astuple

from protocol.store.format.layout import Layout
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import Row, encodable
from protocol.volume_extensions import SnapshotInfo, SnapshotKind

if TYPE_CHECKING:
    from protocol.store.format.packs import Pack

_NAME: Final = re.compile(r"([0-9a-f]+)-(\d+)\.snap")


class Record(msgspec.Struct, array_like=True, frozen=True):
    """A snapshot's record as it is stored."""

    version: int
    workspace: str
    name: str
    serial: int
    created_ns: int
    files: int
    directories: int
    size_bytes: int
    tag: str | None
    kind: SnapshotKind
    unstable: tuple[bytes, ...]
    unreadable: tuple[bytes, ...]
    root: Row
    inodes: Row | None = None  # see `inode_rows`; None in records of older versions, and of states without inodes

    @property
    def roots(self) -> tuple[bytes, ...]:
        """The digests of the listings that the snapshot needs, with everything below them."""
        return (self.root.content,) if self.inodes is None else (self.root.content, self.inodes.content)


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Record, strict=False)  # as for rows


def encode_record(record: Record) -> bytes:
    """Encode a record."""
    try:
        return _encoder.encode(record)
    except OverflowError:
        inodes = None if record.inodes is None else encodable(record.inodes)
        return _encoder.encode((*astuple(record)[:-2], encodable(record.root), inodes))


def decode_record(data: bytes) -> Record:
    """Decode a record.  ValueError."""
    return _decoder.decode(data)


def read_record(pack: Pack) -> Record:
    """Read the record of a snapshot's pack.  DamagedError."""
    try:
        record = decode_record(pack.record)
    except ValueError:
        raise DamagedError("the snapshot's record is damaged", pack.name) from None
    if workspace_and_serial(pack.name) != (Layout.workspace_id(record.workspace), record.serial):
        raise DamagedError("the snapshot's file has the name of another snapshot", pack.name)
    return record


def info_of(record: Record) -> SnapshotInfo:
    """The public form of a record."""
    return SnapshotInfo(**{name: getattr(record, name) for name in SnapshotInfo.__struct_fields__})


def pack_name(workspace_id: str, serial: int) -> str:
    """The file name of a snapshot's pack."""
    return f"{workspace_id}-{serial:010d}.snap"


def workspace_and_serial(name: str) -> tuple[str, int] | None:
    """The arguments of `pack_name`; None for a pack that is not a snapshot."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))
