"""The planner: steps that make a dict model equal to a tree, for any pair of trees."""

from __future__ import annotations

import stat
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.diff.plan import Step, execute, plan
from protocol.diff.tree_diff import changes, is_below
from protocol.tree import TreeEntry
from tests.support.trees import DictTree

KINDS = (stat.S_IFREG, stat.S_IFREG, stat.S_IFREG, stat.S_IFDIR, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR)
NAMES = (b"a", b"b", b"a-", b"c")
Version = tuple[int, int, bytes, int, bytes]  # kind, mode, content, mtime, number of a shared inode
versions = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from([0o600, 0o755]),
    st.sampled_from([b"", b"x", b"y"]),
    st.sampled_from([1, 2]),
    st.sampled_from([b"", b"", b"one", b"two"]),
)
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(b"/".join)
layouts = st.dictionaries(paths, versions, max_size=8)


def tree_of(layout: dict[bytes, Version]) -> DictTree:
    """A tree in which files with the same number are names of one inode: the first says what it is."""
    tree = DictTree()
    shared: dict[bytes, TreeEntry] = {}
    first: dict[bytes, bytes] = {}
    for number, path in enumerate(sorted(layout), 100):
        kind, mode, data, mtime_ns, link = layout[path]
        if any(other != path and is_below(other, path) for other in layout):
            kind = stat.S_IFDIR
        tree._add_parents(path)
        entry = TreeEntry(path, kind | mode, mtime_ns=mtime_ns, inode=number)
        if kind == stat.S_IFREG:
            entry = replace(entry, size=len(data))
            tree.content[path] = data
            if link in shared:
                entry = replace(shared[link], path=path)
                tree.content[path] = tree.content[first[link]]
            elif link:
                shared[link], first[link] = entry, path
        elif kind == stat.S_IFLNK:
            entry = replace(entry, target=data + b"t", size=len(data) + 1)
        elif kind == stat.S_IFCHR:
            entry = replace(entry, rdev=len(data))
        tree.by_path[path] = entry
    counts = Counter(entry.inode for entry in tree.by_path.values() if entry.is_file)
    for path, entry in tree.by_path.items():
        tree.by_path[path] = replace(entry, nlink=counts[entry.inode] if entry.is_file else 1)
    return tree


class Inode:
    def __init__(self, entry: TreeEntry, content: bytes) -> None:
        self.entry = entry
        self.content = content


class Model:
    """A target that checks that each step is possible when it comes."""

    def __init__(self, tree: DictTree, wanted: DictTree) -> None:
        self.wanted = wanted
        inodes: dict[int, Inode] = {}
        self.names: dict[bytes, Inode] = {}
        for path, entry in tree.by_path.items():
            inode = Inode(entry, tree.content.get(path, b""))
            self.names[path] = inodes.setdefault(entry.inode, inode) if entry.inode else inode

    def _check_directory_above(self, path: bytes) -> None:
        assert self.names[path.rpartition(b"/")[0]].entry.is_dir

    def _make_room(self, path: bytes, old: TreeEntry | None) -> None:
        self._check_directory_above(path)
        if old is None:
            assert path not in self.names
        else:
            self.remove(old)

    def remove(self, old: TreeEntry) -> None:
        assert not any(name.startswith(old.path + b"/") for name in self.names), "not empty"
        del self.names[old.path]

    def make_directory(self, new: TreeEntry, old: TreeEntry | None) -> None:
        self._make_room(new.path, old)
        self.names[new.path] = Inode(replace(new, mode=stat.S_IFDIR | 0o700, mtime_ns=-1), b"")

    def put(self, new: TreeEntry, old: TreeEntry | None) -> None:
        self._make_room(new.path, old)
        self.names[new.path] = Inode(new, self.wanted.content.get(new.path, b""))

    def link(self, new: TreeEntry, other: bytes, old: TreeEntry | None) -> None:
        self._make_room(new.path, old)
        self.names[new.path] = self.names[other]

    def set_metadata(self, new: TreeEntry) -> None:
        self.names[new.path].entry = new

    def state(self) -> dict[bytes, tuple[object, ...]]:
        """What can be seen of each path, with the paths that share its inode."""
        return {
            path: (
                inode.entry.mode,
                inode.entry.mtime_ns,
                inode.entry.target,
                inode.entry.rdev,
                inode.content,
                frozenset(other for other, its in self.names.items() if its is inode),
            )
            for path, inode in self.names.items()
        }


