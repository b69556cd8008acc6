"""The order of tests among workers: each begins with slow ones, so that all workers end at about the same time.

`--dist worksteal` first gives each worker a contiguous part of the tests, and later moves tests from the end of a
worker's part to one that has none left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["slow_first"]

T = TypeVar("T")


def slow_first(
    tests: Sequence[T], is_slow: Callable[[T], bool], workers: int, is_shared: Callable[[T], bool] = lambda _: False
) -> list[T]:
    """Order `tests` so that each worker's part begins with its share of the slow ones; the others keep their order.

    The part of the first worker begins with the tests that share something expensive (`is_shared`), if there are any.
    Tests are taken from the end of a part, so most of these stay with one worker, which sets it up once.
    """
    shared = [test for test in tests if is_shared(test)]
    slow = [test for test in tests if is_slow(test) and not is_shared(test)]
    others = [test for test in tests if not is_slow(test) and not is_shared(test)]
    shares = [slow[worker::workers] for worker in range(workers)]
    if shared and workers > 1:
        shares = [shared, *(slow[worker :: workers - 1] for worker in range(workers - 1))]
    elif shared:
        shares = [shared + slow]
    ordered: list[T] = []
    for worker, share in enumerate(shares):
        size = (len(tests) - len(ordered)) // (workers - worker)  # as xdist divides them
        count = max(0, size - len(share))
        ordered += share + others[:count]
        del others[:count]
    return ordered + others
