"""Logs: fields in every format, and no way to forge a line."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vfsd.machine import logs
from vfsd.machine.runtime import WorkspaceRecord, process_start_ticks, write_record

HOSTILE = "a\n2026-01-01 error forged\r\x1b[2J\u2028\udcff é"
_log = logging.getLogger("vfsd.test")


def raised(error: Exception) -> Exception:
    """`error`, with a traceback."""

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        fail()
    return error


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    libraries = [logging.getLogger(name) for name in ("pyfuse3", "trio")]
    before = (root.handlers[:], root.level, [library.level for library in libraries])
    yield
    root.handlers[:], root.level = before[0], before[1]
    for library, level in zip(libraries, before[2], strict=True):
        library.setLevel(level)


def configured(log_format: logs.LogFormat, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level, log_format, stream)
    return stream


def test_a_json_record_has_its_fields() -> None:
    stream = configured("json")
    logs.log_failure(_log, "import", FileNotFoundError(errno.ENOENT, "no such file", "/a b"))
    record = json.loads(stream.getvalue())
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "error",
        "logger": "vfsd.test",
        "message": "import failed: no such file",
        "operation": "import",
        "errno": "ENOENT",
        "path": "/a b",
    }


def test_a_text_record_has_its_fields() -> None:
    stream = configured("text")
    _log.warning("slow", extra={"operation": "read", "errno": errno.EIO, "path": b"/a b"})
    line = stream.getvalue()
    assert line.endswith('Z warning vfsd.test: slow [operation=read errno=EIO path="/a b"]\n')


@pytest.mark.parametrize("log_format", ["text", "journal"])
def test_a_hostile_file_name_stays_on_its_line(log_format: logs.LogFormat) -> None:
    stream = configured(log_format)
    _log.info("looked at %s", HOSTILE, extra={"path": HOSTILE})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert r"a\n2026-01-01 error forged\r\x1b[2J\u2028\xff é" in lines[0]


def test_a_hostile_file_name_is_one_json_line() -> None:
    stream = configured("json")
    _log.info("x", extra={"path": HOSTILE})
    assert stream.getvalue().count("\n") == 1
    assert json.loads(stream.getvalue())["path"] == HOSTILE.replace("\udcff", r"\xff")


@pytest.mark.parametrize("log_format", ["text", "journal", "json"])
def test_an_unexpected_error_is_logged_as_eio_with_its_traceback_and_forges_nothing(
    log_format: logs.LogFormat,
) -> None:
    stream = configured(log_format)
    logs.log_failure(_log, "write", raised(RuntimeError("boom\n<0>forged")))
    text = stream.getvalue()
    assert "EIO" in text
    assert "test_logs.py" in text
    lines = text.splitlines()
    if log_format == "json":
        assert "RuntimeError: boom" in json.loads(text)["traceback"]
    else:
        prefix = "<3>" if log_format == "journal" else ""
        assert all(line.startswith(prefix + "  | ") for line in lines[1:])


def test_an_expected_error_has_no_traceback() -> None:
    stream = configured("text")
    logs.log_failure(_log, "write", raised(OSError(errno.ENOSPC, "full")), level=logging.WARNING)
    assert stream.getvalue().count("\n") == 1
    assert " warning " in stream.getvalue()


@pytest.mark.parametrize(
    ("level", "prefix"),
    [(logging.DEBUG, "<7>"), (logging.INFO, "<6>"), (logging.WARNING, "<4>"), (logging.ERROR, "<3>")],
)
def test_journal_lines_carry_their_priority(level: int, prefix: str) -> None:
    stream = configured("journal", "debug")
    _log.log(level, "x")
    assert stream.getvalue() == f"{prefix}vfsd.test: x\n"


def test_the_level_is_kept_and_configuring_again_replaces_the_stream() -> None:
    first = configured("text", "warning")
    _log.info("not this")
    second = configured("text", "info")
    _log.info("this")
    assert first.getvalue() == ""
    assert second.getvalue().count("this") == 1


@pytest.mark.parametrize("library", ["pyfuse3", "trio.abc.Instrument"])
def test_libraries_log_into_the_same_stream_but_not_their_chatter(library: str) -> None:
    stream = configured("text")
    logging.getLogger(library).info("chatter")
    logging.getLogger(library).error("trouble")
    assert "trouble" in stream.getvalue()
    assert "chatter" not in stream.getvalue()
    stream = configured("text", "debug")
    logging.getLogger(library).info("chatter")
    assert "chatter" in stream.getvalue()


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

    logs.remove_old_logs(str(directory))

    assert sorted(os.listdir(directory)) == ["directory.log", "link.log", "log", "other.json", "young.log"]


def test_the_log_of_a_running_workspace_stays(directory: Path) -> None:
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    write_record(WorkspaceRecord("silent", "/m", os.getpid(), ticks, "memory", "", "", str(directory / "silent.sock")))
    write(directory / "silent.log", 30)
    write(directory / "silent.log.1", 60)

    logs.remove_old_logs(str(directory))

    assert sorted(os.listdir(directory)) == ["silent.json", "silent.log", "silent.log.1"]


def test_a_log_that_is_locked_stays(directory: Path) -> None:
    with open(write(directory / "starting.log", 30), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        logs.remove_old_logs(str(directory))
        assert os.listdir(directory) == ["starting.log"]

    logs.remove_old_logs(str(directory))
    assert os.listdir(directory) == []


def test_a_directory_that_cannot_be_read_is_no_error(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs.remove_old_logs(str(directory / "missing"))
    assert "cannot remove old logs" in caplog.text
