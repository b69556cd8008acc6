"""Replay: makes the kernel raise inotify events for what a restore or an import has changed.

FUSE's notifications raise none, so the changes are done again as plain system calls on the mount, from one
worker thread, and its requests are answered otherwise than everybody else's (`Impersonator`): the volume
has changed already and is not touched again.

- A name that is gone: the thread's LOOKUP is answered with a ghost, an inode that exists nowhere, its
  UNLINK or RMDIR with success.  A ghost and not the old inode, because rmdir(2) marks what the kernel
  holds in core as dead for good (S_DEAD), and a later restore may bring the old inode back.
- A name that is new: LOOKUP is answered ENOENT, MKNOD, MKDIR or SYMLINK with the inode that is there.
- An inode changed in place: utimensat(2) for the modification time alone is IN_MODIFY, for both times
  IN_ATTRIB; SETATTR is answered with the attributes as they are.

That nobody else sees anything of it rests on this: answers to the thread have no cache time, so the kernel asks
again before it shows any of them to another process, and then gets the real state.  The other way round,
what other processes have cached meanwhile could hide a name from the thread: creating with LOOKUP_EXCL always
asks; an UNLINK that no ghost preceded is answered ESTALE, at which the kernel looks the name up anew;
a cached absence is ended by an exclusive mknod(2) of the name, which fails with EEXIST (fs/namei.c,
fuse_dentry_revalidate in fs/fuse/dir.c).

Threading: `run` is called on the loop, the system calls are made on a worker thread, the answers are given on
the loop.  The two share `_Answers.step`, which the thread sets between two system calls of its own.

docs/inotify.md says what a watcher sees, and what is impossible.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, cast

import trio

from protocol.errors import os_error
from protocol.volume import (
    ROOT_INODE,
    Answer,
    AttributeChanges,
    Attributes,
    CacheInvalidation,
    Caller,
    EntryChange,
    Volume,
    VolumeCapabilities,
)

__all__ = ["MAX_CHANGES", "Replay"]

log = logging.getLogger(__name__)

# At most so many are replayed, so that a restore of everything stays bounded (some 100 µs each); a watcher's
# queue overflows at 16,384 (fs.inotify.max_queued_events) anyway.
MAX_CHANGES: Final = 10_000
# Ghosts count up from here; a volume counts its inodes from 1.
_FIRST_GHOST: Final = 1 << 62
# How often a name is tried again that another process keeps putting into the cache.
_ATTEMPTS: Final = 512
_UTIME_OMIT: Final = (1 << 30) - 2  # linux/stat.h
_AT_SYMLINK_NOFOLLOW: Final = 0x100  # linux/fcntl.h
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# None of the further system calls could do better.
_FATAL: Final = frozenset({errno.EROFS, errno.ENOTCONN, errno.ECONNABORTED})


class _AbandonedError(Exception):
    """The replay cannot go on, or nobody waits for it any more."""


@dataclass(slots=True)
class _Ghost:
    """Attributes of something that is not there."""

    inode: int
    mode: int
    generation: int = 0
    nlink: int = 1
    uid: int = field(default_factory=os.geteuid)
    gid: int = field(default_factory=os.getegid)
    rdev: int = 0
    size: int = 0
    blocks: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    birth_ns: int = 0


@dataclass(slots=True)
class _Step:
    """What the thread is doing to one name: removing `ghost`, or making what is there (`ghost` is None).

    `ghosts` are all that this step has shown.  `detour` is a name, or b""; `detours` counts its lookups.
    """

    change: EntryChange
    ghost: _Ghost | None
    detour: bytes = b""
    detours: int = 0
    ghosts: dict[int, _Ghost] = field(default_factory=dict)
    asked: bool = False  # the kernel has looked the name up in this system call
    overtaken: bool = False  # somebody has changed the name since the restore


class _Answers:
    """The volume as the thread sees it.  Runs on the loop; changes nothing but lookup counts."""

    capabilities: Final = VolumeCapabilities()

    def __init__(self, volume: Volume) -> None:
        self.step: _Step | None = None
        self.probe = b""  # the name by which the thread finds out that it is on our mount
        self.reached = False  # and whether it is
        self._volume = volume
        self._ghosts = _FIRST_GHOST

    def lookup(self, parent: int, name: bytes) -> Attributes:
        if name == self.probe and parent == ROOT_INODE:
            self.reached = True
            raise os_error(errno.ENOENT)
        step = self.step
        if step is None or step.change.parent != parent:
            return _now(self._volume.lookup(parent, name))
        if name == step.detour:
            step.detours += 1
            if step.detours == 1:
                raise os_error(errno.ESTALE)
            return self._ghost(step, stat.S_IFDIR)
        if name != step.change.name or not self._as_restored(step):
            return _now(self._volume.lookup(parent, name))
        if step.detours > 1:
            step.detours = 0
            return self._ghost(step, stat.S_IFDIR)
        step.asked = True
        if step.ghost is None:
            raise os_error(errno.ENOENT)
        step.ghosts[step.ghost.inode] = step.ghost
        return step.ghost

    def new_ghost(self, kind: int) -> _Ghost:
        self._ghosts += 1
        return _Ghost(self._ghosts, kind | 0o700)

    def _ghost(self, step: _Step, kind: int) -> _Ghost:
        ghost = self.new_ghost(kind)
        step.ghosts[ghost.inode] = ghost
        return ghost

    def getattr(self, inode: int) -> Attributes:
        step = self.step
        if step is not None and inode in step.ghosts:
            return step.ghosts[inode]
        return _now(self._volume.getattr(inode))

    def setattr(self, inode: int, changes: AttributeChanges) -> Attributes:  # noqa: ARG002
        return self.getattr(inode)

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attributes:  # noqa: ARG002
        return self._made(parent, name)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attributes:  # noqa: ARG002
        return self._made(parent, name)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attributes:  # noqa: ARG002
        return self._made(parent, name)

    def _made(self, parent: int, name: bytes) -> Attributes:
        step = self._step_at(parent, name)
        if step is None or step.ghost is not None or not step.asked or not self._as_restored(step):
            raise os_error(errno.EEXIST)
        return _now(self._volume.lookup(parent, name))

    def unlink(self, parent: int, name: bytes) -> None:
        step = self._step_at(parent, name)
        if step is None or step.ghost is None or not step.asked:
            # The kernel is about to remove something that it has in its cache, and not the ghost.
            raise os_error(errno.ESTALE)
        step.asked = False

    rmdir = unlink

    def link(self, inode: int, parent: int, name: bytes) -> Attributes:  # noqa: ARG002
        raise os_error(errno.EPERM)

    def rename(self, *_: object) -> None:
        raise os_error(errno.EPERM)

    def _step_at(self, parent: int, name: bytes) -> _Step | None:
        step = self.step
        return step if step is not None and step.change.parent == parent and step.change.name == name else None

    def _as_restored(self, step: _Step) -> bool:
        """Whether the name still stands for what it stood for after the restore."""
        try:
            inode = _now(self._volume.lookup(step.change.parent, step.change.name)).inode
        except FileNotFoundError:
            inode = 0
        else:
            self._volume.forget(inode, 1)
        step.overtaken = inode != step.change.new
        return not step.overtaken


def _now(answer: Answer[Attributes]) -> Attributes:
    """Only volumes that answer at once can be restored."""
    assert not isinstance(answer, Awaitable)
    return answer


class Replay:
    """Replays what a restore or an import changed in `volume`, mounted at `mountpoint`; an `Impersonator`."""

    def __init__(self, volume: Volume, mountpoint: str) -> None:
        self._answers = _Answers(volume)
        self._mountpoint = mountpoint
        self.thread_id = 0  # no property: it is looked at with every request
        self._one_at_a_time = trio.Lock()
        self._finished = trio.Event()  # the latest thread has
        self._finished.set()

    @property
    def volume(self) -> Volume:
        # Of a Volume it has what `Impersonator` names; nothing else is asked of it.
        return cast("Volume", self._answers)

    async def run(self, coherence: CacheInvalidation) -> None:
        """Raise the events for `coherence`, after `tell_kernel`.

        Failures are logged, never raised.  At most MAX_CHANGES are replayed.
        """
        if not coherence.entries and not coherence.inodes:
            return
        async with self._one_at_a_time:
            # One that was abandoned is still in a system call, which must not be answered as real.
            await self._finished.wait()
            self._finished = trio.Event()
            stopped = threading.Event()
            work = (coherence, stopped, trio.lowlevel.current_trio_token(), self._finished)
            threading.Thread(target=self._work, args=work, name="vfsd replay", daemon=True).start()
            try:
                # Can be cancelled, which abandons the thread: it may wait for a loop on its way out.
                await self._finished.wait()
            finally:
                stopped.set()

    def _work(
        self,
        coherence: CacheInvalidation,
        stopped: threading.Event,
        loop: trio.lowlevel.TrioToken,
        finished: trio.Event,
    ) -> None:
        self.thread_id = threading.get_native_id()
        try:
            self._replay(coherence, stopped)
        except _AbandonedError as error:
            level = logging.INFO if stopped.is_set() else logging.WARNING
            log.log(level, "changes are not shown to inotify watchers: %s", error)
        except Exception:
            log.exception("changes are not shown to inotify watchers")
        finally:
            self._answers.step = None
            self.thread_id = 0
            with contextlib.suppress(trio.RunFinishedError):
                loop.run_sync_soon(finished.set)

    def _replay(self, coherence: CacheInvalidation, stopped: threading.Event) -> None:
        try:
            if os.statvfs(self._mountpoint).f_flag & os.ST_RDONLY:
                raise _AbandonedError("the mount is read-only")
            root = os.open(self._mountpoint, _DIRECTORY & ~os.O_NOFOLLOW)
        except OSError as error:
            raise _AbandonedError(str(error)) from None
        try:
            self._make_sure_of(root)
            try:
                walk = _Walk(root, coherence, self._answers, stopped)
            except OSError as error:  # the mount went away in that moment
                raise _AbandonedError(str(error)) from None
            walk.run()
        finally:
            os.close(root)

    def _make_sure_of(self, root: int) -> None:
        """Find out that `root` is our mount, not what lies below one that has gone: there the calls would be real."""
        name = f".vfsd-{os.urandom(16).hex()}".encode()
        self._answers.probe = name
        self._answers.reached = False
        try:
            os.stat(name, dir_fd=root)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _AbandonedError(str(error)) from None
        if not self._answers.reached:
            raise _AbandonedError("what is mounted there is not this workspace")


class _Cursor:
    """One open directory that moves about the tree, through no symlink: along it, not from the root each time.

    Every step down is a request or two, and a path may have a thousand.  On the way up "..", which asks nobody,
    leads elsewhere where somebody has moved a directory meanwhile: hence `is_there`, and a second try from the root.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._names: list[bytes] = []
        self._descriptor = os.dup(root)

    def at(self, path: bytes, is_there: Callable[[int], bool]) -> int | None:
        """The directory at `path`, None where `is_there` denies that of what is found.  Do not close it."""
        try:
            self._move(path)
            if is_there(self._descriptor):
                return self._descriptor
        except OSError:
            pass
        self._names = []
        self._take(os.dup(self._root))
        self._move(path)
        return self._descriptor if is_there(self._descriptor) else None

    def _move(self, path: bytes) -> None:
        names = path.split(b"/") if path else []
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(names, self._names, strict=False))
        )
        while len(self._names) > shared:
            self._take(os.open("..", _DIRECTORY, dir_fd=self._descriptor))
            self._names.pop()
        for name in names[shared:]:
            self._take(os.open(name, _DIRECTORY, dir_fd=self._descriptor))
            self._names.append(name)

    def _take(self, descriptor: int) -> None:
        os.close(self._descriptor)
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)


