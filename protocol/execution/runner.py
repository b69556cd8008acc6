"""The core of every command: `CommandRun` runs one command with a `CommandRunner`, within its limits.

`BlockingExecutor` makes a runner an `Executor` for threads, which blocks.

Threading: all else belongs to one trio loop.  Nothing blocks it.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import trio

from protocol.errors import only_error, os_error
from protocol.execution.executor import (
    DEFAULT_OUTPUT_BYTES,
    DEFAULT_TIMEOUT_S,
    Command,
    ExecResult,
    Terminal,
    check_command,
    check_words,
)

Stream: TypeAlias = Literal["stdout", "stderr"]
OnOutput: TypeAlias = Callable[[Stream, bytes], Awaitable[None]]


class Process(Protocol):
    """A running command.  The output of a terminal is all "stdout"."""

    @property
    def output(self) -> trio.MemoryReceiveChannel[tuple[Stream, bytes]]:
        """The command's output, piece by piece, until the command has ended.  The command waits for a slow reader."""
        ...

    async def send(self, data: bytes) -> None:
        """Write to the command's standard input.  BrokenPipeError if the command no longer reads it."""
        ...

    async def end_input(self) -> None:
        """End the command's standard input."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group; a no-op after the command has ended."""
        ...

    async def resize(self, terminal: Terminal) -> None:
        """Change the size of the command's terminal, if it has one."""
        ...

    async def kill(self) -> None:
        """Kill the command and everything that it started; `output` then ends."""
        ...

    async def wait(self) -> int:
        """Wait until the command has ended and return its exit status, negative for a signal where that is known.

        To be called after `output` has ended.  OSError if the command could not be started: FileNotFoundError if the
        program or the directory does not exist.
        """
        ...


class CommandRunner(Protocol):
    """Starts commands that see the workspace."""

    @property
    def where(self) -> str:
        """The place in words, such as "on this host"."""
        ...

    def started(self, command: Command) -> AbstractAsyncContextManager[Process]:
        """Start a command for the length of a block.  After the block nothing that the command started is running.

        OSError if the command cannot be started; some such errors come from `Process.wait`.
        """
        ...


Feed: TypeAlias = Callable[[Process], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """Limits of one command; None means unlimited.  `output_bytes` applies to each stream; the rest is discarded."""

    timeout_s: float | None = None
    output_bytes: int | None = None


class CommandRun:
    """One run of a command.

    `on_output` receives the output up to the limit; while it waits, the command waits.  `feed` runs in parallel and
    gives input; it is cancelled when the command ends.

    `has_run` tells whether the command was started, `timed_out` and `truncated` whether it exceeded its limits.
    """

    def __init__(self, command: Command, limits: CommandLimits, *, on_output: OnOutput, feed: Feed) -> None:
        self._command = command
        self._limits = limits
        self._on_output = on_output
        self._feed = feed
        self.has_run = False
        self.timed_out = False
        self.truncated = False

    async def execute(self, runner: CommandRunner) -> int:
        """Run the command until it ends and return its exit status.  Cancelling kills it.

        OSError if the command cannot be started.
        """
        exit_status = 0
        try:
            async with runner.started(self._command) as process, trio.open_nursery() as nursery:
                self.has_run = True
                nursery.start_soon(self._feed, process)
                nursery.start_soon(self._enforce_timeout, process)
                await self._pass_output(process)
                try:
                    exit_status = await process.wait()
                except OSError:
                    self.has_run = False  # the command could not be started
                    raise
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        return exit_status

    async def _enforce_timeout(self, process: Process) -> None:
        if self._limits.timeout_s is not None:
            await trio.sleep(self._limits.timeout_s)
            self.timed_out = True
            await process.kill()

    async def _pass_output(self, process: Process) -> None:
        limit_bytes = self._limits.output_bytes
        passed_bytes: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        async for stream, data in process.output:
            kept = data if limit_bytes is None else data[: limit_bytes - passed_bytes[stream]]
            passed_bytes[stream] += len(kept)
            self.truncated = self.truncated or len(kept) < len(data)
            if kept:
                await self._on_output(stream, kept)


class OutputBuffer:
    """An `on_output` that keeps everything in memory."""

    def __init__(self) -> None:
        self._data: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}

    async def __call__(self, stream: Stream, data: bytes) -> None:
        self._data[stream] += data

    @property
    def stdout(self) -> bytes:
        return bytes(self._data["stdout"])

    @property
    def stderr(self) -> bytes:
        return bytes(self._data["stderr"])


def feed_bytes(stdin: bytes) -> Feed:
    """A `feed` that sends `stdin` and then ends the input."""

    async def feed(process: Process) -> None:
        with contextlib.suppress(BrokenPipeError):
            await process.send(stdin)
        await process.end_input()

    return feed


# -- for threads -----------------------------------------------------------------------------------
class BlockingExecutor:
    """Implements `protocol.execution.executor.Executor`.  Each command has a trio loop of its own."""

    def __init__(self, runner: CommandRunner) -> None:
        self._runner = runner

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
        """See `Executor`.  KeyboardInterrupt kills the command."""
        check_words(argv, stdin)
        command = Command(argv, cwd=cwd, env=dict(env or {}), has_input=bool(stdin))
        check_command(command)
        if timeout_s <= 0:
            raise os_error(errno.EINVAL, "a timeout must be positive")
        output = OutputBuffer()
        limits = CommandLimits(timeout_s, output_limit_bytes)
        run = CommandRun(command, limits, on_output=output, feed=feed_bytes(stdin))
        is_abandoned = threading.Event()  # set before `tokens` is read; a token is added before this is
        tokens: list[trio.lowlevel.TrioToken] = []
        scope = trio.CancelScope()

        async def execute() -> int:
            tokens.append(trio.lowlevel.current_trio_token())
            if is_abandoned.is_set():
                scope.cancel()
            with scope:
                return await run.execute(self._runner)
            return 0  # nobody waits for it

        # In a thread: this one may have a loop already, with which trio's signal handling would collide.
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(trio.run, execute)
            try:
                exit_status = running.result()
            except BaseException:
                is_abandoned.set()
                for token in tokens:
                    with contextlib.suppress(trio.RunFinishedError):
                        token.run_sync_soon(scope.cancel)
                raise
        return ExecResult(exit_status, output.stdout, output.stderr, run.timed_out, run.truncated)
