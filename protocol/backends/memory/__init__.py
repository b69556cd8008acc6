"""The memory backend: a volume in memory whose snapshots are an undo log."""

from protocol.backends.memory.volume import MemoryVolume

__all__ = ["MemoryVolume"]
