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


def lines(progress: Progress, clock: list[float]) -> list[str]:
    """Run 200 tests of `quick`, 0.125 s each, and 100 of `slow`, 1 s each."""
    tests = ["tests/quick.py::test"] * 200 + ["tests/slow.py::test"] * 100
    progress.start(tests)
    said = []
    for test in tests:
        clock[0] += 0.125 if "quick" in test else 1.0
        said.append(progress.finished(test))
    return [line for line in said if line]


def test_a_line_comes_when_its_time_has_come() -> None:
    clock = [100.0]
    said = lines(Progress({}, 30, lambda: clock[0]), clock)
    assert len(said) == 4
    assert said[0] == "205 of 300 tests (68 %), 0 failed, 0:30 so far"


def test_the_estimate_comes_from_the_durations_of_an_earlier_run() -> None:
    clock = [100.0]
    # That machine was twice as fast.
    said = lines(Progress({"tests/quick.py": 0.0625, "tests/slow.py": 0.5}, 30, lambda: clock[0]), clock)
    assert said[0] == "205 of 300 tests (68 %), 0 failed, 0:30 so far, about 1:35 left"


def test_durations_of_a_part_give_no_estimate() -> None:
    clock = [100.0]
    assert "left" not in lines(Progress({"tests/quick.py": 0.05}, 30, lambda: clock[0]), clock)[0]


@pytest.mark.extended
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_with_and_without_workers_prints_them(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_some.py").write_text("".join(f"def test_{n}():\n    assert {n} != 1\n" for n in range(3)))
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\nfrom tests.support.progress import ProgressPlugin\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(ProgressPlugin(config, Path('none')))\n"
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
