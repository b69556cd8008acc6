"""HostLower: a directory of this host as the lower layer of an overlay.  Only `apply` writes to it.

A read compares the identity of the file with fstat(2) after reading the bytes, and discards them if it differs.  A
change that keeps the size and happens within the same tick of the file system's clock (some milliseconds) is not
detected.

Inode numbers in the volume are those of the directory's file system, so that git's index of the directory is valid in
the overlay, too.  Files on other mounts below the directory get any number.

Threading: any thread.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from protocol.backends.overlay.lower import (
    FIRST_NEW_NUMBER,
    LOST_NS,
    REMOVED,
    ChangedBelowError,
    Identity,
    Lower,
    LowerEntry,
    LowerFile,
    LowerStat,
    RecordedStat,
    identity,
    is_gone,
)
from protocol.diff.tree_diff import is_at_or_below
from protocol.errors import os_error, shown
from protocol.linux.beneath import DirectoryReference, HandleCache, RootDirectory, open_beneath, open_to_read
from protocol.linux.portable import Handle, birth_ns, proc_path
from protocol.linux.syscalls import seek_hole

INTENT_LOG_NAME: Final = b".vfsd-apply"  # the intent log of an apply, which the overlay does not show
KEPT_BYTES: Final = 256 * 1024  # a file up to this size is kept in memory when it is replaced below, a larger one open
_DIRECTORIES_KEPT: Final = 64
_FEWEST_FILES: Final = 16
_MOST_FILES: Final = 512
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENODATA, errno.EACCES, errno.EPERM})


def directory_fingerprint(descriptor: int) -> str:
    """Return the identity of a directory, which stays the same when it is moved."""
    # A new directory may get the inode number of a removed one, but never its birth time.
    return f"directory {os.fstat(descriptor).st_ino}, made at {birth_ns(descriptor)} ns"


class HostLower(RootDirectory, Lower):
    """The directory `root`."""

    can_change = True

    def __init__(self, root: DirectoryReference, *, same_mount: bool = False) -> None:
        super().__init__(root, same_mount=same_mount, kept=_DIRECTORIES_KEPT)
        self.intent_log = INTENT_LOG_NAME  # its path
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = max(_FEWEST_FILES, min(_MOST_FILES, soft // 4)) if soft > 0 else _MOST_FILES
        self._files = HandleCache(most)
        self._device = os.fstat(self.fd).st_dev
        self.fingerprint = directory_fingerprint(self.fd)
        self.moving: set[tuple[int, int]] = set()  # (st_dev, st_ino) of the inodes whose ctime `apply` changes now

    @property
    def root_fd(self) -> int:
        return self.fd

    def is_same(self, now: Identity, was: Identity) -> bool:
        """See `Lower.is_same`.  A ctime that `apply` changes now does not count."""
        return now == was or (now[:4] == was[:4] and now[:2] in self.moving)

    def stat(self, path: bytes) -> LowerStat:
        handle, name = self.parent(path)
        return os.stat(name, dir_fd=handle.fd, follow_symlinks=False)

    def readlink(self, path: bytes) -> bytes:
        handle, name = self.parent(path)
        return os.readlink(name, dir_fd=handle.fd)

    def xattrs(self, path: bytes) -> dict[bytes, bytes] | None:
        handle, name = self.parent(path)
        place = proc_path(handle.fd) + b"/" + name
        try:
            names = os.listxattr(place, follow_symlinks=False)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return None
            raise
        if not names:
            return None
        found = {}
        for each in names:
            try:
                found[os.fsencode(each)] = os.getxattr(place, each, follow_symlinks=False)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    # security.capability without capabilities exists but cannot be read (security/commoncap.c).
                    found[os.fsencode(each)] = b""
                elif error.errno not in _UNSUPPORTED:
                    raise
        return found or None

    def scan(self, path: bytes) -> list[LowerEntry]:
        """See `Lower.scan`.  The intent log of an apply is left out."""
        handle = self.directory(path)
        descriptor = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle.fd)
        try:
            device = os.fstat(descriptor).st_dev
            first = FIRST_NEW_NUMBER if device == self._device else 0  # numbers from here on are not used
            found = []
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    inode = entry.inode()
                    number = inode if inode < first else 0
                    found.append(LowerEntry(os.fsencode(entry.name), _kind(entry), (device, inode), number))
        finally:
            os.close(descriptor)
        above, _, log = self.intent_log.rpartition(b"/")
        return found if path != above else [entry for entry in found if entry.name != log]

    def is_closed(self, path: bytes) -> bool:  # noqa: ARG002
        """Return whether the overlay shows the entry at `path` as an empty one."""
        return False

    def file(self, path: bytes, seen: LowerStat) -> HostFile:
        return HostFile(self, path, seen)

    def open_file(self, file: HostFile) -> Handle:
        """Open the regular file at the path of `file` for reading.  It may be another one by now."""
        handle = self._files.get(file)
        if handle is None:
            try:
                directory, name = self.parent(file.path)
                handle = Handle(open_to_read(directory.fd, name))
            except OSError as error:
                if is_gone(error):
                    raise ChangedBelowError(file.path, REMOVED) from None
                raise
            if not stat.S_ISREG(os.fstat(handle.fd).st_mode):
                raise ChangedBelowError(file.path, REMOVED)
            self._files.put(file, handle)
        return handle

    def evict(self, file: LowerFile) -> None:
        self._files.drop(file)

    @contextmanager
    def forking(self) -> Iterator[None]:
        with self._files.forking(), self._directories.forking():
            yield

    def close(self) -> None:
        """Forget all descriptors except the root's."""
        self._files.clear()
        self.close_directories()


