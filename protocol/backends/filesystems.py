"""Named constructors of filesystems: `InMemoryFilesystem`."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.adapters.path_filesystem.hydrate import HostMount, hydrate
from protocol.adapters.volume import VolumeFilesystem
from protocol.backends.memory import MemoryVolume
from protocol.paths import DEFAULT_LIMITS, CallLimits


class InMemoryFilesystem(VolumeFilesystem):
    """A filesystem in memory that starts with the files of `mounts`.  See `MemoryVolume` for the quotas."""

    def __init__(
        self,
        *,
        mounts: Sequence[HostMount] = (),
        read_only: bool = False,
        max_bytes: int | None = None,
        max_inodes: int | None = None,
        limits: CallLimits = DEFAULT_LIMITS,
    ) -> None:
        volume = MemoryVolume(max_bytes, max_inodes)
        super().__init__(volume, limits=limits)
        for mount in mounts:
            hydrate(volume, mount)
        volume.read_only = read_only
