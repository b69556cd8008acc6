"""StoreSnapshots: those that are kept in a content-addressed store on disk, of whatever files can be read and written.

A host directory has them, and so may any backend whose files a `Source` reads and a `Target` writes: these two, and a
key by which the store knows the workspace, are all that it gives (`Stored`), beside a volume that is `Changeable`.
Snapshots outlive the daemon: who serves the same files later, under the same key, has them too.

Work is done in a thread, while the mount goes on: a snapshot holds each file as it was at one moment, and a restore
gives each its old content in one moment, but who looks meanwhile sees some of it done.  In a restore the store keeps
the safety snapshot and finds out what is to be changed; of that the volume holds on to what programs have open; the
store makes the changes, by a journal; the kernel is told.  When it fails, the safety snapshot is restored in turn.
Where that fails too, and where the daemon dies, the journal stays, and `interrupted` tells of it.

The history (`history`) is a file in the workspace's directory in the store.  It is written when the safety snapshot is
there and before the first change, under the lock that keeps other restores away.  So, when the daemon is killed:

- before that, there may be a loose safety snapshot of a state that nothing has changed;
- after that, the history names the safety snapshot.  If the journal is there too, `undo` goes to the state of that
  snapshot, wherever the history has it, and a restore of the journal's source resumes the same step.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

import trio

from protocol.diff.tree_diff import DiffCounts, changes, count
from protocol.errors import SnapshotNotFoundError
from protocol.store import (
    DirectoryTarget,
    RestoredChanges,
    RestoreRequest,
    Source,
    Store,
    StoredSnapshot,
    TreeSource,
)
from protocol.store.restore import Plan
from protocol.tree import Tree
from protocol.volume import SnapshotInfo, SnapshotKind
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import Origin, unlimited
from vfsd.daemon.snapshots.base import (
    BASE,
    SAFETY_PREFIX,
    SNAPSHOT_PREFIX,
    STAGED_PREFIX,
    UNOBSERVED,
    CallObserver,
    Dropped,
    Interrupted,
    Outcome,
    Staged,
    check_names,
    free_name,
    in_bytes,
    is_staged,
    log_expired,
    name_at,
    nothing_below,
)
from vfsd.daemon.snapshots.counted import CountedTree
from vfsd.daemon.snapshots.history import UndoHistory, expired
from vfsd.daemon.snapshots.listed import listed
from vfsd.daemon.snapshots.restoring import Changeable, Restoring, looking
from vfsd.daemon.snapshots.steps import HistoryFile, StepRun, Todo
from vfsd.machine.logs import log_failure

__all__ = ["StoreSnapshots", "Stored", "interrupted"]

P = ParamSpec("P")
T = TypeVar("T")
_logger = logging.getLogger(__name__)
# The store is nobody else's meanwhile, and afterwards nobody's stat cache is believed: not for each of them.
_COLLECT_AFTER: Final = 16
_COLLECT_WAIT_S: Final = 3.0  # new snapshots wait as long
# What an archive's content is tagged with on its way: what was to be done with it.
_RESTORING: Final = "a restore of "
_IMPORTING: Final = "an import of "


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a backend's snapshots are kept, and how its files are read and written.

    `key` names the workspace in the store: the same for the same files, whoever serves them.
    """

    store: Store
    key: str
    source: Source
    target: DirectoryTarget


def interrupted(stored: Stored) -> Interrupted | None:
    """The restore that is half done, if there is one.  Any thread."""
    found = stored.store.interrupted(stored.key)
    if found is None:
        return None
    if not is_staged(found.snapshot):
        return Interrupted(found.snapshot, found.safety, found.paths)
    try:
        what = stored.store.snapshot(stored.key, found.snapshot).tag or ""
    except FileNotFoundError:
        what = ""
    # Whoever finishes it names no paths: it goes by what the archive was to do.
    return Interrupted(found.snapshot, found.safety, (), what)


