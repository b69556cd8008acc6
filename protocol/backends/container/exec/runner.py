"""Commands in a container: `ContainerCommandRunner` runs them for a trio loop, `ContainerExecutor` for plain threads.

A command is an exec of Podman's service (`exec_stream`).  It ends with all that it started: `marked` says how, and
what it cannot promise.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import posixpath
import signal
from collections.abc import AsyncIterator, Callable, Generator
from typing import Final

import trio

from protocol.backends.container.exec.command_processes import CommandProcesses, kill_abandoned
from protocol.backends.container.exec.non_utf8 import is_utf8, through_shell
from protocol.backends.container.exec.stdin_wrapper import StdinWrapper
from protocol.backends.container.podman.conmon import let_go
from protocol.backends.container.podman.exec_stream import STDERR, ExecStream, open_exec
from protocol.backends.container.podman.service import Container
from protocol.backends.container.podman.target import DEFAULT_WORKDIR
from protocol.errors import os_error
from protocol.execution.executor import Command, Terminal, check_command
from protocol.execution.runner import Stream

__all__ = ["ContainerCommandRunner", "ContainerProcess"]

_logger = logging.getLogger(__name__)

_END_OF_INPUT: Final = b"\x04"  # VEOF as terminals have it (termios(3))
_PIECE_BYTES: Final = 32 * 1024
_KILLED: Final = 137  # 128 + SIGKILL, as runtimes and shells say it
# What a runtime that could not start a program says on its standard error, and the status that comes with it.
_REFUSAL: Final = b"Error: "
_REFUSAL_STATUSES: Final = frozenset({125, 126, 127})
_REFUSAL_BYTES: Final = 8 * 1024


class ContainerCommandRunner:
    """Runs commands in the container that `find` finds (blocking), below its directory `workdir`.

    `owned`: nothing but commands run here makes processes in it, and it may be restarted.
    """

    def __init__(self, find: Callable[[], Container], workdir: str = DEFAULT_WORKDIR, *, owned: bool = False) -> None:
        self._find = find
        self._workdir = workdir
        self._owned = owned
        self._running = 0
        self._tidied = ""  # the container that was looked through for what dead daemons left
        self._with_shell: dict[str, bool] = {}  # by a container's id

    where: Final = "in its container"

    @contextlib.asynccontextmanager
    async def started(self, command: Command) -> AsyncIterator[ContainerProcess]:
        """Start it.  On leaving, nothing that it started runs any more.

        FileNotFoundError: the container is gone; OSError (ENOTCONN): it does not run; see `ContainerProcess.wait`.
        """
        check_command(command)
        container = await trio.to_thread.run_sync(self._found, abandon_on_cancel=True)
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

    def _found(self) -> Container:
        container = self._find()
        if container.id != self._tidied:
            self._tidied = container.id
            with contextlib.suppress(OSError):  # it does not run
                kill_abandoned(container)
        return container

    async def _start(self, container: Container, command: Command) -> ContainerProcess:
        terminal = command.terminal
        marked = CommandProcesses(container, owned=self._owned)
        directory = posixpath.normpath(posixpath.join(self._workdir, command.cwd))
        with_input = None
        with _helpful(container):
            request = await self._request(container, command, directory)
            if command.has_input and terminal is None and await self._has_shell(container):
                with_input = StdinWrapper(request.argv)
        # Shielded: what was started must be known.  It has a time limit of its own.
        with trio.CancelScope(shield=True), _helpful(container):
            try:
                stream = await open_exec(
                    container.service,
                    container.id,
                    request.argv if with_input is None else with_input.argv,
                    env={**request.env, **marked.env},
                    cwd=request.cwd,
                    tty=terminal is not None,
                    user=command.user,
                    stdin=command.has_input,
                    size=None if terminal is None else (terminal.rows, terminal.columns),
                )
            except TimeoutError:
                with contextlib.suppress(OSError):  # it may have been started all the same
                    await marked.kill(is_alone=self._running == 1)
                raise
        return ContainerProcess(
            stream,
            command,
            directory,
            marked,
            with_input,
            lambda: self._running == 1,
            is_local=container.service.is_local,
        )

    async def _request(self, container: Container, command: Command, directory: str) -> Command:
        """The command as Podman can carry it.  OSError (EILSEQ): it is not UTF-8, and no shell can decode it."""
        raw = {name: value for name, value in command.env.items() if not is_utf8(name, value)}
        if not raw and is_utf8(*command.argv, directory, command.user or ""):
            return Command(command.argv, cwd=directory, env=command.env)
        if command.user is not None and not is_utf8(command.user):
            raise OSError(errno.EILSEQ, "a user's name that is not valid UTF-8", command.user)
        if not await self._has_shell(container):
            raise OSError(
                errno.EILSEQ, "a command that is not valid UTF-8 needs /bin/sh in the container", command.argv[0]
            )
        env = {name: value for name, value in command.env.items() if name not in raw}
        return Command(through_shell(command.argv, raw, directory), cwd="/", env=env)

    async def _has_shell(self, container: Container) -> bool:
        """Whether there is a /bin/sh in it."""
        if container.id not in self._with_shell:
            probe = await open_exec(container.service, container.id, ["/bin/sh", "-c", ":"], stdin=False)
            try:
                while await probe.receive():
                    pass
                self._with_shell = {container.id: await probe.wait() == 0}
            finally:
                await probe.aclose()
        return self._with_shell[container.id]


class ContainerProcess:
    """A command in a container, as `protocol.execution.runner.Process` has it.  A terminal's output is all "stdout"."""

    def __init__(
        self,
        stream: ExecStream,
        command: Command,
        directory: str,
        marked: CommandProcesses,
        with_input: StdinWrapper | None,
        is_alone: Callable[[], bool],
        *,
        is_local: bool,
    ) -> None:
        self._stream = stream
        self._command = command
        self._directory = directory
        self._marked = marked
        self._with_input = with_input
        self._is_alone = is_alone
        self._is_local = is_local
        self._killed = False
        self._is_given_up = False
        self._sending = trio.Lock()
        self._refusal = b""  # what may be the runtime's word that the program could not be started
        self._has_begun = False
        self._channel, self.output = trio.open_memory_channel[tuple[Stream, bytes]](0)

    # -- output ----------------------------------------------------------------------------------------
    async def pump(self) -> None:
        """Put what the command writes into `output`, until it has ended."""
        async with self._channel:
            while (received := await self._stream.receive()) is not None:
                if received.channel == STDERR:
                    await self._pass_error(received.data)
                else:
                    await self._flush()
                    await self._channel.send(("stdout", received.data))
            if self._with_input is not None and (rest := self._with_input.rest()):
                await self._channel.send(("stderr", rest))
            if self._refusal and not await self._is_refused():
                await self._flush()

    async def _pass_error(self, data: bytes) -> None:
        if self._with_input is not None:
            had_ended = self._with_input.has_ended
            data = self._with_input.errors(data)
            if self._with_input.has_ended and not had_ended:
                await self.end_input()
        if not self._has_begun and self._may_be_refusal(data):
            self._refusal += data
        elif data:
            await self._flush()
            await self._channel.send(("stderr", data))

    def _may_be_refusal(self, data: bytes) -> bool:
        return data.startswith(_REFUSAL) and b"OCI " in (self._refusal or data) and len(self._refusal) < _REFUSAL_BYTES

    async def _flush(self) -> None:
        refusal, self._refusal, self._has_begun = self._refusal, b"", True
        if refusal:
            await self._channel.send(("stderr", refusal))

    async def _is_refused(self) -> bool:
        return await self._stream.wait() in _REFUSAL_STATUSES

    # -- what it is given --------------------------------------------------------------------------------
    async def send(self, data: bytes) -> None:
        """Give it input; waits until it is taken.  BrokenPipeError once it reads no more."""
        for start in range(0, len(data), _PIECE_BYTES):
            async with self._sending:
                if self._with_input is not None and self._with_input.has_ended:
                    raise BrokenPipeError(errno.EPIPE, "the command has ended")
                await self._stream.send(data[start : start + _PIECE_BYTES])

    async def end_input(self) -> None:
        """There is no more input."""
        if self._command.terminal is None:
            async with self._sending:
                await self._stream.close_stdin()
        else:
            with contextlib.suppress(BrokenPipeError):
                await self.send(_END_OF_INPUT)

    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group; nothing when it has ended."""
        await self._marked.signal(number)

    async def resize(self, terminal: Terminal) -> None:
        """Its terminal has another size now."""
        if self._command.terminal is not None:
            with contextlib.suppress(OSError):  # it has ended
                await self._stream.resize(terminal.rows, terminal.columns)

    async def kill(self) -> None:
        """Kill it with all that it started.  OSError where that cannot be done."""
        self._killed = True
        try:
            await self._marked.kill(is_alone=self._is_alone())
        except OSError:
            await self._stream.kill()  # itself at least
            if await self._marked.is_held_still():
                # It dies when the container goes on, which nobody can wait for.
                self._is_given_up = True
                await self._stream.disconnect()

    async def wait(self) -> int:
        """Its exit status, once `output` has ended: 128 + N, as the runtime has it, for one that signal N killed.

        -9 for one that `kill` did.  OSError where it could not be started: FileNotFoundError for a program or a
        directory that is not there.
        """
        status = await self._status()
        if self._refusal:
            raise _refused(self._refusal.decode(errors="replace"), self._command.argv[0], self._directory)
        if self._with_input is not None and self._with_input.is_missing:
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
        """Kill what is left of it, and close the connection.  Not to be cancelled."""
        try:
            await self._marked.kill(is_alone=self._is_alone())
        except OSError as error:
            _logger.warning("what a command may have left is not looked for: %s", error, extra={"operation": "exec"})
        finally:
            await self._stream.aclose()
            if self._is_local:
                # Nobody has to wait for that, and it goes on when the loop has ended.
                trio.lowlevel.start_thread_soon(lambda: let_go(self._stream.id), lambda _: None)


@contextlib.contextmanager
def _helpful(container: Container) -> Generator[None]:
    """An error that says what to do where the container does not run."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EBUSY and "is paused" in str(error):
            raise OSError(errno.EBUSY, f"the container is paused: podman unpause {container.name}") from None
        if error.errno != errno.ENOTCONN:
            raise
        reason = f"the container is not running: podman start {container.name}"
        raise OSError(errno.ENOTCONN, reason) from None


def _refused(said: str, program: str, directory: str) -> OSError:
    """The error that a runtime's word for a command that it could not start stands for."""
    reason = said.splitlines()[0].removeprefix("Error: ")
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
