"""`merge` and `adopt`: take over the changes of another workspace that has a state in common with this one.

1. The other daemon keeps its state and sends its changes (`vfsd.daemon.merging.other`).
2. A worker thread computes the new state from immutable trees, while the mount answers.
3. One step puts it in place, as a restore does, unless a program has changed one of the paths since: then everything
   begins again with the new state.  For a volume with snapshots of its own, that is a step on the serving loop.  Else
   a thread changes the files, each atomically; a path that a program changes meanwhile is left, and reported.

Nothing is changed before the third step, in neither workspace, except that the other one has a snapshot more.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import trio

from protocol.diff.tree_diff import Change, changes, count, entry_or_none, has_links, is_at_or_below, outermost
from protocol.errors import shown
from protocol.merge.outcome import Conflict
from protocol.tree import Tree
from protocol.types import ChangeCounts
from protocol.values import Value
from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.control.handlers.changes import change_record, expired_records
from vfsd.daemon.control.handlers.merge_source import MergeSource
from vfsd.daemon.control.handlers.parameters import tree_paths
from vfsd.daemon.control.handlers.repositories import fetched_repositories, planned_repositories
from vfsd.daemon.merging.delta import differences
from vfsd.daemon.merging.layered_tree import LayeredTree
from vfsd.daemon.merging.lineage import MergedState, with_merged
from vfsd.daemon.merging.other import Other, OtherWorkspaces
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import LiveState, NewState, Outcome, SnapshotService
from vfsd.daemon.snapshots.threads import in_answer_thread, in_thread
from vfsd.machine.runtime import read_record
from vfsd.operations.declaration import Peer, RepositoryRecord
from vfsd.operations.merge import AdoptParams, ConflictRecord, MergeParams, MergeResult
from vfsd.operations.snapshots import CHANGES_LISTED
from vfsd.wire.messages import wire_path
from vfsd.wire.options import WorkspaceOptions

_ATTEMPTS: Final = 5  # while programs change paths that are merged
_PATHS_SHOWN: Final = 3
_LOST: Final = "changed here and not in the other workspace, so it would be lost"


class Plan(Value):
    """A new state: `tree`, how it differs from the present one, and the conflicts.

    `refuses`: the conflicts prevent it.  `repositories`: those that both workspaces changed, and that stay as they are.
    `marked`: the paths that may have conflict markers.
    """

    tree: Tree
    changes: Sequence[Change]
    conflicts: Sequence[ConflictRecord]
    refuses: bool
    repositories: Sequence[bytes] = ()
    marked: Sequence[bytes] = ()


class _ChangedMeanwhileError(Exception):
    """Programs changed paths that are about to be replaced."""

    def __init__(self, paths: Sequence[bytes]) -> None:
        super().__init__(paths)
        self.paths = paths


class MergeMethods:
    """The side of one workspace that takes over changes."""

    def __init__(
        self,
        mounted: MountedVolume,
        source: MergeSource,
        options: WorkspaceOptions,
        others: OtherWorkspaces,
    ) -> None:
        self._mounted = mounted
        self._source = source
        self._options = options
        self._others = others
        self._one_at_a_time = trio.Lock()

    @property
    def _snapshots(self) -> SnapshotService:
        return self._source.snapshots

    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by method name."""
        return {"merge": self._merge, "adopt": self._adopt}

    async def _merge(self, params: MergeParams, call: CallContext) -> MergeResult:
        # Start-up: the first call on the control socket does not wait for this import.
        from protocol.merge.three_way import merge  # noqa: PLC0415

        paths = await tree_paths(params.paths)
        is_whole = not paths or b"" in paths
        keep_going = _keep_going(call)

        def plan(other: Other, ours: Tree) -> Plan:
            done = merge(other.base, ours, other.theirs, paths=paths, policy=params.conflicts, keep_going=keep_going)
            refuses = params.conflicts == "fail" and bool(done.conflicts)
            conflicts = list(map(_record, done.conflicts))
            repositories = done.repositories if not is_whole else _with_missing(done.repositories, other, ours)
            has_markers = params.conflicts == "markers"
            marked = [each.path for each in done.conflicts if has_markers and not each.kept_as]
            return Plan(done.tree, done.changes, conflicts, refuses, repositories, marked)

        step = f"merge {params.fork.name}"
        # What was merged of some paths only is not recorded: the next merge compares all with the same base.
        how = {"dry_run": params.dry_run, "touch": params.touch, "is_whole": is_whole}
        return await self._run(params.fork, plan, step, call, **how)

    async def _adopt(self, params: AdoptParams, call: CallContext) -> MergeResult:
        from protocol.merge.repositories import Repositories  # noqa: PLC0415 (as above)
        from protocol.merge.sides import Trees  # noqa: PLC0415

        keep_going = _keep_going(call)

        def plan(other: Other, ours: Tree) -> Plan:
            found = [
                Change(one.path, one.kind or "metadata", one.old, one.new)
                for one in differences(ours, other.theirs, keep_going)
                # A file with one name that has only another inode number is the same file.
                if one.kind is not None or has_links(one.old) or has_links(one.new)
            ]
            replaced = {change.path for change in found}
            # Without a base nothing says what was changed here: `force` was given.
            changed = changes(other.base, ours) if other.bases is not None else ()
            repositories = Repositories(Trees(other.base, ours, other.theirs, keep_going))
            lost = repositories.outermost_changes([change for change in changed if change.path in replaced])
            conflicts = [ConflictRecord(wire_path(path), "lost", _LOST) for path in lost]
            return Plan(other.theirs, found, conflicts, bool(conflicts) and not params.force)

        step = f"adopt {params.fork.name}"
        how = {"dry_run": params.dry_run, "touch": params.touch, "needs_base": not params.force}
        return await self._run(params.fork, plan, step, call, **how)

    async def _run(
        self,
        peer: Peer,
        plan: Callable[[Other, Tree], Plan],
        step: str,
        call: CallContext,
        *,
        dry_run: bool,
        touch: bool,
        is_whole: bool = True,
        needs_base: bool = True,
    ) -> MergeResult:
        if self._options.read_only and not dry_run:
            raise OSError(errno.EROFS, f"workspace {self._options.name!r} is mounted read-only")
        changed: Sequence[bytes] = ()
        async with self._one_at_a_time:
            for _ in range(_ATTEMPTS):
                try:
                    merges = self._snapshots.merges if is_whole and not dry_run else None
                    async with self._others.opened(peer, merges=merges, needs_base=needs_base) as other:
                        return await self._attempt(other, plan, step, call, dry_run=dry_run, touch=touch)
                except _ChangedMeanwhileError as error:
                    changed = error.paths
                except _NotAppliedError as answer:  # an error, so that the other workspace drops what it kept
                    return answer.result
        named = ", ".join(map(shown, changed[:_PATHS_SHOWN])) or "the workspace"
        reason = f"programs keep changing what is merged ({named}), so nothing was changed: stop them and try again"
        raise OSError(errno.EBUSY, reason)

    async def _attempt(
        self,
        other: Other,
        plan: Callable[[Other, Tree], Plan],
        step: str,
        call: CallContext,
        *,
        dry_run: bool,
        touch: bool,
    ) -> MergeResult:
        merged_before = other.here.merged  # the base was chosen by this
        async with self._snapshots.frozen(call) as view:
            made = await in_answer_thread(plan, other, LayeredTree(view.tree))
            if dry_run and not made.refuses and self._mounted.policy is not None:
                self._mounted.policy.check(made.changes, step)
            if dry_run or made.refuses:
                raise _NotAppliedError(_result(other, made))
            merged = complete = merged_before
            if other.state is not None:
                merged = with_merged(other.here, other.lineage, other.state, made.repositories)
                complete = with_merged(other.here, other.lineage, other.state)
            new = _new_state(view, made, other.lineage.name, merged)

            def check(live: Tree | None) -> None:
                if self._snapshots.merges.now != merged_before:
                    raise _ChangedMeanwhileError(())
                if live is not None:
                    _check_unchanged(view.tree, live, made.changes)

            if not made.changes:
                check(None)
                call.commit()
                await self._snapshots.note_merged(new.merged)
                answer = _result(other, made, applied=True)
            else:
                outcome = await self._snapshots.put_merged(new, step, call, check, touch=touch)
                answer = self._answer(other, made, outcome)
        if made.repositories:
            answer.repositories, is_complete = await self._fetch_branches(made, other.lineage.name)
            if is_complete and self._snapshots.merges.now == merged:
                await self._snapshots.note_merged(complete)
        return answer

    async def _fetch_branches(self, made: Plan, fork: str) -> tuple[list[RepositoryRecord], bool]:
        record = read_record(fork)
        source = record.mountpoint if record is not None and record.alive else ""
        target = self._mounted.mountpoint
        return await in_thread(fetched_repositories, made.repositories, source, target, fork, made.marked)

    def _answer(self, other: Other, made: Plan, outcome: Outcome) -> MergeResult:
        answer = _result(other, made, applied=True)
        left = outcome.problems.items()
        answer.conflicts += [ConflictRecord(wire_path(path), "left", reason) for path, reason in left]
        answer.safety_snapshot = outcome.safety
        answer.expired = expired_records(outcome.expired, self._snapshots.collect_pruned())
        answer.undo_steps = outcome.undo_steps
        answer.older = outcome.older
        return answer


