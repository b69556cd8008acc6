"""The registry of backends: maps the kind in a backend string to the function that opens the volume.

A package adds a kind with an entry point in the group `vfsd.backends`:

    [project.entry-points."vfsd.backends"]
    toy = "my_package:open_toy"

Then `vfsd mount DIR --backend toy:ARGUMENT` calls `open_toy(options, progress)`, a `BackendOpener`.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from protocol.archive import ByteProgress, no_progress
from protocol.backends.host import HostVolume
from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.journal import recover
from protocol.store import DirectorySource, DirectoryTarget, Store
from protocol.volume import Volume
from vfsd.daemon.snapshots.archives import archive, read_origin, unpack
from vfsd.daemon.snapshots.stored import Stored, interrupted
from vfsd.machine.logs import log_failure
from vfsd.machine.memory_limits import default_max_memory
from vfsd.machine.optional_dependencies import missing_package
from vfsd.wire.backend_spec import known_backends
from vfsd.wire.entry_points import BACKENDS_GROUP, load_entry_point
from vfsd.wire.options import MountOptions

if TYPE_CHECKING:
    from protocol.backends.container.workspace import ContainerWorkspace

_logger = logging.getLogger(__name__)
_HOST_CACHE_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Backend:
    """An opened backend: the volume to mount, and the functions that maintain and close it.

    `volume` declares what it can do in `volume.capabilities`.
    `cache_timeout_s`: how long the kernel may use cached names and attributes; infinite if no other program can change
    the volume.
    `tidy`: called on the daemon's loop about once a second.
    `close`: called once, on the daemon's loop, after the unmount or a failed mount.
    `container`: the container that holds the volume; the daemon watches its connection.
    `recovered`: one sentence on what an interrupted apply or restore left in the directory, for the user.
    `stored`: the snapshots of a volume that does not keep them in memory; they are in a store.
    """

    volume: Volume
    cache_timeout_s: float = math.inf
    tidy: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    container: ContainerWorkspace | None = None
    recovered: str | None = None
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


def open_backend(options: MountOptions, progress: ByteProgress = no_progress) -> Backend:
    """Open the backend that `options` name.  OSError, ValueError, ArchiveError.  Runs in a worker thread.

    OSError with EOPNOTSUPP if the kind is unknown, or the package that provides it cannot be imported.
    """
    kind = options.workspace.backend.kind
    opener: BackendOpener | None = _BUILT_IN.get(kind) or load_entry_point(BACKENDS_GROUP, kind)
    if opener is None:
        reason = f"there is no backend {kind!r}: use one of {', '.join(known_backends())}"
        raise OSError(errno.EOPNOTSUPP, reason)
    return opener(options, progress)


def _memory(options: MountOptions, progress: ByteProgress) -> Backend:
    limit = options.limits.max_memory or default_max_memory(options.limits.max_bytes)
    volume = MemoryVolume(options.limits.max_bytes or limit, options.limits.max_inodes, max_memory=limit)
    if options.content.archive is not None:
        unpack(archive(options.content.archive), volume, progress)
    volume.mark_saved()
    volume.read_only = options.workspace.read_only
    return Backend(volume)


def _cache_timeout_s(options: MountOptions) -> float:
    timeout_s = options.kernel.cache_timeout_s
    return _HOST_CACHE_TIMEOUT_S if timeout_s is None else timeout_s


def _allow_open_files() -> None:
    """Raise this process's limit of open files to the hard limit; a host volume keeps up to half as many open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _recover_apply(options: MountOptions, directory: str) -> str | None:
    """Finish or undo an `apply` into the directory that was killed; return a sentence about it, if there was one."""
    try:
        found = recover(os.fsencode(directory))
    except OSError as error:
        # EBUSY: that apply is still running.  No other failure here prevents the mount.
        if error.errno == errno.EBUSY:
            return None
        log_failure(_logger, "finishing an interrupted apply", error, path=directory, level=logging.WARNING)
        return f"{directory}: an interrupted apply could not be finished: {error.filename or ''}: {error.strerror}"
    if found is None:
        return None
    _logger.warning("%s", found, extra={"path": directory, "workspace": options.workspace.name})
    return f"{directory}: {found}"


def _host(options: MountOptions, _progress: ByteProgress) -> Backend:
    directory = options.workspace.backend.argument
    stored = _stored_host(options, directory)
    found = filter(None, (_recover_apply(options, directory), _describe_interrupted(stored)))
    recovered = "; ".join(found) or None
    _allow_open_files()
    volume = HostVolume(os.fsencode(directory), read_only=options.workspace.read_only)
    return Backend(volume, _cache_timeout_s(options), volume.tidy, volume.close, recovered=recovered, stored=stored)


