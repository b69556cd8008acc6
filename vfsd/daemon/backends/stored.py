"""The openers of the backends whose snapshots are in a store, because other programs can change them.

`host` is a directory of this host, `container` and `image` one in a Podman container, `exec` one at the other end of a
command.  The helpers at the end are also those of `overlay`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
from typing import TYPE_CHECKING, Final

import trio

from protocol.backends.overlay.host_lower import INTENT_LOG_NAME
from protocol.backends.overlay.intent_log import recover
from protocol.linux.portable import proc_path
from protocol.store import DirectorySource, DirectoryTarget, Store
from protocol.tree import ByteProgress
from vfsd.daemon import attached
from vfsd.daemon.backends.registry import Backend
from vfsd.daemon.snapshots.store_restore import Stored, interrupted
from vfsd.machine.interpreter import missing_package
from vfsd.machine.logs import log_failure
from vfsd.machine.mountinfo import WorkspaceRoot, mounts_at

if TYPE_CHECKING:
    from protocol.backends.container.workspace import ContainerWorkspace
    from protocol.linux.beneath import DirectoryReference
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)
_SERVICE_S: Final = 30.0
_SERVICE_POLL_S: Final = 0.2


def open_container(options: MountOptions, _progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
    try:
        # Deferred: Podman's client is an optional dependency, and imports more slowly than everything else together.
        from protocol.backends.container import workspace as containers  # noqa: PLC0415
        from protocol.backends.container.podman.service import DEFAULT_WORKDIR  # noqa: PLC0415
    except ImportError as error:
        raise missing_package("the container backend", error) from None
    allow_open_files()
    workdir = options.container.workdir or DEFAULT_WORKDIR
    if options.workspace.backend.kind == "container":
        workspace = containers.open_container(
            options.workspace.backend.argument,
            podman_url=options.container.podman_url,
            workdir=workdir,
            transport=options.container.transport,
            read_only=options.workspace.read_only,
            lease=options.anchor,
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
            lease=options.anchor,
        )
    try:
        stored = _stored_container(options, workspace)
        interrupted = describe_interrupted(stored)
    except BaseException:
        workspace.close()
        raise
    return Backend(
        workspace.connection.volume,
        cache_timeout_s(options),
        tidy=workspace.connection.tidy,
        close=workspace.close,
        keep=workspace.keep,
        discard=None if workspace.owned is None else workspace.owned.discard,
        connection=workspace.connection,
        container=workspace,
        recovered="; ".join(filter(None, (workspace.note, interrupted))) or None,
        anchor=None if workspace.lease is None else workspace.lease.descriptor,
        stored=stored,
    )


async def pull_missing(options: MountOptions) -> None:
    """Pull the image of a new container, unless Podman has it.  Errors as of `open_container`.

    Can be cancelled, which abandons the pull, because nothing is made yet that has to be removed.
    """
    try:
        # Deferred, as above.
        from protocol.backends.container.podman.ownership import WORKSPACE_LABEL  # noqa: PLC0415
        from protocol.backends.container.podman.service import PodmanService  # noqa: PLC0415
    except ImportError:
        return  # opening says so
    workspace = options.workspace

    def pull() -> None:
        with contextlib.closing(PodmanService(options.container.podman_url)) as service:
            # A container that is left has the image, or needs none.
            if not service.image_exists(workspace.backend.argument) and not service.labelled(
                {WORKSPACE_LABEL: workspace.name}
            ):
                _logger.info("pulling %s", workspace.backend.argument, extra={"operation": "container"})
                service.pull(workspace.backend.argument)

    await trio.to_thread.run_sync(pull, abandon_on_cancel=True)


async def wait_for_service(url: str | None) -> None:
    """Wait for up to half a minute until a Podman service of this machine listens: it may be restarting.

    For a mount that goes on, whose programs wait meanwhile.  Opening reports other problems of the service.
    """
    from protocol.backends.container.podman.service import PodmanService  # noqa: PLC0415 (as above)

    service = PodmanService(url)
    is_logged = False
    with trio.move_on_after(_SERVICE_S):
        while service.is_local:
            try:
                (await trio.to_thread.run_sync(service.connect, abandon_on_cancel=True)).close()
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ECONNREFUSED}:
                    return
                if not is_logged:
                    log_failure(_logger, "waiting for Podman", error, level=logging.WARNING)
                    is_logged = True
                await trio.sleep(_SERVICE_POLL_S)
            else:
                return


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
    check_outside(options, store)
    policy = options.policy
    root = WorkspaceRoot(options.workspace.mountpoint, options.workspace.name)
    source = ContainerSource(workspace.connection, root.open, is_mount_complete=not (policy.protect or policy.hide))
    return Stored(store, key, source, MountTarget(root.open, source))


def open_exec(options: MountOptions, progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
    # Start-up: a daemon imports only the backend that it serves, as above and below.
    from protocol.backends.container.snapshot_files import ContainerSource, MountTarget  # noqa: PLC0415
    from protocol.backends.remote.transport import DEFAULT_DIRECTORY, open_remote  # noqa: PLC0415

    command, directory = options.workspace.backend.argument, options.container.workdir or DEFAULT_DIRECTORY
    store = Store(options.workspace.store)
    check_outside(options, store)
    connection = open_remote(
        command,
        directory=directory,
        read_only=options.workspace.read_only,
        is_continued=options.is_continued,
        keep_going=lambda: progress(0, 0),
    )
    root = WorkspaceRoot(options.workspace.mountpoint, options.workspace.name)
    source = ContainerSource(connection, root.open)
    target = MountTarget(root.open, source)
    stored = Stored(store, f"exec:{command}:{directory}", source, target)
    return Backend(
        connection.volume,
        cache_timeout_s(options),
        tidy=connection.tidy,
        connection=connection,
        recovered=describe_interrupted(stored),
        stored=stored,
    )


def open_host(options: MountOptions, progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
    from protocol.backends.host import HostVolume  # noqa: PLC0415 (as above)

    recovered = recover_apply(options)
    allow_open_files()
    volume = HostVolume(directory_of(options), read_only=options.workspace.read_only)
    try:
        stored = _stored_host(options, volume.root_fd)
        if options.is_attached:
            attached.check_fits(options.workspace.mountpoint, stored, volume.root_fd, lambda: progress(0, 0))
        recovered = "; ".join(filter(None, (recovered, describe_interrupted(stored)))) or None
    except BaseException:
        volume.close()
        raise
    return Backend(
        volume,
        cache_timeout_s(options),
        volume.tidy,
        volume.close,
        recovered=recovered,
        stored=stored,
        anchor=volume.root_fd,
    )


def _stored_host(options: MountOptions, root: int) -> Stored:
    """Return the stored snapshots of the directory `root`.  ValueError for a given store that is inside it."""
    directory, given_store = options.workspace.backend.argument, options.workspace.store
    store = Store(given_store)
    source = DirectorySource(root)
    if given_store is not None:
        # If the user's default store is inside, the mount works and only snapshots are refused.
        try:
            store.check_apart(source.identity)
        except OSError as error:
            raise ValueError(f"the store {given_store} is inside {directory}, whose snapshots it keeps") from error
    check_outside(options, store)
    return Stored(store, f"host:{_key(directory, root)}", source, DirectoryTarget(root))


def _key(directory: str, root: int) -> str:
    """Return the path that names the directory `root` in the store: the real one when it was mounted."""
    real = os.path.realpath(directory)
    if real == os.path.abspath(directory):
        return real  # also if the predecessor opened `root` before it was moved
    try:
        is_same = os.path.samestat(os.stat(real), os.fstat(root))
    except OSError:
        is_same = False
    return real if is_same else os.fsdecode(os.readlink(proc_path(root)))  # a symlink changed


_HOST_CACHE_TIMEOUT_S: Final = 1.0


def cache_timeout_s(options: MountOptions) -> float:
    """Return how long the kernel may cache what other programs can change."""
    timeout_s = options.kernel.cache_timeout_s
    return _HOST_CACHE_TIMEOUT_S if timeout_s is None else timeout_s


def allow_open_files() -> None:
    """Raise this process's limit of open files to the hard limit; a host volume keeps up to half as many open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def directory_of(options: MountOptions) -> DirectoryReference:
    """Return the directory that the backend names: its path, or the descriptor that the predecessor had of it."""
    argument = os.fsencode(options.workspace.backend.argument)
    return argument if options.anchor is None else options.anchor


