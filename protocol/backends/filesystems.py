"""Named constructors of filesystems: `InMemoryFilesystem`."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from protocol.adapters.host import HostMount, hydrate
from protocol.adapters.volume import SharedVolume, VolumeFilesystem
from protocol.backends.memory import MemoryVolume
from protocol.paths import DEFAULT_LIMITS, CallLimits
from protocol.volume import Volume
from protocol.volume_extensions import CacheInvalidation


class InMemoryFilesystem(VolumeFilesystem):
    """A filesystem in memory that starts with the files of `mounts`.  See `MemoryVolume` for the quotas.

    Implements `protocol.filesystem.MountableFilesystem`: a mount serves the volume, whose limits are those of the
    kernel; `limits` binds only the calls of this object.
    """

    def __init__(
        self,
        *,
        mounts: Sequence[HostMount] = (),
        read_only: bool = False,
        max_bytes: int | None = None,
        max_inodes: int | None = None,
        limits: CallLimits = DEFAULT_LIMITS,
    ) -> None:
        self._memory = volume = MemoryVolume(max_bytes, max_inodes)
        self._is_served = False
        super().__init__(volume, limits=limits)
        for mount in mounts:
            hydrate(volume, mount)
        volume.read_only = read_only

    @contextmanager
    def serving_volume(
        self, lock: AbstractContextManager[Any], invalidate: Callable[[CacheInvalidation], None]
    ) -> Iterator[Volume]:
        if self._is_served:
            raise OSError(errno.EBUSY, "this filesystem object is mounted already: unmount it first")
        memory, before = self._memory, self._memory.lookup_counts()
        shared = SharedVolume(memory, lock, invalidate)
        self._use(shared)  # its methods are found when they are called
        self._is_served = True
        try:
            yield memory
        finally:
            self._use(memory)
            self._is_served = False
            with lock:
                # The kernel forgets nothing when it unmounts, and an inode with lookups is never freed.
                for inode, count in memory.lookup_counts().items():
                    memory.forget(inode, count - before.get(inode, 0) - shared.lookups[inode])

    def import_archive(self, path: str | os.PathLike[str]) -> None:
        if not self._is_served:
            super().import_archive(path)
            return
        # The archive may be on the mount, whose thread waits while the volume imports it.
        with tempfile.NamedTemporaryFile() as copy:
            with open(path, "rb") as archive:
                shutil.copyfileobj(archive, copy)
            copy.flush()
            super().import_archive(copy.name)
