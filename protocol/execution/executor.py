"""Executor: the contract of whatever runs commands on a filesystem, with the types of a command and of its result."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from protocol.errors import check_type, os_error

DEFAULT_TIMEOUT_S: Final = 120.0
DEFAULT_OUTPUT_BYTES: Final = 256 * 1024  # for standard output, and the same for standard error


@dataclass(frozen=True, slots=True)
class Terminal:
    """The size of a command's terminal."""

    rows: int = 24
    columns: int = 80


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run.

    `cwd` is relative to the filesystem's root.  `env` is added to the environment that the runner gives.  On this host
    that is `environment`, which is the caller's; None: that of this process.  `user` None means the runner's default
    user.  Standard input is empty unless `has_input` is set.
    """

    argv: Sequence[str]
    cwd: str = "."
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    terminal: Terminal | None = None
    has_input: bool = False
    environment: Mapping[str, str] | None = None


def check_words(argv: Sequence[str], stdin: bytes = b"") -> None:
    """Raise TypeError if `argv` is one string (each letter would be a word) or the input is not bytes."""
    if isinstance(argv, (str, bytes)):
        raise TypeError(
            f"a command is a list of words, not {argv!r}: pass ['sh', '-c', LINE] to run a line of the shell"
        )
    check_type(argv, Iterable, "a command is a list of words")
    check_type(stdin, (bytes, bytearray, memoryview), "stdin takes bytes", "encode text")


def check_command(command: Command) -> None:
    """Raise OSError (EINVAL) for a command that no system can run."""
    if not command.argv or not command.argv[0]:
        raise os_error(errno.EINVAL, "no command")
    if any("\0" in word for word in command.argv):
        raise os_error(errno.EINVAL, "a NUL in a command")
    variables = {**(command.environment or {}), **command.env}
    if any(not name or "=" in name or "\0" in name + value for name, value in variables.items()):
        raise os_error(errno.EINVAL, "a variable that no environment can have")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command.  `exit_status` is negative for a command that a signal killed (-9: SIGKILL).

    `timed_out`: the command was killed because it ran longer than its timeout.  `truncated`: the command wrote more
    than the output limit, and the rest was discarded.
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
        """Run `argv` in `cwd` (relative to the filesystem's root) and wait until it ends.

        `env` is added to the environment that the executor gives.  When `run` returns, no process that the command
        started is running.  Raises OSError if the command cannot be started: FileNotFoundError if the program or
        `cwd` does not exist.
        """
        ...
