"""The `exec` methods: run a command with its output streamed to the client and its input from the client.

Threading: handlers run on the serving loop.  A session lasts as long as its `exec` call.  If the client disconnects,
the call is cancelled and the command ended.
"""

from __future__ import annotations

import errno
import secrets
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from protocol.execution.executor import Command, Terminal
from protocol.execution.runner import CommandLimits, Process, Stream
from vfsd.daemon.control.calls import CallContext, host_environment, host_text, working_directory
from vfsd.daemon.exec.commands import Commands
from vfsd.operations.declaration import Empty
from vfsd.operations.fs import (
    OUTPUT,
    STARTED,
    ExecEnded,
    ExecInputParams,
    ExecMoreParams,
    ExecOutput,
    ExecParams,
    ExecResizeParams,
    ExecSignalParams,
    ExecStarted,
    TerminalSize,
    cost,
)
from vfsd.wire.messages import InvalidParamsError

SESSIONS_AT_ONCE: Final = 64


class ExecMethods:
    """The `exec` verbs of one workspace."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._sessions: dict[str, _Session] = {}

    async def exec(self, params: ExecParams, call: CallContext) -> ExecEnded:
        if len(self._sessions) >= SESSIONS_AT_ONCE:
            raise OSError(errno.EAGAIN, f"{SESSIONS_AT_ONCE} commands run in this workspace already; try again")
        command = Command(
            argv=list(map(host_text, params.argv)),
            cwd=working_directory(params.cwd),
            env=params.env,
            environment=host_environment(params.environment),
            user=params.user,
            terminal=_terminal(params.terminal),
            has_input=params.input,
        )
        name, session = secrets.token_hex(8), _Session(call, params.window_bytes, has_input=params.input)
        self._sessions[name] = session
        try:
            await call.notify(STARTED, ExecStarted(call.request_id, name))
            return await self._commands.run(
                command,
                CommandLimits(params.timeout_s, params.output_limit_bytes),
                on_output=session.pass_on,
                feed=session.feed,
            )
        finally:
            del self._sessions[name]
            session.end()

    async def exec_input(self, params: ExecInputParams, _call: CallContext) -> Empty:
        await self._session(params.session).take_input(params.data, end=params.end)
        return Empty()

    async def exec_more(self, params: ExecMoreParams, _call: CallContext) -> Empty:
        self._session(params.session).more(params.taken_bytes)
        return Empty()

    async def exec_signal(self, params: ExecSignalParams, _call: CallContext) -> Empty:
        try:
            number = signal.Signals[f"SIG{params.signal.removeprefix('SIG')}"]
        except KeyError:
            raise InvalidParamsError(f"no such signal: {params.signal!r}") from None
        await self._session(params.session).when_started(lambda process: process.signal(number))
        return Empty()

    async def exec_resize(self, params: ExecResizeParams, _call: CallContext) -> Empty:
        size = Terminal(params.size.rows, params.size.columns)
        await self._session(params.session).when_started(lambda process: process.resize(size))
        return Empty()

    def _session(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            raise _ended()
        return session


class _Session:
    """A running command, and the flow control of its output."""

    def __init__(self, call: CallContext, window_bytes: int, *, has_input: bool) -> None:
        self._call = call
        self._window_bytes = window_bytes
        self._room_bytes = window_bytes
        self._has_room = trio.Event()
        self._has_input = has_input
        self._input_ended = False
        self._input_lock = trio.Lock()
        self._process: Process | None = None
        self._started = trio.Event()

    # -- for `Commands` ----------------------------------------------------------------------------------
    async def feed(self, process: Process) -> None:
        """Keep the process for the client's calls; its input comes from `take_input`."""
        self._process = process
        self._started.set()
        if not self._has_input:
            await process.end_input()

    async def pass_on(self, stream: Stream, data: bytes) -> None:
        """Send output when the client's window has room for it."""
        left = memoryview(data)
        while left:
            while self._room_bytes <= 0:
                self._has_room = trio.Event()
                await self._has_room.wait()
            piece = bytes(left[: self._room_bytes])
            left = left[len(piece) :]
            self._room_bytes -= cost(piece)
            await self._call.notify(OUTPUT, ExecOutput(self._call.request_id, stream, piece))

    # -- for the client ----------------------------------------------------------------------------------
    def more(self, taken_bytes: int) -> None:
        """Enlarge the window: the client has processed so many bytes."""
        # Never beyond the size that the client asked for, whatever it reports.
        self._room_bytes = min(self._window_bytes, self._room_bytes + taken_bytes)
        self._has_room.set()

    async def take_input(self, data: bytes, *, end: bool) -> None:
        """Send input to the process, in the order of the calls.  BrokenPipeError if it does not read any more."""
        async with self._input_lock:
            if self._input_ended or not self._has_input:
                raise BrokenPipeError(errno.EPIPE, "the command's input has ended, or it never had any")
            if data:
                await self.when_started(lambda process: process.send(data))
            if end:
                self._input_ended = True
                await self.when_started(lambda process: process.end_input())

    async def when_started(self, act: Callable[[Process], Awaitable[None]]) -> None:
        """Call `act` with the process when it has started.  ProcessLookupError if it has ended."""
        await self._started.wait()
        if self._process is None:
            raise _ended()
        await act(self._process)

    def end(self) -> None:
        """Note that the process ended, or could not be started."""
        self._process = None
        self._started.set()


def _ended() -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, "that command has ended")


def _terminal(size: TerminalSize | None) -> Terminal | None:
    return None if size is None else Terminal(size.rows, size.columns)
