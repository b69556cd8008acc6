"""Packs: files that hold many small contents and listings (blobs).  A snapshot is a pack with a record at its end.

    "vfsdpak1"
    the blobs, one after the other
    the index: (digest, offset, length) of each, sorted by digest
    the record: MessagePack, or nothing
    the footer: the offsets of index and record, the digest of both, "vfsdend1"

A pack is written under a temporary name, synced, and renamed.  So a pack in `packs/` is complete, unless it was
damaged later.

Threading: a `Packs` may be used by several threads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
import sys
import threading
import time
import weakref
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from protocol.linux.regular_file import open_regular
from protocol.linux.statx import is_racy
from protocol.store.format.digests import DIGEST_BYTES

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout
    from protocol.volume import Buffer

_MAGIC: Final = b"vfsdpak1"
_ENTRY: Final = struct.Struct("<32sQQ")
_FOOTER: Final = struct.Struct("<QQQQ32s8s")  # index offset, entries, record offset, record length, digest
_END: Final = b"vfsdend1"
_BUFFER_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 16 << 10  # holds the index and the record of most packs
# A table is ten times as fast as the index of a pack and needs five times the memory.
_SMALL_PACK: Final = 16 << 10  # entries
_MOST_IN_TABLE: Final = 64 << 10
_OPEN_FILES: Final = 64
_O_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class DamagedError(OSError):
    """Something in the store differs from what was written, or is gone (EIO).  `damage` says what, without advice.

    `url` is that of an object store.
    """

    def __init__(self, damage: str, path: str | None = None, *, url: str | None = None) -> None:
        given = "" if url is None else f" --store {url}"
        super().__init__(errno.EIO, f"{damage}; `vfsd store check{given}` lists all damage", path)
        self.damage = damage
        self.url = url

    def at(self, path: str) -> DamagedError:
        """The same error with the path in the workspace; the root, whose path is empty, is not named."""
        return DamagedError(self.damage, path or None, url=self.url)

    def in_object_store(self, url: str) -> DamagedError:
        """The same error with advice for the object store at `url`."""
        return DamagedError(self.damage, self.filename, url=url)


def damaged_blob(digest: bytes, what: str = "is damaged") -> DamagedError:
    """The error for the blob with this digest."""
    return DamagedError(f"the stored content {digest.hex()[:16]} {what}")


class BlobLocation(NamedTuple):
    """The position of a blob.  `pack` has no suffix, because the suffix changes when a snapshot is dropped."""

    pack: str
    offset: int
    length: int


class PackWriter:
    """Writes a pack, which becomes visible with `finish`.  Without `finish`, the end of the `with` block removes it."""

    def __init__(self, temporary: str) -> None:
        self._temporary = temporary
        self._fd = -1
        self._buffer = bytearray(_MAGIC)
        self._at = len(_MAGIC)  # where the next blob goes
        self._index: dict[bytes, tuple[int, int]] = {}

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size_bytes(self) -> int:
        """The size so far."""
        return self._at

    def add(self, digest: bytes, data: Buffer) -> None:
        """Add a blob."""
        self._index[digest] = (self._at, len(data))
        self._at += len(data)
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def finish(self, path: str, record: bytes = b"") -> None:
        """Make the pack durable and rename it to `path`.  The caller syncs the directory."""
        self._buffer += _pack_end(self._index, self._at, record)
        self._flush()
        os.fsync(self._fd)
        self._close()
        os.rename(self._temporary, path)

    def _flush(self) -> None:
        if self._fd < 0:
            self._fd = os.open(self._temporary, _O_WRITE, 0o600)
        view = memoryview(self._buffer)
        while view:
            view = view[os.write(self._fd, view) :]
        view.release()
        self._buffer = bytearray()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _pack_end(index: dict[bytes, tuple[int, int]], at: int, record: bytes) -> bytes:
    """Encode what follows the blobs of a pack, which end at `at`: the index, the record and the footer."""
    entries = b"".join(_ENTRY.pack(digest, offset, length) for digest, (offset, length) in sorted(index.items()))
    digest = hashlib.sha256(entries + record).digest()
    return entries + record + _FOOTER.pack(at, len(index), at + len(entries), len(record), digest, _END)


class MemoryPack:
    """A pack that is built in memory, without a record."""

    def __init__(self) -> None:
        self._data = bytearray(_MAGIC)
        self._index: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size_bytes(self) -> int:
        """The size so far."""
        return len(self._data)

    def add(self, digest: bytes, data: Buffer) -> None:
        """Add a blob."""
        self._index[digest] = (len(self._data), len(data))
        self._data += data

    def encoded(self) -> bytes:
        """The pack as it is stored."""
        return bytes(self._data) + _pack_end(self._index, len(self._data), b"")


class Pack:
    """The index and the record of a pack of `size_bytes`.  `read` returns bytes of it from (offset, length).

    `place` names it in DamagedError.
    """

    __slots__ = ("entries", "index", "name", "record", "size_bytes", "stem")

    def __init__(self, name: str, size_bytes: int, read: Callable[[int, int], bytes], place: str) -> None:
        self.name = name
        self.stem = _stem(name)
        self.size_bytes = size_bytes
        start = max(0, size_bytes - _TAIL_BYTES)
        tail = read(start, size_bytes - start)
        if len(tail) < _FOOTER.size:
            raise DamagedError("the pack is truncated", place)
        at, self.entries, record_at, record_length, digest, end = _FOOTER.unpack(tail[-_FOOTER.size :])
        whole = record_at + record_length + _FOOTER.size == size_bytes
        if end != _END or not whole or record_at - at != self.entries * _ENTRY.size:
            raise DamagedError("the pack is truncated, or its end was overwritten", place)
        length = size_bytes - _FOOTER.size - at
        stored = tail[-length - _FOOTER.size : -_FOOTER.size]
        if len(stored) < length:
            stored = read(at, length)
        if hashlib.sha256(stored).digest() != digest:
            raise DamagedError("the pack's index is damaged", place)
        self.index = stored[: self.entries * _ENTRY.size]
        self.record = stored[self.entries * _ENTRY.size :]

    @classmethod
    def from_file(cls, path: str) -> Pack:
        """The pack in a file.  DamagedError."""
        try:
            descriptor = open_regular(path)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EIO, errno.EISDIR}:
                raise
            raise DamagedError(f"the pack cannot be read ({error.strerror})", path) from None
        try:
            size = os.fstat(descriptor).st_size
            return cls(os.path.basename(path), size, lambda at, length: os.pread(descriptor, length, at), path)
        finally:
            os.close(descriptor)

    @property
    def end_bytes(self) -> int:
        """The size of what follows the blobs."""
        return len(self.index) + len(self.record) + _FOOTER.size

    def places(self) -> Iterator[tuple[bytes, BlobLocation]]:
        """The digest and the position of every blob."""
        for digest, offset, length in _ENTRY.iter_unpack(self.index):
            yield digest, BlobLocation(self.stem, offset, length)

    def find(self, digest: bytes) -> BlobLocation | None:
        """The position of a blob.  Interpolates, because digests are spread evenly."""
        low, high = 0, self.entries
        wanted = int.from_bytes(digest[:8], "big")
        first, last = 0, 1 << 64
        index = self.index
        while low < high:
            at = low + (wanted - first) * (high - low) // (last - first)
            at = min(max(at, low), high - 1)
            start = at * _ENTRY.size
            found = index[start : start + DIGEST_BYTES]
            if found == digest:
                _, offset, length = _ENTRY.unpack_from(index, start)
                return BlobLocation(self.stem, offset, length)
            if found < digest:
                low, first = at + 1, int.from_bytes(found[:8], "big")
            else:
                high, last = at, int.from_bytes(found[:8], "big")
            if last <= first:
                last = first + 1
        return None


class PackLookup:
    """Finds blobs: those of the first small packs in a table, all others in a fan-out."""

    def __init__(self) -> None:
        self._table: dict[bytes, BlobLocation] = {}
        self._others = FanOut()

    def add(self, pack: Pack) -> None:
        """Add the blobs of a pack."""
        if pack.entries > _SMALL_PACK or len(self._table) + pack.entries > _MOST_IN_TABLE:
            self._others.add(pack)
        else:
            self._table.update(pack.places())

    def find(self, digest: bytes) -> BlobLocation | None:
        """The position of a blob in any pack."""
        return self._table.get(digest) or self._others.find(digest)


class Packs:
    """All packs of a store, as of the last `refresh`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._directory = layout.packs
        self._packs: dict[str, Pack] = {}
        self._lookup = PackLookup()
        self._listed: tuple[int, int, int] | None = None  # inode and times of the directory when it was listed
        self._generation = 0
        self.version = 0  # changes whenever the packs or their names change
        self._files: OrderedDict[str, int] = OrderedDict()
        weakref.finalize(self, _close_files, self._files)
        self._lock = threading.RLock()
        self.damaged: dict[str, DamagedError] = {}

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            _close_files(self._files)

    def refresh(self) -> None:
        """Read which packs other processes added and removed; and, in a new generation, which ones they replaced."""
        with self._lock:
            generation = self._layout.generation()
            if generation != self._generation:
                self._generation = generation
                self._remove(set(self._packs))
            before = self._listed
            stamp = self._stamp()
            if stamp is not None and stamp == before:
                return
            self._update(self._names())
            self._listed = stamp

    def _stamp(self) -> tuple[int, int, int] | None:
        """Changes when an entry of the directory changes; None if another change might not change its times."""
        now_ns = time.time_ns()
        try:
            seen = os.stat(self._directory)
        except FileNotFoundError:
            return None
        return None if is_racy(seen.st_ctime_ns, now_ns) else (seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns)

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._directory) if name.endswith((".snap", ".pack")))
        except FileNotFoundError:
            return []

    def _update(self, listed: list[str]) -> None:
        # A dropped snapshot gets another suffix and stays the same file.
        names = {_stem(name): name for name in listed}
        gone = self._packs.keys() - names.keys()
        if gone:
            self._remove(gone)
        self.damaged = {name: error for name, error in self.damaged.items() if name in names.values()}
        for stem, name in names.items():
            pack = self._packs.get(stem)
            if pack is None:
                self._add(name)
            elif pack.name != name:
                pack.name = name
                self.version += 1

    def _add(self, name: str) -> None:
        try:
            pack = self._opened(name)
        except FileNotFoundError:
            return
        except DamagedError as error:
            self.damaged[name] = error
            return
        self.damaged.pop(name, None)
        self._packs[pack.stem] = pack
        self._lookup.add(pack)
        self.version += 1

    def _opened(self, name: str) -> Pack:
        try:
            return Pack.from_file(os.path.join(self._directory, name))
        except FileNotFoundError:  # dropped since it was listed, so it has the other suffix
            return Pack.from_file(os.path.join(self._directory, _stem(name) + ".pack"))

    def _remove(self, stems: set[str]) -> None:
        for stem in stems:
            descriptor = self._files.pop(stem, None)
            if descriptor is not None:
                os.close(descriptor)
        self._packs = {stem: pack for stem, pack in self._packs.items() if stem not in stems}
        lookup = PackLookup()
        for pack in self._packs.values():
            lookup.add(pack)
        self._lookup = lookup  # in one step: another thread may be searching
        self._listed = None
        self.version += 1

    def reread(self) -> None:
        """Read all packs again, including those that were replaced under the same name."""
        with self._lock:
            self._remove(set(self._packs))
            self.refresh()

    def all(self) -> list[Pack]:
        """The packs that are not damaged."""
        with self._lock:
            return list(self._packs.values())

    def find(self, digest: bytes) -> BlobLocation | None:
        """The position of a blob in any pack."""
        return self._lookup.find(digest)

    def read(self, place: BlobLocation) -> bytes:
        """A blob, not compared with its digest.  DamagedError."""
        with self._lock:
            descriptor = self._file(place.pack)
            try:
                data = os.pread(descriptor, place.length, place.offset)
            except OSError as error:
                damage = f"the pack cannot be read ({error.strerror})"
                raise DamagedError(damage, os.path.join(self._directory, place.pack)) from None
        if len(data) < place.length:
            raise DamagedError("the pack is truncated", os.path.join(self._directory, place.pack))
        return data

    def _file(self, stem: str) -> int:
        descriptor = self._files.get(stem)
        if descriptor is not None:
            self._files.move_to_end(stem)
            return descriptor
        descriptor = self._files[stem] = self._open(os.path.join(self._directory, stem))
        if len(self._files) > _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return descriptor

    @staticmethod
    def _open(path: str) -> int:
        for suffix in (".snap", ".pack"):
            with contextlib.suppress(FileNotFoundError):
                return open_regular(path + suffix)
        raise DamagedError("a pack is gone", path)


