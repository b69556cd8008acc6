"""The objects of a remote store and their keys; `RemotePacks`: which packs it has, and verified reads of their blobs.

A view of the store lists the markers of condemned packs first, and the packs afterwards.  If it calls a pack usable,
there was a moment after the view began when the pack existed and was not condemned: docs/store.md relies on
this order.

Threading: one thread at a time.

The objects of a store:

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

import contextlib
import hashlib
import os
import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from protocol.linux.regular_file import write_atomically
from protocol.store.format.digests import CHUNK_BYTES, DIGEST_BYTES, digest_of, digest_of_chunks
from protocol.store.format.packs import BlobLocation, DamagedError, Pack, PackLookup, damaged_blob
from protocol.store.format.rows import Record, Row, decode_listing, decode_record, encode_record

if TYPE_CHECKING:
    from protocol.store.object_store.storage import Objects, Storage

_TAIL_BYTES: Final = 64 << 10  # holds the index of a pack with 1,300 blobs
_GAP_BYTES: Final = 64 << 10  # reading so much more costs less than another request
_RANGE_BYTES: Final = 4 << 20
_IN_FLIGHT: Final = 12
_MOVES_MAX: Final = 8  # how often a blob is looked for that collections move
_CACHE_BYTES: Final = 256 << 20


class IndexCache:
    """Indexes of packs on this machine's disk, of all remote stores; a pack never changes.  None: no cache."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory

    def get(self, name: str) -> bytes | None:
        """The end of a pack, from its index on, or more."""
        if self._directory is None:
            return None
        path = os.path.join(self._directory, name)
        with contextlib.suppress(OSError), open(path, "rb") as file:
            os.utime(path)
            return file.read()
        return None

    def put(self, name: str, end: bytes) -> None:
        """Keep the end of a pack.  A cache that cannot be written is not an error."""
        if self._directory is not None:
            with contextlib.suppress(OSError):
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                write_atomically(os.path.join(self._directory, name), end, durable=False)

    def trim(self) -> None:
        """Remove the indexes that were not used for the longest time, if all together are too large."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            found = [(seen.st_mtime_ns, seen.st_size, entry.path) for entry in os.scandir(self._directory)
                     if (seen := entry.stat(follow_symlinks=False))]  # fmt: skip
            total = sum(size for _, size, _ in found)
            for _, size, path in sorted(found):
                if total <= _CACHE_BYTES:
                    return
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size


@dataclass(slots=True)
class PackView:
    """The packs that were there at one moment.

    `condemned` has the time of each marker in the store's seconds, also of packs that are gone.  `modified_s` has that
    of each pack.
    """

    packs: dict[str, Pack] = field(default_factory=dict)
    condemned: dict[str, float] = field(default_factory=dict)
    modified_s: dict[str, float] = field(default_factory=dict)
    damaged: dict[str, DamagedError] = field(default_factory=dict)
    _usable: PackLookup = field(default_factory=PackLookup)
    _all: PackLookup = field(default_factory=PackLookup)

    def add(self, pack: Pack) -> None:
        """Add a pack."""
        self.packs[pack.name] = pack
        self._all.add(pack)
        if pack.name not in self.condemned:
            self._usable.add(pack)

    def usable(self, digest: bytes) -> bool:
        """Whether a pack that is not condemned has a blob."""
        return self._usable.find(digest) is not None

    def find(self, digest: bytes) -> BlobLocation | None:
        """The position of a blob, in a condemned pack only if no other has it."""
        return self._usable.find(digest) or self._all.find(digest)

    def located(self, digest: bytes) -> tuple[bytes, BlobLocation]:
        """A digest, and the position of its blob.  DamagedError."""
        place = self.find(digest)
        if place is None:
            raise damaged_blob(digest, "is gone from the object store")
        return digest, place


def key_of(stem: str) -> str:
    """The key of the pack that a `BlobLocation` names."""
    return f"{PACKS}/{stem}.pack"


class RemotePacks:
    """The packs of the store in `storage`."""

    def __init__(self, storage: Storage, cache: IndexCache) -> None:
        self._storage = storage
        self._cache = cache
        self._known: dict[str, Pack] = {}  # packs whose index was read, also if they are gone

    def view(self) -> PackView:
        """List the packs."""
        return self.view_after(self._storage.list(CONDEMNED))

    def view_after(self, markers: Future[Objects]) -> PackView:
        """List the packs after the markers, whose listing has begun."""
        listed = markers.result()
        return self.view_of(listed, self._storage.list(PACKS))

    def view_of(self, markers: Objects, packs: Future[Objects]) -> PackView:
        """The view from a listing of the markers, and one of the packs that was begun after it."""
        view = PackView(condemned={_last(info.key): info.modified_s for info in markers})
        self.load(listed_packs(packs.result(), view), view)
        return view

    def learn(self, name: str, data: bytes) -> None:
        """Remember a pack that was just uploaded."""
        pack = Pack(name, len(data), lambda at, length: data[at : at + length], name)
        self._known[name] = pack
        self._cache.put(name, data[_index_start(pack) :])

    def load(self, sizes: Mapping[str, int], view: PackView) -> None:
        """Add packs, whose sizes are given, to `view`; read the indexes that are not known yet."""
        waiting: deque[tuple[str, Future[bytes]]] = deque()
        unknown = []
        for name, size in sizes.items():
            pack = self._known.get(name) or self._from_cache(name, size)
            if not 0 < size <= LARGEST_PACK_BYTES:
                view.damaged[name] = DamagedError("a pack is empty, or larger than any that vfsd writes", name)
            elif pack is None:
                unknown.append(name)
            else:
                view.add(pack)
        for name in unknown:
            if len(waiting) >= _IN_FLIGHT:
                self._take(*waiting.popleft(), sizes, view)
            start = max(0, sizes[name] - _TAIL_BYTES)
            waiting.append((name, self._storage.read_range(f"{PACKS}/{name}", start, sizes[name] - start)))
        while waiting:
            self._take(*waiting.popleft(), sizes, view)
        if unknown:
            self._cache.trim()

    def _from_cache(self, name: str, size: int) -> Pack | None:
        end = self._cache.get(name)
        if end is None:
            return None
        start = size - len(end)
        try:
            # A pack reads more of its end than its index: zeros in front of it do no harm.
            pack = Pack(name, size, lambda at, n: (bytes(max(0, start - at)) + end[max(0, at - start) :])[:n], name)
        except DamagedError:
            return None
        self._known[name] = pack
        return pack

    def _take(self, name: str, tail: Future[bytes], sizes: Mapping[str, int], view: PackView) -> None:
        size = sizes[name]
        try:
            data = tail.result()
        except FileNotFoundError:
            return  # collected since it was listed
        start = size - len(data)

        def read(at: int, length: int) -> bytes:
            if at < start:
                return self._storage.read_range(f"{PACKS}/{name}", at, length).result()
            return data[at - start : at - start + length]

        try:
            pack = Pack(name, size, read, name)
            at = _index_start(pack)
            self._cache.put(name, read(at, size - at))
        except DamagedError as error:
            view.damaged[name] = error
            return
        except FileNotFoundError:
            return
        self._known[name] = pack
        view.add(pack)

    def blobs(self, wanted: Iterable[tuple[bytes, BlobLocation]]) -> Iterator[tuple[bytes, bytes]]:
        """Read and verify blobs, neighbours in one request, several at once; in the order of their positions.

        If a collection has deleted a pack meanwhile, its blobs are read from where that collection copied them to.
        DamagedError, also if a blob is gone.
        """
        waiting: deque[tuple[list[tuple[bytes, BlobLocation]], Future[bytes]]] = deque()
        for group in neighbours(sorted(wanted, key=lambda item: item[1])):
            if len(waiting) >= _IN_FLIGHT:
                yield from self._verified(*waiting.popleft())
            first, last = group[0][1], group[-1][1]
            length = last.offset + last.length - first.offset
            waiting.append((group, self._storage.read_range(key_of(first.pack), first.offset, length)))
        while waiting:
            yield from self._verified(*waiting.popleft())

    def _verified(
        self, group: list[tuple[bytes, BlobLocation]], answer: Future[bytes]
    ) -> Iterator[tuple[bytes, bytes]]:
        try:
            data = answer.result()
        except FileNotFoundError:
            yield from self._moved(group)
            return
        start = group[0][1].offset
        for digest, place in group:
            blob = data[place.offset - start : place.offset - start + place.length]
            try:
                check_blob(digest, blob)
            except DamagedError:
                # Perhaps it was damaged on its way.
                blob = self._storage.read_range(key_of(place.pack), place.offset, place.length).result()
                check_blob(digest, blob)
            yield digest, blob

    def _moved(self, group: list[tuple[bytes, BlobLocation]]) -> Iterator[tuple[bytes, bytes]]:
        """Read blobs whose pack is gone from other packs: a collection copies what is needed before deleting it."""
        left = deque(group)
        for _ in range(_MOVES_MAX):
            view = self.view()
            try:
                while left:
                    digest = left[0][0]
                    place = view.find(digest)
                    if place is None:
                        break
                    blob = self._storage.read_range(key_of(place.pack), place.offset, place.length).result()
                    check_blob(digest, blob)
                    left.popleft()
                    yield digest, blob
            except FileNotFoundError:
                continue  # deleted by the next collection
            break
        if left:
            raise DamagedError("a pack is gone from the object store", key_of(left[0][1].pack))


def listed_packs(objects: Objects, view: PackView) -> dict[str, int]:
    """The size of each pack in a listing; notes the times of the packs in `view`."""
    sizes = {}
    for info in objects:
        name = _last(info.key)
        if name.endswith(".pack"):
            sizes[name] = info.size_bytes
            view.modified_s[name] = info.modified_s
    return sizes


def neighbours(items: list[tuple[bytes, BlobLocation]]) -> Iterator[list[tuple[bytes, BlobLocation]]]:
    """Split sorted positions into groups that one request reads."""
    group: list[tuple[bytes, BlobLocation]] = []
    for digest, place in items:
        if group:
            first, last = group[0][1], group[-1][1]
            near = place.pack == first.pack and place.offset - last.offset - last.length <= _GAP_BYTES
            if not near or place.offset + place.length - first.offset > _RANGE_BYTES:
                yield group
                group = []
        group.append((digest, place))
    if group:
        yield group


def _index_start(pack: Pack) -> int:
    return pack.size_bytes - pack.end_bytes


def _last(key: str) -> str:
    return key.rpartition("/")[2]


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
