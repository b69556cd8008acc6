"""ContainerCommandRunner: commands in a container, each an exec of Podman's service (`exec_stream`).

A command ends with everything that it started; `container_processes` says how, and what it cannot guarantee.

Podman's API carries JSON strings, and Go's JSON decoder replaces invalid bytes by U+FFFD, so the words of a command
that is not valid UTF-8 would change.  vfsd sends such words as octal escapes instead; a shell in the container decodes
them (printf(1p), `%b`) and executes the command.

`StdinWrapper` is a shell around a command with input, so that input that the command leaves unread costs no output.
Podman passes input to the command's monitor as it arrives.  If the command ends before it has read all of it, the
monitor closes a socket with unread data, which resets the connection; then Podman drops output that it has not read
yet, and writes "Error: read unixpacket ... connection reset by peer" to the command's standard error (seen with 4.3,
in half of such commands that are short).  So the wrapper announces the command's end on standard error, after a random
mark, and reads the remaining input; the caller ends the input when it sees the mark.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import posixpath
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Final

import trio

from protocol.backends.container.agent.link import STDERR
from protocol.backends.container.exec.container_processes import CommandProcesses, kill_abandoned
from protocol.backends.container.podman.address import podman_command
from protocol.backends.container.podman.exec_stream import ExecStream, exec_status, open_exec
from protocol.backends.container.podman.service import DEFAULT_WORKDIR, Container
from protocol.errors import os_error
from protocol.execution.executor import Command, Terminal, check_command
from protocol.execution.runner import Stream

_logger = logging.getLogger(__name__)

_END_OF_INPUT: Final = b"\x04"  # the default VEOF of terminals (termios(3))
_PIECE_BYTES: Final = 32 * 1024
_KILLED: Final = 137  # 128 + SIGKILL, as runtimes and shells report it
# How a runtime reports on standard error that it could not start a program, and the exit statuses that go with it.
_REFUSAL: Final = b"Error: "
_REFUSAL_STATUSES: Final = frozenset({125, 126, 127})
_REFUSAL_BYTES: Final = 8 * 1024


class ContainerCommandRunner:
    """Runs commands in the container that `find` returns (it may block), below the container's directory `workdir`.

    `owned`: the container belongs to vfsd, so every process but its first one belongs to a command, and the container
    may be restarted.
    """

    def __init__(self, find: Callable[[], Container], workdir: str = DEFAULT_WORKDIR, *, owned: bool = False) -> None:
        self._find = find
        self._workdir = workdir
        self._owned = owned
        self._running = 0
        self._cleaned_container = ""  # the container in which commands of dead daemons were killed
        self._shell_exists: dict[str, bool] = {}  # by container id

    where: Final = "in its container"

    @contextlib.asynccontextmanager
    async def started(self, command: Command) -> AsyncIterator[ContainerProcess]:
        """See `protocol.execution.runner.CommandRunner`.

        FileNotFoundError: the container is gone; OSError (ENOTCONN): it is not running; see `ContainerProcess.wait`.
        """
        check_command(command)
        container = await trio.to_thread.run_sync(self._find_container, abandon_on_cancel=True)
        self._running += 1
        try:
            process = await self._start(container, command)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(process.pump)
                    yield process
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True):
                    await process.end()
        finally:
            self._running -= 1

    async def end_abandoned(self) -> None:
        """Kill what the commands of dead daemons left in the container, if it runs."""
        with contextlib.suppress(OSError):
            await trio.to_thread.run_sync(self._find_container, abandon_on_cancel=True)

    def _find_container(self) -> Container:
        container = self._find()
        if container.id != self._cleaned_container:
            self._cleaned_container = container.id
            with contextlib.suppress(OSError):  # it is not running
                kill_abandoned(container)
        return container

    async def _start(self, container: Container, command: Command) -> ContainerProcess:
        terminal = command.terminal
        processes = CommandProcesses(container, owned=self._owned)
        directory = posixpath.normpath(posixpath.join(self._workdir, command.cwd))
        wrapper = None
        with _advising(container):
            request = await self._request(container, command, directory)
            if command.has_input and terminal is None and await self._has_shell(container):
                wrapper = StdinWrapper(request.argv)
        # Shielded: a command that was started must be returned, so that it is ended.  `open_exec` times out by itself.
        with trio.CancelScope(shield=True), _advising(container):
            try:
                stream = await open_exec(
                    container.service,
                    container.id,
                    request.argv if wrapper is None else wrapper.argv,
                    env={**request.env, **processes.env},
                    cwd=request.cwd,
                    tty=terminal is not None,
                    user=command.user,
                    stdin=command.has_input,
                    size=None if terminal is None else (terminal.rows, terminal.columns),
                )
            except TimeoutError:
                with contextlib.suppress(OSError):  # it may have been started nevertheless
                    await processes.kill(is_alone=self._running == 1)
                raise
        return ContainerProcess(
            stream,
            command,
            directory,
            processes,
            wrapper,
            lambda: self._running == 1,
        )

    async def _request(self, container: Container, command: Command, directory: str) -> Command:
        """The command as Podman's API can carry it.  OSError (EILSEQ): it is not UTF-8, and there is no shell."""
        raw = {name: value for name, value in command.env.items() if not is_utf8(name, value)}
        if not raw and is_utf8(*command.argv, directory, command.user or ""):
            return Command(command.argv, cwd=directory, env=command.env)
        if command.user is not None and not is_utf8(command.user):
            raise OSError(errno.EILSEQ, "a user's name that is not valid UTF-8", command.user)
        if not await self._has_shell(container):
            raise OSError(
                errno.EILSEQ,
                "a command that is not valid UTF-8 is started through /bin/sh, which the container lacks",
                command.argv[0],
            )
        env = {name: value for name, value in command.env.items() if name not in raw}
        return Command(through_shell(command.argv, raw, directory), cwd="/", env=env)

    async def _has_shell(self, container: Container) -> bool:
        """Whether the container has a /bin/sh."""
        if container.id not in self._shell_exists:
            status = await exec_status(container.service, container.id, ["/bin/sh", "-c", ":"])
            self._shell_exists = {container.id: status == 0}
        return self._shell_exists[container.id]


