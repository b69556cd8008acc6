"""RemoteContents: the verified blobs of a snapshot in an object store, from memory, the disk cache, or the network.

A call never waits for the network: it raises NotReadyError, whose `arrival` is done when the blobs are in memory.
They stay there as long as the caller holds its result, so a call that is repeated makes progress however small the
caches are.

Invariant: every blob comes from the helper, which verified it, or from the cache, which verifies what it returns.

Threading: any thread.

`BlobCache` keeps verified blobs on this machine's disk, for all workspaces of a user.  A blob is a file with the name
of its digest.  Invariants of the cache:
1. Readers take no lock and trust nothing: a blob is compared with its digest whenever it is read, and a file that
   differs is removed.  So a torn write, a damaged disk or another program costs a fetch, and never serves wrong bytes.
2. Writers hold the lock of the file `lock`.  That file has the size of the cache, and whether a writer is at work; if
   one died, the next one counts again.  Before blobs are added, old ones are removed until the bound holds.

The size of a file counts in blocks of 4 KiB, with its directory entry, so that the bound also holds for many small
blobs.  The modification time is that of the last use, within ten minutes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from protocol.errors import NotReadyError
from protocol.linux.regular_file import open_regular, write_atomically
from protocol.store.format.packs import DamagedError
from protocol.store.object_store.packs import ChunkMap, check_blob, decode_chunk_map, decode_listing_of

if TYPE_CHECKING:
    from protocol.store.format.rows import Row
    from protocol.store.object_store.lazy.client import BlobKind, FetchClient

BLOBS_BYTES: Final = 24 << 20  # of blobs that were read last, at most
ROWS_BYTES: Final = 16 << 20  # of decoded listings, about
_ROWS_KEPT: Final = 32_768
_CHUNKS_KEPT: Final = 1 << 14  # chunks of maps that were read last: those of 64 GiB, in 2 MB


class Blob:
    """A blob in memory."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


