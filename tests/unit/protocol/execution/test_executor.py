"""HostExecutor: commands on this host, which end with everything that they started."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from protocol.execution.executor import Executor
from protocol.execution.host import HostExecutor
from tests.support.processes import is_running
from tests.support.waiting import longer_limits, readable


@pytest.fixture
def executor(tmp_path: Path) -> HostExecutor:
    return HostExecutor(tmp_path)


def pid_in(path: Path) -> int:
    return int(path.read_text())


def test_it_is_an_executor(executor: HostExecutor) -> None:
    assert isinstance(executor, Executor)


def test_output_error_and_exit_status_come_apart(executor: HostExecutor) -> None:
    done = executor.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.exit_status, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    assert not done.timed_out
    assert not done.truncated


def test_a_command_runs_in_its_directory_with_its_environment(executor: HostExecutor, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    done = executor.run(["sh", "-c", 'pwd; echo "$X|$PWD"'], cwd="a b", env={"X": "1 2"})
    assert done.stdout.decode() == f"{tmp_path}/a b\n1 2|{tmp_path}/a b\n"


def test_a_command_is_not_taken_for_the_service_that_runs_it(
    executor: HostExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    monkeypatch.setenv("OTHER", "kept")
    assert executor.run(["sh", "-c", 'echo "$NOTIFY_SOCKET|$OTHER"']).stdout == b"|kept\n"


def test_standard_input_is_given_whole_and_ends(executor: HostExecutor) -> None:
    content = os.urandom(1 << 20)
    assert executor.run(["cat"], stdin=content, output_limit_bytes=1 << 21).stdout == content


def test_without_standard_input_a_command_sees_its_end(executor: HostExecutor) -> None:
    assert executor.run(["cat"]).exit_status == 0


def test_a_command_that_reads_no_input_is_not_waited_for(executor: HostExecutor) -> None:
    assert executor.run(["true"], stdin=b"x" * (1 << 20)).exit_status == 0


def test_output_beyond_the_limit_is_thrown_away_and_the_command_goes_on(executor: HostExecutor) -> None:
    done = executor.run(["sh", "-c", "head -c 1000000 /dev/zero; echo end >&2"], output_limit_bytes=10)
    assert done.stdout == bytes(10)
    assert done.stderr == b"end\n"
    assert done.truncated
    assert done.exit_status == 0


def test_output_of_just_the_limit_is_whole(executor: HostExecutor) -> None:
    done = executor.run(["printf", "12345"], output_limit_bytes=5)
    assert done.stdout == b"12345"
    assert not done.truncated


def test_a_fatal_signal_is_in_the_exit_status(executor: HostExecutor) -> None:
    assert executor.run(["sh", "-c", "kill -TERM $$"]).exit_status == -signal.SIGTERM


@pytest.mark.parametrize(
    ("argv", "cwd", "code"),
    [
        (["/no/such/program"], ".", errno.ENOENT),
        (["no-such-program-anywhere"], ".", errno.ENOENT),
        (["true"], "missing", errno.ENOENT),
        (["true"], "file", errno.ENOTDIR),
        (["./file"], ".", errno.EACCES),
        ([], ".", errno.EINVAL),
        (["a\0b"], ".", errno.EINVAL),
    ],
)
def test_a_command_that_cannot_be_started_raises(
    executor: HostExecutor, tmp_path: Path, argv: list[str], cwd: str, code: int
) -> None:
    (tmp_path / "file").write_text("no program")
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        executor.run(argv, cwd=cwd)
    assert caught.value.errno == code


@pytest.mark.parametrize(("name", "value"), [("", "x"), ("A=B", "x"), ("A", "x\0y"), ("A\0", "x")])
def test_an_impossible_variable_is_refused(executor: HostExecutor, name: str, value: str) -> None:
    with pytest.raises(OSError, check=lambda error: error.errno == errno.EINVAL):
        executor.run(["true"], env={name: value})


ESCAPING = "setsid sh -c 'echo $$ >inner; exec sleep 1000' & echo $! >outer; while [ ! -s inner ]; do :; done"


@pytest.mark.parametrize("ending", ["", "; sleep 1000"], ids=["it ended", "its time was over"])
def test_nothing_is_left_of_a_command_not_even_in_other_sessions(
    executor: HostExecutor, tmp_path: Path, ending: str
) -> None:
    for timeout_s in longer_limits(1 if ending else 60):
        done = executor.run(["sh", "-c", ESCAPING + ending], timeout_s=timeout_s)
        assert done.timed_out == bool(ending)
        if (tmp_path / "inner").exists() and (tmp_path / "inner").read_text():
            break
    assert not is_running(pid_in(tmp_path / "inner"))


def test_a_double_forked_daemon_is_ended_too(executor: HostExecutor, tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        f"open('{tmp_path}/inner', 'w').write(str(os.getpid()))\n"
        "time.sleep(1000)\n"
    )
    done = executor.run(["sh", "-c", f'"{sys.executable}" -c "$1"; while [ ! -s inner ]; do :; done', "sh", code])
    assert done.exit_status == 0
    assert not is_running(pid_in(tmp_path / "inner"))


def test_ctrl_c_kills_the_command(executor: HostExecutor, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    caller = threading.get_ident()

    def interrupt() -> None:
        (tmp_path / "started").read_text()
        signal.pthread_kill(caller, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        executor.run(["sh", "-c", "echo $$ >pid; echo >started; sleep 1000"])
    thread.join()
    assert not is_running(pid_in(tmp_path / "pid"))


def test_a_command_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    code = (
        "from protocol.execution.host import HostExecutor\n"
        f"HostExecutor('{tmp_path}').run(['sh', '-c', 'echo $$ >pid; echo >started; sleep 1000'])\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code])
    (tmp_path / "started").read_text()
    pid = pid_in(tmp_path / "pid")
    handle = os.pidfd_open(pid)
    starter.kill()
    starter.wait()
    try:
        assert readable(handle, 30)
    finally:
        os.close(handle)


def test_a_process_with_many_open_files_runs_commands_too(executor: HostExecutor, many_open_files: None) -> None:
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert executor.run(["echo", "hello"]).stdout == b"hello\n"
    finally:
        for descriptor in many:
            os.close(descriptor)


def test_no_descriptor_is_left_open(executor: HostExecutor) -> None:
    executor.run(["true"])
    gc.collect()  # objects of other tests that are collected meanwhile close theirs
    before = set(os.listdir("/proc/self/fd"))
    executor.run(["true"])
    with pytest.raises(FileNotFoundError):
        executor.run(["no-such-program-anywhere"])
    assert set(os.listdir("/proc/self/fd")) <= before
