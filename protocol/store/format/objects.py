"""Objects: large contents, each in a file of its own, cloned from the original if the file system supports that.

An object is written in tmp/ and synced.  It gets its digest as its name when the snapshot that needs it is written.

Verified reads: every byte is compared with the content's digest before the caller gets it.  The digest of a content of
more than CHUNK_BYTES covers the digests of its chunks, which are not stored.  So the first read of such a content reads
the whole object once and keeps the digests of its chunks; each later read verifies the chunks it touches.  Chunks that
are all zeros are not read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from protocol.linux.regular_file import open_regular, sync_directory
from protocol.store.format.digests import CHUNK_BYTES, ContentDigest, digest_of
from protocol.store.format.packs import damaged_blob
from protocol.tree import Chunk, Hole, sparse

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout

_FICLONE: Final = 0x40049409  # _IOW(0x94, 9, int); linux/fs.h
_COPY_BYTES: Final = 1 << 20
_O_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_CANNOT_CLONE: Final = frozenset({
    errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.EBADF, errno.ENOSYS, errno.ETXTBSY,
})  # fmt: skip


Done: TypeAlias = Callable[[int], object]  # called with the number of bytes of each read


def clone(source: int, target: int) -> bool:
    """Make the empty file `target` share the blocks of `source`; False if the file system does not support that."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _CANNOT_CLONE:
            return False
        raise
    return True


