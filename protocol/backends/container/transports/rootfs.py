"""RootfsTransport: a container on this machine, by descriptors below the root directory of its first process.

It runs the host backend's code on another root: microseconds per operation, and no path leads outside.  /proc/PID/root
shows the directory with the container's own mounts: a read-only mount is read-only, and volumes are visible.  Other
mounts below the workspace directory are not entered (EXDEV), as in the host backend.

Such a root exists only while the container runs.  Descriptors would keep it alive after that, so they are closed as
soon as the first process has ended.  The files of a paused container stay accessible.

Ids: a root daemon's mount shows the container's ids, as `ls -l` inside and the agent transport do, translated by the
map of its user namespace.  An unprivileged daemon's mount shows the host's ids: in rootless Podman the user is the
container's root, and the kernel checks permissions by the ids that the mount shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import trio

from protocol.backends.container.idmap import IDENTITY
from protocol.backends.container.podman.state import ContainerState
from protocol.backends.container.transports.init_process import ContainerInit
from protocol.backends.container.transports.root_volume import RootVolume
from protocol.backends.container.transports.workdir import open_workdir

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog


class RootfsTransport:
    """Implements `protocol.backends.container.transports.transport.Transport`."""

    name: Final[Literal["rootfs"]] = "rootfs"

    def __init__(self, workdir: str, *, read_only: bool = False) -> None:
        self.supports_acl = False
        self._workdir = workdir
        self._read_only = read_only
        self._process: ContainerInit | None = None
        self._volume: RootVolume | None = None
        self._wrote = trio.Event()
        self.run = ""
        self.is_left: Callable[[], bool] = lambda: False

    helper: Final = b""
    keeps_numbers: Final = False  # its log is of one run

    def probe(self, state: ContainerState) -> None:
        """Raise OSError if this transport cannot reach the container; create a missing directory."""
        process, volume = self._opened(state)
        self.supports_acl = volume.capabilities.acls
        volume.close()
        process.close()

    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """Nothing: the volume keeps it."""

    def prepare(self, state: ContainerState) -> RootVolume:
        """See `Transport`, as for all that follow."""
        process, volume = self._opened(state)
        self._process, self._volume, self.run = process, volume, process.identity
        return volume

    async def open(self, state: ContainerState, nursery: trio.Nursery) -> RootVolume:
        volume = self._volume
        if volume is None:
            volume = await trio.to_thread.run_sync(self.prepare, state)
        nursery.start_soon(self._close_writers, volume)
        return volume

    def _on_writer(self) -> None:
        self._wrote.set()

    async def _close_writers(self, volume: RootVolume) -> None:
        """Close writers whenever the loop is idle.  A waiting task is cheaper than a callback, which wakes the loop."""
        while True:
            await self._wrote.wait()
            self._wrote = trio.Event()
            volume.close_writers()

    def _opened(self, state: ContainerState) -> tuple[ContainerInit, RootVolume]:
        process = ContainerInit(state)
        try:
            owner = process.ids.users.outside(process.user), process.ids.groups.outside(process.group)
            directory = open_workdir(process.root, self._workdir, owner)
            try:
                is_mapped = os.geteuid() == 0
                ids, user = (process.ids, (process.user, process.group)) if is_mapped else (IDENTITY, (0, 0))
                path = f"/proc/self/fd/{directory}"
                return process, RootVolume(path, ids, user, self._on_writer, read_only=self._read_only)
            finally:
                os.close(directory)
        except BaseException:
            process.close()
            raise

    def begin(self) -> None:
        """See `Transport`: the descriptors are this process's own already."""

    async def wait_lost(self) -> str:
        assert self._process is not None
        await trio.lowlevel.wait_readable(self._process.pidfd)
        return "it has stopped"

    async def close(self) -> None:
        volume, process = self._volume, self._process
        self._volume = self._process = None
        if volume is not None:
            volume.close()
        if process is not None:
            process.close()
