"""The tools of `protocol.tools` as calls to a daemon: the same parameters and results, on the control socket.

The daemon runs the tools: an edit is one step there, a search reads an immutable state, and a cancelled call ends there
as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import anyio.to_thread
from msgspec.structs import replace

from protocol.execution.executor import DEFAULT_OUTPUT_BYTES
from protocol.paths import decode
from protocol.tool_messages import EditFileParams, GlobParams, GlobResult, GrepParams, GrepResult, RmParams
from protocol.tools.base import CommandResult, PythonParams, ShellParams, command_of, command_result
from protocol.tools.files import Entry, LsParams, LsResult, ReadFileParams, WriteFileParams
from protocol.types import ReadResult, WriteResult
from vfsd.client.arguments import workspace_path
from vfsd.client.async_connection import AsyncControlClient
from vfsd.client.executor import INLINE_BYTES, current_umask, exec_call, readable_by_daemon
from vfsd.client.requests import RemoteCall
from vfsd.machine.runtime import WorkspaceRecord
from vfsd.operations.fs import FsEntry, FsLsParams, FsLsResult, FsReadParams, FsReadResult, FsWriteParams
from vfsd.wire.messages import from_wire_path, wire_path


class FileCalls:
    """Runs tools in the workspace of `record`.  For one event loop; calls may run in parallel."""

    def __init__(self, record: WorkspaceRecord, client: AsyncControlClient) -> None:
        self._record = record
        self._client = client

    async def run(self, params: Any) -> Any:
        """Run the tool that takes `params`, and return its result.

        ControlError for an error of the tool, ConnectionError if the daemon is gone, ValueError for a path outside the
        workspace.
        """
        if isinstance(params, WriteFileParams):
            return await self._write(params)
        build = _BUILDERS[type(params)]
        # An absolute path is resolved on the file system.
        call = await anyio.to_thread.run_sync(build, params, self._wire, abandon_on_cancel=True)
        return await self._client.run(call)

    async def _write(self, params: WriteFileParams) -> WriteResult:
        content = params.content.encode()
        path = await anyio.to_thread.run_sync(self._wire, params.path, abandon_on_cancel=True)
        message = FsWriteParams(
            path=path, mode=params.mode, create_parents=params.create_parents, umask=current_umask()
        )
        if len(content) <= INLINE_BYTES:
            written = await self._client.call("fs.write", replace(message, content=content))
        else:
            with readable_by_daemon(self._record.socket) as file:
                file.write(content)
                file.flush()
                source = wire_path(os.fsencode(os.path.abspath(file.name)))
                written = await self._client.call("fs.write", replace(message, source=source))
        return WriteResult(_shown(written.path), written.bytes_written, written.mode)

    def _wire(self, path: str) -> str:
        """Convert a model's path: relative to the root, or absolute and below the mountpoint.  May block."""
        return wire_path(workspace_path(path, self._record.mountpoint))


_Wire = Callable[[str], str]


def _shown(wire: str) -> str:
    return decode(from_wire_path(wire))


def _all_shown(found: Iterable[Any]) -> list[Any]:
    return [replace(each, path=_shown(each.path)) for each in found]


def _ls(params: LsParams, wire: _Wire) -> RemoteCall[LsResult]:
    def result(answer: FsLsResult) -> LsResult:
        return LsResult(path=_shown(answer.path), entries=list(map(_entry, answer.entries)), truncated=answer.truncated)

    return RemoteCall("fs.ls", FsLsParams(path=wire(params.path), limit=params.limit), result)


def _entry(entry: FsEntry) -> Entry:
    return Entry(
        path=_shown(entry.path),
        type=entry.type,
        size_bytes=entry.size_bytes,
        mode=int(entry.mode, 8),
        modified_at=None if entry.modified_at is None else datetime.fromisoformat(entry.modified_at),
        is_symlink=entry.is_symlink,
    )


def _read(params: ReadFileParams, wire: _Wire) -> RemoteCall[ReadResult]:
    pieces: list[bytes] = []

    def result(answer: FsReadResult) -> ReadResult:
        content = b"".join(pieces).decode()
        path = _shown(answer.path)
        return ReadResult(content, path, answer.total, answer.offset, answer.limit, answer.truncated)

    message = FsReadParams(path=wire(params.path), offset=params.offset, limit=params.limit)
    return RemoteCall("fs.read", message, result, on_output=pieces.append)


def _edit(params: EditFileParams, wire: _Wire) -> RemoteCall[Any]:
    return RemoteCall("fs.edit", replace(params, path=wire(params.path)), _with_shown_path)


def _rm(params: RmParams, wire: _Wire) -> RemoteCall[Any]:
    return RemoteCall("fs.rm", replace(params, path=wire(params.path)), _with_shown_path)


def _with_shown_path(answer: Any) -> Any:
    return replace(answer, path=_shown(answer.path))


def _glob(params: GlobParams, wire: _Wire) -> RemoteCall[GlobResult]:
    def result(answer: GlobResult) -> GlobResult:
        paths = list(map(_shown, answer.paths))
        return replace(answer, paths=paths, unreadable=tuple(_all_shown(answer.unreadable)))

    return RemoteCall("fs.glob", replace(params, path=wire(params.path)), result)


def _grep(params: GrepParams, wire: _Wire) -> RemoteCall[GrepResult]:
    def result(answer: GrepResult) -> GrepResult:
        unreadable = tuple(_all_shown(answer.unreadable))
        return replace(answer, matches=_all_shown(answer.matches), unreadable=unreadable)

    return RemoteCall("fs.grep", replace(params, path=wire(params.path)), result)


def _command(params: ShellParams | PythonParams, wire: _Wire) -> RemoteCall[CommandResult]:
    argv, stdin = command_of(params)
    call = exec_call(argv, "", None, params.timeout_s, DEFAULT_OUTPUT_BYTES, stdin)
    call.params.cwd = wire(params.cwd)
    return RemoteCall(
        call.method, call.params, lambda answer: command_result(call.result(answer)), on_output=call.on_output
    )


_BUILDERS: Final[Mapping[type[Any], Callable[[Any, _Wire], RemoteCall[Any]]]] = {
    LsParams: _ls,
    ReadFileParams: _read,
    EditFileParams: _edit,
    GlobParams: _glob,
    GrepParams: _grep,
    RmParams: _rm,
    ShellParams: _command,
    PythonParams: _command,
}
