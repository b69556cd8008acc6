"""apply: writes what was changed above into the directory below.

Checked first, all of it, before anything is written: what is to be replaced or removed must still be what the overlay
was made over, and where something is to be made there must be nothing.  What is there already as it is to be counts as
done; so an apply that was interrupted, and is run again, finishes.

Order: directories are made, files are written (each under a name of its own beside its place, synced, renamed over
it), what has another type makes room, metadata of directories, and last what is to go.  So each path is at any moment
what it was or what it is to be.

What snapshots still need of a file below is kept before it is replaced (`LowerFile.keep`).

Threading: any one thread, on immutable trees; nobody else applies meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from protocol.backends.beneath import Handle, open_beneath, proc_path
from protocol.backends.overlay.inode import OverlayInode
from protocol.backends.overlay.lower import ChangedBelowError, Identity, identity, is_gone
from protocol.diff import Change, changes
from protocol.errors import fail
from protocol.tree import TreeEntry

if TYPE_CHECKING:
    from protocol.backends.memory.view import SnapshotTree
    from protocol.backends.overlay.lower import Lower

__all__ = ["Applied", "Conflict", "apply"]

_CHUNK_BYTES: Final = 1 << 20
_TEMPORARY: Final = b".vfsd-apply-"
_PERMISSIONS: Final = 0o7777
_Identities = dict[bytes, Identity | None]


@dataclass(frozen=True, slots=True)
class Conflict:
    """A path below that is not what the overlay was made over."""

    path: bytes
    reason: str


@dataclass(slots=True)
class Applied:
    """What there was to write, what stood in the way (then nothing was written), and what is below now."""

    changes: list[Change] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    identities: _Identities = field(default_factory=dict)
    error: BaseException | None = None
    renewed: dict[tuple[int, int], Identity] = field(default_factory=dict)  # (st_dev, st_ino) whose ctime this moved


def apply(
    lower: Lower,
    base: SnapshotTree,
    live: SnapshotTree,
    paths: Sequence[bytes] = (),
    *,
    known: _Identities,
    force: bool = False,
    dry_run: bool = False,
    keep_going: Callable[[], None] = lambda: None,
) -> Applied:
    """Make the directory of `lower` at `paths` (or everywhere) what `live` is; `base` is what it was.

    `known` says what an earlier run left at a path.  With conflicts, and without `force`, nothing is written.
    `Applied.error` is what stopped it half-way; each path is what it was or what it is to be.
    """
    run = _Run(lower, base, live, known, force=force, keep_going=keep_going)
    found = list(changes(base, live, paths=paths))
    result = Applied(found)
    result.conflicts = [conflict for change in found if (conflict := run.conflict(change)) is not None]
    if dry_run or (result.conflicts and not force):
        return result
    try:
        run.write(found)
    except BaseException as error:  # noqa: BLE001 -- the caller raises it, after noting what was done
        result.error = error
    for change in found:
        if result.error is None or change.path in run.done:
            result.identities[change.path] = run.identity_of(change.path)
    result.renewed = run.renewed()
    return result


class _Run:
    def __init__(
        self,
        lower: Lower,
        base: SnapshotTree,
        live: SnapshotTree,
        known: _Identities,
        *,
        force: bool,
        keep_going: Callable[[], None],
    ) -> None:
        self._lower = lower
        self._base = base
        self._live = live
        self._known = known
        self._force = force
        self._keep_going = keep_going
        self._changed: set[bytes] = set()
        self.done: set[bytes] = set()
        self._touched: dict[tuple[int, int], Handle | Identity] = {}  # of which this run itself moved the ctime
        self._directories: set[bytes] = set()

    # -- what is there -----------------------------------------------------------------------------
    def _stat(self, path: bytes) -> os.stat_result | None:
        try:
            return self._lower.stat(path)
        except OSError as error:
            if is_gone(error):
                return None
            raise

    def _expected(self, path: bytes) -> Identity | None:
        if path in self._known:
            return self._known[path]
        try:
            version = self._base.find(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return version.lower.identity if isinstance(version, OverlayInode) else None

    def conflict(self, change: Change) -> Conflict | None:
        """What is in the way of a change, if anything."""
        there = self._stat(change.path)
        if self._is_done(change, there):
            self.done.add(change.path)
            return None
        expected = self._expected(change.path)
        if expected is None and (change.old is None or change.path in self._known):
            if there is None:
                return None
            if change.new is not None and change.new.is_dir and stat.S_ISDIR(there.st_mode):
                return None
            return Conflict(change.path, "was made there since")
        if there is None:
            return Conflict(change.path, "was removed there since")
        if self._is_unchanged(there, expected):
            return None
        return Conflict(change.path, "was changed there since")

    def _is_unchanged(self, there: os.stat_result, expected: Identity | None) -> bool:
        now = identity(there)
        if expected is None:
            return False
        if stat.S_ISDIR(there.st_mode) or now[:2] in self._touched:
            return now[:2] == expected[:2]
        return now == expected

    def _is_done(self, change: Change, there: os.stat_result | None) -> bool:
        """Whether what is below is what it is to be: left by a run that was interrupted."""
        new = change.new
        if new is None or there is None:
            return new is None and there is None
        same = stat.S_IFMT(there.st_mode) == stat.S_IFMT(new.mode) and (there.st_mode & _PERMISSIONS) == (
            new.mode & _PERMISSIONS
        )
        if not same or (there.st_uid, there.st_gid) != (new.uid, new.gid):
            return False
        if (self._lower.xattrs(change.path) or {}) != dict(new.xattrs):
            return False
        if new.is_dir:
            return True
        if there.st_mtime_ns != new.mtime_ns or there.st_rdev != new.rdev:
            return False
        if new.is_symlink:
            return self._lower.readlink(change.path) == new.target
        return not new.is_file or (there.st_size == new.size and self._has_content(change.path))

    def _has_content(self, path: bytes) -> bool:
        directory, name = self._place(path)
        file = Handle(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory.fd))
        return all(os.read(file.fd, len(chunk)) == chunk for chunk in self._live.chunks(path, _CHUNK_BYTES))

    def _place(self, path: bytes) -> tuple[Handle, bytes]:
        """The directory that `path` is in, opened anew: nothing is written by way of a stale descriptor."""
        above, _, name = path.rpartition(b"/")
        flags = os.O_RDONLY | os.O_DIRECTORY
        return Handle(open_beneath(self._lower.directory(b"").fd, above or b".", flags)), name

    # -- writing -----------------------------------------------------------------------------------
    def write(self, found: Sequence[Change]) -> None:
        """Do what there is to do."""
        # Also of what is not to be written now.
        self._changed = {change.path for change in changes(self._base, self._live)}
        todo = [change for change in found if change.path not in self.done]
        for change in todo:
            self._keep(change)
        for change in todo:
            if change.new is not None:
                self._keep_going()
                self._put(change)
        for change in reversed(todo):
            if change.new is None:
                self._keep_going()
                self._remove(change)
        for change in reversed(todo):
            if change.new is not None and change.new.is_dir:
                self._finish_directory(change.new)
        for path in sorted(self._directories):
            try:
                handle = open_directory(self._lower, path)
            except OSError as error:
                if is_gone(error):
                    continue  # removed since
                raise
            os.fsync(handle.fd)

    def _touch(self, directory: Handle, name: bytes) -> None:
        """The inode's ctime is about to move, or just did: it is looked at once more at the end."""
        handle = Handle(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd))
        there = os.fstat(handle.fd)
        self._touched[there.st_dev, there.st_ino] = handle

    def renewed(self) -> dict[tuple[int, int], Identity]:
        """What the inodes are now of which this run moved the ctime."""
        return {
            key: identity(os.fstat(found.fd)) if isinstance(found, Handle) else found
            for key, found in self._touched.items()
        }

    def identity_of(self, path: bytes) -> Identity | None:
        """What is at a path below now."""
        there = self._stat(path)
        return None if there is None else identity(there)

    def _put(self, change: Change) -> None:
        new = change.new
        assert new is not None
        there = self._stat(change.path)
        directory, name = self._place(change.path) if change.path else (self._lower.directory(b""), b".")
        self._directories.add(change.path.rpartition(b"/")[0])
        if there is not None and stat.S_ISDIR(there.st_mode) and not new.is_dir:
            self._remove_below(change.path)
            os.rmdir(name, dir_fd=directory.fd)
            there = None
        if new.is_dir:
            self._put_directory(directory, name, change, there)
        elif there is not None and self._is_same_file(change, there):
            self._check_again(change, there)
            self._set_in_place(directory, name, new, there)
        else:
            self._put_leaf(directory, name, change)

    def _is_same_file(self, change: Change, there: os.stat_result) -> bool:
        """Whether only attributes differ, and of no other name's file that is to stay as it is."""
        if change.kind != "metadata" or change.old is None or change.new is None:
            return False
        names = self._live.paths(self._live.find(change.path))
        return change.old.inode == change.new.inode and there.st_nlink in (1, len(names))

    def _put_directory(self, directory: Handle, name: bytes, change: Change, there: os.stat_result | None) -> None:
        if there is not None and not stat.S_ISDIR(there.st_mode):
            self._check_again(change, there)
            if there.st_nlink > 1:
                self._touch(directory, name)
            os.unlink(name, dir_fd=directory.fd)
            there = None
        if there is None:
            os.mkdir(name, 0o700, dir_fd=directory.fd)
            self.done.add(change.path)  # by us, whatever it still lacks

    def _finish_directory(self, new: TreeEntry) -> None:
        handle = open_directory(self._lower, new.path)
        _set_metadata(handle.fd, new, os.fstat(handle.fd))
        self._directories.add(new.path)

    def _put_leaf(self, directory: Handle, name: bytes, change: Change) -> None:
        new = change.new
        assert new is not None
        temporary = _TEMPORARY + hashlib.sha256(name).hexdigest()[:24].encode()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory.fd)
        if not self._link_other(directory, temporary, new):
            self._make(directory, temporary, new)
        there = self._stat(change.path)
        if there is not None:
            self._check_again(change, there)
        elif change.old is not None and change.kind != "type" and not self._force and self._expected(change.path):
            os.unlink(temporary, dir_fd=directory.fd)
            raise ChangedBelowError(change.path)
        if there is not None and there.st_nlink > 1:
            self._touch(directory, name)  # its other names see its ctime move
        os.rename(temporary, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
        # rename(2) of two names of one file leaves both.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory.fd)
        self.done.add(change.path)

    def _check_again(self, change: Change, there: os.stat_result) -> None:
        """Nobody shall have changed it since it was looked at first."""
        if self._force or self._is_unchanged(there, self._expected(change.path)):
            return
        raise ChangedBelowError(change.path)

    def _link_other(self, directory: Handle, temporary: bytes, new: TreeEntry) -> bool:
        """Whether another name of the same file is in place below, so that this one is to be a link to it."""
        if new.nlink < 2:
            return False
        for other in self._live.paths(self._live.find(new.path)):
            if other == new.path or (other in self._changed and other not in self.done):
                continue
            source, name = self._place(other)
            os.link(name, temporary, src_dir_fd=source.fd, dst_dir_fd=directory.fd, follow_symlinks=False)
            self._touch(source, name)
            return True
        return False

    def _make(self, directory: Handle, temporary: bytes, new: TreeEntry) -> None:
        if new.is_symlink:
            os.symlink(new.target, temporary, dir_fd=directory.fd)
            os.chown(temporary, new.uid, new.gid, dir_fd=directory.fd, follow_symlinks=False)
            os.utime(temporary, ns=(new.mtime_ns, new.mtime_ns), dir_fd=directory.fd, follow_symlinks=False)
            return
        if not new.is_file:
            os.mknod(temporary, new.mode, new.rdev, dir_fd=directory.fd)
            _set_by_name(directory, temporary, new)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = Handle(os.open(temporary, flags, 0o600, dir_fd=directory.fd))
        self._write_content(handle.fd, new)
        _set_metadata(handle.fd, new, os.fstat(handle.fd))
        os.fsync(handle.fd)

    def _write_content(self, descriptor: int, new: TreeEntry) -> None:
        content = self._live.find(new.path).content
        for start, length in content.data_ranges(new.size) if content is not None else ():
            for offset in range(start, start + length, _CHUNK_BYTES):
                self._keep_going()
                data = self._live.read(new.path, offset, min(_CHUNK_BYTES, start + length - offset))
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], offset + done)
        os.ftruncate(descriptor, new.size)

    def _set_in_place(self, directory: Handle, name: bytes, new: TreeEntry, there: os.stat_result) -> None:
        if new.is_symlink or not new.is_file:
            _set_by_name(directory, name, new)
        else:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = Handle(os.open(name, flags, dir_fd=directory.fd))
            _set_metadata(handle.fd, new, there)
            os.fsync(handle.fd)
        now = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        self._touched[now.st_dev, now.st_ino] = identity(now)
        self.done.add(new.path)

    def _keep(self, change: Change) -> None:
        """What is above, or in a snapshot, of the file that is about to go, stays readable."""
        if change.old is None or not change.old.is_file:
            return
        there = self._stat(change.path)
        if there is None or self._is_same_file(change, there):
            return
        version = self._base.find(change.path)
        if isinstance(version, OverlayInode):
            with contextlib.suppress(ChangedBelowError):  # forced: it was lost before
                version.lower.keep()

    # -- removing ----------------------------------------------------------------------------------
    def _remove_below(self, path: bytes) -> None:
        for change in reversed(list(changes(self._base, self._live, paths=[path]))):
            if change.path != path and change.new is None:
                self._remove(change)

    def _remove(self, change: Change) -> None:
        there = self._stat(change.path)
        if there is None:
            return
        self._check_again(change, there)
        directory, name = self._place(change.path)
        self._directories.add(change.path.rpartition(b"/")[0])
        if stat.S_ISDIR(there.st_mode):
            try:
                os.rmdir(name, dir_fd=directory.fd)
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    shown = change.path.decode("utf-8", "backslashreplace")
                    raise fail(errno.ENOTEMPTY, shown) from None
                raise
            return
        if there.st_nlink > 1:
            self._touch(directory, name)
        os.unlink(name, dir_fd=directory.fd)


