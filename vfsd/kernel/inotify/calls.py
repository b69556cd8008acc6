"""The system calls that repeat changes on the mount.

Threading: runs in the thread of `vfsd.kernel.inotify.replay`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from protocol.errors import os_error
from protocol.volume_extensions import CacheInvalidation, EntryChange
from vfsd.kernel.inotify.answers import Answers, Step

_logger = logging.getLogger(__name__)

# Bounds the time that a restore of everything takes (about 100 us for each change).  A watcher's queue overflows at
# 16,384 events anyway (fs.inotify.max_queued_events).
_MAX_CHANGES: Final = 10_000
_MAX_ATTEMPTS: Final = 512  # to remove a name that other processes keep looking up
_UTIME_OMIT: Final = (1 << 30) - 2  # linux/stat.h
_AT_SYMLINK_NOFOLLOW: Final = 0x100  # linux/fcntl.h
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FATAL: Final = frozenset({errno.EROFS, errno.ENOTCONN, errno.ECONNABORTED})  # no further system call would succeed


class ReplayAbortedError(Exception):
    """The replay cannot continue, or was stopped."""


def repeat_changes(
    mountpoint: str,
    invalidation: CacheInvalidation,
    orphans: Sequence[int],
    answers: Answers,
    stopped: threading.Event,
) -> None:
    """Repeat the changes in `invalidation` on the mount, until `stopped` is set.  ReplayAbortedError.

    `orphans`: the files, not directories, that lost their last name.
    """
    try:
        if os.statvfs(mountpoint).f_flag & os.ST_RDONLY:
            raise ReplayAbortedError("the mount is read-only")
        root = os.open(mountpoint, _DIRECTORY & ~os.O_NOFOLLOW)
    except OSError as error:
        raise ReplayAbortedError(str(error)) from None
    try:
        _check_mount(root, answers)
        _Changes(root, invalidation, orphans, answers, stopped).repeat()
    finally:
        os.close(root)


def _check_mount(root: int, answers: Answers) -> None:
    """Verify that `root` is this mount: on the directory below a mount that is gone, the calls would be real."""
    answers.was_probed = False
    answers.probe = name = f".vfsd-{os.urandom(16).hex()}".encode()
    try:
        os.stat(name, dir_fd=root)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ReplayAbortedError(str(error)) from None
    if not answers.was_probed:
        raise ReplayAbortedError("another file system is mounted on top of the workspace")


class _Cursor:
    """An open directory that moves through the tree step by step, and follows no symlink.

    Opening each path from the root would take a request or two for each of its components.  On the way up ".." takes no
    request, but leads elsewhere if another process has moved a directory; then `at` retries from the root.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._names: list[bytes] = []
        self._descriptor = os.dup(root)

    def at(self, path: bytes, is_right: Callable[[int], bool]) -> int | None:
        """Return a descriptor of the directory at `path`, or None if `is_right` rejects it.  Do not close it."""
        try:
            self._move(path)
            if is_right(self._descriptor):
                return self._descriptor
        except OSError:
            pass
        self._names = []
        self._replace(os.dup(self._root))
        self._move(path)
        return self._descriptor if is_right(self._descriptor) else None

    def _move(self, path: bytes) -> None:
        names = path.split(b"/") if path else []
        shared = 0
        while shared < min(len(names), len(self._names)) and names[shared] == self._names[shared]:
            shared += 1
        while len(self._names) > shared:
            self._replace(os.open("..", _DIRECTORY, dir_fd=self._descriptor))
            self._names.pop()
        for name in names[shared:]:
            self._replace(os.open(name, _DIRECTORY, dir_fd=self._descriptor))
            self._names.append(name)

    def _replace(self, descriptor: int) -> None:
        os.close(self._descriptor)
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)


