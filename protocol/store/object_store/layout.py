"""The objects of a store, and their keys.

    format                          version and grace period, written once
    names/<name>/<generation>       the record of a snapshot; an empty object: the name was dropped
    packs/<id>.tree.pack            listings and chunk maps
    packs/<id>.data.pack            contents, or chunks of contents of more than CHUNK_BYTES
    condemned/<pack>                the pack is going to be deleted: nothing new may rely on it
    repaired/<id>                   damaged contents were deleted at this time: older snapshots may lack some

An object never changes.  The id of a pack is random and never used twice.  A chunk map has the digest of its content,
and lists the digests of the content's chunks, from which that digest can be computed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from protocol.store.format.digests import CHUNK_BYTES, DIGEST_BYTES, digest_of, digest_of_chunks
from protocol.store.format.packs import DamagedError, damaged_blob
from protocol.store.format.records import Record, decode_record, encode_record
from protocol.store.format.rows import Row, decode_listing

FORMAT: Final = "format"
NAMES: Final = "names"
PACKS: Final = "packs"
CONDEMNED: Final = "condemned"
REPAIRED: Final = "repaired"
CLOCK: Final = "clock"
GRACE_S: Final = 24 * 3600.0
LONGEST_GRACE_S: Final = 10 * 365 * 24 * 3600.0
CLOCK_ERROR_S: Final = 2.0  # S3 and HTTP give times in whole seconds
PACK_BYTES: Final = 8 << 20  # a pack is uploaded when it has so much, in one request
# Larger objects are not read: nobody writes them, and reading one needs as much memory.
LARGEST_PACK_BYTES: Final = 512 << 20  # a pack with the listing of some million names
LARGEST_RECORD_BYTES: Final = 64 << 20
PackKind = Literal["tree", "data"]
_PLAIN: Final = re.compile(rb"[^A-Za-z0-9._-]")
_ESCAPED: Final = re.compile(r"=([0-9A-F]{2})")
_GENERATION_DIGITS: Final = 10
_NAME_MAX: Final = 255


class FormatObject(msgspec.Struct, frozen=True):
    """The object `format`.  `grace_s`: how long a pack stays readable after it was condemned, in seconds."""

    vfsd_object_store: int = 1
    grace_s: float = GRACE_S


class ChunkMap(msgspec.Struct, array_like=True, frozen=True):
    """The size of a content in bytes, and the digests of its chunks, without those of chunks of zeros."""

    size: int
    chunks: dict[int, bytes]


_maps: Final = msgspec.msgpack.Decoder(ChunkMap)


@dataclass(frozen=True, slots=True, order=True)
class Generation:
    """One generation of a name.  `size_bytes` is that of the object; 0: the name was dropped."""

    name: str
    number: int
    size_bytes: int = 0

    @property
    def key(self) -> str:
        """The key of its object."""
        return f"{NAMES}/{encoded_name(self.name)}/{self.number:0{_GENERATION_DIGITS}d}"

    @property
    def is_dropped(self) -> bool:
        """Whether this generation says that the name was dropped."""
        return not self.size_bytes


def generation_of(key: str, size_bytes: int) -> Generation | None:
    """The generation whose object has this key; None for an object that vfsd did not write."""
    parts = key.split("/")
    if len(parts) != 3 or not re.fullmatch(rf"[0-9]{{{_GENERATION_DIGITS}}}", parts[2]):
        return None
    return Generation(decoded_name(parts[1]), int(parts[2]), size_bytes)


def encoded_name(name: str) -> str:
    """A snapshot's name in a key: other bytes than letters, digits and "._-" become "=XX", and so do "." and ".."."""
    if name in {".", ".."}:
        return name.replace(".", "=2E")
    return _PLAIN.sub(lambda match: b"=%02X" % match[0][0], name.encode("utf-8", "surrogateescape")).decode()


def decoded_name(text: str) -> str:
    """The inverse of `encoded_name`."""
    raw = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text).encode("latin-1", "replace")
    return raw.decode("utf-8", "surrogateescape")


def new_pack_name(kind: PackKind) -> str:
    """A name that no pack had."""
    return f"{secrets.token_hex(16)}.{kind}.pack"


def kind_of(name: str) -> PackKind:
    """The kind of a pack: "tree" for listings and chunk maps."""
    return "tree" if name.endswith(".tree.pack") else "data"


def encode_named(record: Record) -> bytes:
    """The object of a snapshot's name: its record, and the digest of that."""
    data = encode_record(record)
    return data + hashlib.sha256(data).digest()


def decode_named(data: bytes, key: str) -> Record:
    """The inverse of `encode_named`.  DamagedError."""
    record, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(record).digest() != digest:
        raise DamagedError("the snapshot's record is damaged", key)
    try:
        return decode_record(record)
    except ValueError:
        raise DamagedError("the snapshot's record is damaged", key) from None


def encode_chunk_map(size: int, chunks: dict[int, bytes]) -> bytes:
    """Encode the chunk map of a content of `size` bytes."""
    return msgspec.msgpack.encode(ChunkMap(size, chunks))


def decode_chunk_map(digest: bytes, data: bytes) -> ChunkMap:
    """The chunk map of the content `digest`, verified.  DamagedError."""
    try:
        found = _maps.decode(data)
    except ValueError:
        raise damaged_blob(digest) from None
    in_range = all(0 <= number * CHUNK_BYTES < found.size for number in found.chunks)
    if found.size <= CHUNK_BYTES or not in_range or digest_of_chunks(found.size, found.chunks) != digest:
        raise damaged_blob(digest)
    return found


def decode_listing_of(digest: bytes, data: bytes) -> list[Row]:
    """The rows of the listing `digest`, whose content was compared with that.  DamagedError.

    The digest says only that the listing is the one that was pushed, and anybody may have pushed it.  So names that
    lead out of the directory are refused here.
    """
    try:
        rows = decode_listing(data)
    except ValueError:
        raise damaged_blob(digest, "is not a listing") from None
    names = {row.name for row in rows}
    if len(names) != len(rows) or not all(map(_is_name, names)):
        raise damaged_blob(digest, "is not a listing")
    return rows


def _is_name(name: bytes) -> bool:
    return 0 < len(name) <= _NAME_MAX and name not in {b".", b".."} and b"/" not in name and b"\0" not in name


def check_blob(digest: bytes, data: bytes) -> None:
    """Compare a blob with its digest: a listing, a content, a chunk or a chunk map.  DamagedError."""
    if digest_of(data) != digest:
        decode_chunk_map(digest, data)
