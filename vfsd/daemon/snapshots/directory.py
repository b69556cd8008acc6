"""SnapshotDirectory: keeps `.snapshots` of a mount (`protocol.adapters.snapshot_directory`) true and small.

Threading: the serving loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Final

import trio

from protocol.adapters.snapshot_directory import FIRST_INODE, SnapshotDirectoryVolume, shown_name
from protocol.volume import Volume
from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange, SnapshotInfo, snapshotable
from vfsd.daemon.snapshots.states import States, VolumeStates
from vfsd.kernel.engines.base import Engine
from vfsd.kernel.invalidation import invalidate_kernel_caches
from vfsd.machine.logs import log_failure

if TYPE_CHECKING:
    from vfsd.daemon.policy.service import Policy
    from vfsd.daemon.snapshots.stored_workspace import Stored

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

    async def forget_all(self, engine: Engine) -> None:
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
            await self._forget_earlier(engine)
            taken_over.set()

        nursery.start_soon(run)
        with trio.move_on_after(_TAKE_OVER_S):
            await taken_over.wait()

    async def _forget_earlier(self, engine: Engine) -> None:
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

    `is_continued`: another daemon has served the mount.
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
    # Start-up: a workspace in memory needs no store.
    from vfsd.daemon.snapshots.stored_states import StoreStates, WithStoredSnapshots  # noqa: PLC0415

    of_store = StoreStates(stored, shown)
    return SnapshotDirectory(WithStoredSnapshots(served, of_store, is_visible=is_visible, seed=seed), of_store)
