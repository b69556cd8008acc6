"""Lower: the directory below an overlay, which is only read.

The `Identity` of a file is its state when it was loaded.  A read compares it with fstat(2) after reading the bytes,
and discards them if it differs (`ChangedBelowError`), so all bytes of a file belong to one version.  A change that
keeps the size and happens within the same tick of the file system's clock (some milliseconds) is not detected.

Threading: any thread.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from protocol.linux.beneath import HandleCache, RootDirectory, open_to_read
from protocol.linux.portable import Handle, proc_path
from protocol.linux.syscalls import seek_hole

Identity = tuple[int, int, int, int, int]  # st_dev, st_ino, st_size, st_mtime_ns, st_ctime_ns

_VANISHED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ESTALE})
JOURNAL_NAME: Final = b".vfsd-apply"  # in the root: where `apply` keeps its journal, which the overlay does not show
KEPT_BYTES: Final = 256 * 1024  # a file up to this size is kept in memory when it is replaced below, a larger one open
_DIRECTORIES_KEPT: Final = 64
_FEWEST_FILES: Final = 16
_MOST_FILES: Final = 512
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENODATA, errno.EACCES, errno.EPERM})


class ChangedBelowError(OSError):
    """A file of the lower directory changed since it was loaded (ESTALE); `path` is relative to that directory."""

    def __init__(self, path: bytes) -> None:
        super().__init__(
            errno.ESTALE,
            "another program changed the file below the overlay, and the parts that were not copied up are lost;"
            " `vfsd discard` shows the new file",
            path.decode("utf-8", "backslashreplace"),
        )
        self.path = path


class Scanned(NamedTuple):
    """An entry of a lower directory, with the inode number and the type bits that the directory lists."""

    name: bytes
    inode: int
    kind: int


def identity(seen: os.stat_result) -> Identity:
    """Return the values that identify a state of the file: replacing or modifying it changes at least one of them."""
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def is_gone(error: OSError) -> bool:
    """Return whether the error means that the path does not exist (any more), or leads out of the directory."""
    return error.errno in _VANISHED


class Lower(RootDirectory):
    """The directory `root`.  Paths are bytes relative to it, b"" is the directory itself.  Methods raise OSError."""

    def __init__(self, root: str | bytes) -> None:
        super().__init__(os.fsencode(os.path.abspath(root)), kept=_DIRECTORIES_KEPT)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = max(_FEWEST_FILES, min(_MOST_FILES, soft // 4)) if soft > 0 else _MOST_FILES
        self._files = HandleCache(most)
        self.moving: set[tuple[int, int]] = set()  # (st_dev, st_ino) of the inodes whose ctime `apply` changes now

    def is_same(self, now: Identity, was: Identity) -> bool:
        """Return whether a file is unchanged.  A ctime that `apply` changes now does not count."""
        return now == was or (now[:4] == was[:4] and now[:2] in self.moving)

    def stat(self, path: bytes) -> os.stat_result:
        """Return the result of lstat(2)."""
        handle, name = self.parent(path)
        return os.stat(name, dir_fd=handle.fd, follow_symlinks=False)

    def readlink(self, path: bytes) -> bytes:
        """Return the target of a symlink."""
        handle, name = self.parent(path)
        return os.readlink(name, dir_fd=handle.fd)

    def xattrs(self, path: bytes) -> dict[bytes, bytes] | None:
        """Return the extended attributes that may be read; None if there are none."""
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

    def scan(self, path: bytes) -> tuple[int, list[Scanned]]:
        """Return the device of a directory and its entries."""
        handle = self.directory(path)
        descriptor = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle.fd)
        try:
            with os.scandir(descriptor) as entries:
                found = [Scanned(os.fsencode(entry.name), entry.inode(), _kind(entry)) for entry in entries]
            if not path:
                found = [entry for entry in found if entry.name != JOURNAL_NAME]
            return os.fstat(descriptor).st_dev, found
        finally:
            os.close(descriptor)

    def open_file(self, file: LowerFile) -> Handle:
        """Open the regular file at the path of `file` for reading.  It may be another one by now."""
        handle = self._files.get(file)
        if handle is None:
            directory, name = self.parent(file.path)
            try:
                handle = Handle(open_to_read(directory.fd, name))
            except OSError as error:
                if is_gone(error):
                    raise ChangedBelowError(file.path) from None
                raise
            self._files.put(file, handle)
        return handle

    def forget(self, file: LowerFile) -> None:
        """Forget the descriptor of a file that changed."""
        self._files.drop(file)

    @contextmanager
    def forking(self) -> Iterator[None]:
        """A block in which no other thread uses the caches of descriptors."""
        with self._files.forking(), self._directories.forking():
            yield

    def close(self) -> None:
        """Forget all descriptors except the root's."""
        self._files.clear()
        self.forget_directories()


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


class LowerFile:
    """The file at a path of the lower directory, in the state in which it was loaded.  `kept` outlives it (`keep`)."""

    __slots__ = ("identity", "kept", "lower", "path", "sectors")

    def __init__(self, lower: Lower, path: bytes, seen: os.stat_result) -> None:
        self.lower = lower
        self.path = path
        self.identity = identity(seen)
        self.sectors = seen.st_blocks
        self.kept: Handle | bytes | None = None

    @property
    def size(self) -> int:
        return self.identity[2]

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, all of them within the file.  ChangedBelowError."""
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
        """Yield (start, end) of each run of data between two offsets, in order.  ChangedBelowError."""
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
        """Keep the present content readable after the path is removed or replaced.  See `apply`.  ChangedBelowError."""
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
        seen = identity(os.fstat(handle.fd))
        if self.lower.is_same(seen, self.identity):
            return
        # An inode that is kept open gets another ctime when its path is removed.
        if self.kept is None or seen[:4] != self.identity[:4]:
            self.lower.forget(self)
            raise ChangedBelowError(self.path)