class ContainerProcess:
    """Implements `protocol.execution.runner.Process`.  The output of a terminal is all "stdout"."""

    def __init__(
        self,
        stream: ExecStream,
        command: Command,
        directory: str,
        processes: CommandProcesses,
        wrapper: StdinWrapper | None,
        is_alone: Callable[[], bool],
    ) -> None:
        self._stream = stream
        self._command = command
        self._directory = directory
        self._processes = processes
        self._wrapper = wrapper
        self._is_alone = is_alone
        self._killed = False
        self._is_given_up = False
        self._sending = trio.Lock()
        self._refusal = b""  # the possible start of the runtime's message that it could not start the program
        self._has_output = False
        self._channel, self.output = trio.open_memory_channel[tuple[Stream, bytes]](0)

    # -- output ----------------------------------------------------------------------------------------
    async def pump(self) -> None:
        """Pass the command's output to `output` until the command has ended."""
        async with self._channel:
            while (received := await self._stream.receive()) is not None:
                if received.channel == STDERR:
                    await self._pass_error(received.data)
                else:
                    await self._flush()
                    await self._channel.send(("stdout", received.data))
            if self._wrapper is not None and (rest := self._wrapper.rest()):
                await self._channel.send(("stderr", rest))
            if self._refusal and await self._stream.wait() not in _REFUSAL_STATUSES:
                await self._flush()

    async def _pass_error(self, data: bytes) -> None:
        if self._wrapper is not None:
            had_ended = self._wrapper.has_ended
            data = self._wrapper.errors(data)
            if self._wrapper.has_ended and not had_ended:
                await self.end_input()
        if not self._has_output and self._may_be_refusal(data):
            self._refusal += data
        elif data:
            await self._flush()
            await self._channel.send(("stderr", data))

    def _may_be_refusal(self, data: bytes) -> bool:
        return data.startswith(_REFUSAL) and b"OCI " in (self._refusal or data) and len(self._refusal) < _REFUSAL_BYTES

    async def _flush(self) -> None:
        refusal, self._refusal, self._has_output = self._refusal, b"", True
        if refusal:
            await self._channel.send(("stderr", refusal))

    # -- control -----------------------------------------------------------------------------------------
    async def send(self, data: bytes) -> None:
        """See `protocol.execution.runner.Process`."""
        for start in range(0, len(data), _PIECE_BYTES):
            async with self._sending:
                if self._wrapper is not None and self._wrapper.has_ended:
                    raise BrokenPipeError(errno.EPIPE, "the command has ended")
                await self._stream.send(data[start : start + _PIECE_BYTES])

    async def end_input(self) -> None:
        if self._command.terminal is None:
            async with self._sending:
                await self._stream.close_stdin()
        else:
            with contextlib.suppress(BrokenPipeError):
                await self.send(_END_OF_INPUT)

    async def signal(self, number: int) -> None:
        await self._processes.signal(number)

    async def resize(self, terminal: Terminal) -> None:
        if self._command.terminal is not None:
            with contextlib.suppress(OSError):  # it has ended
                await self._stream.resize(terminal.rows, terminal.columns)

    async def kill(self) -> None:
        self._killed = True
        try:
            await self._processes.kill(is_alone=self._is_alone())
        except OSError:
            await self._stream.kill()  # at least the command itself
            if await self._processes.is_paused():
                # The command dies when the container is unpaused; do not wait for that.
                self._is_given_up = True
                await self._stream.disconnect()

    async def wait(self) -> int:
        """The exit status, once `output` has ended: 128 + N after signal N, as the runtime reports it; -9 after `kill`.

        OSError if the command could not be started: FileNotFoundError if the program or the directory does not exist.
        """
        status = await self._status()
        if self._refusal:
            raise _start_error(self._refusal.decode(errors="replace"), self._command.argv[0], self._directory)
        if self._wrapper is not None and self._wrapper.is_missing:
            raise os_error(errno.ENOENT, self._command.argv[0])
        return -int(signal.SIGKILL) if self._killed and status == _KILLED else status

    async def _status(self) -> int:
        if self._is_given_up:
            return _KILLED
        try:
            return await self._stream.wait()
        except FileNotFoundError as error:
            if error.filename is not None:
                raise  # the service's socket
            return _KILLED  # the container was removed, and the command with it

    async def end(self) -> None:
        """Kill the processes that are left, and close the connection.  Must not be cancelled."""
        try:
            await self._processes.kill(is_alone=self._is_alone())
        except OSError as error:
            _logger.warning("processes of a command may be left: %s", error, extra={"operation": "exec"})
        finally:
            await self._stream.aclose()


