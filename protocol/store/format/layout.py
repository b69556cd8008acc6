"""Layout: where a store is, what lies where in it, and its locks.

    format               "vfsd store 1"
    lock                 shared while a state is taken, read or restored; exclusive while garbage is collected
    gate                 passed before the lock is shared; closed while a collection waits for the lock
    packs/               <workspace>-<serial>.snap: a snapshot, with what it was the first to hold
                         <id>.pack: contents of which a dropped snapshot was the first holder
    objects/ab/cdef...   large contents, a file each
    workspaces/<id>/     key, serial, lock, cache, journal
    tmp/                 what is being written

Locks are flock(2): a process that dies leaves none behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from protocol.errors import os_error

__all__ = [
    "FORMAT",
    "GENERATION",
    "NO_SPACE",
    "STORE_VARIABLE",
    "Layout",
    "default_directory",
    "is_inside",
    "open_regular",
    "read_regular",
    "sync_directory",
    "write_atomically",
]

STORE_VARIABLE: Final = "VFSD_STORE_DIR"
FORMAT: Final = "vfsd store 1\n"
GENERATION: Final = "generation"  # the file with the number of garbage collections
_WORKSPACE_ID_DIGITS: Final = 24
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_O_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_POLL_S: Final = 0.02
_GATE_POLL_S: Final = 0.002  # the gate is held for microseconds
_FIRST_CLOSED_S: Final = 0.5


def default_directory(environ: Mapping[str, str] = os.environ) -> str:
    """$VFSD_STORE_DIR, else $XDG_STATE_HOME/vfsd/store, else ~/.local/state/vfsd/store."""
    own = environ.get(STORE_VARIABLE)
    if own:
        return os.path.abspath(own)
    state = environ.get("XDG_STATE_HOME", "")
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    if not os.path.isabs(state):
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "vfsd", "store")


def is_inside(directory: str, identity: tuple[int, int]) -> bool:
    """Whether `directory`, or what of its path there is, is the directory (st_dev, st_ino) or lies below it.

    Symlinks and bind mounts do not hide it: each directory on the real way up is looked at.
    """
    path = os.path.realpath(directory)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            seen = os.fstat(descriptor)
            if (seen.st_dev, seen.st_ino) == identity:
                return True
            above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = above
            parent = os.fstat(descriptor)
            if (parent.st_dev, parent.st_ino) == (seen.st_dev, seen.st_ino):
                return False
    finally:
        os.close(descriptor)


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file at `path`.  EINVAL, ELOOP: something else is there, which was not waited for."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file, which the snapshot store needs here; remove it", path)
    return descriptor


def read_regular(path: str, most: int = -1) -> bytes:
    """What the regular file at `path` has, up to `most` bytes.  As `open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read(most)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, _O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: str, data: bytes, *, durable: bool) -> None:
    """Replace or make a file: at any moment it is what it was, or what it is to be."""
    temporary = f"{path}.{os.getpid():x}-{time.monotonic_ns():x}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(os.path.dirname(path))


class Layout:
    """The paths and the locks of the store in `directory`."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.packs = os.path.join(self.directory, "packs")
        self.objects = os.path.join(self.directory, "objects")
        self.workspaces = os.path.join(self.directory, "workspaces")
        self.tmp = os.path.join(self.directory, "tmp")
        self._format = os.path.join(self.directory, "format")
        self._checked = False
        self._sharing = 0  # how many times this layout holds the shared lock
        self._counting = threading.Lock()

    def exists(self) -> bool:
        """Whether there is a store.  EINVAL if it has an unknown format; ESTALE if it was there before and is gone."""
        if self._checked:
            if not os.path.exists(self._format):
                raise OSError(
                    errno.ESTALE,
                    "the snapshot store is gone, with all its snapshots: mount its disk again, or restart with another "
                    "directory in $VFSD_STORE_DIR",
                    self.directory,
                )
            return True
        try:
            found = read_regular(self._format, 100).decode("utf-8", "replace")
        except FileNotFoundError:
            return False
        if found != FORMAT:
            raise OSError(
                errno.EINVAL,
                f"a store of another format ({found.strip()!r}, known here is {FORMAT.strip()!r}): use the vfsd that "
                "made it, or name another directory with $VFSD_STORE_DIR",
                self.directory,
            )
        self._checked = True
        return True

    def create(self) -> None:
        """Make the store where there is none."""
        if self.exists():
            return
        _make_durably(self.directory)
        there = set(os.listdir(self.directory))
        if there - {"packs", "objects", "workspaces", "tmp", "lock", "gate"} and not any(
            n.startswith("format") for n in there
        ):
            raise OSError(errno.EEXIST, "is no store and not empty: name another directory", self.directory)
        os.chmod(self.directory, 0o700)
        for path in (self.packs, self.objects, self.workspaces, self.tmp):
            os.makedirs(path, mode=0o700, exist_ok=True)
        # Last: what has no format is not yet a store.
        write_atomically(self._format, FORMAT.encode(), durable=True)
        self._checked = True

    # -- workspaces ----------------------------------------------------------------------------
    @staticmethod
    def workspace_id(key: str) -> str:
        """The name that a workspace has in the store."""
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:_WORKSPACE_ID_DIGITS]

    def workspace(self, key: str) -> str:
        """The directory of a workspace, which need not be there."""
        return os.path.join(self.workspaces, self.workspace_id(key))

    def make_workspace(self, key: str) -> str:
        """The directory of a workspace."""
        path = self.workspace(key)
        if not os.path.isdir(path):
            os.makedirs(path, mode=0o700, exist_ok=True)
            sync_directory(self.workspaces)
        if not os.path.exists(os.path.join(path, "key")):
            write_atomically(os.path.join(path, "key"), key.encode("utf-8", "surrogateescape"), durable=False)
        return path

    # -- locks ---------------------------------------------------------------------------------
    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """While a state is taken, read or restored: nothing that the store holds goes away.

        Passes the gate first, so that a collection which waits gets its turn.  Not where this layout is shared already:
        a collection would wait for that, and that for the gate.
        """
        gate = os.path.join(self.directory, "gate")
        with contextlib.ExitStack() as stack:
            with contextlib.nullcontext() if self._sharing else _locked(gate, fcntl.LOCK_SH):
                stack.enter_context(_locked(os.path.join(self.directory, "lock"), fcntl.LOCK_SH))
            with self._counting:
                self._sharing += 1
            try:
                yield
            finally:
                with self._counting:
                    self._sharing -= 1

    @contextlib.contextmanager
    def exclusive(self, wait_s: float) -> Iterator[None]:
        """While garbage is collected.  EBUSY when others work with the store for longer than `wait_s`.

        Closes the gate while it waits, so that those at work end and no others begin.  Now and then it opens the gate:
        a process that already works with the store may itself wait at the gate.  It waits twice as long each time.
        """
        deadline = time.monotonic() + wait_s
        closed_s = _FIRST_CLOSED_S
        with contextlib.ExitStack() as stack:
            while True:
                with contextlib.suppress(BlockingIOError):
                    with _locked(os.path.join(self.directory, "gate"), fcntl.LOCK_EX, deadline, _GATE_POLL_S):
                        until = min(deadline, time.monotonic() + closed_s)
                        lock = _locked(os.path.join(self.directory, "lock"), fcntl.LOCK_EX, until)
                        stack.enter_context(lock)
                    break
                if time.monotonic() >= deadline:
                    raise os_error(errno.EBUSY, "the store is in use: try again when snapshots and restores are done")
                closed_s *= 2
                time.sleep(_POLL_S)  # those who wait at the gate were woken and need a moment to pass
            yield

    @contextlib.contextmanager
    def naming(self, key: str) -> Iterator[None]:
        """While the name of a snapshot is given or taken away."""
        with _locked(os.path.join(self.make_workspace(key), "lock"), fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def changing(self, key: str, *, exclusive: bool) -> Iterator[None]:
        """While a workspace is restored (`exclusive`), or its state is taken."""
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        with _locked(os.path.join(self.make_workspace(key), "restoring"), kind):
            yield

    @contextlib.contextmanager
    def if_nobody_changes(self, key: str) -> Iterator[bool]:
        """Whether no restore is at work in a workspace; if so, none begins before the block ends."""
        try:
            with _locked(os.path.join(self.make_workspace(key), "restoring"), fcntl.LOCK_SH, 0):
                yield True
                return
        except BlockingIOError:
            pass
        yield False


def _make_durably(path: str) -> None:
    """Make a directory and those above it, and have their names on the disk."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_durably(above)
    os.makedirs(path, mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a directory that we may write to and not read
        sync_directory(above)


@contextlib.contextmanager
def _locked(path: str, kind: int, deadline: float | None = None, poll_s: float = _POLL_S) -> Iterator[None]:
    """Hold a lock.  BlockingIOError where it is not free before `deadline`, on the clock of time.monotonic()."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        if deadline is None:
            fcntl.flock(descriptor, kind)
        else:
            _wait_for(lambda: fcntl.flock(descriptor, kind | fcntl.LOCK_NB), deadline, poll_s)
        yield
    finally:
        os.close(descriptor)


def _wait_for(lock: Callable[[], None], deadline: float, poll_s: float) -> None:
    # flock(2) has no time limit, and a signal to interrupt it is not a thread's to send.
    while True:
        try:
            return lock()
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(poll_s)