class RemoteContents:
    """The blobs that `client` fetches and `cache` keeps."""

    def __init__(self, client: FetchClient, cache: BlobCache) -> None:
        self.client = client
        self._cache = cache
        self._lock = threading.Lock()
        self._recent: OrderedDict[bytes, Blob] = OrderedDict()
        self._recent_bytes = 0
        self._held: weakref.WeakValueDictionary[bytes, Blob] = weakref.WeakValueDictionary()
        self._listings: OrderedDict[bytes, Mapping[bytes, Row]] = OrderedDict()
        self._maps: OrderedDict[bytes, ChunkMap] = OrderedDict()
        self._inodes_arriving: dict[bytes, Future[object]] = {}
        self._inodes_lost: dict[bytes, str] = {}  # the damage of inode listings

    def blobs(self, kind: BlobKind, digests: Sequence[bytes], ahead: Sequence[bytes] = ()) -> list[bytes]:
        """The blobs with these digests.  NotReadyError, after which those in `ahead` are fetched as well."""
        found = [self._known(digest) for digest in digests]
        missing = [digest for digest, blob in zip(digests, found, strict=True) if blob is None]
        if missing:
            raise NotReadyError(self._arrival(kind, missing, ahead))
        return [blob.data for blob in found if blob is not None]

    def read_ahead(self, kind: BlobKind, digests: Sequence[bytes]) -> None:
        """Have blobs fetched into the cache, if they are not there."""
        missing = [digest for digest in digests if digest not in self._held and not self._cache.has(digest)]
        if missing:
            self.client.fetch(kind, (), missing)

    def listing(self, digest: bytes) -> Mapping[bytes, Row]:
        """The rows of a listing by name.  NotReadyError; DamagedError if it is none."""
        with self._lock:
            rows = self._listings.get(digest)
            if rows is not None:
                self._listings.move_to_end(digest)
                return rows
        (data,) = self.blobs("tree", (digest,))
        rows = {row.name: row for row in decode_listing_of(digest, data)}
        with self._lock:
            self._listings[digest] = rows
            # Two at least: a directory's rows and its inode rows.
            while len(self._listings) > 2 and sum(map(len, self._listings.values())) > _ROWS_KEPT:
                self._listings.popitem(last=False)
        return rows

    def listings(self, digest: bytes, inodes: bytes) -> tuple[Mapping[bytes, Row], Mapping[bytes, Row]]:
        """The rows of a listing, and its inode rows, which are fetched together.  NotReadyError, DamagedError.

        `inodes` is the digest of the inode listing, or b"": none.  There are no inode rows if the store lost them.
        """
        found = self._inode_rows(inodes) if inodes else {}
        rows = self.listing(digest)
        if isinstance(found, Future):
            raise NotReadyError(found)
        return rows, found

    def _inode_rows(self, digest: bytes) -> Mapping[bytes, Row] | Future[object]:
        """The rows of an inode listing, or a future that is done when they can be had."""
        with self._lock:
            arrival = self._inodes_arriving.get(digest)
            if arrival is not None and not arrival.done():
                return arrival
        try:
            return self.listing(digest)
        except DamagedError as error:
            with self._lock:
                self._inodes_lost[digest] = error.damage
            return {}
        except NotReadyError as error:
            if digest in self._inodes_lost:
                return {}
            fetched = error.arrival

        arrival = Future()

        def arrived(answer: Future[object]) -> None:
            failure = answer.exception()
            with self._lock:
                self._inodes_arriving.pop(digest, None)
                if isinstance(failure, DamagedError):
                    self._inodes_lost[digest] = failure.damage
            if failure is None or isinstance(failure, DamagedError):
                arrival.set_result(None if failure is not None else answer.result())
            else:
                arrival.set_exception(failure)

        with self._lock:
            self._inodes_arriving[digest] = arrival
        fetched.add_done_callback(arrived)
        return arrival

    def inode_damage(self, digest: bytes) -> str | None:
        """Why an inode listing has no rows; None if it was not found damaged."""
        return self._inodes_lost.get(digest)

    def chunk_map(self, digest: bytes) -> ChunkMap:
        """The chunk map of a content.  NotReadyError, DamagedError."""
        with self._lock:
            found = self._maps.get(digest)
            if found is not None:
                self._maps.move_to_end(digest)
                return found
        (data,) = self.blobs("tree", (digest,))
        found = decode_chunk_map(digest, data)
        with self._lock:
            self._maps[digest] = found
            while len(self._maps) > 1 and sum(len(each.chunks) for each in self._maps.values()) > _CHUNKS_KEPT:
                self._maps.popitem(last=False)
        return found

    def _known(self, digest: bytes) -> Blob | None:
        with self._lock:
            blob = self._recent.get(digest) or self._held.get(digest)
            if blob is not None:
                self._remember(digest, blob)
                return blob
        data = self._cache.get(digest)
        if data is None:
            return None
        blob = Blob(data)
        with self._lock:
            self._remember(digest, blob)
        return blob

    def _remember(self, digest: bytes, blob: Blob) -> None:
        self._held[digest] = blob
        if digest in self._recent:
            self._recent.move_to_end(digest)
            return
        self._recent[digest] = blob
        self._recent_bytes += len(blob.data)
        while self._recent_bytes > BLOBS_BYTES and len(self._recent) > 1:
            self._recent_bytes -= len(self._recent.popitem(last=False)[1].data)

    def _arrival(self, kind: BlobKind, missing: Sequence[bytes], ahead: Sequence[bytes]) -> Future[object]:
        """A future with the blobs, which are in memory when it is done."""
        arrival: Future[object] = Future()

        def arrived(answer: Future[list[bytes]]) -> None:
            error = answer.exception()
            if error is not None:
                arrival.set_exception(error)
                return
            blobs = list(map(Blob, answer.result()))
            with self._lock:
                for digest, blob in zip(missing, blobs, strict=True):
                    self._remember(digest, blob)
            arrival.set_result(blobs)

        self.client.fetch(kind, missing, ahead).add_done_callback(arrived)
        return arrival

    @contextmanager
    def forking(self) -> Iterator[None]:
        """A block in which no other thread uses this."""
        with self.client.forking(), self._lock:  # in the order in which an arrival takes them
            yield

    def forked(self) -> None:
        """Drop, in a forked process, the connection to the helper of its source."""
        self.client.forked()
        self._inodes_arriving.clear()

    def close(self) -> None:
        """End the helper."""
        self.client.close()


# -- the cache on disk -----------------------------------------------------------------------------
_STATE: Final = struct.Struct("<QB")  # size in bytes, and 1 while a writer is at work
_LOCK: Final = "lock"
_BLOCK_BYTES: Final = 4096
_ENTRY_BYTES: Final = 256
_DIRECTORIES_BYTES: Final = 256 * 2 * _BLOCK_BYTES
_KEPT_SHARE: Final = 0.9  # of the bound: a removal goes down to this, because it has to look at all files
_USED_S: Final = 600
_NEW: Final = ".new"


