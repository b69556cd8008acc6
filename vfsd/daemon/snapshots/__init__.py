"""Snapshots of a mounted workspace, held by its volume or by a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from protocol.volume_extensions import externally_changed, snapshotable
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import SnapshotService

if TYPE_CHECKING:
    from vfsd.daemon.merging.lineage import MergeLog
    from vfsd.daemon.snapshots.history import PrunedRecord, UndoHistory
    from vfsd.daemon.snapshots.store_restore import Stored

__all__ = ["open_snapshots"]


def open_snapshots(
    mounted: MountedVolume,
    stored: Stored | None,
    history: UndoHistory | None = None,
    merges: MergeLog | None = None,
    pruned: Sequence[PrunedRecord] = (),
) -> SnapshotService | None:
    """Return the volume's own snapshots, or those in `stored`; None if the backend has neither.

    `history` and `merges` are those of the workspace that this one was forked from.  `pruned`: of the daemon before.
    """
    # Start-up: only one of the two is needed.
    volume = snapshotable(mounted.volume)
    if volume is not None:
        from vfsd.daemon.snapshots.volume import VolumeSnapshots  # noqa: PLC0415

        return VolumeSnapshots(mounted, volume, history, merges, pruned)
    changed = externally_changed(mounted.volume)
    if stored is not None and changed is not None:
        from vfsd.daemon.snapshots.stored import StoreSnapshots  # noqa: PLC0415

        return StoreSnapshots(mounted, changed, stored)
    return None
