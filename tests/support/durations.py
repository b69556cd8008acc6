"""Record where the time of a test run goes: by file, and for the slowest tests.

At the end of a whole suite the session's main process writes `test-durations-SUITE.txt` at the repository's root:
seconds of set-up, call and clean-up, and the CPU time of the worker and of the children it reaped meanwhile (daemons
are not among these).  `ProgressPlugin` reads the file of the last run for its estimate; `.ci/run` prints its head.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Cost", "CpuPlugin", "DurationsPlugin", "read_record", "record_of"]

_SLOWEST = 300
_PHASES = ("setup", "call", "teardown")


def record_of(suite: str) -> Path:
    """The file with the durations of a suite's last whole run."""
    return Path(__file__).parents[2] / f"test-durations-{suite}.txt"


@dataclass(slots=True)
class Cost:
    """Seconds of one test, or of the tests of one file."""

    setup_s: float = 0.0
    call_s: float = 0.0
    teardown_s: float = 0.0
    cpu_s: float = 0.0
    tests: int = 0

    @property
    def total_s(self) -> float:
        return self.setup_s + self.call_s + self.teardown_s

    def add(self, phase: str, duration_s: float, cpu_s: float) -> None:
        name = f"{phase}_s"
        setattr(self, name, getattr(self, name) + duration_s)
        self.cpu_s += cpu_s
        self.tests += phase == "setup"


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class CpuPlugin:
    """In each worker: add the CPU time of each phase to its report, as `cpu_s`."""

    def __init__(self) -> None:
        self._last_s = _cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = _cpu_s()
        report.cpu_s = now_s - self._last_s
        self._last_s = now_s
        return report


class DurationsPlugin:
    """In the main process: collect the reports, and write them when the run ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started_s = time.monotonic()
        self._tests: defaultdict[str, Cost] = defaultdict(Cost)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when in _PHASES:
            self._tests[report.nodeid].add(report.when, report.duration, getattr(report, "cpu_s", 0.0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        has_all = config.args_source == config.ArgsSource.TESTPATHS
        is_whole = has_all and not (config.option.keyword or config.option.markexpr)
        if self._tests and is_whole:
            self._path.write_text(self.text(time.monotonic() - self._started_s), encoding="utf-8")

    def text(self, elapsed_s: float) -> str:
        files: defaultdict[str, Cost] = defaultdict(Cost)
        for nodeid, cost in self._tests.items():
            total = files[nodeid.partition("::")[0]]
            for phase in _PHASES:
                total.add(phase, getattr(cost, f"{phase}_s"), 0.0)
            total.cpu_s += cost.cpu_s
        total_s = sum(each.total_s for each in files.values())
        lines = [f"# {len(self._tests)} tests in {elapsed_s:.0f} s; {total_s:.0f} s in all workers together"]
        lines += ["", "# by file", _HEAD, *_rows(files)]
        lines += ["", f"# the slowest {_SLOWEST} tests", _HEAD, *_rows(self._tests, _SLOWEST)]
        return "\n".join(lines) + "\n"


_HEAD = "#  total   setup    call  teardown    cpu  tests  name"


def _rows(costs: dict[str, Cost], most: int | None = None) -> list[str]:
    ordered = sorted(costs.items(), key=lambda item: -item[1].total_s)[:most]
    return [
        f"{cost.total_s:8.2f}{cost.setup_s:8.2f}{cost.call_s:8.2f}{cost.teardown_s:10.2f}{cost.cpu_s:7.2f}{cost.tests:7d}"
        f"  {name}"
        for name, cost in ordered
    ]


def read_record(path: Path) -> dict[str, float]:
    """Mean seconds of a test, by file, in the last recorded run; empty if there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    means = {}
    for line in lines[lines.index(_HEAD) + 1 :]:
        if not line:
            break
        total, _, _, _, _, tests, name = line.split(maxsplit=6)
        means[name] = float(total) / max(int(tests), 1)
    return means
