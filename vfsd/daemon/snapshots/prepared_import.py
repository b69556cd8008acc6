"""An import in two parts: entries that are built in slices, while the mount answers, and one step that shows them.

Threading: the serving loop.  The checkpoint after each slice lets programs change the volume; the step itself has none.
"""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final

import trio

from protocol.volume_extensions import CacheInvalidation, PreparingVolume
from vfsd.daemon.snapshots.base import CallObserver, Staged

_SLICE_S: Final = 0.004  # a request through the mount waits for one slice at most
_CLOCK_EVERY: Final = 16  # steps


class PreparedImport:
    """An import whose new entries are built in slices, between which the mount answers, and then shown in one step.

    Call `prepare`, `put` and, in any case, `discard`.  Between the first two no snapshot may be taken.
    """

    def __init__(self, volume: PreparingVolume, staged: Staged, extent: Mapping[str, Any]) -> None:
        """`extent`: arguments of `import_tree`."""
        self._volume = volume
        self._staged = staged
        self._preparation = volume.preparation(staged.tree, **extent)
        self._import_all = functools.partial(volume.import_tree, staged.tree, **extent)
        self._view = ExitStack()
        self._is_abandoned = False
        self._is_done = False

    async def prepare(self, observer: CallObserver) -> None:
        """Build the entries.  If they do not fit in memory now, `put` does everything: it may free some."""
        self._view.enter_context(self._volume.tree())  # while it is open, a file that changes gets a new version
        try:
            await _in_slices(self._observed(self._preparation.steps(), observer))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._is_abandoned = True
            await self.discard()

    def put(self) -> CacheInvalidation:
        """Put everything in place, all or nothing.  Raises what `SnapshotableVolume.import_tree` raises."""
        if self._is_abandoned or not self._preparation.is_valid:
            for _ in self._preparation.discard():
                pass
            return self._import_all()
        self._is_done = True
        return self._volume.import_prepared(self._preparation)

    async def discard(self) -> None:
        """Remove the entries that were built and not put in place."""
        self._view.close()
        if not self._is_done:
            with trio.CancelScope(shield=True):
                await _in_slices(self._preparation.discard())

    def _observed(self, steps: Iterator[int], observer: CallObserver) -> Iterator[None]:
        total = self._staged.files
        done = 0
        for count in steps:
            done += count
            observer.raise_if_cancelled()
            observer.progress_nowait(min(done, total), total, "files")
            yield


async def _in_slices(steps: Iterator[None]) -> None:
    """Run `steps`, with a checkpoint after each slice."""
    until_s = time.perf_counter() + _SLICE_S
    for count, _ in enumerate(steps):
        if count % _CLOCK_EVERY == 0 and time.perf_counter() > until_s:
            await trio.sleep(0)
            until_s = time.perf_counter() + _SLICE_S
