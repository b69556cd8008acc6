"""Stored workspaces: where the snapshots of a workspace are in a store, and how it returns to one of them.

`Stored` names the place, `interrupted` a restore that was not completed.  `StoreRestore` is one restore of a stored
snapshot: its step in the undo history, and its changes in the mounted volume.

The undo history is a file in the workspace's directory in the store.  A restore writes it after the safety snapshot is
taken and before the first file is changed, under the lock that excludes other restores.  If the daemon is killed:

- before that, there may be a safety snapshot that belongs to no step;
- after that, the history names the safety snapshot.  If the intent log of the restore exists too, `undo` goes to the
  state of that snapshot, wherever the history has it, and a restore of the same snapshot resumes the same step.

Threading: `Step` and `HistoryFile` are used in worker threads, one call at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from protocol.diff.tree_diff import Change
from protocol.errors import shown
from protocol.linux.regular_file import open_regular, write_atomically
from protocol.store import DirectoryTarget, RestoredChanges, RestoreRequest, Source, Store
from protocol.volume_extensions import CacheInvalidation, ExternallyChangedVolume, SnapshotInfo
from vfsd.daemon.merging.lineage import MergeLog
from vfsd.daemon.snapshots.base import MERGING, OVERLAY, CallObserver, Interrupted, is_staged
from vfsd.daemon.snapshots.history import UndoHistory
from vfsd.machine.directories import journals_directory
from vfsd.machine.logs import log_failure
from vfsd.machine.runtime import read_records

_logger = logging.getLogger(__name__)
_LOCK_POLL_S: Final = 0.02
_PATHS_AT_ONCE: Final = 500  # given to the volume in one call: the mount waits for about 15 ms


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The place of a restore in the history: a new step `name`, or a move to the state at position `to`.

    Without `remove`, files that the snapshot lacks stay.
    """

    name: str
    to: int | None = None
    remove: bool = True


