"""open_remote: the workspace at the other end of a command, through a helper that runs there.

The Python that the command gives runs each line of its input when it arrives (`command`).  The first line makes it
print a marker and wait for the helper's program.  What the other end prints before the marker, such as a greeting, is
ignored.

`CommandStream` is the standard streams of a command on this machine, as a stream to a helper.  Standard error is read
by a task and only its end is kept, so a command that writes much of it is not blocked.

Threading: the serving loop.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from protocol.backends.container.agent.helper_transport import HelperTransport, helper_program
from protocol.backends.container.agent.link import STDERR, STDOUT, TIMEOUT_S, AgentLink, Output
from protocol.backends.container.connection import TransportConnection
from protocol.backends.remote.command import RemoteCommand
from protocol.errors import only_error
from protocol.linux import credentials

_START_S: Final = 30.0
_LAST_WORDS_S: Final = 1.0
_GREETING_BYTES: Final = 256 * 1024
_NO_PROGRAM: Final = "; name a Python 3 that is installed there"
# By exit status: of programs for wrong usage; of a shell, and of `docker exec`, for a program that cannot be run.
_ADVICE: Final = {
    2: "; is it Python 3.6 or newer, and does it get the options that vfsd adds at the end?",
    126: _NO_PROGRAM,
    127: _NO_PROGRAM,
}
# Runs in the interactive Python, whose exceptions do not end it.  The marker is reversed, so that an echo of this line
# is not taken for it.
_LOADER: Final = """\
import os, sys
sys.ps1 = sys.ps2 = ""
def refuse(reason):
    sys.stderr.write(reason + "\\n")
    sys.stderr.flush()
    os._exit(9)
if sys.version_info < (3, 6):
    refuse("Python %d.%d is too old: vfsd needs 3.6 or newer there" % sys.version_info[:2])
if os.isatty(0):
    refuse("its standard input is a terminal, which changes what passes: leave out -t")
os.write(1, {reversed_marker!r}[::-1].encode())
data = b""
while len(data) < {length}:
    more = os.read(0, {length} - len(data))
    if not more:
        os._exit(1)
    data += more
try:
    exec(data)
except SystemExit as end:
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else 1)
except BaseException:
    import traceback
    traceback.print_exc()
    os._exit(1)
"""


class RemoteTransport(HelperTransport[RemoteCommand]):
    """Implements `protocol.backends.container.connection.Transport`.  `directory`: absolute, there."""

    def __init__(
        self, directory: str, *, read_only: bool = False, timeout_s: float = TIMEOUT_S, start_s: float = _START_S
    ) -> None:
        super().__init__(helper_program(directory), read_only=read_only)
        self._timeout_s = timeout_s
        self._start_s = start_s

    @asynccontextmanager
    async def _started(self, state: RemoteCommand, program: bytes, magic: bytes) -> AsyncIterator[AgentLink]:
        try:
            async with running_command(state.argv) as stream:
                link = AgentLink(stream, timeout_s=self._timeout_s, start_s=self._start_s)
                await self._start(state, stream, link, program, magic)
                await stream.has_started()
                async with link.running():
                    yield link
        except BaseExceptionGroup as group:
            raise only_error(group) from None

    async def _start(
        self, command: RemoteCommand, stream: CommandStream, link: AgentLink, program: bytes, magic: bytes
    ) -> None:
        marker = secrets.token_hex(16)
        loader = _LOADER.format(reversed_marker=marker[::-1], length=len(program))
        printed = b""
        try:
            with trio.fail_after(self._start_s):
                await stream.send(f"exec({loader!r})\n".encode())
                while not printed.endswith(marker.encode()):
                    output = await stream.receive()
                    if output is None:
                        raise await _ended(command, stream, printed)
                    if output.channel == STDOUT:
                        printed += output.data
                    if len(printed) > _GREETING_BYTES:
                        raise OSError(errno.EPROTO, f"{command.label} prints much and starts no Python")
            await link.start(program, magic)
        except trio.TooSlowError:
            last = stream.last_line or _last_line(printed)
            said = f"; it printed: {last}" if last else ""
            advice = "it must start a Python that reads its standard input, and take options at its end"
            raise TimeoutError(
                errno.ETIMEDOUT, f"{command.label} gives no Python within {self._start_s:g} seconds{said}; {advice}"
            ) from None
        except BrokenPipeError:
            raise await _ended(command, stream, printed) from None


async def _ended(command: RemoteCommand, stream: CommandStream, printed: bytes) -> OSError:
    """Why there is no Python: what the command said last, and its exit status."""
    with trio.move_on_after(_LAST_WORDS_S):
        while (output := await stream.receive()) is not None and len(printed) <= _GREETING_BYTES:
            if output.channel == STDOUT:
                printed += output.data
    status = await stream.status()
    reason = stream.last_line or _last_line(printed) or "it printed nothing"
    ended = "has ended its output" if status is None else f"has ended with status {status}"
    return OSError(errno.EIO, f"{command.label} {ended}: {reason}{_ADVICE.get(status or 0, '')}")


def _last_line(printed: bytes) -> str:
    lines = [line.strip() for line in printed.decode("utf-8", "replace").split("\n")]
    return next((line[-200:] for line in reversed(lines) if line), "")


DEFAULT_DIRECTORY: Final = "/workspace"
_LONGEST_PAUSE_S: Final = 10.0  # each attempt may be a login on another machine


def open_remote(
    command: str,
    *,
    directory: str = DEFAULT_DIRECTORY,
    read_only: bool = False,
    is_continued: bool = False,
    keep_going: Callable[[], None] = lambda: None,
) -> TransportConnection[RemoteCommand]:
    """Check that `command` gives a Python that reaches `directory` (absolute, there; created if it is missing).

    Blocks, for a worker thread; an exception from `keep_going`, which is called all the time, ends that.
    `TransportConnection.attend` connects.  ValueError for a command that cannot be split
    into words; OSError with what the command said if it gives no Python, or the directory cannot be reached.
    `is_continued`: it was checked by another daemon of the mount, so that one login, to connect, is enough.
    """
    target = RemoteCommand(command)
    transport = RemoteTransport(directory, read_only=read_only)
    if not is_continued:  # else the kernel knows already whether there are ACLs, which `probe` finds out
        transport.probe(target, keep_going)
    return TransportConnection(target, transport, read_only=read_only, longest_pause_s=_LONGEST_PAUSE_S)


_RECEIVE_BYTES: Final = 64 * 1024
_STDERR_BYTES: Final = 2000
_STDERR_END_S: Final = 1.0  # for standard error, and the exit status, of a command whose output has ended
_END_S: Final = 2.0  # for a command whose input was ended, and for one that got SIGTERM
# Kills the process group $1 at the end of its input, unless it gets a line before.
_GUARD: Final = 'read -r line || kill -KILL "-$1"'
_PROMPT: Final = b">>> "  # Python prints it once before it runs the first line


class CommandStream:
    """Implements `protocol.backends.container.agent.link.HelperStream`.  See `running_command`."""

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
        with trio.move_on_after(_STDERR_END_S):
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
        with trio.move_on_after(_STDERR_END_S):
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
