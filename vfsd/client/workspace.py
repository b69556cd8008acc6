"""The Python API: mount a workspace, or attach to a running one.

`Workspace` has blocking methods; `vfsd.client.async_workspace.AsyncWorkspace` has the same ones for asyncio and trio.

    with Workspace.mount("/tmp/work") as ws:
        agent.run(cwd=ws.path)
        ws.snapshot("turn-1")
        agent.run(cwd=ws.path)
        for change in ws.diff("turn-1").changes:
            print(change.change, change.path)
        ws.restore("turn-1")
        ws.export("out.zip")

Failures raise Python's own `OSError` subclass for the errno: `FileNotFoundError` for a snapshot that does not exist,
`FileExistsError` for a name in use, `ConnectionError` if the daemon is gone.  Paths are relative to the workspace's
root, or absolute and under its mountpoint.

A `Workspace` may be used from any thread: each call opens a connection of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack, overload

from msgspec.structs import replace

from protocol.errors import NotMountedError
from protocol.linux.syscalls import MountId, open_mount
from vfsd.client import launch
from vfsd.client.arguments import (
    FilePath,
    MountArguments,
    attach_options,
    fork_target,
    mount_options,
    running_workspace,
)
from vfsd.client.connection import END_TIMEOUT_S, HELD_TIMEOUT_S, ControlClient, daemon_end
from vfsd.client.executor import WorkspaceExecutor
from vfsd.client.requests import RemoteCall, Requests
from vfsd.client.results import Unmounted, Upgraded
from vfsd.client.transaction import OpenTransactions, Transaction
from vfsd.machine.mountinfo import directory_id, mount_at, workspace_mount
from vfsd.machine.runtime import WorkspaceRecord, instance_at, process_start_ticks, read_record
from vfsd.wire.options import MountOptions, Ready

if TYPE_CHECKING:
    from datetime import datetime

    from protocol.filesystem import Filesystem
    from vfsd.client.arguments import UserPath
    from vfsd.client.filesystem import WorkspaceFilesystem
    from vfsd.client.log import LoggedChange, Missed
    from vfsd.kernel.in_process import MountedFilesystem

P = ParamSpec("P")
T = TypeVar("T")
Kind = type[BaseException] | None


class WorkspaceBase:
    """The properties that `Workspace` and `AsyncWorkspace` share.  Only `filesystem` sends requests to the daemon."""

    def __init__(self, daemon: Ready | WorkspaceRecord, *, unmount_at_exit: bool) -> None:
        """Use `mount` or `attach`.  With `unmount_at_exit` the end of a `with` block unmounts the workspace."""
        self._daemon = daemon
        self._unmount_at_exit = unmount_at_exit
        self._requests: Final = Requests(daemon.mountpoint)
        self._unmounted: Unmounted | None = None
        self.instance: Final = instance_at(daemon.socket)  # calls reach no other workspace that has the name by now
        self._mount_id: MountId | None = None  # of this process's mount namespace; None if it is not mounted there
        with contextlib.suppress(NotMountedError):
            place = daemon.mountpoint
            self._mount_id = directory_id(place) if daemon.is_attached else workspace_mount(place, daemon.name)
        self._filesystem: WorkspaceFilesystem | None = None
        self._transactions: Final = OpenTransactions()
        # A finalizer rather than `__del__`: at the interpreter's exit it runs while the modules still work.
        self._left = weakref.finalize(self, _warn_of_left, repr(self), daemon, os.getpid()) if unmount_at_exit else None

    def _not_left(self) -> None:
        """Record that the workspace was unmounted, or is unmounted by a `with` block."""
        if self._left is not None:
            self._left.detach()

    @property
    def name(self) -> str:
        return self._daemon.name

    @property
    def socket(self) -> str:
        """The path of the control socket."""
        return self._daemon.socket

    @property
    def path(self) -> str:
        """The mountpoint, absolute: an agent's working directory."""
        return self._daemon.mountpoint

    @property
    def executor(self) -> WorkspaceExecutor:
        """The executor for commands, which run where `vfsd exec` runs them: `ws.executor.run(["make", "test"])`.

        `protocol.tools` accepts it, too.
        """
        return WorkspaceExecutor(self._daemon.socket, self.instance)

    @property
    def filesystem(self) -> WorkspaceFilesystem:
        """The workspace as a `protocol.SnapshotableFilesystem`, whose snapshots are the workspace's own.

        Its methods block.  The first use makes system calls on the mount.  NotMountedError, a ConnectionError, from it
        and from its methods once the workspace is not mounted any more or its daemon has died.
        """
        # Start-up: archives and search, which this imports, are as much again as the rest of the client.
        from vfsd.client.filesystem import WorkspaceFilesystem  # noqa: PLC0415

        if self._filesystem is None:
            self._filesystem = WorkspaceFilesystem(self.path, self._daemon.socket, self.mount_id)
        return self._filesystem

    @property
    def mount_id(self) -> MountId:
        """The mount that this object was made for.  NotMountedError if the workspace was not mounted then.

        A path object takes it to refuse any other directory at `path`: `HostFilesystem(ws.path, mount=ws.mount_id)`.
        """
        if self._mount_id is None:
            raise NotMountedError(self.path)
        return self._mount_id

    def check_mounted(self) -> None:
        """Raise NotMountedError if the workspace is not mounted any more, or its daemon has died.  Asks the daemon."""
        os.close(open_mount(self.path, self.mount_id, asks=True))
        if self._daemon.is_attached and process_start_ticks(self._newest_pid()) is None:
            raise NotMountedError(self.path, "the daemon of this attached directory has ended")

    @property
    def pid(self) -> int:
        """The process id of the daemon."""
        return self._daemon.pid

    def _newest_pid(self) -> int:
        """Return the process id of the daemon that serves now: another program may have upgraded it."""
        record = read_record(self.name)
        return record.pid if record is not None and record.socket == self.socket else self.pid

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} at {self.path!r}>"


