"""LeafReader: reads files and other non-directories, so that a stored content is one that the file had at one moment.

The reader compares a file's stat data before and after it reads it, and tries up to five times.  A file that still
changes is stored as last read and reported in `unstable`.

Threading: one thread at a time.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from typing import Final

from protocol.linux.beneath import open_to_read
from protocol.linux.portable import proc_path
from protocol.linux.regular_file import read_xattrs
from protocol.linux.statx import StatxResult, is_racy, result_at, statx_descriptor
from protocol.store.format.blobs import LARGE_BYTES, Sink
from protocol.store.format.rows import UNREADABLE, More, Row, Xattrs

_TRIES: Final = 5
_TICK_S: Final = 0.005
_O_PATH: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE})


class VanishedError(Exception):
    """A listed entry is gone, or has another type now."""


class LeafReader:
    """Gives the contents of files to `sink`.

    `deny` is called with an entry that cannot be read, and may raise; `done` with the number of bytes of each read.
    """

    def __init__(self, sink: Sink, deny: Callable[[bytes, OSError], None], done: Callable[[int], None]) -> None:
        self._sink = sink
        self._deny = deny
        self._done = done
        self.unstable: list[bytes] = []

    def take(self, parent: int, name: bytes, path: bytes, seen: StatxResult) -> tuple[Row, StatxResult | None]:
        """The row of an entry, and its stat data when it was read (None: it kept changing).  VanishedError."""
        if stat.S_ISREG(seen.mode):
            return self._file(parent, name, path, seen)
        try:
            descriptor = os.open(name, _O_PATH, dir_fd=parent)
        except OSError as error:
            if error.errno in GONE:
                raise VanishedError from None
            raise
        try:
            now = result_at(statx_descriptor(descriptor), 0)
            if stat.S_IFMT(now.mode) != stat.S_IFMT(seen.mode):
                raise VanishedError
            target = os.readlink(b"", dir_fd=descriptor) if stat.S_ISLNK(now.mode) else b""
            return _row(name, now, len(target), target, sorted_xattrs(proc_path(descriptor)), 0), now
        finally:
            os.close(descriptor)

    def _file(self, parent: int, name: bytes, path: bytes, seen: StatxResult) -> tuple[Row, StatxResult | None]:
        try:
            descriptor = open_to_read(parent, name)
        except OSError as error:
            if error.errno in DENIED:
                self._deny(path, error)
                return _row(name, seen, seen.size, b"", (), UNREADABLE), seen
            if error.errno in GONE:
                raise VanishedError from None
            raise
        try:
            return self._read_stable(descriptor, name, path, seen)
        finally:
            os.close(descriptor)

    def _read_stable(
        self, descriptor: int, name: bytes, path: bytes, seen: StatxResult
    ) -> tuple[Row, StatxResult | None]:
        before = seen
        for _ in range(_TRIES):
            try:
                digest, size = self._content(descriptor, before)
            except OSError:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise
                raise VanishedError from None
            xattrs = sorted_xattrs(descriptor)
            after = os.fstat(descriptor)
            same = (after.st_ctime_ns, after.st_mtime_ns, after.st_size) == (
                before.ctime_ns, before.mtime_ns, before.size,
            )  # fmt: skip
            if same and after.st_ino == before.inode and size == before.size:
                return _row(name, before, size, digest, xattrs, 0), before
            if not stat.S_ISREG(after.st_mode):
                raise VanishedError
            before = result_at(statx_descriptor(descriptor), 0)
        self.unstable.append(path)
        if size < 0:
            digest, size = self._unstable_content(descriptor, before.size)
        return _row(name, before, size, digest, xattrs, 0), None

    def _content(self, descriptor: int, seen: StatxResult) -> tuple[bytes, int]:
        """The digest and length of the content; length -1, with nothing stored, if it changed while it was read."""
        if seen.size > LARGE_BYTES:
            _wait_until_safe(seen.ctime_ns)
            return self._large(descriptor, seen.size)
        if not seen.size:
            return b"", 0
        racy = is_racy(seen.ctime_ns, time.time_ns())
        data = os.pread(descriptor, seen.size, 0)
        self._done(len(data))
        # The stat data does not show a change within the same clock tick, so read twice.
        if racy and os.pread(descriptor, seen.size, 0) != data:
            return b"", -1
        return (self._sink.small(data) if data else b""), len(data)

    def _large(self, descriptor: int, size: int) -> tuple[bytes, int]:
        digest, count = self._sink.large(descriptor, size, self._done)
        return (digest if count else b""), count

    def _unstable_content(self, descriptor: int, size: int) -> tuple[bytes, int]:
        """Store one reading of a file that keeps changing."""
        if size > LARGE_BYTES:
            return self._large(descriptor, size)
        data = os.pread(descriptor, size, 0)
        return (self._sink.small(data) if data else b""), len(data)


def _wait_until_safe(ctime_ns: int) -> None:
    """Wait until a write would change the ctime; not if the ctime is in the future (the clock was set back)."""
    while ctime_ns <= (now_ns := time.time_ns()) and is_racy(ctime_ns, now_ns):
        time.sleep(_TICK_S)


def _row(name: bytes, seen: StatxResult, size: int, content: bytes, xattrs: Xattrs, state: int) -> Row:
    rare = None
    if seen.nlink > 1 or seen.rdev or xattrs or state:
        rare = More(
            link=seen.inode if seen.nlink > 1 else 0, nlink=seen.nlink, rdev=seen.rdev, xattrs=xattrs, state=state
        )  # fmt: skip
    return Row(name, seen.mode, seen.uid, seen.gid, seen.mtime_ns, size, content, rare)


def sorted_xattrs(at: int | bytes) -> Xattrs:
    """The extended attributes of a descriptor or /proc path as a row stores them; see `read_xattrs`."""
    return tuple(sorted(read_xattrs(at).items()))
