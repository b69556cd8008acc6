"""Events: tells an open page that its workspace changed, with server-sent events.

A connection asks the daemon once in `PERIOD_S` for values that change with its workspace, and sends "change" if they
did.  Reads of programs count as well, because only the daemon's count of requests covers every change.

Threading: the event loop.  `_open` is changed without an await in between.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from vfsd.client.requests import RemoteCall
from vfsd.web.pages import given, sources_of
from vfsd.web.sources import Sources, WorkspaceSource
from vfsd.wire.backend_spec import BackendSpec
from vfsd.wire.messages import UnsavedResult

PERIOD_S: Final = 1.0
_MOST_OPEN: Final = 64


class Events:
    """The open connections of one server, at most `_MOST_OPEN`."""

    def __init__(self) -> None:
        self._open = 0

    async def answer(self, request: Request) -> Response:
        """GET `/events`: events of one workspace, or without `workspace` of the list of workspaces."""
        if self._open >= _MOST_OPEN:
            raise HTTPException(503, "Too many pages are open.")
        key, sources = given(request, "workspace"), sources_of(request)
        if key is not None:
            sources.workspace(key)
        return StreamingResponse(self._stream(sources, key), media_type="text/event-stream")

    async def _stream(self, sources: Sources, key: str | None) -> AsyncIterator[str]:
        self._open += 1
        try:
            before = await _state(sources, key)
            yield "event: ready\ndata:\n\n"
            while True:
                await anyio.sleep(PERIOD_S)
                now = await _state(sources, key)
                # A comment shows a connection that has ended.
                yield ":\n\n" if now == before else "event: change\ndata:\n\n"
                before = now
        finally:
            self._open -= 1


async def _state(sources: Sources, key: str | None) -> object:
    """Return a value that is equal to the last one as long as nothing changed; None if the workspace has ended."""
    try:
        if key is None:
            return [(record.name, record.pid, record.alive) for record in sources.records()]
        source = sources.workspace(key)
        status = await source.status()
        snapshots = [(each.name, each.created_at) for each in await source.snapshots(changes=False)]
        counts = (status.requests, status.files, status.used_bytes, status.live_bytes)
        return counts, snapshots, await _mark(source)
    except OSError:
        return None


async def _mark(source: WorkspaceSource) -> str:
    """Return what identifies the live state of a workspace in memory, which `vfsd fs` changes without a request."""
    if BackendSpec.split(source.record.backend).kind != "memory":
        return ""
    call: RemoteCall[UnsavedResult] = RemoteCall("unsaved")
    return (await source.run(call)).token
