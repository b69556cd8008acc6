"""VolumeSnapshots: snapshots that the volume itself holds.  Each change is one step on the serving loop.

So the mount shows a change whole or not at all, and a call that is cancelled before that step has changed nothing.  The
list of changes is computed in a worker thread from two trees that are opened in that same step: the state before it and
the state after it.  Later writes of programs are in neither.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import trio

from protocol.diff.tree_diff import Change, changes, entry_or_none, got_content, is_below, summary, went_back
from protocol.diff.tree_diff import count as count_changes
from protocol.errors import SnapshotNotFoundError
from protocol.linux import statx
from protocol.tree import LOST, Tree, losing
from protocol.types import ChangeCounts
from protocol.volume import AttributeChanges
from protocol.volume_durability import journaled
from protocol.volume_extensions import (
    TAG_MAX_BYTES,
    CacheInvalidation,
    OverlaidVolume,
    SnapshotableVolume,
    SnapshotInfo,
    SnapshotKind,
    overlaid,
    preparing,
    staging,
)
from vfsd.daemon.merging.lineage import MergeLog
from vfsd.daemon.merging.trees import PartialTree
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import Origin, PreparedImport, checked, read_origin
from vfsd.daemon.snapshots.base import (
    BASE,
    SAFETY_PREFIX,
    SNAPSHOT_PREFIX,
    UNOBSERVED,
    CallObserver,
    CheckState,
    CheckStep,
    Dropped,
    LiveState,
    NewState,
    Outcome,
    SnapshotService,
    Staged,
    check_names,
    free_name,
    in_bytes,
    is_fork_base,
    is_merge_base,
    log_expired,
    no_lower_layer,
    state_at,
)
from vfsd.daemon.snapshots.history import PrunedRecord, PrunedSnapshots, UndoHistory, expired, recorded
from vfsd.kernel.engines.base import repeated
from vfsd.machine.logs import log_failure
from vfsd.operations.forks import MergedState
from vfsd.operations.snapshots import CHANGES_LISTED

_logger = logging.getLogger(__name__)
_TAG_CHARACTERS: Final = TAG_MAX_BYTES // 4
_TICK_NS: Final = 10_000_000
_HISTORY_NOTE: Final = "undo"
_MERGES_NOTE: Final = "merges"


class AppliedStep:
    """An apply in progress.  The caller sets `wrote` once something is written; then `safety` names that state."""

    def __init__(self) -> None:
        self.wrote = False
        self.safety: str | None = None
        self.expired: Sequence[SnapshotInfo] = ()


class _Change(NamedTuple):
    """The effect of a change; `earlier` is a snapshot that already held the state before it."""

    counts: ChangeCounts
    changes: Sequence[Change]
    older: int = 0
    earlier: SnapshotInfo | None = None


class VolumeSnapshots(SnapshotService):
    """Implements it with the snapshots of `volume`."""

    def __init__(
        self,
        mounted: MountedVolume,
        volume: SnapshotableVolume,
        history: UndoHistory | None = None,
        merges: MergeLog | None = None,
        pruned: Iterable[PrunedRecord] = (),
    ) -> None:
        self._mounted = mounted
        self._volume = volume
        self._overlaid = overlaid(volume)
        self._journaled = journaled(volume)
        noted = () if self._journaled is None else recorded(self._journaled.notes)
        self._counts: dict[tuple[int, int], ChangeCounts] = {}  # by the serials of two snapshots
        self._pruned = PrunedSnapshots(
            lambda key, value: self._note(key, value, "recording the removal of snapshots", with_next=True),
            pruned or noted,
        )
        volume.on_pruned = self._pruned.add
        # After the last step; see `_history` for the drops since.
        self._last_history = history or self._recorded_history() or UndoHistory()
        self.merges = merges or self._recorded_merges()

    def _recorded_history(self) -> UndoHistory | None:
        """Return the history that the journal recorded; None without one.

        After a crash it may name snapshots that are gone, or lack the last step.
        """
        data = None if self._journaled is None else self._journaled.notes.get(_HISTORY_NOTE)
        if data is None:
            return None
        infos = self._volume.snapshots()
        history = UndoHistory.decoded(data) or UndoHistory.of_snapshots(infos)
        return history.cut(self._pruned.lost).among({info.serial for info in infos})

    def _recorded_merges(self) -> MergeLog:
        if self._journaled is None:
            return MergeLog()
        # After a compaction and a restart, the serials of the newest snapshots, if they were dropped, are given again.
        newest = max((info.serial for info in self._volume.snapshots()), default=0)

        def keep(data: bytes, with_next: bool) -> None:
            self._note(_MERGES_NOTE, data, "recording what was merged", with_next=with_next)

        return MergeLog(self._journaled.notes.get(_MERGES_NOTE), keep, newest)

    def _note(self, key: str, value: bytes, operation: str, *, with_next: bool = False) -> None:
        if self._journaled is not None:
            try:
                self._journaled.note(key, value, with_next=with_next)
            except OSError as error:
                # The step itself is recorded.  After a crash it may not be in the history, or be offered again.
                log_failure(_logger, operation, error, level=logging.WARNING)

    def _set_history(self, history: UndoHistory, *, with_next: bool = False) -> None:
        self._last_history = history
        if self._journaled is not None:
            self._note(_HISTORY_NOTE, history.encoded(), "recording the undo history", with_next=with_next)

    @property
    def has_base(self) -> bool:
        return self._overlaid is not None

    async def unfinished(self) -> str | None:
        if self._overlaid is None or not self._overlaid.apply_interrupted:
            return None
        return (
            "an apply into the directory below was killed: `vfsd apply` finishes it, or undoes it if it had not begun"
        )

    async def take(
        self,
        name: str | None,
        tag: str | None,
        observer: CallObserver,  # noqa: ARG002
        *,
        kind: SnapshotKind = "user",
    ) -> SnapshotInfo:
        async with self._mounted.change_lock:
            await self._mounted.write_back()
            name = name or free_name(SNAPSHOT_PREFIX, self._volume.snapshots())
            info = self._volume.take_snapshot(name, tag=tag, kind=kind)
            await self._mounted.snapshots_taken()
            if self._overlaid is not None:
                # Later changes of a file below have a later ctime.
                while 0 <= info.created_ns - statx.file_clock_ns() < _TICK_NS:
                    await trio.sleep(0.001)
            return info

    async def infos(self) -> Sequence[SnapshotInfo]:
        return self._volume.snapshots()

    async def _count_changes(self, infos: Sequence[SnapshotInfo], newest: int | None) -> dict[str, ChangeCounts]:
        found: dict[str, ChangeCounts] = {}
        for at in range(0 if newest is None else max(0, len(infos) - newest), len(infos)):
            info, before = infos[at], infos[at - 1] if at else None
            if before is None and self._overlaid is None:
                found[info.name] = ChangeCounts(info.files + info.directories - 1)  # without the root
                continue
            key = before.serial if before is not None else 0, info.serial
            counts = self._counts.get(key)
            if counts is None:
                base = self._volume.tree(before.name) if before is not None else self._lower().base_tree()
                with base as old, self._volume.tree(info.name) as new:
                    made = await trio.to_thread.run_sync(_compare, old, new, UNOBSERVED)
                counts = ChangeCounts() if made is None else made.counts
                if before is not None:  # an apply changes the base
                    self._counts[key] = counts
            found[info.name] = counts
        return found

    async def drop(self, names: Sequence[str]) -> Dropped:
        async with self._mounted.change_lock:
            infos = self._volume.snapshots()
            check_names(names, infos)
            steps = self._history().steps_to(info for info in infos if info.name in names)
            for name in names:
                self._volume.drop_snapshot(name)
            await self._mounted.snapshots_dropped()
            return Dropped(steps, self._history())

    async def history(self) -> UndoHistory:
        return self._history()

    def collect_pruned(self) -> Sequence[SnapshotInfo]:
        return self._pruned.collect()

    def pruned_records(self) -> Sequence[PrunedRecord]:
        return self._pruned.records()

    def _history(self) -> UndoHistory:
        return self._last_history.cut(self._pruned.lost).among({info.serial for info in self._volume.snapshots()})

    # -- what changes the live state -----------------------------------------------------------------
    async def restore(
        self, name: str, paths: Sequence[bytes], observer: CallObserver, *, touch: bool = False
    ) -> Outcome:
        volume = self._volume
        if name == BASE:
            lower = self._lower()
            merged = self.merges.now if paths else ()
            return await self._step(lambda: lower.discard(paths), "discard", name, observer, merged=merged, touch=touch)
        serial = volume.snapshot(name).serial  # raises if there is none
        merged = self.merges.now if paths else self.merges.at(serial)
        restore = functools.partial(volume.restore_snapshot, name, paths)
        problems = await self._lost(name, paths)
        outcome = await self._step(restore, f"restore {name}", name, observer, merged=merged, touch=touch)
        return msgspec.structs.replace(outcome, problems=problems)

    async def check_below(self) -> None:
        if self._overlaid is not None:
            await trio.to_thread.run_sync(self._overlaid.check_below)

    async def _lost(self, name: str, paths: Sequence[bytes]) -> dict[bytes, str]:
        """Return the files of a snapshot whose content a restore cannot bring back, and why."""
        if self._overlaid is None:
            return {}
        await self.check_below()
        with self._volume.tree(name) as wanted, self._volume.tree() as live:
            tree = losing(wanted)
            found = [] if tree is None else await trio.to_thread.run_sync(tree.lost_paths, live)
        return {path: LOST for path in found if not paths or any(is_below(path, top) for top in paths)}

    def _lower(self) -> OverlaidVolume:
        if self._overlaid is None:
            raise no_lower_layer()
        return self._overlaid

    @asynccontextmanager
    async def staged(self, origin: Origin, observer: CallObserver) -> AsyncIterator[Staged]:
        volume = staging(self._volume)
        if volume is None:
            async with checked(origin, observer) as staged:
                yield staged
            return
        prepared = preparing(volume)

        def reserve(count: int) -> Any:
            return None if prepared is None else trio.from_thread.run_sync(prepared.reserve_inodes, count)

        # The loop waits for the thread even if this is cancelled: the stage must outlive it.
        read = functools.partial(read_origin, origin, volume, in_bytes(observer), reserve)
        with _nothing_changed(origin.name):
            stage = await trio.to_thread.run_sync(read)
        try:
            with stage.tree() as tree:
                usage = stage.usage()
                yield Staged(origin.name, origin.label, tree, usage.files or 0, usage.size_bytes or 0)
        finally:
            stage.give_back()

    async def put(
        self, staged: Staged, paths: Sequence[bytes], observer: CallObserver, *, replace: bool, touch: bool = False
    ) -> Outcome:
        extent = {"replace": replace, "paths": paths}
        return await self._put(staged, staged.step(replace=replace), observer, extent, touch=touch)

    async def _put(
        self, staged: Staged, step: str, observer: CallObserver, extent: Mapping[str, Any], **others: Any
    ) -> Outcome:
        """Import `staged`; `extent` are arguments of `import_tree`, `others` those of `_step`."""
        volume = preparing(self._volume)
        if volume is None:
            change = functools.partial(self._volume.import_tree, staged.tree, **extent)
            with _nothing_changed(staged.name):
                return await self._step(change, step, staged.name, observer, **others)
        prepared = PreparedImport(volume, staged, extent)
        try:
            prepare = functools.partial(prepared.prepare, observer)
            with _nothing_changed(staged.name):
                return await self._step(prepared.put, step, staged.name, observer, prepare, **others)
        finally:
            await prepared.discard()

    async def _step(
        self,
        change: Callable[[], CacheInvalidation],
        step: str,
        source: str,
        observer: CallObserver,
        prepare: Callable[[], Awaitable[None]] | None = None,
        *,
        check: Callable[[], None] = lambda: None,
        merged: Sequence[MergedState] | None = None,
        made: _Change | None = None,
        touch: bool = False,
    ) -> Outcome:
        """Make `change`, as a step of the history unless it changes nothing.

        `check` may raise; nothing happens between it and the change.  `merged` is what is merged into the state after
        the change; None: what was before.  `made` is what the change does, if that is known.  With `touch`,
        files whose content it changes get the present mtime.
        """
        async with self._mounted.change_lock:
            if prepare is not None:
                await prepare()
            await self._mounted.write_back()

            def attempt() -> tuple[UndoHistory, SnapshotInfo, CacheInvalidation]:
                check()
                observer.commit()
                before = self._history()
                stepped = functools.partial(before.stepped, step=step)
                changed = self._change(change, f"before {step}", source, merged, stepped, touch=touch)
                return before, *changed

            before, safety, invalidation = await repeated(attempt)
            if not invalidation.entries and not invalidation.inodes:
                self._drop_if_there(safety.name)
                self._set_history(before)
                return self._outcome(source, None)
            made = await self._invalidate(invalidation, safety, before, observer, made)
            if not (made.counts.total or invalidation.entries):
                # Only times of directories, or ctimes: `protocol.diff.tree_diff` counts none of them as a change.
                self._set_history(before)
                self._drop_if_there(safety.name)
                return self._outcome(source, None)
            if touch:
                made = made._replace(older=0)
            if made.earlier is not None:
                self._set_history(before.stepped(made.earlier.serial, step))
            return self._outcome(source, safety, made)

    async def put_merged(
        self, new: NewState, step: str, observer: CallObserver, check: CheckState, *, touch: bool = False
    ) -> Outcome:
        def check_state() -> None:
            if self._volume.changed_since(new.before.mark):
                with self._volume.tree() as live:
                    check(live)
            else:
                check(None)

        part = PartialTree(new.tree, new.paths, new.directories)
        origin = Origin(new.source, new.source, lambda _progress, _check, _reserve: contextlib.nullcontext(part))
        # Staged, so that the step on the loop shares the content instead of copying it.
        async with self.staged(origin, observer) as staged:
            extent = {"replace": True, "paths": new.paths, "directories": new.directories}
            older = sum(map(went_back, new.changes))
            made = _Change(count_changes(new.changes), new.changes[:CHANGES_LISTED], older)
            others = {"check": check_state, "merged": new.merged, "made": made, "touch": touch}
            return await self._put(staged, step, observer, extent, **others)

    async def undo(self, observer: CallObserver, check: CheckStep = lambda _: None, *, touch: bool = False) -> Outcome:
        return await self._move(-1, observer, check, touch=touch)

    async def redo(self, observer: CallObserver, check: CheckStep = lambda _: None, *, touch: bool = False) -> Outcome:
        return await self._move(+1, observer, check, touch=touch)

    async def _move(self, by: int, observer: CallObserver, check: CheckStep, *, touch: bool) -> Outcome:
        async with self._mounted.change_lock:
            await self._mounted.write_back()
            before = self._history()
            to = before.position + by
            target = state_at(before, self._volume.snapshots(), to)
            check(target)
            source, step = target.name, before.step_between(to)
            observer.commit()
            tag = f"after {step}" if by < 0 else f"before {step}"
            merged = self.merges.at(self._volume.snapshot(source).serial)
            restore = functools.partial(self._volume.restore_snapshot, source)
            moved = functools.partial(before.moved, to)
            safety, invalidation = await repeated(
                lambda: self._change(restore, tag, source, merged, moved, touch=touch)
            )
            made = await self._invalidate(invalidation, safety, before, observer)
            if touch:
                made = made._replace(older=0)
            if made.earlier is not None:
                self._set_history(before.moved(to, None))
            problems: Mapping[bytes, str] = {}
            try:
                problems = await self._lost(source, ())
            except Exception as error:  # noqa: BLE001 -- the step is made
                log_failure(_logger, "looking for files that changed below", error, level=logging.WARNING)
            return msgspec.structs.replace(self._outcome(source, safety, made, step), problems=problems)

    def _change(
        self,
        change: Callable[[], CacheInvalidation],
        tag: str,
        source: str,
        merged: Sequence[MergedState] | None,
        history: Callable[[int], UndoHistory],
        *,
        touch: bool = False,
    ) -> tuple[SnapshotInfo, CacheInvalidation]:
        """Make `change` after taking a safety snapshot; if it fails, drop that again.

        `merged` is what is merged into the state after the change (None: what was before).  `history` returns the
        history after the change; its argument is the serial of the safety snapshot.

        The journal records all of this together: else, after a crash, a merge could take what an undo removed for
        removed by a program, and leave it out; and a safety snapshot could be there without the change.
        """
        with self._volume.keeping(source):
            safety = self._take_safety(tag)
            before, history_before = self.merges.now, self._last_history
            try:
                self._set_history(history(safety.serial), with_next=True)
                if merged is not None:
                    self.merges.record(safety.serial, merged, with_next=True)
                invalidation = self._allowed(change, safety)
                return safety, self._touched(invalidation, safety) if touch else invalidation
            except BaseException:
                self.merges.record(safety.serial, before, with_next=True)
                self._set_history(history_before, with_next=True)
                self._drop_if_there(safety.name)
                raise

    def _touched(self, invalidation: CacheInvalidation, safety: SnapshotInfo) -> CacheInvalidation:
        """Give the files whose content changed since `safety` the present mtime; return what is to be invalidated."""
        volume = self._volume
        try:
            with volume.keeping(safety.name), volume.tree(safety.name) as old, volume.tree() as new:
                more = self._touch(old, new, ())
        except OSError as error:
            log_failure(_logger, "touching what was restored", error, level=logging.WARNING)
            return invalidation
        known = {change.inode for change in invalidation.inodes}
        return CacheInvalidation(
            invalidation.entries,
            [*invalidation.inodes, *(change for change in more.inodes if change.inode not in known)],
            {**more.paths, **invalidation.paths},
            {**more.modes, **invalidation.modes},
        )

    def _touch(self, old: Tree, new: Tree, paths: Sequence[bytes]) -> CacheInvalidation:
        """Give the files of the live state `new` whose content is not that in `old` one present mtime."""
        found = {change.new.inode for change in changes(old, new, paths=paths) if got_content(change) and change.new}
        now = time.time_ns()
        with self._volume.changes() as made:
            for number in found:
                ctime_ns = None if self._overlaid is None else self._overlaid.unchanged_ctime(number)
                self._volume.setattr(number, AttributeChanges(mtime_ns=now, ctime_ns=ctime_ns))
        return made.invalidation

    async def touch_changed(self, paths: Sequence[bytes]) -> None:
        """Give the files whose content is not that of the lower layer one present mtime, before they are applied."""
        with self._lower().base_tree() as base, self._volume.tree() as live:
            invalidation = self._touch(base, live, paths)
        await self._mounted.invalidate(invalidation)

    def _allowed(self, change: Callable[[], CacheInvalidation], safety: SnapshotInfo) -> CacheInvalidation:
        """Make `change`; undo it and raise DeniedByPolicyError if the policy forbids it.

        Both in one step, so that no program sees it.
        """
        policy = self._mounted.policy
        if policy is None:
            return change()
        with self._volume.keeping(safety.name):
            invalidation = change()
            try:
                with self._volume.tree(safety.name) as old, self._volume.tree() as new:
                    policy.check_trees(old, new, safety.tag or "")
            except BaseException:
                self._volume.restore_snapshot(safety.name)
                raise
            finally:
                policy.rules.names_changed()
        return invalidation

    async def _invalidate(
        self,
        invalidation: CacheInvalidation,
        safety: SnapshotInfo,
        before: UndoHistory,
        observer: CallObserver,
        known: _Change | None = None,
    ) -> _Change:
        """Invalidate the kernel's caches after a change, and find out what the change did, unless that is `known`.

        Call it directly after the change: the loop must not have served a request in between.
        """
        volume = self._volume
        infos = [info for info in volume.snapshots() if info.serial == before.here.serial]
        with ExitStack() as stack:
            after = stack.enter_context(volume.tree())
            try:
                old = stack.enter_context(volume.tree(safety.name))
            except SnapshotNotFoundError:  # the change itself pruned it
                await self._mounted.invalidate(invalidation)
                return _estimate(invalidation)
            await self._mounted.invalidate(invalidation)
            made = known or await trio.to_thread.run_sync(_compare, old, after, observer) or _estimate(invalidation)
            for info in infos:
                with volume.tree(info.name) as earlier:
                    if await trio.to_thread.run_sync(_is_same, earlier, old):
                        return made._replace(earlier=info)
        return made

    def _outcome(
        self, source: str, safety: SnapshotInfo | None, made: _Change | None = None, step: str | None = None
    ) -> Outcome:
        """Build the answer, and drop the safety snapshots that are not needed: expired ones, and a second copy."""
        self.merges.drop_events(min((info.serial for info in self._volume.snapshots()), default=0))
        if made is not None and made.earlier is not None and safety is not None:
            self._drop_if_there(safety.name)
            safety = made.earlier
        history = self._history()
        self._set_history(history)
        self._pruned.cut()
        kept = None if safety is None else safety.name
        gone = self._drop_expired({source, kept}) if kept is not None else []
        counts, listed = (ChangeCounts(), ()) if made is None else (made.counts, made.changes)
        older = 0 if made is None else made.older
        return Outcome(source, kept, counts, listed, {}, step, gone, history.undo_steps, history.redo_steps, older)

    def _drop_expired(self, keep: Collection[str | None]) -> list[SnapshotInfo]:
        names = {name for name in keep if name is not None}
        gone = expired(self._volume.snapshots(), self._last_history, time.time_ns(), names)
        needed = self.needed_by_others(gone)
        gone = [info for info in gone if info.name not in needed]
        for info in gone:
            self._drop_if_there(info.name)
        log_expired(gone)
        return gone

    def _take_safety(self, tag: str) -> SnapshotInfo:
        name = free_name(SAFETY_PREFIX, self._volume.snapshots())
        return self._volume.take_snapshot(name, tag=tag[:_TAG_CHARACTERS], kind="safety")

    def _drop_if_there(self, name: str) -> None:
        """Drop a safety snapshot that the volume may have pruned already."""
        with contextlib.suppress(SnapshotNotFoundError):
            self._volume.drop_snapshot(name)

    @contextmanager
    def applying(self, step: str) -> Iterator[AppliedStep]:
        """Inside the block the caller writes the present state to the lower layer, and holds `change_lock`.

        If it wrote something, that is a step of the history.  Undoing it restores the state that was written; it does
        not change the lower layer.
        """
        run = AppliedStep()
        before = self._history()
        safety = self._take_safety(f"before {step}")
        try:
            yield run
        finally:
            if run.wrote:
                self._set_history(before.stepped(safety.serial, step))
                run.safety, run.expired = safety.name, self._outcome("", safety).expired
            else:
                self._drop_if_there(safety.name)

    # -- states --------------------------------------------------------------------------------------
    @asynccontextmanager
    async def tree(self, name: str | None, observer: CallObserver) -> AsyncIterator[Tree]:  # noqa: ARG002
        if name == BASE:
            opened = self._lower().base_tree()
        elif name is not None and self._overlaid is not None and self._is_of_merges(name):
            opened = self._overlaid.following_tree(name)
        else:
            opened = self._volume.tree(name)
        with opened as tree:
            yield self._mounted.shown(tree)

    def _is_of_merges(self, name: str) -> bool:
        info = self._volume.snapshot(name)
        return is_fork_base(info) or is_merge_base(info)

    @asynccontextmanager
    async def frozen(self, observer: CallObserver) -> AsyncIterator[LiveState]:  # noqa: ARG002
        await self._mounted.write_back()
        mark = self._volume.mark()
        with self._volume.tree() as tree:
            yield LiveState(self._mounted.shown(tree), mark)

    @asynccontextmanager
    async def to_save(self, name: str | None, observer: CallObserver) -> AsyncIterator[Tree]:
        if name is None:
            async with self.frozen(observer) as state:
                yield state.tree
        else:
            async with self.tree(name, observer) as tree:
                yield tree


@contextmanager
def _nothing_changed(source: str) -> Iterator[None]:
    """Name in ENOSPC errors the `source` of the content, and that the workspace is as before."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, f"{error.strerror}; nothing was changed", source) from error


