"""The overlay backend: a lower directory, which is only read, and changes to it, which are held in memory."""

from protocol.backends.overlay.volume import OverlayVolume

__all__ = ["OverlayVolume"]
