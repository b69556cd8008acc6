"""`snapshot`, `snapshots`, `drop`, `restore` and `import`."""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from protocol.errors import SnapshotNotFoundError
from protocol.store import Store
from protocol.tree import Tree, unfiltered
from protocol.types import ChangeCounts
from protocol.volume_extensions import SnapshotInfo, SnapshotKind
from vfsd.daemon.control.calls import CallContext, absolute_path, host_text, tree_paths
from vfsd.daemon.control.handlers.changes import (
    change_record,
    compare,
    expired_records,
    problem_records,
    time_text,
)
from vfsd.daemon.forks.forks import Forks
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import Origin, archive, snapshot_of
from vfsd.daemon.snapshots.base import (
    BASE,
    SAFETY_PREFIX,
    Outcome,
    SnapshotService,
    in_answer_thread,
    in_thread,
    is_merge_base,
    is_reserved,
    required,
    state_at,
)
from vfsd.operations.snapshots import (
    DropParams,
    DroppedStepRecord,
    DropResult,
    FromArchive,
    FromBelow,
    FromOther,
    FromSnapshot,
    ImportParams,
    ImportResult,
    Redo,
    RestoreParams,
    RestoreResult,
    SnapshotParams,
    SnapshotRecord,
    SnapshotsParams,
    SnapshotsResult,
    Undo,
)
from vfsd.wire.messages import InvalidNameError, InvalidParamsError, wire_path
from vfsd.wire.options import WorkspaceOptions

# Names that need no quoting in a shell, in a table's file name, and in `restore NAME|ARCHIVE.zip`.
_SNAPSHOT_NAME: Final = re.compile(r"[^\s/\x00-\x1f\x7f-][^/\x00-\x1f\x7f]{0,127}")


