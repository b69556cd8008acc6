"""The other workspace of a merge: which states both have, and its changes, received and ready to read.

The content of the changes is in an unnamed file.  For a workspace in memory the file is in memory, and it is charged to
the memory limit, as is what is known of each path.  For others the file is in the store.  Everything is checked against
its hash before it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final

import trio

from protocol.tree import Tree
from protocol.values import Value
from protocol.volume import Volume
from protocol.volume_extensions import snapshotable
from vfsd.daemon.merging.buffers import Buffer, buffer_in_memory, buffer_on_disk
from vfsd.daemon.merging.delta import Delta, DeltaReader
from vfsd.daemon.merging.empty_tree import EmptyTree
from vfsd.daemon.merging.layered_tree import LayeredTree
from vfsd.daemon.merging.lineage import Bases, Lineage, MergeLog, StateId, find_bases
from vfsd.daemon.merging.peer import call_peer
from vfsd.daemon.merging.records import lineage_of, state_id, state_record
from vfsd.daemon.snapshots.threads import in_thread
from vfsd.operations.declaration import Empty, Peer
from vfsd.operations.merge import ChangesParams, ChangesResult, ForgetMergedParams

_FORGET_S: Final = 5.0


class Other(Value):
    """The other workspace, and the lineages of both.

    `base` is the tree of the base of the merge, and `theirs` that of the other workspace's present state, which it
    keeps as the snapshot `state` if this was asked for.  Without a common state, `bases` is None and `base` is empty.
    """

    here: Lineage
    lineage: Lineage
    bases: Bases | None
    base: Tree
    theirs: Tree
    state: StateId | None


class OtherWorkspaces:
    """Fetches the changes of other workspaces for the one with `volume`.

    `lineage` returns the lineage of that workspace, and `tree` opens one of its states.  `directory` returns where the
    content of changes is kept that a volume outside memory receives.
    """

    def __init__(
        self,
        volume: Volume,
        lineage: Callable[[], Awaitable[Lineage]],
        tree: Callable[[StateId], AbstractAsyncContextManager[Tree]],
        directory: Callable[[], str],
    ) -> None:
        self._volume = volume
        self._lineage = lineage
        self._tree = tree
        self._directory = directory

    @asynccontextmanager
    async def opened(
        self, peer: Peer, *, merges: MergeLog | None = None, needs_base: bool = True
    ) -> AsyncIterator[Other]:
        """Fetch the changes of `peer`, for the length of the block.  Serving loop.

        With `merges`, what was merged before, that workspace keeps the state that it sent, for the next merge.  If the
        block raises, it drops it.  Without `needs_base`, all of `peer` is fetched if there is no common state.
        """
        here = await self._lineage()
        other = lineage_of(await call_peer(peer, "lineage", Empty()))
        try:
            bases = find_bases(here, other)
        except OSError:
            if needs_base or here.instance == other.instance:
                raise
            async with AsyncExitStack() as stack:
                yield await self._whole(peer, here, other, stack)
            return
        async with AsyncExitStack() as stack:
            buffer = self._buffer(stack)
            params = ChangesParams(
                fork_point=state_record(bases.fork_point),
                base=state_record(bases.base.state) if bases.base.of_other else None,
                max_bytes=buffer.free_bytes,
                merge_into=None if merges is None else here.name,
                keep=[] if merges is None else list(merges.serials_of(other.instance)),
            )
            fork_point = await stack.enter_async_context(self._tree(bases.fork_point))
            deltas = _Deltas(1 + bases.base.of_other, buffer)
            try:
                result: ChangesResult = await call_peer(peer, "changes", params, deltas.feed)
                base = theirs = LayeredTree(fork_point)
                *older, newest = deltas.finish()
                for delta in older:
                    base = theirs = await in_thread(LayeredTree, theirs, delta, buffer.read)
                theirs = await in_thread(LayeredTree, theirs, newest, buffer.read)
                if not bases.base.of_other and bases.base.state != bases.fork_point:
                    base = LayeredTree(await stack.enter_async_context(self._tree(bases.base.state)))
                yield Other(here, other, bases, base, theirs, None if result.state is None else state_id(result.state))
            except BaseException:
                if merges is not None:
                    await _forget(peer, here.name, params.keep)
                raise

    async def _whole(self, peer: Peer, here: Lineage, other: Lineage, stack: AsyncExitStack) -> Other:
        buffer = self._buffer(stack)
        deltas = _Deltas(1, buffer)
        await call_peer(peer, "changes", ChangesParams(max_bytes=buffer.free_bytes), deltas.feed)
        nothing = LayeredTree(EmptyTree())
        theirs = await in_thread(LayeredTree, nothing, deltas.finish()[0], buffer.read)
        return Other(here, other, None, nothing, theirs, None)

    def _buffer(self, stack: AsyncExitStack) -> Buffer:
        if snapshotable(self._volume) is None:
            return buffer_on_disk(self._directory(), stack)
        return buffer_in_memory(self._volume, stack)


class _Deltas:
    """Reads `count` deltas that arrive one after the other."""

    def __init__(self, count: int, buffer: Buffer) -> None:
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
