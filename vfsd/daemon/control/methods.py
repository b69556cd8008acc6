"""The methods of the control socket: what each verb does to a workspace.

Threading: handlers run on the serving loop.  Long work (diff, export, reading an archive) runs in a
worker thread on an immutable tree; what changes the state is up to `vfsd.daemon.snapshots`.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final, Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

import trio

import vfsd
from protocol.adapters.filtered import changed_tree
from protocol.archive import export_archive
from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.diff.tree_diff import DiffCounts
from protocol.store import Store, StoredSnapshot
from protocol.tree import Tree
from protocol.volume import SnapshotInfo
from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.control.changes import (
    Differences,
    Pieces,
    change_record,
    created_at,
    differences,
    expired_records,
    filtered,
    path_filter,
    written_patch,
)
from vfsd.daemon.control.exec_methods import ExecMethods
from vfsd.daemon.control.fs_methods import FsMethods
from vfsd.daemon.control.overlay_methods import OverlayMethods
from vfsd.daemon.control.unmount_methods import UnmountMethods
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import Origin, archive, snapshot_of
from vfsd.daemon.snapshots.base import BASE, SAFETY_PREFIX, Outcome, SnapshotService, in_bytes, is_reserved, name_at
from vfsd.machine import mounts
from vfsd.wire.messages import (
    ChangeCounts,
    DiffParams,
    DiffResult,
    DropParams,
    DroppedStepRecord,
    DropResult,
    Empty,
    ExportParams,
    ExportResult,
    ImportParams,
    ImportResult,
    InvalidParamsError,
    ProblemRecord,
    RestoreParams,
    RestoreResult,
    SnapshotParams,
    SnapshotRecord,
    SnapshotsParams,
    SnapshotsResult,
    StatusResult,
    from_wire_path,
    wire_path,
)
from vfsd.wire.options import WorkspaceOptions
from vfsd.wire.paths import wire_paths_within

__all__ = ["Methods"]

# What a shell, a file name in a table and `restore NAME|ARCHIVE.zip` can all take without quoting trouble.
_SNAPSHOT_NAME: Final = re.compile(r"[^\s/\x00-\x1f\x7f-][^/\x00-\x1f\x7f]{0,127}")

# Backends whose files are still there after an unmount; what the others hold in the mount is gone.
_OUTLIVES_MOUNT: Final = frozenset({"host", "container"})

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class _Checked(Protocol):
    def check_invariants(self) -> None: ...


class Methods:
    """The verbs of one workspace.  `stopped` is called once an unmount has been answered."""

    def __init__(
        self,
        served: MountedVolume,
        snapshots: SnapshotService | None,
        options: WorkspaceOptions,
        started_at: str,
        commands: Commands,
    ) -> None:
        self._served = served
        self._commands = commands
        self._kept = snapshots
        self._options = options
        self._started_at = started_at
        self._unmount = UnmountMethods(served, options, commands)

    @property
    def _snapshots(self) -> SnapshotService:
        """OSError (EOPNOTSUPP) where the backend has none."""
        if self._kept is None:
            raise OSError(errno.EOPNOTSUPP, "this backend has no snapshots yet, nor what is built on them")
        return self._kept

    @property
    def answering_unmount(self) -> int:
        """Unmounts that were made and whose answers are on their way."""
        return self._unmount.answering

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of each method of `messages.METHODS`."""
        return {
            "ping": self._ping,
            "status": self._status,
            "snapshot": self._snapshot,
            "snapshots": self._list,
            "drop": self._drop,
            "restore": self._restore,
            "diff": self._diff,
            "export": self._export,
            "import": self._import,
            "unsaved": self._unmount.unsaved,
            "unmount": self._unmount.unmount,
            "apply": OverlayMethods(self._served, self._kept, self._options).apply,
            "check": self._check,
            **FsMethods(self._served, self._options, self._commands).handlers(),
            **ExecMethods(self._commands).handlers(),
        }

    # -- what there is ---------------------------------------------------------------------------
    async def _ping(self, _params: Empty, _call: CallContext) -> Empty:
        return Empty()

    async def _check(self, _params: Empty, _call: CallContext) -> Empty:
        if isinstance(self._served.volume, _Checked):
            self._served.volume.check_invariants()
        return Empty()

    async def _status(self, _params: Empty, _call: CallContext) -> StatusResult:
        options = self._options
        # What a backend would have to walk its whole tree for is not said.
        volume = self._served.volume if isinstance(self._served.volume, MemoryVolume) else None
        interrupted = None if self._kept is None else await self._kept.interrupted()
        container = self._served.container
        return StatusResult(
            name=options.name,
            mountpoint=wire_path(os.fsencode(options.mountpoint)),
            backend=str(options.backend),
            engine=self._served.engine.name,
            pid=os.getpid(),
            version=vfsd.__version__,
            started_at=self._started_at,
            read_only=options.read_only,
            files=volume.files if volume else None,
            directories=volume.directories if volume else None,
            size_bytes=volume.size_bytes if volume else None,
            used_bytes=volume.used_bytes if volume else None,
            max_bytes=volume.max_bytes if volume else None,
            max_inodes=volume.max_inodes if volume else None,
            live_bytes=volume.memory.live if volume else None,
            snapshot_bytes=volume.memory.snapshots if volume else None,
            overhead_bytes=volume.memory.overhead if volume else None,
            max_memory=volume.max_memory if volume else None,
            pruned=volume.pruned if volume else None,
            snapshots=None if self._kept is None else len(await self._kept.infos()),
            requests=self._served.engine.requests,
            changed_below=volume.changed_below if isinstance(volume, OverlayVolume) else None,
            engine_reason=self._served.engine.fallback_reason,
            interrupted=_half_done_apply(volume) if interrupted is None else interrupted.describe(),
            commands=self._commands.where,
            container=None if container is None else await container.describe(),
            transport=None if container is None else container.transport.name,
            connected=None if container is None else container.volume.connected,
        )

    # -- snapshots ---------------------------------------------------------------------------------
    async def _snapshot(self, params: SnapshotParams, call: CallContext) -> SnapshotRecord:
        if params.name is not None:
            _check_snapshot_name(params.name)
        snapshots = self._snapshots
        record = _record(await snapshots.take(params.name, params.tag, call))
        record.expired = expired_records((), snapshots.collect_pruned())
        return record

    async def _list(self, params: SnapshotsParams, _call: CallContext) -> SnapshotsResult:
        snapshots = self._snapshots
        counts = await snapshots.change_counts() if params.changes else {}
        history = await snapshots.history()
        records = []
        for info in await snapshots.infos():
            at = history.position_of(info.serial)
            step = None if at is None else at - history.position
            records.append(_record(info, counts.get(info.name), step))
        return SnapshotsResult(records)

    async def _drop(self, params: DropParams, _call: CallContext) -> DropResult:
        names = list(dict.fromkeys([params.name, *params.also]))
        done = await self._snapshots.drop(names)
        steps = [DroppedStepRecord(name, step) for name, step in done.steps.items()]
        return DropResult(names, steps, done.history.undo_steps, done.history.redo_steps)

    # -- restore -------------------------------------------------------------------------------------
    async def _restore(self, params: RestoreParams, call: CallContext) -> RestoreResult:
        given = (params.name is not None, params.archive is not None, params.undo, params.redo, params.base)
        if sum(given) != 1:
            raise InvalidParamsError("restore takes one of: name, archive, undo, redo, base")
        if not params.dry_run:
            self._check_writable()
        paths = wire_paths_within(params.paths)
        if params.of is not None and params.name is None:
            raise InvalidParamsError("of takes the name of a snapshot")
        if params.redo and paths:
            raise InvalidParamsError("redo takes no paths: restore them from the snapshot that `vfsd snapshots` shows")
        if params.archive is not None:
            origin = archive(_absolute(params.archive))
            return await self._restore_from(origin, params.archive, paths, call, params)
        if params.of is not None:
            with self._store(params.store) as store:
                source = f"{params.name} of {params.of}"
                origin = snapshot_of(store, _key(params.of), params.name or "", source)
                return await self._restore_from(origin, source, paths, call, params)
        if (params.undo or params.redo) and not (params.dry_run or paths):
            outcome = await (self._snapshots.undo(call) if params.undo else self._snapshots.redo(call))
            return self._restored(outcome.source, outcome)
        name = BASE if params.base else await self._step_to(params) or params.name or ""
        source = str(self._options.backend) if params.base else name
        if params.dry_run:
            found = await self._compare(None, name, paths, call, stream=params.stream)
            return RestoreResult(source, None, found.counts, found.records, found.truncated)
        return self._restored(source, await self._snapshots.restore(name, paths, call))

    def _store(self, directory: str | None) -> Store:
        return Store(self._options.store if directory is None else _absolute(directory))

    async def _restore_from(
        self, origin: Origin, source: str, paths: list[bytes], call: CallContext, params: RestoreParams
    ) -> RestoreResult:
        snapshots = self._snapshots
        async with snapshots.staged(origin, call) as staged:
            if params.dry_run:
                async with snapshots.tree(None) as live:
                    found = await self._differences(live, staged.tree, paths, call, stream=params.stream)
                return RestoreResult(source, None, found.counts, found.records, found.truncated)
            return self._restored(source, await snapshots.put(staged, paths, call, replace=True))

    def _restored(self, source: str, outcome: Outcome) -> RestoreResult:
        found = outcome.listed
        return RestoreResult(
            source,
            outcome.safety,
            _counts(found.counts),
            [change_record(change) for change in found.changes],
            found.truncated,
            _problems(outcome.problems),
            outcome.step,
            expired_records(outcome.expired, self._snapshots.collect_pruned()),
            outcome.undo_steps,
            outcome.redo_steps,
        )

    def _check_writable(self) -> None:
        if self._options.read_only:
            raise OSError(errno.EROFS, f"workspace {self._options.name!r} is mounted read-only")

    async def _step_to(self, params: RestoreParams) -> str | None:
        """The snapshot of the state that `--undo` or `--redo` goes to; None where neither was asked for."""
        if not (params.undo or params.redo):
            return None
        interrupted = await self._snapshots.interrupted()
        if params.undo and interrupted is not None and interrupted.safety is not None:
            return interrupted.safety
        history = await self._snapshots.history()
        return name_at(history, await self._snapshots.infos(), history.position + (-1 if params.undo else +1))

    # -- diff ------------------------------------------------------------------------------------------
    async def _diff(self, params: DiffParams, call: CallContext) -> DiffResult:
        below = params.a is None and self._snapshots.has_base
        a = BASE if below else params.a if params.a is not None else await self._newest_snapshot()
        paths = wire_paths_within(params.paths)
        rule = path_filter(params.include, params.exclude)
        if params.b is None:
            await self._served.settle()
        async with self._snapshots.tree(a) as all_old, self._snapshots.tree(params.b) as all_new:
            old, new = filtered(all_old, rule), filtered(all_new, rule)
            if params.mode == "patch":
                found = await _in_thread(
                    written_patch,
                    old,
                    new,
                    paths,
                    Pieces(call.output_from_thread),
                    include_git=params.include_git,
                    keep_going=call.raise_if_cancelled,
                )
            else:
                found = await self._differences(
                    old, new, paths, call, with_lines=params.mode == "stat", stream=params.stream
                )
        return DiffResult(
            a=str(self._options.backend) if below else a,
            b=params.b,
            counts=found.counts,
            changes=found.records,
            truncated=found.truncated,
            problems=found.problems,
            omitted=found.omitted,
            patch_bytes=found.written_bytes,
        )

    async def _newest_snapshot(self) -> str:
        for info in reversed(await self._snapshots.infos()):
            if info.kind != "safety":
                return info.name
        raise FileNotFoundError(errno.ENOENT, "there is no snapshot to compare with; take one with: vfsd snapshot")

    async def _compare(
        self, a: str | None, b: str | None, paths: list[bytes], call: CallContext, *, stream: bool = False
    ) -> Differences:
        """From state `a` to state `b`; None is the live one."""
        async with self._snapshots.tree(a) as old, self._snapshots.tree(b) as new:
            return await self._differences(old, new, paths, call, stream=stream)

    async def _differences(
        self,
        old: Tree,
        new: Tree,
        paths: list[bytes],
        call: CallContext,
        *,
        with_lines: bool = False,
        stream: bool = False,
    ) -> Differences:
        return await _in_thread(
            differences,
            old,
            new,
            paths,
            with_lines=with_lines,
            keep_going=_counting(call),
            stream=Pieces(call.output_from_thread) if stream else None,
        )

    # -- export and import -----------------------------------------------------------------------------
    async def _export(self, params: ExportParams, call: CallContext) -> ExportResult:
        path = _absolute(params.path)
        await _in_thread(self._check_outlives_mount, path)
        rule = path_filter(params.include, params.exclude)
        snapshots = self._snapshots
        async with AsyncExitStack() as stack:
            tree: Tree = await stack.enter_async_context(
                snapshots.frozen(call) if params.snapshot is None else snapshots.tree(params.snapshot)
            )
            if params.changes_only:
                base = await stack.enter_async_context(self._snapshots.tree(BASE))
                tree = await _in_thread(changed_tree, base, tree)
            summary = await _in_thread(
                export_archive,
                filtered(tree, rule),
                path,
                overwrite=params.overwrite,
                created_ns=_created_ns(params.source_date_epoch),
                progress=in_bytes(call),
                skip_too_long=True,
            )
            if not (summary.skipped or params.changes_only or params.include or params.exclude):
                self._note_saved(tree)
        return ExportResult(
            params.path, summary.files, summary.total_bytes, summary.archive_bytes, _problems(summary.skipped)
        )

    def _note_saved(self, tree: Tree) -> None:
        if isinstance(self._served.volume, MemoryVolume):
            self._served.volume.mark_saved(tree)

    def _check_outlives_mount(self, path: str) -> None:
        """OSError (EINVAL) for an archive in this mount, where the unmount would delete it with everything else."""
        if self._options.backend.kind in _OUTLIVES_MOUNT:
            return
        place = mounts.find_mount(os.path.dirname(path))
        if place is not None and place.mountpoint == mounts.resolve(self._options.mountpoint):
            reason = (
                f"the archive would be inside workspace {self._options.name}, whose unmount deletes it: "
                "export to a path outside of the workspace"
            )
            raise OSError(errno.EINVAL, reason, path)

    async def _import(self, params: ImportParams, call: CallContext) -> ImportResult:
        self._check_writable()
        async with self._snapshots.staged(archive(_absolute(params.path)), call) as staged:
            outcome = await self._snapshots.put(staged, (), call, replace=False)
        return ImportResult(
            params.path,
            staged.files,
            staged.total_bytes,
            outcome.safety,
            _counts(outcome.listed.counts),
            _problems(outcome.problems),
            expired_records(outcome.expired, self._snapshots.collect_pruned()),
        )


