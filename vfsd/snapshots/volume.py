"""VolumeSnapshots: those that the volume itself holds, in memory: each is one step on the serving loop.

So the mount sees a change whole or not at all, and a call that is cancelled before that step has changed nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import trio

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.diff import Counts
from protocol.tree import Tree
from protocol.volume import Coherence, SnapshotInfo, SnapshotKind, Volume
from vfsd.served import Served
from vfsd.snapshots.archives import Origin, read_origin
from vfsd.snapshots.base import (
    BASE,
    SAFETY_PREFIX,
    SAFETY_SNAPSHOTS_KEPT,
    SNAPSHOT_PREFIX,
    UNWATCHED,
    Interrupted,
    Outcome,
    Staged,
    Watch,
    free_name,
    in_bytes,
    nothing_below,
)
from vfsd.snapshots.prepared import Prepared

__all__ = ["VolumeSnapshots", "overlay_of"]


def overlay_of(volume: Volume) -> OverlayVolume:
    """The volume, as an overlay.  OSError (EOPNOTSUPP) where it is none."""
    if isinstance(volume, OverlayVolume):
        return volume
    raise nothing_below()


_logger = logging.getLogger(__name__)


def _log_pruned(info: SnapshotInfo) -> None:
    _logger.warning("snapshot %r was dropped to make room: --max-memory is reached", info.name)


class VolumeSnapshots:
    """Implements `vfsd.snapshots.base.Snapshots` over `volume`, which `served` serves."""

    def __init__(self, served: Served, volume: MemoryVolume) -> None:
        self._served = served
        self._volume = volume
        volume.on_pruned = _log_pruned

    @property
    def has_base(self) -> bool:
        """See `Snapshots`, as for all that follow."""
        return isinstance(self._volume, OverlayVolume)

    async def interrupted(self) -> Interrupted | None:
        return None

    async def take(
        self,
        name: str | None,
        tag: str | None,
        watch: Watch,  # noqa: ARG002
        *,
        kind: SnapshotKind = "user",
    ) -> SnapshotInfo:
        async with self._served.changing:
            await self._served.settle()
            name = name or free_name(SNAPSHOT_PREFIX, self._volume.snapshots())
            return self._volume.take_snapshot(name, tag=tag, kind=kind)

    async def infos(self) -> Sequence[SnapshotInfo]:
        return self._volume.snapshots()

    async def change_counts(self) -> Mapping[str, Counts]:
        return {name: Counts(*counts) for name, counts in self._volume.change_counts().items()}

    async def drop(self, name: str) -> None:
        async with self._served.changing:
            self._volume.drop_snapshot(name)

    # -- what changes the live state -----------------------------------------------------------------
    async def restore(self, name: str, paths: Sequence[bytes], watch: Watch) -> Outcome:
        volume = self._volume
        if name == BASE:
            return await self._change(lambda: overlay_of(volume).discard(paths), watch, keep=name)
        volume.snapshot(name)  # there is one, or it raises
        return await self._change(lambda: volume.restore_snapshot(name, paths), watch, keep=name)

    @asynccontextmanager
    async def staged(self, origin: Origin, watch: Watch) -> AsyncIterator[Staged]:
        # The loop waits for the end of its thread even when this is cancelled: that reads what must stay.
        read = functools.partial(read_origin, origin, self._volume, in_bytes(watch))
        staged = await trio.to_thread.run_sync(read)
        try:
            with staged.tree() as tree:
                yield Staged(origin.name, tree, staged.files, staged.size_bytes)
        finally:
            staged.give_back()

    async def put(self, staged: Staged, paths: Sequence[bytes], watch: Watch, *, replace: bool) -> Outcome:
        volume = self._volume
        if isinstance(volume, OverlayVolume):  # whose directories are read from below while they are converged
            return await self._change(lambda: volume.import_tree(staged.tree, replace=replace, paths=paths), watch)
        prepared = Prepared(volume, staged, paths, replace=replace)
        try:
            return await self._change(prepared.put, watch, prepare=functools.partial(prepared.prepare, watch))
        finally:
            await prepared.discard()

    async def _change(
        self,
        change: Callable[[], Coherence],
        watch: Watch,
        keep: str | None = None,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> Outcome:
        async with self._served.changing:
            if prepare is not None:
                await prepare()
            await self._served.settle()
            watch.commit()
            safety = self._take_safety(keep)
            with self._undone_unless_done(safety):
                coherence = change()
            await self._served.changed(coherence)
        return Outcome(safety)

    def _take_safety(self, keep: str | None) -> str:
        """Keep the present state under a name of its own, and let go of the oldest of its kind."""
        infos = self._volume.snapshots()
        old = [info.name for info in infos if info.kind == "safety" and info.name != keep]
        for name in old[: max(0, len(old) + 1 - SAFETY_SNAPSHOTS_KEPT)]:
            self._volume.drop_snapshot(name)
        return self._volume.take_snapshot(free_name(SAFETY_PREFIX, infos), kind="safety").name

    @contextmanager
    def _undone_unless_done(self, safety: str) -> Iterator[None]:
        """A change that fails leaves the state as it was, and no safety snapshot for what did not happen."""
        try:
            yield
        except BaseException:
            self._volume.drop_snapshot(safety)
            raise

    # -- states --------------------------------------------------------------------------------------
    @asynccontextmanager
    async def tree(self, name: str | None, watch: Watch = UNWATCHED) -> AsyncIterator[Tree]:  # noqa: ARG002
        volume = self._volume
        with overlay_of(volume).base_tree() if name == BASE else volume.tree(name) as tree:
            yield tree

    @asynccontextmanager
    async def frozen(self, watch: Watch) -> AsyncIterator[Tree]:  # noqa: ARG002
        await self._served.settle()
        with self._volume.tree() as tree:
            yield tree
