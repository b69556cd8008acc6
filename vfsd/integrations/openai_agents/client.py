"""VfsdSandboxClient: makes, resumes and ends the sandboxes of `SandboxAgent` as workspaces.

Threading: one asyncio loop; mounts and unmounts run in worker threads.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any, Final

import anyio
from agents.sandbox.errors import WorkspaceStartError
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import Dependencies, Instrumentation, SandboxSession, SandboxSessionState
from agents.sandbox.session.sandbox_client import BaseSandboxClient
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot

from vfsd.client.arguments import mount_options, running_workspace
from vfsd.client.async_connection import abandon, finish
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.workspace import Workspace, launch_workspace
from vfsd.integrations.files import name_of
from vfsd.integrations.openai_agents.session import VfsdSandboxSession
from vfsd.integrations.openai_agents.snapshot import (
    TYPE,
    VfsdSandboxClientOptions,
    VfsdSandboxSessionState,
    VfsdSnapshot,
    instance_of,
    running,
)

_END_S: Final = 30.0
_POLL_S: Final = 0.05
_DEFAULT_ROOT: Final[str] = Manifest.model_fields["root"].default


class VfsdSandboxClient(BaseSandboxClient[VfsdSandboxClientOptions | None]):
    """Sessions in `workspace`: an object, or what `Workspace.attach` takes; it stays mounted.

    Without `workspace`, each session gets a workspace of its own, as `VfsdSandboxClientOptions` say.  `delete` unmounts
    it, and discards what was not saved; it stays mounted if its state was saved in a `VfsdSnapshot`, which ends with
    it.
    """

    backend_id = TYPE

    def __init__(
        self,
        workspace: Workspace | AsyncWorkspace | str | None = None,
        *,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        _name(workspace)  # TypeError
        self._workspace: Final = workspace
        self._instrumentation: Final = instrumentation or Instrumentation()
        self._dependencies = dependencies
        self.supports_default_options = workspace is not None

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: VfsdSandboxClientOptions | None = None,
    ) -> SandboxSession:
        """See `BaseSandboxClient.create`.  The root of the manifest becomes the path that commands see.

        ValueError for options that do not go together.  OSError if the workspace cannot be mounted.
        """
        if self._workspace is not None and options is not None and options != _only_ports(options):
            raise ValueError("options of a mount do not go with a client for one workspace: pass exposed_ports only")
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        chosen = options or VfsdSandboxClientOptions()
        if self._workspace is not None:
            record = await abandon(lambda: running_workspace(_name(self._workspace)))
            workspace = AsyncWorkspace(record, unmount_at_exit=False)
            owned = is_temporary = False
        else:
            path = chosen.path or (None if manifest.root == _DEFAULT_ROOT or _in_sandbox(chosen) else manifest.root)
            workspace = await _mounted(path, chosen)
            owned, is_temporary = True, path is None
        session_id = uuid.uuid4()
        state = VfsdSandboxSessionState(
            session_id=session_id,
            manifest=manifest,
            snapshot=_bound(resolve_snapshot(snapshot, str(session_id)), workspace.name),
            exposed_ports=chosen.exposed_ports,
            workspace=workspace.name,
            mountpoint=workspace.path,
            workspace_root_owned=owned,
            is_temporary=is_temporary,
            options=chosen.model_dump(mode="json"),
        )
        try:
            return await self._session(state, workspace)
        except BaseException:
            if owned:
                await finish(lambda: _unmount(state))
            raise

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """See `BaseSandboxClient.resume`.  A workspace that has ended is mounted again, and gets the saved state.

        WorkspaceStartError if it cannot be mounted again, or if the state was saved in a `VfsdSnapshot`, which ended
        with it.
        """
        if not isinstance(state, VfsdSandboxSessionState):
            raise TypeError(f"not a state of VfsdSandboxClient: {type(state).__name__}")
        state.assert_path_grants_rebound()
        workspace = await _answering(state.workspace)
        preserved = workspace is not None and await abandon(lambda: instance_of(state.workspace)) == state.instance
        if not preserved and state.workspace_root_ready:
            await _check_saved(state)
        if workspace is None:
            if not state.workspace_root_owned:
                text = f"the workspace {state.workspace} is not running: mount it again under that name"
                raise WorkspaceStartError(path=Path(state.mountpoint), message=text)
            options = VfsdSandboxClientOptions.model_validate(state.options)
            workspace = await _mounted(state.mountpoint, options, name=state.workspace)
        session = await self._session(state, workspace)
        if preserved:
            # An image's users are in the container, which the workspace has kept.
            session._inner._set_start_state_preserved(True)  # noqa: SLF001 the SDK's hook for clients
        else:
            state.workspace_root_ready = False
        return session

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Unmount the session's workspace if the client mounted it, unless a `VfsdSnapshot` was saved in it."""
        inner = session._inner  # noqa: SLF001 the SDK's clients reach their own session so
        if not isinstance(inner, VfsdSandboxSession):
            raise TypeError(f"not a session of VfsdSandboxClient: {type(inner).__name__}")
        snapshot = inner.state.snapshot
        if not inner.state.workspace_root_owned:
            return session
        if isinstance(snapshot, VfsdSnapshot) and await snapshot.restorable():
            return session
        await finish(lambda: _unmount(inner.state))
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, VfsdSandboxSessionState)

    async def _session(self, state: VfsdSandboxSessionState, workspace: AsyncWorkspace) -> SandboxSession:
        """Make the session of `state`, and complete the state by what only the running workspace knows."""
        commands = (await workspace.status()).commands
        if commands in (None, "on this host"):
            root = await abandon(lambda: os.path.realpath(workspace.path))
        else:
            found = await workspace.async_executor.run(["pwd", "-P"])
            root = found.stdout.decode().rstrip("\n")
            if state.manifest.extra_path_grants:
                raise ValueError(f"a manifest cannot grant paths outside the workspace: commands run {commands}")
        for grant in state.manifest.extra_path_grants:
            if grant.host_path is not None:
                raise ValueError(f"host_path of the grant {grant.path} is not supported: leave it out")
        asked = state.manifest.root
        if asked not in (_DEFAULT_ROOT, root) and os.path.realpath(asked) != root:
            raise ValueError(f"the manifest's root is {asked}, but commands see the workspace at {root}")
        state.manifest = state.manifest.model_copy(update={"root": root}, deep=True)
        state.instance = await abandon(lambda: instance_of(workspace.name))
        inner = VfsdSandboxSession(state, workspace, commands)
        return self._wrap_session(inner, instrumentation=self._instrumentation)


