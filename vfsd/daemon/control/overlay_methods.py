"""`apply`: what an overlay holds, written into the directory below it."""

from __future__ import annotations

import functools
import os

import trio

from protocol.backends.overlay.apply import Applied, apply
from protocol.diff.tree_diff import count
from vfsd.daemon.control.call_context import CallContext
from vfsd.daemon.control.changes import Differences, Pieces, change_record, expired_records
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import SnapshotService
from vfsd.daemon.snapshots.volume import Applying, VolumeSnapshots, overlay_of
from vfsd.wire.messages import ApplyParams, ApplyResult, ChangeCounts, ConflictRecord, wire_path
from vfsd.wire.options import WorkspaceOptions
from vfsd.wire.paths import wire_paths_within

__all__ = ["OverlayMethods"]


class OverlayMethods:
    """The verbs that only an overlay has."""

    def __init__(self, served: MountedVolume, snapshots: SnapshotService | None, options: WorkspaceOptions) -> None:
        self._served = served
        self._snapshots = snapshots
        self._options = options

    async def apply(self, params: ApplyParams, call: CallContext) -> ApplyResult:
        """Write it in a worker thread, from immutable trees; the mount goes on meanwhile."""
        volume = overlay_of(self._served.volume)
        assert isinstance(self._snapshots, VolumeSnapshots)
        paths = wire_paths_within(params.paths)
        async with self._served.changing:
            await self._served.settle()
            with self._snapshots.applying("apply") as step, volume.base_tree() as base, volume.tree() as live:
                run = functools.partial(
                    apply,
                    volume.lower,
                    base,
                    live,
                    paths,
                    known=dict(volume.identities),
                    force=params.force,
                    dry_run=params.dry_run,
                    keep_going=call.raise_if_cancelled,
                )
                if not params.dry_run:
                    call.commit()  # what follows the writing must not be cancelled as if nothing was written
                done = await trio.to_thread.run_sync(run)
                written = not params.dry_run and (params.force or not done.conflicts)
                if written:
                    is_all = not (paths or done.error or volume.changed_since(live.epoch.serial))
                    volume.applied(live, done)
                    if is_all:
                        volume.mark_saved()
                    step.wrote = bool(done.changes)
            if done.error is not None:
                raise done.error
        stream = Pieces(call.output_from_thread) if params.stream else None
        result = await trio.to_thread.run_sync(
            functools.partial(_result, self._options, done, step, written=written, stream=stream)
        )
        if written:
            result.expired = expired_records(step.expired, self._snapshots.collect_pruned())
        return result


def _result(
    options: WorkspaceOptions, done: Applied, step: Applying, *, written: bool, stream: Pieces | None
) -> ApplyResult:
    found = Differences(stream)
    for change in done.changes:
        found.add(change, change_record)
    if stream is not None:
        stream.flush()
    counts = count(done.changes)
    return ApplyResult(
        directory=wire_path(os.fsencode(options.backend.argument)),
        applied=written,
        counts=ChangeCounts(counts.added, counts.modified, counts.removed),
        changes=found.records,
        conflicts=[ConflictRecord(wire_path(conflict.path), conflict.reason) for conflict in done.conflicts],
        truncated=found.truncated,
        recovered=None if done.recovered is None else str(done.recovered),
        safety_snapshot=step.safety,
    )
