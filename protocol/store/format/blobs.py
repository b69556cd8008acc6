"""Blobs: reads a store's contents by digest.  And the sinks of a scan: `StoreSink` stores, `DigestSink` only computes.

A blob is a file's content or a listing.  Every byte is verified against the blob's digest before the caller gets it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

from protocol.store.format.digests import ContentDigest, digest_of
from protocol.store.format.objects import Done, NewObjects, Objects, VerifiedObjects, fed_from_file, put_sparse
from protocol.store.format.packs import DamagedError, Packs, PackWriter, damaged_blob
from protocol.store.format.rows import Row, decode_listing
from protocol.tree import Chunk, filled, sparse

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout

P = ParamSpec("P")
T = TypeVar("T")
_ATTEMPTS: Final = 3
LARGE_BYTES: Final = 256 << 10  # larger contents are files of their own, smaller ones are in packs


def _again(read: Callable[Concatenate[Blobs, P], T]) -> Callable[Concatenate[Blobs, P], T]:
    """Return a method that reads again if `read` fails: a collection may have moved the blob to another pack."""

    @functools.wraps(read)
    def reading(blobs: Blobs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(_ATTEMPTS - 1):
            try:
                return read(blobs, *args, **kwargs)
            except DamagedError:
                if not blobs.refresh():
                    raise
        return read(blobs, *args, **kwargs)

    return reading


class Blobs:
    """The blobs of a store.  Any thread."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.packs = Packs(layout)
        self.objects = Objects(layout)
        self.large = VerifiedObjects(self.objects)
        self._recent: tuple[bytes, bytes] = b"", b""  # the small content that was read last

    def close(self) -> None:
        """Close the files."""
        self.packs.close()
        self.large.close()
        self._recent = b"", b""

    def has(self, digest: bytes) -> bool:
        """Whether the store has a blob."""
        return self.packs.find(digest) is not None or self.objects.has(digest)

    def refresh(self) -> bool:
        """Read which packs other processes added and removed; False if all packs are gone."""
        if not os.path.isdir(self._layout.packs):
            return False
        self.packs.refresh()
        return True

    def _small(self, digest: bytes) -> bytes | None:
        place = self.packs.find(digest)
        if place is None:
            return None
        data = self.packs.read(place)
        if digest_of(data) != digest:
            raise damaged_blob(digest)
        return data

    @_again
    def small(self, digest: bytes) -> bytes | None:
        """A blob that is in a pack, else None.  DamagedError."""
        return self._small(digest)

    @_again
    def listing(self, digest: bytes) -> list[Row]:
        """The rows of a listing.  DamagedError."""
        data = self._small(digest)
        if data is None:
            raise damaged_blob(digest, "is gone from the store")
        try:
            return decode_listing(data)
        except ValueError:
            raise damaged_blob(digest, "is not a listing") from None

    @_again
    def read(self, digest: bytes, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a content.  DamagedError."""
        if not digest:
            return b""
        recent, data = self._recent
        if recent != digest:
            small = self._small(digest)
            if small is None:
                return self.large.read(digest, offset, size)
            self._recent = digest, small
            data = small
        return data[offset : offset + size]

    def chunks(self, digest: bytes, size: int) -> Iterator[Chunk]:
        """A content, in chunks of at most `size` bytes, and holes.  DamagedError."""
        if not digest:
            return
        data = self.small(digest)
        if data is None:
            yield from self.large.chunks(digest, size)
            return
        for at in range(0, len(data), size):
            yield from sparse(data[at : at + size])

    def copy(self, digest: bytes, size: int, target: int) -> None:
        """Write a content of `size` bytes to an empty file, which is open for reading and writing.

        After DamagedError the file's content is undefined.
        """
        data = self.small(digest) if digest else b""
        if data is None:
            self.large.copy(digest, size, target)
        else:
            put_sparse(target, data, 0)
            os.ftruncate(target, size)

    def verify(self, digest: bytes) -> None:
        """Compare a content with its digest.  DamagedError."""
        if digest and self.small(digest) is None:
            self.large.verify(digest)


class DigestSink:
    """Computes digests and stores nothing.  Keeps the listings that the store lacks in memory.

    A sink takes the contents and listings of a scan.  Contents of up to LARGE_BYTES are `small`.
    """

    stores: Final = False
    """Whether the store has everything that the sink was given, once the scan is complete."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._listings: dict[bytes, bytes] = {}

    def has(self, digest: bytes) -> bool:  # noqa: ARG002
        """Whether the sink does not need a blob again."""
        return True

    def keeps(self, digest: bytes) -> bool:
        """Whether a listing can be read from the sink or the store."""
        return digest in self._listings or self._blobs.packs.find(digest) is not None

    def small(self, data: bytes) -> bytes:
        """Take a content; return its digest."""
        return digest_of(data)

    def large(self, descriptor: int, size: int, done: Done) -> tuple[bytes, int]:
        """Take the first `size` bytes of a file; return their digest and number."""
        digest = ContentDigest()
        return _digest_or_empty(digest, fed_from_file(descriptor, size, digest, None, done)), digest.size

    def stream(self, chunks: Iterable[Chunk], done: Done) -> tuple[bytes, int]:
        """Take a content of any size in pieces; return its digest and length."""
        digest = ContentDigest()
        for chunk in chunks:
            digest.feed(chunk)
            done(len(chunk))
        return _digest_or_empty(digest, digest.size), digest.size

    def listing(self, data: bytes) -> bytes:
        """Take a listing; return its digest."""
        digest = digest_of(data)
        if self._blobs.packs.find(digest) is None:
            self._listings[digest] = data
        return digest

    def rows(self, digest: bytes) -> list[Row]:
        """The rows of a listing of this scan or of the store."""
        data = self._listings.get(digest)
        return self._blobs.listing(digest) if data is None else decode_listing(data)


class StoreSink:
    """Stores what the store lacks in a new pack and in new objects.  Has the methods of `DigestSink`."""

    stores: Final = True

    def __init__(self, blobs: Blobs, pack: PackWriter, objects: NewObjects) -> None:
        self._blobs = blobs
        self._pack = pack
        self._objects = objects

    def has(self, digest: bytes) -> bool:
        return digest in self._pack or digest in self._objects or self._blobs.has(digest)

    def keeps(self, digest: bytes) -> bool:
        return digest in self._pack or self._blobs.packs.find(digest) is not None

    def small(self, data: bytes) -> bytes:
        digest = digest_of(data)
        if not self.keeps(digest):
            self._pack.add(digest, data)
        return digest

    listing = small

    def large(self, descriptor: int, size: int, done: Done) -> tuple[bytes, int]:
        return self._objects.from_file(descriptor, size, done)

    def stream(self, chunks: Iterable[Chunk], done: Done) -> tuple[bytes, int]:
        head: list[Chunk] = []
        size = 0
        pieces = iter(chunks)
        for chunk in pieces:
            head.append(chunk)
            size += len(chunk)
            if size > LARGE_BYTES:
                return self._objects.from_chunks(chain(head, pieces), done)
        done(size)
        return (self.small(b"".join(filled(head))) if size else b""), size


Sink: TypeAlias = DigestSink | StoreSink


def _digest_or_empty(digest: ContentDigest, size: int) -> bytes:
    return digest.digest() if size else b""
