"""What `changes` finds between two trees."""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator, Sequence
from itertools import count as count_up

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.backends.memory import MemoryVolume
from protocol.diff.tree_diff import (
    Change,
    PathScope,
    changes,
    count,
    is_below,
    outermost,
    restored_links,
    walk_order,
)
from protocol.testing.volume.driver import Driver
from protocol.tree import CHUNK_BYTES, Tree, TreeEntry
from protocol.types import ChangeCounts
from tests.support.trees import DictTree

FILE = TreeEntry(b"", stat.S_IFREG | 0o644, mtime_ns=1)


class KnowingTree(DictTree):
    """A tree that knows what was touched, and fails where anything else is looked at."""

    known: Collection[bytes] = ()

    def touched(self, other: Tree) -> Collection[bytes] | None:
        return self.known


def kinds(found: Iterator[Change]) -> list[tuple[bytes, str]]:
    return [(change.path, change.kind) for change in found]


def with_entry(tree: DictTree, path: bytes, **fields: object) -> DictTree:
    tree.by_path[path] = replace(tree.by_path[path], **fields)  # type: ignore[arg-type]
    return tree


def file(**fields: object) -> DictTree:
    return with_entry(DictTree({b"a": (FILE, b"x")}), b"a", **fields)


def directory(**fields: object) -> DictTree:
    return with_entry(DictTree({b"d": None}), b"d", **fields)


DEVICE = TreeEntry(b"", stat.S_IFCHR | 0o600, rdev=1)
METADATA: list[dict[str, object]] = [
    {"mode": stat.S_IFREG | 0o755}, {"uid": 7}, {"gid": 7}, {"mtime_ns": 2}, {"xattrs": {b"user.a": b"1"}},
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (DictTree({b"a": b"x", b"d/e": b"y", b"s": "a"}), DictTree({b"a": b"x", b"d/e": b"y", b"s": "a"}), []),
        (DictTree({b"x": b"1"}), DictTree({b"x/y": b"1"}), [(b"x", "type"), (b"x/y", "added")]),
        (DictTree({b"x/y": b"1"}), DictTree({b"x": b"1"}), [(b"x", "type"), (b"x/y", "removed")]),
        (DictTree({b"s": "one"}), DictTree({b"s": "two"}), [(b"s", "modified")]),
        (DictTree({b"n": (DEVICE, b"")}), DictTree({b"n": (replace(DEVICE, rdev=2), b"")}), [(b"n", "modified")]),
        # Equal sizes and times prove nothing.
        (DictTree({b"a": (FILE, b"one")}), DictTree({b"a": (FILE, b"two")}), [(b"a", "modified")]),
        # The content ends before its size.
        (with_entry(DictTree({b"a": b"12"}), b"a", size=3), DictTree({b"a": b"123"}), [(b"a", "modified")]),
        *((file(), file(**fields), [(b"a", "metadata")]) for fields in METADATA),
        *((file(), file(**fields), []) for fields in ({"nlink": 2}, {"inode": 99})),
        (directory(), directory(mtime_ns=9, size=5), []),
        (directory(), directory(mode=stat.S_IFDIR | 0o700), [(b"d", "metadata")]),
    ],
)
def test_each_difference_has_its_kind(old: DictTree, new: DictTree, expected: list[tuple[bytes, str]]) -> None:
    assert kinds(changes(old, new)) == expected


def test_added_modified_and_removed_files_are_told_apart() -> None:
    old = DictTree({b"a": b"1", b"b": b"1", b"same": b"1", b"x": b"1"})
    new = DictTree({b"b": b"2", b"c": b"1", b"same": b"1", b"x/y": b"1"})
    found = list(changes(old, new))
    assert kinds(iter(found[:3])) == [(b"a", "removed"), (b"b", "modified"), (b"c", "added")]
    assert (found[0].old, found[0].new) == (old.entry(b"a"), None)
    assert (found[1].old, found[1].new) == (old.entry(b"b"), new.entry(b"b"))
    assert count(found) == ChangeCounts(added=2, modified=2, removed=1)


def test_an_added_directory_yields_all_below_it_before_its_next_sibling() -> None:
    new = DictTree({b"a/b/c": b"", b"a-b": b"", b"a/z": b"", b"a.b": b""})
    paths = [b"a", b"a/b", b"a/b/c", b"a/z", b"a-b", b"a.b"]
    assert kinds(changes(DictTree(), new)) == [(path, "added") for path in paths]
    assert kinds(changes(new, DictTree())) == [(path, "removed") for path in paths]


def test_content_is_compared_however_it_is_chunked() -> None:
    class Odd(DictTree):
        def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
            yield b""
            for chunk in super().chunks(path, 7):
                yield chunk
                yield b""

    data = bytes(range(256)) * 3
    assert kinds(changes(DictTree({b"a": data}), Odd({b"a": data}))) == []
    assert kinds(changes(Odd({b"a": data}), DictTree({b"a": data}))) == []
    assert kinds(changes(DictTree({b"a": data}), Odd({b"a": data[:-1] + b"!"}))) == [(b"a", "modified")]


