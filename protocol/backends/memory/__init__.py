"""The memory backend: a volume in memory whose snapshots are an undo log."""

from protocol.backends.memory.history.snapshots import ReservedInodes
from protocol.backends.memory.volume import MemoryUse, MemoryVolume

__all__ = ["MemoryUse", "MemoryVolume", "ReservedInodes"]
