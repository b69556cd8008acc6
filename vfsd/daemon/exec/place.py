"""Place and Process: where a workspace's commands run, and one of them while it does.

Threading: the serving loop; nothing here blocks it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import trio

from protocol.execution.executor import Command, Terminal

__all__ = ["CommandRunner", "Leaving", "Process", "Stream"]

Stream: TypeAlias = Literal["stdout", "stderr"]


class Process(Protocol):
    """A command that runs.  A terminal's output is all "stdout"."""

    @property
    def output(self) -> trio.MemoryReceiveChannel[tuple[Stream, bytes]]:
        """What it writes, piece by piece; ends when it has ended.  What nobody takes makes the command wait."""
        ...

    async def send(self, data: bytes) -> None:
        """Give it input; waits until it is taken.  BrokenPipeError once it reads no more."""
        ...

    async def end_input(self) -> None:
        """There is no more input."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to it and to what it runs in the foreground."""
        ...

    async def resize(self, terminal: Terminal) -> None:
        """Its terminal has another size now."""
        ...

    async def kill(self) -> None:
        """Kill it with all that it started; `output` then ends."""
        ...

    async def wait(self) -> int:
        """Its exit status, negative for a signal where that is known; once `output` has ended.

        OSError where it could not be started: FileNotFoundError for a program or a directory that is not there.
        """
        ...


class CommandRunner(Protocol):
    """Runs commands that see the workspace."""

    @property
    def where(self) -> str:
        """Where that is, in words: "on this host"."""
        ...

    def started(self, command: Command) -> AbstractAsyncContextManager[Process]:
        """Start it.  On leaving, nothing that it started runs any more.

        OSError where it cannot be started; see also `Process.wait`.
        """
        ...


@runtime_checkable
class Leaving(CommandRunner, Protocol):
    """A place that holds the mount itself: it has to leave before an unmount."""

    async def attend(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Be ready, and let go of the mount when it has been unmounted here, by whomever."""
        ...

    def check_idle(self) -> None:
        """OSError (EBUSY) while a command runs."""
        ...

    async def leave(self) -> None:
        """Let go of the mount; what runs there ends.  The next command takes hold of it again."""
        ...