class SnapshotMethods:
    """The snapshot methods of one workspace."""

    def __init__(
        self, mounted: MountedVolume, snapshots: SnapshotService | None, options: WorkspaceOptions, forks: Forks
    ) -> None:
        self._mounted = mounted
        self._optional = snapshots
        self._forks = forks
        self._options = options

    @property
    def _snapshots(self) -> SnapshotService:
        return required(self._optional)

    async def snapshot(self, params: SnapshotParams, call: CallContext) -> SnapshotRecord:
        if params.name is not None:
            _check_snapshot_name(params.name)
        snapshots = self._snapshots
        kind: SnapshotKind = "automatic" if params.automatic else "user"
        record = _record(await snapshots.take(params.name, params.tag, call, kind=kind))
        record.expired = expired_records((), snapshots.collect_pruned())
        return record

    async def snapshots(self, params: SnapshotsParams, _call: CallContext) -> SnapshotsResult:
        snapshots = self._snapshots
        counts = await snapshots.change_counts(params.newest) if params.changes else {}
        history = await snapshots.history()
        records = []
        infos = await snapshots.infos()
        needed = await self._needed(infos)
        for info in infos:
            at = history.position_of(info.serial)
            step = None if at is None else at - history.position
            record = _record(info, counts.get(info.name), step)
            record.needed = needed.get(info.name)
            records.append(record)
        return SnapshotsResult(records)

    async def _needed(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, str | None]:
        """Return why a fork or a later merge needs a snapshot, by name."""
        others = await in_thread(self._forks.needed, infos)
        found: dict[str, str | None] = {}
        for info in infos:
            if is_merge_base(info):
                found[info.name] = info.tag
            elif info.name in others or self._forks.is_base(info):
                found[info.name] = "base of a fork"
        return found

    async def drop(self, params: DropParams, _call: CallContext) -> DropResult:
        unique = dict.fromkeys([params.name, *params.also])
        names = list(unique)
        if not params.force and params.created_at is None:
            infos = [info for info in await self._snapshots.infos() if info.name in unique]
            needed = await in_thread(self._forks.needed, infos)
            for name in names:
                if name in needed:
                    raise _refusal(name, needed[name], len(names))
        if params.created_at is not None:
            await self._check_unneeded(names, params.created_at)
        done = await self._snapshots.drop(names)
        steps = [DroppedStepRecord(name, step) for name, step in done.steps.items()]
        return DropResult(names, steps, done.history.undo_steps, done.history.redo_steps)

    async def _check_unneeded(self, names: Sequence[str], created_at: Mapping[str, str]) -> None:
        """Raise the errors that `DropParams` describes."""
        infos = await self._snapshots.infos()
        needed = await self._needed(infos)
        for name in names:
            _check_created(infos, name, created_at.get(name, ""))
            reason = needed.get(name)
            if reason is not None:
                raise OSError(errno.EBUSY, f"needed now ({reason}); nothing was dropped", name)

    # -- restore -------------------------------------------------------------------------------------
    async def restore(self, params: RestoreParams, call: CallContext) -> RestoreResult:
        source = params.source
        if not params.dry_run:
            self._check_writable()
        paths = await tree_paths(params.paths)
        if isinstance(source, Redo) and paths:
            raise InvalidParamsError("redo takes no paths: restore them from the snapshot that `vfsd snapshots` shows")
        if isinstance(source, FromArchive):
            return await self._restore_from(archive(absolute_path(source.path)), source.path, paths, call, params)
        if isinstance(source, FromOther):
            with self._store(source.store) as store:
                shown = f"{source.name} of {source.of}"
                origin = snapshot_of(store, host_text(source.of), source.name, shown)
                return await self._restore_from(origin, shown, paths, call, params)
        snapshots = self._snapshots
        if isinstance(source, Undo | Redo):
            check = functools.partial(_check_step, source.created_at)
            if not (params.dry_run or paths):
                move = snapshots.undo if isinstance(source, Undo) else snapshots.redo
                outcome = await move(call, check, touch=params.touch)
                return self._restored(outcome.source, outcome, params)
            target = await self._step_to(source)
            check(target)
            shown = name = target.name
        elif isinstance(source, FromSnapshot):
            shown = name = source.name
            if source.created_at is not None:
                _check_created(await snapshots.infos(), name, source.created_at)
        else:
            shown, name = wire_path(os.fsencode(str(self._options.backend))), BASE
        if params.dry_run:
            await snapshots.check_below()
            async with snapshots.tree(None, call) as live, snapshots.tree(name, call) as wanted:
                await self._check_policy(live, wanted, paths, f"restore {shown}", call)
                found = await compare(live, wanted, paths, call, stream=params.stream, restores=True)
            return RestoreResult(shown, None, found.counts, found.records, found.truncated, found.problems)
        return self._restored(shown, await snapshots.restore(name, paths, call, touch=params.touch), params)

    def _store(self, directory: str | None) -> Store:
        return Store(self._options.store if directory is None else absolute_path(directory))

    async def _restore_from(
        self, origin: Origin, source: str, paths: list[bytes], call: CallContext, params: RestoreParams
    ) -> RestoreResult:
        snapshots = self._snapshots
        async with snapshots.staged(origin, call) as staged:
            if params.dry_run:
                async with snapshots.tree(None, call) as live:
                    await self._check_policy(live, staged.tree, paths, staged.step(replace=True), call)
                    found = await compare(live, staged.tree, paths, call, stream=params.stream, restores=True)
                return RestoreResult(source, None, found.counts, found.records, found.truncated)
            outcome = await snapshots.put(staged, paths, call, replace=True, touch=params.touch)
            return self._restored(source, outcome, params)

    def _restored(self, source: str, outcome: Outcome, params: RestoreParams) -> RestoreResult:
        # A restore of everything brings back the objects that were built from the older sources.
        is_part = bool(params.paths) or isinstance(params.source, FromBelow)
        return RestoreResult(
            source,
            outcome.safety,
            outcome.counts,
            [change_record(change) for change in outcome.changes],
            outcome.truncated,
            problem_records(outcome.problems),
            outcome.step,
            expired_records(outcome.expired, self._snapshots.collect_pruned()),
            outcome.undo_steps,
            outcome.redo_steps,
            outcome.older if is_part else 0,
        )

    async def _check_policy(
        self, live: Tree, wanted: Tree, paths: Sequence[bytes], attempt: str, call: CallContext
    ) -> None:
        """Refuse the dry run of a restore that the policy refuses."""
        policy = self._mounted.policy
        if policy is not None:
            await in_answer_thread(
                policy.check_trees,
                unfiltered(live),
                unfiltered(wanted),
                attempt,
                paths=paths,
                keep_going=call.raise_if_cancelled,
            )

    def _check_writable(self) -> None:
        if self._options.read_only:
            raise OSError(errno.EROFS, f"workspace {self._options.name!r} is mounted read-only")

    async def _step_to(self, source: Undo | Redo) -> SnapshotInfo:
        """Return the snapshot that an undo or a redo goes to."""
        infos = await self._snapshots.infos()
        interrupted = await self._snapshots.interrupted()
        if isinstance(source, Undo) and interrupted is not None and interrupted.safety is not None:
            found = [info for info in infos if info.name == interrupted.safety]
            if not found:
                raise SnapshotNotFoundError(interrupted.safety)
            return found[0]
        history = await self._snapshots.history()
        return state_at(history, infos, history.position + (-1 if isinstance(source, Undo) else +1))

    # -- import --------------------------------------------------------------------------------------
    async def import_(self, params: ImportParams, call: CallContext) -> ImportResult:
        self._check_writable()
        snapshots = self._snapshots
        async with snapshots.staged(archive(absolute_path(params.path)), call) as staged:
            outcome = await snapshots.put(staged, (), call, replace=False)
        return ImportResult(
            params.path,
            staged.files,
            staged.total_bytes,
            outcome.safety,
            outcome.counts,
            problem_records(outcome.problems),
            expired_records(outcome.expired, snapshots.collect_pruned()),
        )


