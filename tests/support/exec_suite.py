"""The contract of `vfsd exec` wherever commands run: a suite that test classes inherit with their own `where`.

The commands are those of any POSIX shell.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import readable
from vfsd.client.connection import ControlClient
from vfsd.client.executor import ExecCall
from vfsd.operations.fs import WINDOW_BYTES, ExecParams, cost

WAIT_S = 60


@dataclass(frozen=True)
class Where:
    """A workspace to run commands in.  `directory` is its root as this machine sees it, `root` as commands do.

    `running(text)` counts the processes of commands there whose command line has `text`.
    """

    name: str
    socket: str
    directory: Path
    root: str
    running: Callable[[str], int]


def command_line(where: Where, *args: str) -> list[str]:
    return [sys.executable, "-m", "vfsd.cli.main", "-w", where.name, "exec", *args]


def run(where: Where, *args: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command_line(where, *args), input=stdin, capture_output=True, check=False, timeout=WAIT_S,
        **({} if stdin is not None else {"stdin": subprocess.DEVNULL}),
    )  # fmt: skip


@contextlib.contextmanager
def started(where: Where, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command_line(where, *args), stdin=pipe, stdout=pipe, stderr=pipe) as client:
        try:
            yield client
        finally:
            client.kill()


def line_of(client: subprocess.Popen[bytes]) -> bytes:
    assert client.stdout is not None
    assert readable(client.stdout, WAIT_S), "nothing came"
    return client.stdout.readline()


def wait_until_none_runs(where: Where, text: str) -> None:
    """Wait until the killed processes have ended."""
    for _ in range(600):
        if not where.running(text):
            return
        time.sleep(0.1)
    pytest.fail(f"{text!r} still runs")


class Screen:
    """A terminal of the test's own, with `vfsd exec -it` in it."""

    def __init__(self, where: Where, *args: str) -> None:
        self.master, slave = os.openpty()
        self.resize(30, 100)
        self.slave_name = os.ttyname(slave)

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.client = subprocess.Popen(
            command_line(where, "-it", *args), stdin=slave, stdout=slave, stderr=slave,
            preexec_fn=take_terminal,  # noqa: PLW1509 (the test has no other thread that matters here)
            env={**os.environ, "TERM": "xterm-test"},
        )  # fmt: skip
        self.slave = slave
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def wait_for(self, text: bytes) -> None:
        while text not in self.seen:
            assert readable(self.master, WAIT_S), self.seen
            self.seen += os.read(self.master, 65536)
        self.seen = self.seen.partition(text)[2]

    def shows(self, text: bytes) -> bool:
        """Whether the terminal shows `text` within a second."""
        if readable(self.master, 1):
            self.seen += os.read(self.master, 65536)
        return text in self.seen

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def close(self) -> None:
        self.client.kill()
        self.client.wait()
        os.close(self.master)
        os.close(self.slave)


