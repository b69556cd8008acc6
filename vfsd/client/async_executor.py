"""Commands in a workspace, for asyncio and trio: `AsyncWorkspaceExecutor`, and the `AsyncProcess` that it starts.

    async with await ws.async_executor.start(["python3", "-i"], terminal=TerminalSize()) as process:
        await process.send_input(b"1 + 1\\n")
        while outputs := await process.receive():
            ...

One task at a time may call `receive`; other tasks may call the other methods meanwhile.  While nobody calls `receive`,
a command that writes more than 64 KiB waits.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import anyio
import anyio.to_thread

from protocol.errors import check_type
from protocol.execution.executor import DEFAULT_OUTPUT_BYTES, DEFAULT_TIMEOUT_S, ExecResult, check_words
from vfsd.client.async_connection import AsyncControlClient, abandon
from vfsd.client.executor import ExecCall, caller_environment, exec_call
from vfsd.operations.exec import ExecEnded, ExecOutput, ExecParams, TerminalSize
from vfsd.wire.messages import wire_path

_INPUT_BYTES: Final = 64 * 1024  # of one message


class AsyncProcess:
    """A command that the daemon runs.  A context manager, whose end kills the command and its processes."""

    def __init__(self, call: ExecCall) -> None:
        """Use `AsyncWorkspaceExecutor.start`."""
        self._call: Final = call
        self._received: list[ExecOutput] = []  # arrived before the start was reported
        self._changed = anyio.Event()  # set, and replaced, whenever the daemon has sent something
        self._input_turn: Final = anyio.Lock()
        self._is_closed = False

    @classmethod
    async def start(cls, socket_path: str, params: ExecParams, instance: str = "") -> Self:
        """Start a command.  The errors are those of `AsyncWorkspaceExecutor.start`."""
        process = cls(await abandon(lambda: ExecCall(socket_path, params, instance)))
        try:
            while not process._call.is_started and process._call.ended is None:
                process._received += await process._next()
        except BaseException:
            process.close()
            raise
        return process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    @property
    def ended(self) -> ExecEnded | None:
        """How the command ended; None while it runs, and until `receive` has returned all output."""
        return None if self._received else self._call.ended

    async def receive(self) -> list[ExecOutput]:
        """Return the next output, in order; an empty list when the command has ended.

        The first call raises what `AsyncWorkspaceExecutor.start` may raise, such as FileNotFoundError for a program
        that does not exist.  ConnectionError if the daemon is gone.
        """
        while not self._received and self._call.ended is None:
            self._received = await self._next()
        outputs, self._received = self._received, []
        return outputs

    async def _next(self) -> list[ExecOutput]:
        await anyio.wait_readable(self._call)
        outputs = self._call.receive()
        for output in outputs:
            self._call.done_with(output.data)
        self._changed.set()
        self._changed = anyio.Event()
        return outputs

    async def send_input(self, data: bytes) -> None:
        """Write to the command's input, and wait until the command has read it; b"" ends the input.

        The command must have been started with `input`.  Another task must call `receive` meanwhile.  BrokenPipeError
        if the command has closed its input or has ended.
        """
        check_type(data, (bytes, bytearray, memoryview), "stdin takes bytes", "encode text")
        async with self._input_turn:
            for start in range(0, max(len(data), 1), _INPUT_BYTES):
                await self._input_taken()
                piece = data[start : start + _INPUT_BYTES]
                await anyio.to_thread.run_sync(self._call.send_input, piece)
            if data:
                await self._input_taken()

    async def _input_taken(self) -> None:
        while not self._call.wants_input:
            if not self._call.takes_input or self._call.ended is not None or self._is_closed:
                raise BrokenPipeError(errno.EPIPE, "the command reads no input")
            await self._changed.wait()

    def signal(self, name: str) -> None:
        """Send a signal ("INT", "TERM", ...) to the command and its foreground processes."""
        self._call.signal(name)

    def resize(self, size: TerminalSize) -> None:
        """Change the size of the command's terminal."""
        self._call.resize(size)

    def close(self) -> None:
        """Kill the command if it runs.  No other method may be called afterwards."""
        self._is_closed = True
        self._changed.set()
        self._call.close()

    async def communicate(self, data: bytes | None = None) -> ExecResult:
        """Send all of the input, unless it is None, and collect all output until the command has ended.

        A command that does not read its input to the end is not an error.
        """
        check_type(data, (bytes, bytearray, memoryview, type(None)), "stdin takes bytes", "encode text")
        collected: dict[str, list[bytes]] = {"stdout": [], "stderr": []}

        async def feed(content: bytes) -> None:
            try:
                await self.send_input(content)
                if content:
                    await self.send_input(b"")
            except BrokenPipeError:
                pass

        failure: OSError | None = None
        async with anyio.create_task_group() as group:
            if data is not None:
                group.start_soon(feed, data)
            try:
                while outputs := await self.receive():
                    for output in outputs:
                        collected[output.stream].append(output.data)
            except OSError as error:  # raised below: the group would put it into an ExceptionGroup
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        ended = self._call.ended
        assert ended is not None, "`receive` returned an empty list"
        stdout, stderr = (b"".join(collected[name]) for name in ("stdout", "stderr"))
        return ExecResult(ended.exit_status, stdout, stderr, ended.timed_out, ended.truncated)


class AsyncWorkspaceExecutor:
    """The async twin of `WorkspaceExecutor`.  Several commands may run in parallel.

    Cancelling `run` kills the command with all of its processes, and waits for that (up to 3 s).
    """

    def __init__(self, client: AsyncControlClient, socket_path: str, instance: str = "") -> None:
        """Use `AsyncWorkspace.async_executor`."""
        self._client = client
        self._socket_path = socket_path
        self._instance = instance

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        output_limit_bytes: int = DEFAULT_OUTPUT_BYTES,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `WorkspaceExecutor.run`."""
        return await self._client.run(exec_call(argv, cwd, env, timeout_s, output_limit_bytes, stdin))

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        terminal: TerminalSize | None = None,
        has_input: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncProcess:
        """Start a command: `async with await executor.start(argv) as process`.

        With `terminal` it runs in a terminal, whose output is all "stdout".  With `has_input` it reads what
        `AsyncProcess.send_input` sends; otherwise its input is empty.  `user` is one of the container.  After
        `timeout_s` seconds the command is killed; None: no limit.

        The errors are those of `run`, such as FileNotFoundError for a program that does not exist, and OSError
        (EOPNOTSUPP) for a `user` of a command on this host.  Either this method raises them or the first `receive`.
        """
        check_words(argv)
        params = ExecParams(
            argv=[wire_path(os.fsencode(word)) for word in argv],
            cwd=wire_path(os.fsencode(cwd)),
            env=dict(env or {}),
            environment=caller_environment(),
            user=user,
            terminal=terminal,
            input=has_input,
            timeout_s=timeout_s,
        )
        return await AsyncProcess.start(self._socket_path, params, self._instance)
