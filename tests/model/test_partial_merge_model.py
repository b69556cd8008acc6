"""Merges that are limited to paths, whole ones, edits and undos in any order, compared with a plain model.

The two workspaces are volumes in memory, with the lineages, logs and deltas of real ones, and without daemons.

Invariants:

1. The base of a merge is the source as it was at the last whole merge, or else the fork point.
2. A merge that is limited to paths changes no other path, whatever is linked.
3. An undo of a merge, limited or not, makes the next merge offer what it brought.
4. What was merged before, and is the same in both, is no conflict later.
5. A merge that is repeated changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

import msgspec
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from protocol.backends.memory import MemoryVolume
from protocol.diff.tree_diff import is_below
from protocol.merge.git import TextCase, TextResult
from protocol.merge.merged_tree import joined
from protocol.merge.sides import Merge
from protocol.merge.three_way import merge
from protocol.tree import Tree, TreeEntry
from protocol.volume import ROOT_INODE, SUPERUSER, AttributeChanges
from vfsd.daemon.merging.delta import DeltaReader, write_delta
from vfsd.daemon.merging.lineage import MergeLog, find_bases, with_merged
from vfsd.daemon.merging.trees import LayeredTree
from vfsd.operations.forks import Ancestor, Lineage, MergedState, StateId

EXAMPLES = settings(
    max_examples=min(500, settings().max_examples), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
Policy = Literal["ours", "theirs"]


class Side:
    """One workspace; `times` gives the times of the states of all of them."""

    def __init__(self, name: str, times: itertools.count[int]) -> None:
        self.name = name
        self.volume = MemoryVolume()
        self.log = MergeLog()
        self.ancestors: tuple[Ancestor, ...] = ()
        self._times = times
        self._states: dict[int, StateId] = {}
        self._undo: list[StateId] = []

    # -- states ----------------------------------------------------------------------------------
    def take(self, name: str) -> StateId:
        info = self.volume.take_snapshot(name)
        self._states[info.serial] = StateId(name, info.serial, next(self._times))
        return self._states[info.serial]

    def fork_point(self, state: StateId) -> None:
        assert self.volume.take_snapshot(state.name).serial == state.serial
        self._states[state.serial] = state

    @property
    def newest(self) -> int:
        return max(self._states)

    def lineage(self) -> Lineage:
        return Lineage(self.name, self.name, self.ancestors, self.log.now, tuple(self._states.values()))

    def undo(self) -> bool:
        if not self._undo:
            return False
        state = self._undo.pop()
        self.log.record(self.newest, self.log.at(state.serial))
        self.volume.restore_snapshot(state.name)
        return True

    # -- edits -----------------------------------------------------------------------------------
    def at(self, path: bytes) -> int | None:
        number = ROOT_INODE
        for name in filter(None, path.split(b"/")):
            found = self.volume.find(number, name)
            if found is None:
                return None
            number = found.inode
        return number

    def edit(self, what: str, path: bytes, value: object) -> None:
        """Make one edit; what makes no sense changes nothing."""
        above, _, name = path.rpartition(b"/")
        try:
            if what in {"write", "link", "rename"}:
                self._make_directory(above if what == "write" else bytes(value).rpartition(b"/")[0])  # type: ignore[call-overload]
            if what == "mkdir":
                self._make_directory(path)
            elif what == "write":
                self._write(above, name, value)
            elif what == "remove":
                self._remove(path)
            elif (number := self.at(path)) is None:
                return
            elif what == "chmod":
                assert isinstance(value, int)
                self.volume.setattr(number, AttributeChanges(mode=value))
            else:
                assert isinstance(value, bytes)
                other = self._place(value)
                if what == "link":
                    self.volume.link(number, *other)
                else:
                    self.volume.rename(*self._place(path), *other)
        except OSError:
            pass

    def _place(self, path: bytes) -> tuple[int, bytes]:
        above, _, name = path.rpartition(b"/")
        number = self.at(above)
        if number is None:
            raise FileNotFoundError
        return number, name

    def _make_directory(self, path: bytes) -> None:
        for end in [at for at in range(1, len(path) + 1) if path[at : at + 1] in {b"", b"/"}]:
            if self.at(path[:end]) is None:
                self.volume.mkdir(*self._place(path[:end]), 0o755, SUPERUSER)

    def _write(self, above: bytes, name: bytes, value: object) -> None:
        assert isinstance(value, bytes)
        number = self.at(joined(above, name))
        if number is None:
            number = self.volume.mknod(*self._place(joined(above, name)), 0o100644, 0, SUPERUSER).inode
        self.volume.setattr(number, AttributeChanges(size=0))
        self.volume.write(number, 0, value)

    def _remove(self, path: bytes) -> None:
        with self.volume.tree() as live:
            for entry in reversed(list(live.walk(path))):
                remove = self.volume.rmdir if entry.is_dir else self.volume.unlink
                remove(*self._place(entry.path))

    def files(self) -> dict[bytes, bytes]:
        with self.volume.tree() as live:
            return {each.path: live.read(each.path, 0, each.size) for each in live.walk() if each.is_file}

    def seen(self) -> dict[bytes, tuple[object, ...]]:
        """Modes, contents and links of everything."""
        found: dict[bytes, tuple[object, ...]] = {}
        names: dict[int, list[bytes]] = {}
        with self.volume.tree() as live:
            entries = list(live.walk())
            for entry in entries:
                names.setdefault(entry.inode, []).append(entry.path)
            for entry in entries:
                content = live.read(entry.path, 0, entry.size) if entry.is_file else b""
                found[entry.path] = entry.mode, content, () if entry.is_dir else tuple(names[entry.inode])
        return found

    def outside(self, paths: Sequence[bytes]) -> dict[bytes, TreeEntry]:
        """Everything that is not at, below or above `paths`; without what follows the number of a file's names."""
        with self.volume.tree() as live:
            return {
                entry.path: msgspec.structs.replace(entry, nlink=0, ctime_ns=0)
                for entry in live.walk()
                if not any(is_below(entry.path, path) or is_below(path, entry.path) for path in paths)
            }

    # -- merges ----------------------------------------------------------------------------------
    def merge(self, source: Side, paths: Sequence[bytes] = (), policy: Policy = "ours") -> Merge | None:
        """Merge `source` into this workspace; None if `paths` are in no tree."""
        here, other = self.lineage(), source.lineage()
        bases = find_bases(here, other)
        number = next(self._times)
        kept, name = None, None  # of a merge of paths nothing is kept
        if not paths:
            name = f"merged-{number}"
            kept = source.take(name)
            source.log.record(kept.serial - 1, [*source.log.now, MergedState(source.name, source.name, kept)])
        with ExitStack() as stack:
            base = theirs = LayeredTree(stack.enter_context(self.volume.tree(bases.fork_point.name)))
            old: Tree = LayeredTree(stack.enter_context(source.volume.tree(bases.fork_point.name)))
            if bases.base.of_other:
                new = LayeredTree(stack.enter_context(source.volume.tree(bases.base.state.name)))
                base = theirs = _received(theirs, old, new)
                old = new
            elif bases.base.state != bases.fork_point:
                base = LayeredTree(stack.enter_context(self.volume.tree(bases.base.state.name)))
            theirs = _received(theirs, old, LayeredTree(stack.enter_context(source.volume.tree(name))))
            ours = LayeredTree(stack.enter_context(self.volume.tree()))
            try:
                done = merge(base, ours, theirs, paths=paths, policy=policy, text_merge=_no_text_merge, now_ns=77)
            except FileNotFoundError:
                return None
            merged = here.merged if kept is None else with_merged(here, other, kept)
            if done.paths:
                self._undo.append(self.take(f"safety-{number}"))
                self.volume.import_tree(done.tree, replace=True, paths=done.paths)
            self.log.record(self.newest, merged)
            return done


