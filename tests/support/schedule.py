"""The order of tests among workers: each begins with slow ones, so that all workers end at about the same time.

`--dist worksteal` first gives each worker a contiguous part of the tests, and later moves tests from the end of a
worker's part to one that has none left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["slow_first"]

T = TypeVar("T")


def slow_first(tests: Sequence[T], is_slow: Callable[[T], bool], workers: int) -> list[T]:
    """Order `tests` so that each worker's part begins with its share of the slow ones; the others keep their order."""
    slow = [test for test in tests if is_slow(test)]
    others = [test for test in tests if not is_slow(test)]
    ordered: list[T] = []
    for worker in range(workers):
        size = (len(tests) - len(ordered)) // (workers - worker)  # as xdist divides them
        share = slow[worker::workers]
        count = max(0, size - len(share))
        ordered += share + others[:count]
        del others[:count]
    return ordered + others
