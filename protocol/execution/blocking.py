"""BlockingExecutor: an `Executor` for threads over any `CommandRunner`.

Threading: `run` and `RunningCommand.wait` block; `RunningCommand.kill` may be called by any other thread.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import trio

from protocol.errors import os_error
from protocol.execution.executor import (
    DEFAULT_OUTPUT_BYTES,
    DEFAULT_TIMEOUT_S,
    Command,
    ExecResult,
    check_command,
    check_words,
)
from protocol.execution.runner import CommandLimits, CommandRun, CommandRunner, OutputBuffer, Process, feed_bytes

_DEFAULT_LIMITS: Final = CommandLimits(DEFAULT_TIMEOUT_S, DEFAULT_OUTPUT_BYTES)


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
        """See `Executor`."""
        check_words(argv)
        command = Command(argv, cwd=cwd, env=dict(env or {}))
        return self.start(command, CommandLimits(timeout_s, output_limit_bytes), stdin).wait()

    def start(self, command: Command, limits: CommandLimits = _DEFAULT_LIMITS, stdin: bytes = b"") -> RunningCommand:
        """Prepare a command, which `RunningCommand.wait` runs and another thread can kill."""
        check_command(command)
        if limits.timeout_s is not None and limits.timeout_s <= 0:
            raise os_error(errno.EINVAL, "a timeout must be positive")
        return RunningCommand(self._runner, replace(command, has_input=bool(stdin)), limits, stdin)


class RunningCommand:
    """A command that `wait` runs."""

    def __init__(self, runner: CommandRunner, command: Command, limits: CommandLimits, stdin: bytes) -> None:
        self._runner = runner
        self._output = OutputBuffer()
        self._run = CommandRun(command, limits, on_output=self._output, feed=self._feed)
        self._send_input = feed_bytes(stdin)
        self._lock = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._kill_requested = trio.Event()
        self._is_killed = False

    def kill(self) -> None:
        """Kill the command and everything that it started; `wait` then returns soon.  Idempotent."""
        with self._lock:
            self._is_killed = True
            if self._token is not None:
                with contextlib.suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._kill_requested.set)

    def wait(self) -> ExecResult:
        """Run the command until it ends.  OSError if it cannot be started."""
        # In a thread: this one may have a loop already, with which trio's signal handling would collide.
        with ThreadPoolExecutor(1) as threads:
            try:
                return threads.submit(trio.run, self._execute).result()
            finally:
                self.kill()

    async def _execute(self) -> ExecResult:
        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
            if self._is_killed:
                self._kill_requested.set()
        run, output = self._run, self._output
        exit_status = await run.execute(self._runner)
        return ExecResult(exit_status, output.stdout, output.stderr, run.timed_out, run.truncated)

    async def _feed(self, process: Process) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_input, process)
            await self._kill_requested.wait()
            await process.kill()
