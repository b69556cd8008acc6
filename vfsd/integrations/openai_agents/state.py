"""The options of a sandbox and the state of its session, which a later process resumes.  Both convert to JSON."""

from __future__ import annotations

from typing import Any, Final, Literal

from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from pydantic import ConfigDict, Field

from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.machine.runtime import read_record

TYPE: Final = "vfsd"


class VfsdSandboxClientOptions(BaseSandboxClientOptions):
    """How a session's workspace is mounted: `path`, `backend` and the other arguments are those of `Workspace.mount`.

    `path` None: a new temporary directory.  The agent can run commands only with `exec_on_host=True` or a `sandbox`.
    `exposed_ports` are ports that the agent's servers listen on.
    """

    # Besides the fields, the arguments of `Workspace.mount`; it checks them when it mounts.
    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["vfsd"] = TYPE
    path: str | None = None
    backend: str = "memory"
    exposed_ports: tuple[int, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `Workspace.mount` besides the path and the backend."""
        return dict(self.model_extra or {})


class VfsdSandboxSessionState(SandboxSessionState):
    """The workspace of a session.

    `workspace_root_owned`: the client mounted the workspace for the session, with `options`.  `instance` identifies
    the daemon, because another workspace may later have the same name.
    """

    type: Literal["vfsd"] = TYPE
    workspace: str
    mountpoint: str
    instance: str = ""
    workspace_root_owned: bool = False
    is_temporary: bool = False  # the mountpoint was made for the session
    options: dict[str, Any] = Field(default_factory=dict)


def running(name: str | None) -> AsyncWorkspace | None:
    """Return the running workspace with that name; None if there is none.  Reads files."""
    record = read_record(name) if name else None
    return None if record is None or not record.alive else AsyncWorkspace(record, unmount_at_exit=False)


def instance_of(name: str) -> str:
    """Return a text that identifies the run of a workspace; "" if it does not run.  Reads files."""
    record = read_record(name)
    return "" if record is None or not record.alive else f"{record.started_at} {record.pid}"
