"""Session: the workspace that a server drives.

Finds the workspace as every command does, when it is first needed.  After the daemon died, every call looks for the
workspace again, so the server survives the daemon: calls fail until the workspace is mounted again.  Once found, only a
workspace of the same name is found again, unless -w or $VFSD_WORKSPACE selects one.

Threading: the methods belong to the event loop, and may run in parallel.  `_known` is only replaced by another record
that was found, so two lookups at once are harmless.
"""

from __future__ import annotations

import glob
import os
from collections.abc import MutableMapping
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from vfsd.client.arguments import running_workspace
from vfsd.client.async_connection import AsyncControlClient
from vfsd.client.requests import RemoteCall, Requests
from vfsd.integrations.mcp.calls import FileCalls
from vfsd.machine.runtime import WorkspaceRecord
from vfsd.machine.selection import RECORD_SUFFIX, RUNTIME_VARIABLE, WORKSPACE_VARIABLE, runtime_dir
from vfsd.operations.workspace import StatusResult

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
        """Run the tool of `protocol.tools` that takes `params`, and return its result."""
        record = await self.record()
        return await FileCalls(record, AsyncControlClient(record.socket)).run(params)

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
