"""Inotify events for the changes of a restore or an import.

FUSE's invalidations raise no inotify events.  So a worker thread repeats the changes as ordinary system calls on the
mount.  The volume has changed already and must not change again, so an `Impersonator` answers that thread's requests:

- A name that was removed: LOOKUP returns a ghost, an inode that exists nowhere, and UNLINK or RMDIR succeeds.  The old
  inode would not do: rmdir(2) marks the kernel's in-memory inode as dead for good (S_DEAD), and a later restore may
  bring the old inode back.
- A name that was added: LOOKUP returns ENOENT, and MKNOD, MKDIR or SYMLINK returns the inode that exists.
- An inode that was changed in place: utimensat(2) of only the modification time raises IN_MODIFY, of both times
  IN_ATTRIB.  SETATTR returns the current attributes.
- A file that lost its last name (an orphan): LOOKUP of a random name in the root returns the orphan, and the next one
  ENOENT, on which the kernel drops the name.  As the orphan has no links, a watch on it ends with IN_DELETE_SELF.

No program sees a false answer: answers to the thread have no cache time, so the kernel asks again before it shows
them to a program, and then gets the real state.  In the other direction, entries that programs have cached could hide a
name from the thread.  Hence: a LOOKUP for an exclusive create always reaches the daemon; an UNLINK without
a preceding ghost returns ESTALE, on which the kernel looks the name up again; and a cached absence is ended by an
exclusive mknod(2) of the name, which fails with EEXIST (fs/namei.c, fuse_dentry_revalidate in fs/fuse/dir.c).

`Replay` runs the thread, `_Changes` makes its system calls, `Answers` answers their requests.  docs/semantics.md
describes which events a watcher gets, and which are impossible.

With a write-back cache the kernel also ignores the volume's size and times of a file that it has cached, and
FUSE_NOTIFY_INVAL_INODE does not change that (fuse_get_cache_mask, fs/fuse/inode.c).  Files that nobody has open are
evicted (`NativeEngine.prune`).  For the others such a thread sets size and time through the mount (`refresh_files`),
and the daemon answers its requests without changing the volume.  ctime is then the time of the correction.

Threading: `Replay` is called on the loop, and so is `Answers`, except for `Answers.step`, which the thread replaces
between two of its system calls.  The system calls run in a thread of their own.
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, cast

import msgspec
import trio

from protocol.errors import os_error
from protocol.volume import (
    ROOT_INODE,
    Answer,
    AttributeChanges,
    Attributes,
    PlainAttributes,
    Volume,
    VolumeCapabilities,
    extended,
)
from protocol.volume_extensions import CacheInvalidation, EntryChange

_logger = logging.getLogger(__name__)

# Bounds the time that a restore of everything takes (about 100 us for each change).  A watcher's queue overflows at
# 16,384 events anyway (fs.inotify.max_queued_events).
_MAX_CHANGES: Final = 10_000
_MAX_ATTEMPTS: Final = 512  # to remove a name that programs keep looking up
_UTIME_OMIT: Final = (1 << 30) - 2  # linux/stat.h
_AT_SYMLINK_NOFOLLOW: Final = 0x100  # linux/fcntl.h
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FATAL: Final = frozenset({errno.EROFS, errno.ENOTCONN, errno.ECONNABORTED})  # no further system call would succeed
_FIRST_GHOST: Final = 1 << 62  # ghosts are numbered from here; a volume numbers its inodes from 1


# -- the answers to the requests of the thread ---------------------------------------------------------------
Ghost = PlainAttributes  # the attributes of an inode that does not exist


class Step(msgspec.Struct):
    """The change that the thread is repeating: it removes `ghost`, or creates what exists if `ghost` is None.

    `ghosts` are all ghosts that this step has shown, by inode number.  `detour` is the name of a detour (see
    `calls._remove`) or empty, `detours` counts its lookups.
    """

    change: EntryChange
    ghost: Ghost | None
    detour: bytes = b""
    detours: int = 0
    ghosts: dict[int, Ghost] = msgspec.field(default_factory=dict)
    was_looked_up: bool = False  # the kernel has looked the name up during this system call
    is_outdated: bool = False  # a program has changed the name since the restore


class Answers:
    """The volume as the thread sees it: an `Impersonator`'s volume.  It changes nothing except lookup counts."""

    capabilities: Final = VolumeCapabilities()

    def __init__(self, volume: Volume) -> None:
        self.step: Step | None = None
        self.probe = b""  # the name that the thread looks up to verify that it is on this mount
        self.was_probed = False
        self.orphan_name = b""  # the name in the root that refers to `orphan`, in one lookup
        self.orphan = 0
        self._orphans = extended(volume) if volume.capabilities.orphans else None
        self._volume = volume
        self._last_ghost = _FIRST_GHOST

    def lookup(self, parent: int, name: bytes) -> Attributes:
        if name == self.probe and parent == ROOT_INODE:
            self.was_probed = True
            raise os_error(errno.ENOENT)
        if name == self.orphan_name and parent == ROOT_INODE:
            return self._lookup_orphan()
        step = self.step
        if step is None or step.change.parent != parent:
            return _result(self._volume.lookup(parent, name))
        if name == step.detour:
            step.detours += 1
            if step.detours == 1:
                raise os_error(errno.ESTALE)
            return self._show(step, self.new_ghost(stat.S_IFDIR))
        if name != step.change.name or not self._is_as_restored(step):
            return _result(self._volume.lookup(parent, name))
        if step.detours > 1:
            step.detours = 0
            return self._show(step, self.new_ghost(stat.S_IFDIR))
        step.was_looked_up = True
        if step.ghost is None:
            raise os_error(errno.ENOENT)
        return self._show(step, step.ghost)

    def _lookup_orphan(self) -> Attributes:
        inode, self.orphan = self.orphan, 0
        if self._orphans is None or not inode:
            raise os_error(errno.ENOENT)
        return self._orphans.lookup_orphan(inode)

    def is_orphan(self, inode: int) -> bool:
        return self._orphans is not None and self._orphans.is_orphan(inode)

    def new_ghost(self, file_type: int) -> Ghost:
        self._last_ghost += 1
        return Ghost(self._last_ghost, file_type | 0o700, uid=os.geteuid(), gid=os.getegid())

    @staticmethod
    def _show(step: Step, ghost: Ghost) -> Ghost:
        step.ghosts[ghost.inode] = ghost
        return ghost

    def getattr(self, inode: int) -> Attributes:
        step = self.step
        if step is not None and inode in step.ghosts:
            return step.ghosts[inode]
        return _result(self._volume.getattr(inode))

    def setattr(self, inode: int, _changes: AttributeChanges) -> Attributes:
        return self.getattr(inode)

    def mkdir(self, parent: int, name: bytes, *_: object) -> Attributes:
        """Answer MKDIR, MKNOD and SYMLINK with the inode that exists."""
        step = self._step_at(parent, name)
        if step is None or step.ghost is not None or not step.was_looked_up or not self._is_as_restored(step):
            raise os_error(errno.EEXIST)
        return _result(self._volume.lookup(parent, name))

    mknod = symlink = mkdir

    def unlink(self, parent: int, name: bytes) -> None:
        step = self._step_at(parent, name)
        if step is None or step.ghost is None or not step.was_looked_up:
            # The kernel is about to remove an inode from its cache, not the ghost.
            raise os_error(errno.ESTALE)
        step.was_looked_up = False

    rmdir = unlink

    def link(self, *_: object) -> Attributes:
        raise os_error(errno.EPERM)

    def rename(self, *_: object) -> None:
        raise os_error(errno.EPERM)

    def _step_at(self, parent: int, name: bytes) -> Step | None:
        step = self.step
        return step if step is not None and step.change.parent == parent and step.change.name == name else None

    def _is_as_restored(self, step: Step) -> bool:
        """Whether the name still refers to the inode that it referred to after the restore."""
        try:
            inode = _result(self._volume.lookup(step.change.parent, step.change.name)).inode
        except FileNotFoundError:
            inode = 0
        else:
            self._volume.forget(inode, 1)
        step.is_outdated = inode != step.change.new
        return not step.is_outdated