class HistoryFile:
    """The undo history of workspace `key` in `store`.  It is replaced atomically."""

    def __init__(self, store: Store, key: str) -> None:
        self._path = os.path.join(store.layout.workspace(key), "history")

    def raw(self) -> bytes | None:
        """The content of the file; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            return file.read()
        return None

    def read(self, infos: Sequence[SnapshotInfo]) -> UndoHistory:
        """The history, without the states whose snapshots are not among `infos`."""
        data = self.raw()
        history = None if data is None else UndoHistory.decoded(data)
        if history is None:
            history = UndoHistory.of_snapshots(infos)
        return history.among({info.serial for info in infos})

    def write(self, history: UndoHistory) -> None:
        """Not synced: if a power failure damages the file, `UndoHistory.of_snapshots` replaces it."""
        write_atomically(self._path, history.encoded(), durable=False)


def open_merges(store: Store, key: str) -> MergeLog:
    """Return what was merged into the states of workspace `key`, which is kept in a file beside the undo history."""
    path = os.path.join(store.layout.workspace(key), "merges")
    kept = None
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        kept = file.read()

    def keep(data: bytes, _with_next: bool) -> None:
        try:
            write_atomically(path, data, durable=False)
        except OSError as error:
            # The log in memory has it: only a later daemon would offer merged changes again.
            log_failure(_logger, "recording what was merged", error, path=path, level=logging.WARNING)

    return MergeLog(kept, keep)


class Step:
    """The step of one restore: the history `before` it and `after` it.

    `safety` is the name of the snapshot of the state before; `earlier` names an older snapshot that may hold the same
    state.  `resumes`: the restore continues an interrupted one, so it is no step of its own.  `is_half_done`: the live
    state is part of an interrupted restore, so it must not replace a complete state.
    """

    def __init__(
        self, store: Store, key: str, planned: PlannedStep, safety: str, *, resumes: bool, is_half_done: bool
    ) -> None:
        self.planned = planned
        self.safety = safety
        self.earlier: str | None = None
        self._store = store
        self._key = key
        self._resumes = resumes
        self._is_half_done = is_half_done
        self._file = HistoryFile(store, key)
        self._raw = self._file.raw()
        infos = [info for info in store.snapshots(key) if not is_staged(info.name)]
        self.before = self.after = self._file.read(infos)
        if not resumes and not is_half_done:
            self.earlier = next((info.name for info in infos if info.serial == self.before.here.serial), None)

    @property
    def tag(self) -> str:
        """The tag of the safety snapshot."""
        planned = self.planned
        return f"{'before' if planned.to is None or planned.to > self.before.position else 'after'} {planned.name}"

    def begin(self) -> int:
        """Write the history, and return the serial of the safety snapshot; nothing is changed yet.

        EBUSY if the daemon of a second mount of the directory wrote it.
        """
        if self._file.raw() != self._raw:
            reason = "another workspace of the same directory was restored meanwhile: try again"
            raise OSError(errno.EBUSY, reason)
        serial = self._store.snapshot(self._key, self.safety).serial
        self._write(serial)
        return serial

    def _write(self, serial: int) -> None:
        planned, before = self.planned, self.before
        if self._resumes:
            self.after = before
        elif planned.to is None:
            self.after = before.stepped(serial, planned.name)
        else:
            replaces = before.here.serial is None or not self._is_half_done
            self.after = before.moved(planned.to, serial if replaces else None)
        self._file.write(self.after)

    def revert(self) -> None:
        """Restore the history file: nothing was changed, or every change was undone."""
        self.after = self.before
        if self._file.raw() != self._raw:
            self._file.write(self.before)

    def use_earlier(self) -> bool:
        """Whether `earlier` holds the state before; the history then names it instead of `safety`."""
        if self.earlier is None:
            return False
        store, key = self._store, self._key
        with store.tree(key, self.earlier) as earlier, store.tree(key, self.safety) as safety:
            if earlier.root != safety.root:
                return False
        here = self.before.here.serial
        assert here is not None
        self._write(here)
        return True


class VolumeUpdate:
    """Pass the changes of a restore from the store's thread to the volume on the serving loop.

    `changes`: the changes of the plan.  Until there is a plan the client can cancel.
    """

    def __init__(self, volume: ExternallyChangedVolume, observer: CallObserver) -> None:
        self.changes: Sequence[Change] = ()
        self._volume = volume
        self._observer = observer
        self._is_planned = False
        self._loop = trio.lowlevel.current_trio_token()

    def plan(self, changes: Sequence[Change]) -> None:
        """Prepare the volume for `changes`.  The store's thread."""
        self._observer.commit()
        self.changes = changes
        trio.from_thread.run(self._hold, trio_token=self._loop)
        self._is_planned = True

    async def _hold(self) -> None:
        for at in range(0, len(self.changes), _PATHS_AT_ONCE):
            self._volume.hold(change.path for change in self.changes[at : at + _PATHS_AT_ONCE])
            await trio.lowlevel.checkpoint()

    async def finish(self) -> CacheInvalidation:
        """Return what to invalidate in the kernel.  Call it even if the restore failed half-way."""
        parts = []
        for at in range(0, len(self.changes), _PATHS_AT_ONCE):
            parts.append(self._volume.invalidation_of(self.changes[at : at + _PATHS_AT_ONCE]))
            await trio.lowlevel.checkpoint()
        self._volume.release()
        return CacheInvalidation(
            [change for part in parts for change in part.entries],
            [change for part in parts for change in part.inodes],
            {number: path for part in parts for number, path in part.paths.items()},
            {number: mode for part in parts for number, mode in part.modes.items()},
        )

    def progress(self, done: int, total: int) -> None:
        """Report the store's progress.  The store's thread."""
        if self._is_planned:
            self._observer.progress_nowait(done, total, "files")
        else:
            self._observer.raise_if_cancelled()
            self._observer.progress_nowait(done, 0, "files")


def scan_progress(observer: CallObserver) -> Callable[[int, int], None]:
    """Return a progress callback for a scan that reports to `observer` and stops with it."""

    def report(files: int, read_bytes: int) -> None:  # noqa: ARG001 -- the store passes it
        observer.raise_if_cancelled()
        observer.progress_nowait(files, 0, "files")

    return report


