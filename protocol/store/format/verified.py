"""Verified reads of large contents: every byte is compared with the content's digest before the caller gets it.

The digest of a content of more than CHUNK_BYTES covers the digests of its chunks, which are not stored.  So the first
read of such a content reads the whole object once and keeps the digests of its chunks; each later read verifies the
chunks it touches.  Chunks that are all zeros are not read.

Threading: any thread.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from protocol.store.format.digests import CHUNK_BYTES, ContentDigest, digest_of
from protocol.store.format.objects import Done, clone, fed_from_file, put
from protocol.store.format.packs import damaged_blob
from protocol.tree import Chunk, Hole, sparse

if TYPE_CHECKING:
    from protocol.store.format.objects import Objects

_MOST_DIGESTS: Final = 1 << 14  # chunk digests that are kept: those of 64 GiB, in 2 MB
_CHUNKS_CACHED: Final = 2


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunk digests of a verified content, without those of chunks that are all zeros."""

    size: int
    digests: dict[int, bytes]


class VerifiedObjects:
    """Reads objects and verifies them.  Every method may raise DamagedError."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._verified: OrderedDict[bytes, _Chunks] = OrderedDict()
        self._recent: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Free the cached chunks."""
        with self._lock:
            self._recent.clear()

    def read(self, digest: bytes, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a content, from `offset`."""
        descriptor = self._objects.open(digest)
        try:
            chunks = self._chunks(digest, descriptor)
            if chunks.size <= CHUNK_BYTES:  # also for a read beyond the end: the object may be truncated
                return self._recent_chunk(digest, descriptor, chunks, 0)[offset : offset + size]
            end = min(offset + size, chunks.size)
            parts = []
            while offset < end:
                number, within = divmod(offset, CHUNK_BYTES)
                part = self._recent_chunk(digest, descriptor, chunks, number)[within : within + end - offset]
                parts.append(part)
                offset += len(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)

    def chunks(self, digest: bytes, size: int) -> Iterator[Chunk]:
        """A content, in chunks of at most `size` bytes, and holes."""
        descriptor = self._objects.open(digest)
        try:
            chunks = self._chunks(digest, descriptor)
            done = 0
            for number in sorted(chunks.digests):
                start = number * CHUNK_BYTES
                if start > done:
                    yield Hole(start - done)
                chunk = self._chunk(digest, descriptor, chunks, number)
                for at in range(0, len(chunk), size):
                    yield from sparse(chunk[at : at + size])
                done = start + len(chunk)
            if chunks.size > done:
                yield Hole(chunks.size - done)
        finally:
            os.close(descriptor)

    def is_ready(self, digest: bytes, size: int) -> bool:
        """Whether a read of a content of `size` bytes does not have to read all of it first."""
        with self._lock:
            return size <= CHUNK_BYTES or digest in self._verified

    def prepare(self, digest: bytes) -> None:
        """Verify a content, so that it is ready."""
        descriptor = self._objects.open(digest)
        try:
            self._chunks(digest, descriptor)
        finally:
            os.close(descriptor)

    def size(self, digest: bytes) -> int:
        """The size of a content in bytes."""
        descriptor = self._objects.open(digest)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def chunk_digests(self, digest: bytes) -> dict[int, bytes]:
        """The digests of the chunks of a content of more than CHUNK_BYTES, without those of chunks of zeros."""
        descriptor = self._objects.open(digest)
        try:
            return self._chunks(digest, descriptor).digests
        finally:
            os.close(descriptor)

    def verify(self, digest: bytes, done: Done = lambda _: None) -> None:
        """Read and compare a whole content.  `done` is called with the bytes of each read."""
        descriptor = self._objects.open(digest)
        try:
            self._compare(digest, descriptor, os.fstat(descriptor).st_size, done=done)
        finally:
            os.close(descriptor)

    def copy(self, digest: bytes, size: int, target: int) -> None:
        """Write a content of `size` bytes to the empty file `target`, open for reading and writing; holes stay holes.

        Shares the blocks if the file system supports that.  After DamagedError the content of `target` is undefined.
        """
        source = self._objects.open(digest)
        try:
            if os.fstat(source).st_size != size:
                raise damaged_blob(digest)
            if clone(source, target):
                self._compare(digest, target, size)
                return
            self._compare(digest, source, size, target)
            os.ftruncate(target, size)
        finally:
            os.close(source)

    def _compare(
        self, digest: bytes, descriptor: int, size: int, target: int | None = None, done: Done = lambda _: None
    ) -> ContentDigest:
        """Read the first `size` bytes, write them to `target` if there is one, and compare them with the digest."""
        content = ContentDigest(keeps_chunks=True)
        failed: list[OSError] = []

        def write(data: memoryview, at: int) -> None:
            assert target is not None
            try:
                put(target, data, at)
            except OSError as error:  # an error of the target, not of the store
                failed.append(error)
                raise

        try:
            fed_from_file(descriptor, size, content, None if target is None else write, done)
        except OSError as error:
            if error in failed:
                raise
            raise damaged_blob(digest, f"cannot be read ({error.strerror})") from error
        if content.size != size or content.digest() != digest:
            raise damaged_blob(digest)
        return content

    def _chunks(self, digest: bytes, descriptor: int) -> _Chunks:
        with self._lock:
            cached = self._verified.get(digest)
            if cached is not None:
                self._verified.move_to_end(digest)
                return cached
        size = os.fstat(descriptor).st_size
        if not size:
            raise damaged_blob(digest)
        if size <= CHUNK_BYTES:  # the only chunk has the digest of the content
            return _Chunks(size, {0: digest})
        chunks = _Chunks(size, self._compare(digest, descriptor, size).chunks)
        with self._lock:
            self._verified[digest] = chunks
            while len(self._verified) > 1 and sum(len(one.digests) for one in self._verified.values()) > _MOST_DIGESTS:
                self._verified.popitem(last=False)
        return chunks

    def _recent_chunk(self, digest: bytes, descriptor: int, chunks: _Chunks, number: int) -> bytes:
        key = digest, number
        with self._lock:
            found = self._recent.get(key)
            if found is not None:
                self._recent.move_to_end(key)
                return found
        found = self._chunk(digest, descriptor, chunks, number)
        with self._lock:
            self._recent[key] = found
            while len(self._recent) > _CHUNKS_CACHED:
                self._recent.popitem(last=False)
        return found

    def _chunk(self, digest: bytes, descriptor: int, chunks: _Chunks, number: int) -> bytes:
        start = number * CHUNK_BYTES
        length = min(CHUNK_BYTES, chunks.size - start)
        wanted = chunks.digests.get(number)
        if wanted is None:
            return bytes(length)
        try:
            data = os.pread(descriptor, length, start)
        except OSError as error:
            raise damaged_blob(digest, f"cannot be read ({error.strerror})") from error
        if len(data) != length or digest_of(data) != wanted:
            raise damaged_blob(digest)
        return data
