"""`apply`: write the changes of an overlay to the directory below it."""

from __future__ import annotations

import os

import trio

from protocol.diff.tree_diff import count
from protocol.volume import ApplyResult as Applied
from protocol.volume import overlaid
from vfsd.daemon.control.call_context import CallContext
from vfsd.daemon.control.changes import Differences, OutputPieces, change_counts, change_record, expired_records
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import SnapshotService, no_lower_layer
from vfsd.daemon.snapshots.threads import in_thread
from vfsd.daemon.snapshots.volume import VolumeSnapshots
from vfsd.wire.messages import ApplyParams, ApplyResult, ConflictRecord, wire_path
from vfsd.wire.options import WorkspaceOptions
from vfsd.wire.paths import wire_paths_within

__all__ = ["OverlayMethods"]


class OverlayMethods:
    """The methods that need a lower layer."""

    def __init__(self, mounted: MountedVolume, snapshots: SnapshotService | None, options: WorkspaceOptions) -> None:
        self._mounted = mounted
        self._snapshots = snapshots
        self._options = options

    async def apply(self, params: ApplyParams, call: CallContext) -> ApplyResult:
        """Write the changes in a worker thread, from immutable trees, while the mount answers."""
        volume = overlaid(self._mounted.volume)
        if volume is None:
            raise no_lower_layer()
        assert isinstance(self._snapshots, VolumeSnapshots)
        paths = wire_paths_within(params.paths)
        async with self._mounted.change_lock:
            await self._mounted.write_back()
            with (
                self._snapshots.applying("apply") as step,
                volume.applying(paths, force=params.force, dry_run=params.dry_run) as run,
            ):
                if not params.dry_run:
                    call.commit()  # once the thread runs, a cancelled call could not say whether it wrote anything
                done = await trio.to_thread.run_sync(run.write, call.raise_if_cancelled)
                is_written = not params.dry_run and (params.force or not done.conflicts)
                if is_written:
                    run.finish(done)
                    step.wrote = bool(done.changes)
            if done.error is not None:
                raise done.error
        stream = OutputPieces(call.output_from_thread) if params.stream else None
        result = await in_thread(self._result, done, step.safety, is_written=is_written, stream=stream)
        if is_written:
            result.expired = expired_records(step.expired, self._snapshots.collect_pruned())
        return result

    def _result(
        self, done: Applied, safety: str | None, *, is_written: bool, stream: OutputPieces | None
    ) -> ApplyResult:
        found = Differences(stream)
        for change in done.changes:
            found.add(change, change_record)
        if stream is not None:
            stream.flush()
        return ApplyResult(
            directory=wire_path(os.fsencode(self._options.backend.argument)),
            applied=is_written,
            counts=change_counts(count(done.changes)),
            changes=found.records,
            conflicts=[ConflictRecord(wire_path(conflict.path), conflict.reason) for conflict in done.conflicts],
            truncated=found.truncated,
            recovered=done.recovery,
            safety_snapshot=safety,
        )
