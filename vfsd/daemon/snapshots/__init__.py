"""Snapshots of a served workspace, wherever they are kept."""

from __future__ import annotations

from protocol.backends.memory import MemoryVolume
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import SnapshotService
from vfsd.daemon.snapshots.restoring import Changeable
from vfsd.daemon.snapshots.stored import Stored, StoreSnapshots
from vfsd.daemon.snapshots.volume import VolumeSnapshots

__all__ = ["open_snapshots"]


def open_snapshots(served: MountedVolume, stored: Stored | None) -> SnapshotService | None:
    """Those of what is served: the volume's own, or those in a store; None where its backend has none."""
    volume = served.volume
    if isinstance(volume, MemoryVolume):
        return VolumeSnapshots(served, volume)
    if stored is not None and isinstance(volume, Changeable):
        return StoreSnapshots(served, volume, stored)
    return None
