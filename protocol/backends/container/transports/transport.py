"""Transport: the contract of a way to reach a directory that may come and go, such as that of a container.

Implementations: rootfs and agent for containers; `protocol.backends.remote` for the other end of a command.  `S` is the
state of what is reached: `ContainerState` for containers.

A transport serves one run of the container (or command) at a time.  `TransportConnection` opens and closes it, and
`ReconnectingVolume` makes one volume of the successive runs.  Threading: the serving loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import trio

from protocol.backends.container.reconnecting_volume import ContinuedVolume

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog

S_contra = TypeVar("S_contra", contravariant=True)


class Transport(Protocol[S_contra]):
    """`open`, then `wait_lost` and `close`; then, when the container runs again, `open` once more."""

    @property
    def name(self) -> Literal["rootfs", "agent"]: ...

    @property
    def supports_acl(self) -> bool:
        """Whether the kernel should check permissions by the volume's ACLs.  Known before `open`."""
        ...

    @property
    def run(self) -> str:
        """Identifies the run of what `open` reached, for another process."""
        ...

    @property
    def helper(self) -> bytes:
        """Identifies the process that owns the inodes of the last `open`.

        A volume that `open` returns later numbers them alike if it has the same one.  Empty: there is none.
        """
        ...

    @property
    def keeps_numbers(self) -> bool:
        """Whether an inode has the same number in every run, if it is there and the number is free."""
        ...

    is_left: Callable[[], bool]
    """Returns whether another process continues with what `open` reached, when the nursery of `open` is cancelled."""

    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """Have another process be able to continue, by what is in `log`; call it before `open`.

        `is_known`: the first `open` continues with what the process before reached.
        """
        ...

    def prepare(self, state: S_contra) -> ContinuedVolume:
        """Make the volume that the next `open` returns, for what another process hands over; blocks.  OSError."""
        ...

    async def open(self, state: S_contra, nursery: trio.Nursery) -> ContinuedVolume:
        """Open a volume of the workspace directory of the running container (or command) `state`.

        Creates a missing directory.

        `nursery` runs the transport's tasks: it is cancelled before `close`, and an exception in it counts as a loss.
        OSError with advice if the directory cannot be reached, or the container has stopped meanwhile.  The volume's
        methods may return awaitables; after a loss all requests fail with EIO, including those in flight.
        """
        ...

    def begin(self) -> None:
        """In an upgrade: take what `open` reached from the process before, which does not serve any more."""
        ...

    async def wait_lost(self) -> str:
        """Wait until the open volume is lost, and return the reason in words."""
        ...

    async def close(self) -> None:
        """Release the resources of `open`.  The volume must not be used any more.  Idempotent; raises nothing."""
        ...
