"""Pydantic AI: a workspace as `WorkspaceBackend` with commands, files and realpath, and its snapshots as a toolset.

    backend = VfsdBackend("/tmp/agent", exec_on_host=True)  # mounted at its first use
    agent = Agent(model, toolsets=[snapshot_toolset(backend)])
    await agent.run("Fix the tests", workspace=Workspace(backend))

Files are read and written through the mount; no path of a file operation leads outside it.  Commands run where the
workspace runs them: `exec_on_host=True` as processes of this program, which may do whatever its user may, and
`sandbox="image:REF"` in a container.

Threading: one event loop (asyncio or trio); file-system work runs in worker threads.  `_open` holds `_lock`, so that
operations that come first at the same time open one workspace.  Invariant: `ref` never changes once it is set, and is
set as soon as the workspace is mounted, even if the caller is cancelled meanwhile.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, Unpack

import anyio
from pydantic_ai import FunctionToolset, ModelRetry
from pydantic_ai.workspaces import (
    CommandResult,
    FileEntry,
    LocalWorkspaceBackend,
    SupportsCommands,
    SupportsFilesystem,
    SupportsRealpath,
    WorkspaceBackend,
    WorkspaceCommand,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)
from pydantic_ai.workspaces.protocol import validate_timeout

from protocol.adapters.host import HostFilesystem
from protocol.errors import NotMountedError
from protocol.execution.executor import ExecResult
from vfsd.client.arguments import FilePath, MountArguments, mount_options
from vfsd.client.async_connection import abandon, finish
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.workspace import launch_workspace
from vfsd.integrations.files import files_of, shell_status
from vfsd.machine.runtime import read_record
from vfsd.machine.text import link_note

T = TypeVar("T")

PROVIDER: Final = "vfsd"
_DEAD: Final = (errno.ENOTCONN, errno.ECONNABORTED)  # of system calls on the mount of a daemon that has died
_ON_HOST: Final = "on this host"  # of `Status.commands`
_OUTPUT_BYTES: Final = 10 << 20  # of each stream, as LocalWorkspaceBackend
_LONGEST_S: Final = 86_400.0
_CHANGES: Final = 200  # that the tool `changes_since` lists


class VfsdBackend(WorkspaceBackend, SupportsCommands, SupportsFilesystem, SupportsRealpath):
    """A workspace that is mounted at `path` when it is used first, or the running one that `ref` names.

    `arguments` are those of `Workspace.mount`.  `env` is added to the environment of every command.  The workspace
    stays mounted; `(await backend.workspace()).unmount()` ends it.

    WorkspaceUnavailableError from every method if the workspace was unmounted or its daemon has died.
    """

    def __init__(
        self,
        path: FilePath | None = None,
        backend: str = "memory",
        *,
        ref: WorkspaceRef | None = None,
        env: Mapping[str, str] | None = None,
        **arguments: Unpack[MountArguments],
    ) -> None:
        if (path is None) == (ref is None):
            raise TypeError("pass the path of a new mount, or the ref of a running workspace")
        if ref is not None and ref.provider != PROVIDER:
            raise ValueError(f"not a ref of {PROVIDER} but of {ref.provider!r}")
        if ref is not None and arguments:
            raise TypeError("a running workspace takes no arguments of a mount")
        self._ref = ref
        self._path = path
        self._kind = backend
        self._arguments = arguments
        self._env: Final = dict(env or {})
        self._lock: Final = anyio.Lock()
        self._workspace: AsyncWorkspace | None = None
        self._files: HostFilesystem | None = None
        self._root = ""  # the workspace's root, as commands see it
        self._local: LocalWorkspaceBackend | None = None  # runs the commands, if they run on this host

    @property
    def ref(self) -> WorkspaceRef | None:
        """The workspace's name; None until it is mounted."""
        return self._ref

    async def workspace(self) -> AsyncWorkspace:
        """Return the workspace, for its snapshots and its unmount."""
        async with self._lock:
            if self._workspace is None:
                await finish(self._open)
            assert self._workspace is not None, "opened above"
            if not self._root:
                await self._find_root(self._workspace)
        return self._workspace

    def _open(self) -> None:
        """Mount or find the workspace.  Worker thread, under the lock."""
        if self._ref is not None:
            record = read_record(self._ref.id)
            if record is None or not record.alive:
                raise _unavailable(self._ref.id)
            workspace = AsyncWorkspace(record, unmount_at_exit=False)
        else:
            assert self._path is not None, "checked when it was made"
            options = mount_options(self._path, self._kind, **self._arguments)
            workspace = AsyncWorkspace(launch_workspace(options, create=True, fork_server=True), unmount_at_exit=False)
            self._ref = WorkspaceRef(provider=PROVIDER, id=workspace.name)
        self._files = files_of(workspace)
        self._workspace = workspace

    async def _find_root(self, workspace: AsyncWorkspace) -> None:
        try:
            where = (await workspace.status()).commands
            if where is None or where == _ON_HOST:
                root = await abandon(lambda: os.path.realpath(workspace.path))
            else:
                root = (await workspace.async_executor.run(["pwd", "-P"])).stdout.decode().rstrip("\n")
        except ConnectionError as error:
            raise _unavailable(workspace.name) from error
        if where == _ON_HOST:
            self._local = LocalWorkspaceBackend(root, env={"VFSD_WORKSPACE": workspace.name, **self._env})
        self._root = root

    @asynccontextmanager
    async def _available(self) -> AsyncGenerator[AsyncWorkspace]:
        """Check that the workspace is mounted, before the block and if it fails."""
        workspace = await self.workspace()
        await abandon(lambda: _check_mounted(workspace))
        try:
            yield workspace
        except (OSError, WorkspaceTimeoutError) as error:
            if isinstance(error, OSError) and error.errno in _DEAD:
                raise _unavailable(workspace.name) from error
            await abandon(lambda: _check_mounted(workspace))
            raise

    async def working_dir(self) -> str:
        async with self._available():
            return self._root

    # -- commands -----------------------------------------------------------------------------
    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """See `SupportsCommands.run`.

        On this host background processes go on when the command has ended; elsewhere they end with it.  OSError
        (EOPNOTSUPP) if the workspace was mounted without a way to run commands.
        """
        validate_timeout(timeout)
        if isinstance(command, str) != shell:
            raise TypeError("pass a string with shell=True, or a sequence of words without")
        async with self._available() as workspace:
            if self._local is not None:
                result = await self._local.run(command, shell=shell, env=env, timeout=timeout)
            else:
                argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
                result = await self._run_elsewhere(workspace, argv, {**self._env, **(env or {})}, timeout)
            await abandon(lambda: _check_mounted(workspace))
            return result

    async def _run_elsewhere(
        self, workspace: AsyncWorkspace, argv: list[str], env: Mapping[str, str], timeout_s: float | None
    ) -> CommandResult:
        try:
            done: ExecResult = await workspace.async_executor.run(
                argv, env=env, timeout_s=min(timeout_s or _LONGEST_S, _LONGEST_S), output_limit_bytes=_OUTPUT_BYTES
            )
        except FileNotFoundError:
            return CommandResult(exit_code=127, stdout="", stderr=f"{argv[0]}: not found\n")
        stdout, stderr = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
        if done.timed_out:
            raise WorkspaceTimeoutError(f"timed out after {timeout_s:g} s: {argv[0]}", stdout=stdout, stderr=stderr)
        if done.truncated:
            raise WorkspaceOutputLimitError(
                "the command wrote more than 10 MiB: redirect its output to a file and read parts of it",
                limit=_OUTPUT_BYTES,
                stdout=stdout[: 64 << 10],
                stderr=stderr[: 64 << 10],
            )
        return CommandResult(exit_code=shell_status(done.exit_status), stdout=stdout, stderr=stderr)

    # -- files --------------------------------------------------------------------------------
    async def read_bytes(self, path: str) -> bytes:
        def read(files: HostFilesystem, name: str) -> bytes:
            with files.open_read(name) as reader:
                return reader.read()

        return await self._call(read, path)

    async def write_bytes(self, path: str, data: bytes) -> None:
        """See `SupportsFilesystem`.  Readers see either the old content or the new one."""

        def write(files: HostFilesystem, name: str) -> None:
            if name == ".":
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            files.write_bytes(name, data)

        await self._call(write, path, run=finish)

    async def stat(self, path: str) -> FileEntry:
        def stat(files: HostFilesystem, name: str) -> FileEntry:
            seen = files.stat(name)
            size = seen.size_bytes if seen.is_file else None
            return FileEntry(name=posixpath.basename(path), path=path, is_dir=seen.is_directory, size=size)

        return await self._call(stat, path)

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        def listed(files: HostFilesystem, name: str) -> list[FileEntry]:
            return [
                FileEntry(name=entry.name, path=posixpath.join(path, entry.name), is_dir=entry.is_directory, size=None)
                for entry in files.list(name)
            ]

        return await self._call(listed, path)

    async def make_dir(self, path: str) -> None:
        await self._call(lambda files, name: files.mkdir(name), path, run=finish)

    async def remove(self, path: str) -> None:
        async with self._available():
            if posixpath.commonpath((self._root, posixpath.normpath(path))) == posixpath.normpath(path):
                raise ValueError(f"{path} is the workspace or contains it, and cannot be removed")
        await self._call(lambda files, name: files.delete(name, recursive=True), path, run=finish)

    async def exists(self, path: str) -> bool:
        """Whether there is a file or directory at `path`; False outside the workspace."""
        try:
            return await self._call(lambda files, name: files.exists(name), path)
        except PermissionError:
            return False

    async def realpath(self, path: str) -> str:
        async with self._available() as workspace:
            root = self._root
            if posixpath.normpath(path) != root and not path.startswith(f"{root}/"):
                return await abandon(lambda: os.path.realpath(path))
            below = path[len(root) :].lstrip("/")
            real_root, real = await abandon(
                lambda: (os.path.realpath(workspace.path), os.path.realpath(os.path.join(workspace.path, below)))
            )
        return root + real[len(real_root) :] if real == real_root or real.startswith(f"{real_root}/") else real

    async def _call(
        self,
        work: Callable[[HostFilesystem, str], T],
        path: str,
        *,
        run: Callable[[Callable[[], T]], Awaitable[T]] = abandon,
    ) -> T:
        """Call `work` with `path` relative to the workspace, in a worker thread."""
        if not posixpath.isabs(path):
            raise ValueError(f"a path must be absolute: {path!r}")
        async with self._available():
            name = posixpath.relpath(path, self._root)
            if name == ".." or name.startswith("../"):
                raise PermissionError(errno.EACCES, "the path is outside the workspace", path)
            files = self._files
            assert files is not None, "set with the workspace"
            return await run(lambda: work(files, name))


