"""Launching: the mount answers, or the reason is on the caller's side, and no daemon is left behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign_files import plant
from tests.support.waiting import longer_limits
from vfsd.client import launch as launching
from vfsd.client.launch import launch, log_path
from vfsd.machine import mountinfo
from vfsd.machine.daemon_start import daemon_environment, process_kind
from vfsd.wire.options import Failed, MountOptions, Ready, decode_options, decode_report, encode_options, encode_report

FAKE = "tests.unit.vfsd.client.fake_daemon"
REPOSITORY = Path(__file__).parents[4]
pytestmark = pytest.mark.usefixtures("new_interpreters")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture
def stop_file(tmp_path: Path) -> Iterator[str]:
    """Fake daemons end when it exists."""
    path = tmp_path / "stop"
    yield str(path)
    path.touch()


def options(name: str, stop_file: str = "/nonexistent", mountpoint: str = "/mnt/x") -> MountOptions:
    return MountOptions.of(mountpoint=mountpoint, name=name, archive=stop_file)


def start(name: str, stop_file: str = "/nonexistent", **arguments: Any) -> Ready:
    return launch(options(name, stop_file), daemon_module=FAKE, **arguments)


def log_text(name: str) -> str:
    return Path(log_path(name)).read_text()


def await_gone(pid: int) -> None:
    """Return when process `pid` has ended and been reaped; the test's own timeout is the limit."""
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)


def test_a_daemon_that_gets_ready_goes_on_in_the_background(stop_file: str) -> None:
    ready = start("fine", stop_file)
    assert (ready.name, ready.mountpoint, ready.socket, ready.engine) == ("fine", "/mnt/x", "/socket", "fake")
    assert ready.recovered == "a sentence"
    facts = json.loads(log_text("fine"))
    assert facts["cwd"] == "/"
    assert facts["stdin"] == "/dev/null"
    assert facts["session"] == facts["pid"] == ready.pid
    assert stop_file not in facts["argv"]
    assert os.path.exists(f"/proc/{ready.pid}")
    Path(stop_file).touch()
    await_gone(ready.pid)  # a zombie would stay


def test_nothing_of_the_starter_is_open_in_the_daemon(stop_file: str, tmp_path: Path) -> None:
    with open(tmp_path / "mine", "w", encoding="utf-8") as file:
        os.set_inheritable(file.fileno(), True)
        ready = start("fine", stop_file)
    opened = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{ready.pid}/fd")}
    assert str(tmp_path / "mine") not in opened
    assert not any(name.startswith("/dev/pts") for name in opened)


def test_paths_that_are_no_utf8_arrive() -> None:
    asked = options("fine", os.fsdecode(b"/caf\xe9\n\\x"))
    assert decode_options(encode_options(asked)) == asked
    ready = Ready("n", os.fsdecode(b"/caf\xe9"), "/s", 1, "native")
    assert decode_report(encode_report(ready)) == ready


def test_a_failed_start_raises_the_daemons_error() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        start("fails")
    assert caught.value.strerror == "there is no such place"
    assert caught.value.filename == "/mnt/x"
    with pytest.raises(OSError, match="that makes no sense") as refused:
        start("refuses")
    assert refused.value.errno == errno.EINVAL


def test_an_unexpected_failure_quotes_the_log() -> None:
    with pytest.raises(OSError, match="RuntimeError: a bug") as caught:
        start("crashes")
    assert caught.value.errno == errno.EIO
    notes = "\n".join(caught.value.__notes__)
    assert log_path("crashes") in notes
    assert "in run_daemon" in notes


def test_a_daemon_that_dies_is_noticed() -> None:
    with pytest.raises(OSError, match=r"died while starting \(killed by SIGKILL\)") as caught:
        start("dies")
    assert "  last words" in caught.value.__notes__


def test_a_daemon_that_cannot_even_be_imported_is_noticed() -> None:
    with pytest.raises(OSError, match=r"died while starting \(exit status 1\)") as caught:
        launch(options("fine"), daemon_module="tests.unit.no_such_daemon")
    assert any("No module named" in note for note in caught.value.__notes__)


def test_a_daemon_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfsd.client.launch.STOP_TIMEOUT_S", 0.1)
    said = ""
    for timeout_s in longer_limits(2):
        with pytest.raises(TimeoutError, match=f"did not start within {timeout_s} s"):
            start("hangs", timeout_s=timeout_s)
        said = log_text("hangs")
        if said:
            break
    pid = int(said.removeprefix("pid "))
    assert not os.path.exists(f"/proc/{pid}")


def test_a_daemon_that_talks_nonsense_is_stopped() -> None:
    with pytest.raises(OSError, match="cannot read the daemon's report") as caught:
        start("babbles")
    assert caught.value.errno == errno.EPROTO


@pytest.mark.extended
@pytest.mark.fuse
def test_a_mount_that_a_failed_start_leaves_dead_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    asked = options("mounts-and-hangs", mountpoint=str(tmp_path / "m"))
    with pytest.raises(TimeoutError):
        launch(asked, daemon_module=FAKE, timeout_s=4)
    assert mountinfo.mount_at(str(tmp_path / "m")) is None


