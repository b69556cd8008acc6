"""Figures of a benchmark: ratios, summaries, budgets, and the file of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench._results import Budget, read, summary, update


def test_a_ratio_is_computed_for_each_round_and_a_slow_system_has_the_first_rounds_only() -> None:
    row = summary({"tmpfs": [1.0, 2.0, 4.0], "fast": [2.0, 2.0, 2.0], "slow": [9.0]}, {}, "tmpfs")
    assert (row["fast"]["ratio"], row["fast"]["low"], row["fast"]["high"]) == (1.0, 0.5, 2.0)
    assert (row["slow"]["ratio"], row["slow"]["rounds"]) == (9.0, 1)
    assert row["fast"]["each_s"] == [2.0, 2.0, 2.0]


def test_a_system_that_failed_is_a_gap_even_with_figures_of_earlier_rounds() -> None:
    row = summary({"tmpfs": [1.0], "peer": [1.0]}, {"peer": "no symlinks"}, "tmpfs")
    assert row["peer"] == {"gap": "no symlinks"}


def test_without_figures_of_the_limit_everything_is_a_gap() -> None:
    row = summary({"tmpfs": [], "peer": [1.0]}, {}, "tmpfs")
    assert all("gap" in cell for cell in row.values())


def test_a_budget_allows_what_ends_in_time() -> None:
    now = [100.0]
    budget = Budget(10.0, clock=lambda: now[0])
    assert budget.allows(9.0)
    assert not budget.allows(10.0)
    now[0] = 111.0
    assert not budget.allows(0.0)
    assert Budget(None).allows(1e9)


def test_an_update_keeps_what_other_benchmarks_wrote(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    update(path, {"rows": {"a": 1}, "machine": {}})
    update(path, {"latency": 2})
    update(path, {"rows": {"b": 1}})
    assert read(path) == {"rows": {"b": 1}, "machine": {}, "latency": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["bench.json"]


def test_a_file_that_has_no_results_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"list\.json has no results"):
        update(path, {"rows": {}})
    path.write_text("{")
    with pytest.raises(ValueError, match="line 1"):
        update(path, {"rows": {}})
    assert path.read_text() == "{"
