"""Lines side by side: they are the lines of both files, with their numbers."""

from __future__ import annotations

import difflib

from hypothesis import given
from hypothesis import strategies as st

from vfsd.web.pages import side_by_side

LINES = st.lists(st.sampled_from(["a", "b", "-- x", "++ y", "@@ -1 +1 @@", "\\ no", "", " "]), max_size=12)


@given(old=LINES, new=LINES, context=st.integers(0, 12))
def test_the_rows_have_the_lines_of_both_files(old: list[str], new: list[str], context: int) -> None:
    hunks = list(difflib.unified_diff(old, new, "a/f", "b/f", n=context, lineterm=""))
    rows = list(side_by_side("\n".join(["diff --git a/f b/f", *hunks, ""]).encode()))
    for row in rows:
        if row.old_number is not None:
            assert old[row.old_number - 1] == row.old
        if row.new_number is not None:
            assert new[row.new_number - 1] == row.new
        if row.kind == "same":
            assert row.old == row.new
    if context == 12 and old != new:  # everything is in one hunk
        assert [row.old for row in rows if row.old is not None] == old
        assert [row.new for row in rows if row.new is not None] == new


def test_a_binary_patch_has_no_rows() -> None:
    head = b"diff --git a/f b/f\nindex 1..2 100644\nGIT binary patch\n"
    assert list(side_by_side(head + b"literal 3\nKcmZQzU|?imU|?V\n\nliteral 0\nHcmV?d00001\n\n")) == []


def test_a_very_long_line_is_cut() -> None:
    rows = list(side_by_side(b"@@ -1 +1 @@\n-" + b"x" * 10_000 + b"\n+y\n"))
    assert len(rows[0].old or "") < 2_100