class Unreadable(DictTree):
    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        raise AssertionError(f"{path!r} was read")


def test_content_is_not_read_where_sizes_differ() -> None:
    old, new = (with_entry(Unreadable({b"a": b""}), b"a", size=size) for size in (10**15, 10**15 + 1))
    assert kinds(changes(old, new)) == [(b"a", "modified")]


def test_without_contents_the_mtime_decides_and_nothing_is_read() -> None:
    old = Unreadable({b"a": (FILE, b"one"), b"b": (FILE, b"one")})
    new = with_entry(Unreadable({b"a": (FILE, b"one"), b"b": (FILE, b"one")}), b"b", mtime_ns=2)
    assert kinds(changes(old, new, contents=False)) == [(b"b", "modified")]


@pytest.mark.parametrize(("same", "expected"), [(True, [(b"a", "metadata")]), (False, [(b"a", "modified")])])
def test_a_tree_that_knows_spares_the_reading(same: bool, expected: list[tuple[bytes, str]]) -> None:
    class Sharing(Unreadable):
        def same_content(self, path: bytes, other: Tree) -> bool | None:
            assert (path, other) == (b"a", old)
            return same

    old, new = (with_entry(Sharing({b"a": b""}), b"a", size=10**15, mtime_ns=mtime) for mtime in (1, 2))
    assert kinds(changes(old, new)) == expected


def test_a_tree_that_does_not_know_is_read() -> None:
    class Ignorant(DictTree):
        def same_content(self, path: bytes, other: Tree) -> bool | None:
            return None

    assert kinds(changes(DictTree({b"a": b"1"}), Ignorant({b"a": b"2"}))) == [(b"a", "modified")]


# --- restricted to paths ------------------------------------------------------------------------------------


def test_paths_restrict_to_these_and_what_is_below() -> None:
    old = DictTree({b"a/x": b"1", b"a/y": b"1", b"ab": b"1", b"c": b"1"})
    new = DictTree({b"a/x": b"2", b"a/y": b"2", b"ab": b"2", b"c": b"2"})
    assert kinds(changes(old, new, paths=[b"a"])) == [(b"a/x", "modified"), (b"a/y", "modified")]
    assert kinds(changes(old, new, paths=[b"c", b"a/y", b"c"])) == [(b"a/y", "modified"), (b"c", "modified")]
    assert len(list(changes(old, new, paths=[b"a/x", b"", b"a"]))) == 4


def test_a_path_in_one_tree_only_is_a_change() -> None:
    assert kinds(changes(DictTree(), DictTree({b"a/b": b""}), paths=[b"a/b"])) == [(b"a/b", "added")]
    assert kinds(changes(DictTree({b"a/b": b""}), DictTree({b"a": b""}), paths=[b"a/b"])) == [(b"a/b", "removed")]


def test_a_path_in_neither_tree_is_refused_before_the_first_change() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        changes(DictTree({b"a": b"1"}), DictTree({b"a": b"2"}), paths=[b"a", b"nowhere"])


# --- with what a tree knows -----------------------------------------------------------------------------------


UNKNOWN = DictTree({b"d/a": b"1"})  # of inodes without a number
KNOWN = DictTree({b"d": None, b"d/a": b"1"})
ANOTHER = with_entry(KnowingTree({b"d": None, b"d/a": b"2", b"e/f": b""}), b"d", inode=77)
BELOW = KnowingTree({b"d/a": b"", b"d/b/c": b"", b"d/e": b""})


@pytest.mark.parametrize(
    ("old", "new", "known", "paths", "expected"),
    [
        (DictTree({b"a": b"1", b"b": b"1"}), KnowingTree({b"a": b"2", b"b": b"2"}), [b"b"], [], {b"b": "modified"}),
        (KNOWN, KnowingTree({b"d": None, b"d/a": b"2"}), [b"d"], [], {}),  # of the same inode: not walked
        (UNKNOWN, KnowingTree({b"d/a": b"2"}), [b"d"], [], {b"d/a": "modified"}),
        (KNOWN, ANOTHER, [b"e", b"e/f", b"d/a", b"d", b"no"], [], {b"d/a": "modified", b"e": "added", b"e/f": "added"}),
        (DictTree(), BELOW, [b"d"], [b"d/e", b"d/b"], dict.fromkeys((b"d/b", b"d/b/c", b"d/e"), "added")),
    ],
)
def test_touched_paths_and_what_is_walked_below_them_are_looked_at(
    old: DictTree, new: KnowingTree, known: list[bytes], paths: list[bytes], expected: dict[bytes, str]
) -> None:
    new.known = known
    assert kinds(changes(old, new, paths=paths)) == list(expected.items())


_path = st.lists(st.sampled_from([b"a", b"a-", b"b"]), min_size=1, max_size=3).map(b"/".join)