class _NotAppliedError(Exception):
    """The merge is not applied: a dry run, or one with conflicts."""

    def __init__(self, result: MergeResult) -> None:
        super().__init__()
        self.result = result


def _keep_going(call: CallContext) -> Callable[[], None]:
    paths = 0

    def keep_going() -> None:
        nonlocal paths
        paths += 1
        call.raise_if_cancelled()
        call.progress_nowait(paths, 0, "files")

    return keep_going


def _is_directory_metadata(change: Change) -> bool:
    """Whether a directory stays and only its metadata change."""
    old, new = change.old, change.new
    return old is not None and new is not None and old.is_dir and new.is_dir


def _new_state(before: LiveState, made: Plan, source: str, merged: Sequence[MergedState]) -> NewState:
    directories = [change.path for change in made.changes if _is_directory_metadata(change)]
    paths = outermost([change.path for change in made.changes if not _is_directory_metadata(change)])
    return NewState(before, made.tree, made.changes, paths, directories, source, merged)


def _check_unchanged(old: Tree, live: Tree, replaced: Sequence[Change]) -> None:
    """_ChangedMeanwhileError if `live` differs from `old` at a path that is replaced, or in a way that moves it."""
    whole = {change.path for change in replaced if not _is_directory_metadata(change)}
    alone = {change.path for change in replaced if _is_directory_metadata(change)}
    above = _directories_above({*whole, *alone})
    changed = [
        change.path
        for change in changes(old, live)
        if change.path in alone or is_at_or_below(change.path, whole) or (change.path in above and _is_replaced(change))
    ]
    if changed:
        raise _ChangedMeanwhileError(changed)