class ExecSuite:
    """Subclasses have a fixture `where`."""

    # -- output and exit status ------------------------------------------------------------------------
    def test_output_error_and_exit_status_are_the_commands(self, where: Where) -> None:
        done = run(where, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
        assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")

    @pytest.mark.parametrize(("script", "status"), [("true", 0), ("kill -KILL $$", 137), ("kill -TERM $$", 143)])
    def test_a_signal_shows_as_a_shell_shows_it(self, where: Where, script: str, status: int) -> None:
        assert run(where, "--", "sh", "-c", script).returncode == status

    def test_a_command_that_cannot_run_has_the_exit_status_of_env(self, where: Where) -> None:
        (where.directory / "text").write_text("no program")
        for argv, status in (("no-such-program", 127), ("./text", 126)):
            done = run(where, "--", argv)
            assert (done.returncode, done.stdout) == (status, b"")
            assert done.stderr.startswith(b"vfsd: error: "), done.stderr
            assert argv.encode() in done.stderr
        missing = run(where, "--cwd", "missing", "--", "true")
        assert missing.returncode == 125
        assert b"missing" in missing.stderr

    def test_output_comes_as_it_is_written_and_input_reaches_the_command(self, where: Where) -> None:
        script = "echo one; read x; echo two $x >&2; read y; echo three $y"
        with started(where, "-i", "--", "sh", "-c", script) as client:
            assert client.stdin is not None
            assert client.stderr is not None
            assert line_of(client) == b"one\n"  # and nothing was typed yet
            client.stdin.write(b"a\n")
            client.stdin.flush()
            assert client.stderr.readline() == b"two a\n"
            client.stdin.write(b"b\n")
            client.stdin.flush()
            assert line_of(client) == b"three b\n"
            assert client.wait(WAIT_S) == 0

    def test_much_input_and_output_goes_through_whole(self, where: Where) -> None:
        content = os.urandom(3_000_001)
        done = run(where, "-i", "--", "sh", "-c", "cat; exit 7", stdin=content)
        assert done.returncode == 7
        assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(content).digest()

    def test_without_i_a_command_has_no_input(self, where: Where) -> None:
        assert run(where, "--", "cat", stdin=b"not for it").stdout == b""

    def test_unread_input_does_no_harm(self, where: Where) -> None:
        done = run(where, "-i", "--", "sh", "-c", "exec <&-; echo done", stdin=b"x" * 1_000_000)
        assert (done.returncode, done.stdout) == (0, b"done\n")

    # -- where it runs ---------------------------------------------------------------------------------
    def test_a_command_sees_the_files_and_changes_them(self, where: Where) -> None:
        (where.directory / "d").mkdir()
        (where.directory / "d" / "f").write_text("text\n")
        done = run(where, "--cwd", "d", "-e", "A=1 2", "--", "sh", "-c", 'pwd; cat f; echo "$A" > g')
        assert done.stdout.decode() == f"{where.root}/d\ntext\n"
        assert (where.directory / "d" / "g").read_text() == "1 2\n"

    # -- limits ------------------------------------------------------------------------------------------
    def test_a_timeout_kills_a_command_and_everything_it_started(self, where: Where) -> None:
        lasting = f"sleep 7001{os.getpid():07}"  # of this test: others sleep on this machine, too
        done = run(where, "--timeout", "2", "--", "sh", "-c", f"echo begun; setsid {lasting} & {lasting}")
        assert (done.returncode, done.stdout) == (124, b"begun\n")
        assert b"the command was killed after" in done.stderr
        assert where.running(lasting) == 0

    def test_output_beyond_the_limit_is_discarded(self, where: Where) -> None:
        script = "head -c 1000000 /dev/zero; echo end >&2; exit 4"
        done = run(where, "--output-limit", "1000", "--", "sh", "-c", script)
        assert (done.returncode, done.stdout) == (4, bytes(1000))
        assert done.stderr.startswith(b"end\n")
        assert b"--output-limit" in done.stderr

    def test_a_client_that_reads_nothing_blocks_only_its_own_command(self, where: Where) -> None:
        call = ExecCall(where.socket, ExecParams(argv=["yes"]))
        try:
            used = 0  # of the window; a piece of a few bytes uses more of it than its length
            while used < WINDOW_BYTES:
                used += sum(cost(output.data) for output in call.receive())
            assert not readable(call, 0.5), "more came than was asked for"
            with ControlClient(where.socket) as other:
                other.call("ping")
            assert call.signal("TERM")
            call.done_with(b"x" * WINDOW_BYTES)
            late = []
            while call.ended is None:
                for output in call.receive():
                    late.append(output.data)
                    call.done_with(output.data)
            # A pipe, what was read of it, what Podman's monitor holds, and what `yes` writes until the signal reaches
            # it, which can take a tenth of a second on a busy machine.
            assert sum(map(len, late)) < 64_000_000
            assert call.ended.exit_status in (-signal.SIGTERM, 128 + signal.SIGTERM)
        finally:
            call.close()

    # -- signals, and clients that go away ---------------------------------------------------------------
    @pytest.mark.parametrize("flags", [(), ("-i",)], ids=["without input", "with input"])
    def test_an_interrupt_goes_to_the_command(self, where: Where, flags: tuple[str, ...]) -> None:
        script = "trap 'echo got; exit 7' INT; echo ready; while :; do sleep 0.1; done"
        with started(where, *flags, "--", "sh", "-c", script) as client:
            assert line_of(client) == b"ready\n"
            client.send_signal(signal.SIGINT)
            assert line_of(client) == b"got\n"
            assert client.wait(WAIT_S) == 7

    def test_a_third_interrupt_kills_the_command(self, where: Where) -> None:
        script = "trap 'echo no' INT; echo ready; while :; do sleep 0.17; done"
        with started(where, "--", "sh", "-c", script) as client:
            assert line_of(client) == b"ready\n"
            for _ in range(2):
                client.send_signal(signal.SIGINT)
                assert line_of(client) == b"no\n"
            client.send_signal(signal.SIGINT)
            assert client.wait(WAIT_S) == 130
        wait_until_none_runs(where, "sleep 0.17")

    def test_when_its_client_is_killed_nothing_is_left_of_a_command(self, where: Where) -> None:
        with started(where, "-i", "--", "sh", "-c", "setsid sleep 7002 & sleep 7002 & echo ready; cat") as client:
            assert line_of(client) == b"ready\n"
            client.kill()
        wait_until_none_runs(where, "sleep 7002")

    def test_a_command_ends_when_its_output_is_closed(self, where: Where) -> None:
        with started(where, "--", "sh", "-c", "while echo y7003; do :; done") as client:
            assert client.stdout is not None
            line_of(client)
            client.stdout.close()
            assert client.wait(WAIT_S) == 128 + signal.SIGPIPE
        wait_until_none_runs(where, "y7003")

    # -- a terminal --------------------------------------------------------------------------------------
    @pytest.fixture
    def screen(self, where: Where) -> Iterator[Callable[..., Screen]]:
        with contextlib.ExitStack() as stack:

            def open_screen(*args: str) -> Screen:
                screen = Screen(where, *args)
                stack.callback(screen.close)
                return screen

            yield open_screen

    def test_a_terminal_has_a_size_keys_and_follows_the_window(self, screen: Callable[..., Screen]) -> None:
        # The sleep: of what a command writes just as it ends, Podman 4.3 can lose the last on a terminal.
        words = "while read x; do echo got $x; done; echo over; sleep 1"
        script = f"trap 'stty size' WINCH; stty size; echo $TERM; {words}"
        shell = screen("--", "sh", "-c", script)
        shell.wait_for(b"30 100\r\n")
        shell.wait_for(b"xterm-test\r\n")
        shell.type(b"abc\r")
        shell.wait_for(b"abc\r\ngot abc\r\n")  # echoed by the command's terminal
        shell.resize(40, 120)
        # A shell looks at its traps between commands, and keys may overtake a window's size.
        while not shell.shows(b"40 120\r\n"):
            shell.type(b"\r")
        shell.type(b"\x04")
        shell.wait_for(b"over\r\n")
        assert shell.client.wait(WAIT_S) == 0

    def test_ctrl_c_is_typed_into_the_commands_terminal(self, screen: Callable[..., Screen]) -> None:
        before = screen("--", "sh", "-c", "trap 'echo stopped; exit 5' INT; echo ready; while :; do sleep 0.1; done")
        settings = termios.tcgetattr(before.slave)
        before.wait_for(b"ready\r\n")
        before.type(b"\x03")
        before.wait_for(b"stopped\r\n")
        assert before.client.wait(WAIT_S) == 5
        after = termios.tcgetattr(before.slave)
        assert after[3] & termios.ECHO, "the terminal was left raw"
        assert settings[0] == after[0] or after[0] & termios.ICRNL
