"""Hard links of a merged tree: which names are names of one file.

Two names are names of one file in the merged tree if the three-way merge of "are they names of one file?" says so: a
side that linked or separated them since `base` is followed.  A name that a side does not have says nothing about it.

All names of one file need the same content and metadata.  If the merge by paths gives them different ones, those that
`base` had at one of the names are out of date: the other side changed the file through another name.  If several are
left, the names are a conflict.

A merge that is limited to paths changes no other name.  A name in its scope stays a name of a file with names outside
while the merge does not change that file; else it becomes a file of its own, with the other names in the scope.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from protocol.diff.tree_diff import LinkedFiles, entry_or_none, has_links, is_at_or_below
from protocol.merge.merged_tree import Node, foreign
from protocol.merge.sides import Conflict, Policy, Trees, metadata_of, names_shown, type_of
from protocol.tree import Tree, TreeEntry
from protocol.values import Value

Which: TypeAlias = Literal["base", "ours", "theirs"]
WHICH: Final[tuple[Which, ...]] = ("base", "ours", "theirs")
_SEPARATED: Final = 1 << 128  # numbers of files that the merge separates from a file of `ours`


def merge_links(
    trees: Trees,
    linked: Iterable[bytes],
    nodes: dict[bytes, Node | None],
    conflicts: Sequence[Conflict],
    policy: Policy,
    scopes: Collection[bytes] = (),
) -> list[Conflict]:
    """Change `nodes`, the result of the merge by paths, so that names are linked as they should be.

    `conflicts` are those of the merge by paths; returns those of links.

    `linked` are paths that `theirs` may have changed and that are one of several names of a file on some side.  Only
    paths at and below `scopes` change; none: all.
    """
    paths = list(linked)
    return _Links(trees, nodes, conflicts, policy, scopes).run(paths) if paths else []


class _File(Value):
    """A file of the merged tree, as the merge by paths has it; `node` is None if it is as in `ours`."""

    entry: TreeEntry
    tree: Tree
    source: bytes
    data: bytes | None
    node: Node | None


class _Links:
    def __init__(
        self,
        trees: Trees,
        nodes: dict[bytes, Node | None],
        conflicts: Sequence[Conflict],
        policy: Policy,
        scopes: Collection[bytes],
    ) -> None:
        self._trees = trees
        self._nodes = nodes
        # In conflict; and those at or below which the policy decides what exists.
        existence = ("delete/modify", "directory/file")
        self._disputed = frozenset(conflict.path for conflict in conflicts if conflict.reason not in existence)
        self._uncertain = frozenset(conflict.path for conflict in conflicts if conflict.reason in existence)
        self._policy = policy
        self._scopes = frozenset(scopes or [b""])
        self._names = _FileNames(trees)
        self._whole = frozenset(path for path, node in nodes.items() if node is not None and node.below == "tree")
        self._by_name: dict[Which, Tree] = {"base": trees.base, "ours": trees.ours, "theirs": trees.theirs}
        self._entries = self._names.entries
        self._names_left: Counter[Hashable] = Counter()  # file of `ours` -> how many names of it the merged tree has
        self._used: set[int] = set()  # inode numbers of files of the merged tree
        self._separated = itertools.count(1)

    def run(self, paths: Sequence[bytes]) -> list[Conflict]:
        """See `merge_links`."""
        self._names.add(paths)
        files = {path: file for path in sorted(self._entries) if (file := self._file(path)) is not None}
        self._names_left = Counter(self._file_of(path, "ours") for path in files)
        conflicts: list[Conflict] = []
        groups: list[list[bytes]] = []
        outside = {path for path in files if not is_at_or_below(path, self._scopes)}
        self._used.update(files[path].entry.inode for path in outside)
        for group in self._groups(list(files)):
            inside = [path for path in group if path not in outside]
            kept = {self._file_of(path, "ours"): path for path in group if path in outside}
            decided = self._decided(inside, files, conflicts) if inside else []
            groups += [[path for path in part if not self._stays(path, kept, files)] for part in decided]
        for group in filter(None, groups):
            self._number(group, files)
        return conflicts

    def _stays(self, path: bytes, outside: Mapping[Hashable, bytes], files: Mapping[bytes, _File]) -> bool:
        """Return whether `path` stays a name of one of the files of `ours` in `outside`; then it has no node."""
        other = outside.get(self._file_of(path, "ours"))
        if other is None or not self._is_same(files[path], files[other]):
            return False
        self._nodes.pop(path, None)
        return True

    def _decided(
        self, group: Sequence[bytes], files: dict[bytes, _File], conflicts: list[Conflict]
    ) -> list[list[bytes]]:
        """The groups that the names in `group`, which should be names of one file, become; adds to `conflicts`.

        A conflict must not depend on names that only some policies keep: these follow the others if they can.
        """
        certain = [path for path in group if not is_at_or_below(path, self._uncertain)]
        rest = [path for path in group if is_at_or_below(path, self._uncertain)]
        found: list[list[bytes]] = []
        for part in self._groups(certain):
            value = self._value(part, files)
            if value is None:
                detail = f"its other names ({names_shown(part[1:])}) would need different content or metadata"
                conflicts.append(Conflict(part[0], "links", detail))
                found += self._resolved([*part, *rest], files)
                rest = []
                continue
            same = [path for path in rest if self._is_same(files[path], value)]
            rest = [path for path in rest if not self._is_same(files[path], value)]
            found.append([*part, *same])
            self._give(found[-1], files, value)
        if rest:
            value = self._value(rest, files)
            if value is None:
                return [*found, *([path] for path in rest)]
            self._give(rest, files, value)
            found.append(rest)
        return found

    # -- files -----------------------------------------------------------------------------------
    def _file(self, path: bytes) -> _File | None:
        """The merged file at `path`; None for nothing, a directory, and what was taken with its directory."""
        node = self._nodes.get(path)
        if node is None:
            above = path.rpartition(b"/")[0]
            if path in self._nodes or (self._whole and is_at_or_below(above, self._whole)):
                return None
            entry = self._entries[path]["ours"]
            if entry is None or entry.is_dir or self._is_replaced(above):
                return None
            return _File(entry, self._trees.ours, path, None, None)
        if node.entry.is_dir:
            return None
        return _File(node.entry, node.tree, node.source, node.data, node)

    def _is_replaced(self, directory: bytes) -> bool:
        """Whether a directory of `ours`, or one above it, is not in the merged tree."""
        while directory:
            if directory in self._nodes:
                node = self._nodes[directory]
                return node is None or node.below != "ours"
            directory = directory.rpartition(b"/")[0]
        return False

    # -- groups ----------------------------------------------------------------------------------
    def _file_of(self, path: bytes, which: Which) -> Hashable:
        """Which file a tree has at `path`; None if it has none."""
        entry = self._entries[path][which]
        if entry is None or entry.is_dir:
            return None
        return entry.inode if has_links(entry) else path

    def _groups(self, paths: Sequence[bytes]) -> list[list[bytes]]:
        """The names in `paths`, grouped by file of the merged tree."""
        together = _Union(paths)
        by_base: dict[Hashable, list[bytes]] = defaultdict(list)
        for path in paths:
            file = self._file_of(path, "base")
            if file is not None:
                by_base[file].append(path)
        for names in by_base.values():
            self._join_linked_in_base(names, together)
        for which in WHICH[1:]:
            by_file: dict[Hashable, list[bytes]] = defaultdict(list)
            for path in paths:
                file = self._file_of(path, which)
                if file is not None:
                    by_file[file].append(path)
            for names in by_file.values():
                in_base = [self._file_of(path, "base") for path in names]
                if None in in_base or len(set(in_base)) > 1:  # linked since
                    together.join(names)
        return together.groups()

    def _join_linked_in_base(self, names: Sequence[bytes], together: _Union) -> None:
        """Join the names of one file of `base` that neither side separated."""
        files = {path: (self._file_of(path, "ours"), self._file_of(path, "theirs")) for path in names}
        first: dict[Hashable, bytes] = {}
        for path in sorted(files, key=lambda path: None in files[path]):  # names that both sides have come first
            ours, theirs = files[path]
            for key in ((ours, theirs), ("ours", ours), ("theirs", theirs)):
                first.setdefault(key, path)
        for path, (ours, theirs) in files.items():
            key = ("ours", ours) if theirs is None else ("theirs", theirs) if ours is None else (ours, theirs)
            together.join([first[key], path])

    # -- one content for a group -------------------------------------------------------------------
    def _value(self, group: Sequence[bytes], files: Mapping[bytes, _File]) -> _File | None:
        """The file that all names of `group` become; None if that cannot be decided.

        What a policy made of one of the names says nothing about the others, unless all were changed alike.
        """
        if not self._disputed.isdisjoint(group):
            versions = {tuple(self._file_of(path, which) for which in WHICH) for path in group}
            if len(versions) > 1:
                return None
        values: list[_File] = []
        for path in group:
            same = next((at for at, value in enumerate(values) if self._is_same(value, files[path])), None)
            if same is None:
                values.append(files[path])
            elif files[path].entry.mtime_ns > values[same].entry.mtime_ns:
                values[same] = files[path]
        if len(values) > 1:
            values = [value for value in values if not self._is_out_of_date(value, group)]
        return values[0] if len(values) == 1 else None

    def _is_out_of_date(self, value: _File, group: Sequence[bytes]) -> bool:
        before = (self._entries[path]["base"] for path in group)
        return any(
            entry is not None and self._is_same(value, _File(entry, self._trees.base, entry.path, None, None))
            for entry in before
        )

    def _is_same(self, left: _File, right: _File) -> bool:
        if metadata_of(left.entry) != metadata_of(right.entry):
            return False
        if left.data is not None or right.data is not None:
            return left.entry.size == right.entry.size and self._bytes(left) == self._bytes(right)
        here, there = left.tree.entry(left.source), right.tree.entry(right.source)
        if left.tree is right.tree and here.inode == there.inode != 0:
            return True
        return self._trees.is_same_content(left.tree, here, right.tree, there)

    def _bytes(self, file: _File) -> bytes:
        return file.data if file.data is not None else file.tree.read(file.source, 0, file.entry.size)

    def _give(self, group: Sequence[bytes], files: dict[bytes, _File], value: _File) -> None:
        """Make all names of `group` names of `value`."""
        for path in group:
            file = files[path]
            if file is not value and not (self._is_same(file, value) and file.entry.mtime_ns == value.entry.mtime_ns):
                entry = msgspec.structs.replace(value.entry, path=path, inode=file.entry.inode)
                files[path] = _File(entry, value.tree, value.source, value.data, None)
                self._set(path, files)

    def _set(self, path: bytes, files: dict[bytes, _File]) -> None:
        """Give `path` a node."""
        file = files[path]
        node = Node(file.entry, file.tree, file.source, file.data)
        self._nodes[path] = node
        files[path] = msgspec.structs.replace(file, node=node)

    def _resolved(self, group: Sequence[bytes], files: dict[bytes, _File]) -> Iterator[list[bytes]]:
        """The groups that the policy makes of a group in conflict."""
        which: Which = "theirs" if self._policy == "theirs" else "ours"
        by_file: dict[Hashable, list[bytes]] = defaultdict(list)
        for path in group:
            entry = self._entries[path][which]
            if self._policy == "markers" or entry is None or entry.is_dir:
                yield [path]  # a file of its own, as the merge by paths has it
                continue
            by_file[self._file_of(path, which)].append(path)
            files[path] = _File(entry, self._by_name[which], path, None, None)
            if which == "ours":
                self._nodes.pop(path, None)
            else:
                files[path] = msgspec.structs.replace(
                    files[path], entry=msgspec.structs.replace(entry, inode=foreign(entry.inode))
                )
                self._set(path, files)
        yield from by_file.values()

    # -- numbers ---------------------------------------------------------------------------------
    def _number(self, group: Sequence[bytes], files: dict[bytes, _File]) -> None:
        """Give the names of a file their inode number and link count.

        Names that stay as in `ours` get a node if they are linked to, or separated from, other names that stay.  A name
        that was removed changes nothing for the others.
        """
        inode, outside = self._inode(group, files)
        if inode:
            self._used.add(inode)
        here = Counter(self._file_of(path, "ours") for path in group)
        is_linked = len(group) > 1 and (len(here) > 1 or None in here)
        is_separated = any(file is not None and self._names_left[file] > count for file, count in here.items())
        for path in group:
            file = files[path]
            if file.node is not None or is_linked or is_separated:
                entry = msgspec.structs.replace(file.entry, inode=inode, nlink=len(group) + outside)
                files[path] = msgspec.structs.replace(file, entry=entry)
                self._set(path, files)

    def _inode(self, group: Sequence[bytes], files: Mapping[bytes, _File]) -> tuple[int, int]:
        """The inode number for a file of the merged tree, and how many names it has outside the tree."""
        for path in group:
            entry = self._entries[path]["ours"]
            if entry is not None and entry.inode and entry.inode not in self._used and not entry.is_dir:
                if type_of(entry) != type_of(files[path].entry):
                    continue
                names = self._names.names_of("ours", entry.inode) if has_links(entry) else [path]
                return entry.inode, max(0, entry.nlink - len(names))
        found = files[group[0]].entry.inode
        if found in self._used or (not found and len(group) > 1):
            found = _SEPARATED + next(self._separated)
        return found, 0


class _FileNames:
    """The entries, in all trees, of paths and of all other names of the files there."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._by_name: dict[Which, Tree] = {"base": trees.base, "ours": trees.ours, "theirs": trees.theirs}
        self._files = {which: LinkedFiles(tree, trees.keep_going) for which, tree in self._by_name.items()}
        self._counts: Counter[tuple[Which, int]] = Counter()  # names that were found
        self._asked: set[tuple[Which, int]] = set()
        self.entries: dict[bytes, dict[Which, TreeEntry | None]] = {}

    def add(self, paths: Iterable[bytes]) -> None:
        """Look up `paths`, and all other names of the files at these paths, in all trees.

        A tree is asked for names only if some are missing, because a tree that is not a `NamesFiles` is walked then.
        """
        waiting = {path for path in paths if path not in self.entries}
        while waiting:
            found = [(path, which, entry) for path in waiting for which, entry in self._look_up(path).items()]
            files = {(which, entry.inode): entry for _, which, entry in found if entry is not None and has_links(entry)}
            self._counts.update(
                (which, entry.inode) for _, which, entry in found if entry is not None and has_links(entry)
            )
            incomplete = [
                file for file, entry in files.items() if self._counts[file] < entry.nlink and file not in self._asked
            ]
            self._asked.update(incomplete)
            names = (name for file in incomplete for name in self.names_of(*file))
            waiting = {name for name in names if name not in self.entries}

    def _look_up(self, path: bytes) -> dict[Which, TreeEntry | None]:
        self._trees.keep_going()
        found = self.entries[path] = {which: entry_or_none(tree, path) for which, tree in self._by_name.items()}
        return found

    def names_of(self, which: Which, inode: int) -> list[bytes]:
        """The paths of a file with several names in one of the trees."""
        return self._files[which].names_of(inode)


class _Union:
    """Disjoint sets of paths."""

    def __init__(self, paths: Iterable[bytes]) -> None:
        self._above = {path: path for path in paths}

    def _top(self, path: bytes) -> bytes:
        while self._above[path] != path:
            self._above[path] = self._above[self._above[path]]
            path = self._above[path]
        return path

    def join(self, paths: Sequence[bytes]) -> None:
        """Put `paths` into one set."""
        for path in paths[1:]:
            first, second = sorted((self._top(paths[0]), self._top(path)))
            self._above[second] = first

    def groups(self) -> list[list[bytes]]:
        """The sets, sorted, each with its paths in the order of the constructor's."""
        found: dict[bytes, list[bytes]] = {}
        for path in self._above:
            found.setdefault(self._top(path), []).append(path)
        return list(found.values())
