"""The `fs.` methods as functions of a `ToolContext`, which `FsMethods` runs.

Parameters and results are the messages of the control socket, so their paths are wire paths.

Threading: each call blocks, and runs in one thread.  `context.keep_going` is called often by the calls that only read.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from protocol.filesystem import Filesystem
from protocol.paths import DEFAULT_LIMITS, CallLimitError, encode, normalise
from protocol.search.walk import CancelCheck
from protocol.tool_messages import (
    EditFileParams,
    EditFileResult,
    GlobParams,
    GlobResult,
    GrepParams,
    GrepResult,
    RmParams,
    RmResult,
    UnreadablePath,
)
from protocol.tools import ToolContext
from protocol.tools.files import EDIT_FILE, RM, Entry, entries_of, entry_of
from protocol.tools.files import write_bytes as _write_bytes
from protocol.tools.search import GLOB, GREP
from protocol.types import DEFAULT_READ_LINES, WriteResult
from vfsd.daemon.control.calls import Encoded, absolute_path, filesystem_path
from vfsd.operations.fs import (
    FsEntry,
    FsLsParams,
    FsLsResult,
    FsReadParams,
    FsReadResult,
    FsStatParams,
    FsWriteParams,
)
from vfsd.wire.messages import InvalidParamsError, from_wire_path, wire_path

_SLICE: Final = 256  # entries of an answer that are encoded in one step: less than a millisecond
_ANSWER_BYTES: Final = 16 << 20  # of an encoded list; a longer one is "truncated"

P = TypeVar("P", EditFileParams, GlobParams, GrepParams, RmParams)


# -- reading ---------------------------------------------------------------------------------------
def list_directory(params: FsLsParams, context: ToolContext) -> Encoded:
    """`fs.ls`, encoded."""
    path = filesystem_path(params.path)
    after = b"" if params.after is None else from_wire_path(params.after)
    entries = (_entry(entry) for entry in entries_of(path, context, after=after))
    return _encoded_list(FsLsResult(_wire(normalise(path)), []), "entries", entries, params.limit, context.keep_going)


def find_files(params: GlobParams, context: ToolContext) -> Encoded:
    """`fs.glob`, encoded."""
    found = GLOB.run(_with_path(params), context)
    paths = (_wire(path) for path in found.paths)
    result = replace(found, paths=[], unreadable=_wire_paths(found.unreadable))
    return _encoded_list(result, "paths", paths, params.limit, context.keep_going)


def find_lines(params: GrepParams, context: ToolContext) -> Encoded:
    """`fs.grep`, encoded."""
    found = GREP.run(_with_path(params), context)
    matches = (replace(match, path=_wire(match.path)) for match in found.matches)
    result = replace(found, matches=[], unreadable=_wire_paths(found.unreadable))
    return _encoded_list(result, "matches", matches, params.limit, context.keep_going)


def _wire_paths(unreadable: Iterable[UnreadablePath]) -> tuple[UnreadablePath, ...]:
    return tuple(replace(each, path=_wire(each.path)) for each in unreadable)


def _encoded_list(
    result: FsLsResult | GlobResult | GrepResult,
    key: str,
    values: Iterable[object],
    limit: int,
    keep_going: CancelCheck,
) -> Encoded:
    """Encode `result` with up to `limit` of `values` as its list `key`; it is "truncated" if values remain.

    Encoded in slices, because the encoder holds the interpreter lock: 20,000 entries at once would delay the mount.
    """
    left, pieces, size = iter(values), Encoded(), 0
    while limit > 0 and size < _ANSWER_BYTES:
        keep_going()
        some = list(itertools.islice(left, min(limit, _SLICE)))
        if not some:
            break
        piece = msgspec.json.encode(some)[1:-1]
        pieces += [b",", piece] if pieces else [piece]
        limit -= len(some)
        size += len(piece)
    result = replace(result, truncated=result.truncated or next(left, None) is not None)
    head, _, tail = msgspec.json.encode(result).partition(b'"%s":[]' % key.encode())
    return Encoded([head, b'"%s":[' % key.encode(), *pieces, b"]", tail])


def stat_path(params: FsStatParams, context: ToolContext) -> FsEntry:
    """`fs.stat`."""
    return _entry(_stat(filesystem_path(params.path), context))


def _stat(path: str, context: ToolContext) -> Entry:
    try:
        return entry_of(context.filesystem.stat(path))
    except FileNotFoundError:
        # It may be a dangling symlink, which exists.
        assert context.tree is not None
        with context.tree() as tree:
            entry = tree.entry(encode(path))
        if not entry.is_symlink:
            raise
        return Entry(path=path, type="symlink", size_bytes=entry.size, mode=stat.S_IMODE(entry.mode), is_symlink=True)


def read_file(params: FsReadParams, context: ToolContext) -> tuple[bytes, FsReadResult]:
    """`fs.read`: the content, and its description."""
    try:
        return _read_page(params, context)
    except CallLimitError:
        limit = f"a read is limited to {DEFAULT_LIMITS.read_bytes} bytes"
        raise ValueError(
            f"{limit}: read a part as bytes, with an offset and a limit, or read the file in the mount"
        ) from None


def _read_page(params: FsReadParams, context: ToolContext) -> tuple[bytes, FsReadResult]:
    filesystem, path = context.filesystem, filesystem_path(params.path)
    if not params.as_bytes:
        try:
            return _read_lines(filesystem, path, params)
        except ValueError as error:
            if not isinstance(error.__cause__, UnicodeDecodeError):
                raise
            if params.offset or params.limit is not None:
                raise ValueError(f"{path} is not text, so it has no lines: read it as bytes") from None
    page = filesystem.read_bytes(path, offset=params.offset, limit=params.limit)
    result = FsReadResult(_wire(page.path), "bytes", page.offset, page.limit, page.size_bytes, page.truncated)
    return page.content, result


def _read_lines(filesystem: Filesystem, path: str, params: FsReadParams) -> tuple[bytes, FsReadResult]:
    limit = DEFAULT_READ_LINES if params.limit is None else params.limit
    page = filesystem.read(path, offset=params.offset, limit=limit)
    result = FsReadResult(_wire(page.path), "lines", page.offset, page.limit, page.total_lines, page.truncated)
    return page.content.encode(), result


# -- changing --------------------------------------------------------------------------------------
def write_file(params: FsWriteParams, content: bytes, context: ToolContext) -> WriteResult:
    """`fs.write`; `content` is what `content_of` returned."""
    path = filesystem_path(params.path)
    written = _write_bytes(path, content, context, mode=params.mode, create_parents=params.create_parents)
    return replace(written, path=_wire(written.path))


def edit_file(params: EditFileParams, context: ToolContext) -> EditFileResult:
    """`fs.edit`."""
    edited = EDIT_FILE.run(_with_path(params), context)
    return replace(edited, path=_wire(edited.path))


def remove(params: RmParams, context: ToolContext) -> RmResult:
    """`fs.rm`."""
    removed = RM.run(_with_path(params), context)
    return replace(removed, path=_wire(removed.path))


def content_of(params: FsWriteParams) -> bytes:
    """Return the content to write, which may be in a file of the host."""
    if (params.content is None) == (params.source is None):
        raise InvalidParamsError("fs.write takes one of: content, source")
    if params.content is not None:
        return params.content
    assert params.source is not None
    return _read_source(params.source)


def _read_source(wire: str) -> bytes:
    """Return the content of the host file to write."""
    path = absolute_path(wire)
    # O_NONBLOCK, because the open of a fifo waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        limit = DEFAULT_LIMITS.write_bytes
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"a write is limited to {limit} bytes: write the rest in mode append, or in the mount")
    return content


# -- to and from the wire --------------------------------------------------------------------------------
def _with_path(params: P) -> P:
    """`params` with their wire path decoded."""
    return replace(params, path=filesystem_path(params.path))


def _wire(path: str) -> str:
    return wire_path(encode(path))


def _entry(entry: Entry) -> FsEntry:
    return FsEntry(
        path=_wire(entry.path),
        type=entry.type,
        size_bytes=entry.size_bytes,
        mode=f"{entry.mode:04o}",
        modified_at=None if entry.modified_at is None else entry.modified_at.isoformat(),
        is_symlink=entry.is_symlink,
    )
