"""Paired builds: their order, and the interval of the change."""

from __future__ import annotations

import pytest

from bench.neighbours import Build, change, figures, pairs, student_t


def test_the_order_within_a_pair_alternates() -> None:
    used: list[str] = []

    def one(choice: str) -> Build:
        used.append(choice)
        return Build(1.0, 1.0)

    assert len(pairs(3, one)) == 3
    assert used == ["off", "on", "on", "off", "off", "on"]


def test_pairs_with_one_ratio_have_an_interval_without_width() -> None:
    middle, low, high = change([1.1, 2.2, 3.3], [1.0, 2.0, 3.0])
    assert (middle, low, high) == pytest.approx((10.0, 10.0, 10.0))


def test_the_interval_includes_the_mean_and_is_wider_for_fewer_pairs() -> None:
    few = change([1.0, 1.2], [1.0, 1.0])
    many = change([1.0, 1.2] * 10, [1.0, 1.0] * 10)
    for middle, low, high in (few, many):
        assert low < middle < high
    assert few[2] - few[1] > 10 * (many[2] - many[1])


def test_a_disturbed_pair_counts_little() -> None:
    others = [1.0] * 10
    steady = change([1.01, 0.99] * 5, others)
    disturbed = change([1.01, 0.99] * 4 + [1.01, 9.0], others)
    assert disturbed[0] == pytest.approx(steady[0], abs=0.5)
    assert disturbed[2] < 2.0


# The quantiles are those of a table of Student's t.
@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.71), (9, 2.26), (19, 2.093), (29, 2.045), (99, 1.984)])
def test_the_quantile_is_that_of_the_table(degrees: int, quantile: float) -> None:
    assert student_t(degrees) == pytest.approx(quantile, abs=0.005)


def test_figures_have_the_change_its_interval_and_the_median_without() -> None:
    found = [{"on": Build(2.0, 1.0), "off": Build(1.0, 1.0)}, {"on": Build(6.0, 1.0), "off": Build(3.0, 1.0)}]
    assert figures(found) == {"wall": pytest.approx((100.0, 100.0, 100.0, 2.0)), "cpu": (0.0, 0.0, 0.0, 1.0)}