def _close_files(files: OrderedDict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


# -- fan-out ---------------------------------------------------------------------------------------
_NUMBER_BITS: Final = 24
_NUMBER: Final = (1 << _NUMBER_BITS) - 1
_PREFIX: Final = ((1 << 64) - 1) ^ _NUMBER


class FanOut:
    """Finds the pack that has a digest, in a time that hardly depends on the number of packs.

    Keeps sorted arrays of 64-bit keys: the first 40 bits of a digest, then the number of the pack.  A lookup bisects
    each array and searches the packs that match, almost always one.  New packs form a new array; an array with at least
    half the length of the one before is merged with it, so there are at most log2(entries) arrays.  8 bytes per entry.

    Threading: any thread may call `find` while another one adds.
    """

    def __init__(self) -> None:
        self._packs: list[Pack] = []
        self._levels: list[array[int]] = []

    def add(self, pack: Pack) -> None:
        """Add the digests of a pack."""
        number = len(self._packs)
        self._packs.append(pack)
        levels = [*self._levels, array("Q", [prefix & _PREFIX | number for prefix in _prefixes(pack)])]
        while len(levels) > 1 and len(levels[-1]) * 2 >= len(levels[-2]):
            last = levels.pop()
            levels[-1] = array("Q", sorted([*levels[-1], *last]))
        self._levels = levels  # in one step: another thread may be searching

    def find(self, digest: bytes) -> BlobLocation | None:
        """The position of a blob in any of the packs."""
        wanted = int.from_bytes(digest[:8], "big") & _PREFIX
        for level in self._levels:
            at = bisect_left(level, wanted)
            while at < len(level) and level[at] & _PREFIX == wanted:
                place = self._packs[level[at] & _NUMBER].find(digest)
                if place is not None:
                    return place
                at += 1
        return None


def _prefixes(pack: Pack) -> array[int]:
    """The first 64 bits of each digest; an index entry has six such words."""
    words = array("Q", pack.index)[::6]
    if sys.byteorder == "little":
        words.byteswap()
    return words
