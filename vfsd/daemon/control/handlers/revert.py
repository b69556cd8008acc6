"""The method `revert`: undo what changed between two states, or in an agent's calls, and keep everything later.

It is a three-way merge (`protocol.merge`): the base is the newer state, theirs the older one, ours the live state.

Whose changes: the hooks of an agent keep a state after each call, and the log has the call that each change belongs to.
So the changes of a call, or of a session's calls, are those between two adjacent states at the paths that the log gives
to it.  Adjacent intervals are one range as long as nobody else changed any of these paths in them.  Ranges are undone
one after the other, the newest one first.

- A path that others changed in the same interval is a conflict ("shared"): no state is kept in between.
- Where the log does not say whose changes were made (it does not reach back, or the agent has no label in it), an
  interval belongs to the call whose state ends it, with all its changes, and the answer has a warning.

Threading: the serving loop.  A worker thread computes the new state from immutable trees.
"""

from __future__ import annotations

import errno
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from protocol.diff.tree_diff import Change, Comparison, PathScope, entry_or_none, has_links, is_at_or_below, walk_order
from protocol.errors import SnapshotNotFoundError, os_error
from protocol.merge.sides import Conflict, Policy
from protocol.tree import Tree, TreeEntry, names_in
from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.audit.log import OF_WHOLE_DIRECTORIES, Entry, shortened
from vfsd.daemon.audit.service import Audit
from vfsd.daemon.control.calls import CallContext, tree_paths
from vfsd.daemon.control.handlers.forks import note_outcome, planned
from vfsd.daemon.merging.delta import differences
from vfsd.daemon.merging.plan import Plan, check_writable, conflict_record, keep_going_of, put, retried
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import BASE, SnapshotService, in_answer_thread, required
from vfsd.machine.agent_points import call_of_label, parse_tag
from vfsd.operations.declaration import RepositoryRecord
from vfsd.operations.forks import RangeRecord, RevertParams, RevertResult
from vfsd.wire.messages import InvalidParamsError, wire_path
from vfsd.wire.options import WorkspaceOptions

if TYPE_CHECKING:
    from protocol.merge.merged_tree import Node

_RANGES_MAX: Final = 300  # each is a layer of the new state
_SHARED: Final = "others changed it, too, between two states that were kept"
_KEPT_REPOSITORY: Final = "changed again since then, so it was kept as it is: `git revert` in it takes back its commits"


class RevertMethods:
    """The method of one workspace."""

    def __init__(
        self, mounted: MountedVolume, snapshots: SnapshotService | None, options: WorkspaceOptions, audit: Audit
    ) -> None:
        self._mounted = mounted
        self._snapshots = snapshots
        self._options = options
        self._audit = audit

    async def revert(self, params: RevertParams, call: CallContext) -> RevertResult:
        """See `RevertParams`.  EBUSY if programs keep changing what is reverted."""
        if params.tool_call is not None and params.session is not None:
            raise InvalidParamsError("revert: `tool_call` and `session` exclude each other")
        if params.since is None and params.tool_call is None and params.session is None:
            raise InvalidParamsError("revert: give `since`, `tool_call` or `session`")
        check_writable(self._options, dry_run=params.dry_run)
        paths = await tree_paths(params.paths)
        return await retried(lambda: self._attempt(params, paths, call))

    async def _attempt(self, params: RevertParams, paths: Sequence[bytes], call: CallContext) -> RevertResult:
        snapshots = required(self._snapshots)
        infos = await snapshots.infos()
        async with snapshots.frozen(call) as view, AsyncExitStack() as stack:
            merged, log = snapshots.merges.now, self._audit.log
            entries = [] if log is None else [entry for entry in log.entries() if entry.attempt is None]
            complete_since_ns = None if log is None else log.complete_since_ns
            states = _States(infos, has_base=snapshots.has_base)
            ranges, warnings = _ranges(params, states, entries, complete_since_ns)
            trees: dict[str | None, Tree] = {None: view.tree}
            for name in {name for each in ranges for name in (each.since, each.until)} - {None}:
                trees[name] = await stack.enter_async_context(snapshots.tree(name, call))
            plan = _Reverting(trees, paths, params.conflicts, keep_going_of(call)).plan
            made = await in_answer_thread(plan, ranges)
            what = _described(params)
            step = f"revert {what}"
            if params.dry_run and not made.refuses and self._mounted.policy is not None:
                self._mounted.policy.check(made.changes, step)
            is_put = not (params.dry_run or made.refuses)
            answer = RevertResult(
                reverted=what,
                ranges=[RangeRecord(each.since, each.until) for each in reversed(ranges)],
                warnings=warnings,
                applied=is_put,
                repositories=[RepositoryRecord(wire_path(path), _KEPT_REPOSITORY) for path in made.repositories],
                **planned(made),
            )
            if is_put:
                new = made.state(view, what, merged)
                outcome = await put(new, snapshots, step, merged, call, touch=params.touch)
                if outcome is not None:
                    note_outcome(answer, outcome, snapshots)
        return answer


