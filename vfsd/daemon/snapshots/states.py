"""The snapshots of a workspace, opened while `.snapshots` shows them.

A state is opened when something in it is read, and closed when it was not read for a second or its snapshot was
dropped.  So a dropped snapshot frees its memory or disk space, even if programs have files of it open.

Threading: the serving loop.  `VolumeStates` never awaits, so no state is closed while it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from protocol.adapters.snapshot_directory import ReadableState, SnapshotStates
from protocol.errors import SnapshotNotFoundError
from protocol.volume_extensions import SnapshotableVolume, SnapshotInfo

if TYPE_CHECKING:
    from protocol.tree import Tree

T = TypeVar("T")
OPEN_STATES: Final = 4  # of one workspace; a comparison of two snapshots reads both in turns


class States(SnapshotStates, Protocol):
    """The snapshots of a workspace, which are opened when they are read."""

    async def close_unused(self, infos: Sequence[SnapshotInfo] | None) -> None:
        """Close the states that were not read since the last call; with `infos`, all others than these."""
        ...


class OpenState:
    """A state that is open."""

    def __init__(self, state: ReadableState, close: Callable[[], object]) -> None:
        self.state = state
        self.close = close
        self.is_used = True


class VolumeStates:
    """The snapshots that `volume` itself holds."""

    def __init__(self, volume: SnapshotableVolume, shown: Callable[[Tree], Tree] = lambda tree: tree) -> None:
        """`shown` returns a state without what the policy hides."""
        self._volume = volume
        self._shown = shown
        self._open: dict[int, OpenState] = {}  # by serial

    def infos(self) -> Sequence[SnapshotInfo]:
        return self._volume.snapshots()

    def using(self, info: SnapshotInfo, read: Callable[[ReadableState], T]) -> T:
        if self._volume.snapshot(info.name).serial != info.serial:
            raise SnapshotNotFoundError(info.name)
        opened = self._open.get(info.serial)
        if opened is None:
            while len(self._open) >= OPEN_STATES:
                self._open.pop(next(iter(self._open))).close()
            stack = ExitStack()
            tree = stack.enter_context(self._volume.tree(info.name))
            opened = self._open[info.serial] = OpenState(self._shown(tree), stack.close)
        opened.is_used = True
        return read(opened.state)

    async def close_unused(self, infos: Sequence[SnapshotInfo] | None) -> None:
        existing = None if infos is None else {info.serial for info in infos}
        for serial, opened in list(self._open.items()):
            if not opened.is_used or (existing is not None and serial not in existing):
                self._open.pop(serial).close()
            opened.is_used = False
