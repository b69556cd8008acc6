"""The routes below `/api/`, which programs use too; `static/openapi.json` describes them.

Threading: the event loop.  No state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Final
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from vfsd.web.access import CONTENT_HEADERS
from vfsd.web.images import HEAD_BYTES, image_type
from vfsd.web.pages import given, number, sources_of
from vfsd.web.problems import WrongRequestError
from vfsd.web.sources import Source

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
    return _json({"workspace": source.key, "snapshot": snapshot, "manifest": manifest, "summary": summary})


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
    return StreamingResponse(pieces, headers=headers, media_type=media_type)


async def _pieces(
    source: Source, path: str, snapshot: str | None, first: bytes, size_bytes: int, modified_at: str | None
) -> AsyncIterator[bytes]:
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


async def openapi(_request: Request) -> Response:
    """GET `/api/openapi.json`."""
    return Response(files("vfsd.web").joinpath("static/openapi.json").read_bytes(), media_type="application/json")
