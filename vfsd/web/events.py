"""Events: tells an open page that its workspace changed, with server-sent events.

A connection asks the daemon once in `PERIOD_S` for values that change with its workspace, and sends "change" if they
did.  Reads of programs count as well, because only the daemon's count of requests covers every change.

Threading: the event loop.  `_open` is changed without an await in between.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from vfsd.client.requests import RemoteCall
from vfsd.operations.workspace import UnsavedResult
from vfsd.web.pages import given, sources_of
from vfsd.web.sources import Sources, WorkspaceSource
from vfsd.wire.options import BackendSpec

PERIOD_S: Final = 1.0
_MOST_OPEN: Final = 64


class Events:
    """The open connections of one server, at most `_MOST_OPEN`.  One counts from its request to its end."""

    def __init__(self) -> None:
        self._open = 0

    async def answer(self, request: Request) -> Response:
        """GET `/events`: events of one workspace, or without `workspace` of the list of workspaces."""
        if self._open >= _MOST_OPEN:
            raise HTTPException(503, "Too many pages are open.")
        key, sources = given(request, "workspace"), sources_of(request)
        if key is not None:
            sources.workspace(key)
        self._open += 1
        return _EventResponse(_stream(sources, key), self._ended)

    def _ended(self) -> None:
        self._open -= 1


class _EventResponse(StreamingResponse):
    """A stream of events.  `ended` is called at its end, also if not even its beginning could be sent."""

    def __init__(self, stream: AsyncIterator[str], ended: Callable[[], object]) -> None:
        super().__init__(stream, media_type="text/event-stream")
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _stream(sources: Sources, key: str | None) -> AsyncIterator[str]:
    before = await _state(sources, key)
    yield "event: ready\ndata:\n\n"
    while True:
        await anyio.sleep(PERIOD_S)
        now = await _state(sources, key)
        # A comment shows a connection that has ended.
        yield ":\n\n" if now == before else "event: change\ndata:\n\n"
        before = now


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