@contextlib.contextmanager
def _advising(container: Container) -> Generator[None]:
    """Say in the error what to do if the container is not running."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EBUSY and "is paused" in str(error):
            raise OSError(
                errno.EBUSY,
                f"the container is paused: {podman_command(container.service.address)} unpause {container.name}",
            ) from None
        if error.errno != errno.ENOTCONN:
            raise
        reason = f"the container is not running: {podman_command(container.service.address)} start {container.name}"
        raise OSError(errno.ENOTCONN, reason) from None


def _start_error(message: str, program: str, directory: str) -> OSError:
    """The error for a runtime's message that it could not start a command."""
    reason = message.splitlines()[0].removeprefix("Error: ")
    text = reason.lower()
    about = directory if "chdir to" in text else program
    for words, code in (
        ("not a directory", errno.ENOTDIR),
        ("permission denied", errno.EACCES),
        ("exec format error", errno.ENOEXEC),
        ("argument list too long", errno.E2BIG),
        ("resource temporarily unavailable", errno.EAGAIN),
        ("no such file", errno.ENOENT),
        ("not found", errno.ENOENT),
    ):
        if words in text:
            return os_error(code, about)
    return OSError(errno.EIO, f"the container cannot run it: {reason}", about)


_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")  # environ(7), as shells take it
# Follows the generated `cd`, `set --` and `export`.  Reports a missing program with the runtime's text; see
# `runner._start_error`.
_EXECUTE: Final = r"""
if ! case $1 in */*) [ -e "$1" ] ;; *) command -v "$1" >/dev/null 2>&1 ;; esac; then
  echo "Error: OCI runtime: no such file or directory" >&2
  exit 127
fi
exec "$@"
"""
_ENTER: Final = r"""
cd -- "$_vfsd" 2>/dev/null || { echo "Error: OCI runtime: chdir to it: no such file or directory" >&2; exit 127; }
"""


