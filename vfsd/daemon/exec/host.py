"""HostCommandRunner: commands on this host, in the mount, as the daemon's user, each under a supervisor.

Threading: the serving loop.  Starting and reaping, which wait for a process, are done by worker threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import termios
from collections.abc import AsyncIterator
from typing import Final

import trio

from protocol.execution.executor import Command, Terminal, check_command
from protocol.execution.supervised import Supervised
from vfsd.daemon.exec.place import Process, Stream

__all__ = ["HostCommandRunner"]

_PIECE_BYTES: Final = 64 * 1024
_END_OF_INPUT: Final = b"\x04"  # VEOF as terminals have it (termios(3))


class HostCommandRunner:
    """Runs commands below the directory `root`, with `env` added to the daemon's environment."""

    def __init__(self, root: str, env: dict[str, str]) -> None:
        self._root = root
        self._env = env

    where: Final = "on this host"

    @contextlib.asynccontextmanager
    async def started(self, command: Command) -> AsyncIterator[Process]:
        """See `Place`."""
        check_command(command)
        if command.user is not None:
            reason = "on this host commands run as the user who mounted the workspace; --user is for containers"
            raise OSError(errno.EOPNOTSUPP, reason)
        directory = os.path.normpath(os.path.join(self._root, command.cwd))
        env = {**self._env, **command.env}
        # Shielded: a process that was started must get here.
        with trio.CancelScope(shield=True):
            process = await trio.to_thread.run_sync(_HostProcess, command, directory, env)
        try:
            async with trio.open_nursery() as nursery:
                process.begin(nursery)
                yield process
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await process.end()


class _HostProcess:
    def __init__(self, command: Command, directory: str, env: dict[str, str]) -> None:
        with contextlib.ExitStack() as theirs:
            streams = _terminal(command.terminal, theirs) if command.terminal else _pipes(theirs)
            self._input, self._readers = streams[1], streams[2]
            stdin, stdout, stderr = streams[0]
            try:
                self._supervised = Supervised(command.argv, directory, env, stdin=stdin, stdout=stdout, stderr=stderr)
            except BaseException:
                self._close(notify=False)
                raise
        self._is_terminal = command.terminal is not None
        for descriptor in {self._input, self._supervised.status, *self._readers.values()}:
            os.set_blocking(descriptor, False)
        self._channel, self.output = trio.open_memory_channel[tuple[Stream, bytes]](0)
        self._said = b""
        self._over = trio.Event()
        self._waits: set[trio.CancelScope] = set()

    def begin(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._follow_status)
        with self._channel:
            for stream, descriptor in self._readers.items():
                nursery.start_soon(self._read, stream, descriptor, self._channel.clone())

    async def end(self) -> None:
        """Kill what is left, and let go of everything."""
        self._supervised.kill()
        self._close(notify=True)
        trio.lowlevel.notify_closing(self._supervised.status)
        await trio.to_thread.run_sync(self._supervised.reap)

    def _close(self, *, notify: bool) -> None:
        ours = {self._input, *self._readers.values()} - {-1}
        self._input, self._readers = -1, {}
        for descriptor in ours:
            if notify:
                trio.lowlevel.notify_closing(descriptor)
            os.close(descriptor)

    # -- output ----------------------------------------------------------------------------------------
    async def _read(
        self, stream: Stream, descriptor: int, channel: trio.MemorySendChannel[tuple[Stream, bytes]]
    ) -> None:
        with channel:
            while data := await self._next(descriptor):
                await channel.send((stream, data))

    async def _next(self, descriptor: int) -> bytes:
        """What comes next; b"" when all writers have gone, or when there is nothing more of the command's."""
        while True:
            try:
                return os.read(descriptor, _PIECE_BYTES)
            except BlockingIOError:
                pass
            except OSError:
                return b""  # EIO: a terminal that nobody has open any more
            # Somebody who is none of the command's may hold its pipe; what was in it has been read.
            if self._over.is_set():
                return b""
            with trio.CancelScope() as wait:
                self._waits.add(wait)
                await trio.lowlevel.wait_readable(descriptor)
            self._waits.discard(wait)

    async def _follow_status(self) -> None:
        """The supervisor holds the status pipe until all is over."""
        while data := await self._next(self._supervised.status):
            self._said += data
        self._over.set()
        for wait in self._waits:
            wait.cancel()

    # -- what it is given --------------------------------------------------------------------------------
    async def send(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                if self._input < 0:
                    raise BrokenPipeError(errno.EPIPE, "its input has ended")
                try:
                    left = left[os.write(self._input, left) :]
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._input)
        except (OSError, trio.ClosedResourceError) as error:
            raise BrokenPipeError(errno.EPIPE, "the command reads no more input") from error
        await trio.lowlevel.checkpoint()

    async def end_input(self) -> None:
        if self._is_terminal:
            with contextlib.suppress(BrokenPipeError):
                await self.send(_END_OF_INPUT)
        elif self._input >= 0:
            trio.lowlevel.notify_closing(self._input)
            os.close(self._input)
            self._input = -1

    async def signal(self, number: int) -> None:
        self._supervised.signal(number)

    async def resize(self, terminal: Terminal) -> None:
        if self._is_terminal and self._input >= 0:
            _set_size(self._input, terminal)

    async def kill(self) -> None:
        self._supervised.kill()

    async def wait(self) -> int:
        await self._over.wait()
        # In a thread: for a command that could not be started it looks at the directory, which this loop may serve.
        return await trio.to_thread.run_sync(self._supervised.exit_status, self._said)


_Streams = tuple[tuple[int, int, int], int, dict[Stream, int]]  # the command's three; its input; its outputs


def _pipes(theirs: contextlib.ExitStack) -> _Streams:
    stdin, ours = os.pipe()
    out, stdout = os.pipe()
    err, stderr = os.pipe()
    for descriptor in (stdin, stdout, stderr):
        theirs.callback(os.close, descriptor)
    return (stdin, stdout, stderr), ours, {"stdout": out, "stderr": err}


def _terminal(terminal: Terminal, theirs: contextlib.ExitStack) -> _Streams:
    """One terminal for all three; what it shows is its output (pty(7))."""
    master, slave = os.openpty()
    theirs.callback(os.close, slave)
    _set_size(master, terminal)
    return (slave, slave, slave), master, {"stdout": master}


def _set_size(descriptor: int, terminal: Terminal) -> None:
    """ioctl_tty(2), TIOCSWINSZ: the kernel tells the foreground process group by SIGWINCH."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("4H", terminal.rows, terminal.columns, 0, 0))
