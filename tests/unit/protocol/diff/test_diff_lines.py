"""Line edits: correct for any two texts, and at a bounded cost."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from protocol.diff.patch import Edit, edits


def applied(old: Sequence[bytes], new: Sequence[bytes], found: Sequence[Edit]) -> list[bytes]:
    result: list[bytes] = []
    place = 0
    for edit in found:
        result += [*old[place : edit.old_start], *new[edit.new_start : edit.new_end]]
        place = edit.old_end
    return [*result, *old[place:]]


_lines = st.lists(st.sampled_from([b"%d\n" % n for n in range(12)]), max_size=40)


@given(_lines, _lines, st.sampled_from([0, 30, 300, 10**6]))
def test_edits_make_the_new_of_the_old_whatever_they_may_cost(old: list[bytes], new: list[bytes], limit: int) -> None:
    found = list(edits(old, new, cost_limit=limit))
    assert applied(old, new, found) == new
    place_old = place_new = 0
    for edit in found:
        # Places agree on both sides, and something equal lies before all but the first.
        assert edit.old_start - place_old == edit.new_start - place_new
        assert edit is found[0] or edit.old_start > place_old
        assert edit.old_end > edit.old_start or edit.new_end > edit.new_start
        place_old, place_new = edit.old_end, edit.new_end


def test_equal_texts_have_no_edits() -> None:
    assert list(edits([b"a\n"], [b"a\n"])) == []
    assert list(edits([], [])) == []


def test_every_second_line_changed_in_a_large_file_is_seen_line_by_line() -> None:
    old = [b"line %d\n" % n for n in range(50_000)]
    new = [line if n % 2 else b"changed %d\n" % n for n, line in enumerate(old)]
    assert list(edits(old, new)) == [Edit(n, n + 1, n, n + 1) for n in range(0, 50_000, 2)]


def test_a_moved_block_keeps_the_longer_part_in_place() -> None:
    old = [b"%d\n" % n for n in range(10)]
    assert list(edits(old, old[7:] + old[:7])) == [Edit(0, 0, 0, 3), Edit(7, 10, 10, 10)]


def test_repeated_lines_between_changes_are_matched() -> None:
    old = [b"a\n", b"}\n", b"b\n", b"}\n", b"c\n"]
    new = [b"x\n", b"}\n", b"y\n", b"}\n", b"z\n"]
    assert [edit.old_start for edit in edits(old, new)] == [0, 2, 4]


def test_what_would_cost_too_much_is_replaced_as_a_whole() -> None:
    # Without one line that is unique to match by, difflib is cubic here.
    count = 50_000
    old = [line for n in range(count) for line in (b"old %d\n" % n, b"}\n")]
    new = [line for n in range(count) for line in (b"new %d\n" % n, b"}\n")]
    assert list(edits([b"top\n", *old], [b"top\n", *new])) == [Edit(1, 2 * count, 1, 2 * count)]
