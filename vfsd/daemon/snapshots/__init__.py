"""Snapshots of a mounted workspace, held by its volume or by a store."""

from __future__ import annotations

from protocol.volume import externally_changed, snapshotable
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import SnapshotService
from vfsd.daemon.snapshots.stored import Stored, StoreSnapshots
from vfsd.daemon.snapshots.volume import VolumeSnapshots

__all__ = ["open_snapshots"]


def open_snapshots(mounted: MountedVolume, stored: Stored | None) -> SnapshotService | None:
    """Return the volume's own snapshots, or those in `stored`; None if the backend has neither."""
    volume = snapshotable(mounted.volume)
    if volume is not None:
        return VolumeSnapshots(mounted, volume)
    changed = externally_changed(mounted.volume)
    if stored is not None and changed is not None:
        return StoreSnapshots(mounted, changed, stored)
    return None
