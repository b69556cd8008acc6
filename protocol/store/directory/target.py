"""Targets: where a state can be put: a host directory, changed path by path, each in one step.

A file is written under a name of its own beside its place, gets its metadata, and is renamed over it.  Before something
is replaced or removed it must still be what was seen when the state was taken in: what was changed since is
left alone (`ChangedMeanwhileError`), since no snapshot has it.

`sync` makes all changes durable; the caller drops its journal after that.  Power that fails before leaves the journal,
and the same restore, run again, repairs files that did not reach the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Protocol

from protocol.linux.beneath import open_beneath, proc_path
from protocol.linux.statx import key_of, links_of, seen_at, seen_of_descriptor, statx_names
from protocol.linux.syscalls import renameat2
from protocol.store.directory.scan import TEMPORARY_PREFIX
from protocol.store.directory.source import DirectorySource, Source
from protocol.store.durable import Unsynced
from protocol.store.format.leaves import read_xattrs
from protocol.store.format.objects import put
from protocol.volume import RENAME_NOREPLACE

if TYPE_CHECKING:
    from protocol.store.directory.source import DirectoryReference
    from protocol.tree import TreeEntry

__all__ = ["ChangedMeanwhileError", "ContentSource", "DirectoryTarget", "Target"]

_RECHECK_S: Final = 0.5  # for how long a directory's descriptor is used before its place is looked at again
_O_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_O_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
_O_PATH: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PERMISSIONS: Final = 0o7777
_SET_ID_BITS: Final = stat.S_ISUID | stat.S_ISGID
_MAY_CHANGE: Final = 0o300  # to the owner of a directory
_NOTHING_TO_REMEMBER: Final = contextlib.nullcontext()
_ACCESS_ACL: Final = b"system.posix_acl_access"


class ChangedMeanwhileError(OSError):
    """What is at a path is not what was seen there a moment ago (EBUSY); it was left alone."""

    def __init__(self, path: bytes) -> None:
        super().__init__(errno.EBUSY, "changed while it was to be restored", os.fsdecode(path))


class ContentSource(Protocol):
    """What a file is to have, compared with its digest before it is returned.  DamagedError."""

    def small(self) -> bytes | None:
        """All of it, where it is not large."""
        ...

    def copy_large(self, target: int, size: int) -> None:
        """Make `target`, an empty file open for reading and writing, a large content of `size` bytes."""
        ...


class Target(Protocol):
    """Where a state can be put.  Every method makes one change, or raises OSError and makes none.

    `expected` is what the entry there was seen as (`Source.scan` remembers it; None: there is nothing, or it is not
    known).  What cannot be set of an entry's metadata is returned, in words, and is no error.
    """

    @property
    def source(self) -> Source:
        """What is there now."""
        ...

    def opened(self, token: str) -> contextlib.AbstractContextManager[None]:
        """For the length of the changes; `token` makes the names of temporary files its own."""
        ...

    def put_file(self, entry: TreeEntry, content: ContentSource, expected: bytes | None) -> list[str]:
        """A regular file, in place of what is no directory."""
        ...

    def put_special(self, entry: TreeEntry, expected: bytes | None) -> list[str]:
        """A symlink, fifo, socket or device."""
        ...

    def put_link(self, entry: TreeEntry, other: bytes, expected: bytes | None) -> list[str]:
        """A further name of the file at `other`."""
        ...

    def make_directory(self, entry: TreeEntry) -> None:
        """A directory where nothing is; its metadata comes with `set_metadata`, when what is below it is done."""
        ...

    def set_metadata(self, entry: TreeEntry, expected: bytes | None) -> list[str]:
        """Of what is there already."""
        ...

    def remove(self, path: bytes, expected: bytes | None, *, directory: bool) -> None:
        """A name; a directory must be empty."""
        ...

    def sync(self) -> None:
        """Make all changes since `opened` durable; within its block."""
        ...

    def clean(self, leftovers: Iterable[bytes], token: str) -> None:
        """Remove the temporary files among `leftovers` that a restore of that token has left."""
        ...


class DirectoryTarget:
    """A directory of the host: a path, or a descriptor that stays the caller's."""

    def __init__(self, place: DirectoryReference) -> None:
        self._source = DirectorySource(place)
        self._root = -1
        self._prefix = b""
        self._count = 0
        self._near: tuple[bytes, int, float] | None = None  # a directory's path, its descriptor, opened when
        self._renewed: dict[int, bytes] = {}  # what inodes of several names are, after this restore changed them itself
        self._unlocked: dict[bytes, int] = {}  # directories without write permission, and the mode that they had
        self._unsynced = Unsynced()

    @property
    def source(self) -> Source:
        return self._source

    @contextlib.contextmanager
    def opened(self, token: str) -> Iterator[None]:
        with self._source.opened() as root:
            self._root = root
            self._prefix = TEMPORARY_PREFIX + token.encode() + b"-"
            self._renewed = {}
            self._unlocked = {}
            self._unsynced = Unsynced()
            try:
                yield
            finally:
                self._leave()
                self._lock_again()
                self._root = -1

    # -- places --------------------------------------------------------------------------------
    def _parent(self, path: bytes) -> tuple[int, bytes]:
        above, _, name = path.rpartition(b"/")
        near = self._near
        if near is not None and near[0] == above and time.monotonic() - near[2] < _RECHECK_S:
            return near[1], name
        self._leave()
        descriptor = self._open_directory(above)
        self._unlock(above, descriptor)
        self._near = (above, descriptor, time.monotonic())
        return descriptor, name

    def _open_directory(self, path: bytes) -> int:
        return open_beneath(self._root, path or b".", _O_DIRECTORY, same_mount=True)

    def _unlock(self, path: bytes, descriptor: int) -> None:
        """Allow the owner to change what is in a directory that he made read-only, as Go's module cache is."""
        seen = os.fstat(descriptor)
        if seen.st_uid == os.geteuid() != 0 and seen.st_mode & _MAY_CHANGE != _MAY_CHANGE:
            os.fchmod(descriptor, stat.S_IMODE(seen.st_mode) | _MAY_CHANGE)
            self._unlocked.setdefault(path, stat.S_IMODE(seen.st_mode))

    def _lock_again(self) -> None:
        """Those that have got no mode since, and are there."""
        for path, mode in self._unlocked.items():
            with contextlib.suppress(OSError):
                descriptor = self._open_directory(path)
                try:
                    if stat.S_IMODE(os.fstat(descriptor).st_mode) == mode | _MAY_CHANGE:
                        os.fchmod(descriptor, mode)
                finally:
                    os.close(descriptor)

    def _leave(self) -> None:
        if self._near is not None:
            os.close(self._near[1])
            self._near = None

    def _check(self, directory: int, name: bytes, path: bytes, expected: bytes | None) -> None:
        """Raise where something else is there than what was seen."""
        records, gone = statx_names(directory, [name])
        if gone:
            if expected is not None:
                raise ChangedMeanwhileError(path)
            return
        if expected is None:
            raise ChangedMeanwhileError(path)
        now = key_of(records)
        if now == expected:
            return
        # Of a file of several names, we have changed another.
        if self._renewed.get(seen_at(records, 0).inode) != now:
            raise ChangedMeanwhileError(path)

    def _changed_by_us(self, descriptor: int) -> None:
        record = seen_of_descriptor(descriptor)
        self._renewed[seen_at(record, 0).inode] = key_of(record)

    # -- putting -------------------------------------------------------------------------------
    def put_file(self, entry: TreeEntry, content: ContentSource, expected: bytes | None) -> list[str]:
        directory, name = self._parent(entry.path)
        temporary = self._temporary()
        descriptor = os.open(temporary, _O_CREATE, 0o600, dir_fd=directory)
        try:
            try:
                _fill(descriptor, content, entry.size)
                lacking = _apply(descriptor, entry)
                self._unsynced.file(descriptor)
            finally:
                os.close(descriptor)
            self._place(directory, temporary, name, entry.path, expected)
        except BaseException:
            _unlink(temporary, directory)
            raise
        return lacking

    def put_special(self, entry: TreeEntry, expected: bytes | None) -> list[str]:
        directory, name = self._parent(entry.path)
        temporary = self._temporary()
        if entry.is_symlink:
            os.symlink(entry.target, temporary, dir_fd=directory)
        else:
            os.mknod(temporary, stat.S_IFMT(entry.mode) | 0o600, entry.rdev, dir_fd=directory)
        try:
            descriptor = os.open(temporary, _O_PATH, dir_fd=directory)
            try:
                lacking = _apply(proc_path(descriptor), entry, descriptor)
            finally:
                os.close(descriptor)
            self._place(directory, temporary, name, entry.path, expected)
        except BaseException:
            _unlink(temporary, directory)
            raise
        return lacking

    def put_link(self, entry: TreeEntry, other: bytes, expected: bytes | None) -> list[str]:
        source = open_beneath(self._root, other, os.O_PATH, same_mount=True)
        try:
            directory, name = self._parent(entry.path)
            temporary = self._temporary()
            os.link(proc_path(source), temporary, dst_dir_fd=directory, follow_symlinks=True)
            try:
                lacking = _apply(proc_path(source), entry, source)
                self._unsynced.file_by_path_descriptor(source)
                self._changed_by_us(source)
                self._place(directory, temporary, name, entry.path, expected)
            finally:
                _unlink(temporary, directory)  # rename(2) of two names of one file leaves both
                self._changed_by_us(source)
        finally:
            os.close(source)
        return lacking

    def _temporary(self) -> bytes:
        self._count += 1
        return self._prefix + b"%d" % self._count

    def _place(self, directory: int, temporary: bytes, name: bytes, path: bytes, expected: bytes | None) -> None:
        self._unsynced.directory(path.rpartition(b"/")[0])
        if expected is None and _renamed_to_new(directory, temporary, name, path):
            return
        self._check(directory, name, path, expected)
        with self._loses_a_name(directory, name, expected):
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)

    def _loses_a_name(
        self, directory: int, name: bytes, expected: bytes | None
    ) -> contextlib.AbstractContextManager[None]:
        """Remember what becomes of a file that has other names."""
        if expected is None or links_of(expected) == 1:
            return _NOTHING_TO_REMEMBER
        return self._remembered(directory, name)

    @contextlib.contextmanager
    def _remembered(self, directory: int, name: bytes) -> Iterator[None]:
        descriptor = os.open(name, _O_PATH, dir_fd=directory)
        try:
            yield
            self._changed_by_us(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, entry: TreeEntry) -> None:
        directory, name = self._parent(entry.path)
        os.mkdir(name, 0o700, dir_fd=directory)
        self._unsynced.directory(entry.path.rpartition(b"/")[0])

    def set_metadata(self, entry: TreeEntry, expected: bytes | None) -> list[str]:
        if entry.is_dir:
            self._unlocked.pop(entry.path, None)
            self._unsynced.directory(entry.path)
        if not entry.path:
            return _apply(self._root, entry)
        directory, name = self._parent(entry.path)
        descriptor = open_beneath(directory, name, os.O_PATH, same_mount=True)
        try:
            record = seen_of_descriptor(descriptor)
            seen = seen_at(record, 0)
            if stat.S_IFMT(seen.mode) != stat.S_IFMT(entry.mode):
                raise ChangedMeanwhileError(entry.path)
            as_expected = entry.is_dir or expected is None or key_of(record) == expected
            if not as_expected and self._renewed.get(seen.inode) != key_of(record):
                raise ChangedMeanwhileError(entry.path)
            lacking = _apply(proc_path(descriptor), entry, descriptor)
            if not entry.is_dir:
                self._unsynced.file_by_path_descriptor(descriptor)
            if seen.nlink > 1:
                self._changed_by_us(descriptor)
            return lacking
        finally:
            os.close(descriptor)

    def remove(self, path: bytes, expected: bytes | None, *, directory: bool) -> None:
        parent, name = self._parent(path)
        self._unsynced.directory(path.rpartition(b"/")[0])
        if directory:
            os.rmdir(name, dir_fd=parent)
            self._unlocked.pop(path, None)
            return
        self._check(parent, name, path, expected)
        with self._loses_a_name(parent, name, expected):
            os.unlink(name, dir_fd=parent)

    def sync(self) -> None:
        self._unsynced.sync(self._root, self._open_directory)

    def clean(self, leftovers: Iterable[bytes], token: str) -> None:
        prefix = TEMPORARY_PREFIX + token.encode() + b"-"
        with self._source.opened() as root:
            for path in leftovers:
                above, _, name = path.rpartition(b"/")
                if not name.startswith(prefix):
                    continue
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    directory = open_beneath(root, above or b".", _O_DIRECTORY)
                    try:
                        os.unlink(name, dir_fd=directory)
                    finally:
                        os.close(directory)