class MachineLower(HostLower):
    """The root directory of this machine, and the file systems mounted at `mounts` below it: paths relative to it.

    The mountpoint of any other mount, and each directory in `closed`, is shown as an empty file or directory.  No call
    reaches another mount, not even a stat: one of them is the daemon's own mount, which cannot answer during the call.
    (Without openat2, before Linux 5.6, only `closed` keeps a call from one.)  `log` is the path of the intent log.
    """

    def __init__(self, root: DirectoryReference, mounts: Sequence[bytes], closed: Sequence[bytes], log: bytes) -> None:
        super().__init__(root, same_mount=True)
        self.intent_log = log
        self._closed = frozenset(closed)
        self._covered: set[bytes] = set()  # mountpoints of other mounts, as far as they were looked at
        self._tops = {b"": self._root}
        for path in mounts:
            with suppress(OSError):  # this user may not enter it, or it was unmounted: it looks empty
                self._tops[path] = Handle(open_beneath(self._root.fd, path, os.O_PATH | os.O_DIRECTORY))

    def open(self, path: bytes, flags: int) -> int:
        """Open `path` in its file system.  EXDEV if it is closed, or in another one."""
        if is_at_or_below(path, self._closed):
            raise os_error(errno.EXDEV, shown(path))
        top = path
        while top not in self._tops:
            top = top.rpartition(b"/")[0]
        below = path[len(top) :].lstrip(b"/")
        return open_beneath(self._tops[top].fd, below or b".", flags, same_mount=True)

    def stat(self, path: bytes) -> LowerStat:
        if path in self._tops:
            return os.fstat(self._tops[path].fd)
        directory, name = self.parent(path)
        try:
            entry = Handle(open_beneath(directory.fd, name, os.O_PATH, same_mount=True))
            return os.fstat(entry.fd)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        above = path.rpartition(b"/")[0]
        covered = next((each for each in self.scan(above) if each.name == name), None)
        if covered is None:
            raise os_error(errno.ENOENT, shown(path))
        self._covered.add(path)
        mode = stat.S_IFDIR | 0o755 if covered.kind == stat.S_IFDIR else stat.S_IFREG | 0o644
        return RecordedStat(mode, covered.key[1], covered.key[0], 1, 0, 0, 0, 0, 0, 0, 0, 0)

    def is_closed(self, path: bytes) -> bool:
        return path in self._closed or path in self._covered

    def xattrs(self, path: bytes) -> dict[bytes, bytes] | None:
        return None if path in self._covered else super().xattrs(path)

    def scan(self, path: bytes) -> list[LowerEntry]:
        try:
            return super().scan(path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return []


def _kind(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    try:
        return stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
    except OSError:
        return stat.S_IFREG


class PrivateCopy(Handle):
    """An unnamed file with the content of a file that an apply replaced, from a journal.  Nobody else writes to it."""

    __slots__ = ()

    def write(self, data: bytes, offset: int) -> None:
        """Write all of `data`.  OSError."""
        while data:
            done = os.pwrite(self.fd, data, offset)
            data, offset = data[done:], offset + done


class HostFile(LowerFile):
    """See `LowerFile`.  `kept` is content in memory, or the open file."""

    __slots__ = ("lower",)

    def __init__(self, lower: HostLower, path: bytes, seen: LowerStat) -> None:
        super().__init__(path, seen)
        self.lower = lower
        ctime_ns = seen.st_ctime_ns
        if ctime_ns <= time.time_ns() or ctime_ns == LOST_NS:  # else another machine's clock set it
            self.changed_ns = ctime_ns

    def read(self, offset: int, size: int) -> bytes:
        if isinstance(self.kept, bytes):
            return self.kept[offset : offset + size]
        handle = self._handle()
        pieces, missing = [], size
        while missing and (data := os.pread(handle.fd, missing, offset + size - missing)):
            pieces.append(data)
            missing -= len(data)
        self._check(handle)
        if missing:
            raise ChangedBelowError(self.path)
        return b"".join(pieces)

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        if isinstance(self.kept, bytes):
            yield start, min(end, len(self.kept))
            return
        handle = self._handle()
        self._check(handle)
        at = start
        while at < end:
            try:
                at = os.lseek(handle.fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            if at >= end:
                return
            after = min(seek_hole(handle.fd, at), end)
            yield at, after
            at = after

    def keep(self) -> None:
        if self.kept is None:
            if self.size <= KEPT_BYTES:
                self.kept = self.read(0, self.size)
                return
            handle = self.lower.open_file(self)
            self._check(handle)
            self.kept = handle

    def _handle(self) -> Handle:
        return self.kept if isinstance(self.kept, Handle) else self.lower.open_file(self)

    def _check(self, handle: Handle) -> None:
        if isinstance(handle, PrivateCopy):
            return
        seen = identity(os.fstat(handle.fd))
        if self.lower.is_same(seen, self.identity):
            return
        # An inode that is kept open gets another ctime when its path is removed.
        if self.kept is None or seen[:4] != self.identity[:4]:
            self.lower.evict(self)
            raise ChangedBelowError(self.path)
