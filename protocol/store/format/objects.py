"""Objects: large contents, each a file of its own, cloned from the original where the file system can do that.

An object is written under a name of its own in tmp/, and gets its digest as its name when the snapshot that needs it
is written: after it was synced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from protocol.store.format.digests import ContentDigest
from protocol.store.format.layout import open_regular, sync_directory
from protocol.store.format.packs import MORE, DamagedError

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout
    from protocol.volume import Buffer

__all__ = ["NewObjects", "Objects", "clone", "data_ranges", "fed_from_file", "put"]

_FICLONE: Final = 0x40049409  # _IOW(0x94, 9, int); linux/fs.h
_COPY_BYTES: Final = 1 << 20
_O_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_CANNOT_CLONE: Final = frozenset({
    errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.EBADF, errno.ENOSYS, errno.ETXTBSY,
})  # fmt: skip


def clone(source: int, target: int) -> bool:
    """Let `target`, an empty file, share the blocks of `source`; False where the file system cannot."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _CANNOT_CLONE:
            return False
        raise
    return True


def data_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has data, as (start, end); between them are holes.  lseek(2)."""
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            if error.errno == errno.EINVAL:  # a file system that knows of no holes
                yield at, size
                return
            raise
        if start >= size:
            return
        at = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        if at <= start:
            return  # it shrinks as we look
        yield start, at


def fed_from_file(
    descriptor: int,
    size: int,
    digest: ContentDigest,
    put: Callable[[memoryview, int], object] | None = None,
    done: Callable[[int], object] = lambda _: None,
) -> int:
    """Feed `digest` with the first `size` bytes of a file, and give each piece with its offset to `put`.

    Returns how many there were: fewer where the file has shrunk.  `done` hears of the bytes read.
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
        """Where a content is, or would be."""
        name = digest.hex()
        return os.path.join(self._directory, name[:2], name[2:])

    def has(self, digest: bytes, size: int | None = None) -> bool:
        """Whether it is there: a regular file, of `size` bytes where that is known."""
        try:
            seen = os.lstat(self.path(digest))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(seen.st_mode) and size in {None, seen.st_size}

    def open(self, digest: bytes) -> int:
        """A descriptor to read it.  DamagedError where it is gone, or something else is there."""
        try:
            return open_regular(self.path(digest))
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedError(f"the stored content {digest.hex()[:16]} is gone; {MORE}") from None
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.EINTR, errno.ENOMEM}:
                raise
            raise DamagedError(f"the stored content {digest.hex()[:16]} cannot be read ({error.strerror})") from None

    def all(self) -> Iterator[bytes]:
        """The digests of all of them."""
        with contextlib.suppress(FileNotFoundError):
            for part in sorted(os.listdir(self._directory)):
                for name in sorted(os.listdir(os.path.join(self._directory, part))):
                    with contextlib.suppress(ValueError):
                        yield bytes.fromhex(part + name)


class NewObjects:
    """The large contents of a snapshot that is being taken; `publish` gives them their names."""

    def __init__(self, layout: Layout, objects: Objects) -> None:
        self._tmp = layout.tmp
        self._directory = layout.objects
        self._objects = objects
        self._written: dict[bytes, str] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._written

    def __len__(self) -> int:
        return len(self._written)

    def path(self, digest: bytes) -> str | None:
        """Where a content is that was not yet published."""
        return self._written.get(digest)

    def from_file(self, source: int, size: int, done: Callable[[int], object]) -> tuple[bytes, int]:
        """Keep the first `size` bytes of a file; their digest and how many there were."""
        temporary, target = self._new()
        digest = ContentDigest()
        try:
            if clone(source, target):
                # What is read is the clone: whoever writes to the original meanwhile does not reach it.
                os.ftruncate(target, min(size, os.fstat(target).st_size))
                count = fed_from_file(target, size, digest, None, done)
            else:
                count = fed_from_file(source, size, digest, lambda data, at: put(target, data, at), done)
                os.ftruncate(target, count)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(target)
        return self._keep(digest.digest(), temporary, count), count

    def from_chunks(self, chunks: Iterable[Buffer], done: Callable[[int], object]) -> tuple[bytes, int]:
        """Keep a content that comes in pieces; its digest and length.  Pieces of zeros become holes."""
        temporary, target = self._new()
        digest = ContentDigest()
        at = 0
        try:
            for chunk in chunks:
                digest.feed(chunk)
                if any(chunk):
                    put(target, memoryview(chunk), at)
                at += len(chunk)
                done(len(chunk))
            os.ftruncate(target, at)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(target)
        return self._keep(digest.digest(), temporary, at), at

    def _new(self) -> tuple[str, int]:
        temporary = os.path.join(self._tmp, f"{os.getpid():x}-{time.monotonic_ns():x}.object")
        return temporary, os.open(temporary, _O_WRITE, 0o600)

    def _keep(self, digest: bytes, temporary: str, size: int) -> bytes:
        # An object of another size was cut short or appended to: this one replaces it.
        if digest in self._written or self._objects.has(digest, size):
            os.unlink(temporary)
        else:
            self._written[digest] = temporary
        return digest

    def discard(self) -> None:
        """They are not needed."""
        for temporary in self._written.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        self._written.clear()

    def publish(self) -> None:
        """Make them durable, and part of the store."""
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
            sync_directory(self._directory)
        self._written.clear()


def put(target: int, data: memoryview, at: int) -> None:
    """Write all of `data` to a file, from offset `at`."""
    while data:
        count = os.pwrite(target, data, at)
        data, at = data[count:], at + count