def _received(below: LayeredTree, old: Tree, new: Tree) -> LayeredTree:
    content = bytearray()

    def store(data: bytes) -> int:
        content.extend(data)
        return len(content) - len(data)

    reader = DeltaReader(store, lambda _: None)
    write_delta(old, new, reader.feed, lambda: None)
    return LayeredTree(below, reader.finish(), lambda at, size: bytes(content[at : at + size]))


def _no_text_merge(cases: Sequence[TextCase], _keep_going: object) -> list[TextResult]:
    return [TextResult(None, is_clean=False) for _ in cases]


def pair(before: Sequence[tuple[str, bytes, object]] = ()) -> tuple[Side, Side]:
    """A workspace and a fork of it, with the same inode numbers."""
    times = itertools.count(1)
    target, fork = Side("target", times), Side("fork", times)
    for edit in before:
        target.edit(*edit)
        fork.edit(*edit)
    state = target.take("fork-1")
    fork.fork_point(state)
    fork.ancestors = (Ancestor(target.name, target.name, state),)
    return target, fork


# --- single files -----------------------------------------------------------------------------------------------

FILES = [b"a", b"b", b"d/a", b"d/b", b"d/e/a"]
SCOPES = st.sampled_from([[b"a"], [b"b", b"d/a"], [b"d"], [b"d/e"], [b"d", b"a"], [b"d/e/a", b"b"], []])
VALUES = st.sampled_from([None, b"1", b"2", b"3"])
SIDES = st.sampled_from(["target", "fork"])
_WRITE = st.tuples(st.just("edit"), SIDES, st.sampled_from(FILES), VALUES)
_MERGE = st.tuples(st.just("merge"), st.just("target"), SCOPES, st.sampled_from(["ours", "theirs"]))
_MERGE_BOTH_WAYS = st.tuples(st.just("merge"), SIDES, SCOPES, st.sampled_from(["ours", "theirs"]))
_UNDO = st.tuples(st.just("undo"), st.just("target"), st.none(), st.none())
Files = dict[bytes, bytes | None]


