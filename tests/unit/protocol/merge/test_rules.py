"""The rules of docs/merge.md, one by one."""

from __future__ import annotations

import stat
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from protocol.merge.three_way import Merge, Policy, merge
from protocol.tree import Tree, TreeEntry, filled
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