def check_outside(options: MountOptions, store: Store) -> None:
    """Raise ValueError for a store that the mount would hide."""
    mountpoint = real_mountpoint(options.workspace.mountpoint)
    if os.path.commonpath((os.path.realpath(store.directory), mountpoint)) == mountpoint:
        what = "the attached directory" if options.is_attached else "the mountpoint"
        other = "; name another one with --store" if options.is_attached else ""
        raise ValueError(f"the store {store.directory} is inside {what} {options.workspace.mountpoint}{other}")


def real_mountpoint(path: str) -> str:
    """Return the path without symlinks.  If it is mounted already, by a daemon that died, it is not asked."""
    while True:
        above, name = os.path.split(os.path.abspath(path))
        path = os.path.join(os.path.realpath(above), name)
        if mounts_at(path):
            return path
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:  # it is no symlink
            return path


def describe_interrupted(stored: Stored) -> str | None:
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


def intent_log_of(options: MountOptions) -> bytes:
    """Return the path of an apply's intent log, relative to the backend's directory.

    For `/`, root's log is in `/`.  Other users may not write there, so a user's log is in the user's home directory.
    """
    if options.workspace.backend.argument != "/" or os.geteuid() == 0:
        return INTENT_LOG_NAME
    home = os.path.realpath(os.path.expanduser("~")).lstrip("/")
    return os.path.join(os.fsencode(home), INTENT_LOG_NAME)


def recover_apply(options: MountOptions) -> str | None:
    """Finish or undo a killed `apply` into the backend's directory; return a sentence about it, if there was one.

    A successor leaves that to the user, because its predecessor may go on.
    """
    if options.below is not None:
        return None
    directory = options.workspace.backend.argument
    try:
        found = recover(directory_of(options), path=intent_log_of(options))
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
