"""The overlay backend: a directory below, which is only read, and what was changed, above it in memory."""

from protocol.backends.overlay.volume import OverlayVolume

__all__ = ["OverlayVolume"]
