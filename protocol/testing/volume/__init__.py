"""VolumeContract: the behaviour of every writable POSIX volume."""

from __future__ import annotations

from protocol.testing.volume.content import AttributesContract, ContentContract
from protocol.testing.volume.driver import Clock, Driver, MakeVolume
from protocol.testing.volume.entries import EntriesContract

__all__ = ["Clock", "Driver", "MakeVolume", "VolumeContract"]


class VolumeContract(EntriesContract, ContentContract, AttributesContract):
    """Subclass it, and override the fixture `volume` with a factory (`MakeVolume`)."""
