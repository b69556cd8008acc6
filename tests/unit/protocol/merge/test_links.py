"""Hard links of a merged tree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.merge.three_way import Merge, Policy, merge
from protocol.tree import Tree, TreeEntry
from tests.model.merge_trees import File, PlainTree, directory

REGULAR = 0o100644


def tree(first_inode: int = 1, known: PlainTree | None = None, /, **names: File) -> PlainTree:
    return PlainTree({b"": directory(), **{name.encode(): file for name, file in names.items()}}, first_inode, known)


def text(content: bytes, **attributes: int) -> File:
    return File(REGULAR, content, **attributes)


def merged(base: PlainTree, ours: PlainTree, theirs: PlainTree, policy: Policy = "fail") -> Merge:
    return merge(base, ours, theirs, policy=policy, now_ns=1)


def files(merged_tree: Tree) -> set[tuple[str, bytes]]:
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
    result = merged(tree(**base), tree(**ours), tree(100, **theirs), policy)

    assert files(result.tree) == expected
    assert not result.conflicts
    assert paths is None or result.paths == tuple(path.encode() for path in paths)


def test_names_that_need_different_content_are_a_conflict() -> None:
    linked = text(b"1")
    three = (tree(a=text(b"1"), b=text(b"0")), tree(a=linked, b=linked), tree(100, a=text(b"3"), b=text(b"4")))

    result = merged(*three)

    assert {conflict.reason for conflict in result.conflicts} & {"links", "content"}
    assert files(result.tree) == files(merged(*three, "ours").tree) == {("a b", b"1")}
    assert files(merged(*three, "theirs").tree) == {("a", b"3"), ("b", b"4")}


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

        assert files(result.tree) == {("a b c", b"2"), ("other", b"x")}
        assert result.paths == (b"a", b"b", b"c")


def test_a_name_that_only_some_policies_keep_follows_the_others() -> None:
    both, changed = text(b"1"), text(b"2")

    for policy, expected in (("ours", {("a b", b"2")}), ("theirs", {("b", b"2")}), ("markers", {("a b", b"2")})):
        three = (tree(a=both, b=both), tree(a=changed, b=changed), tree(100, b=text(b"1")))
        result = merged(*three, policy)  # type: ignore[arg-type]

        assert [(conflict.path, conflict.reason) for conflict in result.conflicts] == [(b"a", "delete/modify")]
        assert files(result.tree) == expected
