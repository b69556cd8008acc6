"""A line every half minute that says how far a test run is: count, share, failures, and an estimate of what is left.

With several workers pytest prints dots, without a count; a log file shows nothing for minutes.  The estimate needs the
durations of an earlier run (`tests.support.durations`): the first minute of a suite says little about the others.

At the end one line counts the tests that did not run on this machine, by what is missing.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.durations import read_record

__all__ = ["Progress", "ProgressPlugin"]

_EVERY_S = 30.0
_RECORDED_SHARE = 0.9  # of the tests, for an estimate
_DONE_SHARE = 0.05  # of the recorded time


class Progress:
    """Counts finished tests.

    Args:
        means_s: mean seconds of a test, by file, in an earlier run; empty if there was none.
        every_s: seconds between two lines.
        clock: the present time in seconds.
    """

    def __init__(
        self,
        means_s: Mapping[str, float],
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = 0
        self.done = 0
        self.failed = 0
        self._means_s = means_s
        self._every_s = every_s
        self._clock = clock
        self._started_s = self._said_s = clock()
        self._recorded_s = self._done_s = 0.0
        self._is_recorded = False

    def start(self, tests: Iterable[str]) -> None:
        """Begin a run of these tests, each given by its node id."""
        files = [test.partition("::")[0] for test in tests]
        self.total = len(files)
        known = [self._means_s[file] for file in files if file in self._means_s]
        self._recorded_s = sum(known)
        self._is_recorded = self.total > 0 and len(known) >= _RECORDED_SHARE * self.total
        self._started_s = self._said_s = self._clock()

    def finished(self, test: str) -> str | None:
        """Count one more test; the line to print, if it is time for one."""
        self.done += 1
        self._done_s += self._means_s.get(test.partition("::")[0], 0.0)
        now_s = self._clock()
        if now_s - self._said_s < self._every_s:
            return None
        self._said_s = now_s
        return self.line(now_s)

    def line(self, now_s: float) -> str:
        elapsed_s = now_s - self._started_s
        text = f"{self.done:,} of {self.total:,} tests ({100 * self.done // max(self.total, 1)} %)"
        text += f", {self.failed} failed, {_minutes(elapsed_s)} so far"
        if not self._is_recorded or self._done_s < _DONE_SHARE * self._recorded_s:
            return text
        left_s = elapsed_s / self._done_s * max(self._recorded_s - self._done_s, 0)
        return f"{text}, about {_minutes(left_s)} left"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class ProgressPlugin:
    """Feeds a `Progress` from pytest, with or without workers, and prints what it says."""

    def __init__(self, config: pytest.Config, record: Path) -> None:
        self._progress = Progress(read_record(record), float(os.environ.get("VFSD_TEST_PROGRESS_S", _EVERY_S)))
        self._config = config
        self._missing: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._progress.start(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if not self._progress.total:  # every worker collects the same
            self._progress.start(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._progress.failed += report.failed
        if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "wasxfail"):
            self._missing[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.when != "teardown":
            return
        line = self._progress.finished(report.nodeid)
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if line is not None and reporter is not None:
            reporter.write(f"\n{line}\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._missing:
            reasons = "; ".join(f"{reason} ({count:,})" for reason, count in self._missing.most_common())
            terminalreporter.write_line(f"{self._missing.total():,} tests did not run on this machine: {reasons}")
