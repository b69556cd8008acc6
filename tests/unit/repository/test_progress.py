"""The lines that say how far a test run is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.progress import Progress

REPOSITORY = Path(__file__).parents[3]
_OF_THE_SESSION = {"PYTEST_ADDOPTS", "PYTEST_PLUGINS"}  # options and plugins that the inner session has not


def test_a_line_comes_when_its_time_has_come_and_estimates_what_is_left() -> None:
    now_s = 100.0
    progress = Progress(30, lambda: now_s)
    progress.start(2000)
    lines = []
    for _ in range(500):
        now_s += 0.2
        lines.append(progress.finished())
    said = [line for line in lines if line]
    assert len(said) == 3
    assert said[0] == "150 of 2,000 tests (7 %), 0 failed, 0:30 so far, about 6:10 left"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_with_and_without_workers_prints_them(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_some.py").write_text("".join(f"def test_{n}():\n    assert {n} != 1\n" for n in range(3)))
    (tmp_path / "conftest.py").write_text(
        "from tests.support.progress import ProgressPlugin\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(ProgressPlugin(config))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_SESSION}
    environment |= {"VFSD_TEST_PROGRESS_S": "0", "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist.plugin",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-n",
        workers,
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "3 of 3 tests (100 %), 1 failed, " in done.stdout, done.stdout + done.stderr