def raise_problem(done: RestoredChanges) -> None:
    """OSError for the first path that was not restored."""
    for problem in done.problems:
        raise OSError(errno.EIO, f"{os.fsdecode(problem.path)}: {problem.reason}")


def problems_of(done: RestoredChanges) -> dict[bytes, str]:
    """The reasons why paths were not restored."""
    problems: dict[bytes, str] = {}
    for problem in done.problems:
        before = problems.get(problem.path)
        problems[problem.path] = problem.reason if before is None else f"{before}; {problem.reason}"
    return problems


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a backend's snapshots are kept, and how its files are read and written.

    `key` names the workspace in the store; the same files always have the same key.
    """

    store: Store
    key: str
    source: Source
    target: DirectoryTarget


def interrupted(stored: Stored) -> Interrupted | None:
    """Return the restore that was interrupted, if there is one."""
    found = stored.store.interrupted(stored.key)
    if found is None:
        return None
    if not is_staged(found.snapshot):
        return Interrupted(found.snapshot, found.safety, found.paths)
    try:
        description = stored.store.snapshot(stored.key, found.snapshot).tag or ""
    except FileNotFoundError:
        description = ""
    # Without paths: a restore of staged content resumes with those of the intent log.
    return Interrupted(found.snapshot, found.safety, (), description)


@contextlib.contextmanager
def applying(stored: Stored, keep_going: Callable[[], None] | None) -> Iterator[str | None]:
    """Keep other frozen overlays, in any process, from being applied to the directory during the block.

    First complete an apply that was interrupted.  The value is a sentence about that apply, None if there was none.  If
    another apply runs, wait for its end, and call `keep_going` often; without `keep_going`, do nothing.  OSError.
    """
    stored.store.check_apart(stored.source.identity)
    stored.store.layout.create()
    os.makedirs(stored.store.layout.workspace(stored.key), mode=0o700, exist_ok=True)
    path = os.path.join(stored.store.layout.workspace(stored.key), "applying")
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        while not _is_locked(descriptor):
            if keep_going is None:
                yield None
                return
            keep_going()
            time.sleep(_LOCK_POLL_S)
        yield _finished(stored)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _finished(stored: Stored) -> str | None:
    """Complete an interrupted apply, and drop the staged states of applies that had not begun to write.

    Each path has its old or its new state; a path that programs changed since stays.
    """
    store, key = stored.store, stored.key
    left = {info.name: info.tag or "" for info in store.snapshots(key) if is_staged(info.name)}
    left = {name: tag for name, tag in left.items() if tag.startswith(MERGING + OVERLAY)}
    found = store.interrupted(key)
    answer = None
    if found is not None and found.snapshot in left:
        request = RestoreRequest(
            found.snapshot, found.paths, safety=None, remove=found.remove, directories=found.directories
        )
        done = store.restore(key, stored.target, request)
        problems = "".join(f"; {shown(path)}: {reason}" for path, reason in problems_of(done).items())
        answer = f"{left[found.snapshot]} was interrupted, and is complete now{problems}"
    for name in left:
        store.drop(key, name)
    return answer


def check_journals(source: Source, found: Sequence[Change]) -> None:
    """Raise OSError (EBUSY) if one of the changes is in a journal of this user's workspaces, in the directory `source`.

    A daemon appends to its journal.  An older file in its place lacks what programs have written and synced since.
    """
    identity = source.identity
    if identity is None:
        return
    for directory in {journals_directory(), *(record.journal for record in read_records() if record.journal)}:
        inside = _path_below(identity, os.path.realpath(directory))
        if inside is not None and any(change.path.startswith(inside) for change in found):
            reason = "has journals of workspaces, which would lose what was written since: name PATHs outside of it"
            raise OSError(errno.EBUSY, reason, directory)


def _path_below(identity: tuple[int, int], path: str) -> bytes | None:
    """Return the path of `path` below the directory (st_dev, st_ino), with a slash; None if it is elsewhere."""
    above, below = path, ""
    while True:
        with contextlib.suppress(OSError):
            seen = os.stat(above)
            if (seen.st_dev, seen.st_ino) == identity:
                return os.fsencode(below)
        if above == "/":
            return None
        above, name = os.path.split(above)
        below = f"{name}/{below}"
