"""Old logs are removed, and no others."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from vfsd.machine import old_logs
from vfsd.machine.runtime import WorkspaceRecord, process_start_ticks, write_record

DAY_S = 86_400


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "vfsd").mkdir(mode=0o700)
    return tmp_path / "vfsd"


def write(path: Path, days: float) -> Path:
    path.write_text("line\n")
    written = time.time() - days * DAY_S
    os.utime(path, (written, written))
    return path


def test_only_logs_of_more_than_seven_days_are_removed(directory: Path) -> None:
    write(directory / "old.log", 8)
    write(directory / "old.log.1", 30)
    write(directory / "young.log", 6)
    write(directory / "other.json", 30)
    write(directory / "log", 30)
    (directory / "directory.log").mkdir()
    os.utime(directory / "directory.log", (0, 0))
    (directory / "link.log").symlink_to(directory / "other.json")
    os.utime(directory / "link.log", (0, 0), follow_symlinks=False)

    old_logs.remove_old_logs(str(directory))

    assert sorted(os.listdir(directory)) == ["directory.log", "link.log", "log", "other.json", "young.log"]


def test_the_log_of_a_running_workspace_stays(directory: Path) -> None:
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    write_record(WorkspaceRecord("silent", "/m", os.getpid(), ticks, "memory", "", "", str(directory / "silent.sock")))
    write(directory / "silent.log", 30)
    write(directory / "silent.log.1", 60)

    old_logs.remove_old_logs(str(directory))

    assert sorted(os.listdir(directory)) == ["silent.json", "silent.log", "silent.log.1"]


def test_a_log_that_is_locked_stays(directory: Path) -> None:
    with open(write(directory / "starting.log", 30), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        old_logs.remove_old_logs(str(directory))
        assert os.listdir(directory) == ["starting.log"]

    old_logs.remove_old_logs(str(directory))
    assert os.listdir(directory) == []


def test_a_directory_that_cannot_be_read_is_no_error(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    old_logs.remove_old_logs(str(directory / "missing"))
    assert "cannot remove old logs" in caplog.text
