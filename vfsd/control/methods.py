"""The methods of the control socket: what each verb does to a workspace.

Threading: handlers run on the serving loop.  Long work (diff, export, reading an archive) runs in a
worker thread on an immutable tree; what changes the state is one call on the volume, on the loop,
under `Served.changing`.  A handler that is cancelled before that call has changed nothing.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Final, Literal, ParamSpec, TypeVar

import trio

import vfsd
from protocol.archive import Progress, export_archive, open_archive, untold
from protocol.backends.host import HostVolume
from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.changed import changed_tree
from protocol.diff import Change, changes
from protocol.patch import write_patch
from protocol.tree import Tree
from protocol.volume import SnapshotInfo
from vfsd import holders, mounts
from vfsd.control.call import Call, Handler, InvalidParamsError
from vfsd.control.changes import Differences, differences
from vfsd.control.counted import CountedTree
from vfsd.control.fs_methods import FsMethods
from vfsd.control.messages import (
    ChangeCounts,
    DiffParams,
    DiffResult,
    DropParams,
    Empty,
    ExportParams,
    ExportResult,
    ImportParams,
    ImportResult,
    RestoreParams,
    RestoreResult,
    SnapshotParams,
    SnapshotRecord,
    SnapshotsParams,
    SnapshotsResult,
    StatusResult,
    UnmountParams,
    UnmountResult,
    from_wire_path,
    wire_path,
)
from vfsd.control.overlay_methods import OverlayMethods, overlay_of
from vfsd.control.paths import wire_paths_within
from vfsd.options import MountOptions
from vfsd.served import Served

__all__ = ["SAFETY_SNAPSHOTS_KEPT", "Methods", "read_archive"]

SAFETY_SNAPSHOTS_KEPT: Final = 10
_BASE: Final = ""  # what is below an overlay; no snapshot has an empty name
_SAFETY_PREFIX: Final = "safety-"
_PATCH_PIECE_BYTES: Final = 64 * 1024
# What a shell, a file name in a table and `restore NAME|ARCHIVE.zip` can all take without quoting trouble.
_SNAPSHOT_NAME: Final = re.compile(r"[^\s/\x00-\x1f\x7f-][^/\x00-\x1f\x7f]{0,127}")

P = ParamSpec("P")
T = TypeVar("T")


class Methods:
    """The verbs of one workspace.  `stopped` is called once an unmount has been answered."""

    def __init__(self, served: Served, options: MountOptions, started_at: str) -> None:
        self._served = served
        self._options = options
        self._started_at = started_at
        self.answering_unmount = 0

    @property
    def _volume(self) -> MemoryVolume:
        """For what needs snapshots.  OSError (EOPNOTSUPP) where the backend has none."""
        return self._served.snapshotable

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of each method of `messages.METHODS`."""
        return {
            "ping": self._ping,
            "status": self._status,
            "snapshot": self._snapshot,
            "snapshots": self._snapshots,
            "drop": self._drop,
            "restore": self._restore,
            "diff": self._diff,
            "export": self._export,
            "import": self._import,
            "unmount": self._unmount,
            "apply": OverlayMethods(self._served, self._options).apply,
            "check": self._check,
            **FsMethods(self._served, self._options).handlers(),
        }

    # -- what there is ---------------------------------------------------------------------------
    async def _ping(self, _params: Empty, _call: Call) -> Empty:
        return Empty()

    async def _check(self, _params: Empty, _call: Call) -> Empty:
        volume = self._served.volume
        if isinstance(volume, MemoryVolume | HostVolume):
            volume.check_invariants()
        return Empty()

    async def _status(self, _params: Empty, _call: Call) -> StatusResult:
        options = self._options
        # What a backend would have to walk its whole tree for is not said.
        volume = self._served.volume if isinstance(self._served.volume, MemoryVolume) else None
        return StatusResult(
            name=options.name,
            mountpoint=wire_path(os.fsencode(options.mountpoint)),
            backend=options.backend,
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
            snapshots=len(volume.snapshots()) if volume else None,
            requests=self._served.engine.requests,
            changed_below=volume.changed_below if isinstance(volume, OverlayVolume) else None,
            engine_reason=self._served.engine.fallback_reason,
        )

    # -- snapshots ---------------------------------------------------------------------------------
    async def _snapshot(self, params: SnapshotParams, _call: Call) -> SnapshotRecord:
        name = params.name
        if name is not None:
            _check_snapshot_name(name)
        async with self._served.changing:
            await self._served.settle()
            taken = {info.name for info in self._volume.snapshots()} if name is None else set()
            return _record(self._volume.take_snapshot(name or _free_name("snap-", taken), tag=params.tag))

    async def _snapshots(self, params: SnapshotsParams, _call: Call) -> SnapshotsResult:
        counts = self._volume.change_counts() if params.changes else {}
        records = []
        for info in self._volume.snapshots():
            record = _record(info)
            if info.name in counts:
                record.changes = ChangeCounts(*counts[info.name])
            records.append(record)
        return SnapshotsResult(records)

    async def _drop(self, params: DropParams, _call: Call) -> Empty:
        async with self._served.changing:
            self._volume.drop_snapshot(params.name)
        return Empty()

    # -- restore -------------------------------------------------------------------------------------
    async def _restore(self, params: RestoreParams, call: Call) -> RestoreResult:
        if sum((params.name is not None, params.archive is not None, params.undo, params.base)) != 1:
            raise InvalidParamsError("restore takes one of: name, archive, undo, base")
        if not params.dry_run:
            self._check_writable()
        paths = wire_paths_within(params.paths)
        if params.archive is not None:
            return await self._restore_archive(params.archive, paths, call, dry_run=params.dry_run)
        if params.base:
            name = _BASE
            overlay_of(self._served)  # it is one, or it raises
        else:
            name = self._newest_safety() if params.undo else params.name or ""
            self._volume.snapshot(name)  # there is one, or it raises
        source = self._options.backend if params.base else name
        if params.dry_run:
            found = await self._compare(None, name, paths, call)
            return RestoreResult(source, None, found.counts, found.records, found.truncated)
        async with self._served.changing:
            await self._served.settle()
            safety = self._take_safety(keep=name)
            with self._undone_unless_done(safety):
                if params.base:
                    coherence = overlay_of(self._served).discard(paths)
                else:
                    coherence = self._volume.restore_snapshot(name, paths)
            await self._served.changed(coherence)
        return await self._restored(source, safety, call)

    async def _restore_archive(self, path: str, paths: list[bytes], call: Call, *, dry_run: bool) -> RestoreResult:
        staged = await self._staged(path, call)
        with staged.tree() as tree:
            if dry_run:
                with self._volume.tree() as live:
                    found = await self._differences(live, tree, paths, call)
                return RestoreResult(path, None, found.counts, found.records, found.truncated)
            safety = await self._put(tree, replace=True, paths=paths)
        return await self._restored(path, safety, call)

    async def _staged(self, path: str, call: Call) -> MemoryVolume:
        volume = self._volume
        told = _telling(call)
        return await _in_thread(read_archive, _absolute(path), volume.max_bytes, volume.max_inodes, told)

    async def _put(self, tree: Tree, *, replace: bool, paths: list[bytes]) -> str:
        """Put `tree` in place; the name of the safety snapshot taken before."""
        async with self._served.changing:
            await self._served.settle()
            safety = self._take_safety()
            with self._undone_unless_done(safety):
                coherence = self._volume.import_tree(tree, replace=replace, paths=paths)
            await self._served.changed(coherence)
        return safety

    async def _restored(self, source: str, safety: str, call: Call) -> RestoreResult:
        found = await self._compare(safety, None, [], call)
        return RestoreResult(source, safety, found.counts, found.records, found.truncated)

    def _check_writable(self) -> None:
        if self._options.read_only:
            raise OSError(errno.EROFS, f"workspace {self._options.name!r} is mounted read-only")

    def _take_safety(self, keep: str | None = None) -> str:
        """Keep the present state under a name of its own, and let go of the oldest of its kind."""
        infos = self._volume.snapshots()
        old = [info.name for info in infos if info.kind == "safety" and info.name != keep]
        for name in old[: max(0, len(old) + 1 - SAFETY_SNAPSHOTS_KEPT)]:
            self._volume.drop_snapshot(name)
        name = _free_name(_SAFETY_PREFIX, {info.name for info in infos})
        return self._volume.take_snapshot(name, kind="safety").name

    @contextmanager
    def _undone_unless_done(self, safety: str) -> Iterator[None]:
        """A change that fails leaves the state as it was, and no safety snapshot for what did not happen."""
        try:
            yield
        except BaseException:
            self._volume.drop_snapshot(safety)
            raise

    def _newest_safety(self) -> str:
        for info in reversed(self._volume.snapshots()):
            if info.kind == "safety":
                return info.name
        raise FileNotFoundError(errno.ENOENT, "nothing was restored or imported, so there is nothing to undo")

    # -- diff ------------------------------------------------------------------------------------------
    async def _diff(self, params: DiffParams, call: Call) -> DiffResult:
        below = params.a is None and isinstance(self._volume, OverlayVolume)
        a = _BASE if below else params.a if params.a is not None else self._newest_snapshot()
        paths = wire_paths_within(params.paths)
        if params.b is None:
            await self._served.settle()
        if params.mode == "patch":
            with ExitStack() as stack:
                old, new = (stack.enter_context(self._tree(name)) for name in (a, params.b))
                found = await _in_thread(_write_patch, old, new, paths, call)
        else:
            found = await self._compare(a, params.b, paths, call, with_lines=params.mode == "stat")
        return DiffResult(self._options.backend if below else a, params.b, found.counts, found.records, found.truncated)

    def _tree(self, name: str | None) -> AbstractContextManager[Tree]:
        """The state `name`: a snapshot, _BASE, or None for the live one."""
        return overlay_of(self._served).base_tree() if name == _BASE else self._volume.tree(name)

    def _newest_snapshot(self) -> str:
        for info in reversed(self._volume.snapshots()):
            if info.kind == "user":
                return info.name
        raise FileNotFoundError(errno.ENOENT, "there is no snapshot to compare with; take one with: vfsd snapshot")

    async def _compare(
        self, a: str | None, b: str | None, paths: list[bytes], call: Call, *, with_lines: bool = False
    ) -> Differences:
        """From state `a` to state `b`; None is the live one."""
        with self._tree(a) as old, self._tree(b) as new:
            return await self._differences(old, new, paths, call, with_lines=with_lines)

    async def _differences(
        self, old: Tree, new: Tree, paths: list[bytes], call: Call, *, with_lines: bool = False
    ) -> Differences:
        return await _in_thread(differences, old, new, paths, with_lines=with_lines, keep_going=_counting(call))

    # -- export and import -----------------------------------------------------------------------------
    async def _export(self, params: ExportParams, call: Call) -> ExportResult:
        path = _absolute(params.path)
        if params.snapshot is None:
            await self._served.settle()

        with ExitStack() as stack:
            tree: Tree = stack.enter_context(self._volume.tree(params.snapshot))
            if params.changes_only:
                base = stack.enter_context(overlay_of(self._served).base_tree())
                tree = await _in_thread(changed_tree, base, tree)
            summary = await _in_thread(
                export_archive,
                tree,
                path,
                overwrite=params.overwrite,
                created_ns=_created_ns(params.source_date_epoch),
                progress=_telling(call),
            )
        return ExportResult(params.path, summary.files, summary.total_bytes, summary.archive_bytes)

    async def _import(self, params: ImportParams, call: Call) -> ImportResult:
        self._check_writable()
        staged = await self._staged(params.path, call)
        with staged.tree() as tree:
            safety = await self._put(tree, replace=False, paths=[])
        found = await self._compare(safety, None, [], call)
        return ImportResult(params.path, staged.files, staged.size_bytes, safety, found.counts)

    # -- the end -----------------------------------------------------------------------------------------
    async def _unmount(self, params: UnmountParams, call: Call) -> UnmountResult:
        mountpoint = self._options.mountpoint
        await self._served.left()
        found = await _in_thread(holders.holders, mountpoint)
        held = [holder.describe() for holder in found if holder.pid != os.getpid()]
        # The daemon ends as soon as the mount has gone; it waits for this answer (see `vfsd.daemon`).
        self.answering_unmount += 1
        call.after_answer(self._unmount_answered)
        await _in_thread(mounts.unmount, mountpoint, lazy=params.lazy)
        return UnmountResult(wire_path(os.fsencode(mountpoint)), params.lazy, held)

    def _unmount_answered(self) -> None:
        self.answering_unmount -= 1