def _described(params: RevertParams) -> str:
    who = ""
    if params.tool_call is not None:
        who = f"tool call {params.tool_call}"
    elif params.session is not None:
        who = f"session {params.session}"
    states = "" if params.since is None and params.until is None else f"{params.since or ''}..{params.until or ''}"
    return " in ".join(filter(None, (who, states)))


# -- whose changes ---------------------------------------------------------------------------------
@dataclass(slots=True)
class _Paths:
    """Paths that were changed, `below` with everything below them."""

    exact: set[bytes] = field(default_factory=set)
    below: set[bytes] = field(default_factory=set)
    everything: bool = False

    def add(self, entry: Entry) -> None:
        """Add what an entry of the log changed."""
        if entry.count > len(entry.paths) > 0:
            self.everything = True  # not all of its paths are known
        names = [path for path in entry.paths or (entry.path, entry.other) if path is not None]
        (self.below if entry.change in OF_WHOLE_DIRECTORIES else self.exact).update(names)

    def covers(self, path: bytes) -> bool:
        """Whether `path` was changed."""
        if self.everything or path in self.exact:
            return True
        return bool(self.below) and is_at_or_below(path, self.below)

    def meets(self, other: _Paths) -> bool:
        """Whether both changed the same path."""
        if self.everything or other.everything:
            return bool(self) and bool(other)
        return any(map(other.covers, (*self.exact, *self.below))) or any(map(self.covers, (*other.exact, *other.below)))

    def __bool__(self) -> bool:
        return self.everything or bool(self.exact) or bool(self.below)

    def __or__(self, other: _Paths) -> _Paths:
        return _Paths(self.exact | other.exact, self.below | other.below, self.everything or other.everything)


@dataclass(slots=True)
class _Range:
    """The changes from state `since` to state `until` at the paths `mine`; those at `others` are of others."""

    since: str
    until: str | None
    mine: _Paths
    others: _Paths


class _States:
    """The states of a workspace, the oldest one first: that below an overlay, the snapshots, the live state."""

    def __init__(self, infos: Sequence[SnapshotInfo], *, has_base: bool) -> None:
        base: list[str | None] = [BASE] if has_base else []
        self.names: list[str | None] = [*base, *(info.name for info in infos), None]
        self.points = [*([None] * has_base), *(parse_tag(info.tag) for info in infos), None]
        self.ends_ns: list[int] = []  # when each state was taken; never decreasing, whatever the clock did
        for at_ns in (*([0] * has_base), *(info.created_ns for info in infos)):
            self.ends_ns.append(max(at_ns, self.ends_ns[-1] if self.ends_ns else 0))

    def bounds(self, since: str | None, until: str | None) -> tuple[int, int]:
        """Return the positions of two states.  EINVAL if the second one is older, SnapshotNotFoundError."""
        for name in (since, until):
            if name is not None and name not in self.names and name != BASE:
                raise SnapshotNotFoundError(name)
        first = 0 if since is None or since == BASE else self.names.index(since)
        last = self.names.index(until) if until is not None else len(self.names) - 1
        if first > last:
            reason = f"{until} was taken before {since}: name the older state first, {until}..{since}"
            raise OSError(errno.EINVAL, reason)
        return first, last


