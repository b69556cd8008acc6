"""StoreStates: the snapshots that a store holds, as `.snapshots` shows them.

Threading: the serving loop.  A state is opened, read and closed in worker threads, in one at a time: each of them
holds the state's lock.  `_opening` excludes that a state is opened twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import trio
from msgspec.structs import replace

from protocol.adapters.snapshot_directory import ReadableState, SnapshotDirectoryVolume
from protocol.errors import SnapshotNotFoundError
from protocol.store import MountedSnapshot, Store
from protocol.tree import Tree, TreeEntry
from protocol.volume import VolumeCapabilities
from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.snapshots.base import is_staged
from vfsd.daemon.snapshots.states import OPEN_STATES, OpenState
from vfsd.daemon.snapshots.stored_workspace import Stored
from vfsd.daemon.snapshots.threads import in_thread

T = TypeVar("T")


class _LockedState(OpenState):
    def __init__(self, state: ReadableState, close: Callable[[], object]) -> None:
        super().__init__(state, close)
        self.lock = trio.Lock()


class _StoredState:
    """A stored snapshot as a `ReadableState`."""

    def __init__(self, mounted: MountedSnapshot) -> None:
        self._mounted = mounted
        self.read = mounted.read

    def entry(self, path: bytes) -> TreeEntry:
        return self._mounted.entry(path)

    def children(self, path: bytes) -> list[bytes]:
        return [name for name, _, _ in self._mounted.rows(path)]


class StoreStates:
    """The snapshots of a workspace in a store."""

    def __init__(self, stored: Stored, shown: Callable[[Tree], Tree]) -> None:
        """`shown` returns a state without what the policy hides."""
        self._shown = shown
        self._store = stored.store
        self._key = stored.key
        self._open: dict[int, _LockedState] = {}  # by serial
        self._opening = trio.Lock()

    async def infos(self) -> Sequence[SnapshotInfo]:
        found = await in_thread(self._store.snapshots, self._key)
        return [info for info in found if not is_staged(info.name)]

    async def using(self, info: SnapshotInfo, read: Callable[[ReadableState], T]) -> T:
        while True:
            async with self._opening:
                opened = self._open.get(info.serial)
                if opened is None:
                    while len(self._open) >= OPEN_STATES:
                        await self._close(next(iter(self._open)))
                    opened = self._open[info.serial] = await in_thread(self._opened, info)
            async with opened.lock:
                if self._open.get(info.serial) is opened:  # else it was closed while this waited
                    opened.is_used = True
                    return await in_thread(read, opened.state)

    def _opened(self, info: SnapshotInfo) -> _LockedState:
        store = Store(self._store.directory)  # of its own: closing the snapshot closes the store's files
        mounted = store.mounted(self._key, info.name)
        if store.snapshot(self._key, info.name).serial != info.serial:
            mounted.close()
            raise SnapshotNotFoundError(info.name)
        # Of a tree, a filter of states uses only what a `ReadableState` has.
        return _LockedState(self._shown(cast("Tree", _StoredState(mounted))), mounted.close)

    async def _close(self, serial: int) -> None:
        opened = self._open[serial]
        async with opened.lock:
            if self._open.get(serial) is opened:
                del self._open[serial]
                await in_thread(opened.close)

    async def close_unused(self, infos: Sequence[SnapshotInfo] | None) -> None:
        existing = None if infos is None else {info.serial for info in infos}
        for serial, opened in list(self._open.items()):
            if not opened.is_used or (existing is not None and serial not in existing):
                await self._close(serial)
            opened.is_used = False


class WithStoredSnapshots(SnapshotDirectoryVolume):
    """A volume whose snapshots are read in threads, so without the shortcuts that never wait."""

    @property
    def capabilities(self) -> VolumeCapabilities:
        return replace(super().capabilities, content_pieces=False, quiet_lookups=False, plain_entries=False)