async def _in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it in a worker thread.  The loop waits for its end even when cancelled: it reads a tree that must stay."""
    return await trio.to_thread.run_sync(functools.partial(function, *args, **kwargs))


def _half_done_apply(volume: MemoryVolume | None) -> str | None:
    if not isinstance(volume, OverlayVolume) or not volume.apply_interrupted:
        return None
    return "an apply into the directory below was killed: `vfsd apply` finishes it, or undoes it if it had not begun"


def _created_ns(source_date_epoch: int | None) -> int:
    return time.time_ns() if source_date_epoch is None else source_date_epoch * 10**9


def _counting(call: CallContext) -> Callable[[], None]:
    """Progress for work whose end is not known: each call of what is returned is one more path.

    It ends the work when nobody waits for `call` any more.  Any thread.
    """
    paths = itertools.count(1)

    def tell() -> None:
        call.raise_if_cancelled()
        call.progress_nowait(next(paths), 0, "files")

    return tell


def _counts(counts: DiffCounts) -> ChangeCounts:
    return ChangeCounts(counts.added, counts.modified, counts.removed)


def _record(info: SnapshotInfo, changes: DiffCounts | None = None, step: int | None = None) -> SnapshotRecord:
    kind: Literal["user", "safety", "automatic"] = info.kind
    return SnapshotRecord(
        name=info.name,
        created_at=created_at(info),
        files=info.files,
        directories=info.directories,
        size_bytes=info.size_bytes,
        kind=kind,
        tag=info.tag,
        changes=None if changes is None else _counts(changes),
        unstable=[wire_path(path) for path in info.unstable] if isinstance(info, StoredSnapshot) else [],
        unreadable=[wire_path(path) for path in info.unreadable] if isinstance(info, StoredSnapshot) else [],
        step=step,
    )


def _problems(problems: Mapping[bytes, str]) -> list[ProblemRecord]:
    return [ProblemRecord(wire_path(path), reason) for path, reason in problems.items()]


def _check_snapshot_name(name: str) -> None:
    if not _SNAPSHOT_NAME.fullmatch(name) or is_reserved(name):
        raise InvalidParamsError(
            f"not a name for a snapshot: {name!r} (1 to 128 characters, no slash or control character, "
            f"no leading space or dash; {SAFETY_PREFIX!r} is vfsd's own prefix)"
        )
    if name.lower().endswith(".zip") or not name.strip("."):
        reason = "only dots" if not name.strip(".") else "`vfsd restore` takes a name that ends in .zip for a file"
        raise InvalidParamsError(f"not a name for a snapshot: {name!r} ({reason}); take another one")


def _key(wire: str) -> str:
    try:
        return os.fsdecode(from_wire_path(wire))
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None


def _absolute(path: str) -> str:
    """A host path from the wire.  InvalidParamsError when it is relative: relative to what?"""
    try:
        host = os.fsdecode(from_wire_path(path))
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None
    if not os.path.isabs(host):
        raise InvalidParamsError(f"not an absolute path: {path!r}")
    return host