def read_archive(path: str, max_bytes: int | None, max_inodes: int | None, progress: Progress = untold) -> MemoryVolume:
    """The content of a ZIP file, validated and unpacked into a volume of its own.  Any thread.  ArchiveError, OSError.

    So the serving loop has only to put it in place.  What it may take is what the workspace may: an archive that
    unpacks to more than the machine has would otherwise end the daemon, and the workspace with it.
    `progress` is told of both passes over the content, the check and the unpacking, as halves of the whole.
    """
    staged = MemoryVolume(max_bytes, max_inodes)
    try:
        with open_archive(path, progress=lambda done, total: progress(done // 2, total)) as tree:
            counted = CountedTree(tree, lambda done, total: progress((total + done) // 2, total))
            staged.import_tree(counted, replace=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        reason = f"No space left: the archive holds more than the workspace may ({_limits(max_bytes, max_inodes)})"
        raise OSError(errno.ENOSPC, reason, path) from None
    return staged


def _limits(max_bytes: int | None, max_inodes: int | None) -> str:
    return ", ".join(f"{limit:,} {what}" for limit, what in ((max_bytes, "bytes"), (max_inodes, "inodes")) if limit)


async def _in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it in a worker thread.  The loop waits for its end even when cancelled: it reads a tree that must stay."""
    return await trio.to_thread.run_sync(functools.partial(function, *args, **kwargs))


def _created_ns(source_date_epoch: int | None) -> int:
    return time.time_ns() if source_date_epoch is None else source_date_epoch * 10**9


def _telling(call: Call) -> Progress:
    """Progress in bytes for whoever waits for `call`; ends the work when nobody does.  Any thread."""

    def tell(done_bytes: int, total_bytes: int) -> None:
        call.raise_if_cancelled()
        call.progress_nowait(done_bytes, total_bytes, "bytes")

    return tell


def _counting(call: Call) -> Callable[[], None]:
    """The same for work whose end is not known: each call of what is returned is one more path."""
    paths = itertools.count(1)

    def tell() -> None:
        call.raise_if_cancelled()
        call.progress_nowait(next(paths), 0, "files")

    return tell


def _write_patch(old: Tree, new: Tree, paths: list[bytes], call: Call) -> Differences:
    # Each message waits for the loop: one for every section of a patch would take minutes for 100,000 files.
    pieces = bytearray()

    def write(data: bytes) -> None:
        pieces.extend(data)
        if len(pieces) >= _PATCH_PIECE_BYTES:
            call.output_from_thread(bytes(pieces))
            pieces.clear()

    write_patch(old, new, _watched(changes(old, new, paths=paths), call), write)
    call.output_from_thread(bytes(pieces))
    return differences(old, new, paths, keep_going=_counting(call))


def _watched(changed: Iterable[Change], call: Call) -> Iterator[Change]:
    for change in changed:
        call.raise_if_cancelled()
        yield change


def _record(info: SnapshotInfo) -> SnapshotRecord:
    created = datetime.fromtimestamp(info.created_ns / 1e9, UTC)
    kind: Literal["user", "safety"] = info.kind
    return SnapshotRecord(
        name=info.name,
        created_at=created.isoformat(timespec="milliseconds"),
        files=info.files,
        directories=info.directories,
        size_bytes=info.size_bytes,
        kind=kind,
        tag=info.tag,
    )


def _check_snapshot_name(name: str) -> None:
    if not _SNAPSHOT_NAME.fullmatch(name) or name.startswith(_SAFETY_PREFIX):
        raise InvalidParamsError(
            f"not a name for a snapshot: {name!r} (1 to 128 characters, no slash or control character, "
            f"no leading space or dash; {_SAFETY_PREFIX!r} is vfsd's own prefix)"
        )


def _free_name(prefix: str, taken: set[str]) -> str:
    """The prefix with a number above all that were given."""
    numbers = [int(name[len(prefix) :]) for name in taken if name.startswith(prefix) and name[len(prefix) :].isdigit()]
    return f"{prefix}{max(numbers, default=0) + 1}"


def _absolute(path: str) -> str:
    """A host path from the wire.  InvalidParamsError when it is relative: relative to what?"""
    try:
        host = os.fsdecode(from_wire_path(path))
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None
    if not os.path.isabs(host):
        raise InvalidParamsError(f"not an absolute path: {path!r}")
    return host
