"""Blobs: reading what a store holds by its digest; and the two sinks that take a state in.

`Storing` keeps what a snapshot needs.  `Digesting` only names it, for a look at the live state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from protocol.store.format.digests import ContentDigest, digest_of
from protocol.store.format.objects import NewObjects, Objects, fed_from_file, put
from protocol.store.format.packs import MORE, DamagedError, Packs, PackWriter
from protocol.store.format.rows import Row, decode_listing
from protocol.store.format.verified import VerifiedObjects

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout
    from protocol.volume import Buffer

__all__ = ["LARGE_BYTES", "Blobs", "Digesting", "Listings", "Sink", "Storing"]

LARGE_BYTES: Final = 256 << 10  # from here on a content has a file of its own
_LISTINGS_KEPT_BYTES: Final = 8 << 20
Done = Callable[[int], object]


class Listings(Protocol):
    """Where listings are read."""

    def listing(self, digest: bytes) -> list[Row]:
        """The rows of one.  DamagedError."""
        ...


class Blobs:
    """What the store holds.  May be used by several threads."""

    def __init__(self, layout: Layout) -> None:
        self.packs = Packs(layout.packs)
        self.objects = Objects(layout)
        self.large = VerifiedObjects(self.objects)
        self._recent: tuple[bytes, bytes] = b"", b""  # the small content that was read last

    def close(self) -> None:
        """Close the files."""
        self.packs.close()
        self.large.close()
        self._recent = b"", b""

    def has(self, digest: bytes) -> bool:
        """Whether a content or a listing is there."""
        return self.packs.find(digest) is not None or self.objects.has(digest)

    def small(self, digest: bytes) -> bytes | None:
        """A content or listing that is in a pack, compared with its digest.  DamagedError where it differs."""
        place = self.packs.find(digest)
        if place is None:
            return None
        data = self.packs.read(place)
        if digest_of(data) != digest:
            raise DamagedError(f"the stored content {digest.hex()[:16]} is damaged; {MORE}")
        return data

    def listing(self, digest: bytes) -> list[Row]:
        """The rows of a listing."""
        data = self.small(digest)
        if data is None:
            raise DamagedError(f"the listing {digest.hex()[:16]} is gone from the store; {MORE}")
        try:
            return decode_listing(data)
        except ValueError:
            raise DamagedError(f"the listing {digest.hex()[:16]} is damaged; {MORE}") from None

    def read(self, digest: bytes, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a content, all of which was compared with its digest.  DamagedError."""
        if not digest:
            return b""
        recent, data = self._recent
        if recent != digest:
            small = self.small(digest)
            if small is None:
                return self.large.read(digest, offset, size)
            self._recent = digest, small
            data = small
        return data[offset : offset + size]

    def chunks(self, digest: bytes, size: int) -> Iterator[bytes]:
        """A content, in chunks of at most `size` bytes; compared with its digest before the first.  DamagedError."""
        if not digest:
            return
        data = self.small(digest)
        if data is None:
            yield from self.large.chunks(digest, size)
            return
        for at in range(0, len(data), size):
            yield data[at : at + size]

    def copy(self, digest: bytes, size: int, target: int) -> None:
        """Write a content of `size` bytes, compared with its digest, to an empty file.  DamagedError.

        `target` is open for reading and writing.  After DamagedError its content is undefined.
        """
        data = self.small(digest) if digest else b""
        if data is None:
            self.large.copy(digest, size, target)
        else:
            put(target, memoryview(data), 0)

    def verify(self, digest: bytes) -> None:
        """Compare a content with its digest.  DamagedError."""
        if digest and self.small(digest) is None:
            self.large.verify(digest)


class Sink(Protocol):
    """What takes a state in.  Contents of up to LARGE_BYTES are `small`."""

    @property
    def stores(self) -> bool:
        """Whether what it is given is in the store afterwards."""
        ...

    def has(self, digest: bytes) -> bool:
        """Whether a content or listing need not be brought again."""
        ...

    def keeps(self, digest: bytes) -> bool:
        """Whether a listing can be read, here or in the store."""
        ...

    def small(self, data: bytes) -> bytes:
        """A content; its digest."""
        ...

    def large(self, descriptor: int, size: int, done: Done) -> tuple[bytes, int]:
        """The first `size` bytes of a file; their digest, and how many there were."""
        ...

    def stream(self, chunks: Iterable[Buffer], done: Done) -> tuple[bytes, int]:
        """A content of any size, in pieces; its digest and length."""
        ...

    def listing(self, data: bytes) -> bytes:
        """A listing; its digest."""
        ...


class Digesting:
    """Names contents, and keeps listings (in memory) of which the store has none."""

    stores: Final = False

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._listings: dict[bytes, bytes] = {}

    def has(self, digest: bytes) -> bool:  # noqa: ARG002 -- nothing is brought, so nothing is lacking
        return True

    def keeps(self, digest: bytes) -> bool:
        return digest in self._listings or self._blobs.packs.find(digest) is not None

    def small(self, data: bytes) -> bytes:
        return digest_of(data)

    def large(self, descriptor: int, size: int, done: Done) -> tuple[bytes, int]:
        digest = ContentDigest()
        return (_named(digest, fed_from_file(descriptor, size, digest, None, done)), digest.size)

    def stream(self, chunks: Iterable[Buffer], done: Done) -> tuple[bytes, int]:
        digest = ContentDigest()
        for chunk in chunks:
            digest.feed(chunk)
            done(len(chunk))
        return _named(digest, digest.size), digest.size

    def listing(self, data: bytes) -> bytes:
        digest = digest_of(data)
        if self._blobs.packs.find(digest) is None:
            self._listings[digest] = data
        return digest

    def rows(self, digest: bytes) -> list[Row]:
        """The rows of a listing of this state or of the store."""
        data = self._listings.get(digest)
        return self._blobs.listing(digest) if data is None else decode_listing(data)


class Storing:
    """Keeps what the store lacks in a new pack, and in new objects."""

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
        if digest not in self._pack and self._blobs.packs.find(digest) is None:
            self._pack.add(digest, data)
        return digest

    def large(self, descriptor: int, size: int, done: Done) -> tuple[bytes, int]:
        return self._objects.from_file(descriptor, size, done)

    def stream(self, chunks: Iterable[Buffer], done: Done) -> tuple[bytes, int]:
        head = bytearray()
        pieces = iter(chunks)
        for chunk in pieces:
            head += chunk
            if len(head) > LARGE_BYTES:
                return self._objects.from_chunks(chain([bytes(head)], pieces), done)
        done(len(head))
        return (self.small(bytes(head)) if head else b""), len(head)

    def listing(self, data: bytes) -> bytes:
        return self.small(data)

    def rows(self, digest: bytes) -> list[Row]:
        """The rows of a listing of this state."""
        data = self._pack.read(digest)
        return self._blobs.listing(digest) if data is None else decode_listing(data)


def _named(digest: ContentDigest, size: int) -> bytes:
    return digest.digest() if size else b""
