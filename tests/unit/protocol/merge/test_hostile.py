"""Worst content: huge sparse files, odd names, deep trees, trees that change or cannot be read."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.merge.git import TextCase, TextResult
from protocol.merge.merged_tree import ALL_TEXTS_LIMIT_BYTES, TEXT_LIMIT_BYTES
from protocol.merge.three_way import merge
from protocol.tree import TreeEntry, names_in
from tests.support.trees import DictTree

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


def test_any_name_is_a_name() -> None:
    names = [b"-f", b"--help", b"\xff\xfe", b"a\nb", b"\x1b[31m", b".gitattributes", b"d.git/x", b"~theirs", b"0"]
    base = DictTree(dict.fromkeys(names, b"1\n2\n3\n"))
    ours = DictTree(dict.fromkeys(names, b"0\n2\n3\n"))
    theirs = DictTree(dict.fromkeys(names, b"1\n2\n4\n"))

    result = merge(base, ours, theirs)

    assert not result.conflicts
    assert {result.tree.read(name, 0, 100) for name in names} == {b"0\n2\n4\n"}


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