def _stored_host(options: MountOptions, directory: str) -> Stored:
    """Return the stored snapshots of a directory.  ValueError for a given store that is inside the directory."""
    real, given_store = os.path.realpath(directory), options.workspace.store
    store = Store(given_store)
    source = DirectorySource(real)
    if given_store is not None:
        # If the user's default store is inside, the mount works and only snapshots are refused.
        try:
            store.check_apart(source.identity)
        except OSError as error:
            raise ValueError(f"the store {given_store} is inside {directory}, whose snapshots it keeps") from error
    _check_outside(options, store)
    return Stored(store, f"host:{real}", source, DirectoryTarget(real))


def _check_outside(options: MountOptions, store: Store) -> None:
    """Raise ValueError for a store that the mount would hide."""
    mountpoint = os.path.realpath(options.workspace.mountpoint)
    if os.path.commonpath((os.path.realpath(store.directory), mountpoint)) == mountpoint:
        raise ValueError(f"the store {store.directory} is inside the mountpoint {options.workspace.mountpoint}")


def _describe_interrupted(stored: Stored) -> str | None:
    """Describe a restore that was interrupted, and how to finish or undo it; None if there is none."""
    try:
        found = interrupted(stored)
    except (OSError, ValueError) as error:
        # An unreadable store prevents snapshots, not the mount.
        _logger.warning("the snapshot store cannot be read: %s", error, extra={"path": stored.store.directory})
        return None
    if found is None:
        return None
    _logger.warning("%s", found.describe(), extra={"operation": "mount"})
    return found.describe()


def _overlay(options: MountOptions, progress: ByteProgress) -> Backend:
    directory = options.workspace.backend.argument
    recovered = _recover_apply(options, directory)
    limit = options.limits.max_memory or default_max_memory(options.limits.max_bytes)
    volume = OverlayVolume(
        os.fsencode(directory),
        options.limits.max_bytes or limit,
        options.limits.max_inodes,
        include=options.content.include,
        exclude=options.content.exclude,
        max_memory=limit,
    )
    if options.content.archive is not None:
        with read_origin(archive(options.content.archive), volume, progress).tree() as tree:
            volume.import_tree(tree, replace=False)
    volume.mark_saved()
    volume.read_only = options.workspace.read_only
    return Backend(volume, tidy=volume.tidy, close=volume.lower.close, recovered=recovered)


def _container(options: MountOptions, _progress: ByteProgress) -> Backend:
    try:
        # Deferred: Podman's client is an optional dependency, and imports more slowly than everything else together.
        from protocol.backends.container import workspace as containers  # noqa: PLC0415
        from protocol.backends.container.podman.target import DEFAULT_WORKDIR  # noqa: PLC0415
    except ImportError as error:
        raise missing_package("the container backend", error) from None
    _allow_open_files()
    workdir = options.container.workdir or DEFAULT_WORKDIR
    if options.workspace.backend.kind == "container":
        workspace = containers.open_container(
            options.workspace.backend.argument,
            podman_url=options.container.podman_url,
            workdir=workdir,
            transport=options.container.transport,
            read_only=options.workspace.read_only,
        )
    else:
        workspace = containers.open_image(
            options.workspace.backend.argument,
            options.workspace.name,
            podman_url=options.container.podman_url,
            workdir=workdir,
            transport=options.container.transport,
            network=options.container.network or "none",
            pids_limit=options.container.pids_limit,
            memory_bytes=options.container.memory_bytes,
            read_only=options.workspace.read_only,
        )
    try:
        stored = _stored_container(options, workspace)
    except BaseException:
        workspace.close()
        raise
    return Backend(
        workspace.connection.volume,
        _cache_timeout_s(options),
        close=workspace.close,
        container=workspace,
        recovered=_describe_interrupted(stored),
        stored=stored,
    )


def _stored_container(options: MountOptions, workspace: ContainerWorkspace) -> Stored:
    """Return the stored snapshots of a directory in a container.

    Their key contains the container's name, or the workspace's name if vfsd created the container.
    """
    from protocol.backends.container.snapshot_files import ContainerSource, MountTarget  # noqa: PLC0415 (as above)

    target = workspace.target
    kind = options.workspace.backend.kind
    name = options.workspace.backend.argument if kind == "container" else options.workspace.name
    key = f"{kind}:{target.service.address}:{name}:{target.workdir}"
    store = Store(options.workspace.store)
    _check_outside(options, store)
    source = ContainerSource(workspace.connection, options.workspace.mountpoint)
    return Stored(store, key, source, MountTarget(options.workspace.mountpoint, source))


_BUILT_IN: Final[Mapping[str, BackendOpener]] = {
    "memory": _memory,
    "overlay": _overlay,
    "host": _host,
    "container": _container,
    "image": _container,
}
