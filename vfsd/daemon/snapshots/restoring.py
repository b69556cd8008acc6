"""Restoring: what a restore by the store's thread and the volume on the serving loop have to tell each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, runtime_checkable

import trio

from protocol.diff.tree_diff import Change
from protocol.volume import CacheInvalidation
from vfsd.daemon.snapshots.base import CallObserver

__all__ = ["Changeable", "Restoring", "looking"]

_STEP: Final = 500  # paths that the volume takes in at once: for some 15 ms the mount waits


@runtime_checkable
class Changeable(Protocol):
    """A volume whose files a restore changes beside the mount, as the volume has to take it.  The serving loop."""

    def hold(self, paths: Iterable[bytes]) -> None:
        """What is at `paths` is about to be changed: who has it open goes on.  Called once or more."""
        ...

    def invalidation_of(self, changes: Iterable[Change]) -> CacheInvalidation:
        """`changes`, or part of them, have been made; what the kernel must be told.  Called once or more."""
        ...

    def release(self) -> None:
        """All is settled that `hold` was told of."""
        ...


class Restoring:
    """One restore, as the store's thread tells of it.

    `changes` are what it is about to make; before there are any, nobody waiting any more ends it.
    """

    def __init__(self, volume: Changeable, watch: CallObserver) -> None:
        self.changes: list[Change] = []
        self._volume = volume
        self._watch = watch
        self._is_planned = False
        self._loop = trio.lowlevel.current_trio_token()

    def planned(self, found: Sequence[Change], touched: Sequence[Change]) -> None:
        """The store is about to make `found`, and to set the mtimes of the directories `touched`.  Its thread."""
        self._watch.commit()
        self.changes = [*found, *touched]
        trio.from_thread.run(self._hold, [change.path for change in found], trio_token=self._loop)
        self._is_planned = True

    async def _hold(self, paths: Sequence[bytes]) -> None:
        for at in range(0, len(paths), _STEP):
            self._volume.hold(paths[at : at + _STEP])
            await trio.lowlevel.checkpoint()

    async def settled(self) -> CacheInvalidation:
        """What the kernel must be told, however far it got."""
        parts = []
        for at in range(0, len(self.changes), _STEP):
            parts.append(self._volume.invalidation_of(self.changes[at : at + _STEP]))
            await trio.lowlevel.checkpoint()
        self._volume.release()
        return CacheInvalidation(
            [change for part in parts for change in part.entries],
            [change for part in parts for change in part.inodes],
            {number: path for part in parts for number, path in part.paths.items()},
            {number: mode for part in parts for number, mode in part.modes.items()},
        )

    def tell(self, done: int, total: int) -> None:
        """How far the store is.  Its thread."""
        if self._is_planned:
            self._watch.progress_nowait(done, total, "files")
        else:
            self._watch.raise_if_cancelled()
            self._watch.progress_nowait(done, 0, "files")


def looking(watch: CallObserver) -> Callable[[int, int], None]:
    """Progress of taking a state in, which ends when nobody waits any more."""

    def tell(files: int, read_bytes: int) -> None:  # noqa: ARG001 -- the store's
        watch.raise_if_cancelled()
        watch.progress_nowait(files, 0, "files")

    return tell
