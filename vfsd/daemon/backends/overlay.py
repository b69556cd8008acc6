"""The opener of `overlay`: a volume in memory on top of a directory, an archive, or a stored snapshot."""

from __future__ import annotations

import errno
import functools
from typing import TYPE_CHECKING, Final

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.host_lower import HostLower
from protocol.tree import ByteProgress
from vfsd.daemon.backends.base import Backend
from vfsd.daemon.backends.recovery import recover_apply
from vfsd.daemon.backends.shared import directory_of
from vfsd.daemon.snapshots.archives import archive, read_origin
from vfsd.machine.directories import unused_journal
from vfsd.machine.resources import default_max_memory

if TYPE_CHECKING:
    from protocol.backends.overlay.lower import Lower
    from vfsd.wire.options import MountOptions

_LOWER_SHARE: Final = 2  # the lower layer may take half of the memory limit
_MIB: Final = 1 << 20


def open_overlay(options: MountOptions, progress: ByteProgress) -> Backend:
    """A `BackendOpener`."""
    limit = options.limits.max_memory or default_max_memory(options.limits.max_bytes)
    recovered = None
    if options.workspace.backend.lower_layer == "directory":
        recovered = recover_apply(options)
    lower, held = _open_lower(options, limit)
    if lower.memory_bytes > limit // _LOWER_SHARE:
        lower.close()
        least = f"--max-memory {_LOWER_SHARE * lower.memory_bytes // _MIB + 1}M"
        raise OSError(errno.ENOMEM, f"the layer below the overlay takes {lower.memory_bytes // _MIB} MiB: use {least}")
    volume = OverlayVolume(
        lower,
        options.limits.max_bytes or limit,
        options.limits.max_inodes,
        include=options.content.include,
        exclude=options.content.exclude,
        max_memory=limit,
    )

    def begin() -> None:
        if options.content.archive is not None:
            with read_origin(archive(options.content.archive), volume, progress).tree() as tree:
                volume.import_tree(tree, replace=False)

    if not options.journal.persist:
        begin()
        volume.mark_saved()
        found = unused_journal(options.workspace.name)
    else:
        # Deferred: few mounts have a journal.
        from vfsd.daemon.backends.persistence import keep_journal  # noqa: PLC0415

        try:
            found = keep_journal(options, volume, begin, below=lower.fingerprint, reopening=lower.reopening)
        except BaseException:
            lower.close()
            raise
    volume.read_only = options.workspace.read_only
    notes = [note for note in (recovered, found, lower.notice) if note is not None]
    return Backend(
        volume,
        tidy=volume.tidy,
        close=functools.partial(_close, volume),
        recovered="; ".join(notes) or None,
        held=held,
        anchor=lower.root_fd,
        reopening=lower.reopening,
    )


def _close(volume: OverlayVolume) -> None:
    if volume.journal is not None:
        from vfsd.daemon.backends.persistence import end_journal  # noqa: PLC0415 (few mounts have a journal)

        end_journal(volume)
    volume.lower.close()


def _open_lower(options: MountOptions, limit: int) -> tuple[Lower, tuple[int, ...]]:
    """Return the layer, and the descriptors of `Backend.held`."""
    backend = options.workspace.backend
    # Start-up: a mount imports only the layer that it uses.
    if backend.lower_layer == "snapshot":
        from vfsd.daemon.backends.lower_snapshot import open_snapshot  # noqa: PLC0415

        lower, lease = open_snapshot(options)
        return lower, (lease,)
    if backend.lower_layer == "remote":
        from vfsd.daemon.backends.lower_remote import open_remote  # noqa: PLC0415

        return open_remote(options), ()
    if backend.lower_layer == "archive":
        from vfsd.daemon.backends.lower_archive import open_archive_below  # noqa: PLC0415

        return open_archive_below(backend.argument, limit), ()
    return HostLower(directory_of(options)), ()
