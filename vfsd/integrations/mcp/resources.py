"""The files of the workspace as resources: vfsd://NAME/PATH, percent-encoded.

The list is bounded, because a workspace may have a million files: it has the first LISTED files by path that the tool
`glob` finds.  Every other file can be read, too.
"""

from __future__ import annotations

import mimetypes
import os
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote_to_bytes, urlsplit

from protocol.tool_messages import GlobParams
from protocol.tools.base import printable
from vfsd.client.requests import RemoteCall
from vfsd.integrations.mcp.session import Session
from vfsd.operations.fs import FsReadParams, FsReadResult
from vfsd.wire.messages import wire_path

SCHEME: Final = "vfsd"
LISTED: Final = 500
READ_BYTES: Final = 1024 * 1024  # of one resource


@dataclass(frozen=True, slots=True)
class File:
    """A file in the list."""

    uri: str
    name: str
    mime_type: str | None


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a file, and its type if its name tells it."""

    content: bytes
    mime_type: str | None

    @property
    def text(self) -> str | None:
        """The content as text; None if it is not UTF-8."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            return None


async def template(session: Session) -> str:
    """Return the URI template of all files (RFC 6570)."""
    return f"{_root((await session.record()).name)}{{+path}}"


async def listed(session: Session) -> list[File]:
    """Return the first LISTED files.  Hidden directories, node_modules and the like are left out, as `glob` does."""
    found = await session.run_tool(GlobParams(pattern="*", limit=LISTED))
    root = _root((await session.record()).name)
    return [
        File(root + quote(os.fsencode(path)), printable(path), mimetypes.guess_type(path)[0]) for path in found.paths
    ]


async def read(session: Session, uri: str) -> Content:
    """Return the content of the file at `uri`.

    FileNotFoundError and other OSErrors as for `fs.read`; ValueError for a URI of something else, and for a file that
    is longer than READ_BYTES.
    """
    path = file_path(uri, (await session.record()).name)
    pieces: list[bytes] = []
    # One byte more than is returned, so that a file that grows meanwhile is found out.
    message = FsReadParams(path=wire_path(path), limit=READ_BYTES + 1, as_bytes=True)
    page: FsReadResult = await session.send(RemoteCall("fs.read", message, on_output=pieces.append))
    content = b"".join(pieces)
    if len(content) > READ_BYTES:
        limit = f"a resource has at most {READ_BYTES} bytes"
        raise ValueError(f"{uri} has {page.total} bytes, and {limit}: read it in pages with the tool read_file")
    return Content(content, mimetypes.guess_type(os.fsdecode(path))[0])


def file_path(uri: str, workspace: str) -> bytes:
    """Return the path that `uri` names in `workspace`, relative to its root.  ValueError for another URI."""
    try:
        parts = urlsplit(uri)
        path = unquote_to_bytes(parts.path).lstrip(b"/")
        # The case of the name does not matter: URI libraries write the host in lower case.
        is_ours = parts.scheme == SCHEME and parts.netloc.casefold() == workspace.casefold()
    except ValueError:
        is_ours, path = False, b""
    if not is_ours or not path or parts.query or parts.fragment or b"\0" in path:
        raise ValueError(f"{printable(uri)} is not a file of this server: its resources are {_root(workspace)}PATH")
    return path


def _root(workspace: str) -> str:
    return f"{SCHEME}://{workspace}/"
