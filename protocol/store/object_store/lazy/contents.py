"""RemoteContents: the verified blobs of a snapshot in an object store, from memory, the disk cache, or the network.

A call never waits for the network: it raises NotReadyError, whose `arrival` is done when the blobs are in memory.
They stay there as long as the caller holds its result, so a call that is repeated makes progress however small the
caches are.

Invariant: every blob comes from the helper, which verified it, or from the cache, which verifies what it returns.

Threading: any thread.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from protocol.errors import NotReadyError
from protocol.store.format.packs import DamagedError
from protocol.store.object_store.layout import ChunkMap, decode_chunk_map, decode_listing_of

if TYPE_CHECKING:
    from protocol.store.format.rows import Row
    from protocol.store.object_store.lazy.blob_cache import BlobCache
    from protocol.store.object_store.lazy.client import FetchClient
    from protocol.store.object_store.lazy.messages import BlobKind

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
