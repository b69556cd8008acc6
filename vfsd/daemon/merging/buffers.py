"""Buffers for content that was received and is about to be read: unnamed files, in memory or on disk."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from protocol.volume import Volume
from protocol.volume_extensions import StagingVolume, staging


class Buffer:
    """A buffer that lives until the stack is closed that it was opened with.

    `free_bytes`: how much it can take.  `reserve` is called with the number of bytes that are about to be kept, here or
    as what is known of paths, and raises ENOSPC if they do not fit.
    """

    def __init__(self, descriptor: int, free_bytes: int, reserve: Callable[[int], None]) -> None:
        self._file = descriptor
        self._size = 0
        self.free_bytes = free_bytes
        self.reserve = reserve

    def store(self, content: bytes) -> int:
        """Append `content`; return where it begins."""
        at = self._size
        os.pwrite(self._file, content, at)
        self._size += len(content)
        return at

    def read(self, at: int, size: int) -> bytes:
        """Read back what was stored."""
        return os.pread(self._file, size, at)


def buffer_on_disk(directory: str, stack: AsyncExitStack) -> Buffer:
    """Open a buffer in `directory`."""
    file = stack.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0)).fileno()  # noqa: SIM115 (the stack)
    found = os.fstatvfs(file)
    return Buffer(file, found.f_bavail * found.f_frsize, lambda _: None)


def buffer_in_memory(volume: Volume, stack: AsyncExitStack) -> Buffer:
    """Open a buffer in memory, within the limits of `volume`."""
    stats: Any = volume.statfs()
    stageable = staging(volume)
    reserve: Callable[[int], None] = (lambda _: None) if stageable is None else _reserving(stageable, stack)
    file = os.memfd_create("vfsd-merge", os.MFD_CLOEXEC)
    stack.callback(os.close, file)
    return Buffer(file, stats.blocks_free * stats.block_size, reserve)


def _reserving(volume: StagingVolume, stack: AsyncExitStack) -> Callable[[int], None]:
    stage = volume.new_stage()
    stack.callback(stage.give_back)
    reserve = stack.enter_context(stage.reserving())

    def reserved(size: int) -> None:
        try:
            reserve(size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            reason = "the changes of the other workspace do not fit in memory (--max-memory); nothing was changed"
            raise OSError(errno.ENOSPC, reason) from None

    return reserved
