"""The client of the control socket for asyncio and trio: the calls of `connection`, and commands, several in parallel.

No call blocks the loop for long: large answers are decoded and converted in worker threads.  Nothing is shared between
two calls, so an await in one of them breaks no invariant of another.

Blocking work runs in worker threads, with defined effects of cancellation.  `finish` is for work that changes
something: it returns or raises only when the thread has ended, or the work was never begun.  anyio guarantees that for
cancellation by its own scopes and by trio, but asyncio's `Task.cancel` (which `asyncio.timeout` and `asyncio.wait_for`
use) ends an await on a thread at once, and the thread would go on: a write could follow a restore.  `abandon` is for
work that only reads: it leaves the thread alone.

    async with await ws.async_executor.start(["python3", "-i"], terminal=TerminalSize()) as process:
        await process.send_input(b"1 + 1\\n")
        while outputs := await process.receive():
            ...

One task at a time may call `AsyncProcess.receive`; other tasks may call the other methods meanwhile.  While nobody
calls `receive`, a command that writes more than 64 KiB waits.
"""

from __future__ import annotations

import errno
import inspect
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from protocol.errors import check_type
from protocol.execution.executor import DEFAULT_OUTPUT_BYTES, DEFAULT_TIMEOUT_S, ExecResult, check_words
from vfsd.client import results as results  # noqa: PLC0414 its import takes 10 ms, which the first call must not wait for
from vfsd.client.connection import connected, timed_out, vanished
from vfsd.client.executor import ExecCall, caller_environment, exec_call
from vfsd.client.quick_call import ANSWER_S
from vfsd.client.requests import RemoteCall
from vfsd.operations.fs import ExecEnded, ExecOutput, ExecParams, TerminalSize
from vfsd.wire.messages import (
    ATTEMPTS,
    RECEIVE_BYTES,
    ClosingError,
    ControlError,
    Exchange,
    LineBuffer,
    ProgressReport,
    wire_path,
)

T = TypeVar("T")
_BACKLOG_PAUSE_S: Final = 0.05
# A longer answer is interpreted in a worker thread.  More than one message with output, which is 256 KiB at most.
_LARGE_BYTES: Final = 512 * 1024


