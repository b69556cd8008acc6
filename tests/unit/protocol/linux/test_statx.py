"""Waiting until a further change of a file gets another timestamp."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from protocol.linux import statx


def test_a_file_that_is_changed_after_the_wait_has_a_later_ctime(tmp_path: Path) -> None:
    for number in range(20):
        file = tmp_path / str(number)
        file.touch()
        before_ns = file.stat().st_ctime_ns
        statx.outlast_tick(before_ns)
        assert statx.file_clock_ns() > before_ns
        os.chmod(file, 0o600 if number % 2 else 0o640)
        assert file.stat().st_ctime_ns > before_ns


@pytest.mark.parametrize("ahead_s", [1, 3600])
def test_a_ctime_of_another_machines_clock_is_not_waited_for(ahead_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _s: pytest.fail("it waits"))
    statx.outlast_tick(statx.file_clock_ns() + ahead_s * 10**9)
