"""Snapshots of a served workspace, wherever they are kept."""

from __future__ import annotations

from protocol.backends.memory import MemoryVolume
from vfsd.served import Served
from vfsd.snapshots.base import Snapshots
from vfsd.snapshots.restoring import Changeable
from vfsd.snapshots.stored import Stored, StoreSnapshots
from vfsd.snapshots.volume import VolumeSnapshots

__all__ = ["open_snapshots"]


def open_snapshots(served: Served, stored: Stored | None) -> Snapshots | None:
    """Those of what is served: the volume's own, or those in a store; None where its backend has none."""
    volume = served.volume
    if isinstance(volume, MemoryVolume):
        return VolumeSnapshots(served, volume)
    if stored is not None and isinstance(volume, Changeable):
        return StoreSnapshots(served, volume, stored)
    return None
