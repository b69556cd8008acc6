"""Helpers of the adapters of agent frameworks."""

from __future__ import annotations

from typing import Final

from protocol.adapters.host import HostFilesystem
from protocol.errors import check_type
from protocol.paths import CallLimits
from vfsd.client.workspace import WorkspaceBase

# Of programs rather than of an agent's calls: frameworks have limits of their own.
NO_LIMITS: Final = CallLimits(depth=1 << 20, segment=255, read_bytes=1 << 62, write_bytes=1 << 62)


def files_of(workspace: WorkspaceBase) -> HostFilesystem:
    """The files of a workspace, for an adapter.  NotMountedError if it is not mounted, also from each call later."""
    name_of(workspace)
    return HostFilesystem(workspace.path, limits=NO_LIMITS, mount=workspace.mount_id)


def name_of(workspace: WorkspaceBase | str) -> str:
    """The name, or the path, of the workspace that an adapter was given.  TypeError for anything else."""
    if isinstance(workspace, WorkspaceBase):
        return workspace.name
    check_type(workspace, str, "a workspace is a Workspace, an AsyncWorkspace or a name")
    return workspace


def shell_status(exit_status: int) -> int:
    """Return the status that a shell reports: 128 + N for a command that signal N killed."""
    return 128 - exit_status if exit_status < 0 else exit_status
