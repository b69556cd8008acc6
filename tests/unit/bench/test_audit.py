"""The cost of the log: what is counted, and the figures of a row."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bench.audit import cpu_s, line, make_repository, measured, ratio
from bench.neighbours import Build

BUSY = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


def pair(on: float, off: float) -> dict[str, Build]:
    return {"on": Build(10 * on, on), "off": Build(10 * off, off)}


def test_the_ratio_is_the_median_with_its_quartiles() -> None:
    found = [pair(1.0 + each / 100, 1.0) for each in (0, 1, 2, 3, 400)]
    assert ratio(found, lambda one: one.cpu_s) == pytest.approx((1.01, 1.02, 1.03))


def test_a_row_names_the_pairs_and_both_times() -> None:
    row = line("git clone", [pair(1.02, 1.0), pair(2.04, 2.0), pair(3.06, 3.0)])
    assert row.split()[:3] == ["git", "clone", "3"]
    assert "2.00 s, x 1.020 (1.020 to 1.020)" in row
    assert "20.00 s, x 1.020 (1.020 to 1.020)" in row
    assert row.endswith("+2.0 % (+2.0 to +2.0)")


@pytest.mark.extended
def test_the_cpu_time_of_the_command_and_of_the_daemon_counts(tmp_path: Path) -> None:
    took = measured(os.getpid(), [sys.executable, "-c", BUSY], tmp_path)
    assert took.cpu_s >= 0.3
    assert took.wall_s >= 0.3
    with subprocess.Popen([sys.executable, "-c", f"{BUSY}\nprint(flush=True); input()"], stdin=-1, stdout=-1) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        commands = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert cpu_s(daemon.pid) - commands.ru_utime - commands.ru_stime >= 0.3
        daemon.communicate(b"\n")


def test_a_command_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="false"):
        measured(os.getpid(), ["false"], tmp_path)


def test_the_repository_has_one_commit_with_all_files(tmp_path: Path) -> None:
    make_repository(tmp_path / "repository", 120)
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD"], cwd=tmp_path / "repository", capture_output=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 120
