"""A backend of another package: a volume that shares no class with vfsd's own and has only what its contract names.

Self-contained: `tests.support.toy_backend` installs the text of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.archive import ByteProgress
from protocol.backends.memory import MemoryVolume
from protocol.volume import Volume, VolumeCapabilities
from protocol.volume_extensions import CheckableVolume, SnapshotableVolume, SnapshotInfo
from vfsd.daemon.backends.registry import Backend
from vfsd.wire.options import MountOptions

__all__ = ["ThirdPartyVolume", "open_third_party"]

_PUBLIC = frozenset(
    name
    for protocol in (Volume, SnapshotableVolume, CheckableVolume)
    for name in vars(protocol)
    if not name.startswith("_")
)


class ThirdPartyVolume:
    """A `protocol.volume_extensions.SnapshotableVolume` over a volume that it holds; it has no other attribute."""

    capabilities = VolumeCapabilities(snapshots=True, self_check=True, durable=False)

    def __init__(self) -> None:
        self.__inner = MemoryVolume()

    def __getattr__(self, name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"{name} is in no protocol of a snapshotable volume")
        return getattr(self.__inner, name)

    @property
    def on_pruned(self) -> Callable[[SnapshotInfo], None] | None:
        return self.__inner.on_pruned

    @on_pruned.setter
    def on_pruned(self, callback: Callable[[SnapshotInfo], None] | None) -> None:
        self.__inner.on_pruned = callback


def open_third_party(options: MountOptions, progress: ByteProgress) -> Backend:
    """The opener of the entry point."""
    return Backend(ThirdPartyVolume())  # type: ignore[arg-type]  # mypy does not see what __getattr__ gives
