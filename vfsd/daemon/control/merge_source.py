"""`lineage`, `changes` and `forget_merged`: what another workspace's daemon asks to merge this workspace.

The state that is sent is a snapshot, or a view that ends with the call, so programs may go on meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from protocol.errors import SnapshotNotFoundError
from protocol.tree import Tree
from protocol.volume_extensions import SnapshotInfo, forkable
from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.control.changes import OutputPieces
from vfsd.daemon.control.snapshot_methods import required
from vfsd.daemon.forks import Forks
from vfsd.daemon.merging.delta import write_delta
from vfsd.daemon.merging.lineage import Lineage, MergedState, StateId
from vfsd.daemon.merging.records import lineage_result, state_record
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import MERGED_PREFIX, MERGED_TAG, SnapshotService, free_name, is_merge_base
from vfsd.daemon.snapshots.threads import in_answer_thread
from vfsd.wire.base import Empty
from vfsd.wire.merge_messages import ChangesParams, ChangesResult, ForgetMergedParams, LineageResult, StateRecord
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
        self._naming = trio.Lock()

    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by method name."""
        return {"lineage": self._lineage, "changes": self._changes, "forget_merged": self._forget_merged}

    @property
    def snapshots(self) -> SnapshotService:
        """The snapshots.  OSError (EOPNOTSUPP) if this workspace can have no forks."""
        snapshots = required(self._optional)
        if forkable(self._mounted.volume) is None:
            kind = self._options.backend.kind
            reason = f"workspace {self._options.name!r} has the backend {kind}: only memory and overlay workspaces"
            raise OSError(errno.EOPNOTSUPP, f"{reason} have forks, so only they can be merged or compared")
        return snapshots

    async def lineage(self) -> Lineage:
        """Return what this workspace descends from, and its states."""
        snapshots = self.snapshots
        states = tuple(map(StateId.of, await snapshots.infos()))
        forks = self._forks
        return Lineage(forks.instance, self._options.name, forks.ancestors, snapshots.merges.now, states)

    async def _lineage(self, _params: Empty, _call: CallContext) -> LineageResult:
        return lineage_result(await self.lineage())

    async def _changes(self, params: ChangesParams, call: CallContext) -> ChangesResult:
        snapshots = self.snapshots
        kept: SnapshotInfo | None = None
        if params.merge_into is not None:
            kept = await self._keep(params.merge_into, params.keep, call)
        else:
            await self._mounted.write_back()
        try:
            olds = [each for each in (params.fork_point, params.base) if each is not None]
            await self._check_kept(olds)
            async with contextlib.AsyncExitStack() as stack:
                names = [*(each.name for each in olds), None if kept is None else kept.name]
                trees = [await stack.enter_async_context(snapshots.tree(name, call)) for name in names]
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

    async def _check_kept(self, states: Sequence[StateRecord]) -> None:
        """SnapshotNotFoundError if one of `states` was dropped since the other daemon asked for the lineage."""
        existing = {state_record(StateId.of(info)) for info in await self.snapshots.infos()}
        for state in states:
            if state not in existing:
                raise SnapshotNotFoundError(state.name)


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
        write_delta(old, new, write, keep_going)
    pieces.flush()