class _Walk:
    """The system calls of one replay.  Runs on the worker thread."""

    def __init__(self, root: int, coherence: CacheInvalidation, answers: _Answers, stopped: threading.Event) -> None:
        self._cursor = _Cursor(root)
        self._device = os.fstat(root).st_dev
        self._coherence = coherence
        self._answers = answers
        self._stopped = stopped
        self._left = MAX_CHANGES
        paths = coherence.paths
        self._created = {
            b"/".join(filter(None, (paths[change.parent], change.name)))
            for change in coherence.entries
            if change.new and change.parent in paths
        }
        self._failures: dict[int, int] = defaultdict(int)

    def run(self) -> None:
        parents = self._by_parent()
        in_place = [change for change in self._coherence.inodes if self._counts(change.inode, parents)]
        total = sum(map(len, parents.values())) + len(in_place)
        paths = self._coherence.paths
        try:
            for parent, changes in sorted(_first(parents, MAX_CHANGES), key=lambda it: paths[it[0]].split(b"/")):
                self._replay_directory(parent, changes)
            for inode, content in sorted(in_place[:MAX_CHANGES], key=lambda it: paths[it[0]].split(b"/")):
                self._replay_inode(inode, content=content)
        finally:
            self._cursor.close()
            self._answers.step = None
            if total > MAX_CHANGES:
                log.warning("of %d changes %d were shown to inotify watchers", total, MAX_CHANGES)
            for code, count in self._failures.items():
                log.info("%d changes are not shown to inotify watchers: %s", count, os.strerror(code))

    def _counts(self, inode: int, parents: dict[int, list[EntryChange]]) -> bool:
        """Whether an inode that was changed in place gets an event of its own.

        Not without a name; not a directory whose entries get theirs; not what is created under the name
        that it would be shown by.
        """
        path = self._coherence.paths.get(inode)
        return path is not None and inode not in parents and path not in self._created

    def _by_parent(self) -> dict[int, list[EntryChange]]:
        """The changes of names, by directory, those near the root first: they matter most where there are too many.

        A directory without a path is gone: nobody can get at it to be told.
        """
        paths = self._coherence.paths
        found: dict[int, list[EntryChange]] = defaultdict(list)
        for change in self._coherence.entries:
            if change.parent in paths:
                found[change.parent].append(change)
        return dict(sorted(found.items(), key=lambda item: paths[item[0]].count(b"/") + bool(paths[item[0]])))

    def _replay_directory(self, parent: int, changes: list[EntryChange]) -> None:
        with self._noted():
            directory = self._cursor.at(self._coherence.paths[parent], lambda found: self._is(os.fstat(found), parent))
            if directory is None:
                return
            for change in changes:
                if change.old and change.old != change.new and self._may_go_on():
                    with self._noted():
                        self._remove(directory, change)
            for change in changes:
                if change.new and change.old != change.new and self._may_go_on():
                    with self._noted():
                        self._make(directory, change)

    def _may_go_on(self) -> bool:
        if self._stopped.is_set():
            raise _AbandonedError("the workspace is closing")
        self._left -= 1
        return self._left >= 0

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Counts failures; those that all others would share end the replay."""
        try:
            yield
        except OSError as error:
            code = error.errno or errno.EIO
            if code in _FATAL:
                raise _AbandonedError(os.strerror(code)) from None
            self._failures[code] += 1

    def _is(self, found: os.stat_result, inode: int) -> bool:
        """Whether what was found is still that inode, and not one of another mount above it."""
        return found.st_ino == inode and found.st_dev == self._device

    # -- names ---------------------------------------------------------------------------------
    def _remove(self, directory: int, change: EntryChange) -> None:
        kind = stat.S_IFMT(self._coherence.modes.get(change.old, stat.S_IFREG)) or stat.S_IFREG
        remove = os.rmdir if kind == stat.S_IFDIR else os.unlink
        self._answers.step = step = _Step(change, self._answers.new_ghost(kind))
        path = change.name
        for _ in range(_ATTEMPTS):
            step.asked, step.detours = False, 0
            try:
                remove(path, dir_fd=directory)
            except OSError as error:
                if step.overtaken:
                    return
                if error.errno == errno.ENOENT:
                    step.detour = f".vfsd-{os.urandom(8).hex()}".encode()
                    path = b"/".join((step.detour, b"..", change.name, b"..", change.name))
                elif error.errno in {errno.ENOTDIR, errno.EISDIR, errno.ESTALE}:
                    # The kernel has what is there now, of another type: creating exclusively makes it ask.
                    with contextlib.suppress(FileExistsError):
                        os.mknod(change.name, stat.S_IFREG | 0o600, dir_fd=directory)
                else:
                    raise
            else:
                return
        raise os_error(errno.EBUSY)

    def _make(self, directory: int, change: EntryChange) -> None:
        mode = self._coherence.modes.get(change.new, 0)
        self._answers.step = step = _Step(change, None)
        try:
            if stat.S_ISDIR(mode):
                os.mkdir(change.name, dir_fd=directory)
            elif stat.S_ISLNK(mode):
                os.symlink(b"-", change.name, dir_fd=directory)
            else:
                os.mknod(change.name, mode, self._rdev(mode), dir_fd=directory)
        except FileExistsError:
            if not step.overtaken:
                raise
        else:
            self._answers.step = None
            self._close_written(directory, change.name, mode)

    @staticmethod
    def _rdev(mode: int) -> int:
        # The kernel takes 0:0 as a whiteout, which needs no privilege; the type is all that has to agree.
        return 0 if not stat.S_ISBLK(mode) else os.makedev(1, 0)

    # -- inodes --------------------------------------------------------------------------------
    def _replay_inode(self, inode: int, *, content: bool) -> None:
        path = self._coherence.paths[inode]
        mode = self._coherence.modes.get(inode, 0)
        if not self._may_go_on():
            return
        above, _, name = path.rpartition(b"/")
        name = name or b"."  # the root
        with self._noted():
            directory = self._cursor.at(
                above, lambda found: self._is(os.stat(name, dir_fd=found, follow_symlinks=False), inode)
            )
            if directory is None:
                return
            modified = content and stat.S_ISREG(mode)
            _touch(directory, name, modification_only=modified)
            if modified:
                self._close_written(directory, name, mode)

    @staticmethod
    def _close_written(directory: int, name: bytes, mode: int) -> None:
        """Raise IN_CLOSE_WRITE, which many tools wait for; not for programs, which nobody could start meanwhile."""
        if not stat.S_ISREG(mode) or mode & 0o111:
            return
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory))
        except OSError as error:
            log.debug("no IN_CLOSE_WRITE for %r: %s", name, error)


def _first(parents: dict[int, list[EntryChange]], count: int) -> Iterator[tuple[int, list[EntryChange]]]:
    """The directories that have the first `count` changes among them."""
    for parent, changes in parents.items():
        if count <= 0:
            return
        count -= len(changes)
        yield parent, changes


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _touch(directory: int, name: bytes, *, modification_only: bool) -> None:
    """utimensat(2), which `os.utime` cannot ask to leave one time alone.  Takes ownership, not write permission."""
    times = (_Timespec * 2)(_Timespec(0, _UTIME_OMIT if modification_only else 0), _Timespec(0, 0))
    if _libc.utimensat(directory, name, times, _AT_SYMLINK_NOFOLLOW):
        raise os_error(ctypes.get_errno(), repr(name))
