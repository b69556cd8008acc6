"""Merge the changes from one tree to another into a third.

`docs/forks.md` has a table of the rules.  Only the paths that `theirs` changed are looked at, and what is in `ours` at
these paths: the rest of `ours` stays as it is.

How it works: the paths that `theirs` changed, and the directories above them, are decided one by one, the deepest
first.  When the turn of a directory comes, everything below it that `theirs` changed is decided, so it is known whether
the directory will be empty, or must exist.  A conflict between a directory and something else replaces all decisions
below it, which are the last ones that were made.

Threading: as for `protocol.tree`; a merge only reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from protocol.diff.tree_diff import (
    Change,
    Pair,
    candidate_pairs,
    compare_pairs,
    directories_above,
    entry_or_none,
    has_links,
    is_at_or_below,
    is_below,
    outermost,
    walk_order,
)
from protocol.errors import os_error
from protocol.merge.git import TextMerge, git_text_merge
from protocol.merge.links import merge_links
from protocol.merge.merged_tree import Contents, MergedTree, Node, foreign, joined
from protocol.merge.repositories import Decided, Repositories
from protocol.merge.sides import (
    KEPT_SUFFIX,
    Conflict,
    ConflictReason,
    Merge,
    Policy,
    Side,
    Sides,
    Trees,
    merged_metadata,
    metadata_of,
    type_of,
)
from protocol.tree import Tree, TreeEntry

__all__ = ["Conflict", "ConflictReason", "Merge", "Policy", "merge"]

_NAME_BYTES_MAX: Final = 255  # NAME_MAX


def merge(
    base: Tree,
    ours: Tree,
    theirs: Tree,
    *,
    paths: Sequence[bytes] = (),
    policy: Policy = "fail",
    keep_going: Callable[[], None] = lambda: None,
    text_merge: TextMerge = git_text_merge,
    now_ns: int | None = None,
) -> Merge:
    """Merge the changes from `base` to `theirs` into `ours`; see `Merge` for what is returned.

    Takes as long as the changes of `theirs`, if `theirs.touched(base)` names them.  `paths` restricts the merge to
    these paths and everything below them: other names (hard links) of the files there do not change.  `keep_going` is
    called often; an exception that it raises ends the work.  `text_merge` merges the texts that both sides changed, all
    of them in one call.  `now_ns` is the mtime of merged texts (None: the time of the call).

    FileNotFoundError for a path that is in none of the trees; OSError if a tree cannot be read.
    """
    for path in paths:
        if all(entry_or_none(tree, path) is None for tree in (base, ours, theirs)):
            raise os_error(2, os.fsdecode(path))
    trees = Trees(base, ours, theirs, keep_going)
    return _Merger(trees, policy, paths, time.time_ns() if now_ns is None else now_ns).run(text_merge)


@dataclass(slots=True)
class _Decision:
    """The outcome of a merge for one path.  `nodes` has nothing if it stays as in `ours`."""

    path: bytes
    nodes: dict[bytes, Node | None] = field(default_factory=dict)
    conflicts: list[Conflict] = field(default_factory=list)


class _Merger:
    def __init__(self, trees: Trees, policy: Policy, paths: Sequence[bytes], now_ns: int) -> None:
        self._trees = trees
        self._policy = policy
        self._side: Side = "theirs" if policy == "theirs" else "ours"
        self._scopes = [] if b"" in paths else outermost(paths)  # none: everything
        self._above_scopes: set[bytes] = set()
        self._now_ns = now_ns
        self._contents = Contents(trees)
        self._entries_of_ours: dict[bytes, TreeEntry | None] = {}  # of the paths that `theirs` changed
        self._linked: list[bytes] = []  # paths of files with several names
        self._decisions: list[_Decision] = []
        # Directories with something below that exists in the merged tree: without a conflict, or in one.
        self._needed: set[bytes] = set()
        self._disputed: set[bytes] = set()
        self._alive: set[bytes] = set()  # with something below that the merge makes
        # Paths of `ours` that are removed, and those that stay only because of a conflict.
        self._removed: set[bytes] = set()
        self._soft: set[bytes] = set()
        self._taken_names: set[bytes] = set()
        self._repositories = Decided()

    def _is_known(self, path: bytes) -> bool:
        return any(entry_or_none(tree, path) is not None for tree in (self._trees.base, self._trees.theirs))

    def run(self, text_merge: TextMerge) -> Merge:
        """See `merge`."""
        changed = self._changed_by_theirs()
        self._repositories = Repositories(self._trees).decide(changed)
        if self._repositories.kept:
            kept = frozenset(self._repositories.kept)
            changed = {path: sides for path, sides in changed.items() if not is_at_or_below(path, kept)}
            self._linked = [path for path in self._linked if not is_at_or_below(path, kept)]
        for sides in changed.values():
            self._trees.keep_going()
            if _is_leaf_of_both(sides) and sides.path not in self._repositories.taken:
                self._contents.add(sides)
        self._contents.merge_texts(text_merge)
        self._entries_of_ours = {path: sides.ours for path, sides in changed.items()}
        above = directories_above(changed)
        in_ours = directories_above([path for path, sides in changed.items() if sides.ours is not None])
        for path in sorted({*changed, *above}, key=walk_order, reverse=True):
            self._trees.keep_going()
            found = changed.get(path)
            if found is None and path in in_ours:
                self._add(_Decision(path))  # a directory that stays as it is
            else:
                self._decide(path, found)
        return self._result()

    def _changed_by_theirs(self) -> dict[bytes, Sides]:
        """Find what `theirs` changed within the scopes."""
        trees = self._trees
        found: dict[bytes, Sides] = {}
        scopes = [path for path in self._scopes if self._is_known(path)]
        if self._scopes and not scopes:
            return found
        self._above_scopes = directories_above(scopes)
        for base, theirs in candidate_pairs(trees.base, trees.theirs, paths=scopes):
            trees.keep_going()
            entry = base or theirs
            if entry is None:
                continue
            path = entry.path
            ours = entry_or_none(trees.ours, path)
            if has_links(base) or has_links(ours) or has_links(theirs):
                self._linked.append(path)
            is_content_of_base = None
            if base is not None and theirs is not None:
                is_content_of_base = trees.is_same_content(trees.base, base, trees.theirs, theirs)
                has_same_mtime = base.mtime_ns == theirs.mtime_ns or base.is_dir
                if is_content_of_base and has_same_mtime and metadata_of(base) == metadata_of(theirs):
                    continue
            found[path] = Sides(path, base, ours, theirs, is_content_of_base)
        return found

    # -- one path --------------------------------------------------------------------------------
    def _decide(self, path: bytes, sides: Sides | None) -> None:
        if sides is None:  # a directory that `theirs` did not change
            entry = entry_or_none(self._trees.theirs, path)
            if entry is None or not entry.is_dir:
                self._add(_Decision(path))  # changed by `theirs`, but not within the paths to merge
                return
            sides = Sides(path, entry, entry_or_none(self._trees.ours, path), entry)
        base, ours, theirs = sides.base, sides.ours, sides.theirs
        if path in self._repositories.taken:
            decision = self._removal(path) if theirs is None else _Decision(path, {path: self._taken(path, theirs)})
        elif theirs is None:
            decision = self._decide_removed(sides, base, ours)
        elif ours is None:
            decision = self._decide_missing(sides, base, theirs)
        elif ours.is_dir and theirs.is_dir:
            merged, conflicts = merged_metadata(path, base if base and base.is_dir else None, ours, theirs, self._side)
            decision = _Decision(path, conflicts=conflicts)
            if merged != ours:
                decision.nodes[path] = Node(merged, self._trees.ours, path, below="ours")
        elif ours.is_dir or theirs.is_dir:
            decision = self._decide_directory_or_file(sides, base, ours, theirs)
        elif type_of(ours) != type_of(theirs):
            decision = self._decide_types(sides, base, ours, theirs)
        else:
            decision = self._decide_leaf(path, _same_type(base, ours), ours, theirs)
        self._add(decision)

    def _add(self, decision: _Decision) -> None:
        path = decision.path
        self._decisions.append(decision)
        above = path.rpartition(b"/")[0]
        if decision.conflicts or path in self._disputed:
            self._disputed.add(above)
        if path in self._alive or any(decision.nodes.values()):
            self._alive.add(above)
        if path in self._needed or (not decision.conflicts and any(decision.nodes.values())):
            self._needed.add(above)

    def _decide_removed(self, sides: Sides, base: TreeEntry | None, ours: TreeEntry | None) -> _Decision:
        """`theirs` removed it."""
        path = sides.path
        assert base is not None
        if ours is None or ours.is_dir != base.is_dir:
            # Removed in both.  A file that became a directory was removed as well, and the other way round.
            return _Decision(path)
        if not ours.is_dir:
            if self._trees.is_same(self._trees.base, base, self._trees.ours, ours):
                return self._removal(path)
            conflict = Conflict(path, "delete/modify", "changed in ours, deleted in theirs")
            return self._removal_in_conflict(path, conflict)
        left = self._left(path)
        if any(child not in self._soft for child in left) or path in self._needed:
            return _Decision(path)
        conflict = Conflict(path, "delete/modify", "metadata changed in ours, deleted in theirs")
        if metadata_of(base) != metadata_of(ours):
            if left or path in self._disputed:
                self._soft.add(path)
                return _Decision(path, conflicts=[conflict])
            return self._removal_in_conflict(path, conflict)
        if left or path in self._alive:
            self._soft.add(path)
            return _Decision(path)
        return self._removal(path)

    def _left(self, path: bytes) -> list[bytes]:
        """The paths in a directory of `ours` that are not removed."""
        return [child.path for child in self._trees.ours.entries(path) if child.path not in self._removed]

    def _removal(self, path: bytes) -> _Decision:
        self._removed.add(path)
        return _Decision(path, {path: None})

    def _removal_in_conflict(self, path: bytes, conflict: Conflict) -> _Decision:
        if self._policy == "theirs":
            decision = self._removal(path)
            decision.conflicts.append(conflict)
            return decision
        self._soft.add(path)
        return _Decision(path, conflicts=[conflict])

    def _decide_missing(self, sides: Sides, base: TreeEntry | None, theirs: TreeEntry) -> _Decision:
        """`theirs` has it, `ours` does not."""
        path = sides.path
        taken = _Decision(path, {path: self._taken(path, theirs)})
        if base is None or base.is_dir != theirs.is_dir:
            return taken
        if theirs.is_dir:
            if path in self._needed:
                return taken
            if metadata_of(base) == metadata_of(theirs):
                return taken if path in self._alive else _Decision(path)
            conflict = Conflict(path, "delete/modify", "deleted in ours, metadata changed in theirs")
            is_taken = self._policy in ("theirs", "markers") or path in self._alive
            return _Decision(path, taken.nodes if is_taken else {}, [conflict])
        if self._trees.is_same(self._trees.base, base, self._trees.theirs, theirs):
            return _Decision(path)  # only its mtime differs
        conflict = Conflict(path, "delete/modify", "deleted in ours, changed in theirs")
        return _Decision(path, taken.nodes if self._policy in ("theirs", "markers") else {}, [conflict])

    def _decide_directory_or_file(
        self, sides: Sides, base: TreeEntry | None, ours: TreeEntry, theirs: TreeEntry
    ) -> _Decision:
        """One side has a directory, the other one something else."""
        path, trees = sides.path, self._trees
        if ours.is_dir:
            is_same = base is not None and base.is_dir and metadata_of(base) == metadata_of(ours)
            if is_same and path not in self._disputed and not self._left(path):
                return _Decision(path, {path: self._taken(path, theirs)})
            if base is not None and trees.is_same(trees.base, base, trees.theirs, theirs):
                return _Decision(path)  # only its mtime differs
            return self._disagreement(sides, "directory/file", "a directory in ours, not in theirs")
        if base is not None and not base.is_dir and trees.is_same(trees.base, base, trees.ours, ours):
            return _Decision(path, {path: self._taken(path, theirs)})
        is_same = base is not None and base.is_dir and metadata_of(base) == metadata_of(theirs)
        if is_same and path not in self._needed and path not in self._disputed:
            return _Decision(path)  # `theirs` only removed something below
        return self._disagreement(sides, "directory/file", "a directory in theirs, not in ours")

    def _decide_types(self, sides: Sides, base: TreeEntry | None, ours: TreeEntry, theirs: TreeEntry) -> _Decision:
        """Neither is a directory, and they are of different types."""
        path, trees = sides.path, self._trees
        if base is not None and trees.is_same(trees.base, base, trees.ours, ours):
            return _Decision(path, {path: self._taken(path, theirs)})
        if base is not None and trees.is_same(trees.base, base, trees.theirs, theirs):
            return _Decision(path)  # only its mtime differs
        if base is None:
            return self._disagreement(sides, "created", "created on both sides, with different types")
        return self._disagreement(sides, "type", "of another type in ours than in theirs")

    def _disagreement(self, sides: Sides, reason: ConflictReason, detail: str) -> _Decision:
        """A conflict about everything at a path and below it."""
        path = sides.path
        theirs = sides.theirs
        assert theirs is not None
        dropped = []
        while self._decisions and is_below(self._decisions[-1].path, path):
            dropped.append(self._decisions.pop())
        for decision in dropped:
            self._removed.difference_update(decision.nodes)
        self._needed.discard(path)
        self._alive.discard(path)
        if self._policy == "theirs":
            if path in self._above_scopes:  # only what was asked for
                nodes = {at: node for decision in reversed(dropped) for at, node in decision.nodes.items() if node}
                nodes[path] = self._taken(path, theirs)
            else:
                nodes = {path: self._taken(path, theirs, whole=theirs.is_dir)}
            return _Decision(path, dict(nodes), [Conflict(path, reason, detail)])
        self._soft.add(path)
        if self._policy != "markers":
            return _Decision(path, conflicts=[Conflict(path, reason, detail)])
        return self._kept_aside(path, theirs, Conflict(path, reason, detail))

    def _kept_aside(self, path: bytes, theirs: TreeEntry, conflict: Conflict) -> _Decision:
        """Keep `ours` at the path, and `theirs` under another name."""
        name = self._free_name(path)
        node = self._taken(path, theirs, whole=theirs.is_dir)
        entry = msgspec.structs.replace(node.entry, path=name, nlink=node.entry.nlink if theirs.is_dir else 1)
        conflict = msgspec.structs.replace(conflict, kept_as=name)
        return _Decision(path, {name: msgspec.structs.replace(node, entry=entry)}, [conflict])

    def _free_name(self, path: bytes) -> bytes:
        above, _, name = path.rpartition(b"/")
        number = 1
        while True:
            suffix = KEPT_SUFFIX if number == 1 else KEPT_SUFFIX + b"%d" % number
            found = joined(above, _shortened(name, _NAME_BYTES_MAX - len(suffix)) + suffix)
            if found not in self._taken_names and all(
                entry_or_none(tree, found) is None for tree in (self._trees.ours, self._trees.theirs)
            ):
                self._taken_names.add(found)
                return found
            number += 1

    def _taken(self, path: bytes, theirs: TreeEntry, *, whole: bool = False) -> Node:
        """The version of `theirs`; `whole`: with everything below it."""
        entry = msgspec.structs.replace(theirs, path=path, inode=foreign(theirs.inode))
        return Node(entry, self._trees.theirs, path, below="tree" if whole else "nodes")

    # -- files, symlinks and special files that both sides have ------------------------------------
    def _decide_leaf(self, path: bytes, base: TreeEntry | None, ours: TreeEntry, theirs: TreeEntry) -> _Decision:
        merged, conflicts = merged_metadata(path, base, ours, theirs, self._side)
        decision = _Decision(path, conflicts=conflicts)
        content = self._contents.of(path)
        is_taken, data = content.source == "theirs", content.data
        if content.source == "same":
            merged = msgspec.structs.replace(merged, mtime_ns=_merged_mtime(base, ours, theirs))
        elif content.source == "conflict":
            conflict = Conflict(path, content.reason, content.detail)
            is_taken = self._policy == "theirs"
            if self._policy != "markers":
                data = None
            elif data is None:
                aside = self._kept_aside(path, theirs, conflict)
                decision.nodes |= aside.nodes
                conflict = aside.conflicts[0]
            decision.conflicts.append(conflict)
        if is_taken:
            content_of_theirs = {name: getattr(theirs, name) for name in ("size", "target", "rdev", "mtime_ns")}
            merged = msgspec.structs.replace(merged, **content_of_theirs)
            decision.nodes[path] = Node(merged, self._trees.theirs, path)
        elif data is not None:
            merged = msgspec.structs.replace(merged, size=len(data), mtime_ns=self._now_ns)
            decision.nodes[path] = Node(merged, self._trees.ours, path, data)
        elif merged != ours:
            decision.nodes[path] = Node(merged, self._trees.ours, path)
        return decision

    # -- the result ------------------------------------------------------------------------------
    def _result(self) -> Merge:
        nodes: dict[bytes, Node | None] = {}
        conflicts: list[Conflict] = []
        for decision in reversed(self._decisions):
            nodes |= decision.nodes
            conflicts += decision.conflicts
        conflicts += merge_links(self._trees, self._linked, nodes, conflicts, self._policy, self._scopes)
        conflicts.sort(key=lambda conflict: walk_order(conflict.path))
        tree = MergedTree(self._trees.ours, nodes)
        changes = tuple(self._changes(tree, nodes))
        return Merge(tree, tuple(outermost(list(nodes))), changes, tuple(conflicts), self._repositories.both)

    def _changes(self, tree: MergedTree, nodes: dict[bytes, Node | None]) -> Iterator[Change]:
        ours = self._trees.ours
        for one in compare_pairs(ours, tree, self._changed_pairs(tree, nodes), contents=False):
            self._trees.keep_going()
            node = nodes.get(one.path)
            kind = one.kind
            if node is not None and kind in {None, "metadata", "modified"}:
                has_content = node.data is not None or node.tree is not ours or node.source != one.path
                kind = "modified" if has_content else "metadata"
            if kind is not None:
                yield Change(one.path, kind, one.old, one.new)

    def _changed_pairs(self, tree: MergedTree, nodes: dict[bytes, Node | None]) -> Iterator[Pair]:
        """The entries, in `ours` and in the merged tree, of the paths that differ and of those below them."""
        ours = self._trees.ours
        found: list[Pair] = []
        for path in sorted(nodes, key=walk_order):
            node = nodes[path]
            known = path in self._entries_of_ours
            old = self._entries_of_ours[path] if known else entry_or_none(ours, path)
            if node is not None and (
                node.below == "tree" or (old is not None and old.is_dir and not node.entry.is_dir)
            ):
                return candidate_pairs(ours, tree)  # with what `nodes` does not name
            found.append((old, None if node is None else node.entry))
        return iter(found)


def _same_type(base: TreeEntry | None, ours: TreeEntry) -> TreeEntry | None:
    """`base` if it is of the type of `ours`: otherwise `ours` was created since."""
    return base if base is not None and type_of(base) == type_of(ours) else None


def _is_leaf_of_both(sides: Sides) -> bool:
    """Whether both sides have the same type there, which is not that of directories."""
    ours, theirs = sides.ours, sides.theirs
    return ours is not None and theirs is not None and not ours.is_dir and type_of(ours) == type_of(theirs)


def _merged_mtime(base: TreeEntry | None, ours: TreeEntry, theirs: TreeEntry) -> int:
    """The mtime of a content that is the same on both sides: the later one that was set since `base`."""
    if base is not None and theirs.mtime_ns == base.mtime_ns:
        return ours.mtime_ns
    if base is not None and ours.mtime_ns == base.mtime_ns:
        return theirs.mtime_ns
    return max(ours.mtime_ns, theirs.mtime_ns)


def _shortened(name: bytes, most: int) -> bytes:
    """`name` in at most `most` bytes; a name in UTF-8 is not cut within a character."""
    if len(name) <= most:
        return name
    try:
        name.decode()
    except UnicodeDecodeError:
        return name[:most]
    return name[:most].decode("utf-8", "ignore").encode()
