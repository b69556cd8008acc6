"""Transport: how the workspace directory of a running container is reached.  Two keep this contract: rootfs, agent.

A transport serves one run of the container at a time; `Reconnecting` (see `reconnect`) makes one volume of the
runs, and `Connection` (see `connection`) opens and closes them.  Threading: the serving loop.
"""

from __future__ import annotations

from typing import Literal, Protocol

import trio

from protocol.backends.container.podman.state import ContainerState
from protocol.volume import Volume

__all__ = ["Transport"]


class Transport(Protocol):
    """`open`, then `wait_lost` and `close`; then, when the container runs again, `open` once more."""

    @property
    def name(self) -> Literal["rootfs", "agent"]: ...

    @property
    def supports_acl(self) -> bool:
        """Whether the kernel shall check permissions by the ACLs that the volume shows.  Known before `open`."""
        ...

    async def open(self, state: ContainerState, nursery: trio.Nursery) -> Volume:
        """A volume of the workspace directory of the container that `state` shows running; the directory is made
        where it is missing.

        `nursery` is for what must run meanwhile: it is cancelled before `close`, and an exception in it is a loss.
        OSError where the directory cannot be reached, with what to do: also when the container has stopped since.
        The volume's methods may answer with awaitables; once lost, they fail with EIO, those in flight too.
        """
        ...

    async def wait_lost(self) -> str:
        """Return when the volume that `open` gave will serve nothing any more, with the reason in words."""
        ...

    async def close(self) -> None:
        """Let go of what `open` gave, whose volume is asked nothing any more.  Idempotent; raises nothing."""
        ...
