"""The order of tests among workers."""

from __future__ import annotations

import pytest

from tests.support.schedule import slow_first


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("slow", [set(), {0}, {5, 6, 7, 19}, set(range(20))])
def test_each_part_begins_with_a_share_of_the_slow_tests_and_no_test_is_lost(slow: set[int], workers: int) -> None:
    tests = list(range(20))
    ordered = slow_first(tests, slow.__contains__, workers)
    assert sorted(ordered) == tests
    assert [test for test in ordered if test not in slow] == [test for test in tests if test not in slow]
    for worker in range(workers):
        size = len(ordered) // (workers - worker)
        part, ordered = ordered[:size], ordered[size:]
        expected = len(slow) // workers + (worker < len(slow) % workers)
        assert [test in slow for test in part[:expected]] == [True] * min(expected, size)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_first_part_begins_with_the_tests_that_share_something(workers: int) -> None:
    shared, slow = {3, 4, 11}, {0, 11, 17, 18}
    ordered = slow_first(list(range(20)), slow.__contains__, workers, shared.__contains__)
    assert sorted(ordered) == list(range(20))
    assert ordered[:3] == [3, 4, 11]
    if workers > 1:
        assert ordered[20 // workers] in slow
