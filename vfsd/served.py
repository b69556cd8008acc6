"""Served: a volume that an engine serves, and how it is changed beside the mount.

Every change that comes another way than through the mount (restore, import) goes through here, so that

- what programs have written to shared mappings is in the volume before a state is kept, replaced or
  exported (`settle`);
- the kernel has forgotten the old state when the caller is answered (`changed`);
- only one such change is made at a time (`changing`), and none begins before the kernel was told of the last.

Threading: the serving loop.  `settle` and `changed` await; the change itself is one call on the volume
between them, so the mount sees it whole or not at all.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Final

import trio

from protocol.backends.memory import MemoryVolume
from protocol.volume import Coherence
from vfsd.coherence import tell_kernel
from vfsd.engines.base import Engine
from vfsd.logs import log_failure
from vfsd.replay import Replay

__all__ = ["Served"]

_logger = logging.getLogger(__name__)
_LIBC: Final = ctypes.CDLL(None, use_errno=True)  # os has sync(), but no syncfs()


class Served:
    """One volume, its engine and its mountpoint.  `nursery` outlives every call on it."""

    def __init__(
        self, volume: MemoryVolume, engine: Engine, replay: Replay, mountpoint: str, nursery: trio.Nursery
    ) -> None:
        self.volume = volume
        self.engine = engine
        self.mountpoint = mountpoint
        self.changing = trio.Lock()
        self._replay = replay
        self._nursery = nursery

    async def settle(self) -> None:
        """Have the dirty pages of shared mappings written to the volume, as far as they were dirty at the call."""
        try:
            await trio.to_thread.run_sync(_syncfs, self.mountpoint, abandon_on_cancel=True)
        except OSError as error:
            # Detached lazily, or a root directory that the daemon's own user may not open.
            log_failure(_logger, "syncfs", error, path=self.mountpoint, level=logging.WARNING)
        await self.engine.drained()

    async def changed(self, coherence: Coherence) -> None:
        """Return when no program can see the state before the change; inotify watchers are told after that."""
        await tell_kernel(self.engine, coherence)
        self._nursery.start_soon(self._replay.run, coherence)


def _syncfs(mountpoint: str) -> None:
    """syncfs(2)."""
    descriptor = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _LIBC.syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), mountpoint)
    finally:
        os.close(descriptor)
