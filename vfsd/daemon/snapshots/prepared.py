"""Prepared: content on its way into a memory volume, built in slices between which the mount is served.

Threading: the serving loop.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import trio

from protocol.backends.memory import MemoryVolume
from protocol.volume import CacheInvalidation
from vfsd.daemon.snapshots.base import CallObserver, Staged

__all__ = ["Prepared"]

_SLICE_S: Final = 0.004  # a request through the mount waits for one slice at most
_CLOCK_EVERY: Final = 16  # steps


class Prepared:
    """What `staged` has and `volume` has not, built before the one step that shows it.

    `prepare`, `put` and, in any case, `discard`.  Between the first two no snapshot may be taken.
    """

    def __init__(self, volume: MemoryVolume, staged: Staged, paths: Sequence[bytes], *, replace: bool) -> None:
        self._volume = volume
        self._staged = staged
        self._paths = paths
        self._replace = replace
        self._preparation = volume.preparation(staged.tree, replace=replace, paths=paths)
        self._view = ExitStack()
        self._is_left = False  # to the one step, all of it
        self._is_done = False

    async def prepare(self, watch: CallObserver) -> None:
        """Build it.  What does not fit beside the present content is left to `put`, which may replace that."""
        self._view.enter_context(self._volume.tree())  # so that a file that changes gets a new version
        try:
            await _in_slices(self._told(self._preparation.steps(), watch))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._is_left = True
            await self.discard()

    def put(self) -> CacheInvalidation:
        """Put everything in place, all or nothing.  Errors as of `SnapshotableVolume.import_tree`."""
        if self._is_left or not self._preparation.is_valid:
            for _ in self._preparation.discard():
                pass
            return self._volume.import_tree(self._staged.tree, replace=self._replace, paths=self._paths)
        self._is_done = True
        return self._volume.import_prepared(self._preparation)

    async def discard(self) -> None:
        """Remove what was built and not put in place."""
        self._view.close()
        if not self._is_done:
            with trio.CancelScope(shield=True):
                await _in_slices(self._preparation.discard())

    def _told(self, steps: Iterator[int], watch: CallObserver) -> Iterator[None]:
        total = self._staged.files
        done = 0
        for count in steps:
            done += count
            watch.raise_if_cancelled()
            watch.progress_nowait(min(done, total), total, "files")
            yield


async def _in_slices(steps: Iterator[None]) -> None:
    """Run `steps`, with a checkpoint after each slice."""
    until_s = time.perf_counter() + _SLICE_S
    for count, _ in enumerate(steps):
        if count % _CLOCK_EVERY == 0 and time.perf_counter() > until_s:
            await trio.sleep(0)
            until_s = time.perf_counter() + _SLICE_S
