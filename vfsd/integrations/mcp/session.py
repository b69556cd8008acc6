"""Session: the workspace that a server drives.

Finds the workspace as every command does, when it is first needed.  After the daemon died, every call looks for the
workspace again, so the server survives the daemon: calls fail until the workspace is mounted again.  Once found, only a
workspace of the same name is found again, unless -w or $VFSD_WORKSPACE selects one.

Threading: the methods belong to the event loop, and may run in parallel.  `_known` is only replaced by another record
that was found, so two lookups at once are harmless.

The daemon runs the tools of `protocol.tools`: an edit is one step there, a search reads an immutable state, and a
cancelled call ends there as well.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from datetime import datetime
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from msgspec.structs import replace

from protocol.execution.executor import DEFAULT_OUTPUT_BYTES
from protocol.paths import decode
from protocol.tool_messages import EditFileParams, GlobParams, GlobResult, GrepParams, GrepResult, RmParams
from protocol.tools.base import CommandResult, PythonParams, ShellParams, command_of, command_result
from protocol.tools.files import Entry, LsParams, LsResult, ReadFileParams, WriteFileParams
from protocol.types import ReadResult, WriteResult
from vfsd.client.arguments import running_workspace, workspace_path
from vfsd.client.async_connection import AsyncControlClient
from vfsd.client.executor import INLINE_BYTES, current_umask, exec_call, readable_by_daemon
from vfsd.client.requests import RemoteCall, Requests
from vfsd.machine.runtime import WorkspaceRecord
from vfsd.machine.selection import RECORD_SUFFIX, RUNTIME_VARIABLE, WORKSPACE_VARIABLE, runtime_dir
from vfsd.operations.fs import FsEntry, FsLsParams, FsLsResult, FsReadParams, FsReadResult, FsWriteParams
from vfsd.operations.workspace import StatusResult
from vfsd.wire.messages import from_wire_path, wire_path

T = TypeVar("T")
_STATUS_S = 5.0  # for lists of tools, which must not hang with a daemon


def restore_runtime_variable(environ: MutableMapping[str, str] = os.environ, parent: str = "/run/user") -> None:
    """Set $XDG_RUNTIME_DIR if the client that started this process has left it out, and workspaces run below it.

    Clients pass few variables to their servers: those built on the SDKs of MCP pass HOME, PATH, SHELL, TERM and the
    user's name.  Then `runtime_dir` would not find the workspaces that the user mounted in a shell.
    """
    if runtime_dir(environ) not in (environ.get(name) for name in (RUNTIME_VARIABLE, "XDG_RUNTIME_DIR")):
        usual = f"{parent}/{os.geteuid()}"
        if glob.glob(f"{glob.escape(usual)}/vfsd/*{RECORD_SUFFIX}"):
            environ["XDG_RUNTIME_DIR"] = usual


class Session:
    """The workspace that `selector` selects (None: as for a command without -w)."""

    def __init__(self, selector: str | None = None) -> None:
        self._selector = selector or os.environ.get(WORKSPACE_VARIABLE) or None
        self._known: WorkspaceRecord | None = None

    async def record(self) -> WorkspaceRecord:
        """Return the workspace.  FileNotFoundError or ConnectionRefusedError, with advice, if it does not run."""
        known = self._known
        if known is None or not known.alive:
            selector = self._selector or (known.name if known is not None else None)
            found = await anyio.to_thread.run_sync(running_workspace, selector, abandon_on_cancel=True)
            found.check_alive()
            self._known = known = found
        return known

    async def run_tool(self, params: Any) -> Any:
        """Run the tool of `protocol.tools` that takes `params`, and return its result.

        ControlError for an error of the tool, ConnectionError if the daemon is gone, ValueError for a path outside the
        workspace.
        """
        record = await self.record()
        client = AsyncControlClient(record.socket)

        def wire(path: str) -> str:
            """Convert a model's path: relative to the root, or absolute and below the mountpoint.  May block."""
            return wire_path(workspace_path(path, record.mountpoint))

        if isinstance(params, WriteFileParams):
            path = await anyio.to_thread.run_sync(wire, params.path, abandon_on_cancel=True)
            return await _write(params, path, record, client)
        # An absolute path is resolved on the file system.
        call = await anyio.to_thread.run_sync(_BUILDERS[type(params)], params, wire, abandon_on_cancel=True)
        return await client.run(call)

    async def requests(self) -> Requests:
        """Return the requests for the workspace."""
        return Requests((await self.record()).mountpoint)

    async def send(self, call: RemoteCall[T]) -> T:
        """Send a request, and return its converted answer."""
        return await AsyncControlClient((await self.record()).socket).run(call)

    async def status(self) -> StatusResult | None:
        """Return the state of the workspace; None if it does not run or does not answer soon."""
        try:
            client = AsyncControlClient((await self.record()).socket, timeout_s=_STATUS_S)
            status: StatusResult = await client.call("status")
        except OSError:
            return None
        return status


# -- the tools as calls ----------------------------------------------------------------------------
_Wire = Callable[[str], str]


async def _write(
    params: WriteFileParams, path: str, record: WorkspaceRecord, client: AsyncControlClient
) -> WriteResult:
    content = params.content.encode()
    message = FsWriteParams(path=path, mode=params.mode, create_parents=params.create_parents, umask=current_umask())
    if len(content) <= INLINE_BYTES:
        written = await client.call("fs.write", replace(message, content=content))
    else:
        with readable_by_daemon(record.socket) as file:
            file.write(content)
            file.flush()
            source = wire_path(os.fsencode(os.path.abspath(file.name)))
            written = await client.call("fs.write", replace(message, source=source))
    return WriteResult(_shown(written.path), written.bytes_written, written.mode)


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
