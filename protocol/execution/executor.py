"""Executor: what runs a command beside a filesystem; `HostExecutor` does so on this host.

Threading: `run` blocks its thread; `Running.kill` may be called from any other.  Starting a command never
touches the directory that it is to run in (see `protocol.execution.supervisor`), so a thread of the process that serves
that directory may do it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from protocol.errors import os_error
from protocol.execution.supervised import Supervised

__all__ = [
    "DEFAULT_OUTPUT_BYTES",
    "DEFAULT_TIMEOUT_S",
    "Command",
    "ExecResult",
    "Executor",
    "HostExecutor",
    "Running",
    "Terminal",
    "check_command",
]

DEFAULT_TIMEOUT_S: Final = 120.0
DEFAULT_OUTPUT_BYTES: Final = 256 * 1024  # of standard output, and as much again of standard error
_PIPE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Terminal:
    """The size of the terminal that a command is to have."""

    rows: int = 24
    columns: int = 80


@dataclass(frozen=True, slots=True)
class Command:
    """What is to be run, wherever that is: see `Executor.run`.

    `user` None is whoever commands run as there.  Without `has_input` it is given none.
    """

    argv: Sequence[str]
    cwd: str = "."
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    terminal: Terminal | None = None
    has_input: bool = False


def check_command(command: Command) -> None:
    """OSError (EINVAL) for what no system could run."""
    if not command.argv or not command.argv[0]:
        raise os_error(errno.EINVAL, "no command")
    if any("\0" in word for word in command.argv):
        raise os_error(errno.EINVAL, "a NUL in a command")
    if any(not name or "=" in name or "\0" in name + value for name, value in command.env.items()):
        raise os_error(errno.EINVAL, "a variable that no environment can have")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended.  `exit_status` is negative for one that a signal killed (-9: SIGKILL).

    `timed_out`: it was killed because its time was over.  `truncated`: it wrote more than the limit, and the
    rest was thrown away.
    """

    exit_status: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False


@runtime_checkable
class Executor(Protocol):
    """Runs commands that see the filesystem's state."""

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        output_limit_bytes: int = DEFAULT_OUTPUT_BYTES,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run `argv` in `cwd` (relative to the filesystem's root) and wait for its end.

        `env` is added to the environment that the executor gives.  When `run` returns nothing that the command
        started is running.  OSError where it cannot be started: FileNotFoundError for a program, or a `cwd`,
        that is not there.
        """
        ...


class HostExecutor:
    """Runs commands on this host, as this process's user, below the directory `root`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        output_limit_bytes: int = DEFAULT_OUTPUT_BYTES,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `Executor`."""
        running = self.start(
            argv, cwd=cwd, env=env, timeout_s=timeout_s, output_limit_bytes=output_limit_bytes, stdin=stdin
        )
        try:
            return running.wait()
        finally:
            running.kill()

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        output_limit_bytes: int = DEFAULT_OUTPUT_BYTES,
        stdin: bytes = b"",
    ) -> Running:
        """Start a command; `wait` for it, in one thread, whatever happens: that is where its end is seen to."""
        check_command(Command(argv, env=env or {}))
        if timeout_s <= 0:
            raise os_error(errno.EINVAL, "a timeout must be positive")
        directory = os.path.normpath(os.path.join(self._root, cwd))
        return Running(argv, directory, dict(env or {}), timeout_s, output_limit_bytes, stdin)


class Running:
    """A command that was started."""

    def __init__(
        self,
        argv: Sequence[str],
        directory: str,
        env: Mapping[str, str],
        timeout_s: float,
        output_limit_bytes: int,
        stdin: bytes,
    ) -> None:
        self._stdin = memoryview(stdin)
        self._deadline = time.monotonic() + timeout_s
        self._outputs = (_Output(output_limit_bytes), _Output(output_limit_bytes))
        self._status = _Output(_PIPE_BYTES)
        self._timed_out = False
        pipe = subprocess.PIPE
        self._supervised = Supervised(argv, directory, env, stdin=pipe, stdout=pipe, stderr=pipe)
        self._process = self._supervised.process

    def kill(self) -> None:
        """Have the command, and all that it started, killed; `wait` then returns soon.  Idempotent."""
        self._supervised.kill()

    def wait(self) -> ExecResult:
        """Wait for its end.  OSError where it could not be started."""
        try:
            self._exchange()
        finally:
            self._supervised.reap()
        return self._result()

    def _exchange(self) -> None:
        """Feed standard input, and collect everything, until the supervisor has ended."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector:
            for descriptor, sink in (
                (process.stdout.fileno(), self._outputs[0]),
                (process.stderr.fileno(), self._outputs[1]),
                (self._supervised.status, self._status),
            ):
                selector.register(descriptor, selectors.EVENT_READ, sink)
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin.fileno(), selectors.EVENT_WRITE, None)
            self._feed(selector)
            # The supervisor holds the status pipe until all is over; somebody else might hold the others.
            while self._supervised.status in selector.get_map():
                for key, _ in selector.select(self._patience_s()):
                    if key.data is None:
                        self._feed(selector)
                    elif not key.data.take(key.fd):
                        selector.unregister(key.fd)
                self._look_at_the_clock()
            self._drain(selector)

    def _patience_s(self) -> float | None:
        return None if self._timed_out else max(0.0, self._deadline - time.monotonic())

    def _look_at_the_clock(self) -> None:
        if not self._timed_out and time.monotonic() >= self._deadline:
            self._timed_out = True
            self.kill()

    def _feed(self, selector: selectors.BaseSelector) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.closed:
            return
        with contextlib.suppress(BlockingIOError):
            try:
                while self._stdin:
                    self._stdin = self._stdin[os.write(stdin.fileno(), self._stdin[:_PIPE_BYTES]) :]
            except BrokenPipeError:
                pass  # it does not read it
            selector.unregister(stdin.fileno())
            stdin.close()

    @staticmethod
    def _drain(selector: selectors.BaseSelector) -> None:
        """What is still in the pipes: all writers have ended."""
        for key in list(selector.get_map().values()):
            if key.data is not None:
                os.set_blocking(key.fd, False)
                with contextlib.suppress(BlockingIOError):
                    while key.data.take(key.fd):
                        pass

    def _result(self) -> ExecResult:
        exit_status = self._supervised.exit_status(bytes(self._status.data))
        stdout, stderr = self._outputs
        return ExecResult(
            exit_status=exit_status,
            stdout=bytes(stdout.data),
            stderr=bytes(stderr.data),
            timed_out=self._timed_out,
            truncated=stdout.truncated or stderr.truncated,
        )


class _Output:
    """What comes out of a pipe, up to a limit; the rest is read and thrown away, so that its writer goes on."""

    __slots__ = ("_limit", "data", "truncated")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.data = bytearray()
        self.truncated = False

    def take(self, descriptor: int) -> bool:
        """Read once; False at the end."""
        piece = os.read(descriptor, _PIPE_BYTES)
        room = self._limit - len(self.data)
        self.data += piece[:room] if room > 0 else b""
        self.truncated = self.truncated or len(piece) > room
        return bool(piece)
