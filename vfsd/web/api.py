"""The routes below `/api/`, which programs use too, and `/events`; `openapi` describes the former.

`/events` tells an open page that its workspace changed, with server-sent events.  A connection asks the daemon once in
`PERIOD_S` for values that change with its workspace, and sends "change" if they did.  Reads of programs count as well,
because only the daemon's count of requests covers every change.

Threading: the event loop.  `Events._open` is changed without an await in between.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import quote

import anyio
import msgspec
from msgspec.json import schema_components
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from vfsd.client.requests import RemoteCall
from vfsd.operations.fs import FsLsResult
from vfsd.operations.workspace import UnsavedResult
from vfsd.web.access import CONTENT_HEADERS
from vfsd.web.pages import HEAD_BYTES, given, image_type, number, sources_of
from vfsd.web.rendering import ProblemDocument, WrongRequestError
from vfsd.web.sources import Manifest, Source, Sources, WorkspaceSource
from vfsd.wire.options import BackendSpec

_ENTRIES: Final = 1_000
_CHUNK_BYTES: Final = 1 << 20


def _source(request: Request) -> Source:
    sources = sources_of(request)
    return sources.find(given(request, "workspace") or sources.only())


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def meta(request: Request) -> Response:
    """GET `/api/filesystem/meta`: the manifest of a state, and facts about the workspace."""
    source, snapshot = _source(request), given(request, "snapshot")
    manifest, summary = await source.summary(snapshot)
    return _json(Meta(source.key, snapshot, manifest, summary))


async def tree(request: Request) -> Response:
    """GET `/api/filesystem/tree`: the entries of one directory; `after` continues a truncated list."""
    limit = min(number(request, "limit") or _ENTRIES, _ENTRIES)
    path = request.query_params.get("path", "")
    return _json(await _source(request).listing(path, given(request, "snapshot"), given(request, "after"), limit))


async def file(request: Request) -> Response:
    """GET `/api/filesystem/file`: the bytes of a file, to be saved; with `as=image`, an image for an `<img>`."""
    source, snapshot = _source(request), given(request, "snapshot")
    path = request.query_params.get("path", "")
    entry = await source.stat(path, snapshot)
    if entry.type != "file":
        raise WrongRequestError("It is not a regular file.")
    content, size_bytes = await source.read(path, snapshot, 0, _CHUNK_BYTES)
    media_type = "application/octet-stream"
    if request.query_params.get("as") == "image":
        media_type = image_type(content[:HEAD_BYTES]) or media_type
    name = path.rpartition("/")[2]
    headers = {
        **CONTENT_HEADERS,
        "content-length": str(size_bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
    }
    pieces = _pieces(source, path, snapshot, content, size_bytes, entry.modified_at)
    return _Streamed(pieces, headers=headers, media_type=media_type)


class _Streamed(StreamingResponse):
    """A response that ends its generator with it, also if the client leaves between two pieces."""

    def __init__(self, pieces: AsyncGenerator[str | bytes], **options: Any) -> None:
        super().__init__(pieces, **options)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        async with aclosing(self._pieces):
            await super().__call__(scope, receive, send)


async def _pieces(
    source: Source, path: str, snapshot: str | None, first: bytes, size_bytes: int, modified_at: str | None
) -> AsyncGenerator[bytes]:
    """Yield the content.  ConnectionAbortedError if the file changes meanwhile: the download fails instead of mixing
    two versions."""
    piece, at = first, len(first)
    while at < size_bytes:
        yield piece
        piece, now_bytes = await source.read(path, snapshot, at, _CHUNK_BYTES)
        at += len(piece)
        if now_bytes != size_bytes or not piece:
            raise _changed(path)
    # The last piece is sent when it is certain that all pieces are of one version.
    if at > len(first) and (await source.stat(path, snapshot)).modified_at != modified_at:
        raise _changed(path)
    yield piece


def _changed(path: str) -> ConnectionAbortedError:
    return ConnectionAbortedError(f"{path} changed while it was downloaded")


async def archive(request: Request) -> ArchiveAnswer:
    """GET `/api/filesystem/archive`: a state as a ZIP archive."""
    return ArchiveAnswer(_source(request), given(request, "snapshot"))


class ArchiveAnswer:
    """An ASGI application that makes an archive of a state and sends it."""

    def __init__(self, source: Source, snapshot: str | None) -> None:
        self._source = source
        self._snapshot = snapshot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        title = self._source.title.removesuffix(".zip")
        name = f"{title}-{self._snapshot}.zip" if self._snapshot else f"{title}.zip"
        async with self._source.archive(self._snapshot) as made:
            headers = {**CONTENT_HEADERS, "vfsd-hidden-names": str(made.hidden)}
            answer = FileResponse(made.path, headers=headers, media_type="application/zip")
            answer.headers["content-disposition"] = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
            await answer(scope, receive, send)


# -- the description of the API --------------------------------------------------------------------
_JSON: Final = "application/json"
_TEXT: Final = {"type": "string"}
_BYTES: Final = {"type": "string", "format": "binary"}
_OF_STATE: Final = ("workspace", "snapshot")
_WORKSPACE: Final = (
    "Name of a running workspace, or archive:N for the N-th archive on the command line. May be left out if there is"
    " only one."
)
_PATH: Final = "Path relative to the root, in UTF-8; a backslash is doubled, and a byte that is not UTF-8 is \\xNN."
_QUERY: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "workspace": (_WORKSPACE, _TEXT),
    "snapshot": ("Name of a snapshot; without it the live state.", _TEXT),
    "path": (_PATH, _TEXT),
    "after": ("Only names that follow this one: the last name of a truncated list.", _TEXT),
    "limit": ("At most so many entries.", {"type": "integer", "minimum": 1, "maximum": _ENTRIES}),
    "as": ("image: send the media type of a PNG, JPEG, GIF or WebP image.", {"enum": ["image"]}),
}
_HIDDEN_NAMES: Final = (
    "How many names the archive lacks because the policy hides them. Names below a hidden directory are not counted."
)


class Meta(msgspec.Struct):
    """The manifest of a state, and facts.

    `summary`: of a workspace backend, mountpoint, read_only, forked_from, snapshots; of a snapshot also kind and tag.
    Of an archive: archive, its path.
    """

    workspace: str
    snapshot: str | None
    manifest: Manifest
    summary: dict[str, Any]


async def openapi(_request: Request) -> Response:
    """GET `/api/openapi.json`: the description of these routes.

    Source: OpenAPI Specification 3.1.0.
    """
    types = (Meta, FsLsResult, ProblemDocument)
    (of_meta, of_tree, of_problem), schemas = schema_components(types, ref_template="#/components/schemas/{name}")

    def route(
        summary: str, media_type: str, schema: object, query: Iterable[str] = _OF_STATE, needs: str = "", **more: object
    ) -> object:
        parameters = [
            {"name": name, "in": "query", "description": words, "schema": kind, "required": name == needs}
            for name, (words, kind) in _QUERY.items()
            if name in query
        ]
        answer = {"description": "OK", "content": {media_type: {"schema": schema}}, **more}
        failed = {"description": "The error, with the name of its errno", "content": {_JSON: {"schema": of_problem}}}
        return {"get": {"summary": summary, "parameters": parameters, "responses": {"200": answer, "default": failed}}}

    tree_query, file_query = (*_OF_STATE, "path", "after", "limit"), (*_OF_STATE, "path", "as")
    hidden = {"Vfsd-Hidden-Names": {"description": _HIDDEN_NAMES, "schema": {"type": "integer"}}}
    return _json(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "vfsd web",
                "version": "1",
                "description": "Read-only routes of `vfsd web`. It listens at 127.0.0.1 only.",
            },
            "security": [{"token": []}, {"cookie": []}],
            "paths": {
                "/api/filesystem/meta": route("The manifest of a state, and facts about the workspace", _JSON, of_meta),
                "/api/filesystem/tree": route(
                    "The entries of one directory, sorted by the bytes of their names", _JSON, of_tree, tree_query
                ),
                "/api/filesystem/file": route(
                    "The bytes of a regular file", "application/octet-stream", _BYTES, file_query, "path"
                ),
                "/api/filesystem/archive": route("A state as a ZIP archive", "application/zip", _BYTES, headers=hidden),
                "/api/openapi.json": route("This description", _JSON, {"type": "object"}, ()),
            },
            "components": {
                "securitySchemes": {
                    "token": {"type": "http", "scheme": "bearer"},
                    "cookie": {"type": "apiKey", "in": "cookie", "name": "vfsd-PORT"},
                },
                "schemas": schemas,
            },
        }
    )


# -- events ----------------------------------------------------------------------------------------
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


class _EventResponse(_Streamed):
    """A stream of events.  `ended` is called at its end, also if not even its beginning could be sent."""

    def __init__(self, stream: AsyncGenerator[str], ended: Callable[[], object]) -> None:
        super().__init__(stream, media_type="text/event-stream")
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _stream(sources: Sources, key: str | None) -> AsyncGenerator[str]:
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
