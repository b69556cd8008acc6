"""`lineage`, `changes` and `forget_merged`: what another workspace's daemon asks to merge this workspace.

The state that is sent is a snapshot, or a view that ends with the call, so programs may go on meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from protocol.errors import SnapshotNotFoundError
from protocol.tree import Tree
from protocol.volume_extensions import SnapshotInfo
from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.control.handlers.changes import OutputPieces
from vfsd.daemon.control.handlers.snapshots import required
from vfsd.daemon.forks.forks import Forks
from vfsd.daemon.merging.delta import write_delta
from vfsd.daemon.merging.empty_tree import EmptyTree
from vfsd.daemon.merging.layered_tree import LayeredTree
from vfsd.daemon.merging.lineage import Lineage, MergedState, StateId
from vfsd.daemon.merging.records import lineage_result, state_id, state_record
from vfsd.daemon.merging.source_states import SourceStates
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import (
    MERGED_PREFIX,
    MERGED_TAG,
    UNOBSERVED,
    CallObserver,
    SnapshotService,
    free_name,
    is_merge_base,
)
from vfsd.daemon.snapshots.threads import in_answer_thread
from vfsd.operations.declaration import Empty
from vfsd.operations.merge import ChangesParams, ChangesResult, ForgetMergedParams, LineageResult
from vfsd.wire.options import WorkspaceOptions

_PATHS_PER_REPORT: Final = 256


class MergeSource:
    """The side of one workspace whose changes are merged."""

    def __init__(
        self, mounted: MountedVolume, snapshots: SnapshotService | None, options: WorkspaceOptions, forks: Forks
    ) -> None:
        self._mounted = mounted
        self._optional = snapshots
        self._options = options
        self._forks = forks
        origin = forks.source_options.origin
        self._sources = None if origin is None else SourceStates(origin, options.store, mounted.volume)
        self._naming = trio.Lock()

    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by method name."""
        return {"lineage": self._lineage, "changes": self._changes, "forget_merged": self._forget_merged}

    @property
    def snapshots(self) -> SnapshotService:
        """The snapshots.  OSError (EOPNOTSUPP) if this workspace can have no forks."""
        snapshots = required(self._optional)
        if not self._forks.is_possible:
            kind = self._options.backend.kind
            reason = f"workspace {self._options.name!r} has the backend {kind}, and can have no forks"
            raise OSError(errno.EOPNOTSUPP, f"{reason}: there is nothing to merge or to compare")
        return snapshots

    async def lineage(self) -> Lineage:
        """Return what this workspace descends from, and its states."""
        snapshots = self.snapshots
        forks = self._forks
        return Lineage(
            forks.instance, self._options.name, forks.ancestors, snapshots.merges.now, tuple(await self._states())
        )

    async def _states(self) -> list[StateId]:
        own = [StateId.of(info) for info in await self.snapshots.infos()]
        if self._sources is None or self._forks.twin is None or self._forks.twin[0] not in own:
            return own
        return [*own, self._forks.twin[1], *await self._sources.identities()]

    @asynccontextmanager
    async def tree(self, state: StateId, observer: CallObserver = UNOBSERVED) -> AsyncIterator[Tree]:
        """Open a state of this workspace, or of its source before the fork.  SnapshotNotFoundError."""
        snapshots, twin = self.snapshots, self._forks.twin
        own = {StateId.of(info) for info in await snapshots.infos()}
        if twin is not None and state == twin[1]:
            state = twin[0]
        if state in own:
            async with snapshots.tree(state.name, observer) as tree:
                yield tree
        elif self._sources is None or twin is None or twin[0] not in own:
            raise SnapshotNotFoundError(state.name)
        else:
            async with snapshots.tree(twin[0].name, observer) as below, self._sources.tree(state, below) as tree:
                yield tree

    async def _lineage(self, _params: Empty, _call: CallContext) -> LineageResult:
        return lineage_result(await self.lineage())

    async def _changes(self, params: ChangesParams, call: CallContext) -> ChangesResult:
        snapshots = self.snapshots
        kept: SnapshotInfo | None = None
        if params.merge_into is not None:
            kept = await self._keep(params.merge_into, params.keep, call)
        try:
            olds = [state_id(each) for each in (params.fork_point, params.base) if each is not None]
            async with contextlib.AsyncExitStack() as stack:
                trees: list[Tree] = [await stack.enter_async_context(self.tree(each, call)) for each in olds]
                if not olds:
                    trees.append(EmptyTree())
                if kept is None:
                    trees.append((await stack.enter_async_context(snapshots.frozen(call))).tree)
                else:
                    trees.append(await stack.enter_async_context(self.tree(StateId.of(kept), call)))
                await in_answer_thread(_send, trees, call, params.max_bytes)
        except BaseException:
            if kept is not None:
                with trio.CancelScope(shield=True), contextlib.suppress(SnapshotNotFoundError):
                    await snapshots.drop([kept.name])
            raise
        return ChangesResult(None if kept is None else state_record(StateId.of(kept)))

    async def _keep(self, target: str, keep: Sequence[int], call: CallContext) -> SnapshotInfo:
        """Take the snapshot of the state that is merged; drop those that `target` does not need any more.

        Those are left by merges that were undone for good, or that did not complete because a daemon died.
        """
        snapshots = self.snapshots
        async with self._naming:
            await self._forget(target, keep)
            infos = await snapshots.infos()
            name = free_name(MERGED_PREFIX, infos)
            taken = await snapshots.take(name, f"{MERGED_TAG}{target}", call, kind="automatic")
            instance, existing = self._forks.instance, set(map(StateId.of, infos))
            before = [each for each in snapshots.merges.now if each.instance != instance or each.state in existing]
            own = MergedState(instance, self._options.name, StateId.of(taken))
            snapshots.merges.record(taken.serial - 1, [*before, own])
            return taken

    async def _forget_merged(self, params: ForgetMergedParams, _call: CallContext) -> Empty:
        await self._forget(params.target, params.keep)
        return Empty()

    async def _forget(self, target: str, keep: Sequence[int]) -> None:
        snapshots = self.snapshots
        for info in await snapshots.infos():
            if is_merge_base(info) and info.tag == f"{MERGED_TAG}{target}" and info.serial not in keep:
                with contextlib.suppress(SnapshotNotFoundError):
                    await snapshots.drop([info.name])


def _send(trees: Sequence[Tree], call: CallContext, max_bytes: int) -> None:
    """Send the differences between each two adjacent trees."""
    pieces = OutputPieces(call.output_from_thread)
    sent = paths = 0

    def write(piece: bytes) -> None:
        nonlocal sent
        sent += len(piece)
        if sent > max_bytes:
            reason = f"the changes take more than the {max_bytes >> 20:,} MiB that are free in the other workspace"
            raise OSError(errno.ENOSPC, f"{reason} (--max-memory, --max-bytes); nothing was changed")
        pieces.write(piece)

    def keep_going() -> None:
        nonlocal paths
        paths += 1
        if paths % _PATHS_PER_REPORT == 1:
            call.raise_if_cancelled()
            call.progress_nowait(paths, 0, "files")

    for old, new in itertools.pairwise(trees):
        # What a LayeredTree differs in from others, only a LayeredTree knows.
        write_delta(old, LayeredTree(new) if isinstance(old, LayeredTree) else new, write, keep_going)
    pieces.flush()
