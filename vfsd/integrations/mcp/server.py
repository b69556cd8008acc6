"""The MCP server: binds `tools` to the official SDK, and serves a client on standard input and output.

Each request is a task on the event loop.  A client that cancels a request cancels its task, and thereby the call in the
daemon: a command is killed.  While a call runs, a client that asked for progress gets some every few seconds, so that
it does not time out.

`serve_stdio` ends when the client closes standard input or a signal arrives.  The SDK's own streams block a thread in
read(2), which Ctrl-C cannot end.  These wait for events instead.  While the server runs, descriptor 0 is /dev/null and
descriptor 1 is standard error: nothing that the process prints can get into the protocol.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

import anyio
import anyio.lowlevel
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from protocol.tools.base import printable
from vfsd import __version__
from vfsd.integrations.mcp.session import Session
from vfsd.integrations.mcp.tools import (
    SERVED_TOOLS,
    Hints,
    describe_error,
    list_resources,
    read_resource,
    resource_template,
    served_for,
)
from vfsd.wire.messages import ProgressReport

_logger = logging.getLogger(__name__)
_BEAT_S: Final = 5.0
_INSTRUCTIONS: Final = (
    "The files of a vfsd workspace. Paths are relative to its root. Take a snapshot before a risky step: restore "
    "brings it back exactly, whatever changed the files, and diff shows what a step changed."
)


def make_server(session: Session) -> Server[Any]:
    """Return a server for `session`."""
    handlers = _Handlers(session)
    return Server(
        "vfsd",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=handlers.list_tools,
        on_call_tool=handlers.call_tool,
        on_list_resources=handlers.list_resources,
        on_list_resource_templates=handlers.list_templates,
        on_read_resource=handlers.read_resource,
    )


class _Handlers:
    """The handlers of requests.  They share no state but the session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def list_tools(self, _ctx: Any, _params: Any) -> types.ListToolsResult:
        offered = served_for(await self._session.status())
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name,
                    title=tool.hints.title,
                    description=tool.description,
                    input_schema=tool.json_schema(),
                    annotations=_annotations(tool.hints),
                )
                for tool in offered
            ]
        )

    async def call_tool(self, ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        tool = SERVED_TOOLS.get(params.name)
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"no such tool: {printable(params.name)!r}")
        progress = _Progress(ctx.session.report_progress)

        async def answer() -> types.CallToolResult:
            try:
                text = await tool.call(params.arguments or {}, self._session, progress.of_daemon)
            except (OSError, ValueError, NotImplementedError) as error:
                return _text(describe_error(error), is_error=True)
            except Exception:
                _logger.exception("the tool %s failed unexpectedly", tool.name)
                return _text("internal error; the log of `vfsd mcp` has the details", is_error=True)
            return _text(text)

        async with anyio.create_task_group() as group:
            group.start_soon(progress.beat, tool.name)
            result = await answer()
            group.cancel_scope.cancel()
        return result

    async def list_resources(self, _ctx: Any, _params: Any) -> types.ListResourcesResult:
        files = await self._resource(lambda: list_resources(self._session))
        return types.ListResourcesResult(
            resources=[types.Resource(uri=file.uri, name=file.name, mime_type=file.mime_type) for file in files]
        )

    async def list_templates(self, _ctx: Any, _params: Any) -> types.ListResourceTemplatesResult:
        template = await self._resource(lambda: resource_template(self._session))
        description = "A file of the workspace. PATH is relative to its root, and percent-encoded."
        return types.ListResourceTemplatesResult(
            resource_templates=[types.ResourceTemplate(uri_template=template, name="file", description=description)]
        )

    async def read_resource(self, _ctx: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        uri = str(params.uri)
        read = await self._resource(lambda: read_resource(self._session, uri))
        text = read.text
        contents: types.TextResourceContents | types.BlobResourceContents
        if text is None:
            blob = base64.b64encode(read.content).decode()
            contents = types.BlobResourceContents(uri=uri, blob=blob, mime_type=read.mime_type)
        else:
            contents = types.TextResourceContents(uri=uri, text=text, mime_type=read.mime_type or "text/plain")
        return types.ReadResourceResult(contents=[contents])

    async def _resource(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Return what `read` returns; its failure becomes an error of the protocol."""
        try:
            return await read()
        except (FileNotFoundError, ValueError) as error:
            raise MCPError(types.INVALID_PARAMS, describe_error(error)) from None
        except OSError as error:
            raise MCPError(types.INTERNAL_ERROR, describe_error(error)) from None


class _Progress:
    """The progress of one call: the daemon's, else the time that has passed.  Its values only increase."""

    def __init__(self, report: Callable[[float, float | None, str | None], Awaitable[None]]) -> None:
        self._report = report
        self._last = 0.0
        self._has_daemons = False

    async def of_daemon(self, progress: ProgressReport) -> None:
        """Pass on a report of the daemon."""
        self._has_daemons = True
        await self._send(progress.done, progress.total or None, f"{progress.done} {progress.unit}")

    async def beat(self, name: str) -> None:
        """Report every few seconds that the tool `name` is running, until cancelled."""
        start = time.monotonic()
        while True:
            await anyio.sleep(_BEAT_S)
            passed_s = round(time.monotonic() - start, 1)
            if not self._has_daemons:
                await self._send(passed_s, None, f"{name} has been running for {passed_s:.0f} s")

    async def _send(self, value: float, total: float | None, message: str) -> None:
        if value > self._last:
            self._last = value
            await self._report(value, total, message)


def _annotations(hints: Hints) -> types.ToolAnnotations:
    return types.ToolAnnotations(
        title=hints.title,
        read_only_hint=hints.read_only,
        destructive_hint=hints.destructive,
        idempotent_hint=hints.idempotent or hints.read_only,
        open_world_hint=hints.open_world,
    )


def _text(text: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)


# -- standard input and output ---------------------------------------------------------------------
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
