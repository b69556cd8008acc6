"""How the tests are compiled, ordered, shown and recorded in a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compiling import compile_tests, stale
from tests.support.durations import DurationsPlugin, read_record
from tests.support.progress import Progress
from tests.support.schedule import slow_first

REPOSITORY = Path(__file__).parents[3]
_OF_THE_SESSION = {"PYTEST_ADDOPTS", "PYTEST_PLUGINS"}  # options and plugins that the inner session has not


@pytest.mark.extended
def test_a_module_is_compiled_once_and_again_when_its_source_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path, broken = tmp_path / "test_it.py", tmp_path / "test_broken.py"
    path.write_text("def test_it():\n    assert 1 == 1\n")
    broken.write_text("import nothing_of_this_name\n")
    assert stale(tmp_path) == [broken, path]
    compile_tests([broken, path], 2)
    assert stale(tmp_path) == []
    os.utime(next(tmp_path.rglob("test_it*.pyc")), (1, 1))
    assert stale(tmp_path) == [path]
    compile_tests([path], 2)
    assert stale(tmp_path) == []


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


def lines(progress: Progress, clock: list[float]) -> list[str]:
    """Run 200 tests of `quick`, 0.125 s each, and 100 of `slow`, 1 s each."""
    tests = ["tests/quick.py::test"] * 200 + ["tests/slow.py::test"] * 100
    progress.start(tests)
    said = []
    for test in tests:
        clock[0] += 0.125 if "quick" in test else 1.0
        said.append(progress.finished(test))
    return [line for line in said if line]


@pytest.mark.parametrize(
    ("durations", "estimate"),
    [
        ({}, ""),
        ({"tests/quick.py": 0.05}, ""),  # of a part of the tests only
        ({"tests/quick.py": 0.0625, "tests/slow.py": 0.5}, ", about 1:35 left"),  # of a machine that is twice as fast
    ],
)
def test_a_line_comes_when_its_time_has_come_with_an_estimate_from_an_earlier_run(
    durations: dict[str, float], estimate: str
) -> None:
    clock = [100.0]
    said = lines(Progress(durations, 30, lambda: clock[0]), clock)
    assert len(said) == 4
    assert said[0] == "205 of 300 tests (68 %), 0 failed, 0:30 so far" + estimate


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
    options = ["-p", "xdist.plugin", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path, "-n", workers]
    command = [sys.executable, "-m", "pytest", *options, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "3 of 3 tests (100 %), 1 failed, " in done.stdout, done.stdout + done.stderr