class StoreSnapshots:
    """Implements `vfsd.daemon.snapshots.base.SnapshotService` for what `served` serves, which is `volume`."""

    def __init__(self, served: MountedVolume, volume: Changeable, stored: Stored) -> None:
        self._served = served
        self._volume = volume
        self._stored = stored
        self._store = stored.store
        self._key = stored.key
        self._source = stored.source
        self._target = stored.target
        self._history = HistoryFile(stored.store, stored.key)
        self._counts: dict[tuple[int, int], DiffCounts] = {}
        self._dropped = 0  # since garbage was last collected

    @property
    def has_base(self) -> bool:
        """See `Snapshots`, as for all that follow."""
        return False

    async def interrupted(self) -> Interrupted | None:
        return await _in_thread(interrupted, self._stored)

    async def infos(self) -> Sequence[SnapshotInfo]:
        return [info for info in await self._all() if not is_staged(info.name)]

    async def _all(self) -> Sequence[StoredSnapshot]:
        return await _in_thread(self._store.snapshots, self._key)

    async def take(
        self,
        name: str | None,
        tag: str | None,
        watch: CallObserver,
        *,
        kind: SnapshotKind = "user",  # noqa: ARG002  (on disk none is dropped for lack of memory)
    ) -> SnapshotInfo:
        async with self._served.changing:
            await self._served.settle()
            name = name or free_name(SNAPSHOT_PREFIX, await self._all())
            return await self._take(name, self._source, tag, watch)

    async def _take(self, name: str, source: Source, tag: str | None, watch: CallObserver) -> StoredSnapshot:
        taken = await _in_thread(
            self._store.take,
            self._key,
            name,
            source,
            tag=tag,
            unreadable="skip",
            progress=looking(watch),
        )
        for path in taken.unreadable:
            _logger.warning("a snapshot lacks what cannot be read", extra={"operation": "snapshot", "path": path})
        return taken

    async def drop(self, names: Sequence[str]) -> Dropped:
        async with self._served.changing:
            infos = await self.infos()
            check_names(names, infos)
            steps = (await self.history()).steps_to(info for info in infos if info.name in names)
            for number, name in enumerate(names):
                try:
                    await self._drop(name)
                except OSError as error:
                    if not number:
                        raise
                    done = ", ".join(names[:number])
                    raise OSError(error.errno, f"{error.strerror or error}; already dropped: {done}", name) from error
            return Dropped(steps, await self.history())

    async def _drop(self, name: str) -> None:
        await _in_thread(self._store.drop, self._key, name)
        self._dropped += 1
        if self._dropped >= _COLLECT_AFTER:
            self._dropped = 0
            self._served.in_background(self._collect_garbage)

    async def _collect_garbage(self) -> None:
        """Free what dropped snapshots were the last to hold; after the next drop if the store is in use throughout."""
        self._dropped = 0
        try:
            report = await _in_thread(self._store.collect_garbage, wait_s=_COLLECT_WAIT_S)
        except OSError as error:
            if error.errno == errno.EBUSY:
                self._dropped = max(self._dropped, _COLLECT_AFTER - 1)
            else:
                log_failure(_logger, "store gc", error, path=self._store.directory, level=logging.WARNING)
        else:
            _logger.info("freed %d bytes of the snapshot store", report.freed_bytes, extra={"operation": "store gc"})

    async def change_counts(self) -> Mapping[str, DiffCounts]:
        return await _in_thread(self._count_changes, await self.infos())

    def _count_changes(self, infos: Sequence[SnapshotInfo]) -> dict[str, DiffCounts]:
        found = {info.name: DiffCounts(info.files + info.directories) for info in infos[:1]}
        for before, after in itertools.pairwise(infos):
            key = before.serial, after.serial
            if key not in self._counts:
                with self._store.tree(self._key, before.name) as old, self._store.tree(self._key, after.name) as new:
                    self._counts[key] = count(changes(old, new))
            found[after.name] = self._counts[key]
        return found

    # -- what changes the live state -----------------------------------------------------------------
    async def restore(self, name: str, paths: Sequence[bytes], watch: CallObserver) -> Outcome:
        if name == BASE:
            raise nothing_below()
        async with self._served.changing:
            if is_staged(name):
                return await self._finish_staged(name, watch)
            return await self._restore(name, paths, watch, Todo(f"restore {name}"))

    async def undo(self, watch: CallObserver) -> Outcome:
        async with self._served.changing:
            infos, history, half_done = await self.infos(), await self.history(), await self.interrupted()
            if half_done is None or half_done.safety is None:
                return await self._move(history, infos, history.position - 1, watch)
            serial = next((info.serial for info in infos if info.name == half_done.safety), 0)
            to = history.position_of(serial)
            if to is None:
                return await self._restore(half_done.safety, (), watch, Todo(f"restore {half_done.safety}"))
            return await self._move(history, infos, to, watch)

    async def redo(self, watch: CallObserver) -> Outcome:
        async with self._served.changing:
            history = await self.history()
            return await self._move(history, await self.infos(), history.position + 1, watch)

    async def _move(self, history: UndoHistory, infos: Sequence[SnapshotInfo], to: int, watch: CallObserver) -> Outcome:
        name = name_at(history, infos, to)
        return await self._restore(name, (), watch, Todo(history.step_between(to), to=to))

    def collect_pruned(self) -> Sequence[SnapshotInfo]:
        return ()

    async def history(self) -> UndoHistory:
        return await _in_thread(self._history.read, await self.infos())

    async def _restore(self, name: str, paths: Sequence[bytes], watch: CallObserver, todo: Todo) -> Outcome:
        await self._served.settle()
        half_done = await _in_thread(self._store.interrupted, self._key)
        safety = free_name(SAFETY_PREFIX, await self._all())
        resumes = half_done is not None and (half_done.snapshot, half_done.paths) == (name, tuple(paths))
        step = await _in_thread(
            StepRun, self._store, self._key, todo, safety, resumes=resumes, is_half_done=half_done is not None
        )
        run = Restoring(self._volume, watch)

        def planned(plan: Plan) -> None:
            found = plan.changes()
            run.planned(found, plan.touched())
            if found or todo.to is not None:
                step.begin()

        try:
            done: RestoredChanges = await _in_thread(
                self._store.restore,
                self._key,
                self._target,
                RestoreRequest(name, tuple(paths), safety=safety, safety_tag=step.tag, remove=todo.remove),
                planned=planned,
                progress=run.tell,
            )
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await self._put_back(step, error, may_put_back=half_done is None or not run.changes)
            raise
        finally:
            # The state is what it is: whoever waits, the kernel must know of it.
            with trio.CancelScope(shield=True):
                await self._served.changed(await run.settled())
        return await self._outcome(name, step, done)

    async def _outcome(self, name: str, step: StepRun, done: RestoredChanges) -> Outcome:
        """The answer after a restore that is done, whatever fails of what is left to do."""
        kept: str | None = step.safety
        gone: list[SnapshotInfo] = []
        with trio.CancelScope(shield=True):
            try:
                kept = await self._settle_step(step, is_changed=bool(done.changes))
                gone = await self._drop_expired(step, keep={name, step.safety})
            except OSError as error:
                log_failure(_logger, "keeping the history", error, path=self._store.directory, level=logging.WARNING)
        history = step.after
        undone = step.todo.step if step.todo.to is not None else None
        return Outcome(
            name, kept, listed(done.changes), _problems(done), undone, gone, history.undo_steps, history.redo_steps
        )

    async def _settle_step(self, step: StepRun, *, is_changed: bool) -> str | None:
        """Which snapshot keeps the state before; none where nothing was changed (but for the times of directories)."""
        if not is_changed and step.todo.to is None:
            await _in_thread(step.revert)
            await self._drop_if_there(step.safety)
            return None
        if await _in_thread(step.keep_earlier):
            await self._drop_if_there(step.safety)
            return step.earlier
        return step.safety

    async def _drop_expired(self, step: StepRun, keep: set[str]) -> list[SnapshotInfo]:
        half_done = await self.interrupted()
        if half_done is not None and half_done.safety is not None:
            keep = {*keep, half_done.safety}
        gone = expired(await self.infos(), step.after, time.time_ns(), keep)
        for info in gone:
            await self._drop_if_there(info.name)
        log_expired(gone)
        return gone

    async def _put_back(self, step: StepRun, error: BaseException, *, may_put_back: bool) -> None:
        """After a restore that failed: the state before, and no safety snapshot for what did not happen.

        Where that state was half of another restore, it stays, to be finished or undone.
        """
        safety = step.safety
        try:
            if may_put_back:
                half_done = await self.interrupted()
                if half_done is not None and half_done.safety == safety:
                    done = await _in_thread(
                        self._store.restore, self._key, self._target, RestoreRequest(safety, safety=None)
                    )
                    _raise_problem(done)
                await _in_thread(step.revert)
                await self._drop_if_there(safety)
        except OSError as again:
            log_failure(_logger, "restore", again, level=logging.ERROR)
            if isinstance(error, OSError):
                error.strerror = (
                    f"{error.strerror}; the state before could not be put back ({again.strerror}): "
                    "`vfsd restore --undo` tries that again"
                )

    async def _drop_if_there(self, name: str) -> None:
        try:
            await self._drop(name)
        except FileNotFoundError:
            pass

    # -- archives ------------------------------------------------------------------------------------
    @asynccontextmanager
    async def staged(self, origin: Origin, watch: CallObserver) -> AsyncIterator[Staged]:
        async with _entered(origin.opened(in_bytes(watch), True, unlimited)) as tree:
            yield await _in_thread(_counted, origin.name, tree)

    async def put(self, staged: Staged, paths: Sequence[bytes], watch: CallObserver, *, replace: bool) -> Outcome:
        # By way of the store: so it is restored as a snapshot is, and can be finished or undone after a death too.
        async with self._served.changing:
            await self._forget_staged()
            name = free_name(STAGED_PREFIX, await self._all())
            what = f"{_RESTORING if replace else _IMPORTING}{staged.name}"
            await self._take(name, TreeSource(CountedTree(staged.tree, in_bytes(watch))), what, UNOBSERVED)
            try:
                outcome = await self._restore(name, paths, watch, Todo(staged.step(replace=replace), remove=replace))
            finally:
                with trio.CancelScope(shield=True):
                    await self._forget_staged()
            return dataclasses.replace(outcome, source=staged.name)

    async def _finish_staged(self, name: str, watch: CallObserver) -> Outcome:
        """What an archive was to do when its daemon died."""
        half_done = await _in_thread(self._store.interrupted, self._key)
        if half_done is None or half_done.snapshot != name:
            raise SnapshotNotFoundError(name)
        kept = await _in_thread(self._store.snapshot, self._key, name)
        is_import = (kept.tag or "").startswith(_IMPORTING)
        outcome = await self._restore(name, half_done.paths, watch, Todo(kept.tag or name, remove=not is_import))
        await self._forget_staged()
        return outcome

    async def _forget_staged(self) -> None:
        """Drop what archives left, but for what is needed to finish.  A failure is logged: the next one tries again."""
        try:
            half_done = await self.interrupted()
            for info in await self._all():
                if is_staged(info.name) and (half_done is None or info.name != half_done.source):
                    await self._drop_if_there(info.name)
        except OSError as error:
            log_failure(_logger, "dropping an archive's content", error, path=self._store.directory)

    # -- states --------------------------------------------------------------------------------------
    @asynccontextmanager
    async def tree(self, name: str | None, watch: CallObserver = UNOBSERVED) -> AsyncIterator[Tree]:
        if name == BASE:
            raise nothing_below()
        tree: AbstractContextManager[Tree] = (
            self._store.live_tree(self._key, self._source, progress=looking(watch))
            if name is None
            else self._store.tree(self._key, name)
        )
        async with _entered(tree) as entered:
            yield entered

    @asynccontextmanager
    async def frozen(self, watch: CallObserver) -> AsyncIterator[Tree]:
        # By way of the store: a file that is written meanwhile would be neither what it was nor what it is.
        async with self._served.changing:
            await self._served.settle()
            name = free_name(STAGED_PREFIX, await self._all())
            await self._take(name, self._source, "an export", watch)
        try:
            async with self.tree(name) as tree:
                yield tree
        finally:
            with trio.CancelScope(shield=True):
                await self._drop_if_there(name)


def _raise_problem(done: RestoredChanges) -> None:
    """OSError for the first path that was not restored."""
    for problem in done.problems:
        raise OSError(errno.EIO, f"{os.fsdecode(problem.path)}: {problem.reason}")


def _problems(done: RestoredChanges) -> dict[bytes, str]:
    problems: dict[bytes, str] = {}
    for problem in done.problems:
        before = problems.get(problem.path)
        problems[problem.path] = problem.reason if before is None else f"{before}; {problem.reason}"
    return problems


def _counted(name: str, tree: Tree) -> Staged:
    files = total_bytes = 0
    for entry in tree.walk():
        files += not entry.is_dir
        total_bytes += entry.size if entry.is_file else 0
    return Staged(name, tree, files, total_bytes)


@asynccontextmanager
async def _entered(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """`manager`, entered in a thread, since that may wait for others or read a whole archive."""
    value = await _in_thread(manager.__enter__)
    error: BaseException | None = None
    try:
        yield value
    except BaseException as raised:
        error = raised
        raise
    finally:
        manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


async def _in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it in a worker thread.  The loop waits for its end even when cancelled."""
    return await trio.to_thread.run_sync(functools.partial(function, *args, **kwargs))