def _ranges(
    params: RevertParams, states: _States, entries: Sequence[Entry], complete_since_ns: int | None
) -> tuple[list[_Range], list[str]]:
    """Return the ranges whose changes are undone, the oldest one first, and warnings."""
    first, last = states.bounds(params.since, params.until)
    if params.tool_call is None and params.session is None:
        assert params.since is not None
        return [_Range(params.since, params.until, _Paths(everything=True), _Paths())], []
    intervals, warnings = _intervals(params, states, entries, complete_since_ns)
    if first == 0 and params.since is None and intervals[0][0]:
        raise FileNotFoundError(errno.ENOENT, f"the state before {_described(params)} was dropped, or was not kept")
    found: list[_Range] = []
    others = _Paths()  # since the last range
    for at in range(first + 1, last + 1):
        mine, also = intervals[at]
        others |= also
        if not mine:
            continue
        since, until = states.names[at - 1], states.names[at]
        assert since is not None
        joined = None if not found else _Range(found[-1].since, until, found[-1].mine | mine, found[-1].others | others)
        if joined is not None and not joined.mine.meets(joined.others):
            found[-1] = joined
        else:
            found.append(_Range(since, until, mine, also))
        others = _Paths()
    if len(found) > _RANGES_MAX:
        reason = f"others changed the same files {len(found):,} times in between: give paths, or SINCE..UNTIL"
        raise OSError(errno.E2BIG, reason)
    return found, warnings


def _intervals(
    params: RevertParams, states: _States, entries: Sequence[Entry], complete_since_ns: int | None
) -> tuple[list[tuple[_Paths, _Paths]], list[str]]:
    """Return the changes between each state and the one before it, by the calls and by others; and warnings."""
    calls, of_session = _calls(params, states, entries)
    found = [(_Paths(), _Paths()) for _ in states.names]
    for entry in entries:
        start, end = (bisect_left(states.ends_ns, at_ns) for at_ns in (entry.time_ns, entry.until_ns))
        for at in range(start, end + 1):
            point = states.points[at]
            call = call_of_label(entry.label)
            if entry.label is None and not entry.process.pid and point is not None:
                call = point.tool_use_id  # the kernel wrote pages back, or a program that the daemon cannot see
            found[at][call not in calls].add(entry)
    is_labelled = any(call_of_label(entry.label) in of_session for entry in entries)
    unlogged = 0
    for at, point in enumerate(states.points):
        start_ns = states.ends_ns[at - 1] if at else 0
        if is_labelled and complete_since_ns is not None and (complete_since_ns <= start_ns or not start_ns):
            continue
        everything, nothing = _Paths(everything=True), _Paths()
        is_mine = point is not None and point.kind == "tool" and point.tool_use_id in calls
        found[at] = (everything, nothing) if is_mine else (nothing, everything)
        unlogged += is_mine
    if not unlogged:
        return found, []
    warning = (
        f"the log does not tell whose changes were made before {unlogged} of the states: everything that changed since"
        " the state before each of them is undone, also if another program changed it"
    )
    return found, [warning]


def _calls(params: RevertParams, states: _States, entries: Iterable[Entry]) -> tuple[Collection[str], Collection[str]]:
    """Return the ids of the calls that are asked for, and of all calls of their session.  FileNotFoundError."""
    points = [point for point in states.points if point is not None]
    if params.session is not None:
        if not any(point.session == params.session for point in points):
            reason = f"the hooks of an agent kept no state of session {params.session!r}, or all were dropped"
            raise FileNotFoundError(errno.ENOENT, f"{reason}; `vfsd rewind --list` lists the states")
        of_session = {point.tool_use_id for point in points if point.session == params.session} - {""}
        return of_session, of_session
    assert params.tool_call is not None
    calls = {params.tool_call}
    sessions = {point.session for point in points if point.tool_use_id == params.tool_call}
    if not sessions and not any(call_of_label(entry.label) == params.tool_call for entry in entries):
        reason = f"no state after the tool call {params.tool_call!r} is kept"
        raise FileNotFoundError(errno.ENOENT, f"{reason}; `vfsd rewind --list` lists the calls")
    return calls, calls | {point.tool_use_id for point in points if point.session in sessions} - {""}


