"""Place and Process: where a workspace's commands run, and one of them while it does.

Threading: the serving loop; nothing here blocks it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeAlias

import trio

from protocol.execution import Command, Terminal

__all__ = ["Place", "Process", "Stream"]

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


class Place(Protocol):
    """Runs commands that see the workspace."""

    def started(self, command: Command) -> AbstractAsyncContextManager[Process]:
        """Start it.  On leaving, nothing that it started runs any more.

        OSError where it cannot be started; see also `Process.wait`.
        """
        ...
