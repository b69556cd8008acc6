"""SnapshotDirectory: keeps `.snapshots` of a mount (`protocol.adapters.snapshot_directory`) true and small.

A state is opened when something in it is read, and closed when it was not read for a second or its snapshot was
dropped.  So a dropped snapshot frees its memory or disk space, even if programs have files of it open.

Threading: the serving loop.  `VolumeStates` never awaits, so no state is closed while it is read.  `StoreStates` opens,
reads and closes a state in worker threads, in one at a time: each of them holds the state's lock.  `_opening` excludes
that a state is opened twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import trio

from protocol.adapters.snapshot_directory import (
    FIRST_INODE,
    SnapshotDirectoryVolume,
    SnapshotStates,
    shown_name,
)
from protocol.errors import SnapshotNotFoundError
from protocol.tree import Tree
from protocol.volume import Volume
from protocol.volume_extensions import (
    CacheInvalidation,
    EntryChange,
    InodeChange,
    SnapshotableVolume,
    SnapshotInfo,
    snapshotable,
)
from vfsd.daemon.snapshots.base import in_thread, is_staged
from vfsd.kernel.engines.base import Engine
from vfsd.kernel.invalidation import invalidate_kernel_caches
from vfsd.machine.logs import log_failure

if TYPE_CHECKING:
    from protocol.tree import Tree
    from vfsd.daemon.policy.service import Policy
    from vfsd.daemon.snapshots.store_restore import Stored

_logger = logging.getLogger(__name__)
_SEED_BYTES: Final = 8
_TAKE_OVER_S: Final = 1.0  # programs wait; it takes milliseconds if none is in `.snapshots`


class SnapshotDirectory:
    """`.snapshots` of a mount.  `volume` is what the engine serves."""

    def __init__(self, volume: SnapshotDirectoryVolume, states: States) -> None:
        self.volume = volume
        self._states = states
        self._refused: set[int] = set()
        volume.on_refused_write = self._refused.add

    @property
    def is_entered(self) -> bool:
        """Whether the kernel knows something of the snapshots."""
        return self.volume.is_entered

    async def invalidate(self, engine: Engine) -> None:
        """Return when programs see of the snapshots only what the policy shows now."""
        await self._states.close_unused(())  # the next read opens what is shown
        if self.is_entered:
            gone = self.volume.names_to_invalidate(())
            entries = [EntryChange(FIRST_INODE, name, inode, 0) for name, inode in gone]
            inodes = [InodeChange(inode, content=True) for inode in self.volume.known_inodes]
            await invalidate_kernel_caches(engine, CacheInvalidation(entries, inodes))

    async def take_over(self, engine: Engine, nursery: trio.Nursery) -> None:
        """Have the kernel forget what an earlier daemon has shown, whose inodes this one does not know.

        Call it before the mount is served: what programs ask for until then is stale.  While a program waits for an
        answer in `.snapshots`, the kernel waits for that, so this returns after a moment and goes on in `nursery`.
        """
        taken_over = trio.Event()

        async def run() -> None:
            await self._invalidate_earlier(engine)
            taken_over.set()

        nursery.start_soon(run)
        with trio.move_on_after(_TAKE_OVER_S):
            await taken_over.wait()

    async def _invalidate_earlier(self, engine: Engine) -> None:
        try:
            names = [shown_name(info) for info in await self._infos()]
            entries = [EntryChange(FIRST_INODE, name, 0, 0) for name in names if name is not None]
            listing = InodeChange(FIRST_INODE, content=True)
            await invalidate_kernel_caches(engine, CacheInvalidation(entries, [listing]))
        except Exception as error:  # noqa: BLE001 -- the mount goes on; what was known of the snapshots is stale
            log_failure(_logger, "taking over .snapshots", error, level=logging.WARNING)

    async def list_again(self, engine: Engine) -> None:
        """Return when programs that list `.snapshots` see the snapshots that exist.  Failures are logged."""
        try:
            if self.is_entered:
                await invalidate_kernel_caches(engine, CacheInvalidation(inodes=self._outdated(await self._infos())))
        except Exception as error:  # noqa: BLE001 -- the mount goes on; the next refresh tries it again
            log_failure(_logger, "listing .snapshots", error, level=logging.WARNING)

    async def _infos(self) -> Sequence[SnapshotInfo]:
        found = self._states.infos()
        return await found if isinstance(found, Awaitable) else found

    def _outdated(self, infos: Sequence[SnapshotInfo]) -> list[InodeChange]:
        return [InodeChange(FIRST_INODE, content=True)] if self.volume.take_outdated_listing(infos) else []

    async def refresh(self, engine: Engine) -> None:
        """Close states that are not read; invalidate names of dropped snapshots, and listings.  Failures are logged."""
        try:
            infos: Sequence[SnapshotInfo] | None = None
            gone: list[tuple[bytes, int]] = []
            inodes: list[InodeChange] = []
            if self.is_entered:
                infos = await self._infos()
                gone = self.volume.names_to_invalidate(infos)
                inodes = self._outdated(infos)
            await self._states.close_unused(infos)
            inodes += [InodeChange(inode, content=True) for inode in self._refused]
            self._refused.clear()
            entries = [EntryChange(FIRST_INODE, name, inode, 0) for name, inode in gone]
            await invalidate_kernel_caches(engine, CacheInvalidation(entries, inodes))
            if infos is not None:
                # After the names, with which the kernel forgets all that no program uses; again with each refresh,
                # because an answer to a request in progress may have been cached since.
                stale = [InodeChange(inode, content=is_dir) for inode, is_dir in self.volume.stale_inodes(infos)]
                await invalidate_kernel_caches(engine, CacheInvalidation((), stale))
        except Exception as error:  # noqa: BLE001 -- the mount goes on; the next refresh tries it again
            log_failure(_logger, "refreshing .snapshots", error, level=logging.WARNING)


def open_directory(
    volume: Volume, stored: Stored | None, *, is_visible: bool, policy: Policy | None = None, is_continued: bool = False
) -> SnapshotDirectory | None:
    """Return the directory of a workspace; None if its backend has no snapshots.

    `is_continued`: a predecessor has served the mount.
    """
    seed = os.urandom(_SEED_BYTES) if is_continued else b""
    own = snapshotable(volume)
    served, shown = (volume, lambda tree: tree) if policy is None else (policy.volume, policy.shown)
    if own is not None:
        of_volume = VolumeStates(own, shown)
        return SnapshotDirectory(
            SnapshotDirectoryVolume(served, of_volume, is_visible=is_visible, seed=seed), of_volume
        )
    if stored is None:
        return None
    of_store = StoreStates(stored, shown)
    directory = SnapshotDirectoryVolume(served, of_store, is_visible=is_visible, seed=seed, waits=True)
    return SnapshotDirectory(directory, of_store)


T = TypeVar("T")
OPEN_STATES: Final = 4  # of one workspace; a comparison of two snapshots reads both in turns


class States(SnapshotStates, Protocol):
    """The snapshots of a workspace, which are opened when they are read."""

    async def close_unused(self, infos: Sequence[SnapshotInfo] | None) -> None:
        """Close the states that were not read since the last call; with `infos`, all others than these."""
        ...


class OpenState:
    """A state that is open."""

    def __init__(self, state: Tree, close: Callable[[], object]) -> None:
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

    def using(self, info: SnapshotInfo, read: Callable[[Tree], T]) -> T:
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


class _LockedState(OpenState):
    def __init__(self, state: Tree, close: Callable[[], object]) -> None:
        super().__init__(state, close)
        self.lock = trio.Lock()


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

    async def using(self, info: SnapshotInfo, read: Callable[[Tree], T]) -> T:
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
        from protocol.store import Store  # noqa: PLC0415 (start-up: a workspace in memory needs no store)

        store = Store(self._store.directory)  # of its own: closing the snapshot closes the store's files
        mounted = store.mounted(self._key, info.name)
        if store.snapshot(self._key, info.name).serial != info.serial:
            mounted.close()
            raise SnapshotNotFoundError(info.name)
        return _LockedState(self._shown(mounted), mounted.close)

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
