"""Serve MCP on standard input and output, until the client closes standard input or a signal arrives.

The SDK's own streams block a thread in read(2), which Ctrl-C cannot end.  These wait for events instead.

While the server runs, descriptor 0 is /dev/null and descriptor 1 is standard error: nothing that the process prints can
get into the protocol.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import anyio
import anyio.lowlevel
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

_READ_BYTES: Final = 64 * 1024
_STEP_BYTES: Final = 4096  # PIPE_BUF: a writable pipe accepts as much without blocking
# A line is a request.  The largest useful one writes a file of 32 MiB, in which JSON may escape every byte.
_LINE_BYTES: Final = 256 << 20


async def serve_stdio(server: Server[Any]) -> int | None:
    """Serve the client at the other end of standard input and output.  Main thread.

    Return None when the client has left, or the number of the signal (INT, TERM or HUP) that ended the server.  Calls
    that run then are cancelled.  ValueError for a line that is longer than any request, OSError if standard input or
    output fails.
    """
    ended_by: list[int] = []
    lost: list[BaseException] = []
    with _claimed_streams() as (reading, writing):
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_until_signal, ended_by, group.cancel_scope)
                streams: tuple[Any, Any] = _Lines(reading), _Output(writing)
                async with stdio_server(*streams) as (received, sent):
                    await server.run(received, sent, server.create_initialization_options())
                group.cancel_scope.cancel()
        except* ConnectionError:
            pass  # the client has closed the other end
        except* (OSError, ValueError) as errors:
            lost += _leaves(errors)
    if lost:
        raise lost[0]
    return ended_by[0] if ended_by else None


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _until_signal(ended_by: list[int], scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async for number in signals:
            ended_by.append(number)
            scope.cancel()


@contextlib.contextmanager
def _claimed_streams() -> Iterator[tuple[int, int]]:
    """Yield descriptors for the protocol, and keep everything else away from it, as described above."""
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        yield reading, writing
    finally:
        os.dup2(reading, 0)
        os.dup2(writing, 1)
        for descriptor in (nothing, reading, writing):
            os.close(descriptor)


class _Lines:
    """The lines of a descriptor: an async iterator of text."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def __aiter__(self) -> AsyncIterator[str]:
        pending: list[bytes] = []
        pending_bytes = 0
        while data := await self._read():
            *ends, rest = data.split(b"\n")
            for end in ends:
                line = b"".join([*pending, end])
                pending, pending_bytes = [], 0
                if line.strip():
                    yield line.decode("utf-8", "replace")
            pending.append(rest)
            pending_bytes += len(rest)
            if pending_bytes > _LINE_BYTES:
                raise ValueError(f"the client sent a line of more than {_LINE_BYTES} bytes")

    async def _read(self) -> bytes:
        while True:
            await _ready(anyio.wait_readable, self._descriptor)
            with contextlib.suppress(BlockingIOError):
                return os.read(self._descriptor, _READ_BYTES)


class _Output:
    """Writes text to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def write(self, text: str) -> None:
        left = memoryview(text.encode("utf-8", "replace"))
        while left:
            await _ready(anyio.wait_writable, self._descriptor)
            try:
                left = left[os.write(self._descriptor, left[:_STEP_BYTES]) :]
            except BlockingIOError:
                continue
            except ConnectionError:
                raise
            except OSError as error:
                raise OSError(error.errno, f"cannot write to standard output: {error.strerror}") from None

    async def flush(self) -> None:
        """Nothing is buffered."""


async def _ready(wait: Callable[[int], Any], descriptor: int) -> None:
    try:
        await wait(descriptor)
    except PermissionError:  # epoll_ctl(2): a regular file or /dev/null, which never blocks
        await anyio.lowlevel.checkpoint()