def snapshot_toolset(backend: VfsdBackend) -> FunctionToolset[Any]:
    """Make the tools `take_snapshot`, `list_snapshots`, `changes_since` and `restore_snapshot` for a workspace."""

    async def take_snapshot(tag: str | None = None) -> str:
        """Save the state of all files of the workspace, and return the name of the snapshot.

        Args:
            tag: What the snapshot is for.
        """
        return (await (await backend.workspace()).snapshot(tag=tag)).name

    async def list_snapshots() -> list[str]:
        """List the snapshots, oldest first: the name, the time in UTC, and the tag."""
        found = await (await backend.workspace()).snapshots(changes=False)
        return [f"{each.name} {each.created_at:%Y-%m-%d %H:%M:%S} {each.tag or ''}".rstrip() for each in found]

    async def changes_since(name: str) -> str:
        """List the files that were added, modified or removed since a snapshot.

        Args:
            name: The name of the snapshot.
        """
        with_names = await _or_retry((await backend.workspace()).diff(name))
        lines = [
            f"{change.change} {change.path}{link_note(change.linked_to, change.unlinked_from)}"
            for change in with_names.changes[:_CHANGES]
        ]
        more = len(with_names.changes) - _CHANGES
        return "\n".join([*lines, *([f"... and {more} more"] if more > 0 else [])]) or "no changes"

    async def restore_snapshot(name: str) -> str:
        """Return all files of the workspace to the state of a snapshot.  Later changes are undone.

        Args:
            name: The name of the snapshot.
        """
        restored = await _or_retry((await backend.workspace()).restore(name))
        if restored.problems:
            named = ", ".join(list(restored.problems)[:10])
            return f"restored {name}, but {len(restored.problems)} paths could not be restored: {named}"
        return f"restored {name}: {restored.counts.total} paths changed"

    tools = [take_snapshot, list_snapshots, changes_since, restore_snapshot]
    return FunctionToolset(tools, sequential=True, id="vfsd-snapshots")


async def _or_retry(answer: Awaitable[T]) -> T:
    """Await an answer; an unknown or invalid name is for the model to correct."""
    try:
        return await answer
    except (FileNotFoundError, ValueError) as error:
        raise ModelRetry(str(error)) from error


def _check_mounted(workspace: AsyncWorkspace) -> None:
    """Raise WorkspaceUnavailableError unless the workspace is mounted and its daemon lives.  Worker thread."""
    try:
        workspace.check_mounted()
    except NotMountedError as error:
        raise _unavailable(workspace.name) from error


def _unavailable(name: str) -> WorkspaceUnavailableError:
    return WorkspaceUnavailableError(f"the workspace {name} is not mounted any more (`vfsd list` lists workspaces)")