def test_interrupting_the_starter_ends_the_half_started_daemon() -> None:
    code = (
        "from tests.unit.vfsd.client.test_launch import *\n"
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "start('waits')"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    log = Path(log_path("waits"))
    while not (log.exists() and log.read_text().endswith("\n")):
        assert starter.poll() is None
        time.sleep(0.01)
    starter.send_signal(signal.SIGINT)
    _, said = starter.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert not os.path.exists(f"/proc/{int(log.read_text().removeprefix('pid '))}")


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_a_starter_that_is_killed_ends_the_half_started_daemon(number: signal.Signals) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", "from tests.unit.vfsd.client.test_launch import *\nstart('waits')"],
        cwd=REPOSITORY, start_new_session=True,
    )  # fmt: skip
    log = Path(log_path("waits"))
    while not (log.exists() and log.read_text().endswith("\n")):
        assert starter.poll() is None
        time.sleep(0.01)
    daemon = int(log.read_text().split()[1])
    starter.send_signal(number)
    starter.wait(60)
    await_gone(daemon)
    assert "has ended: nothing is mounted" in log.read_text()


@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "symlink"])
def test_a_log_that_is_no_file_is_named_and_keeps_nobody_waiting(kind: str, stop_file: str) -> None:
    path = Path(log_path("fine"))
    plant(path, kind)
    with pytest.raises(OSError, match="not a regular file: remove it"):
        start("fine", stop_file)


def test_a_daemon_whose_starter_is_gone_does_not_stay(stop_file: str, tmp_path: Path) -> None:
    reader, report = os.pipe()
    os.close(reader)
    given, giver = os.pipe()
    os.write(giver, encode_options(options("fine", stop_file)))
    os.close(giver)
    command = [sys.executable, "-m", FAKE, str(given), str(report)]
    done = subprocess.run(command, pass_fds=[given, report], cwd=REPOSITORY, capture_output=True, check=False)
    os.close(given)
    os.close(report)
    assert done.returncode == 1
    assert b"has ended: nothing is mounted" in done.stderr or b"Broken pipe" in done.stderr


def test_each_start_has_a_fresh_log_and_the_last_one_is_kept() -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="a bug"):
            start("crashes")
    assert log_text("crashes").count("RuntimeError: a bug") == 1
    assert Path(log_path("crashes") + ".1").read_text().count("RuntimeError: a bug") == 1
    assert os.stat(log_path("crashes")).st_mode & 0o777 == 0o600


def test_the_log_of_a_running_daemon_stays_when_its_name_is_started_again(stop_file: str) -> None:
    first = start("fine", stop_file)
    start("fine", stop_file)
    assert json.loads(log_text("fine").splitlines()[0])["pid"] == first.pid
    assert not os.path.exists(log_path("fine") + ".1")


def test_failures_keep_errno_path_and_one_line() -> None:
    failed = Failed.of(OSError(errno.EBUSY, "two\nlines", b"/caf\xe9"))
    assert decode_report(encode_report(failed)) == failed
    assert failed == Failed("two lines", errno.EBUSY, "/caf\udce9")
    assert Failed.of(PermissionError("only text")) == Failed("only text", errno.EIO)


def test_a_start_that_is_refused_leaves_no_log_of_its_own_and_the_one_before_in_its_place() -> None:
    with pytest.raises(FileNotFoundError):
        start("fails")
    assert os.listdir(os.path.dirname(log_path("fails"))) == []
    Path(log_path("fails")).write_text("of a workspace that was\n")
    with pytest.raises(FileNotFoundError):
        start("fails")
    assert log_text("fails") == "of a workspace that was\n"
    assert not os.path.exists(log_path("fails") + ".1")


OPTIONS = MountOptions.of("/mnt/x", "x")


@pytest.fixture
def socket_path(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(workdir))
    (workdir / "vfsd").mkdir(mode=0o700)
    return Path(launching.socket_path(daemon_environment()))


def _set_mask(signals: set[signal.Signals]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def _set_handler(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGUSR2, handler)


def _set_soft_limit(soft: int) -> int:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return before


def test_the_variable_is_on_or_off() -> None:
    assert launching.is_fork_server_on({})
    assert launching.is_fork_server_on({"VFSD_FORK_SERVER": "on"})
    assert not launching.is_fork_server_on({"VFSD_FORK_SERVER": "off"})
    with pytest.raises(OSError, match="on or off") as raised:
        launching.is_fork_server_on({"VFSD_FORK_SERVER": "no"})
    assert raised.value.errno == errno.EINVAL


def test_without_a_server_the_daemon_is_started_directly(socket_path: Path) -> None:
    assert launching.start_by_server(OPTIONS, 1, 2) == "no fork server is running"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(socket_path))  # of a server that was killed
        assert launching.start_by_server(OPTIONS, 1, 2) == "no fork server is running"


def test_a_server_that_does_not_answer_is_not_waited_for(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_ANSWER_TIMEOUT_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        assert launching.start_by_server(OPTIONS, 1, 2) == "the fork server does not answer"


def test_a_kind_is_of_what_a_process_inherits() -> None:
    ours = process_kind({"PYTHONPATH": "/a", "EDITOR": "vi"})
    assert process_kind({"EDITOR": "ed", "PYTHONPATH": "/a"}) == ours
    assert process_kind({"PYTHONPATH": "/b", "EDITOR": "vi"}) != ours
    assert process_kind({"PYTHONPATH": "/a\udcff"}) != ours


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (lambda: os.umask(0o177), os.umask),
        (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}), _set_mask),
        (lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN), _set_handler),
        (lambda: _set_soft_limit(1000), _set_soft_limit),
    ],
    ids=["umask", "blocked signals", "ignored signals", "limits"],
)
def test_each_inherited_property_is_of_the_kind(change: Callable[[], Any], undo: Callable[[Any], object]) -> None:
    ours = process_kind({})
    before = change()
    try:
        assert process_kind({}) != ours
    finally:
        undo(before)
    assert process_kind({}) == ours
