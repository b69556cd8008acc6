"""DirectoryTarget: changes a host directory path by path, each path in one step.

Atomicity: a file is written under a temporary name in its directory, gets its metadata, and is renamed into place.

No lost changes: before an entry is replaced or removed, its stat data must equal what the scan recorded.  An entry
that changed since is in no snapshot; it is left alone (ChangedMeanwhileError).

Durability: after `sync`, all changes since `opened` are on disk.  The caller removes its intent log only then, so if
power fails earlier, the intent log is there and the same restore, run again, repairs files that did not reach the disk.

Invariants of `UnsyncedChanges`:
1. Every change of a restore is reported to it before the restore calls `sync`.
2. After `sync` returned, every reported change is on disk.

The first few changes are synced one by one, because syncfs(2) also waits for data that other programs wrote.  Each
fsync(2) commits the file system's journal, so more changes cost less with one syncfs (measured on ext4: 10 files 70 to
110 ms against 27 to 48, 64 files 650 to 740 against 84 to 117).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from protocol.linux.beneath import TEMPORARY_PREFIX, RootDirectory, open_beneath
from protocol.linux.portable import Handle, proc_path, renameat2
from protocol.linux.regular_file import read_xattrs
from protocol.linux.statx import change_key, link_count, result_at, statx_descriptor, statx_names
from protocol.linux.syscalls import syncfs
from protocol.store.directory.source import DirectorySource, Source
from protocol.volume import RENAME_NOREPLACE

if TYPE_CHECKING:
    from protocol.linux.beneath import DirectoryReference, RootDirectory
    from protocol.tree import TreeEntry

_O_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_O_PATH: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PERMISSIONS: Final = 0o7777
_SET_ID_BITS: Final = stat.S_ISUID | stat.S_ISGID
_OWNER_MAY_CHANGE: Final = 0o300  # write and search a directory


class ChangedMeanwhileError(OSError):
    """The entry at a path is not the one that the scan saw (EBUSY); it was left alone."""

    def __init__(self, path: bytes) -> None:
        super().__init__(errno.EBUSY, "changed since the restore began", os.fsdecode(path))


class DirectoryTarget:
    """A host directory; a descriptor stays the caller's.

    Every method makes one change, or raises OSError and makes none.  `expected` is the `change_key` that the scan
    recorded for the entry (None: there was none).  Parts of an entry's metadata that cannot be set are not an error;
    they are returned as sentences.  `source` reads the present state.
    """

    def __init__(self, directory: DirectoryReference) -> None:
        self._directory = directory
        self.source: Source = DirectorySource(directory)
        self._root: RootDirectory
        self._temporary_prefix = b""
        self._count = 0
        self._own_changes: dict[int, bytes] = {}  # by inode number, `change_key` after this restore changed a hard link
        self._unlocked: dict[bytes, int] = {}  # directories that were made writable, and the mode before
        self._unsynced = UnsyncedChanges()

    @contextlib.contextmanager
    def opened(self, token: str) -> Iterator[None]:
        """Allow changes inside the block.  `token` makes the names of temporary files unique."""
        with RootDirectory(self._directory, same_mount=True) as self._root:
            self._temporary_prefix = _temporary_prefix(token)
            self._own_changes = {}
            self._unlocked = {}
            self._unsynced = UnsyncedChanges()
            try:
                yield
            finally:
                self._lock_again()

    # -- read-only directories -------------------------------------------------------------------
    def _parent(self, path: bytes) -> tuple[int, bytes, Handle]:
        """The directory that `path` is in, writable; the name there; the handle, which keeps the descriptor open."""
        handle, name = self._root.parent(path)
        self._unlock(path.rpartition(b"/")[0], handle.fd)
        return handle.fd, name, handle

    def _unlock(self, path: bytes, descriptor: int) -> None:
        """Let the owner change the entries of a directory that is read-only, as those of Go's module cache are."""
        if not os.geteuid():
            return
        seen = os.fstat(descriptor)
        if seen.st_uid == os.geteuid() and seen.st_mode & _OWNER_MAY_CHANGE != _OWNER_MAY_CHANGE:
            os.chmod(proc_path(descriptor), stat.S_IMODE(seen.st_mode) | _OWNER_MAY_CHANGE)
            self._unlocked.setdefault(path, stat.S_IMODE(seen.st_mode))

    def _lock_again(self) -> None:
        """Set the modes back of unlocked directories that still exist and got no other mode since."""
        for path, mode in self._unlocked.items():
            with contextlib.suppress(OSError):
                handle = self._root.directory(path)
                if stat.S_IMODE(os.fstat(handle.fd).st_mode) == mode | _OWNER_MAY_CHANGE:
                    os.chmod(proc_path(handle.fd), mode)

    # -- changes by other programs and by this restore -------------------------------------------
    def _check(self, directory: int, name: bytes, path: bytes, expected: bytes | None) -> None:
        """ChangedMeanwhileError unless the entry is the expected one."""
        records, missing = statx_names(directory, [name])
        if missing or expected is None:
            if not missing or expected is not None:
                raise ChangedMeanwhileError(path)
        elif not self._is_expected(records, expected):
            raise ChangedMeanwhileError(path)

    def _is_expected(self, record: bytes, expected: bytes) -> bool:
        """Whether an entry is as the scan saw it, or as this restore left it through another of its names."""
        key = change_key(record)
        return key == expected or self._own_changes.get(result_at(record, 0).inode) == key

    def _note_own_change(self, descriptor: int) -> None:
        record = statx_descriptor(descriptor)
        self._own_changes[result_at(record, 0).inode] = change_key(record)

    @contextlib.contextmanager
    def _losing_name(self, directory: int, name: bytes, expected: bytes | None) -> Iterator[None]:
        """Record the new ctime of a file that loses a name inside the block, for its other names."""
        if expected is None or link_count(expected) == 1:
            yield
            return
        descriptor = os.open(name, _O_PATH, dir_fd=directory)
        try:
            yield
            self._note_own_change(descriptor)
        finally:
            os.close(descriptor)

    # -- one change each -------------------------------------------------------------------------
    def put_file(self, entry: TreeEntry, fill: Callable[[int], None], expected: bytes | None) -> list[str]:
        """Put a regular file where nothing or a non-directory is; `fill` writes the content to a descriptor."""
        directory, name, _handle = self._parent(entry.path)
        with self._temporary(directory) as temporary:
            descriptor = os.open(temporary, _O_CREATE, 0o600, dir_fd=directory)
            try:
                fill(descriptor)
                problems = _set_metadata(descriptor, entry)
                self._unsynced.file(descriptor)
            finally:
                os.close(descriptor)
            self._place(directory, temporary, name, entry.path, expected)
        return problems

    def put_special(self, entry: TreeEntry, expected: bytes | None) -> list[str]:
        """Put a symlink, FIFO, socket or device."""
        directory, name, _handle = self._parent(entry.path)
        with self._temporary(directory) as temporary:
            if entry.is_symlink:
                os.symlink(entry.target, temporary, dir_fd=directory)
            else:
                os.mknod(temporary, stat.S_IFMT(entry.mode) | 0o600, entry.rdev, dir_fd=directory)
            descriptor = os.open(temporary, _O_PATH, dir_fd=directory)
            try:
                problems = _set_metadata(descriptor, entry)
            finally:
                os.close(descriptor)
            self._place(directory, temporary, name, entry.path, expected)
        return problems

    def put_link(self, entry: TreeEntry, other: bytes, expected: bytes | None) -> list[str]:
        """Put a further name of the file at `other`."""
        source = self._root.open(other, os.O_PATH)
        try:
            directory, name, _handle = self._parent(entry.path)
            with self._temporary(directory) as temporary:
                os.link(proc_path(source), temporary, dst_dir_fd=directory, follow_symlinks=True)
                problems = _set_metadata(source, entry)
                self._unsynced.file_of_path_descriptor(source)
                self._note_own_change(source)
                try:
                    self._place(directory, temporary, name, entry.path, expected)
                finally:
                    _unlink(temporary, directory)  # a rename onto another name of the same file does nothing
                    self._note_own_change(source)
        finally:
            os.close(source)
        return problems

    def make_directory(self, entry: TreeEntry) -> None:
        """Make a directory where nothing is.  Call `set_metadata` when the entries below it are done."""
        directory, name, _handle = self._parent(entry.path)
        os.mkdir(name, 0o700, dir_fd=directory)
        self._unsynced.directory(entry.path.rpartition(b"/")[0])

    def set_metadata(self, entry: TreeEntry, expected: bytes | None) -> list[str]:
        """Give an existing entry of the same type the metadata of `entry`."""
        if entry.is_dir:
            self._unlocked.pop(entry.path, None)
            self._unsynced.directory(entry.path)
        if not entry.path:
            return _set_metadata(self._root.fd, entry)
        directory, name, _handle = self._parent(entry.path)
        descriptor = open_beneath(directory, name, os.O_PATH, same_mount=True)
        try:
            record = statx_descriptor(descriptor)
            seen = result_at(record, 0)
            if stat.S_IFMT(seen.mode) != stat.S_IFMT(entry.mode):
                raise ChangedMeanwhileError(entry.path)
            if not entry.is_dir and expected is not None and not self._is_expected(record, expected):
                raise ChangedMeanwhileError(entry.path)
            problems = _set_metadata(descriptor, entry)
            if not entry.is_dir:
                self._unsynced.file_of_path_descriptor(descriptor)
            if seen.nlink > 1:
                self._note_own_change(descriptor)
            return problems
        finally:
            os.close(descriptor)

    def remove(self, path: bytes, expected: bytes | None, *, directory: bool) -> None:
        """Remove an entry; a directory must be empty."""
        parent, name, _handle = self._parent(path)
        self._unsynced.directory(path.rpartition(b"/")[0])
        if directory:
            os.rmdir(name, dir_fd=parent)
            self._root.close_directories()
            self._unlocked.pop(path, None)
            return
        self._check(parent, name, path, expected)
        with self._losing_name(parent, name, expected):
            os.unlink(name, dir_fd=parent)

    def sync(self) -> None:
        """Make all changes since `opened` durable; call it inside the block."""
        self._unsynced.sync(self._root)

    def remove_leftovers(self, leftovers: Iterable[bytes], token: str) -> None:
        """Remove the temporary files among `leftovers` that an interrupted restore with `token` left."""
        prefix = _temporary_prefix(token)
        with RootDirectory(self._directory) as root:
            for path in leftovers:
                if path.rpartition(b"/")[2].startswith(prefix):
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        handle, name = root.parent(path)
                        os.unlink(name, dir_fd=handle.fd)

    # -- renaming into place ---------------------------------------------------------------------
    @contextlib.contextmanager
    def _temporary(self, directory: int) -> Iterator[bytes]:
        """A name for a new file; the file is removed if the block fails."""
        self._count += 1
        name = self._temporary_prefix + b"%d" % self._count
        try:
            yield name
        except BaseException:
            _unlink(name, directory)
            raise

    def _place(self, directory: int, temporary: bytes, name: bytes, path: bytes, expected: bytes | None) -> None:
        self._unsynced.directory(path.rpartition(b"/")[0])
        if expected is None and _renamed_to_new(directory, temporary, name, path):
            return
        self._check(directory, name, path, expected)
        with self._losing_name(directory, name, expected):
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def _temporary_prefix(token: str) -> bytes:
    return TEMPORARY_PREFIX + token.encode() + b"-"


