"""The rules of merges in docs/forks.md, hard links of a merged tree, and hostile trees."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from protocol.backends.memory import MemoryVolume
from protocol.merge.git import TextCase, TextResult
from protocol.merge.merged_tree import ALL_TEXTS_LIMIT_BYTES, TEXT_LIMIT_BYTES
from protocol.merge.three_way import Merge, Policy, merge
from protocol.tree import Tree, TreeEntry, filled, names_in
from tests.model.merge_trees import File, PlainTree, directory
from tests.support.trees import DictTree

Items: TypeAlias = dict[bytes, bytes | str | tuple[TreeEntry, bytes] | None]
Shown: TypeAlias = dict[bytes, bytes | str | None]


def shown(tree: Tree) -> Shown:
    """{path: content}, as for `DictTree`; the root is left out."""
    found: Shown = {}
    for entry in tree.walk():
        if entry.is_file:
            found[entry.path] = b"".join(filled(tree.chunks(entry.path)))
        elif entry.path:
            found[entry.path] = entry.target.decode() if entry.is_symlink else None
    return found


def merged(base: Items, ours: Items, theirs: Items, policy: Policy = "fail") -> Merge:
    return merge(DictTree(base), DictTree(ours), DictTree(theirs), policy=policy, now_ns=1)


def reasons(result: Merge) -> dict[bytes, str]:
    return {conflict.path: conflict.reason for conflict in result.conflicts}


def test_a_change_of_one_side_is_taken() -> None:
    base: Items = {b"a": b"1", b"b": b"1", b"c": b"1"}
    result = merged(base, {**base, b"a": b"2"}, {b"a": b"1", b"b": b"2"})

    assert shown(result.tree) == {b"a": b"2", b"b": b"2"}
    assert result.paths == (b"b", b"c")
    assert [(change.path, change.kind) for change in result.changes] == [(b"b", "modified"), (b"c", "removed")]
    assert not result.conflicts


def test_the_same_change_on_both_sides_changes_nothing() -> None:
    result = merged({b"a": b"1", b"b": b"1"}, {b"a": b"2", b"n/x": b""}, {b"a": b"2", b"n/x": b""})

    assert not result.paths
    assert not result.conflicts


def test_a_deleted_directory_stays_with_what_the_other_side_added() -> None:
    base: Items = {b"d/a": b"1", b"d/b": b"1"}
    added: Items = {b"d/a": b"1", b"d/b": b"1", b"d/new": b"2"}

    assert shown(merged(base, added, {}).tree) == {b"d": None, b"d/new": b"2"}
    assert shown(merged(base, {}, added).tree) == {b"d": None, b"d/new": b"2"}
    assert not merged(base, {}, added).conflicts


def test_a_directory_against_a_file() -> None:
    base: Items = {b"d/a": b"1", b"d/b": b"1"}
    ours: Items = {b"d": b"a file"}
    theirs: Items = {b"d/a": b"2", b"d/b": b"1"}

    assert reasons(merged(base, ours, theirs)) == reasons(merged(base, theirs, ours)) == {b"d": "directory/file"}
    assert shown(merged(base, ours, theirs, "theirs").tree) == {b"d": None, b"d/a": b"2", b"d/b": b"1"}
    assert shown(merged(base, theirs, ours, "theirs").tree) == {b"d": b"a file"}
    assert shown(merged(base, ours, theirs, "markers").tree) == {
        b"d": b"a file",
        b"d~theirs": None,
        b"d~theirs/a": b"2",
        b"d~theirs/b": b"1",
    }


def file(content: bytes = b"", mode: int = 0o644, **attributes: object) -> tuple[TreeEntry, bytes]:
    return replace(TreeEntry(b"", stat.S_IFREG | mode), **attributes), content


def special(kind: int, **attributes: object) -> tuple[TreeEntry, bytes]:
    return replace(TreeEntry(b"", kind | 0o644), **attributes), b""


# reason -> base, ours and theirs of one path (...: it does not exist); its content, and that of "f~theirs", with the
# policies ours, theirs and markers
ABSENT = ...
Side: TypeAlias = object
MARKERS = b"<<<<<<< ours\n2\n=======\n3\n>>>>>>> theirs\n"
CONFLICTS: list[tuple[str, Side, Side, Side, object, object, object, object]] = [
    ("content", b"1\n", b"2\n", b"3\n", b"2\n", b"3\n", MARKERS, ABSENT),
    ("binary", b"1\0", b"2\0", b"3\0", b"2\0", b"3\0", b"2\0", b"3\0"),
    ("binary", b"1", b"2", b"\0", b"2", b"\0", b"2", b"\0"),
    ("created", ABSENT, b"2\n", b"3\n", b"2\n", b"3\n", MARKERS, ABSENT),
    ("created", ABSENT, b"\0", b"3\n", b"\0", b"3\n", b"\0", b"3\n"),
    ("created", ABSENT, b"2", "target", b"2", "target", b"2", "target"),
    ("symlink", "a", "b", "c", "b", "c", "b", "c"),
    ("delete/modify", b"1", b"2", ABSENT, b"2", ABSENT, b"2", ABSENT),
    ("delete/modify", b"1", ABSENT, b"3", ABSENT, b"3", b"3", ABSENT),
    ("delete/modify", b"1", "link", ABSENT, "link", ABSENT, "link", ABSENT),
    ("type", b"1", b"2", "link", b"2", "link", b"2", "link"),
    ("type", b"1", "link", b"3", "link", b"3", "link", b"3"),
    ("directory/file", b"1", None, b"3", None, b"3", None, b"3"),
    ("directory/file", ABSENT, b"2", None, b"2", None, b"2", None),
]


@pytest.mark.parametrize(
    ("reason", "base", "ours", "theirs", "with_ours", "with_theirs", "with_markers", "kept"), CONFLICTS
)
def test_each_policy_resolves_each_conflict(
    reason: str,
    base: Side,
    ours: Side,
    theirs: Side,
    with_ours: object,
    with_theirs: object,
    with_markers: object,
    kept: object,
) -> None:
    def tree(side: Side) -> Items:
        return {} if side is ABSENT else {b"f": side}  # type: ignore[dict-item]

    for policy, expected in (("fail", with_ours), ("ours", with_ours), ("theirs", with_theirs)):
        result = merged(tree(base), tree(ours), tree(theirs), policy)  # type: ignore[arg-type]
        assert reasons(result) == {b"f": reason}
        assert shown(result.tree) == tree(expected)

    result = merged(tree(base), tree(ours), tree(theirs), "markers")
    also = {} if kept is ABSENT else {b"f~theirs": kept}
    assert shown(result.tree) == tree(with_markers) | also
    assert [conflict.kept_as for conflict in result.conflicts] == [b"" if kept is ABSENT else b"f~theirs"]


def test_metadata_of_each_kind_are_merged_separately() -> None:
    x, y = b"user.x", b"user.y"
    result = merged(
        {b"f": file(b"1\n2\n3\n4\n", xattrs={x: b"1"})},
        {b"f": file(b"0\n2\n3\n4\n", 0o600, xattrs={x: b"1", y: b"2"}, mtime_ns=5)},
        {b"f": file(b"1\n2\n3\n5\n", 0o644, xattrs={}, uid=7, mtime_ns=6)},
    )

    entry = result.tree.entry(b"f")
    assert (stat.S_IMODE(entry.mode), entry.uid, dict(entry.xattrs)) == (0o600, 7, {y: b"2"})
    assert shown(result.tree) == {b"f": b"0\n2\n3\n5\n"}
    assert entry.mtime_ns == 1  # the time of the merge
    assert not result.conflicts


@pytest.mark.parametrize(
    ("reason", "attribute", "values"),
    [
        ("mode", "mode", (stat.S_IFREG | 0o644, stat.S_IFREG | 0o600, stat.S_IFREG | 0o755)),
        ("owner", "uid", (0, 1, 2)),
        ("owner", "gid", (0, 1, 2)),
        ("xattrs", "xattrs", ({}, {b"user.x": b"1"}, {b"user.x": b"2"})),
        ("xattrs", "xattrs", ({b"user.x": b"0"}, {b"user.x": b"1"}, {})),
    ],
)
def test_metadata_that_both_sides_changed(reason: str, attribute: str, values: tuple[object, object, object]) -> None:
    base, ours, theirs = ({b"f": file(b"1", **{attribute: value})} for value in values)  # type: ignore[arg-type]

    for policy, expected in (("ours", values[1]), ("theirs", values[2]), ("markers", values[1])):
        result = merged(base, ours, theirs, policy)  # type: ignore[arg-type]
        assert reasons(result) == {b"f": reason}
        assert getattr(result.tree.entry(b"f"), attribute) == expected
        assert shown(result.tree) == {b"f": b"1"}


def test_device_numbers() -> None:
    base, ours, theirs = ({b"f": special(stat.S_IFCHR, rdev=number)} for number in (1, 2, 3))

    assert merged(base, base, theirs).tree.entry(b"f").rdev == 3
    assert reasons(merged(base, ours, theirs)) == {b"f": "device"}
    assert merged(base, ours, theirs, "theirs").tree.entry(b"f").rdev == 3
    assert merged(base, ours, theirs, "markers").tree.entry(b"f~theirs").rdev == 3


def test_an_mtime_alone_is_no_conflict() -> None:
    base, ours, theirs = ({b"f": file(b"1", mtime_ns=time)} for time in (1, 2, 3))

    assert merged(base, ours, theirs).tree.entry(b"f").mtime_ns == 3
    assert merged(base, theirs, ours).tree.entry(b"f").mtime_ns == 3
    assert merged(base, base, theirs).paths == (b"f",)
    assert not shown(merged(base, {}, theirs).tree)
    assert not shown(merged(base, theirs, {}).tree)
    assert not merged(base, {}, theirs).conflicts
    assert not merged(base, theirs, {}).conflicts


def test_empty_directories_and_their_metadata() -> None:
    base: Items = {b"gone": None, b"here": None, b"there": None}
    ours: Items = {b"here": None, b"there": None, b"new": None}
    private = replace(TreeEntry(b"", stat.S_IFDIR | 0o700))
    theirs: Items = {b"gone": None, b"here": None}

    assert shown(merged(base, ours, theirs).tree) == {b"here": None, b"new": None}
    assert reasons(merged(base, {}, {b"gone": (private, b"")})) == {b"gone": "delete/modify"}
    assert reasons(merged(base, {b"gone": (private, b"")}, {})) == {b"gone": "delete/modify"}


def test_a_directory_that_became_a_file_takes_nothing_with_it() -> None:
    base: Items = {b"d/a": b"1", b"d/b": b"1"}
    added: Items = {b"d/a": b"1", b"d/b": b"1", b"d/new": b"2"}
    theirs: Items = {b"d": b"a file"}

    assert shown(merged(base, base, theirs).tree) == theirs
    result = merged(base, added, theirs)
    assert reasons(result) == {b"d": "directory/file"}
    assert shown(result.tree) == {b"d": None, **added}
    assert shown(merged(base, added, theirs, "markers").tree) == {b"d": None, **added, b"d~theirs": b"a file"}
    assert shown(merged(base, added, theirs, "theirs").tree) == theirs


def test_a_name_that_is_kept_is_free_and_not_too_long() -> None:
    long = "ü".encode() * 127
    both: Items = {b"f~theirs": b"mine"}

    result = merged(
        {**both, b"f": b"\0", long: b"\0"},
        {**both, b"f": b"\x001", long: b"\x001"},
        {**both, b"f": b"\x002", long: b"\x002"},
        "markers",
    )

    kept = {conflict.path: conflict.kept_as for conflict in result.conflicts}
    assert kept == {b"f": b"f~theirs2", long: "ü".encode() * 124 + b"~theirs"}
    assert shown(result.tree)[b"f~theirs"] == b"mine"
    assert all(len(name) <= 255 for name in kept.values())


def test_paths_restrict_the_merge() -> None:
    base: Items = {b"a/x": b"1", b"a/y": b"1", b"b": b"1"}
    theirs: Items = {b"a/x": b"2", b"a/y": b"2", b"b": b"2", b"new/deep/z": b"2", b"new/other": b"2"}

    def restricted(*paths: bytes) -> Shown:
        return shown(merge(DictTree(base), DictTree(base), DictTree(theirs), paths=paths).tree)

    assert restricted(b"a/x") == {b"a": None, b"a/x": b"2", b"a/y": b"1", b"b": b"1"}
    assert restricted(b"a", b"b") == {b"a": None, b"a/x": b"2", b"a/y": b"2", b"b": b"2"}
    assert restricted(b"new/deep") == {b"a": None, **base, b"new": None, b"new/deep": None, b"new/deep/z": b"2"}
    with pytest.raises(FileNotFoundError):
        restricted(b"nowhere")


def test_a_path_that_only_ours_has_is_nothing_to_merge() -> None:
    result = merge(DictTree({}), DictTree({b"mine": b"1"}), DictTree({b"other": b"2"}), paths=[b"mine"])

    assert shown(result.tree) == {b"mine": b"1"}
    assert not result.paths


def test_a_restricted_merge_puts_only_these_paths_in_place_of_a_file() -> None:
    theirs: Items = {b"d/x": b"1", b"d/y": b"1"}

    result = merge(DictTree({}), DictTree({b"d": b"f"}), DictTree(theirs), paths=[b"d/x"], policy="theirs")

    assert reasons(result) == {b"d": "directory/file"}
    assert shown(result.tree) == {b"d": None, b"d/x": b"1"}


def test_a_detail_is_one_line() -> None:
    xattrs = {b"user.line\nfeed\x1b%d" % number: b"1" for number in range(9)}
    other = dict.fromkeys(xattrs, b"2")

    (conflict,) = merged({b"f": file()}, {b"f": file(xattrs=xattrs)}, {b"f": file(xattrs=other)}).conflicts

    assert conflict.detail.isprintable()
    assert conflict.detail.endswith(" and 6 more")


REGULAR = 0o100644


def tree(first_inode: int = 1, known: PlainTree | None = None, /, **names: File) -> PlainTree:
    return PlainTree({b"": directory(), **{name.encode(): file for name, file in names.items()}}, first_inode, known)


def text(content: bytes, **attributes: int) -> File:
    return File(REGULAR, content, **attributes)


def merged_links(base: PlainTree, ours: PlainTree, theirs: PlainTree, policy: Policy = "fail") -> Merge:
    return merge(base, ours, theirs, policy=policy, now_ns=1)


def linked_files(merged_tree: Tree) -> set[tuple[str, bytes]]:
    """The names of each file, and its content."""
    found: dict[int, list[TreeEntry]] = {}
    for entry in merged_tree.walk():
        if entry.is_file:
            found.setdefault(entry.inode, []).append(entry)
    for entries in found.values():
        assert {entry.nlink for entry in entries} == {len(entries)} or len(entries) == 1
    return {
        (" ".join(entry.path.decode() for entry in entries), merged_tree.read(entries[0].path, 0, 1000))
        for entries in found.values()
    }


ONE, OTHER, TWO, THREE, ZERO = text(b"1"), text(b"1"), text(b"2"), text(b"3"), text(b"0")


@pytest.mark.parametrize("policy", ["fail", "theirs"])
@pytest.mark.parametrize(
    ("base", "ours", "theirs", "expected", "paths"),
    [
        # A link that one side made reaches the file as merged.
        ({"a": ZERO}, {"a": TWO}, {"a": ZERO, "b": ZERO}, {("a b", b"2")}, ["a", "b"]),
        # A change reaches the names that the other side linked.
        ({"a": ONE, "b": ZERO}, {"a": ONE, "b": ONE}, {"a": THREE, "b": ZERO}, {("a b", b"3")}, ["a", "b"]),
        # A separated name is a file of its own.
        ({"a": ONE, "b": ONE}, {"a": TWO, "b": TWO}, {"a": ONE, "b": OTHER}, {("a", b"2"), ("b", b"2")}, None),
        # Links of both sides go together.
        ({"a": ONE}, {"a": ONE, "b": ONE}, {"a": OTHER, "c": OTHER}, {("a b c", b"1")}, None),
        # A removed name changes nothing for the others.
        ({"a": ONE, "b": ONE}, {"a": ONE, "b": ONE}, {"a": ONE}, {("a", b"1")}, ["b"]),
    ],
)
def test_links_of_one_side_are_merged_with_the_changes_of_the_other(
    base: dict[str, File], ours: dict[str, File], theirs: dict[str, File], expected: set[tuple[str, bytes]],
    paths: list[str] | None, policy: Policy,
) -> None:  # fmt: skip
    result = merged_links(tree(**base), tree(**ours), tree(100, **theirs), policy)

    assert linked_files(result.tree) == expected
    assert not result.conflicts
    assert paths is None or result.paths == tuple(path.encode() for path in paths)


def test_names_that_need_different_content_are_a_conflict() -> None:
    linked = text(b"1")
    three = (tree(a=text(b"1"), b=text(b"0")), tree(a=linked, b=linked), tree(100, a=text(b"3"), b=text(b"4")))

    result = merged_links(*three)

    assert {conflict.reason for conflict in result.conflicts} & {"links", "content"}
    assert linked_files(result.tree) == linked_files(merged_links(*three, "ours").tree) == {("a b", b"1")}
    assert linked_files(merged_links(*three, "theirs").tree) == {("a", b"3"), ("b", b"4")}


def test_a_volume_is_not_walked_for_names() -> None:
    def volume(*linked: bytes) -> MemoryVolume:
        both = text(b"1")
        made = MemoryVolume()
        made.import_tree(tree(a=both, b=both, other=text(b"x")), replace=True)
        made.take_snapshot("base")
        changed = text(b"2")
        made.import_tree(
            PlainTree({b"": directory(), b"other": text(b"x"), **dict.fromkeys(linked, changed)}), replace=True
        )
        return made

    class Unwalked:
        def __init__(self, wrapped: Tree) -> None:
            self._wrapped = wrapped

        def __getattr__(self, name: str) -> object:
            assert name != "names_of"
            return getattr(self._wrapped, name)

        def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
            assert path
            return self._wrapped.walk(path)

        def touched(self, other: Tree) -> object:
            return self._wrapped.touched(other._wrapped)  # type: ignore[attr-defined]

    mine, other = volume(), volume(b"a", b"b", b"c")
    with other.tree("base") as base, mine.tree("base") as ours, other.tree() as theirs:
        result = merge(Unwalked(base), ours, Unwalked(theirs))  # type: ignore[arg-type]

        assert linked_files(result.tree) == {("a b c", b"2"), ("other", b"x")}
        assert result.paths == (b"a", b"b", b"c")


def test_a_name_that_only_some_policies_keep_follows_the_others() -> None:
    both, changed = text(b"1"), text(b"2")

    for policy, expected in (("ours", {("a b", b"2")}), ("theirs", {("b", b"2")}), ("markers", {("a b", b"2")})):
        three = (tree(a=both, b=both), tree(a=changed, b=changed), tree(100, b=text(b"1")))
        result = merged_links(*three, policy)  # type: ignore[arg-type]

        assert [(conflict.path, conflict.reason) for conflict in result.conflicts] == [(b"a", "delete/modify")]
        assert linked_files(result.tree) == expected


HUGE = 10**15


class SparseTree(DictTree):
    """A tree with the huge file "f", which may not be read through."""

    def __init__(self, mtime_ns: int, size: int = HUGE) -> None:
        super().__init__({b"f": b""})
        self.by_path[b"f"] = replace(self.by_path[b"f"], size=size, mtime_ns=mtime_ns)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        assert size <= TEXT_LIMIT_BYTES
        return bytes(min(size, max(0, HUGE - offset)))

    def chunks(self, path: bytes, size: int = 65536) -> Iterator[bytes]:
        raise AssertionError(path)


def refused(cases: Sequence[TextCase], keep_going: object) -> Sequence[TextResult]:
    raise AssertionError(cases)


def test_a_huge_sparse_file_is_not_read() -> None:
    base, ours, theirs = (SparseTree(time) for time in (1, 2, 3))

    result = merge(base, ours, theirs, text_merge=refused)

    assert [(conflict.path, conflict.reason) for conflict in result.conflicts] == [(b"f", "large")]
    assert merge(base, base, theirs, text_merge=refused).tree.entry(b"f") == theirs.entry(b"f")
    assert not merge(SparseTree(1), SparseTree(1), SparseTree(1), text_merge=refused).paths
    shorter = SparseTree(1, HUGE - 1)
    assert merge(base, SparseTree(1), shorter, text_merge=refused).tree.entry(b"f").size == HUGE - 1


def test_content_over_the_limit_is_a_conflict() -> None:
    def tree(last: bytes) -> DictTree:
        return DictTree({b"f": b"\n" * TEXT_LIMIT_BYTES + last, b"fits": b"\n" * (TEXT_LIMIT_BYTES - 1) + last})

    def merged(cases: Sequence[TextCase], keep_going: object) -> list[TextResult]:
        return [TextResult(b"merged", is_clean=True) for _ in cases]

    result = merge(tree(b"1"), tree(b"2"), tree(b"3"), text_merge=merged)

    assert [(conflict.path, conflict.reason) for conflict in result.conflicts] == [(b"f", "large")]
    assert "8,388,608 bytes" in result.conflicts[0].detail


def test_all_texts_of_a_merge_together_are_bounded() -> None:
    class Claimed(DictTree):
        """Files that are as large as a text may be."""

        def __init__(self, content: bytes, mtime_ns: int) -> None:
            super().__init__({b"%02d" % number: content for number in range(20)})
            for path, entry in self.by_path.items():
                self.by_path[path] = replace(entry, size=TEXT_LIMIT_BYTES, mtime_ns=mtime_ns) if path else entry

    sizes: list[int] = []

    def merged(cases: Sequence[TextCase], keep_going: object) -> list[TextResult]:
        sizes.extend(case.size_bytes for case in cases)
        return [TextResult(b"merged", is_clean=True) for _ in cases]

    result = merge(Claimed(b"1", 1), Claimed(b"2", 2), Claimed(b"3", 3), text_merge=merged)

    assert sum(sizes) * 2 // 3 <= ALL_TEXTS_LIMIT_BYTES
    assert len(result.conflicts) == 20 - len(sizes)
    assert {conflict.reason for conflict in result.conflicts} == {"large"}


def test_attributes_in_the_tree_run_nothing(tmp_path: Path) -> None:
    attributes = f"* -text filter=x diff=x merge=x\n* merge={tmp_path}/driver\n".encode()
    base = DictTree({b"f": b"1\n", b".gitattributes": attributes, b".git/config": b"[core]\n\tattributesFile = /x\n"})
    ours = DictTree({b"f": b"2\n", b".gitattributes": attributes, b".git/config": _DRIVER})
    theirs = DictTree({b"f": b"3\n", b".gitattributes": attributes, b".git/config": _DRIVER})

    assert [conflict.path for conflict in merge(base, ours, theirs).conflicts] == [b"f"]


_DRIVER = b'[merge "x"]\n\tdriver = false\n'


def test_symlinks_are_not_followed() -> None:
    base = DictTree({b"d": "/etc", b"f": b"1"})
    theirs = DictTree({b"d/passwd": b"mine", b"f": "/etc/passwd"})

    result = merge(base, DictTree({b"d": "/etc", b"f": b"1"}), theirs)

    assert result.tree.entry(b"f").target == b"/etc/passwd"
    assert result.tree.entry(b"d").is_dir
    assert result.tree.read(b"d/passwd", 0, 9) == b"mine"


def test_a_deep_tree_is_merged() -> None:
    class Tree(DictTree):
        def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:  # does not recurse
            below = (each for each in self.by_path if not path or each == path or each.startswith(path + b"/"))
            return iter([self.by_path[each] for each in sorted(below)])

    deep = b"/".join([b"d"] * 1500)
    base = Tree({deep + b"/f": b"1\n"})

    result = merge(base, base, Tree({deep + b"/f": b"2\n"}))
    removed = merge(base, base, Tree({}))

    assert result.paths == (deep + b"/f",)
    assert removed.paths == (b"d",)
    assert not names_in(removed.tree, b"")


def test_a_file_that_changes_meanwhile_is_an_error() -> None:
    class Growing(DictTree):
        def read(self, path: bytes, offset: int, size: int) -> bytes:
            return (super().read(path, 0, 1 << 20) + b"more\n")[offset : offset + size]

    with pytest.raises(OSError, match="merge again") as raised:
        merge(DictTree({b"f": b"1\n"}), Growing({b"f": b"2\n"}), DictTree({b"f": b"3\n"}))
    assert raised.value.errno == errno.EIO


def test_a_caller_can_end_a_merge() -> None:
    class EndError(Exception):
        pass

    calls = []

    def keep_going() -> None:
        calls.append(1)
        if len(calls) > 20:
            raise EndError

    theirs = DictTree({b"%d" % number: b"2" for number in range(100)})
    with pytest.raises(EndError):
        merge(DictTree({}), DictTree({}), theirs, keep_going=keep_going)


def test_special_files_are_merged() -> None:
    fifo = (TreeEntry(b"", stat.S_IFIFO | 0o600), b"")

    result = merge(DictTree({}), DictTree({b"mine": b""}), DictTree({b"pipe": fifo}))

    assert stat.S_ISFIFO(result.tree.entry(b"pipe").mode)
    assert result.paths == (b"pipe",)