@dataclass(frozen=True, slots=True)
class CancelledCall:
    """A call of the async client that was cancelled.

    `outcome` is "stopped" (nothing was changed; a command was killed), "completed" (it was too late), "continues" (the
    daemon completes it) or "unknown" (the daemon did not answer within ANSWER_S, or is gone).  `str()` is a sentence.
    """

    method: str
    outcome: Literal["stopped", "completed", "continues", "unknown"]
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class AsyncControlClient:
    """Calls a daemon's methods.

    Each call has a connection of its own.  Cancelling a call cancels exactly that call in the daemon.  A call that
    changes something, or runs a command, then waits for the outcome for up to 3 s (`ANSWER_S`): `on_cancelled` is
    called with it, and the cancellation's exception gets it as a note.  Other calls are left at once.

    `timeout_s` bounds each silence (no answer, no progress, no output), not the whole call.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        instance: str = "",
        timeout_s: float | None = None,
        on_cancelled: Callable[[CancelledCall], object] | None = None,
    ) -> None:
        self._path = socket_path
        self._instance = instance
        self._timeout_s = timeout_s
        self._on_cancelled = on_cancelled

    async def run(self, call: RemoteCall[T]) -> T:
        """Send `call` and return its converted answer.  Errors as for `call`."""
        answer, received_bytes = await self._call(call.method, call.params, call.on_progress, call.on_output)
        if received_bytes < _LARGE_BYTES:
            return call.result(answer)
        return await anyio.to_thread.run_sync(call.result, answer)

    async def call(
        self,
        method: str,
        params: msgspec.Struct | None = None,
        *,
        on_progress: Callable[[ProgressReport], object] | None = None,
        on_output: Callable[[bytes], object] | None = None,
    ) -> Any:
        """As `ControlClient.call`; awaits a callback that returns an awaitable."""
        answer, _ = await self._call(method, params, on_progress, on_output)
        return answer

    async def stream(self, call: RemoteCall[Any]) -> AsyncGenerator[bytes]:
        """As `ControlClient.stream`."""
        pieces: list[bytes] = []
        exchange = Exchange(0, call.method, call.params, None, pieces.append)
        with await self._connected() as sock:
            conversation = _Conversation(sock, exchange, self._timeout_s, self._path)
            await conversation.send(exchange.request)
            while not exchange.done:
                await conversation.receive_line()
                for piece in pieces:
                    yield piece
                pieces.clear()

    async def _call(
        self,
        method: str,
        params: msgspec.Struct | None,
        on_progress: Callable[[ProgressReport], object] | None,
        on_output: Callable[[bytes], object] | None,
    ) -> tuple[Any, int]:
        """Return the answer, and the number of bytes received."""
        for attempt in range(ATTEMPTS):
            exchange = Exchange(attempt, method, params, on_progress, on_output)
            with await self._connected() as sock:
                conversation = _Conversation(sock, exchange, self._timeout_s, self._path)
                try:
                    await conversation.send(exchange.request)
                    await conversation.receive_answer()
                except ClosingError:
                    continue
                except anyio.get_cancelled_exc_class() as error:
                    await self._stop(conversation, error)
                    raise
            return exchange.result, conversation.received_bytes
        raise vanished(self._path, method)

    async def _connected(self) -> socket.socket:
        while True:
            await anyio.lowlevel.checkpoint()
            try:
                sock = connected(self._path, 0, instance=self._instance)
            except BlockingIOError:
                # The daemon's backlog is full.  No event reports that it has room again: connect(2), EAGAIN.
                await anyio.sleep(_BACKLOG_PAUSE_S)
            else:
                sock.setblocking(False)
                return sock

    async def _stop(self, conversation: _Conversation, error: BaseException) -> None:
        """Cancel a call in the daemon and report what became of it.  `error` is the cancellation."""
        exchange, operation = conversation.exchange, conversation.exchange.operation
        if not operation.stopped or not conversation.is_sent:
            return  # closing the connection is enough
        outcome = None
        try:
            with anyio.move_on_after(ANSWER_S, shield=True):
                exchange.mute()
                try:
                    await conversation.send(exchange.cancel_request)
                    await conversation.receive_answer()
                    sentence = f"it was too late to stop {operation.noun}: {operation.done}"
                    outcome = CancelledCall(operation.name, "completed", sentence)
                except ControlError as answer:
                    sentence = f"{operation.noun} failed: {answer}"
                    if answer.errno == errno.ECANCELED:
                        sentence = f"{operation.noun} was stopped: {operation.stopped}"
                    outcome = CancelledCall(operation.name, "stopped", sentence)
        except OSError:  # the daemon is gone
            exchange.cancel_state = None
        finally:  # also if asyncio's `Task.cancel` is called a second time
            if outcome is None:
                state = exchange.cancel_state
                continues: Literal["continues", "unknown"] = "continues" if state == "finishing" else "unknown"
                outcome = CancelledCall(operation.name, continues, operation.left(state))
            error.add_note(str(outcome))
            if self._on_cancelled is not None:
                self._on_cancelled(outcome)


class _Conversation:
    """One call on one connection."""

    def __init__(self, sock: socket.socket, exchange: Exchange, timeout_s: float | None, path: str) -> None:
        self.exchange: Final = exchange
        self.is_sent = False  # all of the request
        self.received_bytes = 0
        self._sock = sock
        self._timeout_s = timeout_s
        self._path = path
        self._lines = LineBuffer()

    async def send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._sock.send(left) :]
            except BlockingIOError:
                await self._silence_limited(anyio.wait_writable)
            except ConnectionError:
                break  # refused: the daemon's message can still be read
        self.is_sent = not left

    async def receive_answer(self) -> None:
        """Receive until the exchange is done."""
        while not self.exchange.done:
            await self.receive_line()

    async def receive_line(self) -> None:
        """Receive one message, and interpret it."""
        line = await self._next_line()
        if len(line) < _LARGE_BYTES:
            answered = self.exchange.take(line)
        else:
            answered = await anyio.to_thread.run_sync(self.exchange.take, line)
        if inspect.isawaitable(answered):
            await answered

    async def _next_line(self) -> bytes:
        while (line := self._lines.next_line()) is None:
            await self._silence_limited(anyio.wait_readable)
            try:
                data = self._sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                continue  # a spurious event
            except ConnectionError:
                data = b""
            if not data:
                raise vanished(self._path, self.exchange.method)
            self.received_bytes += len(data)
            self._lines.feed(data)
        return line

    async def _silence_limited(self, wait: Callable[[socket.socket], Any]) -> None:
        if self._timeout_s is None:
            await wait(self._sock)
            return
        try:
            with anyio.fail_after(self._timeout_s):
                await wait(self._sock)
        except TimeoutError:
            raise timed_out(self._path, self.exchange.method, self._timeout_s) from None


_POLL_S: Final = 0.002


async def finish(work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Run `work` in a worker thread, to its end.

    If the caller is cancelled meanwhile, and so cannot get the result, `undo` is called with it in a worker thread.
    """
    job = _Job(work)
    try:
        return await anyio.to_thread.run_sync(job.run)
    except BaseException:
        if not job.was_begun():
            raise
        with anyio.CancelScope(shield=True):
            while not job.ended.is_set():
                await anyio.sleep(_POLL_S)
            if undo is not None and job.results:
                await anyio.to_thread.run_sync(undo, job.results[0])
        raise


async def abandon(work: Callable[[], T]) -> T:
    """Run `work`, which changes nothing, in a worker thread.  A cancelled caller does not wait for its end."""
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


class _Job(Generic[T]):
    """`work`, and whether it was begun: the thread begins, or the caller leaves.  `_claim` decides."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._claim = threading.Lock()
        self.ended = threading.Event()
        self.results: list[T] = []

    def run(self) -> T:
        """Run the work.  Worker thread."""
        if not self._claim.acquire(blocking=False):
            raise RuntimeError("the caller was cancelled before the work began")  # nobody receives this
        try:
            self.results.append(self._work())
            return self.results[0]
        finally:
            self.ended.set()

    def was_begun(self) -> bool:
        """Return whether the thread has begun; if it has not, it will do nothing.  Loop."""
        return not self._claim.acquire(blocking=False)


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