def _renamed_to_new(directory: int, temporary: bytes, name: bytes, path: bytes) -> bool:
    """Rename, if `name` does not exist, in one step; False if the file system has no such step."""
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


def _set_metadata(descriptor: int, entry: TreeEntry) -> list[str]:
    """Give the inode of a (O_PATH) descriptor the metadata of `entry`; return what could not be set, in words."""
    path = proc_path(descriptor)
    problems: list[str] = []
    mode = entry.mode & _PERMISSIONS
    seen = os.fstat(descriptor)
    changes_owner = (seen.st_uid, seen.st_gid) != (entry.uid, entry.gid)
    if changes_owner:
        try:
            os.chown(path, entry.uid, entry.gid)
        except OSError as error:
            problems.append(f"owner {entry.uid}:{entry.gid}: {error.strerror}")
            mode &= ~_SET_ID_BITS  # they would give the file the rights of the user who restores
    _set_xattrs(path, entry, problems)
    # After the chown, which clears set-id bits, and after an ACL that the directory gave a new entry was removed: until
    # then its mask, which are the mode's group bits, keeps everybody out.
    if not entry.is_symlink and (os.fstat(descriptor).st_mode ^ mode) & _PERMISSIONS:
        os.chmod(path, mode)
    if changes_owner or seen.st_mtime_ns != entry.mtime_ns:  # without a change, ctime stays, too
        os.utime(path, ns=(entry.mtime_ns if changes_owner else seen.st_atime_ns, entry.mtime_ns))
    return problems