def is_utf8(*words: str) -> bool:
    """Whether all `words`, as os.fsdecode returns them, are valid UTF-8."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return False
    return True


def through_shell(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> list[str]:
    """An ASCII command for /bin/sh that runs `argv` with `env` added, in the directory `cwd`.

    OSError (EILSEQ): a variable's name is not one that a shell can set.
    """
    lines = [_assigned(cwd) + _ENTER]
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise OSError(
                errno.EILSEQ, "a variable that is not valid UTF-8 needs a name of letters, digits and _", name
            )
        lines.append(f"{_assigned(value)}; export {name}; {name}=$_vfsd")
    lines.append("set --")
    lines += [f'{_assigned(word)}; set -- "$@" "$_vfsd"' for word in argv]
    return ["/bin/sh", "-c", "\n".join([*lines, "unset _vfsd", _EXECUTE])]


def _assigned(word: str) -> str:
    """Shell code that assigns the bytes of `word` to $_vfsd; "x" preserves trailing newlines."""
    escaped = "".join(f"\\0{byte:03o}" for byte in os.fsencode(word))
    return f"_vfsd=$(printf '%b' '{escaped}x'); _vfsd=${{_vfsd%x}}"


# In a subshell, because `exec` runs a program and never a builtin of that name.  Descriptor 9 keeps the shell's own
# messages about the command's death out of its standard error.  Signals go to the whole group, so the shell traps them.
_SCRIPT: Final = r"""
trap : HUP INT QUIT USR1 USR2 ALRM TERM
mark=$1; shift
exec 9>&2 2>/dev/null
if case $1 in */*) [ -e "$1" ] ;; *) command -v "$1" >/dev/null ;; esac; then
  (exec "$@" 2>&9 9>&-)
  status=$? result=$?
else
  status=127 result=missing
fi
printf '\0%s %s\n' "$mark" "$result" >&9
cat >/dev/null || while read -r line; do :; done
exit "$status"
"""


class StdinWrapper:
    """`argv` is the wrapped command; `errors` filters its standard error.  `has_ended` is set at the mark."""

    def __init__(self, argv: Sequence[str]) -> None:
        mark = secrets.token_hex(16)
        self.argv: Final = ["/bin/sh", "-c", _SCRIPT, "sh", mark, *argv]
        self.has_ended = False
        self.is_missing = False
        self._mark = b"\0" + mark.encode() + b" "
        self._held = b""

    def errors(self, data: bytes) -> bytes:
        """The part of `data`, and of data held back before, that the command itself has written."""
        if self.has_ended:
            return b""
        data, self._held = self._held + data, b""
        said, mark, rest = data.partition(self._mark)
        if mark and b"\n" in rest:
            self.has_ended = True
            self.is_missing = rest.startswith(b"missing")
            return said
        start = data.rfind(b"\0") if not mark else len(said)
        if start >= 0 and (mark or self._mark.startswith(data[start:])):
            self._held = data[start:]
            return data[:start]
        return data

    def rest(self) -> bytes:
        """After the end of the output: the data that was held back as a possible start of the mark."""
        held, self._held = self._held, b""
        return held
