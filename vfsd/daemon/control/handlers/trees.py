"""`diff`, `export` and `apply`: the methods that read a whole state and write it elsewhere."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from protocol.adapters.trees import changed_tree
from protocol.archive import export_archive
from protocol.diff.tree_diff import went_back
from protocol.tree import Tree, unfiltered
from protocol.volume_extensions import ApplyResult as Applied
from protocol.volume_extensions import overlaid, snapshotable
from vfsd.daemon.control.calls import CallContext, absolute_path, tree_paths
from vfsd.daemon.control.handlers.changes import (
    Differences,
    OutputPieces,
    change_record,
    compare,
    expired_records,
    fetched_repositories,
    filtered,
    path_filter,
    planned_repositories,
    problem_records,
    written_patch,
)
from vfsd.daemon.control.handlers.snapshots import required
from vfsd.daemon.merging.lineage import StateId
from vfsd.daemon.merging.other import OtherWorkspaces
from vfsd.daemon.merging.trees import LayeredTree
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import (
    BASE,
    SnapshotService,
    in_answer_thread,
    in_bytes,
    in_thread,
    is_fork_base,
    is_merge_base,
    no_lower_layer,
)
from vfsd.daemon.snapshots.volume import VolumeSnapshots
from vfsd.machine import mountinfo
from vfsd.operations.snapshots import (
    ApplyParams,
    ApplyResult,
    DiffParams,
    DiffResult,
    ExportParams,
    ExportResult,
    ProblemRecord,
)
from vfsd.wire.messages import InvalidParamsError, wire_path
from vfsd.wire.options import WorkspaceOptions


class TreeMethods:
    """The methods of one workspace that read a whole state."""

    def __init__(
        self,
        mounted: MountedVolume,
        snapshots: SnapshotService | None,
        options: WorkspaceOptions,
        base: StateId | None,
        others: OtherWorkspaces,
    ) -> None:
        """`base`: the snapshot that a fork has in common with its source.  `others` fetches the states of others."""
        self._others = others
        self._mounted = mounted
        self._snapshots = snapshots
        self._options = options
        self._base = base

    async def _newest(self, snapshots: SnapshotService) -> str:
        """Return the newest snapshot that is neither a safety snapshot nor the base of another workspace.

        Without one, BASE; ENOENT if there is no lower layer.
        """
        for info in reversed(await snapshots.infos()):
            is_of_other = is_merge_base(info) or (is_fork_base(info) and StateId.of(info) != self._base)
            if info.kind != "safety" and not is_of_other:
                return info.name
        if snapshots.has_base:
            return BASE
        raise FileNotFoundError(errno.ENOENT, "there is no snapshot to compare with; take one with: vfsd snapshot")

    async def diff(self, params: DiffParams, call: CallContext) -> DiffResult:
        paths = await tree_paths(params.paths)
        rule = await in_thread(path_filter, params.include, params.exclude)
        async with self._compared(params, call) as (a, b, all_old, all_new):
            old, new = filtered(all_old, rule), filtered(all_new, rule)
            if params.mode == "patch":
                found = await in_answer_thread(
                    written_patch,
                    old,
                    new,
                    paths,
                    rule,
                    OutputPieces(call.output_from_thread),
                    include_git=params.include_git,
                    keep_going=call.raise_if_cancelled,
                )
            else:
                found = await compare(
                    old, new, paths, call, rule=rule, with_lines=params.mode == "stat", stream=params.stream
                )
        return DiffResult(
            a=a,
            b=b,
            counts=found.counts,
            changes=found.records,
            truncated=found.truncated,
            problems=found.problems,
            omitted=found.omitted,
            patch_bytes=found.written_bytes,
            git_only=found.git_only,
        )

    @asynccontextmanager
    async def _compared(
        self, params: DiffParams, call: CallContext
    ) -> AsyncIterator[tuple[str, str | None, Tree, Tree]]:
        """The names of the two states that `params` means, and their trees."""
        snapshots = required(self._snapshots)
        if params.against is not None:
            if params.a is not None or params.b is not None:
                raise InvalidParamsError("`against` compares the live states: it takes no snapshots")
            async with self._others.opened(params.against) as other:
                await self._mounted.write_back()
                async with snapshots.tree(None, call) as live:
                    yield "", params.against.name, LayeredTree(live), other.theirs
            return
        a = params.a
        if a is None:
            a = BASE if snapshots.has_base and params.b is not None else await self._newest(snapshots)
        if params.b is None:
            await self._mounted.write_back()
        await snapshots.check_below()
        async with snapshots.tree(a, call) as old, snapshots.tree(params.b, call) as new:
            shown = wire_path(os.fsencode(str(self._options.backend))) if a == BASE else a
            yield shown, params.b, old, new

    async def export(self, params: ExportParams, call: CallContext) -> ExportResult:
        path = absolute_path(params.path)
        await in_thread(self._check_outlives_mount, path)
        rule = await in_thread(path_filter, params.include, params.exclude)
        snapshots, volume = required(self._snapshots), snapshotable(self._mounted.volume)
        async with AsyncExitStack() as stack:
            tree: Tree
            if params.snapshot is None:
                tree = (await stack.enter_async_context(snapshots.frozen(call))).tree
            else:
                tree = await stack.enter_async_context(snapshots.tree(params.snapshot, call))
            complete = tree
            if params.changes_only:
                base = await stack.enter_async_context(snapshots.tree(BASE, call))
                tree = await in_answer_thread(changed_tree, base, tree, call.raise_if_cancelled)
            epoch = params.source_date_epoch
            summary = await in_answer_thread(
                export_archive,
                filtered(tree, rule),
                path,
                overwrite=params.overwrite,
                created_ns=time.time_ns() if epoch is None else epoch * 10**9,
                progress=in_bytes(call),
                skip_too_long=True,
            )
            hidden = self._mounted.left_out_of(complete)
            is_complete = not (summary.skipped or params.changes_only or params.include or params.exclude or hidden)
            if is_complete and volume is not None:
                volume.mark_saved(unfiltered(tree))
        return ExportResult(
            params.path,
            summary.files,
            summary.total_bytes,
            summary.archive_bytes,
            problem_records(summary.skipped),
            hidden,
        )

    def _check_outlives_mount(self, path: str) -> None:
        """OSError (EINVAL) for an archive inside this mount, if the unmount deletes the mount's files."""
        # A container that was made for the workspace goes with it, although its files are on a disk.
        if self._mounted.volume.capabilities.durable and self._options.backend.kind != "image":
            return
        found = mountinfo.find_mount(os.path.dirname(path))
        if found is not None and found.mountpoint == mountinfo.resolve(self._options.mountpoint):
            reason = (
                f"the archive would be inside workspace {self._options.name}, whose unmount deletes it: "
                "export to a path outside of the workspace"
            )
            raise OSError(errno.EINVAL, reason, path)

    # -- apply ---------------------------------------------------------------------------------------
    async def apply(self, params: ApplyParams, call: CallContext) -> ApplyResult:
        """Write the changes in a worker thread, from immutable trees, while the mount answers."""
        volume = overlaid(self._mounted.volume)
        if volume is None:
            raise no_lower_layer()
        assert isinstance(self._snapshots, VolumeSnapshots)
        paths = await tree_paths(params.paths)
        async with self._mounted.change_lock:
            await self._mounted.write_back()
            touches = params.touch and not params.dry_run
            if self._mounted.policy is not None or touches:
                with volume.applying(paths, force=params.force, dry_run=True) as trial:
                    planned = await in_thread(trial.write, call.raise_if_cancelled)
                if self._mounted.policy is not None:
                    self._mounted.policy.check(planned.changes, "apply")
                touches = touches and (params.force or not planned.conflicts)
            with self._snapshots.applying("apply") as step:
                if not params.dry_run:
                    call.commit()  # once the thread runs, a cancelled call could not say whether it wrote anything
                if touches:
                    await self._snapshots.touch_changed(paths)
                with volume.applying(paths, force=params.force, dry_run=params.dry_run) as run:
                    done = await in_thread(run.write, call.raise_if_cancelled)
                    is_written = not params.dry_run and (params.force or not done.conflicts)
                    if is_written:
                        run.finish(done)
                        step.wrote = bool(done.changes)
            if done.error is not None:
                raise done.error
        stream = OutputPieces(call.output_from_thread) if params.stream else None
        result = await in_answer_thread(self._result, done, step.safety, is_written=is_written, stream=stream)
        name, directory = self._options.name, self._options.backend.argument
        result.repositories = planned_repositories(done.repositories, name)
        if is_written:
            if done.repositories:
                result.repositories, _ = await in_thread(
                    fetched_repositories, done.repositories, self._mounted.mountpoint, directory, name
                )
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
            counts=found.counts,
            changes=found.records,
            conflicts=[ProblemRecord(wire_path(each.path), each.reason) for each in done.conflicts],
            problems=[ProblemRecord(wire_path(each.path), each.reason) for each in done.problems],
            truncated=found.truncated,
            recovered=done.recovery,
            safety_snapshot=safety,
            older=sum(map(went_back, done.changes)),
        )
