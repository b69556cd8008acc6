"""Commands: a workspace's commands, run within their limits, each followed by a snapshot where that is wanted.

Threading: the serving loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shlex
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Final

import trio

from protocol.errors import only_error
from protocol.execution.executor import Command
from vfsd.daemon.exec.place import CommandRunner, Leaving, Process, Stream
from vfsd.machine.logs import log_failure

__all__ = ["CommandLimits", "Commands", "Ended", "given"]

OnOutput = Callable[[Stream, bytes], Awaitable[None]]
Feed = Callable[[Process], Awaitable[None]]
TakeSnapshot = Callable[[str], Awaitable[str]]

_TAG_CHARACTERS: Final = 200
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """None: no limit.  `output_bytes` is of each of the two streams; what is beyond it is thrown away."""

    timeout_s: float | None = None
    output_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; `snapshot` names the one that was taken after it, `snapshot_error` why there is none."""

    exit_status: int
    timed_out: bool = False
    truncated: bool = False
    snapshot: str | None = None
    snapshot_error: str | None = None


class Commands:
    """Runs what a workspace is asked to run, at `place`.

    `take_snapshot`, if given, is called after each command with a tag for it, and gives the snapshot's name.
    """

    def __init__(
        self, workspace: str, *, place: CommandRunner | None = None, take_snapshot: TakeSnapshot | None = None
    ) -> None:
        self._workspace = workspace
        self._place = place
        self._take_snapshot = take_snapshot

    async def run(self, command: Command, limits: CommandLimits, *, on_output: OnOutput, feed: Feed) -> Ended:
        """Run it to its end.  Cancelled, it is killed; nothing that it started is left either way.

        `on_output` gets what it writes, one piece after the other; while it waits, so does the command.  `feed`
        runs beside it, and gives it input; it is cancelled when the command ends.
        OSError where it cannot be started.
        """
        if self._place is None:
            raise self._nowhere()
        clock = _Clock(limits.timeout_s)
        passing = _Passing(limits.output_bytes, on_output)
        exit_status = 0
        has_run = False
        try:
            with _single_error():
                async with self._place.started(command) as process, trio.open_nursery() as nursery:
                    has_run = True
                    nursery.start_soon(feed, process)
                    nursery.start_soon(clock.run, process)
                    await passing.run(process)
                    try:
                        exit_status = await process.wait()
                    except OSError:
                        has_run = False  # it could not be started
                        raise
                    nursery.cancel_scope.cancel()
        except BaseException:
            if has_run:
                await self._snapshot(command)  # what it has changed is changed
            raise
        snapshot, snapshot_error = await self._snapshot(command)
        return Ended(exit_status, clock.timed_out, passing.truncated, snapshot, snapshot_error)

    @property
    def where(self) -> str | None:
        """Where commands run, in words; None where nothing may."""
        return None if self._place is None else self._place.where

    async def attend(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Have ready what runs the commands, and keep it; while the mount is served.  OSError where that fails."""
        if isinstance(self._place, Leaving):
            await self._place.attend(task_status=task_status)
        else:
            task_status.started()

    def check_idle(self) -> None:
        """OSError (EBUSY) while commands keep the mount busy that the kernel does not know of."""
        if isinstance(self._place, Leaving):
            self._place.check_idle()

    async def leave(self) -> None:
        """Before an unmount: what runs the commands does not hold the mount any more when this returns."""
        if isinstance(self._place, Leaving):
            await self._place.leave()

    async def _snapshot(self, command: Command) -> tuple[str | None, str | None]:
        """Take it; its name, or else why it could not be taken.  Raises nothing: the command has run."""
        if self._take_snapshot is None:
            return None, None
        with trio.CancelScope(shield=True):
            try:
                return await self._take_snapshot(_tag(command)), None
            except Exception as error:  # noqa: BLE001 -- with its traceback in the log, where it is no OSError
                log_failure(_logger, "snapshot after a command", error, level=logging.WARNING)
                return None, getattr(error, "strerror", None) or str(error) or type(error).__name__
        return None, None

    def _nowhere(self) -> OSError:
        return OSError(
            errno.EOPNOTSUPP,
            f"workspace {self._workspace!r} cannot run commands: its backend has nothing to run them in. Mount it with "
            "--sandbox image:REF to run them in a container that sees its files, or with --on-host to run them on this "
            "host with your rights",
        )


def _tag(command: Command) -> str:
    """What was run, for people, in one line that JSON can carry."""
    line = shlex.join(command.argv).encode("utf-8", "backslashreplace").decode()
    return " ".join(line.split())[:_TAG_CHARACTERS]


def given(stdin: bytes) -> Feed:
    """A `feed` of `stdin` and nothing more."""

    async def feed(process: Process) -> None:
        with contextlib.suppress(BrokenPipeError):
            await process.send(stdin)
        await process.end_input()

    return feed


class _Clock:
    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self.timed_out = False

    async def run(self, process: Process) -> None:
        if self._timeout_s is not None:
            await trio.sleep(self._timeout_s)
            self.timed_out = True
            await process.kill()


class _Passing:
    """Passes output on, up to a limit for each stream."""

    def __init__(self, limit_bytes: int | None, on_output: OnOutput) -> None:
        self._room: dict[Stream, int] | None = None
        if limit_bytes is not None:
            self._room = {"stdout": limit_bytes, "stderr": limit_bytes}
        self._on_output = on_output
        self.truncated = False

    async def run(self, process: Process) -> None:
        async for stream, data in process.output:
            passed = data if self._room is None else data[: self._room[stream]]
            if self._room is not None:
                self._room[stream] -= len(passed)
            self.truncated = self.truncated or len(passed) < len(data)
            if passed:
                await self._on_output(stream, passed)


@contextlib.contextmanager
def _single_error() -> Generator[None]:
    """An error that nurseries wrapped, as itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise only_error(group) from None