def _set_xattrs(path: bytes, entry: TreeEntry, problems: list[str]) -> None:
    present = read_xattrs(path)
    wanted = entry.xattrs
    for name in present.keys() - wanted.keys():
        with _reporting(name, problems):
            os.removexattr(path, name)
    for name, value in wanted.items():
        if present.get(name) != value:
            with _reporting(name, problems):
                os.setxattr(path, name, value)


@contextlib.contextmanager
def _reporting(name: bytes, problems: list[str]) -> Iterator[None]:
    """Add an OSError of the block to `problems`."""
    try:
        yield
    except OSError as error:
        problems.append(f"{os.fsdecode(name)}: {error.strerror}")


# -- durability ------------------------------------------------------------------------------------
_FEW: Final = 4  # files, and as many directories
_O_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY


class UnsyncedChanges:
    """The changes below a directory that may not be on disk.

    Files are synced when they are reported, directories by `sync`, since one directory often changes several times.
    After the first change that cannot be synced alone, or `_FEW` of a kind, `sync` syncs the whole file system.
    """

    def __init__(self) -> None:
        self._files = 0
        self._directories: set[bytes] = set()
        self._needs_syncfs = False

    def file(self, descriptor: int) -> None:
        """Report that a file's content or metadata changed."""
        self._files += 1
        if self._files > _FEW:
            self._needs_syncfs = True
        if not self._needs_syncfs:
            os.fsync(descriptor)

    def file_of_path_descriptor(self, descriptor: int) -> None:
        """Report a change of the file of an O_PATH descriptor, which fsync(2) does not accept."""
        if self._needs_syncfs:
            return
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # opening a FIFO or a device has effects
            self._needs_syncfs = True
            return
        try:
            readable = os.open(proc_path(descriptor), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no permission to read it
            self._needs_syncfs = True
            return
        try:
            self.file(readable)
        finally:
            os.close(readable)

    def directory(self, path: bytes) -> None:
        """Report that entries of a directory, or its metadata, changed."""
        if not self._needs_syncfs:
            self._directories.add(path)
            self._needs_syncfs = len(self._directories) > _FEW

    def sync(self, root: RootDirectory) -> None:
        """Make every reported change durable."""
        if not self._needs_syncfs:
            for path in self._directories:
                self._sync_directory(root, path)
        if self._needs_syncfs:
            syncfs(root.fd)
        self._files = 0
        self._directories = set()
        self._needs_syncfs = False

    def _sync_directory(self, root: RootDirectory, path: bytes) -> None:
        try:
            descriptor = root.open(path, _O_DIRECTORY)
        except FileNotFoundError:  # removed since, by this restore or another program
            return
        except OSError:
            self._needs_syncfs = True
            return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