class PlainModel:
    """What the files of both sides should be, and which content of each file both had at the last whole merge."""

    def __init__(self, base: Mapping[bytes, bytes]) -> None:
        self.sides: dict[str, Files] = {name: {path: base.get(path) for path in FILES} for name in ("target", "fork")}
        self.base: Files = {path: base.get(path) for path in FILES}
        self._undo: list[tuple[Files, Files]] = []

    def merge(self, into: str, paths: Sequence[bytes], policy: str, *, changes_something: bool) -> None:
        ours, theirs = self.sides[into], self.sides["fork" if into == "target" else "target"]
        if changes_something and into == "target":
            self._undo.append((dict(ours), dict(self.base)))
        for path in FILES:
            if paths and not any(is_below(path, scope) for scope in paths):
                continue
            base, here, there = self.base[path], ours[path], theirs[path]
            if here == base or (there not in (base, here) and policy == "theirs"):
                ours[path] = there
            if not paths:
                self.base[path] = there

    def undo(self) -> None:
        self.sides["target"], self.base = self._undo.pop()


def _run(steps: Sequence[tuple[str, str, object, object]]) -> None:
    base = {b"a": b"0", b"d/a": b"0", b"d/e/a": b"0"}
    target, fork = pair([("write", path, content) for path, content in base.items()])
    sides, model = {"target": target, "fork": fork}, PlainModel(base)
    for what, name, first, second in steps:
        side, other = (target, fork) if name == "target" else (fork, target)
        if what == "edit":
            assert isinstance(first, bytes)
            side.edit("remove" if second is None else "write", first, second)
            model.sides[name][first] = second if isinstance(second, bytes) else None
        elif what == "undo":
            if side.undo():
                model.undo()
        else:
            assert isinstance(first, list)
            done = side.merge(other, first, "theirs" if second == "theirs" else "ours")
            if done is not None:
                model.merge(name, first, str(second), changes_something=bool(done.paths))
        for each, expected in model.sides.items():
            assert sides[each].files() == {path: content for path, content in expected.items() if content is not None}
    target.volume.check_invariants()
    fork.volume.check_invariants()


