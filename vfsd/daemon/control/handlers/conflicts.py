"""The method `conflicts`: which workspaces of a family change the same paths, and which merges would conflict.

No workspace is changed.  The changes of each fork are fetched once, as for a merge, and each pair is merged
in a worker thread.  A merge looks at the paths that both changed, and at those above and below them: elsewhere there
can be no conflict.  Where files have several names it looks at everything.

The base of a pair is that of `vfsd merge`.  If only the forks themselves have that state, one of them makes a dry run
of the merge.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Final

from protocol.diff.tree_diff import PathScope, has_links, outermost, walk_order
from protocol.merge.sides import Conflict
from protocol.tree import Tree
from vfsd.daemon.control.calls import CallContext
from vfsd.daemon.control.handlers.forks import MergeSource
from vfsd.daemon.merging.delta import differences
from vfsd.daemon.merging.lineage import find_bases
from vfsd.daemon.merging.other import OtherWorkspaces, call_peer
from vfsd.daemon.merging.plan import conflict_record, keep_going_of
from vfsd.daemon.merging.trees import LayeredTree
from vfsd.daemon.snapshots.base import in_answer_thread
from vfsd.operations.declaration import Peer
from vfsd.operations.forks import (
    BelowRecord,
    ConflictsParams,
    ConflictsResult,
    Lineage,
    MergeParams,
    MergeResult,
    PairRecord,
    StateId,
)
from vfsd.operations.snapshots import CHANGES_LISTED, ApplyParams, ApplyResult
from vfsd.wire.messages import wire_path

if TYPE_CHECKING:
    from protocol.merge.git import TextCase, TextMerge, TextResult

_GIT: Final = b".git"


@dataclass(slots=True)
class _Line:
    """One workspace: its present state, or why it could not be fetched.

    `base`: that of a merge with this workspace.
    """

    name: str
    peer: Peer | None = None
    lineage: Lineage | None = None
    tree: Tree | None = None
    base: Tree | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """Two lines to compare, and the base of a merge of one into the other."""

    a: _Line
    b: _Line
    base: Tree


def _problem(a: _Line, b: _Line, reason: str) -> PairRecord:
    return PairRecord(a.name, b.name, 0, [], [], problem=reason)


class _TextsError(Exception):
    """A merge has to wait for git: for the results of its texts that are None in `known`."""

    def __init__(self, known: Sequence[TextResult | None]) -> None:
        super().__init__(known)
        self.known = known


@dataclass(slots=True)
class _Changed:
    """The paths that a line changed since a base.  `linked`: one of them has several names."""

    paths: set[bytes] = field(default_factory=set)
    linked: bool = False


class ConflictsMethods:
    """The method of one workspace.  `apply` is its method of that name, for an overlay."""

    def __init__(
        self,
        source: MergeSource,
        others: OtherWorkspaces,
        apply: Callable[[ApplyParams, CallContext], Awaitable[ApplyResult]],
    ) -> None:
        self._source = source
        self._others = others
        self._apply = apply

    async def conflicts(self, params: ConflictsParams, call: CallContext) -> ConflictsResult:
        """See `ConflictsParams`.  A workspace that cannot be compared is a problem of its pairs."""
        snapshots = self._source.snapshots
        here = await self._source.own_lineage()
        async with AsyncExitStack() as stack:
            view = await stack.enter_async_context(snapshots.frozen(call))
            lines = [_Line(here.name, lineage=here, tree=LayeredTree(view.tree))]
            bases: dict[StateId, Tree] = {}
            for peer in {each.name: each for each in params.forks if each.name != here.name}.values():
                try:
                    other = await stack.enter_async_context(self._others.opened(peer))
                except OSError as error:
                    lines.append(_Line(peer.name, problem=error.strerror or str(error)))
                    continue
                assert other.bases is not None
                base = bases.setdefault(other.bases.base.state, other.base)
                lines.append(_Line(peer.name, peer, other.lineage, other.theirs, base))
            pairs: list[PairRecord | _Pair] = []
            for a, b in combinations(lines, 2):
                if a.problem or b.problem:
                    pairs.append(_problem(a, b, a.problem or b.problem))
                elif a.peer is None:
                    assert b.base is not None
                    pairs.append(_Pair(a, b, b.base))
                else:
                    pairs.append(await self._forks(a, b, bases, stack))
            compared = _Compared(keep_going_of(call))
            records = await in_answer_thread(compared.records, pairs)
        return ConflictsResult([line.name for line in lines], records, await self._below(call))

    async def _forks(self, a: _Line, b: _Line, bases: dict[StateId, Tree], stack: AsyncExitStack) -> PairRecord | _Pair:
        """Find the base of two forks: a state of this workspace, or of one that was merged into it."""
        assert a.lineage is not None
        assert b.lineage is not None
        try:
            state = find_bases(a.lineage, b.lineage).base.state
            if state not in bases and state in (await self._source.own_lineage()).states:
                bases[state] = LayeredTree(await stack.enter_async_context(self._source.tree(state)))
            if state in bases:
                return _Pair(a, b, bases[state])
            assert a.peer is not None
            assert b.peer is not None
            made: MergeResult = await call_peer(a.peer, "merge", MergeParams(fork=b.peer, dry_run=True))
        except OSError as error:
            return _problem(a, b, error.strerror or str(error))
        # Which further paths both changed without a conflict is known to these two only.
        paths = [each.path for each in made.conflicts]
        repositories = [each.path for each in made.repositories]
        return PairRecord(a.name, b.name, len(paths), paths[:CHANGES_LISTED], made.conflicts, repositories)

    async def _below(self, call: CallContext) -> list[BelowRecord] | None:
        try:
            found = await self._apply(ApplyParams(dry_run=True), call)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # no overlay, or one over an archive or a snapshot
                raise
            return None
        return [BelowRecord(each.path, each.reason) for each in found.conflicts]


class _Compared:
    """Compares pairs of lines.  A worker thread."""

    def __init__(self, keep_going: Callable[[], None]) -> None:
        self._keep_going = keep_going
        self._changed: dict[tuple[int, int], _Changed] = {}  # by the ids of trees, which live as long as this
        self._texts: list[TextCase] = []  # for git
        self._scopes: dict[_Pair, list[bytes]] = {}

    def records(self, pairs: Sequence[PairRecord | _Pair]) -> list[PairRecord]:
        """Return what a merge of each pair would find; a record stays as it is.

        git merges the texts of all pairs together, except those whose result is certain without it (bench/NOTES.md).
        """
        # Start-up: the first call on the control socket does not wait for this import.
        from protocol.merge.git import git_text_merge  # noqa: PLC0415

        found: list[PairRecord | _TextsError] = []
        for pair in pairs:
            try:
                found.append(pair if isinstance(pair, PairRecord) else self._record(pair, self._collect))
            except _TextsError as error:
                found.append(error)
        by_git = iter(git_text_merge(self._texts, self._keep_going))
        records = []
        for pair, each in zip(pairs, found, strict=True):
            if isinstance(each, _TextsError):
                assert isinstance(pair, _Pair)
                results = [next(by_git) if known is None else known for known in each.known]
                records.append(self._record(pair, functools.partial(_known, results)))
            else:
                records.append(each)
        return records

    def _collect(self, cases: Sequence[TextCase], keep_going: Callable[[], None]) -> Sequence[TextResult]:
        from protocol.merge.git import certain_result  # noqa: PLC0415 (as above)

        known: list[TextResult | None] = []
        for case in cases:
            keep_going()
            known.append(certain_result(case))
        results = [each for each in known if each is not None]
        if len(results) < len(cases):
            self._texts += [case for case, each in zip(cases, known, strict=True) if each is None]
            raise _TextsError(known)
        return results

    def _record(self, pair: _Pair, text_merge: TextMerge) -> PairRecord:
        """Return what a merge of a pair would find."""
        from protocol.merge.three_way import merge  # noqa: PLC0415 (as above)

        a, b = pair.a.tree, pair.b.tree
        assert a is not None
        assert b is not None
        of_a, of_b = self._since(pair.base, a), self._since(pair.base, b)
        shared = sorted(of_a.paths & of_b.paths, key=walk_order)
        if pair not in self._scopes:
            self._scopes[pair] = _where_both(of_a.paths, of_b.paths)
        scopes = self._scopes[pair]
        conflicts: Sequence[Conflict] = ()
        repositories: Sequence[bytes] = ()
        if scopes:
            paths = [] if of_a.linked or of_b.linked else scopes
            done = merge(pair.base, a, b, paths=paths, keep_going=self._keep_going, text_merge=text_merge)
            conflicts, repositories = done.conflicts, done.repositories
        return PairRecord(
            pair.a.name,
            pair.b.name,
            len(shared),
            list(map(wire_path, shared[:CHANGES_LISTED])),
            list(map(conflict_record, conflicts)),
            list(map(wire_path, repositories)),
        )

    def _since(self, base: Tree, tree: Tree) -> _Changed:
        key = (id(base), id(tree))
        if key not in self._changed:
            found = self._changed[key] = _Changed()
            for one in differences(base, tree, self._keep_going):
                if one.kind is not None or has_links(one.old) or has_links(one.new):
                    found.paths.add(one.path)
                    found.linked |= has_links(one.old) or has_links(one.new)
        return self._changed[key]


def _known(
    results: Sequence[TextResult], _cases: Sequence[TextCase], _keep_going: Callable[[], None]
) -> Sequence[TextResult]:
    return results


def _where_both(a: set[bytes], b: set[bytes]) -> list[bytes]:
    """Return the outermost paths at which a merge may find changes of both sides that concern each other.

    A change of a directory concerns what is below it, and a git repository is one unit.
    """
    a, b = (paths | set(_repositories(paths)) for paths in (a, b))
    of_a, of_b = PathScope(a), PathScope(b)
    return outermost([path for path in a if of_b.meets(path)] + [path for path in b if of_a.meets(path)])


def _repositories(paths: set[bytes]) -> Iterator[bytes]:
    for path in paths:
        parts = path.split(b"/")
        if _GIT in parts:
            yield b"/".join(parts[: parts.index(_GIT) + 1])
