"""The opener of `exec`: a directory at the other end of a command, whose snapshots are in a store."""

from __future__ import annotations

from protocol.backends.container.snapshot_files import ContainerSource, MountTarget
from protocol.backends.remote.transport import DEFAULT_DIRECTORY, open_remote
from protocol.store import Store
from protocol.tree import ByteProgress
from vfsd.daemon.backends.base import Backend
from vfsd.daemon.backends.shared import cache_timeout_s, check_outside, describe_interrupted
from vfsd.daemon.snapshots.stored_workspace import Stored
from vfsd.machine.mountinfo import WorkspaceRoot
from vfsd.wire.options import MountOptions


def open_exec(options: MountOptions, progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
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