def _compare(old: Tree, new: Tree, observer: CallObserver) -> _Change | None:
    """Compare `old` with `new`; None if that fails.  Any thread.

    Raises only what `observer` raises when the client disconnects: the change is made.
    """
    for contents in (True, False):
        try:
            counts, first, older = summary(
                old, new, CHANGES_LISTED, contents=contents, keep_going=observer.raise_if_cancelled
            )
            return _Change(counts, first, older)
        except Exception as error:  # noqa: BLE001 -- see above
            observer.raise_if_cancelled()
            # For example, a file below an overlay that other programs change.  The second try compares sizes and times.
            log_failure(_logger, "listing what a restore changed", error, level=logging.WARNING)
    return None


def _estimate(invalidation: CacheInvalidation) -> _Change:
    """Approximate the counts by the invalidated entries: the contents of added and removed directories are missing."""
    added = sum(not change.old for change in invalidation.entries)
    removed = sum(not change.new for change in invalidation.entries)
    modified = len(invalidation.entries) - added - removed + len(invalidation.inodes)
    return _Change(ChangeCounts(added, modified, removed), ())


def _is_same(old: Tree, new: Tree) -> bool:
    """Whether two states of one volume are equal in everything, links, inode numbers and times included."""
    try:
        touched = new.touched(old)
        if touched is None or any(entry_or_none(old, path) != entry_or_none(new, path) for path in touched):
            return False
        return next(changes(old, new), None) is None
    except OSError as error:
        log_failure(_logger, "comparing two states", error, level=logging.WARNING)
        return False