def _record(info: SnapshotInfo, counts: ChangeCounts | None = None, step: int | None = None) -> SnapshotRecord:
    return SnapshotRecord(
        name=info.name,
        created_at=time_text(info.created_ns),
        files=info.files,
        directories=info.directories,
        size_bytes=info.size_bytes,
        kind=info.kind,
        tag=info.tag,
        changes=counts,
        unstable=[wire_path(path) for path in info.unstable],
        unreadable=[wire_path(path) for path in info.unreadable],
        step=step,
    )


def _refusal(name: str, workspaces: Sequence[str], named: int) -> OSError:
    who = workspaces[0] if len(workspaces) == 1 else f"{workspaces[0]} and {len(workspaces) - 1} more"
    nothing = "; nothing was dropped" if named > 1 else ""
    reason = (
        f"{name} is the base of merges with the running workspace {who}: without it, they could not be merged or"
        f" compared{nothing}; merge or unmount first, or drop it with --force"
    )
    return OSError(errno.EBUSY, reason)


def _check_step(created_at: str | None, target: SnapshotInfo) -> None:
    """Raise OSError (ESTALE) unless the state that an undo or a redo goes to was kept at `created_at`."""
    if created_at is not None and time_text(target.created_ns) != created_at:
        reason = "another step was made or undone meanwhile, so this one is not the next: nothing was changed"
        raise OSError(errno.ESTALE, reason)


def _check_created(infos: Sequence[SnapshotInfo], name: str, created_at: str) -> None:
    """Raise SnapshotNotFoundError unless snapshot `name` was taken at `created_at`."""
    if not any(info.name == name and time_text(info.created_ns) == created_at for info in infos):
        raise SnapshotNotFoundError(name)


def _check_snapshot_name(name: str) -> None:
    if not _SNAPSHOT_NAME.fullmatch(name) or is_reserved(name):
        raise InvalidNameError(
            f"{name!r} is not a snapshot name: 1 to 128 characters, no slash or control character, no leading space or"
            f" dash, not vfsd's own prefix {SAFETY_PREFIX!r}"
        )
    if name.lower().endswith(".zip") or not name.strip("."):
        reason = "only dots" if not name.strip(".") else "a name that ends in .zip means a file"
        raise InvalidNameError(f"{name!r} is not a snapshot name: {reason}; choose another one")