class BlobCache:
    """The blobs in `directory`, of at most `most_bytes` on disk.  Without a directory, or with 0, nothing is kept."""

    def __init__(self, directory: str | None, most_bytes: int) -> None:
        self._directory = directory if most_bytes > 0 else None
        self._most_bytes = most_bytes
        self.failure: str | None = None  # why the last `put` or `check` could not write; None if it could

    def _path(self, digest: bytes) -> str:
        assert self._directory is not None
        name = digest.hex()
        return os.path.join(self._directory, name[:2], name[2:])

    def check(self) -> None:
        """Set `failure` if the cache cannot be written."""
        if self._directory is None:
            return
        try:
            with self._locked():
                self.failure = None
        except OSError as error:
            self.failure = error.strerror

    def has(self, digest: bytes) -> bool:
        """Whether there is a file for a blob, which may be damaged."""
        return self._directory is not None and os.path.exists(self._path(digest))

    def get(self, digest: bytes) -> bytes | None:
        """A blob, compared with its digest; None if it is not there, or damaged."""
        if self._directory is None:
            return None
        path = self._path(digest)
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                data = file.readall()
                used_s = os.fstat(file.fileno()).st_mtime
            check_blob(digest, data)
        except DamagedError:
            with contextlib.suppress(OSError):
                os.unlink(path)  # the size that is counted stays too large until the next count
            return None
        except OSError:
            return None
        if abs(time.time() - used_s) > _USED_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return data

    def put(self, blobs: Sequence[tuple[bytes, bytes]]) -> None:
        """Add blobs.  If the cache cannot be written, set `failure`; that is not an error."""
        if self._directory is None:
            return
        new = [(digest, data) for digest, data in blobs if not self.has(digest)]
        if not new:
            return
        try:
            self._write_blobs(new)
            self.failure = None
        except OSError as error:
            self.failure = error.strerror

    def _write_blobs(self, new: Sequence[tuple[bytes, bytes]]) -> None:
        with self._locked() as state:
            total, is_dirty = _read(state)
            if is_dirty:
                total = sum(cost for cost, _, _ in self._files(clean=True)) + _DIRECTORIES_BYTES
            _write(state, total, is_dirty=True)
            total = self._room_for(sum(_cost(len(data)) for _, data in new), total)
            for digest, data in new:
                cost = _cost(len(data))
                if total + cost > self._most_bytes:
                    continue
                path = self._path(digest)
                try:
                    write_atomically(path, data, durable=False)
                except FileNotFoundError:  # the first blob in this directory
                    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                    write_atomically(path, data, durable=False)
                total += cost
            _write(state, total, is_dirty=False)

    def size_bytes(self) -> int:
        """The size that is counted; 0 if nothing was ever added."""
        if self._directory is None:
            return 0
        with contextlib.suppress(OSError), open(open_regular(os.path.join(self._directory, _LOCK)), "rb") as file:
            return _read(file.fileno())[0]
        return 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the writers; yield the descriptor of its file."""
        assert self._directory is not None
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        descriptor = open_regular(os.path.join(self._directory, _LOCK), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _room_for(self, needed: int, total: int) -> int:
        """Remove the blobs that were not used for the longest time, so that `needed` bytes fit; return the new size."""
        if total + needed <= self._most_bytes:
            return total
        goal = max(0, int(self._most_bytes * _KEPT_SHARE) - needed)
        files = sorted(self._files(clean=False), key=lambda file: file[1])
        total = sum(cost for cost, _, _ in files) + _DIRECTORIES_BYTES
        for cost, _, path in files:
            if total <= goal:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= cost
        return total

    def _files(self, *, clean: bool) -> Iterator[tuple[int, float, str]]:
        """Yield cost, time of the last use and path of each blob.  `clean` removes what killed writers left."""
        assert self._directory is not None
        for part in os.scandir(self._directory):
            if not part.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(part.path):
                if clean and entry.name.endswith(_NEW):
                    os.unlink(entry.path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    seen = entry.stat(follow_symlinks=False)
                    yield _cost(seen.st_size), seen.st_mtime, entry.path


def _cost(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES + _ENTRY_BYTES


def _read(descriptor: int) -> tuple[int, bool]:
    """The size, and whether it has to be counted again."""
    data = os.pread(descriptor, _STATE.size, 0)
    if len(data) < _STATE.size:
        return 0, True
    total, writing = _STATE.unpack(data)
    return total, bool(writing)


def _write(descriptor: int, total: int, *, is_dirty: bool) -> None:
    os.pwrite(descriptor, _STATE.pack(total, is_dirty), 0)
