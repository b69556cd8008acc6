"""The other workspace of a merge: which states both have, and its changes, received and ready to read.

The content of the changes is in an unnamed file in memory, which is charged to this workspace's memory limit, as is
what is known of each path.  Everything is checked against its hash before it is used.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Final

import trio

from protocol.tree import Tree
from protocol.values import Value
from protocol.volume import Volume
from protocol.volume_extensions import SnapshotableVolume, snapshotable, staging
from vfsd.daemon.merging.delta import Delta, DeltaReader
from vfsd.daemon.merging.layered_tree import LayeredTree
from vfsd.daemon.merging.lineage import Bases, Lineage, MergeLog, StateId, find_bases
from vfsd.daemon.merging.peer import call_peer
from vfsd.daemon.merging.records import lineage_of, state_id, state_record
from vfsd.wire.base import Empty, Peer
from vfsd.wire.merge_messages import ChangesParams, ChangesResult, ForgetMergedParams

_FORGET_S: Final = 5.0


class Other(Value):
    """The other workspace, and the lineages of both.

    `base` is the tree of the base of the merge, and `theirs` that of the other workspace's present state, which it
    keeps as the snapshot `state` if this was asked for.
    """

    here: Lineage
    lineage: Lineage
    bases: Bases
    base: Tree
    theirs: Tree
    state: StateId | None


class OtherWorkspaces:
    """Fetches the changes of other workspaces for the one with `volume`, whose `lineage` a function returns."""

    def __init__(self, volume: Volume, lineage: Callable[[], Awaitable[Lineage]]) -> None:
        self._maybe_volume = snapshotable(volume)
        self._lineage = lineage

    @property
    def _volume(self) -> SnapshotableVolume:
        assert self._maybe_volume is not None, "`lineage` refuses other volumes"
        return self._maybe_volume

    @asynccontextmanager
    async def opened(self, peer: Peer, *, merges: MergeLog | None = None) -> AsyncIterator[Other]:
        """Fetch the changes of `peer`, for the length of the block.  Serving loop.

        With `merges`, what was merged before, that workspace keeps the state that it sent, for the next merge.  If the
        block raises, it drops it.
        """
        here = await self._lineage()
        other = lineage_of(await call_peer(peer, "lineage", Empty()))
        bases = find_bases(here, other)
        with ExitStack() as stack:
            buffer = _Buffer(self._volume, stack)
            base = bases.base if bases.of_other else None
            params = ChangesParams(
                fork_point=state_record(bases.fork_point),
                base=None if base is None else state_record(base),
                max_bytes=buffer.free_bytes,
                merge_into=None if merges is None else here.name,
                keep=[] if merges is None else list(merges.serials_of(other.instance)),
            )
            fork_point = stack.enter_context(self._volume.tree(bases.fork_point.name))
            deltas = _Deltas(1 if base is None else 2, buffer)
            try:
                result: ChangesResult = await call_peer(peer, "changes", params, deltas.feed)
                received = deltas.finish()
                lower: Tree = LayeredTree(fork_point)
                if base is not None:
                    lower = LayeredTree(lower, received.pop(0), buffer.read)
                theirs = LayeredTree(lower, received[0], buffer.read)
                if base is None and bases.base != bases.fork_point:
                    lower = LayeredTree(stack.enter_context(self._volume.tree(bases.base.name)))
                yield Other(here, other, bases, lower, theirs, None if result.state is None else state_id(result.state))
            except BaseException:
                if merges is not None:
                    await _forget(peer, here.name, params.keep)
                raise


class _Buffer:
    """Where received content is kept until `stack` is closed, within the limits of `volume`."""

    def __init__(self, volume: SnapshotableVolume, stack: ExitStack) -> None:
        stats: Any = volume.statfs()
        self.free_bytes: int = stats.blocks_free * stats.block_size
        self.reserve: Callable[[int], None] = lambda _: None
        stageable = staging(volume)
        if stageable is not None:
            stage = stageable.new_stage()
            stack.callback(stage.give_back)
            self._reserve = stack.enter_context(stage.reserving())
            self.reserve = self._reserved
        self._file = os.memfd_create("vfsd-merge", os.MFD_CLOEXEC)
        stack.callback(os.close, self._file)
        self._size = 0

    def _reserved(self, size: int) -> None:
        try:
            self._reserve(size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            reason = "the changes of the other workspace do not fit in memory (--max-memory); nothing was changed"
            raise OSError(errno.ENOSPC, reason) from None

    def store(self, content: bytes) -> int:
        at = self._size
        os.pwrite(self._file, content, at)
        self._size += len(content)
        return at

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self._file, size, at)


class _Deltas:
    """Reads `count` deltas that arrive one after the other."""

    def __init__(self, count: int, buffer: _Buffer) -> None:
        self._readers = [DeltaReader(buffer.store, buffer.reserve) for _ in range(count)]
        self._at = 0

    def feed(self, piece: bytes) -> None:
        while piece and self._at < len(self._readers):
            piece = self._readers[self._at].feed(piece)
            if self._readers[self._at].is_complete:
                self._at += 1

    def finish(self) -> list[Delta]:
        return [reader.finish() for reader in self._readers]


async def _forget(peer: Peer, target: str, keep: list[int]) -> None:
    """Have `peer` drop a state that was not merged after all.  If it cannot, it does so before the next merge."""
    with trio.move_on_after(_FORGET_S, shield=True), contextlib.suppress(OSError):
        await call_peer(peer, "forget_merged", ForgetMergedParams(target=target, keep=keep))
