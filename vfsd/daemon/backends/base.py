"""The result of opening a backend, and the contract of the function that opens it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from protocol.tree import ByteProgress
from protocol.values import Value
from protocol.volume import Volume

if TYPE_CHECKING:
    from protocol.backends.container.connection import TransportConnection
    from protocol.backends.container.workspace import ContainerWorkspace
    from vfsd.daemon.snapshots.stored_workspace import Stored
    from vfsd.wire.options import MountOptions


class Backend(Value):
    """An opened backend: the volume to mount, and the functions that maintain and close it.

    `volume` declares what it can do in `volume.capabilities`.
    `cache_timeout_s`: how long the kernel may use cached names and attributes; infinite if no other program can change
    the volume.
    `tidy`: called on the daemon's loop about once a second.
    `close`: called once, on the daemon's loop, after the unmount or a failed mount.
    `keep`: called when programs can use the mount: from now on `close` leaves what was made for the workspace, such as
    its container.
    `discard`: removes that, after the unmount of such a mount, in a worker thread; returns a sentence for the user on
    what could not be removed.  None: there is nothing to remove.
    `connection`: keeps a volume connected that is in a container, or on another machine; the daemon attends it.
    `container`: the container that holds the volume, in which commands run.
    `recovered`: one sentence on what an interrupted apply or restore left in the directory, for the user.
    `held`: descriptors whose duplicates keep what the volume needs while no daemon runs, such as a lease.
    `anchor`: a descriptor by which another daemon that continues the workspace finds the same content again: of the
    directory that the volume shows or that is below it, wherever it was moved; or a container's lease.
    `reopening`: how another daemon opens the layer below: see `protocol.backends.overlay.lower.Lower`.
    `stored`: the snapshots of a volume that does not keep them in memory; they are in a store.
    """

    volume: Volume
    cache_timeout_s: float = math.inf
    tidy: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    keep: Callable[[], None] = lambda: None
    discard: Callable[[], str | None] | None = None
    connection: TransportConnection[Any] | None = None
    container: ContainerWorkspace | None = None
    recovered: str | None = None
    held: tuple[int, ...] = ()
    anchor: int | None = None
    reopening: bytes = b""
    stored: Stored | None = None


class BackendOpener(Protocol):
    """Opens a backend of one kind."""

    def __call__(self, options: MountOptions, progress: ByteProgress, /) -> Backend:
        """Open the volume that `options.workspace.backend.argument` names, and return it with what closes it.

        Runs in a worker thread before the mount exists.  The opener applies `options` to the volume: `read_only`, the
        limits, and `archive`, whose content the volume begins with; it calls `progress` while it reads the archive,
        and lets exceptions from `progress` pass.  It raises ValueError for an option that the backend does not
        support, and OSError if the volume cannot be opened; the user gets the message as one line.
        """
        ...