@EXAMPLES
@given(st.lists(st.one_of(_WRITE, _WRITE, _MERGE, _MERGE, _UNDO), max_size=14))
def test_merges_of_single_paths_edits_and_undos_are_those_of_a_plain_model(
    steps: list[tuple[str, str, object, object]],
) -> None:
    _run(steps)


@EXAMPLES
@given(st.lists(st.one_of(_WRITE, _WRITE, _MERGE_BOTH_WAYS, _MERGE_BOTH_WAYS), max_size=14))
def test_merges_of_single_paths_in_both_directions_are_those_of_a_plain_model(
    steps: list[tuple[str, str, object, object]],
) -> None:
    _run(steps)


# --- whole trees ------------------------------------------------------------------------------------------------

PATHS = st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=3).map(b"/".join)
EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), PATHS, st.sampled_from([b"1", b"2"])),
        st.tuples(st.sampled_from(["link", "rename", "rename"]), PATHS, PATHS),
        st.tuples(st.sampled_from(["remove", "mkdir"]), PATHS, st.none()),
        st.tuples(st.just("chmod"), PATHS, st.sampled_from([0o700, 0o755])),
    ),
    max_size=4,
)
MERGES = st.lists(st.tuples(st.lists(PATHS, min_size=1, max_size=2), st.booleans()), max_size=4)
Edits = list[tuple[str, bytes, object]]


def test_a_file_is_merged_under_the_given_name_only() -> None:
    target, fork = pair([("write", b"a", b"0"), ("link", b"a", b"b/a")])
    fork.edit("write", b"a", b"1")
    first = target.merge(fork, [b"a"])
    assert first is not None
    assert (first.paths, target.files()) == ((b"a",), {b"a": b"1", b"b/a": b"0"})
    second = target.merge(fork)
    assert second is not None
    assert (second.conflicts, second.paths, target.files()) == ((), (b"b/a",), {b"a": b"1", b"b/a": b"1"})


@EXAMPLES
@given(EDITS, EDITS, EDITS, st.lists(PATHS, min_size=1, max_size=2), st.sampled_from(["ours", "theirs"]))
def test_a_merge_of_paths_changes_no_other_path_and_repeated_it_changes_nothing(
    before: Edits, here: Edits, there: Edits, paths: list[bytes], policy: Policy
) -> None:
    target, fork = pair(before)
    for side, edits in ((target, here), (fork, there)):
        for edit in edits:
            side.edit(*edit)
    old = target.outside(paths)
    first = target.merge(fork, paths, policy)
    if first is None:
        return
    event("conflicts" if first.conflicts else "changes" if first.paths else "nothing")
    assert target.outside(paths) == old
    target.volume.check_invariants()
    again = target.merge(fork, paths, policy)
    assert again is None or not again.paths  # None: a path is in no tree any more, because the merge removed it


@EXAMPLES
@given(EDITS, EDITS, MERGES)
def test_what_was_merged_before_and_did_not_change_is_no_conflict(
    before: Edits, there: Edits, merges: list[tuple[list[bytes], bool]]
) -> None:
    """The whole merge brings everything, whichever paths were merged before, and whether that was undone."""
    target, fork = pair(before)
    for edit in there:
        fork.edit(*edit)
    for paths, is_undone in merges:
        done = target.merge(fork, paths, "theirs")
        if done is not None and done.paths and is_undone:
            target.undo()

    done = target.merge(fork)

    assert done is not None
    assert not done.conflicts
    # A name that was merged alone can be a file of its own in the target.
    here, there_now = ({path: each[:2] for path, each in side.seen().items()} for side in (target, fork))
    assert here == there_now
    assert merges or target.seen() == fork.seen()
    target.volume.check_invariants()
