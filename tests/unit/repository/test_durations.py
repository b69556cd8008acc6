"""The record of where a test run's time goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.durations import DurationsPlugin, read_record


def test_the_next_run_reads_the_mean_of_each_file(tmp_path: Path) -> None:
    plugin = DurationsPlugin(tmp_path / "record")
    for nodeid, duration_s in (
        ("tests/a.py::test_one", 1.0),
        ("tests/a.py::test_two[x y]", 3.0),
        ("tests/b.py::test", 5.0),
    ):
        for when in ("setup", "call", "teardown"):
            report = pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, when, duration=duration_s / 3)  # type: ignore[arg-type]
            plugin.pytest_runtest_logreport(report)
    (tmp_path / "record").write_text(plugin.text(9.0))
    assert read_record(tmp_path / "record") == {"tests/a.py": 2.0, "tests/b.py": 5.0}
    assert read_record(tmp_path / "none") == {}