@st.composite
def trees(draw: st.DrawFn) -> KnowingTree:
    items: dict[bytes, bytes | None] = {}
    for path, item in sorted(draw(st.dictionaries(_path, st.sampled_from([b"1", b"2", None]), max_size=8)).items()):
        above = [path[:end] for end in range(len(path)) if path[end : end + 1] == b"/"]
        if all(items.get(parent) is None for parent in above):
            items.update(dict.fromkeys(above))
            items[path] = item
    tree = KnowingTree(dict(items))
    for path in tree.by_path:  # the same inode for the same path, or another one, as after a rename
        with_entry(tree, path, inode=draw(st.sampled_from([1, 1, 2])))
    return tree


@given(trees(), trees(), st.data())
def test_touched_paths_give_the_same_changes_as_a_walk(old: KnowingTree, new: KnowingTree, data: st.DataObject) -> None:
    everything = sorted({*old.by_path, *new.by_path})
    paths = data.draw(st.lists(st.sampled_from(everything), max_size=2))
    walked = list(changes(as_plain(old), as_plain(new), paths=paths))
    # The least that the contract of `touched` lets a tree name: no path below one that is walked anyway.
    differing = [change.path for change in changes(as_plain(old), as_plain(new))]
    tops = [path for path in everything if one_side_or_other_inode(old, new, path)]
    new.known = {path for path in [*differing, *tops] if not any(path.startswith(top + b"/") for top in tops if top)}
    if b"" in tops:
        new.known = {b""}
    assert list(changes(old, new, paths=paths)) == walked


def as_plain(tree: DictTree) -> DictTree:
    plain = DictTree()
    plain.by_path, plain.content = tree.by_path, tree.content
    return plain


def one_side_or_other_inode(old: DictTree, new: DictTree, path: bytes) -> bool:
    left, right = old.by_path.get(path), new.by_path.get(path)
    return not (left and right and left.inode == right.inode and left.is_dir == right.is_dir)


PATHS = st.lists(st.sampled_from([b"a", b"a-b", b"a b", b"b", b"\xff"]), max_size=4).map(b"/".join)


@given(paths=st.lists(PATHS, max_size=6), asked=PATHS)
def test_a_scope_answers_as_a_comparison_with_each_path_does(paths: list[bytes], asked: bytes) -> None:
    scope = PathScope(paths)
    tops = [path for path in set(paths) if not any(path != other and is_below(path, other) for other in paths)]
    assert scope.tops() == outermost(paths) == sorted(tops, key=walk_order)
    covered = any(is_below(asked, path) for path in paths)
    assert scope.covers(asked) == covered
    assert scope.within(asked) == ([asked] if covered else [top for top in scope.tops() if is_below(top, asked)])
    assert scope.meets(asked) == bool(scope.within(asked))


@pytest.mark.parametrize(("items", "paths"), [(5, ()), (5, [b"0", b"1", b"2"]), (1, ())])
def test_a_comparison_in_which_nothing_differs_can_be_ended_at_any_path_and_chunk(
    items: int, paths: Sequence[bytes]
) -> None:
    class EndedError(Exception):
        pass

    tree = DictTree({b"%d" % number: bytes(4 * CHUNK_BYTES) for number in range(items)})
    calls = count_up()

    def keep_going() -> None:
        if next(calls) == 3:
            raise EndedError

    with pytest.raises(EndedError):
        list(changes(tree, tree, paths=paths, keep_going=keep_going))


@pytest.mark.parametrize("change", ["content", "mode", "removed", "other", "replaced", "nothing"])
@pytest.mark.parametrize("paths", [[b"c"], [b"c", b"d"], [b"b", b"c"], [b"a", b"c"]], ids=b" ".join)
def test_a_restore_of_paths_makes_the_links_that_are_announced(change: str, paths: list[bytes]) -> None:
    volume = MemoryVolume()
    fs = Driver(volume)
    fs.file(b"a", b"v1")
    for name in (b"b", b"c", b"d"):
        fs.link(fs.at(b"a"), name)
    volume.take_snapshot("s")
    if change == "removed":
        fs.unlink(b"a")
    elif change == "content":
        volume.write(fs.at(b"a"), 0, b"v2")
    elif change == "mode":
        fs.set(b"a", mode=0o600)
    elif change == "other":
        fs.file(b"e", b"other")
        fs.unlink(b"a")
        fs.link(fs.at(b"e"), b"a")
    elif change == "replaced":
        fs.unlink(b"a")
        fs.file(b"a", b"v1")
    fs.unlink(b"c")
    fs.file(b"c", b"v3")
    with volume.tree() as before, volume.tree("s") as wanted:
        found = list(restored_links(changes(before, wanted, paths=paths), before, wanted, paths))
    volume.restore_snapshot("s", paths)
    for each in found:
        assert each.linked is None or fs.at(each.linked) == fs.at(each.path), each.path
