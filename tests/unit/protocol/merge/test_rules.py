"""The rules of docs/merge.md, one by one."""

from __future__ import annotations

from typing import TypeAlias

import pytest

from protocol.merge.three_way import Merge, Policy, merge
from protocol.tree import Tree, TreeEntry
from tests.support.trees import DictTree

Items: TypeAlias = dict[bytes, bytes | str | tuple[TreeEntry, bytes] | None]
Shown: TypeAlias = dict[bytes, bytes | str | None]


def shown(tree: Tree) -> Shown:
    """{path: content}, as for `DictTree`; the root is left out."""
    found: Shown = {}
    for entry in tree.walk():
        if entry.is_file:
            found[entry.path] = b"".join(tree.chunks(entry.path))
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


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fail", {b"a": b"2"}),
        ("ours", {b"a": b"2"}),
        ("theirs", {}),
        ("markers", {b"a": b"2"}),
    ],
)
def test_deleted_in_theirs_and_changed_in_ours(policy: Policy, expected: Shown) -> None:
    result = merged({b"a": b"1"}, {b"a": b"2"}, {}, policy)

    assert reasons(result) == {b"a": "delete/modify"}
    assert shown(result.tree) == expected


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
