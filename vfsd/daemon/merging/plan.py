"""Plan: a new state that was computed from the live state, and the one step that puts it in place.

A worker thread computes a plan from immutable trees, while the mount answers.  `put` then makes the step, as a restore
does, unless a program has changed one of the paths since: then the caller computes a plan again, from the new state.
For a volume with snapshots of its own, the step is made on the serving loop.  Else a thread changes the files, each
atomically; a path that a program changes meanwhile is left, and reported.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from protocol.diff.tree_diff import Change, changes, directories_above, is_at_or_below, outermost
from protocol.errors import shown
from protocol.tree import Tree
from protocol.values import Value
from vfsd.daemon.snapshots.base import LiveState, NewState, Outcome, SnapshotService
from vfsd.operations.forks import ConflictRecord, MergedState
from vfsd.wire.messages import wire_path
from vfsd.wire.options import WorkspaceOptions

if TYPE_CHECKING:
    from protocol.merge.sides import Conflict
    from protocol.merge.three_way import Merge
    from vfsd.daemon.control.calls import CallContext
    from vfsd.operations.forks import Conflicts

T = TypeVar("T")

_ATTEMPTS: Final = 5  # while programs change paths that are merged
_PATHS_SHOWN: Final = 3


class Plan(Value):
    """A new state: `tree`, how it differs from the present one, and the conflicts.

    `refuses`: the conflicts prevent it.  `repositories`: those that both sides changed, and that stay as they are.
    `marked`: the paths that may have conflict markers.
    """

    tree: Tree
    changes: Sequence[Change]
    conflicts: Sequence[ConflictRecord]
    refuses: bool
    repositories: Sequence[bytes] = ()
    marked: Sequence[bytes] = ()

    def state(self, before: LiveState, source: str, merged: Sequence[MergedState]) -> NewState:
        """Return the state to put in place of `before`; the rest is as in `NewState`."""
        directories = [change.path for change in self.changes if _is_directory_metadata(change)]
        paths = outermost([change.path for change in self.changes if not _is_directory_metadata(change)])
        return NewState(before, self.tree, self.changes, paths, directories, source, merged)


def plan_of(done: Merge, policy: Conflicts, repositories: Sequence[bytes]) -> Plan:
    """Return the plan that a merge with this policy makes."""
    refuses = policy == "fail" and bool(done.conflicts)
    marked = [each.path for each in done.conflicts if policy == "markers" and not each.kept_as]
    return Plan(done.tree, done.changes, list(map(conflict_record, done.conflicts)), refuses, repositories, marked)


class ChangedMeanwhileError(Exception):
    """Programs changed paths that are about to be replaced."""

    def __init__(self, paths: Sequence[bytes]) -> None:
        super().__init__(paths)
        self.paths = paths


async def retried(attempt: Callable[[], Awaitable[T]]) -> T:
    """Await `attempt()`, which makes and puts a plan, until no program changes the same paths.  EBUSY at the end."""
    changed: Sequence[bytes] = ()
    for _ in range(_ATTEMPTS):
        try:
            return await attempt()
        except ChangedMeanwhileError as error:
            changed = error.paths
    named = ", ".join(map(shown, changed[:_PATHS_SHOWN])) or "the workspace"
    reason = f"programs keep changing what is merged ({named}), so nothing was changed: stop them and try again"
    raise OSError(errno.EBUSY, reason)


async def put(
    new: NewState,
    snapshots: SnapshotService,
    step: str,
    merged_before: Sequence[MergedState],
    call: CallContext,
    *,
    touch: bool,
) -> Outcome | None:
    """Put `new` in place as the step `step` of the undo history; None if it does not differ from the live state.

    ChangedMeanwhileError if that is not so any more, or if `merged_before` is not what is merged into the live state.
    """

    def check(live: Tree | None) -> None:
        if snapshots.merges.now != merged_before:
            raise ChangedMeanwhileError(())
        if live is not None:
            _check_unchanged(new.before.tree, live, new.changes)

    if new.changes:
        return await snapshots.put_merged(new, step, call, check, touch=touch)
    check(None)
    call.commit()
    await snapshots.note_merged(new.merged)
    return None


def check_writable(options: WorkspaceOptions, *, dry_run: bool) -> None:
    """EROFS if the workspace is mounted read-only, unless nothing is going to be changed."""
    if options.read_only and not dry_run:
        raise OSError(errno.EROFS, f"workspace {options.name!r} is mounted read-only")


def keep_going_of(call: CallContext) -> Callable[[], None]:
    """Return a function that reports each path that is compared, and raises if the client has cancelled `call`."""
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


def _check_unchanged(old: Tree, live: Tree, replaced: Sequence[Change]) -> None:
    """ChangedMeanwhileError if `live` differs from `old` at a path that is replaced, or in a way that moves it."""
    whole = {change.path for change in replaced if not _is_directory_metadata(change)}
    alone = {change.path for change in replaced if _is_directory_metadata(change)}
    above = directories_above({*whole, *alone}) - {b""}
    changed = [
        change.path
        for change in changes(old, live)
        if change.path in alone or is_at_or_below(change.path, whole) or (change.path in above and _is_replaced(change))
    ]
    if changed:
        raise ChangedMeanwhileError(changed)


def _is_replaced(change: Change) -> bool:
    """Whether another directory, or none, is at the path now."""
    return change.old is None or change.new is None or change.old.inode != change.new.inode


def conflict_record(conflict: Conflict) -> ConflictRecord:
    """Return a conflict for a client."""
    kept_as = wire_path(conflict.kept_as) if conflict.kept_as else None
    return ConflictRecord(wire_path(conflict.path), conflict.reason, conflict.detail, kept_as)
