"""Rounds of the table: order, modes, budget, and failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench._filesystems import Mounted
from bench._machine import AS_IT_IS, AWAKE, Modes
from bench._results import Budget
from bench.table import Job, RowRun, cell, jobs, run_rows


@pytest.fixture
def modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Modes:
    monkeypatch.setattr("bench._machine._REST_S", 0.0)
    device = tmp_path / "device"
    device.touch()
    return Modes("both", str(device))


def mounted(tmp_path: Path) -> list[Mounted]:
    found: list[Mounted] = []
    for name, each in (("tmpfs", (AS_IT_IS, AWAKE)), ("vfsd native", (AS_IT_IS,)), ("vfsd native", (AWAKE,))):
        place = tmp_path / f"{name}-{len(found)}"
        place.mkdir()
        found.append(Mounted(name, place, modes=each))
    return found


def row_run(tmp_path: Path, modes: Modes, measure: Callable[[Mounted], float]) -> RowRun:
    job = Job("row", "op", lambda on, _place, _clock: measure(on))
    return RowRun(job, mounted(tmp_path), modes, uses_cpu_time=False)


def test_each_round_measures_both_modes_and_a_workspace_for_each(tmp_path: Path, modes: Modes) -> None:
    used: list[str] = []

    def measure(on: Mounted) -> float:
        used.append(on.path.name)
        return 1.0

    run_rows([row_run(tmp_path, modes, measure)], 2, Budget(None))
    # The modes change their order, and so do the file systems.
    first = ["tmpfs-0", "vfsd native-2", "tmpfs-0", "vfsd native-1"]
    second = ["vfsd native-1", "tmpfs-0", "vfsd native-2", "tmpfs-0"]
    assert used == [*first, *second]


def test_a_failure_is_a_gap_of_its_row_without_the_path_of_the_mount(tmp_path: Path, modes: Modes) -> None:
    def measure(on: Mounted) -> float:
        if on.name == "tmpfs":
            return 1.0
        raise OSError(f"no links in {on.path}/place")

    run = row_run(tmp_path, modes, measure)
    run_rows([run], 2, Budget(None))
    assert run.summaries()[AWAKE]["vfsd native"] == {"gap": "no links in place"}
    assert run.summaries()[AWAKE]["tmpfs"]["rounds"] == 2
    assert cell(run.summaries()[AS_IT_IS], "vfsd native", "op") == "gap"


def test_a_row_that_fails_on_tmpfs_has_no_figures(tmp_path: Path, modes: Modes) -> None:
    def measure(_on: Mounted) -> float:
        raise OSError("full")

    run = row_run(tmp_path, modes, measure)
    run_rows([run], 3, Budget(None))
    assert {tuple(found) for row in run.summaries().values() for found in row.values()} == {("gap",)}


def test_a_budget_that_is_used_up_leaves_rows_out(tmp_path: Path, modes: Modes) -> None:
    runs = []
    for name in ("first", "second"):
        place = tmp_path / name
        place.mkdir()
        runs.append(row_run(place, modes, lambda _on: 1.0))
    asked_at = iter([0.0, 1.0])  # when the budget begins, and before the first row
    run_rows(runs, 5, Budget(10.0, clock=lambda: next(asked_at, 10.0)))
    assert [run.rounds for run in runs] == [1, 0]


def test_places_are_removed_after_each_cell(tmp_path: Path, modes: Modes) -> None:
    run = row_run(tmp_path, modes, lambda _on: 1.0)
    run_rows([run], 1, Budget(None))
    assert [path for place in tmp_path.iterdir() if place.is_dir() for path in place.iterdir()] == []


def test_a_short_run_has_the_rows_of_the_targets_and_of_sqlite() -> None:
    names = {job.name for job in jobs("", Path("/"), is_short=True)}
    assert {"create + write 1 KB", "tar extract", "rm -rf", "git clone", "SQLite WAL, 10 a transaction"} <= names
    assert [job.name for job in jobs("^SQLite rollback, 1 ", Path("/"), is_short=False)] == [
        "SQLite rollback, 1 a transaction"
    ]
