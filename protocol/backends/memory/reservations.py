"""The pages of a file that fallocate has promised, as ranges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Reserved", "joined", "overlap", "within", "without"]


class Reserved(NamedTuple):
    """Pages that fallocate has counted and nobody has written."""

    first: int
    after: int
    is_data: bool = False  # allocated twice


def overlap(ranges: Iterable[Reserved], first: int, after: int) -> int:
    """How many pages of `ranges` lie between two."""
    return sum(each.after - each.first for each in within(ranges, first, after))


def within(ranges: Iterable[Reserved], first: int, after: int) -> list[Reserved]:
    """The parts of `ranges` between two pages."""
    cut = (each._replace(first=max(first, each.first), after=min(after, each.after)) for each in ranges)
    return [each for each in cut if each.after > each.first]


def without(ranges: Iterable[Reserved], first: int, after: int) -> tuple[Reserved, ...]:
    """`ranges` without what lies between two pages."""
    left = []
    for each in ranges:
        if each.first < first:
            left.append(each._replace(after=min(each.after, first)))
        if each.after > after:
            left.append(each._replace(first=max(each.first, after)))
    return tuple(each for each in left if each.after > each.first)


def joined(ranges: Iterable[Reserved]) -> tuple[Reserved, ...]:
    """In order, with neighbours of one kind made one."""
    joined: list[Reserved] = []
    for each in sorted(ranges):
        if joined and joined[-1].after == each.first and joined[-1].is_data == each.is_data:
            joined[-1] = joined[-1]._replace(after=each.after)
        else:
            joined.append(each)
    return tuple(joined)
