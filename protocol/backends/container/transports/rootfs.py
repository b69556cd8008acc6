"""RootfsTransport: a container on this machine, by descriptors below the root directory of its first process.

The host backend's code on another root: microseconds an operation, and its proof that nothing leads out.  Through
/proc/PID/root the directory is seen with the container's own mounts: a read-only one is read-only, a volume is there.
Another mount below the workspace directory is not entered (EXDEV), as in the host backend.

Only while the container runs is there such a root; descriptors keep it alive after that, so they are closed as
soon as its first process has ended.  A paused container's files are there all the same.

Which ids the mount shows: a root daemon's shows those of the container, as `ls -l` inside does and as the agent
transport does, translated by its user namespace's map.  An unprivileged daemon's shows the host's: to a rootless
Podman its own user is the container's root, and the kernel checks permissions by what is shown.
"""

from __future__ import annotations

import os
from typing import Final, Literal

import trio

from protocol.backends.container.podman.state import ContainerState
from protocol.backends.container.transports.init_process import ContainerInit
from protocol.backends.container.transports.mapped_volume import MappedVolume
from protocol.backends.container.transports.root_volume import RootVolume, Soon
from protocol.backends.container.transports.workdir import open_workdir
from protocol.volume import Volume

__all__ = ["RootfsTransport"]


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

    def probe(self, state: ContainerState) -> None:
        """OSError where this transport cannot reach the container; the directory is made where it is missing."""
        process, volume = self._opened(state)
        self.supports_acl = volume.keeps_acls if isinstance(volume, MappedVolume) else volume.capabilities.acls
        volume.close()
        process.close()

    async def open(self, state: ContainerState, nursery: trio.Nursery) -> Volume:
        """See `Transport`."""
        self._process, volume = await trio.to_thread.run_sync(self._opened, state, self._soon)
        self._volume = volume
        nursery.start_soon(self._close_writers, volume)
        return volume

    def _soon(self) -> None:
        self._wrote.set()

    async def _close_writers(self, volume: RootVolume) -> None:
        """Each time the loop gets round to it.  A task that waits costs less than a callback: that wakes a sleeper."""
        while True:
            await self._wrote.wait()
            self._wrote = trio.Event()
            volume.close_writers()

    def _opened(self, state: ContainerState, soon: Soon | None = None) -> tuple[ContainerInit, RootVolume]:
        process = ContainerInit(state)
        try:
            owner = process.ids.users.outside(process.user), process.ids.groups.outside(process.group)
            directory = open_workdir(process.root, self._workdir, owner)
            try:
                return process, self._volume_of(process, f"/proc/self/fd/{directory}", soon)
            finally:
                os.close(directory)
        except BaseException:
            process.close()
            raise

    def _volume_of(self, process: ContainerInit, path: str, soon: Soon | None) -> RootVolume:
        if os.geteuid() == 0 and (not process.ids.is_identity or process.user or process.group):
            user = process.user, process.group
            return MappedVolume(path, process.ids, user, read_only=self._read_only, soon=soon)
        return RootVolume(path, read_only=self._read_only, soon=soon)

    async def wait_lost(self) -> str:
        """See `Transport`."""
        assert self._process is not None
        await trio.lowlevel.wait_readable(self._process.pidfd)
        return "it has stopped"

    async def close(self) -> None:
        """See `Transport`."""
        volume, process = self._volume, self._process
        self._volume = self._process = None
        if volume is not None:
            volume.close()
        if process is not None:
            process.close()

    def tidy(self) -> None:
        """See `HostVolume.tidy`."""
        if self._volume is not None:
            self._volume.tidy()