def _name(workspace: Workspace | AsyncWorkspace | str | None) -> str | None:
    return None if workspace is None else name_of(workspace)


def _only_ports(options: VfsdSandboxClientOptions) -> VfsdSandboxClientOptions:
    return VfsdSandboxClientOptions(exposed_ports=options.exposed_ports)


def _in_sandbox(options: VfsdSandboxClientOptions) -> bool:
    """Whether commands see the workspace at another path than this host."""
    in_container = options.backend.startswith(("image:", "container:", "exec:"))
    return in_container or options.arguments.get("sandbox") is not None


def _bound(snapshot: SnapshotBase, workspace: str) -> SnapshotBase:
    if isinstance(snapshot, VfsdSnapshot) and snapshot.workspace is None:
        return snapshot.model_copy(update={"workspace": workspace})
    return snapshot


async def _mounted(path: str | None, options: VfsdSandboxClientOptions, name: str | None = None) -> AsyncWorkspace:
    """Mount a workspace at `path`, by default a new temporary directory."""
    arguments: dict[str, Any] = options.arguments
    if name is not None:
        arguments["name"] = name

    def mount() -> AsyncWorkspace:
        directory = path or tempfile.mkdtemp(prefix="vfsd-sandbox-")
        try:
            ready = launch_workspace(
                mount_options(directory, options.backend, **arguments), create=True, fork_server=True
            )
        except BaseException:
            if path is None:
                os.rmdir(directory)
            raise
        return AsyncWorkspace(ready, unmount_at_exit=False)

    def give_up(workspace: AsyncWorkspace) -> None:
        Workspace.attach(workspace.name).unmount(lazy=True)

    return await finish(mount, undo=give_up)


async def _answering(name: str) -> AsyncWorkspace | None:
    """Return the running workspace with that name; None if there is none.  Waits for the end of one that is ending."""
    with anyio.move_on_after(_END_S):
        while (workspace := await abandon(lambda: running(name))) is not None:
            try:
                await workspace.status()
            except ConnectionError:
                await anyio.sleep(_POLL_S)
            else:
                return workspace
    return None


async def _check_saved(state: VfsdSandboxSessionState) -> None:
    """Raise WorkspaceStartError if the state was saved in a `VfsdSnapshot` of a workspace that has ended."""
    if isinstance(state.snapshot, VfsdSnapshot) and not await state.snapshot.restorable():
        text = (
            f"the workspace {state.workspace} has ended, and the states that were saved in it with it: "
            "create a new session, and keep states with LocalSnapshotSpec to resume them after an unmount"
        )
        raise WorkspaceStartError(path=Path(state.mountpoint), message=text)


def _unmount(state: VfsdSandboxSessionState) -> None:
    """End a workspace that the client mounted; one that has ended already is fine."""
    if state.instance in ("", instance_of(state.workspace)):
        with contextlib.suppress(FileNotFoundError, ConnectionError):
            Workspace.attach(state.workspace).unmount(lazy=True)
    if state.is_temporary:
        with contextlib.suppress(OSError):
            os.rmdir(state.mountpoint)
