"""Sandbox: a container of ours that sees the workspace at /workspace, in which its commands run.

The mount itself is bound into the container: one file system, one cache of the kernel's, seen at two places.  So what
is written at either, and a restore, is seen at the other at once.

Needs a Podman on this machine.  Rootless it has a mount namespace of its own, which gets mounts made after it
where the system's mounts are shared (as systemd has them); that the container sees the mount is looked at, since it
would otherwise see an empty directory.  Users of the container other than its root are other users to the kernel:
they need --allow-other.

A mount that a container sees too goes on when it is unmounted here.  So before an unmount the container is removed
(`leave`), and when somebody else has unmounted it (`attend`).  A daemon that was killed leaves it, until the next
one removes it (`protocol.backends.container.podman.ownership`).

Threading: the serving loop; what waits for Podman, which itself may look at the mount, is done by worker threads.
Importing this module imports Podman's client.
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
from protocol.backends.container.podman.errors import ContainerNotFoundError
from protocol.backends.container.podman.ownership import create_owned
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.podman.spec import PIDS_LIMIT, ContainerSpec
from protocol.backends.container.podman.state import ContainerMount
from protocol.execution.executor import Command
from protocol.execution.runner import Process
from vfsd.machine.logs import log_failure
from vfsd.machine.mountinfo import mount_at, mounts
from vfsd.wire.options import ContainerOptions, WorkspaceOptions

__all__ = ["WORKDIR", "Sandbox"]

WORKDIR: Final = "/workspace"
# SELinux lets no container touch a FUSE mount of the host otherwise (podman-run(1), --security-opt label).
_OPTIONS: Final = {"security_opt": ["label=disable"]}

_logger = logging.getLogger(__name__)


class Sandbox:
    """Runs a workspace's commands in a container of `image`; a `Place`.

    The container is made when it is first needed, and again when it is gone.
    """

    def __init__(self, workspace: WorkspaceOptions, image: str, options: ContainerOptions) -> None:
        self._workspace = workspace
        self._image = image
        self._options = options
        self._service = PodmanService(options.podman_url)
        self._container: Container | None = None
        self._runner: ContainerCommandRunner | None = None
        self._changing = trio.Lock()
        self._running = 0
        self._is_over = False

    @property
    def where(self) -> str:
        """See `Place`."""
        name = "to be made again" if self._container is None else self._container.name
        return f"in a sandbox of {self._image} (container {name})"

    async def begin(self) -> None:
        """Have the container.  OSError: Podman cannot be reached, there is no such image, it cannot be started, ..."""
        async with self._changing:
            if self._is_over:
                raise OSError(errno.ESHUTDOWN, "the workspace is being unmounted")
            if self._container is not None and not await trio.to_thread.run_sync(self._is_well, self._container):
                await trio.to_thread.run_sync(self._remove)
            if self._container is None:
                # Shielded: a container that was made must be known.
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._create)

    @contextlib.asynccontextmanager
    async def started(self, command: Command) -> AsyncIterator[Process]:
        """See `Place`."""
        await self.begin()
        assert self._runner is not None
        self._running += 1
        try:
            async with self._runner.started(command) as process:
                yield process
        finally:
            self._running -= 1

    def check_idle(self) -> None:
        """See `Leaving`."""
        if self._running:
            running = "a command runs" if self._running == 1 else f"{self._running} commands run"
            raise OSError(
                errno.EBUSY, f"busy: {running} in the sandbox; end it, or use --lazy", self._workspace.mountpoint
            )

    async def leave(self) -> None:
        """Remove the container, so that the mount is seen here only.  The next command would make another."""
        async with self._changing:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._remove)

    async def attend(self, *, task_status: trio.TaskStatus[None]) -> None:
        """See `Leaving`."""
        await self.begin()
        task_status.started()
        # poll(2) on mountinfo tells of changes as POLLPRI; the loop waits for readability only, which an epoll gives.
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
    def _is_well(container: Container) -> bool:
        try:
            return container.inspect().running
        except ContainerNotFoundError:
            return False

    def _create(self) -> None:
        workspace, options = self._workspace, self._options
        if not self._service.is_local:
            reason = (
                f"a sandbox needs a Podman on this machine, which sees the mount; {self._service.address} is elsewhere"
            )
            raise OSError(errno.EOPNOTSUPP, reason)
        spec = ContainerSpec(
            self._image,
            network=options.network or "none",
            pids_limit=options.pids_limit or PIDS_LIMIT,
            mounts=[ContainerMount("bind", workspace.mountpoint, WORKDIR, read_only=workspace.read_only)],
            memory_bytes=options.memory_bytes,
            options={**_OPTIONS, "hostname": _hostname(workspace.name)},
        )
        container = create_owned(self._service, spec, workspace.name)
        try:
            self._check_sees_mount(container)
        except BaseException:
            container.remove()
            raise
        self._container = container
        self._runner = ContainerCommandRunner(lambda: container, WORKDIR, owned=True)
        _logger.info("commands run in the container %s", container.name, extra={"operation": "sandbox"})

    def _check_sees_mount(self, container: Container) -> None:
        there = [mount for mount in mounts(container.inspect().pid) if mount.mountpoint == WORKDIR]
        if not any(mount.workspace == self._workspace.name for mount in there):
            reason = (
                "the sandbox does not see the mount: Podman has a mount namespace of its own, to which new mounts do "
                "not come; make the system's mounts shared (mount --make-rshared /), then restart its service"
            )
            raise OSError(errno.ENXIO, reason)

    def _remove(self) -> None:
        container = self._container
        if container is not None:
            container.remove()  # known until it is gone: the next attempt is for it too
            self._container = self._runner = None
            _logger.info("removed the container %s", container.name, extra={"operation": "sandbox"})


def _hostname(name: str) -> str:
    """What a prompt in there shows; a name of a workspace is one of a host as good as always (RFC 1123)."""
    return re.sub("[^A-Za-z0-9-]+", "-", name).strip("-") or "sandbox"
