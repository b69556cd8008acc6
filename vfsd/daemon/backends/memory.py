"""The opener of `memory`: a volume in the daemon's memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from protocol.backends.memory import MemoryVolume
from protocol.tree import ByteProgress
from vfsd.daemon.backends.base import Backend
from vfsd.daemon.snapshots.archives import archive, unpack
from vfsd.machine.directories import unused_journal
from vfsd.machine.resources import default_max_memory

if TYPE_CHECKING:
    from vfsd.wire.options import MountOptions


def open_memory(options: MountOptions, progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
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