def open_directory(lower: Lower, path: bytes) -> Handle:
    """A readable descriptor of a directory below."""
    return Handle(open_beneath(lower.directory(b"").fd, path or b".", os.O_RDONLY | os.O_DIRECTORY))


def _set_metadata(descriptor: int, new: TreeEntry, there: os.stat_result) -> None:
    """Owner first, which clears bits of the mode; time last, which everything else moves."""
    if (there.st_uid, there.st_gid) != (new.uid, new.gid):
        os.chown(descriptor, new.uid, new.gid)
    had = set(os.listxattr(descriptor)) if not _lacks_xattrs(descriptor) else set()
    for gone in had - {os.fsdecode(each) for each in new.xattrs}:
        os.removexattr(descriptor, gone)
    for name, value in new.xattrs.items():
        os.setxattr(descriptor, name, value)
    os.chmod(descriptor, new.mode & _PERMISSIONS)
    os.utime(descriptor, ns=(new.mtime_ns, new.mtime_ns))


def _lacks_xattrs(descriptor: int) -> bool:
    try:
        os.listxattr(descriptor)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return True
        raise
    return False


def _set_by_name(directory: Handle, name: bytes, new: TreeEntry) -> None:
    """For what cannot be opened: symlinks, fifos, devices."""
    os.chown(name, new.uid, new.gid, dir_fd=directory.fd, follow_symlinks=False)
    if not new.is_symlink:
        place = Handle(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd))
        os.chmod(proc_path(place.fd), new.mode & _PERMISSIONS)
    os.utime(name, ns=(new.mtime_ns, new.mtime_ns), dir_fd=directory.fd, follow_symlinks=False)
