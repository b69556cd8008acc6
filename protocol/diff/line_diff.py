"""Line diff: which lines differ between two texts, at a bounded cost.

`difflib` alone is quadratic to cubic: 50,000 lines with every second one changed take it over a minute.  So lines
that occur once in both texts are matched first, in order (patience diff, Bram Cohen), and `difflib` compares
only the lines between them.  A region that would still cost too much is reported as replaced completely: a correct
diff, but not the shortest.

Why no library: `patiencediff` has the same worst case and is GPL; `pygit2` is bounded, but brings 13 MB of
libgit2 for one function.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Final, NamedTuple

COST_LIMIT: Final = 200_000_000  # in the units of `_difflib_cost`; about two seconds at the very worst


class Edit(NamedTuple):
    """`old[old_start:old_end]` is replaced by `new[new_start:new_end]`; one of them may be empty."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int


def edits(old: Sequence[bytes], new: Sequence[bytes], *, cost_limit: int = COST_LIMIT) -> Iterator[Edit]:
    """The edits that turn `old` into `new`, in order, with at least one equal line between two of them."""
    last: Edit | None = None
    for edit in _raw_edits(old, new, cost_limit):
        if last and (last.old_end, last.new_end) == (edit.old_start, edit.new_start):
            last = Edit(last.old_start, edit.old_end, last.new_start, edit.new_end)
            continue
        if last:
            yield last
        last = edit
    if last:
        yield last


def _raw_edits(old: Sequence[bytes], new: Sequence[bytes], budget: int) -> Iterator[Edit]:
    regions = [Edit(0, len(old), 0, len(new))]  # a stack, the next one last: recursion could get too deep
    while regions:
        region = _trimmed(old, new, regions.pop())
        a, b = old[region.old_start : region.old_end], new[region.new_start : region.new_end]
        if not a or not b:
            if a or b:
                yield region
            continue
        budget -= len(a) + len(b)
        if budget > 0 and (anchors := _anchors(a, b)):
            regions.extend(reversed(_split(region, anchors)))
            continue
        cost = _difflib_cost(a, b)
        if cost > budget:
            yield region
            continue
        budget -= cost
        for tag, a_start, a_end, b_start, b_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            if tag != "equal":
                i, j = region.old_start, region.new_start
                yield Edit(i + a_start, i + a_end, j + b_start, j + b_end)


def _trimmed(old: Sequence[bytes], new: Sequence[bytes], region: Edit) -> Edit:
    """`region` without the equal lines at its start and end."""
    i, i_end, j, j_end = region
    while i < i_end and j < j_end and old[i] == new[j]:
        i, j = i + 1, j + 1
    while i < i_end and j < j_end and old[i_end - 1] == new[j_end - 1]:
        i_end, j_end = i_end - 1, j_end - 1
    return Edit(i, i_end, j, j_end)


def _anchors(a: Sequence[bytes], b: Sequence[bytes]) -> list[tuple[int, int]]:
    """The most pairs (i, j), rising in both, of lines that occur once in `a` and once in `b`."""
    in_a, in_b = Counter(a), Counter(b)
    place_in_b = {line: j for j, line in enumerate(b) if in_b[line] == 1}
    pairs = [(i, place_in_b[line]) for i, line in enumerate(a) if in_a[line] == 1 and line in place_in_b]
    return _longest_rising(pairs)


def _longest_rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence of `pairs` whose second members rise (patience sorting)."""
    tops: list[int] = []  # the smallest last member of a rising sequence of each length
    top_at: list[int] = []  # and its index in `pairs`
    before: list[int] = []  # each pair's predecessor in the best sequence that ends with it
    for place, (_, j) in enumerate(pairs):
        pile = bisect_left(tops, j)
        before.append(top_at[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [j]
        top_at[pile : pile + 1] = [place]
    longest = []
    place = top_at[-1] if top_at else -1
    while place >= 0:
        longest.append(pairs[place])
        place = before[place]
    return longest[::-1]


def _split(region: Edit, anchors: Sequence[tuple[int, int]]) -> list[Edit]:
    """The regions between the anchors, which are relative to the region's start."""
    between = []
    i, j = region.old_start, region.new_start
    for a, b in anchors:
        end_i, end_j = region.old_start + a, region.new_start + b
        if i < end_i or j < end_j:
            between.append(Edit(i, end_i, j, end_j))
        i, j = end_i + 1, end_j + 1
    between.append(Edit(i, region.old_end, j, region.new_end))
    return between


def _difflib_cost(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """An upper bound of difflib's steps: each round tries all pairs of equal lines and matches at least one line."""
    in_a, in_b = Counter(a), Counter(b)
    return sum(times * in_b[line] for line, times in in_a.items()) * min(len(a), len(b))
