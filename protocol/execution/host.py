"""HostCommandRunner: commands on this host, as this process's user, each under a supervisor process.

Starting a command never touches the directory that it runs in (see `protocol.execution.supervisor`), so the process
that serves that directory may run commands in it.

Threading: one trio loop.  Worker threads start and reap the supervisor, because both wait for a process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from typing import Final

import trio

from protocol.errors import os_error
from protocol.execution import supervisor
from protocol.execution.executor import Command, Terminal, check_command
from protocol.execution.runner import BlockingExecutor, Process, Stream

_PIECE_BYTES: Final = 64 * 1024
_END_OF_INPUT: Final = b"\x04"  # VEOF as terminals have it (termios(3))
# systemd sets these for the service itself, not for its children: sd_notify(3), sd_watchdog_enabled(3),
# sd_listen_fds(3).
_SERVICE_VARIABLES: Final = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"})
# The supervisor kills what is left in milliseconds; it takes longer only if the kernel holds a process.
_END_S: Final = 10.0


class HostExecutor(BlockingExecutor):
    """Runs commands on this host, as this process's user, below the directory `root`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(HostCommandRunner(os.path.abspath(root)))


class HostCommandRunner:
    """Runs commands below the directory `root`, with `env` added to the caller's environment, or to this process's.

    `open_root` opens that directory without waiting for it (O_PATH); it may refuse.
    """

    def __init__(
        self, root: str, env: Mapping[str, str] | None = None, open_root: Callable[[], int] | None = None
    ) -> None:
        self._root = root
        self._env = dict(env or {})
        self._open_root = open_root or functools.partial(os.open, root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    where: Final = "on this host"

    @contextlib.asynccontextmanager
    async def started(self, command: Command) -> AsyncIterator[Process]:
        """See `protocol.execution.runner.CommandRunner`."""
        check_command(command)
        if command.user is not None:
            reason = "on this host commands run as the user who mounted the workspace; --user is for containers"
            raise OSError(errno.EOPNOTSUPP, reason)
        directory = os.path.normpath(os.path.join(self._root, command.cwd))
        base = os.environ if command.environment is None else command.environment
        inherited = {name: value for name, value in base.items() if name not in _SERVICE_VARIABLES}
        env = {**inherited, **self._env, **command.env, "PWD": directory}
        # Shielded: a process that was started must be returned, so that it is ended.
        with trio.CancelScope(shield=True):
            process = await trio.to_thread.run_sync(_HostProcess, command, self._root, directory, env, self._open_root)
        try:
            async with trio.open_nursery() as nursery:
                process.begin(nursery)
                yield process
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await process.end()


class _HostProcess:
    """Implements `protocol.execution.runner.Process` by a supervisor.

    Closing `_control` makes the supervisor kill the command; a byte in it is a signal.  The supervisor writes to
    `_status` how the command ended and holds it open until all processes of the command have ended.
    """

    def __init__(
        self, command: Command, root: str, directory: str, env: Mapping[str, str], open_root: Callable[[], int]
    ) -> None:
        self._argv = command.argv
        self._directory = directory
        self._is_terminal = command.terminal is not None
        with ExitStack() as theirs, ExitStack() as ours:
            # The directory is found below this descriptor: by its path it may be below a mount that is gone.
            top = open_root()
            theirs.callback(os.close, top)
            place = os.path.join(f"/proc/self/fd/{top}", os.path.relpath(directory, root))
            control, self._control = _pipe(theirs, ours)
            self._status, status = _pipe(ours, theirs)
            self._readers: dict[Stream, int]
            if command.terminal is not None:
                # One terminal for all three streams; everything that it shows is output (pty(7)).
                self._input, slave = os.openpty()
                ours.callback(os.close, self._input)
                theirs.callback(os.close, slave)
                _set_size(self._input, command.terminal)
                stdin = stdout = stderr = slave
                self._readers = {"stdout": self._input}
            else:
                stdin, self._input = _pipe(theirs, ours)
                out, stdout = _pipe(ours, theirs)
                err, stderr = _pipe(ours, theirs)
                self._readers = {"stdout": out, "stderr": err}
            for descriptor in (self._control, self._input, self._status, *self._readers.values()):
                os.set_blocking(descriptor, False)
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, place, str(control), str(status), *command.argv],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(control, status, top),
                cwd="/",  # not `directory`: see `protocol.execution.supervisor`
                start_new_session=True,
                env=env,
            )
            ours.pop_all()
        self._channel, self.output = trio.open_memory_channel[tuple[Stream, bytes]](0)
        self._report = b""
        self._has_ended = trio.Event()
        self._waits: set[trio.CancelScope] = set()

    def begin(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._read_status)
        with self._channel:
            for stream, descriptor in self._readers.items():
                nursery.start_soon(self._read, stream, descriptor, self._channel.clone())

    async def end(self) -> None:
        """Kill the processes that are left, and release everything.  Must not be cancelled."""
        await self.kill()
        descriptors = {self._input, self._status, *self._readers.values()} - {-1}
        self._input = -1
        for descriptor in descriptors:
            trio.lowlevel.notify_closing(descriptor)
            os.close(descriptor)
        await trio.to_thread.run_sync(self._reap)

    def _reap(self) -> None:
        try:
            self._supervisor.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    # -- output ----------------------------------------------------------------------------------------
    async def _read(
        self, stream: Stream, descriptor: int, channel: trio.MemorySendChannel[tuple[Stream, bytes]]
    ) -> None:
        with channel:
            while data := await self._next(descriptor):
                await channel.send((stream, data))

    async def _next(self, descriptor: int) -> bytes:
        """The next piece; b"" when the pipe has no writer, or the command has ended and its output was read."""
        while True:
            try:
                return os.read(descriptor, _PIECE_BYTES)
            except BlockingIOError:
                pass
            except OSError:
                return b""  # EIO: no process has the terminal open any more
            # A process that is not the command's may hold the pipe; the command's output has been read.
            if self._has_ended.is_set():
                return b""
            with trio.CancelScope() as wait:
                self._waits.add(wait)
                await trio.lowlevel.wait_readable(descriptor)
            self._waits.discard(wait)

    async def _read_status(self) -> None:
        while data := await self._next(self._status):
            self._report += data
        self._has_ended.set()
        for wait in self._waits:
            wait.cancel()

    # -- control -----------------------------------------------------------------------------------------
    async def send(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                if self._input < 0:
                    raise BrokenPipeError(errno.EPIPE, "the command's input was ended")
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
        if self._control >= 0:
            with contextlib.suppress(OSError):
                os.write(self._control, bytes([number]))

    async def resize(self, terminal: Terminal) -> None:
        if self._is_terminal and self._input >= 0:
            _set_size(self._input, terminal)

    async def kill(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    async def wait(self) -> int:
        await self._has_ended.wait()
        # In a thread: after a failed start it looks at the directory, which this loop may serve.
        return await trio.to_thread.run_sync(self._exit_status)

    def _exit_status(self) -> int:
        kind, _, number = self._report.decode().strip().partition(" ")
        if kind == "error":
            raise os_error(int(number), self._argv[0] if os.path.isdir(self._directory) else self._directory)
        if kind != "exit":
            raise os_error(errno.EIO, "the command's supervisor was killed")
        return int(number)


def _pipe(closes_reader: ExitStack, closes_writer: ExitStack) -> tuple[int, int]:
    """A pipe, with the owner that closes each end."""
    reader, writer = os.pipe()
    closes_reader.callback(os.close, reader)
    closes_writer.callback(os.close, writer)
    return reader, writer


def _set_size(descriptor: int, terminal: Terminal) -> None:
    """Set the size of a terminal; the kernel sends SIGWINCH to its foreground process group (ioctl_tty(2))."""
    termios.tcsetwinsize(descriptor, (terminal.rows, terminal.columns))
