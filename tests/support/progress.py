"""A line every half minute that says how far a test run is: count, share, failures and an estimate of what is left.

With several workers pytest prints dots, without a count; a log file shows nothing for minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["Progress", "ProgressPlugin"]

_EVERY_S = 30.0


class Progress:
    """Counts finished tests; `clock` in seconds."""

    def __init__(self, every_s: float = _EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self.done = 0
        self.failed = 0
        self._every_s = every_s
        self._clock = clock
        self._started_s = self._said_s = clock()

    def start(self, total: int) -> None:
        self.total = total
        self._started_s = self._said_s = self._clock()

    def finished(self) -> str | None:
        """Count one more test; the line to print, if it is time for one."""
        self.done += 1
        now_s = self._clock()
        if now_s - self._said_s < self._every_s:
            return None
        self._said_s = now_s
        return self.line(now_s)

    def line(self, now_s: float) -> str:
        elapsed_s = now_s - self._started_s
        text = f"{self.done:,} of {self.total:,} tests ({100 * self.done // max(self.total, 1)} %)"
        left_s = elapsed_s / self.done * max(self.total - self.done, 0)
        return f"{text}, {self.failed} failed, {_minutes(elapsed_s)} so far, about {_minutes(left_s)} left"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class ProgressPlugin:
    """Feeds a `Progress` from pytest, with or without workers, and prints what it says."""

    def __init__(self, config: pytest.Config) -> None:
        self._progress = Progress(float(os.environ.get("VFSD_TEST_PROGRESS_S", _EVERY_S)))
        self._config = config

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._progress.start(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if not self._progress.total:  # every worker collects the same
            self._progress.start(len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._progress.failed += report.failed
        if report.when != "teardown":
            return
        line = self._progress.finished()
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if line is not None and reporter is not None:
            reporter.write(f"\n{line}\n")