def executed(live: DictTree, wanted: DictTree, steps: list[Step]) -> Model:
    model = Model(live, wanted)
    execute(steps, model)
    return model


@given(layouts, layouts)
@pytest.mark.slow
def test_the_steps_make_any_tree_equal_to_any_other(before: dict[bytes, Version], after: dict[bytes, Version]) -> None:
    live, wanted = tree_of(before), tree_of(after)
    steps = plan(live, wanted)
    model = Model(live, wanted)
    execute(steps, model)
    assert model.state() == Model(wanted, wanted).state()
    old, new = Model(live, live).state(), Model(wanted, wanted).state()
    for step in steps:
        is_changed_directory = step.new is not None and step.new.is_dir
        assert old.get(step.path) != new.get(step.path) or is_changed_directory, "a step for an equal path"
    reported = [step.path for step in steps if step.change is not None]
    assert len(reported) == len(set(reported))
    assert set(reported) >= {change.path for change in changes(live, wanted)}


@given(layouts)
def test_equal_trees_need_no_steps(layout: dict[bytes, Version]) -> None:
    assert plan(tree_of(layout), tree_of(layout)) == []


@given(layouts, layouts)
def test_without_removal_entries_that_only_the_target_has_stay(
    before: dict[bytes, Version], after: dict[bytes, Version]
) -> None:
    live, wanted = tree_of(before), tree_of(after)
    found = executed(live, wanted, plan(live, wanted, remove=False)).state()
    replaced = {path for path, entry in live.by_path.items() if entry.is_dir and path in wanted.by_path}
    replaced = {path for path in replaced if not wanted.by_path[path].is_dir}
    kept = {path for path in live.by_path if not any(is_below(path, top) for top in replaced)}
    assert found.keys() == kept | wanted.by_path.keys()
    expected = Model(wanted, wanted).state()
    assert all(found[path][:5] == expected[path][:5] for path in wanted.by_path)


LINKED = dict.fromkeys((b"a", b"b"), (stat.S_IFREG, 384, b"x", 1, b"one"))


@given(layouts, layouts, st.lists(paths, min_size=1, max_size=3))
@example(LINKED, dict.fromkeys(LINKED, (stat.S_IFREG, 493, b"x", 1, b"one")), [b"a"])
def test_only_the_named_paths_are_changed(
    before: dict[bytes, Version], after: dict[bytes, Version], named: list[bytes]
) -> None:
    live, wanted = tree_of(before), tree_of(after)
    if any(path not in live.by_path and path not in wanted.by_path for path in named):
        with pytest.raises(FileNotFoundError):
            plan(live, wanted, paths=named)
        return
    found = executed(live, wanted, plan(live, wanted, paths=named)).state()
    old, new = Model(live, live).state(), Model(wanted, wanted).state()
    for path in old.keys() | new.keys() | found.keys():
        if any(is_below(path, scope) for scope in named):
            assert found.get(path, ())[:5] == new.get(path, ())[:5]
        elif not any(is_below(scope, path) for scope in named):
            assert found.get(path, ())[:5] == old.get(path, ())[:5]


def test_what_is_in_nobodys_way_is_removed_last() -> None:
    live = DictTree({b"a/b": b"", b"gone": b"", b"z/below": b""})
    steps = plan(live, DictTree({b"a": b"now a file", b"made": b"", b"z/below": b""}))
    assert [(step.kind, step.path) for step in steps] == [
        ("remove", b"a/b"), ("put", b"a"), ("put", b"made"), ("remove", b"gone"), ("metadata", b""),
    ]  # fmt: skip


def test_a_target_that_removes_whole_directories_gets_one_step_for_each() -> None:
    live = DictTree({b"a/b/c": b"", b"a/d": b"", b"e/f": b"", b"g": b""})
    steps = plan(live, DictTree({b"e": b"now a file", b"g": b""}), whole_directories=True)
    assert [(step.kind, step.path) for step in steps] == [("put", b"e"), ("remove", b"a"), ("metadata", b"")]