def _result(answer: Answer[Attributes]) -> Attributes:
    # Volumes with snapshots return results, never awaitables.
    assert not isinstance(answer, Awaitable)
    return answer


# -- the system calls of the thread --------------------------------------------------------------------------
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
    request, but leads elsewhere if a program has moved a directory; then `at` retries from the root.
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


# -- sizes and times that the kernel keeps -------------------------------------------------------------------
class FileState(NamedTuple):
    """The size and time that the volume has for a regular file.  `path` is relative to the root."""

    inode: int
    path: bytes
    size: int
    mtime_ns: int


def refresh_files(open_root: Callable[[], int], files: Sequence[FileState]) -> None:
    """Give the kernel the sizes and times of `files` on the mount whose root `open_root` opens.  Raises as that does.

    Skips a file that is gone, that the daemon's user may not write, or that is being executed (ETXTBSY).
    """
    root = open_root()
    try:
        for file in files:
            with suppress(OSError):
                _refresh(root, file)
    finally:
        os.close(root)


def _refresh(root: int, file: FileState) -> None:
    found = os.stat(file.path, dir_fd=root, follow_symlinks=False)
    if found.st_ino != file.inode or not stat.S_ISREG(found.st_mode):
        return
    size_differs = found.st_size != file.size
    if size_differs:
        descriptor = os.open(file.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            os.ftruncate(descriptor, file.size)
        finally:
            os.close(descriptor)
    if size_differs or found.st_mtime_ns != file.mtime_ns:
        os.utime(file.path, ns=(found.st_atime_ns, file.mtime_ns), dir_fd=root, follow_symlinks=False)


# -- the thread ----------------------------------------------------------------------------------------------
class Replay:
    """Raises events for changes of `volume`, mounted at `mountpoint`.  Implements `Impersonator`."""

    def __init__(self, volume: Volume, mountpoint: str) -> None:
        self._answers = Answers(volume)
        self._mountpoint = mountpoint
        self.thread_id = 0  # an attribute, not a property: engines read it with every request
        self._lock = trio.Lock()
        self._drops = 0  # calls of `drop`
        self._stopped = threading.Event()  # stops the latest thread
        self._finished = trio.Event()  # set when the latest thread has ended
        self._finished.set()

    @property
    def volume(self) -> Volume:
        # `Answers` has only the methods that `Impersonator` names.
        return cast("Volume", self._answers)

    async def run(self, invalidation: CacheInvalidation) -> None:
        """Raise the events for `invalidation`, after `invalidate_kernel_caches`.

        Logs failures and raises none.  Repeats at most 10,000 changes.
        """
        if not invalidation.entries and not invalidation.inodes:
            return
        lost = dict.fromkeys(
            change.old for change in invalidation.entries if not stat.S_ISDIR(invalidation.modes.get(change.old, 0))
        )
        orphans = list(filter(self._answers.is_orphan, lost))
        drops = self._drops
        await self._run(
            lambda stopped: repeat_changes(self._mountpoint, invalidation, orphans, self._answers, stopped),
            is_dropped=lambda: self._drops != drops,
        )

    def drop(self) -> None:
        """Stop the replay that runs at its next step, and drop those that wait: their events are not raised."""
        if self._lock.locked():
            _logger.info("changes are not shown to inotify watchers: there were too many to be shown in time")
        self._drops += 1
        self._stopped.set()

    async def refresh(self, files: Sequence[FileState], open_root: Callable[[], int]) -> None:
        """Give the kernel the sizes and times of `files` (see `refresh_files`).  Logs failures."""
        if files:
            await self._run(lambda _stopped: refresh_files(open_root, files))

    async def _run(
        self, work: Callable[[threading.Event], object], *, is_dropped: Callable[[], bool] = lambda: False
    ) -> None:
        """Run `work` in a thread whose requests change nothing, unless `is_dropped` when its turn has come."""
        async with self._lock:
            # A thread that was abandoned may still be in a system call, whose requests must not reach the volume.
            await self._finished.wait()
            if is_dropped():
                return
            self._finished = trio.Event()
            self._stopped = stopped = threading.Event()
            arguments = (work, stopped, trio.lowlevel.current_trio_token(), self._finished)
            threading.Thread(target=self._work, args=arguments, name="vfsd replay", daemon=True).start()
            try:
                # Cancelling abandons the thread, because it may wait for a loop that is shutting down.
                await self._finished.wait()
            finally:
                stopped.set()

    def _work(
        self,
        work: Callable[[threading.Event], object],
        stopped: threading.Event,
        loop: trio.lowlevel.TrioToken,
        finished: trio.Event,
    ) -> None:
        self.thread_id = threading.get_native_id()
        try:
            work(stopped)
        except ReplayAbortedError as error:
            level = logging.INFO if stopped.is_set() else logging.WARNING
            _logger.log(level, "changes are not shown to inotify watchers: %s", error)
        except Exception:
            _logger.exception("changes are not shown to inotify watchers")
        finally:
            self._answers.step = None
            self.thread_id = 0
            with contextlib.suppress(trio.RunFinishedError):
                loop.run_sync_soon(finished.set)
