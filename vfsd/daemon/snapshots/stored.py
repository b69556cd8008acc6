"""StoreSnapshots: snapshots in a content-addressed store on disk, of files that a `Source` reads and a `Target` writes.

Any backend can have them: it supplies a source, a target and a key that names the workspace in the store (`Stored`),
and its volume declares `external_changes`.  A later daemon with the same key has the same snapshots.

The work is done in worker threads while the mount answers.  A snapshot holds each file as it was at one moment, and a
restore replaces each file atomically, but a program can observe a restore half-way.  In a restore the store keeps the
safety snapshot and plans the changes; the volume keeps the files open that programs have open; the store makes the
changes under its intent log; the kernel's caches are invalidated.  If the restore fails, the safety snapshot is
restored.  If that fails too, or the daemon dies, the log remains, and `interrupted` reports it.
"""

from __future__ import annotations

import errno
import itertools
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from typing import Final

import msgspec
import trio

from protocol.diff.tree_diff import changes, count, went_back
from protocol.errors import SnapshotNotFoundError
from protocol.store import (
    RestoredChanges,
    RestoreRequest,
    Source,
    TreeSource,
)
from protocol.store.restore import Plan
from protocol.tree import Tree
from protocol.types import ChangeCounts
from protocol.volume_extensions import ExternallyChangedVolume, SnapshotInfo, SnapshotKind
from vfsd.daemon.merging.trees import PartialTree
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import CountedTree, Origin, checked
from vfsd.daemon.snapshots.base import (
    BASE,
    MERGING,
    SAFETY_PREFIX,
    SNAPSHOT_PREFIX,
    STAGED_PREFIX,
    UNOBSERVED,
    CallObserver,
    CheckState,
    CheckStep,
    Dropped,
    Interrupted,
    LiveState,
    NewState,
    Outcome,
    SnapshotService,
    Staged,
    StoredState,
    check_names,
    entered,
    free_name,
    in_bytes,
    in_thread,
    is_staged,
    log_expired,
    no_lower_layer,
    state_at,
)
from vfsd.daemon.snapshots.bases import drop_unused_bases
from vfsd.daemon.snapshots.history import UndoHistory, expired
from vfsd.daemon.snapshots.store_restore import (
    HistoryFile,
    PlannedStep,
    Step,
    Stored,
    VolumeUpdate,
    check_journals,
    interrupted,
    open_merges,
    problems_of,
    raise_problem,
    scan_progress,
)
from vfsd.machine.logs import log_failure
from vfsd.operations.forks import MergedState
from vfsd.operations.snapshots import CHANGES_LISTED

_logger = logging.getLogger(__name__)
# Garbage collection locks the store, and makes the next snapshot read every file: so not after each drop.
_COLLECT_AFTER: Final = 16
_COLLECT_WAIT_S: Final = 3.0  # new snapshots wait as long
# The tag of an archive's staged content says what it is for.
_RESTORING: Final = "a restore of "
_IMPORTING: Final = "an import of "


