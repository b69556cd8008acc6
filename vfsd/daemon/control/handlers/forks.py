"""Forks: `fork` makes one, `merge` and `adopt` take over the changes of another workspace with a common state.

A fork starts as a copy of this workspace.  Between the snapshot and fork(2) nothing awaits, so both have the same
state.  A workspace whose snapshots are in a store is not copied: `vfsd.daemon.forks.stored` mounts an overlay over such
a snapshot.

A merge:

1. The other daemon keeps its state and sends its changes (`vfsd.daemon.merging.other`).
2. A worker thread computes the new state from immutable trees, while the mount answers.
3. One step puts it in place, or everything begins again with the new state (`vfsd.daemon.merging.plan`).

Nothing is changed before the third step, in neither workspace, except that the other one has a snapshot more.

The methods `lineage`, `changes` and `drop_merged` are those that another workspace's daemon calls to merge this
workspace.  The state that is sent is a snapshot, or a view that ends with the call, so programs may go on meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from protocol.diff.tree_diff import Change, changes, count, entry_or_none, has_links
from protocol.errors import SnapshotNotFoundError, shown
from protocol.tree import Tree
from protocol.types import ChangeCounts
from protocol.volume_durability import journaled
from protocol.volume_extensions import ForkableVolume, SnapshotInfo
from vfsd.daemon.control.calls import CallContext, absolute_path, tree_paths
from vfsd.daemon.control.handlers.changes import (
    OutputPieces,
    change_record,
    expired_records,
    fetched_repositories,
    planned_repositories,
)
from vfsd.daemon.forks.forks import Forks, Steps
from vfsd.daemon.merging.delta import differences, write_delta
from vfsd.daemon.merging.lineage import with_merged
from vfsd.daemon.merging.other import Other, OtherWorkspaces
from vfsd.daemon.merging.plan import Plan, check_writable, keep_going_of, plan_of, put, retried
from vfsd.daemon.merging.trees import EmptyTree, LayeredTree, SourceStates
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import (
    FORK_PREFIX,
    MERGED_PREFIX,
    MERGED_TAG,
    UNOBSERVED,
    CallObserver,
    Outcome,
    SnapshotService,
    fork_tag,
    free_name,
    in_answer_thread,
    in_thread,
    is_merge_base,
    required,
)
from vfsd.machine import mounts
from vfsd.machine.mountinfo import is_at_or_below
from vfsd.machine.runtime import read_record
from vfsd.operations.declaration import Empty, Peer, RepositoryRecord
from vfsd.operations.forks import (
    AdoptParams,
    ChangesParams,
    ChangesResult,
    ConflictRecord,
    DropMergedParams,
    ForkParams,
    ForkResult,
    Lineage,
    MergedState,
    MergeParams,
    MergeResult,
    PlanResult,
    StateId,
)
from vfsd.operations.snapshots import CHANGES_LISTED
from vfsd.wire.messages import InvalidParamsError, wire_path
from vfsd.wire.options import NAME_PATTERN, Ready, WorkspaceOptions

if TYPE_CHECKING:
    from vfsd.daemon.forks.stored import StoredForks
    from vfsd.daemon.snapshots.store_restore import Stored

_PATHS_SHOWN: Final = 3
_LOST: Final = "changed here and not in the other workspace, so it would be lost"


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

    async def merge(self, params: MergeParams, call: CallContext) -> MergeResult:
        # Start-up: the first call on the control socket does not wait for this import.
        from protocol.merge.git import git_text_merge, user_driver  # noqa: PLC0415
        from protocol.merge.three_way import merge  # noqa: PLC0415

        paths = await tree_paths(params.paths)
        is_whole = not paths or b"" in paths
        keep_going = keep_going_of(call)
        driver = "" if params.tool is None else await in_thread(user_driver, params.tool)
        text_merge = functools.partial(git_text_merge, driver=driver)

        def plan(other: Other, ours: Tree) -> Plan:
            done = merge(
                other.base,
                ours,
                other.theirs,
                paths=paths,
                policy=params.conflicts,
                keep_going=keep_going,
                text_merge=text_merge,
            )
            repositories = done.repositories if not is_whole else _with_missing(done.repositories, other, ours)
            return plan_of(done, params.conflicts, repositories)

        step = f"merge {params.fork.name}"
        # A merge of some paths only is not recorded: the next merge compares all with the same base.
        how = {"dry_run": params.dry_run, "touch": params.touch, "is_whole": is_whole}
        return await self._run(params.fork, plan, step, call, **how)

    async def adopt(self, params: AdoptParams, call: CallContext) -> MergeResult:
        from protocol.merge.repositories import Repositories  # noqa: PLC0415 (as above)
        from protocol.merge.sides import Trees  # noqa: PLC0415

        keep_going = keep_going_of(call)

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
        check_writable(self._options, dry_run=dry_run)
        merges = self._snapshots.merges if is_whole and not dry_run else None

        async def attempt() -> MergeResult:
            async with self._others.opened(peer, merges=merges, needs_base=needs_base) as other:
                return await self._attempt(other, plan, step, call, dry_run=dry_run, touch=touch)

        async with self._one_at_a_time:
            try:
                return await retried(attempt)
            except _NotAppliedError as answer:  # an error, so that the other workspace drops what it kept
                return answer.result

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
            new = made.state(view, other.lineage.name, merged)
            outcome = await put(new, self._snapshots, step, merged_before, call, touch=touch)
            answer = _result(other, made, applied=True)
            if outcome is not None:
                note_outcome(answer, outcome, self._snapshots)
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


class _NotAppliedError(Exception):
    """The merge is not applied: a dry run, or one with conflicts."""

    def __init__(self, result: MergeResult) -> None:
        super().__init__()
        self.result = result


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


def _result(other: Other, made: Plan, *, applied: bool = False) -> MergeResult:
    return MergeResult(
        fork=other.lineage.name,
        base="" if other.bases is None else other.bases.base.state.name,
        repositories=planned_repositories(made.repositories, other.lineage.name),
        applied=applied,
        **planned(made),
    )


def planned(made: Plan) -> dict[str, Any]:
    """Return the fields of a PlanResult that the plan alone decides."""
    listed = made.changes[:CHANGES_LISTED]
    return {
        "counts": count(made.changes) if made.changes else ChangeCounts(),
        "changes": [change_record(change) for change in listed],
        "conflicts": list(made.conflicts),
        "truncated": len(listed) < len(made.changes),
    }


def note_outcome(answer: PlanResult, outcome: Outcome, snapshots: SnapshotService) -> None:
    """Add to the answer how the plan was put in place."""
    left = outcome.problems.items()
    answer.conflicts += [ConflictRecord(wire_path(path), "left", reason) for path, reason in left]
    answer.safety_snapshot = outcome.safety
    answer.expired = expired_records(outcome.expired, snapshots.collect_pruned())
    answer.undo_steps = outcome.undo_steps
    answer.older = outcome.older


# -- the side that is merged -----------------------------------------------------------------------
_PATHS_PER_REPORT: Final = 256


class MergeSource:
    """The side of one workspace whose changes are merged."""

    def __init__(
        self, mounted: MountedVolume, snapshots: SnapshotService | None, options: WorkspaceOptions, forks: Forks
    ) -> None:
        self._mounted = mounted
        self._optional = snapshots
        self._options = options
        self._forks = forks
        origin = forks.source_options.origin
        self._sources = None if origin is None else SourceStates(origin, options.store, mounted.volume)
        self._naming = trio.Lock()

    @property
    def snapshots(self) -> SnapshotService:
        """The snapshots.  OSError (EOPNOTSUPP) if this workspace can have no forks."""
        snapshots = required(self._optional)
        if not self._forks.is_possible:
            kind = self._options.backend.kind
            reason = f"workspace {self._options.name!r} has the backend {kind}, and can have no forks"
            raise OSError(errno.EOPNOTSUPP, f"{reason}: there is nothing to merge or to compare")
        return snapshots

    async def own_lineage(self) -> Lineage:
        """Return what this workspace descends from, and its states."""
        snapshots = self.snapshots
        forks = self._forks
        return Lineage(
            forks.instance, self._options.name, forks.ancestors, snapshots.merges.now, tuple(await self._states())
        )

    async def _states(self) -> list[StateId]:
        own = [StateId.of(info) for info in await self.snapshots.infos()]
        if self._sources is None or self._forks.twin is None or self._forks.twin[0] not in own:
            return own
        return [*own, self._forks.twin[1], *await self._sources.identities()]

    @asynccontextmanager
    async def tree(self, state: StateId, observer: CallObserver = UNOBSERVED) -> AsyncIterator[Tree]:
        """Open a state of this workspace, or of its source before the fork.  SnapshotNotFoundError."""
        snapshots, twin = self.snapshots, self._forks.twin
        own = {StateId.of(info) for info in await snapshots.infos()}
        if twin is not None and state == twin[1]:
            state = twin[0]
        if state in own:
            async with snapshots.tree(state.name, observer) as tree:
                yield tree
        elif self._sources is None or twin is None or twin[0] not in own:
            raise SnapshotNotFoundError(state.name)
        else:
            async with snapshots.tree(twin[0].name, observer) as below, self._sources.tree(state, below) as tree:
                yield tree

    async def lineage(self, _params: Empty, _call: CallContext) -> Lineage:
        return await self.own_lineage()

    async def changes(self, params: ChangesParams, call: CallContext) -> ChangesResult:
        snapshots = self.snapshots
        kept: SnapshotInfo | None = None
        if params.merge_into is not None:
            kept = await self._keep(params.merge_into, params.keep, call)
        try:
            olds = [each for each in (params.fork_point, params.base) if each is not None]
            async with contextlib.AsyncExitStack() as stack:
                trees: list[Tree] = [await stack.enter_async_context(self.tree(each, call)) for each in olds]
                if not olds:
                    trees.append(EmptyTree())
                if kept is None:
                    trees.append((await stack.enter_async_context(snapshots.frozen(call))).tree)
                else:
                    trees.append(await stack.enter_async_context(self.tree(StateId.of(kept), call)))
                await in_answer_thread(_send, trees, call, params.max_bytes)
        except BaseException:
            if kept is not None:
                with trio.CancelScope(shield=True), contextlib.suppress(SnapshotNotFoundError):
                    await snapshots.drop([kept.name])
            raise
        return ChangesResult(None if kept is None else StateId.of(kept))

    async def _keep(self, target: str, keep: Sequence[int], call: CallContext) -> SnapshotInfo:
        """Take the snapshot of the state that is merged; drop those that `target` does not need any more.

        Those are left by merges that were undone for good, or that did not complete because a daemon died.
        """
        snapshots = self.snapshots
        async with self._naming:
            await self._drop_merged(target, keep)
            infos = await snapshots.infos()
            name = free_name(MERGED_PREFIX, infos)
            taken = await snapshots.take(name, f"{MERGED_TAG}{target}", call, kind="automatic")
            instance, existing = self._forks.instance, set(map(StateId.of, infos))
            before = [each for each in snapshots.merges.now if each.instance != instance or each.state in existing]
            own = MergedState(instance, self._options.name, StateId.of(taken))
            snapshots.merges.record(taken.serial - 1, [*before, own])
            return taken

    async def drop_merged(self, params: DropMergedParams, _call: CallContext) -> Empty:
        await self._drop_merged(params.target, params.keep)
        return Empty()

    async def _drop_merged(self, target: str, keep: Sequence[int]) -> None:
        snapshots = self.snapshots
        for info in await snapshots.infos():
            if is_merge_base(info) and info.tag == f"{MERGED_TAG}{target}" and info.serial not in keep:
                with contextlib.suppress(SnapshotNotFoundError):
                    await snapshots.drop([info.name])


def _send(trees: Sequence[Tree], call: CallContext, max_bytes: int) -> None:
    """Send the differences between each two adjacent trees."""
    pieces = OutputPieces(call.output_from_thread)
    sent = paths = 0

    def write(piece: bytes) -> None:
        nonlocal sent
        sent += len(piece)
        if sent > max_bytes:
            reason = f"the changes take more than the {max_bytes >> 20:,} MiB that are free in the other workspace"
            raise OSError(errno.ENOSPC, f"{reason} (--max-memory, --max-bytes); nothing was changed")
        pieces.write(piece)

    def keep_going() -> None:
        nonlocal paths
        paths += 1
        if paths % _PATHS_PER_REPORT == 1:
            call.raise_if_cancelled()
            call.progress_nowait(paths, 0, "files")

    for old, new in itertools.pairwise(trees):
        # Only a LayeredTree knows in what it differs from others.
        write_delta(old, LayeredTree(new) if isinstance(old, LayeredTree) else new, write, keep_going)
    pieces.flush()


_ENTRIES_SEEN: Final = 1000  # at the top of a fork, to find links that lead out of it
_LINKS_SHOWN: Final = 5


class ForkMethod:
    """The method `fork` of one workspace."""

    def __init__(self, mounted: MountedVolume, snapshots: SnapshotService | None, forks: Forks) -> None:
        self._mounted = mounted
        self._snapshots = snapshots
        self._forks = forks
        self._stored_forks: StoredForks | None = None

    async def fork(self, params: ForkParams, call: CallContext) -> ForkResult:
        """Fork, and return when the fork's mount answers."""
        made = await self._fork(params, call)
        made.warnings += await trio.to_thread.run_sync(_links, absolute_path(made.mountpoint), self._mounted.mountpoint)
        return made

    async def _fork(self, params: ForkParams, call: CallContext) -> ForkResult:
        if not NAME_PATTERN.fullmatch(params.name):
            raise InvalidParamsError(f"not a workspace name: {params.name!r}")
        mountpoint = absolute_path(params.mountpoint)
        snapshots = required(self._snapshots)
        if self._forks.stored is None:
            _ = self._forks.volume  # raises if it cannot be forked
        if is_at_or_below(mountpoint, self._mounted.mountpoint):
            raise OSError(errno.EINVAL, "a fork cannot be mounted inside its source", mountpoint)
        record = read_record(params.name)
        if record is not None and record.alive:
            reason = f"a workspace named {record.name!r} is mounted at {record.mountpoint}; give the fork another name"
            raise FileExistsError(errno.EEXIST, reason)
        # The fork checks it again; an error here leaves nothing behind.
        await trio.to_thread.run_sync(mounts.check_mountpoint, mountpoint)
        if self._forks.stored is not None:
            ready, info = await self._over_snapshot(self._forks.stored, snapshots).fork(params, mountpoint, call)
            return _fork_result(ready, info.name, [*ready.warnings, *_incomplete(info)])
        volume = self._forks.volume
        made = started = None  # the base, if this call took it
        try:
            async with self._mounted.change_lock:
                await self._mounted.write_back()
                steps = Steps(await snapshots.history(), snapshots.merges)
                call.commit()  # what follows takes some milliseconds, and undoes itself if it fails
                if params.snapshot is None:
                    base = made = _take_base(volume, fork_tag(params.name, mountpoint))
                else:
                    base = StateId.of(volume.snapshot(params.snapshot))
                started = self._forks.start(
                    params.name, mountpoint, base, steps, restores_base=made is None, keeps_base=made is not None
                )
            ready = await started.ready()
        except BaseException:
            if made is not None and started is None:  # else it is dropped when the process has ended
                with contextlib.suppress(SnapshotNotFoundError):
                    volume.drop_snapshot(made.name)
            raise
        warnings = list(ready.warnings)
        if journaled(self._mounted.volume) is not None:
            warnings.append(
                "unlike its source, the fork has neither a journal nor a keeper: if its daemon dies, what was not"
                " merged is lost"
            )
        return _fork_result(ready, base.name, warnings)

    def _over_snapshot(self, stored: Stored, snapshots: SnapshotService) -> StoredForks:
        # Start-up: few workspaces need these modules.
        from vfsd.daemon.forks.stored import StoredForks  # noqa: PLC0415
        from vfsd.daemon.snapshots.stored import StoreSnapshots  # noqa: PLC0415

        if self._stored_forks is None:
            assert isinstance(snapshots, StoreSnapshots), "the snapshots are in `stored`"
            forks = self._forks
            self._stored_forks = StoredForks(forks.source_options, stored, snapshots, forks)
        self._stored_forks.options = self._forks.source_options  # a policy may have been tightened
        return self._stored_forks


