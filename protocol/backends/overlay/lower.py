"""Lower: the directory below an overlay, read and never changed.

Nothing leads outside: every path is opened beneath the root (`protocol.linux.beneath.RootDirectory`).

What a file was when it was first looked at is its `Identity`.  A read asks for it once more after the bytes have
come: where it differs they are thrown away (`ChangedBelowError`), so what is handed out is of one version.  What
this cannot see is a change within the same tick of the file system's clock as the one before (some milliseconds)
that leaves the size as it was.

Threading: any thread.  Descriptors are closed by whoever lets go of them last (`Handle`).
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from protocol.linux.beneath import Handle, HandleCache, RootDirectory, open_to_read, proc_path
from protocol.linux.syscalls import seek_hole

__all__ = [
    "KEPT_BYTES",
    "RESERVED",
    "VANISHED",
    "ChangedBelowError",
    "Identity",
    "Lower",
    "LowerFile",
    "Scanned",
    "identity",
    "is_gone",
]

Identity = tuple[int, int, int, int, int]  # st_dev, st_ino, st_size, st_mtime_ns, st_ctime_ns

VANISHED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ESTALE})
RESERVED: Final = b".vfsd-apply"  # of the root's names, the one that `apply` keeps its journal under (see `journal`)
KEPT_BYTES: Final = 256 * 1024  # of a file to be replaced below: smaller ones are kept whole, others open
_DIRECTORIES_KEPT: Final = 64
_FEWEST_FILES: Final = 16
_MOST_FILES: Final = 512
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENODATA, errno.EACCES, errno.EPERM})


class ChangedBelowError(OSError):
    """A file below is not any more what it was when it was first looked at (ESTALE); `path` is relative to DIR."""

    def __init__(self, path: bytes) -> None:
        super().__init__(
            errno.ESTALE,
            "changed below the overlay by others: what was not copied of it is lost, and to discard it shows theirs",
            path.decode("utf-8", "backslashreplace"),
        )
        self.path = path


class Scanned(NamedTuple):
    """An entry of a directory below: its inode number and type bits as the directory says them."""

    name: bytes
    inode: int
    kind: int


def identity(seen: os.stat_result) -> Identity:
    """What tells whether a file is still the same and unchanged."""
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def is_gone(error: OSError) -> bool:
    """Whether there is no such thing below (any more)."""
    return error.errno in VANISHED


class Lower:
    """The directory `root` and what is in it.  Paths are bytes relative to it, b"" is itself."""

    def __init__(self, root: str | bytes) -> None:
        """OSError where `root` is no directory that can be read."""
        self.root = os.fsencode(os.path.abspath(root))
        self._below = RootDirectory(self.root, kept=_DIRECTORIES_KEPT)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = max(_FEWEST_FILES, min(_MOST_FILES, soft // 4)) if soft > 0 else _MOST_FILES
        self._files = HandleCache(most)
        self.moving: set[tuple[int, int]] = set()  # (st_dev, st_ino) of which `apply` itself moves the ctime now
        self.scans = 0  # directories read: what tests and statistics want to know

    def is_same(self, now: Identity, was: Identity) -> bool:
        """Whether a file is what it was: its ctime apart, while we ourselves move that."""
        return now == was or (now[:4] == was[:4] and now[:2] in self.moving)

    def directory(self, path: bytes) -> Handle:
        """An O_PATH descriptor of a directory."""
        return self._below.directory(path)

    def stat(self, path: bytes) -> os.stat_result:
        """lstat(2)."""
        handle, name = self._below.parent(path)
        return os.stat(name, dir_fd=handle.fd, follow_symlinks=False)

    def readlink(self, path: bytes) -> bytes:
        """readlink(2)."""
        handle, name = self._below.parent(path)
        return os.readlink(name, dir_fd=handle.fd)

    def xattrs(self, path: bytes) -> dict[bytes, bytes] | None:
        """The extended attributes, those that may be read; None for none."""
        handle, name = self._below.parent(path)
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
                    # security.capability without capabilities: there, and not to be read (security/commoncap.c).
                    found[os.fsencode(each)] = b""
                elif error.errno not in _UNSUPPORTED:
                    raise
        return found or None

    def scan(self, path: bytes) -> tuple[int, list[Scanned]]:
        """The device of a directory, and its entries."""
        self.scans += 1
        handle = self.directory(path)
        descriptor = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle.fd)
        try:
            with os.scandir(descriptor) as entries:
                found = [Scanned(os.fsencode(entry.name), entry.inode(), _kind(entry)) for entry in entries]
            if not path:
                found = [entry for entry in found if entry.name != RESERVED]
            return os.fstat(descriptor).st_dev, found
        finally:
            os.close(descriptor)

    def open(self, file: LowerFile) -> Handle:
        """A descriptor of a regular file, to be read; not necessarily of the one that is expected."""
        handle = self._files.get(file)
        if handle is None:
            directory, name = self._below.parent(file.path)
            try:
                handle = Handle(open_to_read(directory.fd, name))
            except OSError as error:
                if is_gone(error):
                    raise ChangedBelowError(file.path) from None
                raise
            self._files.put(file, handle)
        return handle

    def forget(self, file: LowerFile) -> None:
        """Let go of the descriptor of a file that is not what it was."""
        self._files.drop(file)

    def close(self) -> None:
        """Let go of all descriptors but the root's."""
        self._files.clear()
        self._below.forget_directories()


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
    """What is at a path below, as it was when it was first looked at.  `kept` outlives the file (see `keep`)."""

    __slots__ = ("identity", "kept", "lower", "path", "sectors")

    def __init__(self, lower: Lower, path: bytes, seen: os.stat_result) -> None:
        self.lower = lower
        self.path = path
        self.identity = identity(seen)
        self.sectors = seen.st_blocks
        self.kept: Handle | bytes | None = None

    @property
    def size(self) -> int:
        """Bytes, as it was."""
        return self.identity[2]

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, all below the file's end.  ChangedBelowError."""
        if isinstance(self.kept, bytes):
            return self.kept[offset : offset + size]
        handle = self._handle()
        data = os.pread(handle.fd, size, offset)
        if len(data) < size:
            pieces = [data]
            done = len(data)
            while data and done < size:
                data = os.pread(handle.fd, size - done, offset + done)
                pieces.append(data)
                done += len(data)
            data = b"".join(pieces)
        self._check(handle)
        if len(data) < size:
            raise ChangedBelowError(self.path)
        return data

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """(start, end) of each run of data between the two offsets, in order.  ChangedBelowError."""
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
        """Go on with what it is now, though its name is about to be taken away or given to another.  See `apply`."""
        if self.kept is None:
            if self.size <= KEPT_BYTES:
                self.kept = self.read(0, self.size)
                return
            handle = self.lower.open(self)
            self._check(handle)
            self.kept = handle

    def _handle(self) -> Handle:
        return self.kept if isinstance(self.kept, Handle) else self.lower.open(self)

    def _check(self, handle: Handle) -> None:
        seen = identity(os.fstat(handle.fd))
        if self.lower.is_same(seen, self.identity):
            return
        # Losing its name moves a kept inode's ctime.
        if self.kept is None or seen[:4] != self.identity[:4]:
            self.lower.forget(self)
            raise ChangedBelowError(self.path)