class _Changes:
    """The changes of one replay."""

    def __init__(
        self,
        root: int,
        invalidation: CacheInvalidation,
        orphans: Sequence[int],
        answers: Answers,
        stopped: threading.Event,
    ) -> None:
        self._root = root
        self._orphans = orphans
        try:
            self._device = os.fstat(root).st_dev
            self._cursor = _Cursor(root)
        except OSError as error:  # the mount has just gone
            raise ReplayAbortedError(str(error)) from None
        self._paths = invalidation.paths
        self._modes = invalidation.modes
        self._answers = answers
        self._stopped = stopped
        self._left = _MAX_CHANGES
        # A directory without a path was removed, and no watcher can be in it.  Changes near the root come first,
        # because they matter most if there are too many.
        entries = [change for change in invalidation.entries if change.parent in self._paths]
        entries.sort(key=lambda change: self._depth(change.parent))
        self._total = len(entries)
        self._parents: dict[int, list[EntryChange]] = defaultdict(list)
        for change in entries:
            self._parents[change.parent].append(change)
        # An inode that was changed in place has no event of its own if it has no path, if it is a directory whose
        # entries have events, or if its path is created by another change.
        created = {b"/".join(filter(None, (self._paths[one.parent], one.name))) for one in entries if one.new}
        self._in_place = [
            (inode, content)
            for inode, content in invalidation.inodes
            if inode in self._paths and inode not in self._parents and self._paths[inode] not in created
        ]
        self._total += len(self._in_place)
        self._failures: dict[int, int] = defaultdict(int)

    def _depth(self, inode: int) -> int:
        path = self._paths[inode]
        return path.count(b"/") + bool(path)

    def repeat(self) -> None:
        """Make the system calls, directory by directory in the order of their paths."""
        try:
            for parent, changes in sorted(self._first_parents(), key=lambda item: self._paths[item[0]].split(b"/")):
                self._repeat_in_directory(parent, changes)
            in_place = sorted(self._in_place[:_MAX_CHANGES], key=lambda item: self._paths[item[0]].split(b"/"))
            for inode, content in in_place:
                self._repeat_in_place(inode, content=content)
            self._delete_orphans()
        finally:
            self._cursor.close()
            self._answers.step = None
            self._answers.orphan_name = b""
            if self._total > _MAX_CHANGES:
                _logger.warning("of %d changes %d were shown to inotify watchers", self._total, _MAX_CHANGES)
            for code, count in self._failures.items():
                _logger.info("%d changes are not shown to inotify watchers: %s", count, os.strerror(code))

    def _first_parents(self) -> Iterator[tuple[int, list[EntryChange]]]:
        """Iterate over the directories with the first `_MAX_CHANGES` changes."""
        count = 0
        for parent, changes in self._parents.items():
            if count >= _MAX_CHANGES:
                return
            count += len(changes)
            yield parent, changes

    def _repeat_in_directory(self, parent: int, changes: list[EntryChange]) -> None:
        with self._counting_failures():
            directory = self._cursor.at(self._paths[parent], lambda found: self._is(os.fstat(found), parent))
            if directory is None:
                return
            changes = [change for change in changes if change.old != change.new]
            for change in changes:
                if change.old and self._may_continue():
                    with self._counting_failures():
                        self._remove(directory, change)
            for change in changes:
                if change.new and self._may_continue():
                    with self._counting_failures():
                        self._create(directory, change)

    def _may_continue(self) -> bool:
        if self._stopped.is_set():
            raise ReplayAbortedError("the replay was stopped")
        self._left -= 1
        return self._left >= 0

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        """Count an OSError of the block; ReplayAbortedError if all further calls would fail as well."""
        try:
            yield
        except OSError as error:
            code = error.errno or errno.EIO
            if code in _FATAL:
                raise ReplayAbortedError(os.strerror(code)) from None
            self._failures[code] += 1

    def _is(self, found: os.stat_result, inode: int) -> bool:
        """Whether `found` is still that inode, and on this mount."""
        return found.st_ino == inode and found.st_dev == self._device

    # -- names ---------------------------------------------------------------------------------
    def _remove(self, directory: int, change: EntryChange) -> None:
        """Remove the ghost of `change.old`.

        ENOENT means that the kernel has cached the absence of the name.  The detour `DETOUR/../NAME/../NAME` makes it
        drop that: the first lookup of the detour fails with ESTALE, on which the kernel repeats the whole path walk and
        asks the daemon for every component.
        """
        file_type = stat.S_IFMT(self._modes.get(change.old, stat.S_IFREG)) or stat.S_IFREG
        remove = os.rmdir if file_type == stat.S_IFDIR else os.unlink
        self._answers.step = step = Step(change, self._answers.new_ghost(file_type))
        path = change.name
        for _ in range(_MAX_ATTEMPTS):
            step.was_looked_up, step.detours = False, 0
            try:
                remove(path, dir_fd=directory)
            except OSError as error:
                if step.is_outdated:
                    return
                if error.errno == errno.ENOENT:
                    step.detour = f".vfsd-{os.urandom(8).hex()}".encode()
                    path = b"/".join((step.detour, b"..", change.name, b"..", change.name))
                elif error.errno in {errno.ENOTDIR, errno.EISDIR, errno.ESTALE}:
                    # The kernel has cached the current inode, of another type.  An exclusive create makes it ask.
                    with contextlib.suppress(FileExistsError):
                        os.mknod(change.name, stat.S_IFREG | 0o600, dir_fd=directory)
                else:
                    raise
            else:
                return
        raise os_error(errno.EBUSY)

    def _create(self, directory: int, change: EntryChange) -> None:
        mode = self._modes.get(change.new, 0)
        self._answers.step = step = Step(change, None)
        try:
            if stat.S_ISDIR(mode):
                os.mkdir(change.name, dir_fd=directory)
            elif stat.S_ISLNK(mode):
                os.symlink(b"-", change.name, dir_fd=directory)
            else:
                # Only the type has to agree.  The kernel takes character device 0:0 as a whiteout, which needs no
                # privilege.
                os.mknod(change.name, mode, os.makedev(1, 0) if stat.S_ISBLK(mode) else 0, dir_fd=directory)
        except FileExistsError:
            if not step.is_outdated:
                raise
        else:
            self._answers.step = None
            _raise_close_write(directory, change.name, mode)

    # -- inodes --------------------------------------------------------------------------------
    def _delete_orphans(self) -> None:
        """Make the kernel delete the orphans: IN_DELETE_SELF and IN_IGNORED for a watch on the file itself.

        The first lookup of a random name shows the orphan there, with no links; the second finds nothing, so the kernel
        drops the name, and with it an inode without links (dentry_unlink_inode in fs/dcache.c).  No directory gets
        an event.
        """
        self._answers.orphan_name = name = f".vfsd-{os.urandom(16).hex()}".encode()
        for inode in self._orphans:
            if not self._may_continue():
                return
            self._answers.orphan = inode
            for _ in range(2):
                try:
                    os.close(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root))
                except FileNotFoundError:
                    pass  # the second time; the first time it is no orphan any more
                except OSError as error:
                    self._failures[error.errno or errno.EIO] += 1
                    return

    def _repeat_in_place(self, inode: int, *, content: bool) -> None:
        if not self._may_continue():
            return
        parent, _, name = self._paths[inode].rpartition(b"/")
        name = name or b"."  # the root
        mode = self._modes.get(inode, 0)
        with self._counting_failures():
            directory = self._cursor.at(
                parent, lambda found: self._is(os.stat(name, dir_fd=found, follow_symlinks=False), inode)
            )
            if directory is None:
                return
            is_modified = content and stat.S_ISREG(mode)
            _touch(directory, name, only_mtime=is_modified)
            if is_modified:
                _raise_close_write(directory, name, mode)


def _raise_close_write(directory: int, name: bytes, mode: int) -> None:
    """Raise IN_CLOSE_WRITE, which many tools wait for; not for a program, which could not be executed meanwhile."""
    if not stat.S_ISREG(mode) or mode & 0o111:
        return
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory))
    except OSError as error:
        _logger.debug("no IN_CLOSE_WRITE for %r: %s", name, error)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _touch(directory: int, name: bytes, *, only_mtime: bool) -> None:
    """Call utimensat(2) with UTIME_OMIT, which `os.utime` lacks.  Needs ownership, not write permission.

    Sets the mtime that the file has: with a write-back cache the kernel keeps what is set, whatever the answer says.
    """
    mtime = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns
    times = (_Timespec * 2)(_Timespec(0, _UTIME_OMIT if only_mtime else 0), _Timespec(*divmod(mtime, 10**9)))
    if _libc.utimensat(directory, name, times, _AT_SYMLINK_NOFOLLOW):
        raise os_error(ctypes.get_errno(), repr(name))
