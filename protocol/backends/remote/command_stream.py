"""CommandStream: the standard streams of a command on this machine, as a stream to a helper.

Standard error is read by a task and only its end is kept, so a command that writes much of it is not blocked.

Threading: the serving loop.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from protocol.backends.container.agent.stream import STDERR, STDOUT, Output
from protocol.linux import credentials

_RECEIVE_BYTES: Final = 64 * 1024
_STDERR_BYTES: Final = 2000
_LAST_WORDS_S: Final = 1.0  # for standard error, and the exit status, of a command whose output has ended
_END_S: Final = 2.0  # for a command whose input was ended, and for one that got SIGTERM
# Kills the process group $1 at the end of its input, unless it gets a line before.
_GUARD: Final = 'read -r line || kill -KILL "-$1"'
_PROMPT: Final = b">>> "  # Python prints it once before it runs the first line


class CommandStream:
    """Implements `protocol.backends.container.agent.stream.HelperStream`.  See `running_command`."""

    def __init__(self, process: trio.Process, guard: trio.Process) -> None:
        self._process = process
        self._guard = guard
        assert isinstance(process.stdin, trio.lowlevel.FdStream)
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._stderr = b""
        self._stderr_ended = trio.Event()
        self._told_stderr = False
        self._ends_with_input = False
        self._is_detached = False

    async def send(self, data: bytes) -> None:
        try:
            await self._stdin.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise BrokenPipeError(errno.EPIPE, "the command no longer reads its input") from None

    def send_nowait(self, data: bytes) -> int:
        try:
            return os.write(self._stdin.fileno(), data)  # trio has made the pipe non-blocking
        except (OSError, trio.ClosedResourceError):  # full or closed: `send` waits or reports it
            return 0

    async def receive(self, max_bytes: int = _RECEIVE_BYTES) -> Output | None:
        """The next piece of output.  What standard error ends with comes last."""
        try:
            data = await self._stdout.receive_some(max_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        if data:
            return Output(STDOUT, bytes(data))
        with trio.move_on_after(_LAST_WORDS_S):
            await self._stderr_ended.wait()
        if self._told_stderr or not self._stderr:
            return None
        self._told_stderr = True
        return Output(STDERR, self._stderr)

    @property
    def last_line(self) -> str:
        """The last line of standard error that says something; empty if there is none."""
        lines = self._stderr.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    async def status(self) -> int | None:
        """The exit status of a command whose output has ended, after its standard error; None if it still runs."""
        with trio.move_on_after(_LAST_WORDS_S):
            await self._stderr_ended.wait()
            await self._process.wait()
        return self._process.returncode

    async def has_started(self) -> None:
        """Note that a helper runs: it ends when its input does, also if this process is killed."""
        self._ends_with_input = True
        await self._end_guard()

    async def _end_guard(self) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._guard.stdin.send_all(b"\n")
        await self._guard.stdin.aclose()
        await self._guard.wait()

    async def detach(self) -> None:
        """Close the streams of a command that goes on for another daemon."""
        self._is_detached = True
        await trio.aclose_forcefully(self._stdin)
        await trio.aclose_forcefully(self._stdout)

    async def abandon(self) -> None:
        """As `aclose`: if the command leads elsewhere, what runs there goes on without it."""
        await self.aclose()

    async def aclose(self) -> None:
        """End the command: its input first, then with SIGTERM, then with SIGKILL."""
        if self._is_detached:
            return
        with trio.CancelScope(shield=True):
            await self._stdin.aclose()
            for number in (signal.SIGTERM, signal.SIGKILL):
                with trio.move_on_after(_END_S if self._ends_with_input or number == signal.SIGKILL else 0):
                    await self._process.wait()
                if self._process.returncode is not None:
                    break
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            await self._process.wait()
            await self._end_guard()
            await self._stdout.aclose()
        await trio.lowlevel.checkpoint()

    async def read_stderr(self) -> None:
        """Keep the end of standard error."""
        stderr = self._process.stderr
        assert stderr is not None
        try:
            while data := await stderr.receive_some(_RECEIVE_BYTES):
                kept = data if self._stderr else bytes(data).removeprefix(_PROMPT)
                self._stderr = (self._stderr + kept)[-_STDERR_BYTES:]
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._stderr_ended.set()
            await trio.aclose_forcefully(stderr)


@asynccontextmanager
async def running_command(argv: Sequence[str]) -> AsyncIterator[CommandStream]:
    """Run a command for the length of a block.  OSError if it cannot be started.

    It has a process group of its own, so that it can be killed with the processes that it started.
    """
    try:
        process = await trio.lowlevel.open_process(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=_without_directories(credentials.environment()),
        )  # fmt: skip
    except OSError as error:
        raise _not_started(argv[0], error) from None
    with trio.CancelScope(shield=True):
        guard = await _guard(process)
    stream = CommandStream(process, guard)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.read_stderr)
        try:
            yield stream
        finally:
            await stream.aclose()
            nursery.cancel_scope.cancel()


async def _guard(process: trio.Process) -> trio.Process:
    """Start what ends a command that starts no helper, and reads no input either, when this process is killed."""
    command = ["/bin/sh", "-c", _GUARD, "sh", str(process.pid)]
    try:
        return await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env=_without_directories(os.environ),
        )  # fmt: skip
    except BaseException:
        process.kill()
        await process.wait()
        raise


def _without_directories(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out the directories of the shell that mounted: a shell looks at them when it starts.

    They may be in the mount, which answers only when the command has.
    """
    return {name: value for name, value in environment.items() if name not in {"PWD", "OLDPWD"}}


def _not_started(program: str, error: OSError) -> OSError:
    if error.errno == errno.ENOENT:
        return OSError(errno.ENOENT, f"there is no program {program!r} on this machine, with which the command begins")
    return OSError(error.errno, f"{program!r} cannot be run: {error.strerror}")