def _is_replaced(change: Change) -> bool:
    """Whether another directory, or none, is at the path now."""
    return change.old is None or change.new is None or change.old.inode != change.new.inode


def _directories_above(paths: Collection[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    for path in paths:
        above = path.rpartition(b"/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition(b"/")[0]
    return found


def _with_missing(repositories: Sequence[bytes], other: Other, ours: Tree) -> list[bytes]:
    """Add the repositories whose branches an earlier merge could not fetch."""
    found = set(repositories)
    for each in other.here.merged:
        if other.bases is not None and (each.instance, each.state) == (other.lineage.instance, other.bases.base.state):
            found.update(
                path
                for path in each.repositories
                if None not in (entry_or_none(ours, path), entry_or_none(other.theirs, path))
            )
    return sorted(found)


def _record(conflict: Conflict) -> ConflictRecord:
    kept_as = wire_path(conflict.kept_as) if conflict.kept_as else None
    return ConflictRecord(wire_path(conflict.path), conflict.reason, conflict.detail, kept_as)


def _result(other: Other, made: Plan, *, applied: bool = False) -> MergeResult:
    listed = made.changes[:CHANGES_LISTED]
    return MergeResult(
        fork=other.lineage.name,
        base="" if other.bases is None else other.bases.base.state.name,
        applied=applied,
        counts=count(made.changes) if made.changes else ChangeCounts(),
        changes=[change_record(change) for change in listed],
        conflicts=list(made.conflicts),
        truncated=len(listed) < len(made.changes),
        repositories=planned_repositories(made.repositories, other.lineage.name),
    )