def _fork_result(ready: Ready, base: str, warnings: Sequence[str]) -> ForkResult:
    place, socket = (wire_path(os.fsencode(path)) for path in (ready.mountpoint, ready.socket))
    return ForkResult(ready.name, place, socket, ready.pid, ready.engine, base, list(warnings))


def _incomplete(base: SnapshotInfo) -> Iterator[str]:
    """Say which files the fork lacks, and which may be wrong in it."""
    for paths, what in (
        (base.unreadable, "could not be read, and {} not in the fork"),
        (base.unstable, "changed while {} read, and may mix old and new content in the fork"),
    ):
        if paths:
            named = ", ".join(map(shown, paths[:_PATHS_SHOWN])) + (", ..." if len(paths) > _PATHS_SHOWN else "")
            files = f"{len(paths)} files" if len(paths) > 1 else "1 file"
            many = len(paths) > 1
            verb = ("are" if many else "is") if paths is base.unreadable else ("they were" if many else "it was")
            yield f"{files} {what.format(verb)}: {named}"


def _links(fork: str, source: str) -> list[str]:
    """Say what at the top of a fork leads to the source, or to a git repository outside.  Nothing below is searched.

    Opens files of the source's mount only: the process of another fork that is made at this moment closes what it
    inherits of that, and would keep the mount of this fork busy.
    """
    from protocol.merge.git import first_line  # noqa: PLC0415 (start-up)

    found = []
    try:
        with os.scandir(source) as entries:
            top = sorted(itertools.islice(entries, _ENTRIES_SEEN), key=lambda entry: entry.name)
    except OSError:
        return []
    for name in ("", *(entry.name for entry in top if entry.is_dir(follow_symlinks=False))):
        git = os.path.join(source, name, ".git")
        with contextlib.suppress(OSError, ValueError):
            kind, _, gitdir = first_line(git).partition(": ")
            place = os.path.normpath(os.path.join(source, name, gitdir))
            is_inside = not os.path.isabs(gitdir) and is_at_or_below(place, source)
            is_in_fork = os.lstat(os.path.join(fork, name, ".git")).st_size == os.lstat(git).st_size
            if kind == "gitdir" and is_in_fork and not is_inside:
                found.append(
                    f"{shown(os.fsencode(name or '.'))} is a linked git work tree: commits in the fork land in the"
                    f" repository that has {shown(os.fsencode(gitdir))}, as those of the source"
                )
    for entry in top:
        with contextlib.suppress(OSError):
            target = os.readlink(os.path.join(fork, entry.name)) if entry.is_symlink() else ""
            if is_at_or_below(os.path.normpath(target), source):
                found.append(
                    f"the symlink {shown(os.fsencode(entry.name))} in the fork leads into the source, {source}"
                )
    return found[:_LINKS_SHOWN] + [f"and {len(found) - _LINKS_SHOWN:,} more"] * (len(found) > _LINKS_SHOWN)


def _take_base(volume: ForkableVolume, tag: str) -> StateId:
    """Take the snapshot that both workspaces have in common."""
    name = free_name(FORK_PREFIX, volume.snapshots())
    return StateId.of(volume.take_snapshot(name, tag=tag, kind="automatic"))
