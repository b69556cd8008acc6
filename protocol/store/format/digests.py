"""Digests identify contents, so that the store keeps each content once.

SHA-256 is the fastest hash of hashlib on processors with instructions for it, which servers and laptops have since
about 2019 (measured: 2.0 GB/s and 0.77 us for 1 KB, against 1.4 GB/s and 0.93 us for BLAKE2b).

The digest of a content of more than CHUNK_BYTES covers the digests of its chunks; a run of chunks that are all zeros
counts as one number.  So a hole of any length costs nothing, and the digest does not depend on where the holes are.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from protocol.tree import Hole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from protocol.volume import Buffer

DIGEST_BYTES: Final = 32
CHUNK_BYTES: Final = 4 << 20
_ZEROS: Final = bytes(1 << 16)
_LONG: Final = b"vfsd content in chunks\0"  # so that no short content has the digest of a long one


def digest_of(data: Buffer) -> bytes:
    """The digest of a content of at most CHUNK_BYTES, or of a listing of any length."""
    return hashlib.sha256(data).digest()


def _zero_chunk() -> bytes:
    digest = hashlib.sha256()
    for _ in range(CHUNK_BYTES // len(_ZEROS)):
        digest.update(_ZEROS)
    return digest.digest()


class ContentDigest:
    """Computes the digest of a content that comes in pieces.

    With `keeps_chunks`, `chunks` has the digest of each chunk that is not all zeros, by the chunk's number.
    """

    def __init__(self, *, keeps_chunks: bool = False) -> None:
        self.chunks: dict[int, bytes] = {}
        self._keeps_chunks = keeps_chunks
        self._number = 0  # of the current chunk
        self._size = 0
        self._only = b""
        self._chunk = hashlib.sha256()
        self._filled = 0
        self._lazy = True  # the current chunk is all zeros so far, and they were not fed to `_chunk`
        self._whole = hashlib.sha256(_LONG)
        self._zero_run = 0
        self._zero_chunk = b""

    @property
    def size(self) -> int:
        """The number of bytes so far."""
        return self._size

    def feed(self, data: Buffer | Hole) -> None:
        """Add the next bytes."""
        if isinstance(data, Hole):
            self.feed_hole(data.size)
            return
        view = memoryview(data)
        self._size += len(view)
        while view:
            piece = view[: CHUNK_BYTES - self._filled]
            self._materialize()
            self._chunk.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == CHUNK_BYTES:
                self._end_chunk()

    def feed_hole(self, length: int) -> None:
        """Add `length` zeros."""
        self._size += length
        if not self._lazy or self._filled:
            rest = min(length, CHUNK_BYTES - self._filled)
            if not self._lazy:
                _feed_zeros(self._chunk, rest)
            self._filled += rest
            length -= rest
            if self._filled == CHUNK_BYTES:
                self._end_chunk()
        whole, rest = divmod(length, CHUNK_BYTES)
        self._zero_run += whole
        self._number += whole
        self._filled += rest

    def digest(self) -> bytes:
        """The digest of everything that was fed.  Do not feed more after this call."""
        if self._size <= CHUNK_BYTES:
            if self._zero_run:  # exactly one chunk, which is a hole
                return self._zero_digest()
            if not self._filled and self._size:
                return self._only
            self._materialize()
            return self._chunk.digest()
        if self._filled:
            self._materialize()
            self._end_run()
            self._whole.update(self._chunk.digest())
            self._keep(self._chunk.digest())
        self._end_run()
        self._whole.update(b"size %d" % self._size)
        return self._whole.digest()

    def _materialize(self) -> None:
        if self._lazy:
            self._lazy = False
            _feed_zeros(self._chunk, self._filled)

    def _end_chunk(self) -> None:
        if self._lazy:
            self._zero_run += 1
        else:
            digest = self._chunk.digest()
            if digest == self._zero_digest():
                self._zero_run += 1
            else:
                self._end_run()
                self._only = digest
                self._whole.update(digest)
                self._keep(digest)
        self._chunk = hashlib.sha256()
        self._number += 1
        self._filled = 0
        self._lazy = True

    def _keep(self, digest: bytes) -> None:
        if self._keeps_chunks:
            self.chunks[self._number] = digest

    def _end_run(self) -> None:
        if self._zero_run:
            self._whole.update(b"zeros %d" % self._zero_run)
            self._zero_run = 0

    def _zero_digest(self) -> bytes:
        self._zero_chunk = self._zero_chunk or _zero_chunk()
        return self._zero_chunk


def digest_of_chunks(size: int, chunks: Mapping[int, bytes]) -> bytes:
    """The digest of a content of more than CHUNK_BYTES, from the digests of its chunks: see `ContentDigest.chunks`."""
    whole = hashlib.sha256(_LONG)
    number = 0
    for at in [*sorted(chunks), -(-size // CHUNK_BYTES)]:
        if at > number:
            whole.update(b"zeros %d" % (at - number))
        if at in chunks:
            whole.update(chunks[at])
        number = at + 1
    whole.update(b"size %d" % size)
    return whole.digest()


def chunk_ranges(numbers: Iterable[int], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the runs of chunks, given by their numbers, between two offsets."""
    run: tuple[int, int] | None = None
    for number in sorted(numbers):
        first, after = max(start, number * CHUNK_BYTES), min(end, (number + 1) * CHUNK_BYTES)
        if first >= after:
            continue
        if run is not None and run[1] != first:
            yield run
            run = None
        run = (first if run is None else run[0], after)
    if run is not None:
        yield run


def _feed_zeros(digest: hashlib._Hash, length: int) -> None:
    while length > 0:
        digest.update(_ZEROS[:length])
        length -= len(_ZEROS)
