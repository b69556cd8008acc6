"""Sandbox: a container of vfsd's own that sees the workspace at /workspace and runs its commands.

The mount itself is bound into the container, so both places show one file system with one kernel cache: writes and
restores are visible at the other place at once.

Needs Podman on this machine.  Rootless Podman has its own mount namespace, which receives later mounts only if the
system's mounts are shared (as systemd makes them).  The sandbox checks that the container sees the mount, because it
would otherwise see an empty directory.  To the kernel, users of the container other than its root are other users:
they need --allow-other.

A mount that a container also sees stays alive after it is unmounted here.  So the container is removed before an
unmount (`leave`), and after another program has unmounted the workspace (`attend`).  A killed daemon leaves the
container; the next daemon removes it (`protocol.backends.container.podman.ownership`).

Threading: the serving loop.  Worker threads wait for Podman, which may itself access the mount.  Importing this module
imports Podman's client.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import select
from collections.abc import AsyncIterator
from typing import Final

import trio

from protocol.backends.container.exec.runner import ContainerCommandRunner
from protocol.backends.container.podman.ownership import OwnedContainer, create_owned
from protocol.backends.container.podman.service import Container, ContainerNotFoundError, PodmanService
from protocol.backends.container.podman.spec import PIDS_LIMIT, ContainerMount, ContainerSpec
from protocol.execution.executor import Command
from protocol.execution.runner import Process
from vfsd.machine.logs import log_failure
from vfsd.machine.mountinfo import mount_at, mounts
from vfsd.wire.options import ContainerOptions, WorkspaceOptions

WORKDIR: Final = "/workspace"
# SELinux otherwise denies containers access to FUSE mounts of the host (podman-run(1), --security-opt label).
_OPTIONS: Final = {"security_opt": ["label=disable"]}

_logger = logging.getLogger(__name__)


class Sandbox:
    """Runs commands in a container of `image`, which holds the mount and releases it before an unmount.

    The container is created when it is first needed, and again if it is gone.
    """

    def __init__(self, workspace: WorkspaceOptions, image: str, options: ContainerOptions) -> None:
        self._workspace = workspace
        self._image = image
        self._options = options
        self._service = PodmanService(options.podman_url)
        self._owned: OwnedContainer | None = None
        self._runner: ContainerCommandRunner | None = None
        self._lock = trio.Lock()
        self._running = 0
        self._is_over = False

    @property
    def where(self) -> str:
        """See `protocol.execution.runner.CommandRunner`."""
        name = "not created" if self._owned is None else self._owned.container.name
        return f"in a sandbox of {self._image} (container {name})"

    async def begin(self) -> None:
        """Create the container if there is none.  OSError: no Podman, no such image, it does not start, ..."""
        async with self._lock:
            if self._is_over:
                raise OSError(errno.ECANCELED, "the workspace is being unmounted")
            owned = self._owned
            if owned is not None and not await trio.to_thread.run_sync(self._is_running, owned.container):
                await trio.to_thread.run_sync(self._remove)
            if self._owned is None:
                # Shielded: a container that was created must be recorded.
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._create)

    @contextlib.asynccontextmanager
    async def started(self, command: Command) -> AsyncIterator[Process]:
        """See `protocol.execution.runner.CommandRunner`."""
        await self.begin()
        assert self._runner is not None
        self._running += 1
        try:
            async with self._runner.started(command) as process:
                yield process
        finally:
            self._running -= 1

    def check_idle(self) -> None:
        """Raise OSError (EBUSY) while a command runs."""
        if self._running:
            running = "a command runs" if self._running == 1 else f"{self._running} commands run"
            raise OSError(
                errno.EBUSY, f"busy: {running} in the sandbox; end it, or use --lazy", self._workspace.mountpoint
            )

    async def leave(self) -> None:
        """Remove the container, which ends its commands and releases the mount.  The next command creates another."""
        async with self._lock:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._remove)

    async def attend(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Create the container, and remove it when any process has unmounted the workspace here."""
        await self.begin()
        task_status.started()
        # poll(2) on mountinfo reports changes as POLLPRI.  The loop waits only for readability, so epoll converts it.
        with open("/proc/self/mountinfo", "rb") as mountinfo, select.epoll() as changes:
            changes.register(mountinfo.fileno(), select.EPOLLPRI | select.EPOLLERR)
            workspace = self._workspace
            while (mount := mount_at(workspace.mountpoint)) is not None and mount.workspace == workspace.name:
                await trio.lowlevel.wait_readable(changes.fileno())
                changes.poll(0)
        self._is_over = True
        try:
            await self.leave()
        except OSError as error:
            log_failure(_logger, "removing the sandbox", error, level=logging.WARNING)

    # -- in worker threads -----------------------------------------------------------------------------
    @staticmethod
    def _is_running(container: Container) -> bool:
        try:
            return container.inspect().running
        except ContainerNotFoundError:
            return False

    def _create(self) -> None:
        workspace, options = self._workspace, self._options
        if not self._service.is_local:
            reason = (
                f"a sandbox needs a Podman on this machine, which sees the mount; {self._service.address} is remote"
            )
            raise OSError(errno.EOPNOTSUPP, reason)
        spec = ContainerSpec(
            self._image,
            network=options.network or "none",
            pids_limit=options.pids_limit or PIDS_LIMIT,
            mounts=[ContainerMount(workspace.mountpoint, WORKDIR, read_only=workspace.read_only)],
            memory_bytes=options.memory_bytes,
            options={**_OPTIONS, "hostname": _hostname(workspace.name)},
        )
        owned = create_owned(self._service, spec, workspace.name, "sandbox")
        container = owned.container
        try:
            self._check_sees_mount(container)
        except BaseException:
            owned.remove()
            raise
        self._owned = owned
        self._runner = ContainerCommandRunner(lambda: container, WORKDIR, owned=True)
        _logger.info("commands will run in the container %s", container.name, extra={"operation": "sandbox"})

    def _check_sees_mount(self, container: Container) -> None:
        there = [mount for mount in mounts(container.inspect().pid) if mount.mountpoint == WORKDIR]
        if not any(mount.workspace == self._workspace.name for mount in there):
            reason = (
                "the sandbox does not see the mount: Podman has a mount namespace of its own, which does not receive "
                "new mounts; make the system's mounts shared (mount --make-rshared /), then restart its service"
            )
            raise OSError(errno.ENXIO, reason)

    def _remove(self) -> None:
        owned = self._owned
        if owned is not None:
            owned.remove()  # recorded until it is gone, so that the next attempt removes it
            self._owned = self._runner = None
            _logger.info("removed the container %s", owned.container.name, extra={"operation": "sandbox"})


def _hostname(name: str) -> str:
    """A valid host name (RFC 1123) from the workspace's name, for the prompt in the sandbox."""
    return re.sub("[^A-Za-z0-9-]+", "-", name).strip("-") or "sandbox"
