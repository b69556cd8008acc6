"""open_backend: the volume that a mount's options ask for, and what the daemon has to know of it."""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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
from vfsd.machine.optional_dependencies import lacking
from vfsd.wire.options import MountOptions

if TYPE_CHECKING:
    from protocol.backends.container.workspace import ContainerWorkspace

__all__ = ["Backend", "open_backend"]

_logger = logging.getLogger(__name__)
_HOST_CACHE_TIMEOUT_S: Final = 1.0


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Backend:
    """A volume to serve.

    `cache_timeout_s`: how long a kernel may go by what it was told; infinite where nobody else changes the volume.
    `tidy` is to be called on the loop about once a second, `close` when nobody serves it any more.
    `container`: the one that the volume is in; its connection has to be attended while it is served.
    `stored`: where its snapshots are kept, if the volume does not hold them itself.
    `recovered`: a sentence on what an apply that was killed had left in the directory, if any had.
    """

    volume: Volume
    cache_timeout_s: float = math.inf
    tidy: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    container: ContainerWorkspace | None = None
    recovered: str | None = None
    stored: Stored | None = None


def open_backend(options: MountOptions, progress: ByteProgress = no_progress) -> Backend:
    """The backend of `options`, with the content of `--from` in it.  OSError, ValueError, ArchiveError.

    Runs in a worker thread, before anybody else knows the volume.  `progress` is called while the archive is read; what
    it raises ends that.
    """
    kind, _, argument = options.backend.partition(":")
    if kind == "memory":
        return _memory(options, progress)
    if kind == "host":
        return _host(options, argument)
    if kind == "overlay":
        return _overlay(options, argument, progress)
    if kind in {"container", "image"}:
        return _container(options, kind, argument)
    raise OSError(errno.EOPNOTSUPP, f"there is no backend {options.backend!r}")


def _memory(options: MountOptions, progress: ByteProgress) -> Backend:
    limit = options.max_memory or default_max_memory(options.max_bytes)
    volume = MemoryVolume(options.max_bytes or limit, options.max_inodes, max_memory=limit)
    if options.archive is not None:
        unpack(archive(options.archive), volume, progress)
    volume.mark_saved()
    volume.read_only = options.read_only
    return Backend(volume)


def _allow_open_files() -> None:
    """As many as may be: a host volume keeps files open, half as many as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _recover(options: MountOptions, directory: str) -> str | None:
    """Finish or undo an `apply` into the directory that was killed; what to say of it."""
    try:
        found = recover(os.fsencode(directory))
    except OSError as error:
        # EBUSY: it goes on.  What else is in the way of it need not be in the way of the mount.
        if error.errno == errno.EBUSY:
            return None
        log_failure(_logger, "finishing an interrupted apply", error, path=directory, level=logging.WARNING)
        return f"{directory}: an interrupted apply could not be finished: {error.filename or ''}: {error.strerror}"
    if found is None:
        return None
    _logger.warning("%s", found, extra={"path": directory, "workspace": options.name})
    return f"{directory}: {found}"


def _host(options: MountOptions, directory: str) -> Backend:
    stored = _stored_host(options, directory)
    found = filter(None, (_recover(options, directory), _half_done(stored)))
    recovered = "; ".join(found) or None
    _allow_open_files()
    volume = HostVolume(os.fsencode(directory), read_only=options.read_only)
    timeout_s = _HOST_CACHE_TIMEOUT_S if options.cache_timeout_s is None else options.cache_timeout_s
    return Backend(volume, timeout_s, volume.tidy, volume.close, recovered=recovered, stored=stored)


def _stored_host(options: MountOptions, directory: str) -> Stored:
    """The snapshots of a directory.  ValueError for a store that would be part of what it keeps."""
    place = os.path.realpath(directory)
    store = Store(options.store)
    source = DirectorySource(place)
    if options.store is not None:
        # Where the user's own store is inside, only snapshots are refused: one can do without.
        try:
            store.check_apart(source.identity)
        except OSError as error:
            raise ValueError(f"the store {options.store} is inside {directory}, which it is to keep") from error
    _check_outside(options, store)
    return Stored(store, f"host:{place}", source, DirectoryTarget(place))


def _check_outside(options: MountOptions, store: Store) -> None:
    """ValueError for a store that the mount would hide."""
    mountpoint = os.path.realpath(options.mountpoint)
    if os.path.commonpath((os.path.realpath(store.directory), mountpoint)) == mountpoint:
        raise ValueError(f"the store {store.directory} is inside the mountpoint {options.mountpoint}")


def _half_done(stored: Stored) -> str | None:
    """What a restore has left that did not come to its end, and how to finish or undo it."""
    try:
        found = interrupted(stored)
    except (OSError, ValueError) as error:
        # A store that cannot be read is in the way of snapshots only.
        _logger.warning("the snapshot store cannot be read: %s", error, extra={"path": stored.store.directory})
        return None
    if found is None:
        return None
    _logger.warning("%s", found.describe(), extra={"operation": "mount"})
    return found.describe()


def _overlay(options: MountOptions, directory: str, progress: ByteProgress) -> Backend:
    recovered = _recover(options, directory)
    limit = options.max_memory or default_max_memory(options.max_bytes)
    volume = OverlayVolume(
        os.fsencode(directory),
        options.max_bytes or limit,
        options.max_inodes,
        include=options.include,
        exclude=options.exclude,
        max_memory=limit,
    )
    if options.archive is not None:
        with read_origin(archive(options.archive), volume, progress).tree() as tree:
            volume.import_tree(tree, replace=False)
    volume.mark_saved()
    volume.read_only = options.read_only
    return Backend(volume, tidy=volume.tidy, close=volume.lower.close, recovered=recovered)


def _container(options: MountOptions, kind: str, argument: str) -> Backend:
    try:
        # Here, not above: Podman's client is an extra, and takes longer to import than all else together.
        from protocol.backends.container.workspace import DEFAULT_WORKDIR, open_container, open_image  # noqa: PLC0415
    except ImportError as error:
        raise lacking("the container backend", error) from None
    _allow_open_files()
    workdir = options.workdir or DEFAULT_WORKDIR
    if kind == "container":
        workspace = open_container(
            argument,
            podman_url=options.podman_url,
            workdir=workdir,
            transport=options.transport,
            read_only=options.read_only,
        )
    else:
        workspace = open_image(
            argument,
            options.name,
            podman_url=options.podman_url,
            workdir=workdir,
            transport=options.transport,
            network=options.network or "none",
            pids_limit=options.pids_limit,
            memory_bytes=options.memory_bytes,
            read_only=options.read_only,
        )
    timeout_s = _HOST_CACHE_TIMEOUT_S if options.cache_timeout_s is None else options.cache_timeout_s
    try:
        stored = _stored_container(options, workspace)
    except BaseException:
        workspace.close()
        raise
    return Backend(
        workspace.connection.volume,
        timeout_s,
        workspace.tidy,
        workspace.close,
        workspace,
        recovered=_half_done(stored),
        stored=stored,
    )


def _stored_container(options: MountOptions, workspace: ContainerWorkspace) -> Stored:
    """The snapshots of a directory in a container, known by its name, or by that of the workspace that made it."""
    from vfsd.daemon.snapshots.container import stored_container  # noqa: PLC0415 (as above)

    target = workspace.target
    kind, _, name = options.backend.partition(":")
    key = f"{kind}:{target.service.address}:{name if kind == 'container' else options.name}:{target.workdir}"
    store = Store(options.store)
    _check_outside(options, store)
    return stored_container(store, key, workspace.connection, options.mountpoint)
