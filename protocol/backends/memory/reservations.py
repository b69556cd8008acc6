"""Ranges of the pages that fallocate promised to a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Reserved(NamedTuple):
    """Pages that fallocate counted and that were not written yet."""

    first: int
    after: int
    is_data: bool = False  # a second fallocate filled them, so SEEK_DATA finds them


def overlap(ranges: Iterable[Reserved], first: int, after: int) -> int:
    """Return how many pages of `ranges` lie between two pages."""
    return sum(each.after - each.first for each in within(ranges, first, after))


def within(ranges: Iterable[Reserved], first: int, after: int) -> list[Reserved]:
    """Return the parts of `ranges` between two pages."""
    cut = (each._replace(first=max(first, each.first), after=min(after, each.after)) for each in ranges)
    return [each for each in cut if each.after > each.first]


def without(ranges: Iterable[Reserved], first: int, after: int) -> tuple[Reserved, ...]:
    """Return `ranges` without the parts between two pages."""
    left = []
    for each in ranges:
        if each.first < first:
            left.append(each._replace(after=min(each.after, first)))
        if each.after > after:
            left.append(each._replace(first=max(each.first, after)))
    return tuple(each for each in left if each.after > each.first)


def joined(ranges: Iterable[Reserved]) -> tuple[Reserved, ...]:
    """Return `ranges` sorted, with adjacent ranges of one kind joined."""
    joined: list[Reserved] = []
    for each in sorted(ranges):
        if joined and joined[-1].after == each.first and joined[-1].is_data == each.is_data:
            joined[-1] = joined[-1]._replace(after=each.after)
        else:
            joined.append(each)
    return tuple(joined)