# -- methods made from requests -------------------------------------------------------------------
def _blocking(build: Callable[Concatenate[Requests, P], RemoteCall[T]]) -> Callable[Concatenate[Workspace, P], T]:
    """Make a method of `Workspace` that sends the request of a method of `Requests`, with its parameters and help."""

    def method(workspace: Workspace, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return workspace._run(build(workspace._requests, *args, **kwargs))  # noqa: SLF001 a method of that class

    return described(method, build)


def described(method: Callable[P, T], build: Callable[..., Any]) -> Callable[P, T]:
    """Give `method` the name, the docstring and the signature of `build`, without RemoteCall[...] around the result."""
    signature = inspect.signature(build)
    result = str(signature.return_annotation).removeprefix("RemoteCall[").removesuffix("]")
    functools.update_wrapper(method, build)
    method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    return method


class Workspace(WorkspaceBase):
    """A running workspace with blocking methods.  Made by `mount` or `attach`."""

    @overload
    @classmethod
    def mount(
        cls,
        path: FilePath,
        *,
        filesystem: Filesystem,
        name: str | None = None,
        engine: str = "auto",
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
        fork_server: bool = True,
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
        fork_server: bool = True,
        **arguments: Unpack[MountArguments],
    ) -> Self | MountedFilesystem:
        """Mount a workspace at the empty directory `path`, and unmount it when the `with` block ends.

        Without a `with` block, call `unmount`.  A workspace that is still mounted when its object is collected, or at
        the program's exit, keeps running, and Python warns (ResourceWarning).

        `create` makes the directory and its parents if they do not exist; they remain after the unmount.
        With `fork_server=False` the daemon is a new interpreter, and no fork server is started (docs/backends.md).

        `backend` is one of:

        - "memory";
        - "overlay:DIR": changes are held in memory over a directory that is only read.  Paths that match the patterns
          `exclude` (gitignore's syntax) are hidden; with `include` only the files that match are shown.
        - "overlay:FILE.zip", "overlay:snapshot:NAME[@DIR]": the same over an archive, or over a snapshot in the `store`
          (docs/backends.md).
        - "host:DIR": a directory of the host, which other programs may change too.  Their changes are visible after
          `cache_timeout_s` seconds at the latest (None: 1).
        - "container:NAME": the directory `workdir` (None: "/workspace") of a container of the Podman at `podman_url`
          (None: the user's own), reached by `transport`.
        - "image:REF": the same in a container that is created for the workspace, with `network` (None: no network), and
          removed with it.
        - "exec:COMMAND": the directory `workdir` (None: "/workspace") where COMMAND, such as "ssh HOST python3", starts
          a Python (docs/backends.md).

        With `xattrs=False` the mount has no extended attributes and no ACLs, and each new file costs one request less.
        With `cache="writeback"` (memory and overlay only) the kernel collects writes and sends them later.
        `archive` is a ZIP file with the initial content.  The limits are in bytes and in inodes.  None: `max_memory` is
        half of the machine's memory or of the cgroup's limit, `max_bytes` is `max_memory`, inodes are unlimited.
        `store` is the directory in which snapshots of "host:DIR" and of containers are kept (None: the user's own); it
        must be outside DIR.

        `exec_on_host` lets clients of the control socket run commands in the mount, as the daemon's user.  `sandbox`
        ("image:REF") runs them in a container of that image instead, which sees the workspace at /workspace, may have
        `pids_limit` processes and `memory_bytes`, and is removed with the workspace.  With `snapshot_each` the daemon
        takes a snapshot after each command.

        With `filesystem`, an object with the methods of `protocol.Filesystem`, a thread of this process serves that
        object (`vfsd.kernel.in_process`); the arguments of a backend are then invalid.

        `protect` and `hide` are patterns in gitignore's syntax: no program can change files that `protect` matches, and
        none sees those that `hide` matches, root included (docs/security.md).

        `name` is the workspace's name (None: made from `path`), and `engine` the FUSE implementation.  `read_only`
        refuses all changes, and `allow_other` lets other users enter.  `log_level` and `log_format` are of the daemon's
        log.  docs/backends.md lists all arguments with the options of `vfsd mount`, and which of them go together.

        ValueError for invalid arguments, TypeError for an unknown one or one of a wrong type.  OSError for failures:
        FileExistsError or OSError(EBUSY, ENOTEMPTY, ...) if nothing can be mounted at `path`.
        """
        options = mount_options(path, backend, **arguments)
        if filesystem is not None:
            return _mount_object(filesystem, options, create=create)
        return cls(launch_workspace(options, create=create, fork_server=fork_server), unmount_at_exit=True)

    @classmethod
    def attach_directory(cls, path: FilePath, *, name: str | None = None, store: FilePath | None = None) -> Self:
        """Return a workspace without a mount, the directory `path` itself, for where FUSE is missing (`vfsd attach`).

        It has snapshots, restores and comparisons as "host:DIR", in `store` (None: the user's own), but no policy, no
        log and no commands.  The end of a `with` block, and `unmount`, leave the directory as it is.

        ValueError for invalid arguments.  OSError for a directory that cannot be attached: EBUSY if a workspace serves
        a part of it, or a directory above it.
        """
        options = attach_options(path, name=name, store=store)
        return cls(launch_workspace(options, create=False, fork_server=False), unmount_at_exit=True)

    @classmethod
    def attach(cls, selector: str | None = None) -> Self:
        """Return a running workspace, selected by its name or by a path in it.

        None selects $VFSD_WORKSPACE, else the workspace that contains the current directory.
        The end of a `with` block leaves it mounted.  FileNotFoundError if there is none.
        """
        return cls(running_workspace(selector), unmount_at_exit=False)

    def __enter__(self) -> Self:
        self._not_left()
        return self

    def __exit__(self, kind: Kind, error: BaseException | None, at: TracebackType | None) -> None:
        if self._unmount_at_exit:
            with unmounting(self):
                self.unmount(lazy=True)

    def _run(self, call: RemoteCall[T]) -> T:
        with ControlClient(self._daemon.socket, instance=self.instance) as client:
            return client.run(call)

    def transaction(self, tag: str | None = None) -> Transaction:
        """Return a context manager that restores the workspace if its block raises, and keeps the changes otherwise.

        The exception continues.  Transactions nest, and `undone` of a transaction has what its restore changed.  The
        block's snapshot has the tag `tag` until the block ends.  `vfsd.client.transaction` describes threads, and what
        happens if the restore fails.

        RuntimeError on entry if another thread or task has a transaction open in this workspace.
        """
        return Transaction(self._requests, self._transactions, tag, self._run)

    def fork(self, path: FilePath, *, name: str | None = None, snapshot: str | None = None) -> Self:
        """Return a new workspace at `path` that starts as a copy of this one, or of its snapshot `snapshot`.

        It shares this workspace's memory until either changes, so making it takes milliseconds.  It has the options and
        the snapshots of this one, a daemon of its own, and `name` (None: made from `path`).  A missing directory `path`
        is made; its parent must exist.  The end of a `with` block unmounts the fork.

        A fork of a directory or a container is an overlay in memory over a snapshot in the store: see docs/forks.md.

        OSError: EOPNOTSUPP for a memory or overlay workspace whose engine is not native; ENOMEM; FileExistsError or
        OSError(EBUSY, ENOTEMPTY, ...) if nothing can be mounted at `path`.  FileNotFoundError if there is no such
        snapshot.
        """
        with fork_target(path, name) as (chosen, mountpoint):
            ready = self._run(self._requests.fork(chosen, mountpoint, snapshot))
            return type(self)(ready, unmount_at_exit=True)

    snapshot = _blocking(Requests.snapshot)
    snapshots = _blocking(Requests.snapshots)
    drop = _blocking(Requests.drop)
    restore = _blocking(Requests.restore)
    undo = _blocking(Requests.undo)
    redo = _blocking(Requests.redo)
    apply = _blocking(Requests.apply)
    discard = _blocking(Requests.discard)
    merge = _blocking(Requests.merge)
    adopt = _blocking(Requests.adopt)
    conflicts = _blocking(Requests.conflicts)
    revert = _blocking(Requests.revert)
    diff = _blocking(Requests.diff)
    patch = _blocking(Requests.patch)
    export = _blocking(Requests.export)
    import_archive = _blocking(Requests.import_archive)
    log = _blocking(Requests.log)
    policy = _blocking(Requests.policy)
    status = _blocking(Requests.status)

    @contextlib.contextmanager
    def follow(
        self, *paths: UserPath, since: str | datetime | None = None, by: int | str | None = None
    ) -> Generator[Iterator[LoggedChange | Missed]]:
        """Return a context manager for an iterator over the changes from now on, or with `since` from then on.

        The arguments are those of `log`.  The iterator waits for the next change; ConnectionError when the workspace is
        unmounted.  A write is yielded when no further write to the file has followed for a second or two.  Instead of
        changes that this program reads too slowly, it yields `Missed`.  If the daemon dies and its keeper starts
        another one, it yields `Missed(0)` and goes on: changes of the last seconds before may be missing.
        """
        # Start-up: few programs follow.
        from vfsd.client.log import Following, followed, watched_change  # noqa: PLC0415

        def opened(following: Following) -> contextlib.closing[Generator[bytes]]:
            return contextlib.closing(ControlClient(following.socket, instance=self.instance).stream(following.call))

        following = Following(self._daemon, self._requests.watch(paths, since, by).params)
        with contextlib.closing(followed(following, opened)) as records:
            next(records)  # the watch has begun
            yield map(watched_change, records)

    @contextlib.contextmanager
    def label(self, label: str) -> Generator[None]:
        """Return a context manager: in its block, changes in the log have `label`.

        It applies to changes by this process and by what it starts in the block, which keeps it.  `label` has at most
        200 characters.  A block inside another one replaces its label, and removes it at the end.
        """
        self._run(self._requests.label(label))
        try:
            yield
        finally:
            self._run(self._requests.label(None))

    def upgrade(self) -> Upgraded:
        """Replace the workspace's daemon by one of the version of vfsd that this program has imported.

        Programs that use the workspace wait for a moment.  OSError if it cannot be upgraded now: the old daemon serves
        on.  If another program upgrades it at the same time, this waits, and does nothing.  ConnectionError, with what
        serves now, if the old daemon dies before the new one has everything.
        """
        # Start-up: upgrades are rare.
        from vfsd.client.log import after_lost_upgrade  # noqa: PLC0415

        old = self._newest_pid()
        request = self._requests.upgrade(old)
        try:
            upgraded = self._run(request)
        except ConnectionResetError:
            upgraded = request.result(after_lost_upgrade(self.name, self.path, old))
        self._daemon = replace(self._daemon, pid=upgraded.pid)
        return upgraded

    def unmount(self, *, lazy: bool = False) -> Unmounted:
        """Unmount the workspace and wait until its daemon has exited.

        Changes that were not exported, or not applied with `vfsd apply`, are discarded without a question, as at the
        end of a `with` block.  A second call returns the result of the first.

        OSError(EBUSY) names the processes that have files open in the workspace; `lazy` detaches it nevertheless.
        """
        if self._unmounted is None:
            with daemon_end(self._newest_pid()) as wait_ended:
                self._unmounted = self._run(self._requests.unmount(lazy=lazy))
                self._not_left()
                wait_ended(end_timeout_s(self._unmounted))
        return self._unmounted


# -- shared ---------------------------------------------------------------------------------------
def _warn_of_left(workspace: str, daemon: Ready | WorkspaceRecord, mounted_by: int) -> None:
    """Warn that nothing unmounted a workspace whose object has gone; the workspace keeps running.

    Makes no system call on the mount.  Only the process `mounted_by` warns, and none of its forks.
    """
    if os.getpid() != mounted_by or process_start_ticks(daemon.pid) is None:
        return
    if not daemon.is_attached and mount_at(daemon.mountpoint) is None:
        return
    text = f"{workspace} was left mounted: use it in a `with` block, or call unmount()"
    warnings.warn(text, ResourceWarning, stacklevel=2)


def launch_workspace(options: MountOptions, *, create: bool, fork_server: bool) -> Ready:
    """Start a daemon and wait until its mount answers; with `create`, make the missing directories first."""
    if create:
        # `launch` reports anything else at that path, and replaces a dead mount.
        with contextlib.suppress(FileExistsError):
            os.makedirs(options.workspace.mountpoint)
    return launch.launch(options, fork_server=fork_server)


def _mount_object(filesystem: Filesystem, options: MountOptions, *, create: bool) -> MountedFilesystem:
    # Start-up: a program that uses a daemon needs no engine in its own process.
    from vfsd.kernel.in_process import MountedFilesystem  # noqa: PLC0415

    workspace, kernel = options.workspace, options.kernel
    plain = MountOptions.of(workspace.mountpoint, workspace.name, engine=kernel.engine, allow_other=kernel.allow_other)
    if options != plain:
        raise ValueError(
            "backend, archive, limits, read_only and exec_on_host cannot be given with a filesystem object"
        )
    if create:
        os.makedirs(workspace.mountpoint, exist_ok=True)
    return MountedFilesystem(
        filesystem,
        workspace.mountpoint,
        name=workspace.name,
        engine=kernel.engine,
        allow_other=kernel.allow_other,
    )


def end_timeout_s(unmounted: Unmounted) -> float:
    """Return how long to wait for the daemon's end, after which the workspace's name is free again."""
    return HELD_TIMEOUT_S if unmounted.holders else END_TIMEOUT_S


@contextlib.contextmanager
def unmounting(workspace: WorkspaceBase) -> Generator[None]:
    """Handle the end of a `with` block, in which the caller unmounts `workspace` lazily.

    A workspace that something else has unmounted is not an error.  A warning names the programs that still use the
    detached mount, or the container that could not be removed.
    """
    try:
        yield
    except NotMountedError:
        pass
    except ConnectionError:
        if mount_at(workspace.path) is not None:
            raise
    unmounted = workspace._unmounted  # noqa: SLF001 a function of the same module
    if unmounted and unmounted.holders:
        text = f"{workspace.path} was detached while in use by {', '.join(unmounted.holders)}"
        warnings.warn(text, ResourceWarning, stacklevel=4)
    if unmounted and unmounted.left:
        warnings.warn(f"{workspace.path} was unmounted, but {unmounted.left}", ResourceWarning, stacklevel=4)
