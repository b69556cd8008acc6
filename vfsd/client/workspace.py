"""The Python API: a workspace mounted, or found, and driven; `Workspace` for plain code, `AsyncWorkspace` for trio.

    with Workspace.mount("/tmp/work") as ws:
        agent.run(cwd=ws.path)
        ws.snapshot("turn-1")
        agent.run(cwd=ws.path)
        for change in ws.diff("turn-1").changes:
            print(change.change, change.path)
        ws.restore("turn-1")
        ws.export("out.zip")

What fails raises an `OSError` of Python's own subclass for its errno: `FileNotFoundError` for a snapshot that
is not there, `FileExistsError` for a name in use, `ConnectionError` when the daemon is gone.  Paths given are
relative to the workspace's root, or absolute and under its mountpoint.

A `Workspace` may be used from any thread: each call has a connection of its own.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Awaitable, Callable, Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

import trio

from vfsd.client import launch
from vfsd.client import requests as calls
from vfsd.client.async_connection import AsyncControlClient
from vfsd.client.connection import ControlClient
from vfsd.client.daemon_exit import daemon_end
from vfsd.client.executor import WorkspaceExecutor
from vfsd.client.mount_arguments import FilePath, MountArguments, mount_options, running_workspace
from vfsd.client.paths import UserPath
from vfsd.client.requests import RemoteCall
from vfsd.client.results import Applied, Diff, Exported, Imported, Patch, Restored, Snapshot, Status, Unmounted
from vfsd.machine.mounts import mount_at
from vfsd.machine.runtime import WorkspaceRecord
from vfsd.wire.messages import ProgressReport
from vfsd.wire.options import EngineChoice, MountOptions

if TYPE_CHECKING:
    from protocol.filesystem import Filesystem
    from vfsd.kernel.in_process import MountedFilesystem

__all__ = ["AsyncWorkspace", "Opening", "Workspace"]

T = TypeVar("T")
OnProgress = Callable[[ProgressReport], None]


class _Base:
    """What both twins know of their workspace, without any I/O of their own."""

    def __init__(self, *, name: str, path: str, socket: str, pid: int, owned: bool) -> None:
        """Use `mount` or `attach`.  An `owned` workspace is unmounted when its `with` block ends."""
        self._name = name
        self._path = path
        self._socket = socket
        self._pid = pid
        self._owned = owned
        self._unmounted: Unmounted | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def path(self) -> str:
        """The mountpoint, absolute: what an agent gets as its current directory."""
        return self._path

    @property
    def executor(self) -> WorkspaceExecutor:
        """Runs commands where `vfsd exec` does: `ws.executor.run(["make", "test"])`, also for `protocol.tools`."""
        return WorkspaceExecutor(self._socket)

    @property
    def pid(self) -> int:
        """The process id of the daemon."""
        return self._pid

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} at {self._path!r}>"

    @classmethod
    def _started(cls, ready: launch.Ready) -> Self:
        return cls(name=ready.name, path=ready.mountpoint, socket=ready.socket, pid=ready.pid, owned=True)

    @classmethod
    def _found(cls, record: WorkspaceRecord) -> Self:
        return cls(name=record.name, path=record.mountpoint, socket=record.socket, pid=record.pid, owned=False)


class Workspace(_Base):
    """A running workspace, driven by plain (blocking) calls.  Made by `mount` or `attach`."""

    @overload
    @classmethod
    def mount(
        cls,
        path: FilePath,
        *,
        filesystem: Filesystem,
        name: str | None = None,
        engine: EngineChoice = "auto",
        allow_other: bool = False,
        create: bool = True,
    ) -> MountedFilesystem: ...

    @overload
    @classmethod
    def mount(
        cls,
        path: FilePath,
        backend: str = "memory",
        *,
        create: bool = True,
        **arguments: Unpack[MountArguments],
    ) -> Self: ...

    @classmethod
    def mount(
        cls,
        path: FilePath,
        backend: str = "memory",
        *,
        filesystem: Filesystem | None = None,
        create: bool = True,
        **arguments: Unpack[MountArguments],
    ) -> Self | MountedFilesystem:
        """Mount a workspace at the empty directory `path`, and unmount it when the `with` block ends.

        `create` makes the directory, and its parents, if it is missing; it stays after the unmount.
        `backend` is "memory"; or "overlay:DIR", changes in memory over a directory that is only read, without what
        the patterns `exclude` hide (gitignore's syntax), and with `include` only the files that those match; or
        "host:DIR", a directory of the host that others may change too: what they do is seen after `cache_timeout_s`
        seconds at the latest (None: 1); or "container:NAME", the directory `workdir` (None: "/workspace") of a
        container of the Podman at `podman_url` (None: your own), reached by `transport`; or "image:REF", a container
        that is made for the workspace, with `network` (None: without), and removed with it.
        With `xattrs=False` the mount has no extended attributes and no ACLs, and each new file costs a request less.
        `archive` is a ZIP file to begin with; the limits are in bytes and in inodes, None for none.
        With `filesystem`, an object with the methods of `protocol.Filesystem`, that is mounted instead, served by
        a thread of this process (`vfsd.kernel.in_process`); the arguments of a backend make no sense then.
        `store` is the directory where the snapshots of "host:DIR" are kept, outside of DIR, None for the user's own.
        `exec_on_host` lets callers of the control socket run commands in the mount, as the daemon's user; `sandbox`,
        "image:REF", in a container of that image, which sees the workspace at /workspace, may have `pids_limit`
        processes and `memory_bytes`, and lives as long as the workspace.  With `snapshot_each` a snapshot follows each
        command.
        ValueError for an argument that makes no sense; OSError for what fails: FileExistsError or
        OSError(EBUSY, ENOTEMPTY, ...) for a place that cannot be mounted on.
        """
        options = mount_options(path, backend, **arguments)
        if filesystem is not None:
            plain = MountOptions(
                options.mountpoint, options.name, engine=options.engine, allow_other=options.allow_other
            )
            if options != plain:
                raise ValueError("a filesystem object takes no backend, archive, limits, read_only or exec_on_host")
            return _mount_object(filesystem, options, create=create)
        return cls._started(_launch(options, create=create))

    @classmethod
    def attach(cls, selector: str | None = None) -> Self:
        """A workspace that runs already: by its name, or by a path in it.

        None picks $VFSD_WORKSPACE, else the one that the current directory is in, else the only one running.
        The end of a `with` block leaves it mounted.  FileNotFoundError where there is none.
        """
        return cls._found(running_workspace(selector))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._owned:
            return
        try:
            unmounted = self.unmount(lazy=True)
        except ConnectionError:
            if _still_mounted(self._path):
                raise
        else:
            _warn_of_holders(unmounted)

    # -- snapshots --------------------------------------------------------------------------------
    def snapshot(
        self, name: str | None = None, *, tag: str | None = None, on_progress: OnProgress | None = None
    ) -> Snapshot:
        """Take a snapshot; without a name it gets one ("snap-1", ...).  FileExistsError for a name in use.

        `on_progress` is called now and then with how far it is, here and below: it may take a while where the
        snapshots are kept on disk, as those of "host:DIR".
        """
        return self._run(calls.snapshot(name, tag), on_progress)

    def snapshots(self, *, changes: bool = True) -> list[Snapshot]:
        """The snapshots, oldest first; `changes` counts what each changed against the one before it."""
        return self._run(calls.snapshots(changes=changes))

    def drop(self, name: str) -> None:
        """Delete snapshot `name`.  FileNotFoundError.  An export or diff that reads it goes on."""
        self._run(calls.drop(name))

    def restore(
        self,
        source: FilePath,
        paths: Iterable[UserPath] = (),
        *,
        of: str | None = None,
        store: FilePath | None = None,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Restored:
        """Put the workspace, or `paths` in it, back to a snapshot (a `str`) or a ZIP archive (a path object).

        Programs that have files open go on; files that are the same are not touched.  The state before is
        kept as a safety snapshot, which `undo` brings back.  `dry_run` only tells what would change.

        With `of`, the backend of another workspace ("host:DIR"), the snapshot is that one's, from `store` (None: the
        daemon's own).
        """
        return self._run(calls.restore(source, paths, self._path, of=of, store=store, dry_run=dry_run), on_progress)

    def undo(self, *, dry_run: bool = False, on_progress: OnProgress | None = None) -> Restored:
        """Go one restore, import or apply back, as far as there are any; the state now is kept for `redo`.

        FileNotFoundError where there is none left.  Of an apply, what it wrote stays where it is.
        """
        return self._run(calls.undo(dry_run=dry_run), on_progress)

    def redo(self, *, dry_run: bool = False, on_progress: OnProgress | None = None) -> Restored:
        """Go forward again after `undo`; the state now is kept for `undo`.  FileNotFoundError where there is nothing.

        What was written after the step, before it was undone, comes back with it.
        """
        return self._run(calls.redo(dry_run=dry_run), on_progress)

    def apply(self, paths: Iterable[UserPath] = (), *, dry_run: bool = False, force: bool = False) -> Applied:
        """Write what an overlay holds into the directory below it, below `paths` or all of it.

        Where others changed it there since, nothing is written unless with `force`; see `Applied.conflicts`.
        """
        return self._run(calls.apply(paths, self._path, dry_run=dry_run, force=force))

    def discard(self, paths: Iterable[UserPath] = (), *, dry_run: bool = False) -> Restored:
        """Drop what an overlay holds, below `paths` or all of it; `undo` brings it back."""
        return self._run(calls.discard(paths, self._path, dry_run=dry_run))

    def diff(
        self,
        a: str | None = None,
        b: str | None = None,
        paths: Iterable[UserPath] = (),
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
    ) -> Diff:
        """What changed from snapshot `a` (None: the newest) to `b` (None: the live state).

        Without what the patterns `exclude` match (gitignore's syntax); with `include` only the files that those match.
        """
        return self._run(calls.diff(a, b, paths, self._path, include=include, exclude=exclude))

    def patch(
        self,
        a: str | None = None,
        b: str | None = None,
        paths: Iterable[UserPath] = (),
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        include_git: bool = False,
    ) -> Patch:
        """The same as a patch, which `git apply` takes, binary files too; see `Patch.problems` for what it lacks.

        `include_git`: with what is in `.git`, which `git apply` rejects.
        """
        return self._run(
            calls.patch(a, b, paths, self._path, include=include, exclude=exclude, include_git=include_git)
        )

    # -- archives ---------------------------------------------------------------------------------
    def export(
        self,
        path: FilePath,
        *,
        snapshot: str | None = None,
        overwrite: bool = False,
        changes_only: bool = False,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        on_progress: OnProgress | None = None,
    ) -> Exported:
        """Write the live state, or a snapshot, as the ZIP file `path`; whole, or not at all.

        `changes_only`: of an overlay, what differs from the directory below.  `include` and `exclude` are as in `diff`.

        FileExistsError where there is a file and `overwrite` is not set.  `on_progress` is called now and
        then with how far it is.
        """
        call = calls.export(
            path, snapshot, overwrite=overwrite, changes_only=changes_only, include=include, exclude=exclude
        )
        return self._run(call, on_progress)

    def import_archive(self, path: FilePath, *, on_progress: OnProgress | None = None) -> Imported:
        """Lay the content of the ZIP file `path` over the workspace; all of it, or none.

        OSError(EINVAL) names what is wrong with an archive that is refused.  `undo` takes it back.
        """
        return self._run(calls.import_archive(path), on_progress)

    # -- the workspace itself ---------------------------------------------------------------------
    def status(self) -> Status:
        """What the workspace is, and what it holds now."""
        return self._run(calls.status())

    def unmount(self, *, lazy: bool = False) -> Unmounted:
        """Unmount, and wait for the daemon's end; what only a memory workspace held is gone.

        It does not ask, as the end of a `with` block does not: changes that were not exported, or not applied by
        `vfsd apply`, are discarded.
        A workspace that was unmounted already is left at that.

        OSError(EBUSY) names who has files open in it; `lazy` detaches it all the same.
        """
        if self._unmounted is None:
            with daemon_end(self._pid) as wait_ended:
                self._unmounted = self._run(calls.unmount(lazy=lazy))
                if not self._unmounted.holders:  # else it serves them until they are done
                    wait_ended()
        return self._unmounted

    def _run(self, call: RemoteCall[T], on_progress: OnProgress | None = None) -> T:
        with ControlClient(self._socket) as client:
            answer = client.call(call.method, call.params, on_progress=on_progress, on_output=call.on_output)
        return call.answer(answer)


class Opening:
    """A workspace that is about to be there: `async with` it, or `await` it."""

    def __init__(self, open_it: Callable[[], Awaitable[AsyncWorkspace]]) -> None:
        self._open_it = open_it
        self._workspace: AsyncWorkspace | None = None

    def __await__(self) -> Generator[Any, Any, AsyncWorkspace]:
        return self._open_it().__await__()

    async def __aenter__(self) -> AsyncWorkspace:
        self._workspace = await self
        return await self._workspace.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._workspace is not None, "entered before it is left"
        await self._workspace.__aexit__(kind, error, at)


class AsyncWorkspace(_Base):
    """`Workspace` for trio: the same methods, awaited.  `async with AsyncWorkspace.mount("/tmp/work") as ws:`.

    Cancelling a call ends it in the daemon too.
    """

    @classmethod
    def mount(
        cls,
        path: FilePath,
        backend: str = "memory",
        *,
        create: bool = True,
        **arguments: Unpack[MountArguments],
    ) -> Opening:
        """As `Workspace.mount`.  Not cancelled half-way: it waits until the mount answers, or has failed."""
        options = mount_options(path, backend, **arguments)

        async def start() -> AsyncWorkspace:
            return cls._started(await trio.to_thread.run_sync(lambda: _launch(options, create=create)))

        return Opening(start)

    @classmethod
    def attach(cls, selector: str | None = None) -> Opening:
        """As `Workspace.attach`."""

        async def find() -> AsyncWorkspace:
            return cls._found(await trio.to_thread.run_sync(running_workspace, selector))

        return Opening(find)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if not self._owned:
            return
        try:
            # Also when cancelled: nobody else will unmount it.
            with trio.CancelScope(shield=True):
                unmounted = await self.unmount(lazy=True)
        except ConnectionError:
            if _still_mounted(self._path):
                raise
        else:
            _warn_of_holders(unmounted)

    # -- snapshots --------------------------------------------------------------------------------
    async def snapshot(
        self, name: str | None = None, *, tag: str | None = None, on_progress: OnProgress | None = None
    ) -> Snapshot:
        """As `Workspace.snapshot`."""
        return await self._run(calls.snapshot(name, tag), on_progress)

    async def snapshots(self, *, changes: bool = True) -> list[Snapshot]:
        """As `Workspace.snapshots`."""
        return await self._run(calls.snapshots(changes=changes))

    async def drop(self, name: str) -> None:
        """As `Workspace.drop`."""
        await self._run(calls.drop(name))

    async def restore(
        self,
        source: FilePath,
        paths: Iterable[UserPath] = (),
        *,
        of: str | None = None,
        store: FilePath | None = None,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Restored:
        """As `Workspace.restore`."""
        return await self._run(
            calls.restore(source, paths, self._path, of=of, store=store, dry_run=dry_run), on_progress
        )

    async def undo(self, *, dry_run: bool = False, on_progress: OnProgress | None = None) -> Restored:
        """As `Workspace.undo`."""
        return await self._run(calls.undo(dry_run=dry_run), on_progress)

    async def redo(self, *, dry_run: bool = False, on_progress: OnProgress | None = None) -> Restored:
        """As `Workspace.redo`."""
        return await self._run(calls.redo(dry_run=dry_run), on_progress)

    async def apply(self, paths: Iterable[UserPath] = (), *, dry_run: bool = False, force: bool = False) -> Applied:
        """As `Workspace.apply`."""
        return await self._run(calls.apply(paths, self._path, dry_run=dry_run, force=force))

    async def discard(self, paths: Iterable[UserPath] = (), *, dry_run: bool = False) -> Restored:
        """As `Workspace.discard`."""
        return await self._run(calls.discard(paths, self._path, dry_run=dry_run))

    async def diff(
        self,
        a: str | None = None,
        b: str | None = None,
        paths: Iterable[UserPath] = (),
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
    ) -> Diff:
        """As `Workspace.diff`."""
        return await self._run(calls.diff(a, b, paths, self._path, include=include, exclude=exclude))

    async def patch(
        self,
        a: str | None = None,
        b: str | None = None,
        paths: Iterable[UserPath] = (),
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        include_git: bool = False,
    ) -> Patch:
        """As `Workspace.patch`."""
        return await self._run(
            calls.patch(a, b, paths, self._path, include=include, exclude=exclude, include_git=include_git)
        )

    # -- archives ---------------------------------------------------------------------------------
    async def export(
        self,
        path: FilePath,
        *,
        snapshot: str | None = None,
        overwrite: bool = False,
        changes_only: bool = False,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        on_progress: OnProgress | None = None,
    ) -> Exported:
        """As `Workspace.export`."""
        call = calls.export(
            path, snapshot, overwrite=overwrite, changes_only=changes_only, include=include, exclude=exclude
        )
        return await self._run(call, on_progress)

    async def import_archive(self, path: FilePath, *, on_progress: OnProgress | None = None) -> Imported:
        """As `Workspace.import_archive`."""
        return await self._run(calls.import_archive(path), on_progress)

    # -- the workspace itself ---------------------------------------------------------------------
    async def status(self) -> Status:
        """As `Workspace.status`."""
        return await self._run(calls.status())

    async def unmount(self, *, lazy: bool = False) -> Unmounted:
        """As `Workspace.unmount`."""
        if self._unmounted is None:
            with daemon_end(self._pid) as wait_ended:
                self._unmounted = await self._run(calls.unmount(lazy=lazy))
                if not self._unmounted.holders:  # else it serves them until they are done
                    await trio.to_thread.run_sync(wait_ended)
        return self._unmounted

    async def _run(self, call: RemoteCall[T], on_progress: OnProgress | None = None) -> T:
        async with AsyncControlClient(self._socket) as client:
            answer = await client.call(call.method, call.params, on_progress=on_progress, on_output=call.on_output)
        return call.answer(answer)


# -- shared ---------------------------------------------------------------------------------------
def _launch(options: MountOptions, *, create: bool) -> launch.Ready:
    if create:
        # What else is there, a dead mount that can be replaced included, `launch` knows and says better.
        with contextlib.suppress(FileExistsError):
            os.makedirs(options.mountpoint)
    return launch.launch(options)


def _mount_object(filesystem: Filesystem, options: MountOptions, *, create: bool) -> MountedFilesystem:
    # Start-up: who drives a daemon needs no engine in this process.
    from vfsd.kernel.in_process import MountedFilesystem  # noqa: PLC0415

    if create:
        os.makedirs(options.mountpoint, exist_ok=True)
    return MountedFilesystem(
        filesystem, options.mountpoint, name=options.name, engine=options.engine, allow_other=options.allow_other
    )


def _still_mounted(path: str) -> bool:
    """Whether a daemon that does not answer left its mount behind; without, somebody else unmounted it."""
    return mount_at(path) is not None


def _warn_of_holders(unmounted: Unmounted) -> None:
    """A mount that was left while programs used it: they go on in it, unseen, until they end."""
    if unmounted.holders:
        text = f"{unmounted.mountpoint} was detached while in use by {', '.join(unmounted.holders)}"
        warnings.warn(text, ResourceWarning, stacklevel=3)
