"""Layout: the paths of a store, and its locks.

    format               "vfsd store 1"
    generation           the number of garbage collections
    lock                 shared while a snapshot is taken, read or restored; exclusive for a garbage collection
    gate                 taken before the shared lock; a collection that waits for `lock` holds it
    packs/               <workspace>-<serial>.snap: a snapshot, and the contents that it was the first to need
                         <id>.pack: contents of dropped snapshots
    objects/ab/cdef...   large contents, a file each
    workspaces/<id>/     key, serial, lock, cache, journal (the intent log of a restore)
    leases/              a file for each snapshot that a process has mounted, locked by that process
    tmp/                 files that are being written

Locks are flock(2), so a process that dies leaves no lock behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shlex
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

from protocol.errors import os_error
from protocol.linux.regular_file import open_regular, read_prefix, sync_directory, write_atomically

STORE_VARIABLE: Final = "VFSD_STORE_DIR"
FORMAT: Final = "vfsd store 1\n"
_WORKSPACE_ID_DIGITS: Final = 24
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_OTHERS_MAY_WRITE: Final = 0o022
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
    """Whether `directory`, or its closest existing parent, is or lies below the directory (st_dev, st_ino).

    Checks each directory on the way up from the real path, so symlinks and bind mounts do not hide it.
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


