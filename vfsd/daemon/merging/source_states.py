"""The states of the source of a fork over a stored snapshot, from before the fork.

The fork's volume has none of them as a snapshot.  They are in the store, and differ from the snapshot below the fork by
what the source changed until then.  So such a state is that snapshot, as the fork has it, with these changes on top,
and its inodes are those of the fork.

Threading: worker threads, apart from entering and leaving `SourceStates.tree`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

from protocol.store import Store
from protocol.tree import Tree
from protocol.volume import Volume
from vfsd.daemon.merging.buffers import Buffer, buffer_in_memory
from vfsd.daemon.merging.delta import Delta, DeltaReader, write_delta
from vfsd.daemon.merging.layered_tree import LayeredTree
from vfsd.daemon.merging.lineage import StateId
from vfsd.daemon.merging.records import state_id
from vfsd.daemon.snapshots.threads import in_answer_thread, in_thread
from vfsd.wire.options import StoredOrigin


class SourceStates:
    """The states of the workspace that `origin` names, in the store at `directory` (None: the user's).

    They are trees over the volume of the fork.
    """

    def __init__(self, origin: StoredOrigin, directory: str | None, volume: Volume) -> None:
        self._volume = volume
        self._key = origin.workspace
        self._base = state_id(origin.source.state)
        self._directory = directory

    async def identities(self) -> list[StateId]:
        """Return the states that are in the store, the one below the fork among them if it is still there."""
        return await in_thread(self._identities)

    def _identities(self) -> list[StateId]:
        with Store(self._directory) as store:
            found = map(StateId.of, store.snapshots(self._key))
            return [each for each in found if each.serial <= self._base.serial]

    @asynccontextmanager
    async def tree(self, state: StateId, below: Tree) -> AsyncIterator[LayeredTree]:
        """Open `state` as a tree over `below`, the state that was forked.  SnapshotNotFoundError."""
        async with AsyncExitStack() as stack:
            buffer = buffer_in_memory(self._volume, stack)
            delta = await in_answer_thread(self._delta, state, buffer)
            yield await in_thread(LayeredTree, below, delta, buffer.read)

    def _delta(self, state: StateId, buffer: Buffer) -> Delta:
        reader = DeltaReader(buffer.store, buffer.reserve)
        with ExitStack() as stack:
            store = stack.enter_context(Store(self._directory))
            below = stack.enter_context(store.tree(self._key, self._base.name))
            wanted = stack.enter_context(store.tree(self._key, state.name))
            write_delta(below, wanted, reader.feed, lambda: None)
        return reader.finish()