class StoreSnapshots(SnapshotService):
    """Implements it with the snapshots in a store."""

    def __init__(self, mounted: MountedVolume, volume: ExternallyChangedVolume, stored: Stored) -> None:
        self.merges = open_merges(stored.store, stored.key)
        self._mounted = mounted
        self._volume = volume
        self._stored = stored
        self._store = stored.store
        self._key = stored.key
        self._source = stored.source
        self._target = stored.target
        self._history = HistoryFile(stored.store, stored.key)
        self._counts: dict[tuple[int, int], ChangeCounts] = {}
        self._dropped = 0  # since the last garbage collection

    async def interrupted(self) -> Interrupted | None:
        return await in_thread(interrupted, self._stored)

    async def unfinished(self) -> str | None:
        found = await self.interrupted()
        return None if found is None else found.describe()

    async def infos(self) -> Sequence[SnapshotInfo]:
        return [info for info in await self._all() if not is_staged(info.name)]

    async def _all(self) -> Sequence[SnapshotInfo]:
        return await in_thread(self._store.snapshots, self._key)

    async def take(
        self,
        name: str | None,
        tag: str | None,
        observer: CallObserver,
        *,
        kind: SnapshotKind = "user",
    ) -> SnapshotInfo:
        async with self._mounted.change_lock:
            await self._mounted.write_back()
            name = name or free_name(SNAPSHOT_PREFIX, await self._all())
            info = await self._take(name, self._source, tag, observer, kind)
            await self._mounted.snapshots_taken()
            return info

    async def _take(
        self, name: str, source: Source, tag: str | None, observer: CallObserver, kind: SnapshotKind = "user"
    ) -> SnapshotInfo:
        taken = await in_thread(
            self._store.take,
            self._key,
            name,
            source,
            tag=tag,
            kind=kind,
            unreadable="skip",
            progress=scan_progress(observer),
        )
        for path in taken.unreadable:
            _logger.warning("a snapshot lacks an unreadable path", extra={"operation": "snapshot", "path": path})
        return taken

    async def drop(self, names: Sequence[str]) -> Dropped:
        async with self._mounted.change_lock:
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
            await self._mounted.snapshots_dropped()
            return Dropped(steps, await self.history())

    async def _drop(self, name: str) -> None:
        await in_thread(self._store.drop, self._key, name)
        self._note_dropped()

    def _note_dropped(self) -> None:
        self._dropped += 1
        if self._dropped >= _COLLECT_AFTER:
            self._dropped = 0
            self._mounted.in_background(self._collect_garbage)

    async def _collect_garbage(self) -> None:
        """Free the objects that only dropped snapshots used; if the store stays busy, try again after the next drop."""
        self._dropped = 0
        try:
            report = await in_thread(self._store.collect_garbage, wait_s=_COLLECT_WAIT_S)
        except OSError as error:
            if error.errno == errno.EBUSY:
                self._dropped = max(self._dropped, _COLLECT_AFTER - 1)
            else:
                log_failure(_logger, "store gc", error, path=self._store.directory, level=logging.WARNING)
        else:
            _logger.info("freed %d bytes of the snapshot store", report.freed_bytes, extra={"operation": "store gc"})

    async def drop_unused_bases(self, keep: Collection[str] = ()) -> None:
        for _ in await in_thread(drop_unused_bases, self._store, self._key, keep):
            self._note_dropped()

    async def _count_changes(self, infos: Sequence[SnapshotInfo], newest: int | None) -> Mapping[str, ChangeCounts]:
        return await in_thread(self._counted, infos, newest)

    def _counted(self, infos: Sequence[SnapshotInfo], newest: int | None) -> dict[str, ChangeCounts]:
        found: dict[str, ChangeCounts] = {}
        if newest is None or newest >= len(infos):
            found = {info.name: ChangeCounts(info.files + info.directories) for info in infos[:1]}
        else:
            infos = infos[len(infos) - newest - 1 :]  # with the one that the first is compared with
        for before, after in itertools.pairwise(infos):
            key = before.serial, after.serial
            if key not in self._counts:
                with self._store.tree(self._key, before.name) as old, self._store.tree(self._key, after.name) as new:
                    self._counts[key] = count(changes(old, new))
            found[after.name] = self._counts[key]
        return found

    # -- what changes the live state -----------------------------------------------------------------
    async def restore(
        self, name: str, paths: Sequence[bytes], observer: CallObserver, *, touch: bool = False
    ) -> Outcome:
        if name == BASE:
            raise no_lower_layer()
        async with self._mounted.change_lock:
            if is_staged(name):
                return await self._resume_staged(name, observer)
            merged = None if paths else await self._merged_into(name)
            planned = PlannedStep(f"restore {name}")
            return await self._restore(name, paths, observer, planned, merged=merged, touch=touch)

    async def _merged_into(self, name: str) -> Sequence[MergedState]:
        """Return what was merged into snapshot `name`."""
        return self.merges.at((await in_thread(self._store.snapshot, self._key, name)).serial)

    async def undo(self, observer: CallObserver, check: CheckStep = lambda _: None, *, touch: bool = False) -> Outcome:
        async with self._mounted.change_lock:
            infos, history, half_done = await self.infos(), await self.history(), await self.interrupted()
            if half_done is None or half_done.safety is None:
                return await self._move(history, infos, history.position - 1, observer, check, touch=touch)
            before = next((info for info in infos if info.name == half_done.safety), None)
            to = history.position_of(0 if before is None else before.serial)
            if to is None:
                if before is not None:
                    check(before)
                planned = PlannedStep(f"restore {half_done.safety}")
                return await self._restore(half_done.safety, (), observer, planned, touch=touch)
            return await self._move(history, infos, to, observer, check, touch=touch)

    async def redo(self, observer: CallObserver, check: CheckStep = lambda _: None, *, touch: bool = False) -> Outcome:
        async with self._mounted.change_lock:
            history = await self.history()
            return await self._move(history, await self.infos(), history.position + 1, observer, check, touch=touch)

    async def _move(
        self,
        history: UndoHistory,
        infos: Sequence[SnapshotInfo],
        to: int,
        observer: CallObserver,
        check: CheckStep,
        *,
        touch: bool,
    ) -> Outcome:
        target = state_at(history, infos, to)
        check(target)
        planned = PlannedStep(history.step_between(to), to=to)
        merged = await self._merged_into(target.name)
        return await self._restore(target.name, (), observer, planned, merged=merged, touch=touch)

    async def history(self) -> UndoHistory:
        return await in_thread(self._history.read, await self.infos())

    async def _restore(
        self,
        name: str,
        paths: Sequence[bytes],
        observer: CallObserver,
        planned: PlannedStep,
        *,
        directories: Sequence[bytes] | None = None,
        check: CheckState = lambda _: None,
        merged: Sequence[MergedState] | None = None,
        touch: bool = False,
    ) -> Outcome:
        """Restore snapshot `name`; `merged` is what is merged into the state after it, None: what was before.

        The merged states are recorded before the first change: if the daemon dies, the restore is completed or undone.
        """
        merged_before = self.merges.now
        await self._mounted.write_back()
        half_done = await in_thread(self._store.interrupted, self._key)
        safety = free_name(SAFETY_PREFIX, await self._all())
        resumes = half_done is not None and (half_done.snapshot, half_done.paths) == (name, tuple(paths))
        is_half_done = half_done is not None
        step = await in_thread(
            Step, self._store, self._key, planned, safety, resumes=resumes, is_half_done=is_half_done
        )
        update = VolumeUpdate(self._volume, observer)
        request = RestoreRequest(
            name,
            tuple(paths),
            safety=safety,
            safety_tag=step.tag,
            remove=planned.remove,
            directories=None if directories is None else tuple(directories),
            touch_ns=time.time_ns() if touch else None,
        )

        def begin(plan: Plan) -> None:
            check(plan.live)
            found = plan.changes()
            check_journals(self._source, found)
            if self._mounted.policy is not None:
                self._mounted.policy.check(found, step.planned.name)
            update.plan([*found, *plan.touched()])
            if found or planned.to is not None:
                serial = step.begin()
                if merged is not None:
                    self.merges.record(serial, merged)

        try:
            done: RestoredChanges = await in_thread(
                self._store.restore,
                self._key,
                self._target,
                request,
                planned=begin,
                progress=update.progress,
            )
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await self._roll_back(step, error, may_restore=not is_half_done or not update.changes)
                await self.note_merged(merged_before)
            raise
        finally:
            # Even if the restore failed or was cancelled: some files may have changed.
            if self._mounted.policy is not None:
                self._mounted.policy.rules.names_changed()
            with trio.CancelScope(shield=True):
                await self._mounted.invalidate(await update.finish(), [change.path for change in update.changes])
        outcome = await self._outcome(name, step, done)
        return msgspec.structs.replace(outcome, older=0) if touch else outcome

    async def _outcome(self, name: str, step: Step, done: RestoredChanges) -> Outcome:
        """Build the answer after a restore.  Errors in the work that remains are logged."""
        kept: str | None = step.safety
        gone: list[SnapshotInfo] = []
        with trio.CancelScope(shield=True):
            try:
                kept = await self._kept_state(step, is_changed=bool(done.changes))
                gone = await self._drop_expired(step, keep={name, step.safety})
            except OSError as error:
                log_failure(_logger, "keeping the history", error, path=self._store.directory, level=logging.WARNING)
        history, planned = step.after, step.planned
        return Outcome(
            source=name,
            safety=kept,
            counts=count(done.changes),
            changes=done.changes[:CHANGES_LISTED],
            problems=problems_of(done),
            step=planned.name if planned.to is not None else None,
            expired=gone,
            undo_steps=history.undo_steps,
            redo_steps=history.redo_steps,
            older=sum(map(went_back, done.changes)),
        )

    async def _kept_state(self, step: Step, *, is_changed: bool) -> str | None:
        """Return the snapshot that holds the state before; None if nothing changed but the times of directories."""
        if not is_changed and step.planned.to is None:
            await in_thread(step.revert)
            await self._drop_if_there(step.safety)
            return None
        if await in_thread(step.use_earlier):
            await self._drop_if_there(step.safety)
            return step.earlier
        return step.safety

    async def _drop_expired(self, step: Step, keep: set[str]) -> list[SnapshotInfo]:
        half_done = await self.interrupted()
        if half_done is not None and half_done.safety is not None:
            keep = {*keep, half_done.safety}
        gone = expired(await self.infos(), step.after, time.time_ns(), keep)
        needed = await in_thread(self.needed_by_others, gone)
        gone = [info for info in gone if info.name not in needed]
        for info in gone:
            await self._drop_if_there(info.name)
        log_expired(gone)
        return gone

    async def _roll_back(self, step: Step, error: BaseException, *, may_restore: bool) -> None:
        """After a failed restore, go back to the state before it and drop its safety snapshot.

        If the state before was part of another, interrupted restore, leave everything, to be completed or undone.
        """
        safety = step.safety
        try:
            if may_restore:
                half_done = await self.interrupted()
                if half_done is not None and half_done.safety == safety:
                    request = RestoreRequest(safety, safety=None)
                    done = await in_thread(self._store.restore, self._key, self._target, request)
                    raise_problem(done)
                await in_thread(step.revert)
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
    def staged(self, origin: Origin, observer: CallObserver) -> AbstractAsyncContextManager[Staged]:
        return checked(origin, observer)

    async def put(
        self, staged: Staged, paths: Sequence[bytes], observer: CallObserver, *, replace: bool, touch: bool = False
    ) -> Outcome:
        # Through the store, so that it is restored like a snapshot, and can be completed or undone after a crash.
        async with self._mounted.change_lock:
            await self._drop_staged()
            name = free_name(STAGED_PREFIX, await self._all())
            tag = f"{_RESTORING if replace else _IMPORTING}{staged.name}"
            await self._take(name, TreeSource(CountedTree(staged.tree, in_bytes(observer))), tag, UNOBSERVED)
            planned = PlannedStep(staged.step(replace=replace), remove=replace)
            try:
                outcome = await self._restore(name, paths, observer, planned, touch=touch)
            finally:
                with trio.CancelScope(shield=True):
                    await self._drop_staged()
            return msgspec.structs.replace(outcome, source=staged.name)

    async def put_merged(
        self, new: NewState, step: str, observer: CallObserver, check: CheckState, *, touch: bool = False
    ) -> Outcome:
        # Through the store, as in `put`.
        before = self.merges.now
        async with self._mounted.change_lock:
            name = free_name(STAGED_PREFIX, await self._all())
            source = TreeSource(PartialTree(new.tree, new.paths, new.directories))
            await self._take(name, source, f"{MERGING}{new.source}", observer)
            try:
                outcome = await self._restore(
                    name,
                    new.paths,
                    observer,
                    PlannedStep(step),
                    directories=new.directories,
                    check=check,
                    merged=new.merged,
                    touch=touch,
                )
            finally:
                with trio.CancelScope(shield=True):
                    await self._drop_staged()
            if outcome.problems:  # what is missing comes with the next merge
                await self.note_merged(before)
            self.merges.drop_events(min((info.serial for info in await self._all()), default=0))
            return msgspec.structs.replace(outcome, source=new.source)

    async def _resume_staged(self, name: str, observer: CallObserver) -> Outcome:
        """Complete the import or restore of an archive that was interrupted when its daemon died."""
        half_done = await in_thread(self._store.interrupted, self._key)
        if half_done is None or half_done.snapshot != name:
            raise SnapshotNotFoundError(name)
        kept = await in_thread(self._store.snapshot, self._key, name)
        is_import = (kept.tag or "").startswith(_IMPORTING)
        planned = PlannedStep(kept.tag or name, remove=not is_import)
        outcome = await self._restore(name, half_done.paths, observer, planned, directories=half_done.directories)
        await self._drop_staged()
        return outcome

    async def _drop_staged(self) -> None:
        """Drop the content of archives, unless an interrupted restore needs it.  Failures are logged."""
        try:
            half_done = await self.interrupted()
            for info in await self._all():
                if is_staged(info.name) and (half_done is None or info.name != half_done.source):
                    await self._drop_if_there(info.name)
        except OSError as error:
            log_failure(_logger, "dropping an archive's content", error, path=self._store.directory)

    # -- states --------------------------------------------------------------------------------------
    @asynccontextmanager
    async def tree(self, name: str | None, observer: CallObserver) -> AsyncIterator[Tree]:
        if name == BASE:
            raise no_lower_layer()
        if name is None:
            self._mounted.check_attached()
        tree: AbstractContextManager[Tree] = (
            self._store.live_tree(self._key, self._source, progress=scan_progress(observer))
            if name is None
            else self._store.tree(self._key, name)
        )
        async with entered(tree) as opened:
            yield self._mounted.shown(opened)

    async def stored_state(self, name: str | None, observer: CallObserver) -> StoredState | None:
        if self._mounted.policy is not None and self._mounted.policy.rules.hiding:
            return None  # what is stored has what is hidden, too
        if name is not None:
            await in_thread(self._store.snapshot, self._key, name)
            return StoredState(self._store.directory, self._key, name)
        name = await self._take_temporary(observer)
        return StoredState(self._store.directory, self._key, name, is_temporary=True)

    async def _take_temporary(self, observer: CallObserver, tag: str | None = None) -> str:
        """Take a snapshot of the live state that is not listed; return its name.  The caller drops it."""
        async with self._mounted.change_lock:
            await self._mounted.write_back()
            name = free_name(STAGED_PREFIX, await self._all())
            await self._take(name, self._source, tag, observer)
        return name

    @asynccontextmanager
    async def frozen(self, observer: CallObserver) -> AsyncIterator[LiveState]:
        async with self._staged(observer) as name, self.tree(name, observer) as tree:
            await self._drop_if_there(name)  # the tree stays readable, and a process that is killed leaves no name
            yield LiveState(tree)

    @asynccontextmanager
    async def to_save(self, name: str | None, observer: CallObserver) -> AsyncIterator[Tree]:
        async with AsyncExitStack() as stack:
            given = await stack.enter_async_context(self._staged(observer)) if name is None else name
            tree = await stack.enter_async_context(entered(self._store.numbered_tree(self._key, given)))
            yield self._mounted.shown(tree)

    @asynccontextmanager
    async def _staged(self, observer: CallObserver) -> AsyncIterator[str]:
        """Take a snapshot of the live state, which exists inside the block."""
        # Through the store: a file that is written while it is read directly may be a mix of old and new content.
        name = await self._take_temporary(observer, "an export")
        try:
            yield name
        finally:
            with trio.CancelScope(shield=True):
                await self._drop_if_there(name)
