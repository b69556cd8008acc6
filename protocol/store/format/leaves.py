"""Leaves: reads what is no directory, so that what is stored of it is what it had at one moment.

A file is looked at before and after it is read.  One that keeps changing is stored as it was read last, and named.

Threading: one thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from typing import Final

from protocol.linux.beneath import open_to_read, proc_path
from protocol.linux.statx import StatxResult, result_at, statx_descriptor
from protocol.store.directory.statcache import is_racy
from protocol.store.format.blobs import LARGE_BYTES, Sink
from protocol.store.format.rows import UNREADABLE, More, Row, Xattrs

__all__ = ["DENIED", "GONE", "Leaves", "VanishedError", "read_xattrs"]

_TRIES: Final = 5
_TICK_S: Final = 0.005
_O_PATH: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE})
_NO_XATTRS: Final = frozenset({errno.EOPNOTSUPP, errno.ENODATA, errno.EACCES, errno.EPERM})


class VanishedError(Exception):
    """What was listed is gone, or something else by now."""


class Leaves:
    """Gives files to `sink`; `deny` hears of what cannot be read (and may raise), `done` of bytes read."""

    def __init__(self, sink: Sink, deny: Callable[[bytes, OSError], None], done: Callable[[int], None]) -> None:
        self._sink = sink
        self._deny = deny
        self._done = done
        self.unstable: list[bytes] = []

    def take(self, parent: int, name: bytes, path: bytes, seen: StatxResult) -> tuple[Row, StatxResult | None]:
        """The row of anything else, and as what it was seen when it was read (None: it did not stand still)."""
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
            return _row(name, now, len(target), target, read_xattrs(proc_path(descriptor)), 0), now
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
            return self._steady(descriptor, name, path, seen)
        finally:
            os.close(descriptor)

    def _steady(self, descriptor: int, name: bytes, path: bytes, seen: StatxResult) -> tuple[Row, StatxResult | None]:
        before = seen
        for _ in range(_TRIES):
            try:
                digest, size = self._content(descriptor, before)
            except OSError:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise
                raise VanishedError from None
            xattrs = read_xattrs(descriptor)
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
            digest, size = self._last_resort(descriptor, before.size)
        return _row(name, before, size, digest, xattrs, 0), None

    def _last_resort(self, descriptor: int, size: int) -> tuple[bytes, int]:
        """What it had while it was changing: named as unstable, but better than nothing."""
        if size > LARGE_BYTES:
            digest, count = self._sink.large(descriptor, size, self._done)
            return (digest if count else b""), count
        data = os.pread(descriptor, size, 0)
        return (self._sink.small(data) if data else b""), len(data)

    def _content(self, descriptor: int, seen: StatxResult) -> tuple[bytes, int]:
        """The digest of what is there, and how much; nothing of a digest that changes as it is read is kept."""
        size = seen.size
        racy = is_racy(seen.ctime_ns, time.time_ns())
        if size > LARGE_BYTES:
            _wait_until_safe(seen.ctime_ns)
            digest, count = self._sink.large(descriptor, size, self._done)
            return (digest if count else b""), count
        if not size:
            return b"", 0
        data = os.pread(descriptor, size, 0)
        self._done(len(data))
        if racy and os.pread(descriptor, size, 0) != data:
            return b"", -1
        return (self._sink.small(data) if data else b""), len(data)


def _wait_until_safe(ctime_ns: int) -> None:
    """Until a write would show in the ctime; not for one of the future, as files have when the clock was set back."""
    while ctime_ns <= (now_ns := time.time_ns()) and is_racy(ctime_ns, now_ns):
        time.sleep(_TICK_S)


def _row(name: bytes, seen: StatxResult, size: int, content: bytes, xattrs: Xattrs, state: int) -> Row:
    rare = None
    if seen.nlink > 1 or seen.rdev or xattrs or state:
        rare = More(
            link=seen.inode if seen.nlink > 1 else 0, nlink=seen.nlink, rdev=seen.rdev, xattrs=xattrs, state=state
        )  # fmt: skip
    return Row(name, seen.mode, seen.uid, seen.gid, seen.mtime_ns, size, content, rare)


def read_xattrs(at: int | bytes) -> Xattrs:
    """All xattrs that can be read of a descriptor or /proc path, sorted."""
    try:
        names = os.listxattr(at)
    except OSError as error:
        if error.errno in _NO_XATTRS:
            return ()
        raise
    if not names:
        return ()
    found = []
    for name in names:
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to read (trusted., security.)
            found.append((os.fsencode(name), os.getxattr(at, name)))
    return tuple(sorted(found))