def data_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The (start, end) of each run of data in a file; the rest are holes.  lseek(2)."""
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            if error.errno == errno.EINVAL:  # the file system does not support holes
                yield at, size
                return
            raise
        if start >= size:
            return
        at = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        if at <= start:
            return  # the file shrinks meanwhile
        yield start, at


def fed_from_file(
    descriptor: int,
    size: int,
    digest: ContentDigest,
    put: Callable[[memoryview, int], object] | None = None,
    done: Done = lambda _: None,
) -> int:
    """Feed the first `size` bytes of a file to `digest`, and pass each piece with its offset to `put`.

    Return the number of bytes, which is smaller if the file has shrunk.
    """
    buffer = bytearray(min(_COPY_BYTES, max(size, 1)))
    view = memoryview(buffer)
    at = 0
    for start, end in data_ranges(descriptor, size):
        digest.feed_hole(start - at)
        at = start
        while at < end:
            count = os.preadv(descriptor, [view[: end - at]], at)
            if not count:
                return at
            digest.feed(view[:count])
            if put is not None:
                put(view[:count], at)
            at += count
            done(count)
    end = min(size, os.fstat(descriptor).st_size)
    if end > at:
        digest.feed_hole(end - at)
        at = end
    return at


class Objects:
    """The large contents of a store."""

    def __init__(self, layout: Layout) -> None:
        self._directory = layout.objects

    def path(self, digest: bytes) -> str:
        """The path of a content, whether or not it exists."""
        name = digest.hex()
        return os.path.join(self._directory, name[:2], name[2:])

    def has(self, digest: bytes, size: int | None = None) -> bool:
        """Whether a content is there: a regular file, of `size` bytes if `size` is given."""
        try:
            seen = os.lstat(self.path(digest))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(seen.st_mode) and size in {None, seen.st_size}

    def sectors(self, digest: bytes) -> int | None:
        """The size of a content on disk in units of 512 bytes, without its holes; None if it is not there."""
        try:
            return os.lstat(self.path(digest)).st_blocks
        except OSError:
            return None

    def open(self, digest: bytes) -> int:
        """Open a content to read it.  DamagedError if it is gone or not a regular file."""
        try:
            return open_regular(self.path(digest))
        except (FileNotFoundError, NotADirectoryError):
            raise damaged_blob(digest, "is gone from the store") from None
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.EINTR, errno.ENOMEM}:
                raise
            raise damaged_blob(digest, f"cannot be read ({error.strerror})") from None

    def all(self) -> Iterator[bytes]:
        """The digests of all objects."""
        with contextlib.suppress(FileNotFoundError):
            for part in sorted(os.listdir(self._directory)):
                for name in sorted(os.listdir(os.path.join(self._directory, part))):
                    with contextlib.suppress(ValueError):
                        yield bytes.fromhex(part + name)


class NewObjects:
    """The large contents of a new snapshot; `publish` makes them part of the store."""

    def __init__(self, layout: Layout, objects: Objects) -> None:
        self._layout = layout
        self._objects = objects
        self._written: dict[bytes, str] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._written

    def from_file(self, source: int, size: int, done: Done) -> tuple[bytes, int]:
        """Store the first `size` bytes of a file; return their digest and number."""
        with self._temporary() as (temporary, target):
            digest = ContentDigest()
            if clone(source, target):
                # Read the clone: writes to the original do not change it.
                os.ftruncate(target, min(size, os.fstat(target).st_size))
                count = fed_from_file(target, size, digest, None, done)
            else:
                count = fed_from_file(source, size, digest, lambda data, at: put(target, data, at), done)
                os.ftruncate(target, count)
        return self._keep(digest.digest(), temporary, count), count

    def from_chunks(self, chunks: Iterable[Chunk], done: Done) -> tuple[bytes, int]:
        """Store a content that comes in pieces; return its digest and length.  Pages of zeros become holes, too."""
        with self._temporary() as (temporary, target):
            digest = ContentDigest()
            at = 0
            for chunk in chunks:
                digest.feed(chunk)
                put_sparse(target, chunk, at)
                at += len(chunk)
                done(len(chunk))
            os.ftruncate(target, at)
        return self._keep(digest.digest(), temporary, at), at

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[tuple[str, int]]:
        """The path and descriptor of a new file, which is removed if the block fails."""
        path = self._layout.temporary(".object")
        descriptor = os.open(path, _O_WRITE, 0o600)
        try:
            yield path, descriptor
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def _keep(self, digest: bytes, temporary: str, size: int) -> bytes:
        # An object of another size is damaged; this one replaces it.
        if digest in self._written or self._objects.has(digest, size):
            os.unlink(temporary)
        else:
            self._written[digest] = temporary
        return digest

    def discard(self) -> None:
        """Remove what was not published."""
        for temporary in self._written.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        self._written.clear()

    def publish(self) -> None:
        """Make the contents durable and part of the store."""
        for temporary in self._written.values():
            descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        parts = set()
        for digest, temporary in self._written.items():
            path = self._objects.path(digest)
            parts.add(os.path.dirname(path))
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.rename(temporary, path)
        for part in parts:
            sync_directory(part)
        if parts:
            sync_directory(self._layout.objects)
        self._written.clear()


def put_sparse(target: int, chunk: Chunk, at: int) -> None:
    """Write a chunk to a file of zeros at offset `at`, without its holes and pages of zeros."""
    if isinstance(chunk, Hole):
        return
    for piece in sparse(chunk):
        if not isinstance(piece, Hole):
            put(target, memoryview(piece), at)
        at += len(piece)


def put(target: int, data: memoryview, at: int) -> None:
    """Write all of `data` to a file at offset `at`."""
    while data:
        count = os.pwrite(target, data, at)
        data, at = data[count:], at + count


# -- verified reads --------------------------------------------------------------------------------
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

    @contextlib.contextmanager
    def _opened(self, digest: bytes) -> Iterator[int]:
        descriptor = self._objects.open(digest)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, digest: bytes, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a content, from `offset`."""
        with self._opened(digest) as descriptor:
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

    def chunks(self, digest: bytes, size: int) -> Iterator[Chunk]:
        """A content, in chunks of at most `size` bytes, and holes."""
        with self._opened(digest) as descriptor:
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

    def is_ready(self, digest: bytes, size: int) -> bool:
        """Whether a read of a content of `size` bytes does not have to read all of it first."""
        with self._lock:
            return size <= CHUNK_BYTES or digest in self._verified

    def prepare(self, digest: bytes) -> None:
        """Verify a content, so that it is ready."""
        with self._opened(digest) as descriptor:
            self._chunks(digest, descriptor)

    def size(self, digest: bytes) -> int:
        """The size of a content in bytes."""
        with self._opened(digest) as descriptor:
            return os.fstat(descriptor).st_size

    def chunk_digests(self, digest: bytes) -> dict[int, bytes]:
        """The digests of the chunks of a content of more than CHUNK_BYTES, without those of chunks of zeros."""
        with self._opened(digest) as descriptor:
            return self._chunks(digest, descriptor).digests

    def verify(self, digest: bytes, done: Done = lambda _: None) -> None:
        """Read and compare a whole content.  `done` is called with the bytes of each read."""
        with self._opened(digest) as descriptor:
            self._compare(digest, descriptor, os.fstat(descriptor).st_size, done=done)

    def copy(self, digest: bytes, size: int, target: int) -> None:
        """Write a content of `size` bytes to the empty file `target`, open for reading and writing; holes stay holes.

        Shares the blocks if the file system supports that.  After DamagedError the content of `target` is undefined.
        """
        with self._opened(digest) as source:
            if os.fstat(source).st_size != size:
                raise damaged_blob(digest)
            if clone(source, target):
                self._compare(digest, target, size)
                return
            self._compare(digest, source, size, target)
            os.ftruncate(target, size)

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
