"""Commands that give a Python, and what is said of commands that give none."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from protocol.backends.container.agent.helper_transport import helper_program
from protocol.backends.container.helper.wire import MAGIC, Op
from protocol.backends.remote.command import RemoteCommand
from protocol.backends.remote.transport import RemoteTransport, open_remote
from protocol.errors import only_error

PYTHON = shlex.quote(sys.executable)


def script(text: str) -> str:
    """A command that runs a shell line; "$@" in it are the options that vfsd adds."""
    return f"sh -c {shlex.quote(text)} sh"


@pytest.mark.parametrize(
    "command",
    [
        PYTHON,
        script(f'exec {PYTHON} "$@"'),
        script(f'echo Welcome; echo "it is >>> noon" >&2; exec {PYTHON} "$@"'),
        # As ssh: the words pass through a further shell.
        script(f'exec sh -c "{PYTHON} $*"'),
    ],
    ids=["python3", "a shell", "a greeting", "two shells"],
)
def test_a_command_that_starts_a_python_reaches_the_directory(command: str, tmp_path: Path) -> None:
    directory = tmp_path / "made" / "for it"
    open_remote(command, directory=str(directory))
    assert directory.is_dir()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-program python3", "there is no program 'no-such-program' on this machine"),
        ("/dev/null", "'/dev/null' cannot be run: Permission denied"),
        (script("exit 3"), "has ended with status 3: it printed nothing"),
        (script("echo first >&2; echo 'Connection refused' >&2; exit 255"), "status 255: Connection refused"),
        (script("echo 'only this'"), "has ended with status 0: only this"),
        (script('no-python "$@"'), "not found; name a Python 3 that is installed there"),
        (script("echo Unknown option: -I >&2; exit 2"), "status 2: Unknown option: -I; is it Python 3.6 or newer"),
    ],
)
def test_a_command_that_starts_no_python_is_one_line_that_says_why(command: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, check=lambda error: reason in str(error) and "\n" not in str(error)):
        open_remote(command, directory=str(tmp_path))


@pytest.mark.parametrize("command", ["", " ", "'open quote", "''"])
def test_a_command_that_has_no_words_is_refused(command: str) -> None:
    with pytest.raises(ValueError, match="command"):
        RemoteCommand(command)


def starting(command: str, directory: Path, **options: float) -> None:
    try:
        RemoteTransport(str(directory), **options).probe(RemoteCommand(command))
    except BaseExceptionGroup as group:
        raise only_error(group) from None


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    command = script(f"echo $$ > {tmp_path}/pid; echo Password: >&2; sleep 1000 & wait")
    with pytest.raises(TimeoutError, match="gives no Python within 1 seconds; it printed: Password:"):
        starting(command, tmp_path, start_s=1)
    group = (tmp_path / "pid").read_text().strip()
    while running_in(group):
        time.sleep(0.01)


def test_a_start_that_nobody_waits_for_any_more_ends_at_once(tmp_path: Path) -> None:
    class GaveUpError(Exception):
        pass

    def keep_going() -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise GaveUpError

    command = script(f"echo $$ > {tmp_path}/pid; sleep 1000")
    with pytest.raises(GaveUpError):
        open_remote(command, directory=str(tmp_path), keep_going=keep_going)
    group = (tmp_path / "pid").read_text().strip()
    while running_in(group):
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_starts_no_python_ends_with_the_process_that_runs_it(tmp_path: Path, number: int) -> None:
    command = script(f"echo $$ > {tmp_path}/pid; sleep 1000")
    imports = "from protocol.backends.remote.transport import open_remote"
    code = f"{imports}; open_remote({command!r}, directory={str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            time.sleep(0.01)
        group = (tmp_path / "pid").read_text().strip()
        # The guard is started just after the command.
        while not [each for each in commands() if each[-1:] == [group.encode()] and b"kill" in each[2]]:
            time.sleep(0.01)
        process.send_signal(number)
    while running_in(group):
        time.sleep(0.01)


def commands() -> list[list[bytes]]:
    found = []
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(words.read_bytes().rstrip(b"\0").split(b"\0"))
    return [words for words in found if len(words) > 2]


def running_in(group: str) -> list[str]:
    """The processes of a process group, apart from those that have ended and that nobody has reaped."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group, *_ = stat.read_text().rpartition(")")[2].split()
            if process_group == group and state != "Z":
                found.append(stat.parent.name)
    return found


def test_output_without_end_is_not_a_greeting(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="prints much and starts no Python"):
        starting(script("exec yes"), tmp_path)


def test_an_echo_of_the_input_is_not_taken_for_a_python(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        starting(script("exec cat"), tmp_path, start_s=1)


def test_a_terminal_is_refused(tmp_path: Path) -> None:
    pty = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    with pytest.raises(OSError, match="its standard input is a terminal, which changes what passes: leave out -t"):
        starting(f"{PYTHON} -c {shlex.quote(pty)} {PYTHON}", tmp_path)


def test_a_directory_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="the working directory is not a directory"):
        starting(PYTHON, tmp_path / "file" / "below")
    with pytest.raises(OSError, match=r"the working directory cannot be used: .*; name another with --workdir"):
        starting(PYTHON, Path("/proc/missing"))


def test_nothing_from_the_directory_or_the_environment_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("struct", "threading", "traceback", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "struct.py"))
    starting(PYTHON, tmp_path)


def test_the_helper_ends_with_its_input(tmp_path: Path) -> None:
    """As when the daemon is killed."""

    async def pid_of_an_ended_helper() -> int:
        transport = RemoteTransport(str(tmp_path))
        command = RemoteCommand(script(f'echo $$ > {tmp_path}/pid; exec {PYTHON} "$@"'))
        async with transport._started(command, helper_program(str(tmp_path)), MAGIC) as link:
            await link.call(Op.STATFS)
            stream = link._stream
            await stream._stdin.aclose()  # type: ignore[attr-defined]
            await stream._process.wait()  # type: ignore[attr-defined]
            return int((tmp_path / "pid").read_text())

    with pytest.raises(ProcessLookupError):
        os.kill(trio.run(pid_of_an_ended_helper), 0)