# -- the new state ---------------------------------------------------------------------------------
class _Reverting:
    """Computes the new state: the live state without the changes of some ranges.  A worker thread.

    `trees` has the states by name; None is the live state.
    """

    def __init__(
        self,
        trees: Mapping[str | None, Tree],
        paths: Sequence[bytes],
        policy: Policy,
        keep_going: Callable[[], None],
    ) -> None:
        self._trees = trees
        self._paths = paths
        self._scope = PathScope(paths or [b""])
        self._policy = policy
        self._keep_going = keep_going

    def plan(self, ranges: Sequence[_Range]) -> Plan:
        """Return the plan.  FileNotFoundError for a path that is in no state."""
        # Start-up: the first call on the control socket does not wait for this import.
        from protocol.merge.three_way import merge  # noqa: PLC0415

        live = tree = self._trees[None]
        changes: Sequence[Change] = ()
        conflicts: dict[bytes, Conflict] = {}
        repositories: set[bytes] = set()
        now_ns = time.time_ns()
        for each in reversed(ranges):
            base, older = self._trees[each.until], self._trees[each.since]
            theirs, shared = self._exclusive(base, older, each)
            scopes = [path for path in self._paths if _is_in(path, (base, tree, theirs))]
            if self._paths and not scopes:
                continue
            done = merge(
                base, tree, theirs, paths=scopes, policy=self._policy, keep_going=self._keep_going, now_ns=now_ns
            )
            for conflict in (*shared, *done.conflicts):
                conflicts.setdefault(conflict.path, conflict)
            repositories.update(done.repositories)
            if done.paths:
                changes = done.changes if tree is live else ()
                tree = done.tree
        for path in self._paths:
            if not _is_in(path, self._trees.values()):
                raise os_error(errno.ENOENT, os.fsdecode(path))
        if tree is not live and not changes:
            found = differences(live, tree, self._keep_going)
            changes = [Change(one.path, one.kind or "metadata", one.old, one.new) for one in found if _is_change(one)]
        listed = [conflict_record(conflicts[path]) for path in sorted(conflicts, key=walk_order)]
        refuses = self._policy == "fail" and bool(conflicts)
        return Plan(tree, changes, listed, refuses, sorted(repositories))

    def _exclusive(self, newer: Tree, older: Tree, each: _Range) -> tuple[Tree, list[Conflict]]:
        """Return `newer` without the changes since `older` that are in the range; and the paths that others share."""
        if each.mine.everything and not each.others:
            return older, []
        found = {one.path: one for one in differences(newer, older, self._keep_going)}
        wanted = {path for path in found if each.mine.covers(shortened(path))}
        files = {entry.inode for path in wanted for entry in _entries(found[path]) if has_links(entry)}
        wanted |= {path for path, one in found.items() if any(entry.inode in files for entry in _entries(one))}
        shared = {path for path in wanted if each.others.covers(shortened(path))}
        if self._policy != "theirs":
            wanted -= shared
        nodes, kept = _replaced(newer, older, {path: found[path] for path in wanted})
        from protocol.merge.merged_tree import MergedTree  # noqa: PLC0415 (as above)

        conflicts = [Conflict(path, "shared", _SHARED) for path in sorted(shared | kept) if self._scope.covers(path)]
        return MergedTree(newer, nodes), conflicts


def _replaced(
    newer: Tree, older: Tree, found: Mapping[bytes, Comparison]
) -> tuple[dict[bytes, Node | None], set[bytes]]:
    """Return how a tree differs from `newer` that has `found` as in `older`.

    A directory stays where it has something that is not in `found`.  Also returns the paths at which that prevented it.
    """
    from protocol.merge.merged_tree import Node, joined  # noqa: PLC0415 (start-up)

    nodes: dict[bytes, Node | None] = {}
    kept: set[bytes] = set()

    def is_emptied(path: bytes) -> bool:
        return all(nodes.get(joined(path, name), newer) is None for name in names_in(newer, path))

    for path in sorted(found, key=walk_order, reverse=True):
        now, then = found[path].old, found[path].new
        is_directory = now is not None and now.is_dir
        if is_directory and (then is None or not then.is_dir) and not is_emptied(path):
            if then is not None:
                kept.add(path)
            continue
        if then is None:
            nodes[path] = None
        elif is_directory and then.is_dir:
            nodes[path] = Node(then, older, path, below="ours")
        else:
            nodes[path] = Node(then, older, path)
    for path in [path for path, node in nodes.items() if node is not None]:
        above = path.rpartition(b"/")[0]
        while above and above not in nodes:
            entry = entry_or_none(newer, above)
            if entry is not None and entry.is_dir:
                break
            nodes[above] = Node(older.entry(above), older, above)
            if entry is not None:
                kept.add(above)
            above = above.rpartition(b"/")[0]
    return nodes, kept


def _entries(one: Comparison) -> list[TreeEntry]:
    return [entry for entry in (one.old, one.new) if entry is not None]


def _is_change(one: Comparison) -> bool:
    # A file with one name that has only another inode number is the same file.
    return one.kind is not None or has_links(one.old) or has_links(one.new)


def _is_in(path: bytes, trees: Iterable[Tree]) -> bool:
    return any(entry_or_none(tree, path) is not None for tree in trees)