class Layout:
    """The paths and the locks of the store in `directory`."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.packs = os.path.join(self.directory, "packs")
        self.objects = os.path.join(self.directory, "objects")
        self.workspaces = os.path.join(self.directory, "workspaces")
        self.tmp = os.path.join(self.directory, "tmp")
        self._format = os.path.join(self.directory, "format")
        self._generation = os.path.join(self.directory, "generation")
        self._checked = False
        self._shared_count = 0  # how many times this layout holds the shared lock
        self._counting = threading.Lock()

    def temporary(self, suffix: str) -> str:
        """The path of a new file in tmp/."""
        return os.path.join(self.tmp, f"{os.getpid():x}-{secrets.token_hex(8)}{suffix}")

    def exists(self) -> bool:
        """Whether there is a store.

        EINVAL if it has an unknown format; EPERM if other users can change it; ESTALE if it was there before and is
        gone.
        """
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
            found = read_prefix(self._format).decode("utf-8", "replace")
        except FileNotFoundError:
            return False
        if found != FORMAT:
            raise OSError(
                errno.EINVAL,
                f"the store has an unknown format ({found.strip()!r}; this vfsd knows {FORMAT.strip()!r}): use the "
                "vfsd that made it, or choose another directory with $VFSD_STORE_DIR",
                self.directory,
            )
        if stat.S_IMODE(os.stat(self.directory).st_mode) & _OTHERS_MAY_WRITE:
            advice = f"other users can change the snapshot store: run `chmod 700 {shlex.quote(self.directory)}`"
            raise OSError(errno.EPERM, advice, self.directory)
        self._checked = True
        return True

    def create(self) -> None:
        """Create the store if there is none."""
        if self.exists():
            return
        _make_durably(self.directory)
        there = set(os.listdir(self.directory))
        if there - {"packs", "objects", "workspaces", "tmp", "lock", "gate"} and not any(
            n.startswith("format") for n in there
        ):
            raise OSError(errno.EEXIST, "not a snapshot store and not empty: choose another directory", self.directory)
        os.chmod(self.directory, 0o700)
        for path in (self.packs, self.objects, self.workspaces, self.tmp):
            os.makedirs(path, mode=0o700, exist_ok=True)
        # Last: a directory without this file is not a store.
        write_atomically(self._format, FORMAT.encode(), durable=True)
        self._checked = True

    def generation(self) -> int:
        """The number of garbage collections; -1 if the file is damaged."""
        try:
            return int(read_prefix(self._generation))
        except FileNotFoundError:
            return 0
        except ValueError:
            return -1

    def dropped_packs(self) -> int:
        """The number of snapshots that were dropped since the last garbage collection."""
        since_ns = 0
        with contextlib.suppress(FileNotFoundError):
            since_ns = os.stat(self._generation).st_mtime_ns
        # Dropping a snapshot renames its file, which sets the ctime.
        with contextlib.suppress(FileNotFoundError), os.scandir(self.packs) as entries:
            return sum(entry.name.endswith(".pack") and entry.stat().st_ctime_ns > since_ns for entry in entries)
        return 0

    def begin_generation(self) -> None:
        """Begin a new generation: from now on no stat cache relies on contents that it names."""
        before = self.generation()
        # After a damaged number: one that no stat cache has.
        number = before + 1 if before >= 0 else time.time_ns()
        write_atomically(self._generation, b"%d" % number, durable=True)

    # -- workspaces ----------------------------------------------------------------------------
    @staticmethod
    def workspace_id(key: str) -> str:
        """The name of a workspace in the store."""
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:_WORKSPACE_ID_DIGITS]

    def workspace(self, key: str) -> str:
        """The path of a workspace's directory, which may not exist."""
        return os.path.join(self.workspaces, self.workspace_id(key))

    def make_workspace(self, key: str) -> str:
        """Create a workspace's directory if there is none, and return its path."""
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
        """Hold the store's lock shared: no garbage collection removes anything inside the block.

        Takes the gate first, so that a waiting collection gets its turn; but not if this layout already holds the lock,
        because the collection would wait for that holder, and the holder for the gate.
        """
        gate = os.path.join(self.directory, "gate")
        with contextlib.ExitStack() as stack:
            with contextlib.nullcontext() if self._shared_count else _locked(gate, fcntl.LOCK_SH):
                stack.enter_context(_locked(os.path.join(self.directory, "lock"), fcntl.LOCK_SH))
            with self._counting:
                self._shared_count += 1
            try:
                yield
            finally:
                with self._counting:
                    self._shared_count -= 1

    @contextlib.contextmanager
    def exclusive(self, wait_s: float) -> Iterator[None]:
        """Hold the store's lock exclusively.  EBUSY if others hold it for longer than `wait_s`.

        Holds the gate while it waits, so that no new work begins.  It opens the gate from time to time, because a
        process that already holds the lock may itself wait at the gate.  Each wait is twice as long as the one before.
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
                time.sleep(_POLL_S)  # processes that wait at the gate need a moment to take it
            yield

    @contextlib.contextmanager
    def names_lock(self, key: str) -> Iterator[None]:
        """Hold the lock for adding and removing names of a workspace's snapshots."""
        with _locked(os.path.join(self.make_workspace(key), "lock"), fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def workspace_lock(self, key: str, *, exclusive: bool) -> Iterator[None]:
        """Hold the lock for restoring a workspace (`exclusive`) or for taking its state (shared)."""
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        with _locked(os.path.join(self.make_workspace(key), "restoring"), kind):
            yield

    @contextlib.contextmanager
    def if_idle(self, key: str) -> Iterator[bool]:
        """Whether no restore of the workspace is running; then none begins before the block ends."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_locked(os.path.join(self.make_workspace(key), "restoring"), fcntl.LOCK_SH, 0))
            except BlockingIOError:
                yield False
            else:
                yield True


def _make_durably(path: str) -> None:
    """Create a directory and its missing parents, and make their entries durable."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_durably(above)
    os.makedirs(path, mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a directory that is writable but not readable
        sync_directory(above)


@contextlib.contextmanager
def _locked(path: str, kind: int, deadline: float | None = None, poll_s: float = _POLL_S) -> Iterator[None]:
    """Hold a lock.  BlockingIOError if it is not free before `deadline` (of time.monotonic())."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        if deadline is None:
            fcntl.flock(descriptor, kind)
        else:
            _lock_before(descriptor, kind, deadline, poll_s)
        yield
    finally:
        os.close(descriptor)


def _lock_before(descriptor: int, kind: int, deadline: float, poll_s: float) -> None:
    # flock(2) has no timeout, and a thread cannot send itself a signal to interrupt it.
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(poll_s)
