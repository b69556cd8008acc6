"""The registry of backends: maps the kind in a backend string to the function that opens the volume.

A package adds a kind with an entry point in the group `vfsd.backends`:

    [project.entry-points."vfsd.backends"]
    toy = "my_package:open_toy"

Then `vfsd mount DIR --backend toy:ARGUMENT` calls `open_toy(options, progress)`, a `BackendOpener`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from protocol.tree import ByteProgress, no_progress
from protocol.values import Value
from protocol.volume import Volume
from vfsd.machine.directories import unused_journal
from vfsd.machine.resources import default_max_memory
from vfsd.wire.options import BACKENDS_GROUP, known_backends, load_entry_point

if TYPE_CHECKING:
    from protocol.backends.container.connection import TransportConnection
    from protocol.backends.container.workspace import ContainerWorkspace
    from vfsd.daemon.snapshots.store_restore import Stored
    from vfsd.wire.options import MountOptions

# Module and function of each built-in kind, and what the function imports when it is called: a daemon imports only the
# backend that it serves.
_STORED: Final = "vfsd.daemon.backends.stored"
_BUILT_IN: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "memory": (__name__, "open_memory", ("protocol.backends.memory", "vfsd.daemon.snapshots.archives")),
    "overlay": ("vfsd.daemon.backends.overlay", "open_overlay", ()),
    "host": (_STORED, "open_host", ("protocol.backends.host",)),
    "container": (_STORED, "open_container", ()),
    "image": (_STORED, "open_container", ()),
    "exec": (
        _STORED,
        "open_exec",
        ("protocol.backends.container.snapshot_files", "protocol.backends.remote.transport"),
    ),
}
# Podman's client takes more memory and time than everything else together.
_DEFERRED: Final = dict.fromkeys(("container", "image"), "protocol.backends.container.workspace")


def modules_of(kind: str) -> tuple[str, ...]:
    """Return the modules that opening a built-in backend of `kind` imports, without Podman's client."""
    module, _, later = _BUILT_IN[kind]
    return module, *later


def import_backend(kind: str) -> None:
    """Import what opening a backend of `kind` imports, so that processes that are forked later have it already.

    A package that is missing is reported when the backend is opened.
    """
    with contextlib.suppress(ImportError):
        load_opener(kind)
        for module in modules_of(kind) if kind in _BUILT_IN else ():
            import_module(module)
        if kind in _DEFERRED:
            import_module(_DEFERRED[kind])


def read_sources(kind: str) -> None:
    """Read the programs that a backend of `kind` starts at the other end, which have to fit this process's modules."""
    if kind in {"container", "image", "exec"}:
        from protocol.backends.container.agent import helper_transport  # noqa: PLC0415 (start-up)

        helper_transport.read_sources()


def open_backend(options: MountOptions, progress: ByteProgress = no_progress) -> Backend:
    """Open the backend that `options` name.  OSError, ValueError, ArchiveError.  Runs in a worker thread.

    OSError with EOPNOTSUPP if the kind is unknown, or the package that provides it cannot be imported.
    """
    kind = options.workspace.backend.kind
    opener = load_opener(kind)
    if opener is None:
        reason = f"there is no backend {kind!r}: use one of {', '.join(known_backends())}"
        raise OSError(errno.EOPNOTSUPP, reason)
    return opener(options, progress)


def load_opener(kind: str) -> BackendOpener | None:
    """Import the function that opens backends of `kind`; None if the kind is unknown.

    OSError (EOPNOTSUPP) if the package that provides it cannot be imported.
    """
    opener: Any
    if kind in _BUILT_IN:
        module, function, _ = _BUILT_IN[kind]
        opener = getattr(import_module(module), function)
    else:
        opener = load_entry_point(BACKENDS_GROUP, kind)
    return opener  # type: ignore[no-any-return]


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
    `anchor`: a descriptor by which a successor of this daemon finds the same content again: of the
    directory that the volume shows or that is below it, wherever it was moved; or a container's lease.
    `reopening`: how a successor opens the layer below: see `protocol.backends.overlay.lower.Lower`.
    `stored`: the snapshots of a volume that does not keep them in memory; they are in a store.
    `open_directory`: opens the directory of a frozen overlay as the backend `host`, to merge into it; the caller closes
    it.  None: the overlay is not frozen.
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
    open_directory: Callable[[], Backend] | None = None


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


def open_memory(options: MountOptions, progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
    from protocol.backends.memory import MemoryVolume  # noqa: PLC0415 (start-up, as above)
    from vfsd.daemon.snapshots.archives import archive, unpack  # noqa: PLC0415 (as above)

    limit = options.limits.max_memory or default_max_memory(options.limits.max_bytes)
    volume = MemoryVolume(options.limits.max_bytes or limit, options.limits.max_inodes, max_memory=limit)

    def begin() -> None:
        if options.content.archive is not None:
            unpack(archive(options.content.archive), volume, progress)

    if not options.journal.persist:
        begin()
        volume.mark_saved()
        volume.read_only = options.workspace.read_only
        return Backend(volume, recovered=unused_journal(options.workspace.name))
    # Deferred: few mounts have a journal.
    from vfsd.daemon.backends.persistence import end_journal, keep_journal  # noqa: PLC0415

    recovered = keep_journal(options, volume, begin)
    volume.read_only = options.workspace.read_only
    return Backend(volume, close=functools.partial(end_journal, volume), recovered=recovered)