def _renamed_to_new(directory: int, temporary: bytes, name: bytes, path: bytes) -> bool:
    """Rename where nothing is; False where the file system cannot do that in one step."""
    try:
        renameat2(directory, temporary, directory, name, RENAME_NOREPLACE)
    except FileExistsError:
        raise ChangedMeanwhileError(path) from None
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOSYS}:
            raise
        return False
    return True


def _unlink(name: bytes, directory: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def _fill(target: int, content: ContentSource, size: int) -> None:
    small = content.small()
    if small is not None:
        put(target, memoryview(small), 0)
        return
    content.copy_large(target, size)


def _apply(at: int | bytes, entry: TreeEntry, descriptor: int | None = None) -> list[str]:
    """Give an inode, by a descriptor or its /proc path, the metadata of `entry`; what could not be set, in words."""
    lacking: list[str] = []
    mode = entry.mode & _PERMISSIONS
    seen = os.fstat(at if isinstance(at, int) else descriptor)  # type: ignore[arg-type]
    if (seen.st_uid, seen.st_gid) != (entry.uid, entry.gid):
        try:
            os.chown(at, entry.uid, entry.gid)
        except OSError as error:
            lacking.append(f"owner {entry.uid}:{entry.gid}: {error.strerror}")
            mode &= ~_SET_ID_BITS  # they would lend the rights of whoever restores
        seen = None  # type: ignore[assignment]  # a chown takes set-id bits away
    if not entry.is_symlink and (seen is None or (seen.st_mode ^ mode) & _PERMISSIONS):
        os.chmod(at, mode)
    _apply_xattrs(at, entry, mode, lacking)
    os.utime(at, ns=(entry.mtime_ns if seen is None else seen.st_atime_ns, entry.mtime_ns))
    return lacking


def _apply_xattrs(at: int | bytes, entry: TreeEntry, mode: int, lacking: list[str]) -> None:
    there = dict(read_xattrs(at))
    wanted = entry.xattrs
    if there == wanted:
        return
    for name in there.keys() - wanted.keys():
        _attempt(lambda name=name: os.removexattr(at, name), name, lacking)  # type: ignore[misc]
    for name, value in wanted.items():
        if there.get(name) != value:
            _attempt(lambda name=name, value=value: os.setxattr(at, name, value), name, lacking)  # type: ignore[misc]
    if _ACCESS_ACL in there and _ACCESS_ACL not in wanted:
        os.chmod(at, mode)  # without it the group's bits are what its mask was


def _attempt(change: Callable[[], None], name: bytes, lacking: list[str]) -> None:
    try:
        change()
    except OSError as error:
        lacking.append(f"{os.fsdecode(name)}: {error.strerror}")
