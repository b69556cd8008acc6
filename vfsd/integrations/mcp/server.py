"""The MCP server: binds `tools` and `resources` to the official SDK.  `serve_stdio` and `serve_http` run it.

Each request is a task on the event loop.  A client that cancels a request cancels its task, and thereby the call in the
daemon: a command is killed.  While a call runs, a client that asked for progress gets some every few seconds, so that
it does not time out.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from protocol.tools.base import printable
from vfsd import __version__
from vfsd.integrations.mcp import resources
from vfsd.integrations.mcp.session import Session
from vfsd.integrations.mcp.tools import SERVED_TOOLS, Hints, describe_error, served_for
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
        files = await self._resource(lambda: resources.listed(self._session))
        return types.ListResourcesResult(
            resources=[types.Resource(uri=file.uri, name=file.name, mime_type=file.mime_type) for file in files]
        )

    async def list_templates(self, _ctx: Any, _params: Any) -> types.ListResourceTemplatesResult:
        template = await self._resource(lambda: resources.template(self._session))
        description = "A file of the workspace. PATH is relative to its root, and percent-encoded."
        return types.ListResourceTemplatesResult(
            resource_templates=[types.ResourceTemplate(uri_template=template, name="file", description=description)]
        )

    async def read_resource(self, _ctx: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        uri = str(params.uri)
        read = await self._resource(lambda: resources.read(self._session, uri))
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
