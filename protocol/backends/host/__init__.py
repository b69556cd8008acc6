"""The host backend: a real directory as a volume."""

from protocol.backends.host.volume import HostVolume

__all__ = ["HostVolume"]
