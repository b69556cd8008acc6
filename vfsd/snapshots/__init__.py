"""Snapshots of a served workspace, wherever they are kept."""

from __future__ import annotations

from protocol.backends.memory import MemoryVolume
from vfsd.served import Served
from vfsd.snapshots.base import Snapshots
from vfsd.snapshots.volume import VolumeSnapshots

__all__ = ["open_snapshots"]


def open_snapshots(served: Served) -> Snapshots | None:
    """Those of what is served; None where its backend has none."""
    return VolumeSnapshots(served, served.volume) if isinstance(served.volume, MemoryVolume) else None
