"""`diff`, `export` and `apply`, which read a whole state, and the records of the differences of two trees.

Trees are compared in worker threads, on immutable trees.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from protocol.adapters.git_patterns import PathFilter
from protocol.adapters.trees import FilteredTree, changed_tree
from protocol.archive import export_archive
from protocol.diff.patch import Uncarried, line_stat, write_patch
from protocol.diff.tree_diff import Change, ChangeKind, changes, missing_above, restored_links, went_back
from protocol.errors import shown
from protocol.tree import LOST, Tree, TreeEntry, losing, unfiltered
from protocol.types import ChangeCounts
from protocol.volume_extensions import ApplyResult as Applied
from protocol.volume_extensions import OverlaidVolume, SnapshotInfo, overlaid, snapshotable
from vfsd.daemon.control.calls import CallContext, absolute_path, tree_paths
from vfsd.daemon.merging.frozen import FrozenApply
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
    required,
)
from vfsd.daemon.snapshots.volume import AppliedStep, VolumeSnapshots
from vfsd.machine import mountinfo
from vfsd.operations.declaration import ChangeRecord, ExpiredRecord, RepositoryRecord
from vfsd.operations.forks import StateId
from vfsd.operations.snapshots import (
    CHANGES_LISTED,
    ApplyParams,
    ApplyResult,
    DiffParams,
    DiffResult,
    ExportParams,
    ExportResult,
    ProblemRecord,
)
from vfsd.wire.messages import InvalidParamsError, wire_path
from vfsd.wire.option_rules import MOST_PATTERNS
from vfsd.wire.options import WorkspaceOptions

if TYPE_CHECKING:
    from vfsd.daemon.backends.registry import Backend

FileType = Literal["file", "directory", "symlink", "fifo", "socket", "device"]
_TYPES: dict[int, FileType] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
_PIECE_BYTES: Final = 64 * 1024
_EVERYTHING: Final = PathFilter()


def path_filter(include: Sequence[str], exclude: Sequence[str]) -> PathFilter:
    """Parse patterns.  InvalidParamsError for an invalid one, or too many."""
    if len(include) + len(exclude) > MOST_PATTERNS:
        count = f"{len(include) + len(exclude):,}"
        raise InvalidParamsError(f"{count} patterns are too many, the limit is {MOST_PATTERNS:,}")
    try:
        return PathFilter(include, exclude)
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None


def filtered(tree: Tree, rule: PathFilter) -> Tree:
    """`tree` without the names that `rule` hides."""
    if not rule:
        return tree
    return FilteredTree(tree, lambda path, is_directory: rule.hides(path, is_directory=is_directory))


class OutputPieces:
    """Collects output for a client in pieces of 64 KiB, because each message waits for the loop."""

    __slots__ = ("_pending", "_send", "sent_bytes")

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._pending = bytearray()
        self.sent_bytes = 0

    def write(self, data: bytes) -> None:
        self._pending += data
        if len(self._pending) >= _PIECE_BYTES:
            self.flush()

    def write_record(self, record: ChangeRecord) -> None:
        """Write `record` as a line of JSON."""
        self.write(msgspec.json.encode(record) + b"\n")

    def flush(self) -> None:
        self.sent_bytes += len(self._pending)
        if self._pending:
            self._send(bytes(self._pending))
            self._pending.clear()


class Differences:
    """Counts of changes, and their records: sent to `stream`, or else the first CHANGES_LISTED in `records`.

    `problems`, `omitted`, `written_bytes` and `git_only` belong to a patch.
    """

    __slots__ = ("_kinds", "_stream", "git_only", "omitted", "problems", "records", "truncated", "written_bytes")

    def __init__(self, stream: OutputPieces | None = None) -> None:
        self._stream = stream
        self._kinds: Counter[ChangeKind] = Counter()
        self.records: list[ChangeRecord] = []
        self.truncated = False
        self.problems: list[ProblemRecord] = []
        self.omitted: list[ProblemRecord] = []
        self.written_bytes = 0
        self.git_only = False

    def count(self, change: Change) -> None:
        """Count `change`."""
        self._kinds[change.kind] += 1

    @property
    def counts(self) -> ChangeCounts:
        added, removed = self._kinds["added"], self._kinds["removed"]
        return ChangeCounts(added, self._kinds.total() - added - removed, removed)

    def add(self, change: Change, record: Callable[[Change], ChangeRecord]) -> None:
        """Count `change`, and send or list its record."""
        self.count(change)
        if self._stream is not None:
            self._stream.write_record(record(change))
        elif len(self.records) < CHANGES_LISTED:
            self.records.append(record(change))
        else:
            self.truncated = True

    def add_problem(self, problem: ProblemRecord) -> None:
        """List a file whose content is lost in one of the states."""
        if len(self.problems) < CHANGES_LISTED:
            self.problems.append(problem)

    def add_uncarried(self, uncarried: Uncarried) -> None:
        """List a change that the patch cannot express."""
        if len(self.problems) + len(self.omitted) >= CHANGES_LISTED:
            self.truncated = True
            return
        listed = self.omitted if uncarried.is_usual else self.problems
        listed.append(ProblemRecord(wire_path(uncarried.path), uncarried.reason))


async def compare(
    old: Tree,
    new: Tree,
    paths: Sequence[bytes],
    call: CallContext,
    *,
    rule: PathFilter = _EVERYTHING,
    with_lines: bool = False,
    stream: bool = False,
    restores: bool = False,
) -> Differences:
    """Find the changes that `rule` lists, below `paths`, in a worker thread.

    FileNotFoundError for a path in neither.  `restores`: with the directories above `paths` that a restore would make.
    `with_lines` counts the lines of text files.  `stream` sends the records as output instead of listing them.
    """
    pieces = OutputPieces(call.output_from_thread) if stream else None
    found = Differences(pieces)

    def record(change: Change) -> ChangeRecord:
        made = change_record(change)
        if with_lines:
            lines = line_stat(old, new, change)
            made.lines_added, made.lines_removed, made.binary = lines.added, lines.removed, lines.binary
            if lines.unreadable:
                unreadable.append(ProblemRecord(made.path, lines.unreadable))
        return made

    unreadable: list[ProblemRecord] = []  # of the last change
    paths_done = itertools.count(1)

    def keep_going() -> None:
        call.raise_if_cancelled()
        call.progress_nowait(next(paths_done), 0, "files")

    def run() -> None:
        maybe_lost = [tree for tree in (losing(old), losing(new)) if tree is not None]
        above = missing_above(old, new, paths) if restores else ()
        changed = _changes(old, new, paths, rule, keep_going)
        if restores and paths:
            changed = restored_links(changed, old, new, paths)
        for change in itertools.chain(above, changed):
            found.add(change, record)
            if any(tree.is_lost(change.path) for tree in maybe_lost):
                found.add_problem(ProblemRecord(wire_path(change.path), LOST))
            elif unreadable:
                found.add_problem(unreadable[0])
            unreadable.clear()
        if pieces is not None:
            pieces.flush()

    await in_answer_thread(run)
    return found


def written_patch(
    old: Tree,
    new: Tree,
    paths: Sequence[bytes],
    rule: PathFilter,
    out: OutputPieces,
    *,
    include_git: bool,
    keep_going: Callable[[], None],
) -> Differences:
    """Write the patch of the changes that `rule` lists, below `paths`, to `out`.

    Returns their counts, and what a patch cannot express.
    """
    found = Differences()

    def counted() -> Iterator[Change]:
        for change in _changes(old, new, paths, rule, keep_going):
            if include_git or b".git" not in change.path.split(b"/"):
                found.count(change)
                found.git_only |= change.kind == "type" and bool(
                    (change.old and change.old.is_dir) or (change.new and change.new.is_dir)
                )
            yield change

    write_patch(old, new, counted(), out.write, include_git=include_git, on_uncarried=found.add_uncarried)
    out.flush()
    found.written_bytes = out.sent_bytes
    return found


def _changes(
    old: Tree, new: Tree, paths: Sequence[bytes], rule: PathFilter, keep_going: Callable[[], None]
) -> Iterator[Change]:
    for change in changes(old, new, paths=paths, keep_going=keep_going):
        entry = change.new or change.old
        if entry is None or rule.lists(change.path, is_directory=entry.is_dir):
            yield change


def change_record(change: Change) -> ChangeRecord:
    """Return the record of a change, without line counts."""
    shown = change.new or change.old
    assert shown is not None
    return ChangeRecord(
        path=wire_path(change.path),
        change=change.kind,
        type=_TYPES.get(stat.S_IFMT(shown.mode), "device"),
        old_size=_size(change.old),
        new_size=_size(change.new),
        linked_to=None if change.linked is None else wire_path(change.linked),
        unlinked_from=None if change.unlinked is None else wire_path(change.unlinked),
    )


def _size(entry: TreeEntry | None) -> int | None:
    return None if entry is None or entry.is_dir else entry.size


def time_text(time_ns: int) -> str:
    """Format a time in nanoseconds since the epoch for the wire (ISO 8601, UTC)."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def expired_records(expired: Iterable[SnapshotInfo], pruned: Iterable[SnapshotInfo]) -> list[ExpiredRecord]:
    """Return the records of dropped snapshots: of those that no step needed, and of those dropped to free memory."""
    return [
        *(ExpiredRecord(info.name, time_text(info.created_ns)) for info in expired),
        *(ExpiredRecord(info.name, time_text(info.created_ns), "memory") for info in pruned),
    ]


def problem_records(problems: Mapping[bytes, str]) -> list[ProblemRecord]:
    """Return the records of paths that could not be read or restored, with the reasons."""
    return [ProblemRecord(wire_path(path), reason) for path, reason in problems.items()]


# -- git repositories ------------------------------------------------------------------------------
_REFS_SHOWN: Final = 5


def planned_repositories(repositories: Sequence[bytes], other: str) -> list[RepositoryRecord]:
    """Return the records of a dry run, and of a merge whose conflicts prevent it."""
    detail = f"changed on both sides, so it is kept as it is, and gets the branches of {other}"
    return [RepositoryRecord(wire_path(path), detail) for path in repositories]


def fetched_repositories(
    repositories: Sequence[bytes], source: str, target: str, other: str, marked: Collection[bytes] = ()
) -> tuple[list[RepositoryRecord], bool]:
    """Fetch the branches of the workspace `other`, mounted at `source`, into the repositories below `target`.

    `marked`: files that the merge wrote conflict markers into.  Also returns whether no repository had a problem.
    """
    from protocol.merge.git import Fetched, fetch_repository  # noqa: PLC0415 (few merges need git)

    records, is_complete = [], True
    for path in repositories:
        fetched = Fetched(path, problem=f"{other} has ended")
        if source:
            fetched = fetch_repository(path, source, target, other, marked)
        left = ", ".join(shown(os.fsencode(ref)) for ref in fetched.left[:_REFS_SHOWN])
        if len(fetched.left) > _REFS_SHOWN:
            left += f" and {len(fetched.left) - _REFS_SHOWN:,} more"
        problem = fetched.problem or (f"git cannot read {left} there" if left and not fetched.refs else "")
        is_complete = is_complete and not problem
        detail = "changed on both sides, so it was kept as it is; "
        if problem:
            detail += f"the branches of {other} could not be fetched: {problem}"
        elif fetched.nothing:
            detail += f"no branches were fetched, because {other} has {fetched.nothing} there"
        else:
            without = f", without {left}, which git cannot read there" if left else ""
            once = " once the conflicts are resolved" if marked else ""
            take = f", and these commands take over its commits{once}:" if fetched.commands else ""
            detail += f"the branches of {other} are {fetched.refs}/* in it{without}{take}"
        records.append(RepositoryRecord(wire_path(path), detail, fetched.refs, list(fetched.commands)))
    return records, is_complete


class TreeMethods:
    """The methods of one workspace that read a whole state."""

    def __init__(
        self,
        mounted: MountedVolume,
        snapshots: SnapshotService | None,
        options: WorkspaceOptions,
        base: StateId | None,
        others: OtherWorkspaces,
        open_directory: Callable[[], Backend] | None = None,
    ) -> None:
        """`base`: the snapshot that a fork has in common with its source.  `others` fetches the states of others.

        `open_directory`: of a frozen overlay, as in `Backend`.
        """
        over = overlaid(mounted.volume)
        self._frozen: FrozenApply | None = None
        if open_directory is not None and over is not None:
            self._frozen = FrozenApply(mounted, over, open_directory, options.name)
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
        done: Applied
        marked: Sequence[bytes] = ()
        async with self._mounted.change_lock:
            await self._mounted.write_back()
            if self._frozen is None:
                done, is_written, step = await self._write(volume, self._snapshots, paths, params, call)
            else:
                policy = "theirs" if params.force else params.conflicts
                with self._snapshots.applying("apply") as step:
                    done = merged = await self._frozen.apply(
                        paths, policy, call, dry_run=params.dry_run, touch=params.touch
                    )
                    is_written, marked = merged.is_written, merged.marked
                    step.wrote = is_written and bool(done.changes)
        if done.error is not None:
            raise done.error
        stream = OutputPieces(call.output_from_thread) if params.stream else None
        result = await in_answer_thread(self._result, done, step.safety, is_written=is_written, stream=stream)
        result.merged = self._frozen is not None
        if params.touch:
            result.older = 0
        name, directory = self._options.name, self._options.backend.argument
        result.repositories = planned_repositories(done.repositories, name)
        if is_written:
            if done.repositories:
                result.repositories, _ = await in_thread(
                    fetched_repositories, done.repositories, self._mounted.mountpoint, directory, name, marked
                )
            result.expired = expired_records(step.expired, self._snapshots.collect_pruned())
        return result

    async def _write(
        self,
        volume: OverlaidVolume,
        snapshots: VolumeSnapshots,
        paths: Sequence[bytes],
        params: ApplyParams,
        call: CallContext,
    ) -> tuple[Applied, bool, AppliedStep]:
        """Write the changes to the directory below; return also whether anything was to be written."""
        if params.conflicts != "fail":
            reason = "only an overlay that was mounted with --frozen is merged with the directory: use --force"
            raise OSError(errno.EOPNOTSUPP, reason)
        touches = params.touch and not params.dry_run
        if self._mounted.policy is not None or touches:
            with volume.applying(paths, force=params.force, dry_run=True) as trial:
                planned = await in_thread(trial.write, call.raise_if_cancelled)
            if self._mounted.policy is not None:
                self._mounted.policy.check(planned.changes, "apply")
            touches = touches and (params.force or not planned.conflicts)
        with snapshots.applying("apply") as step:
            if not params.dry_run:
                call.commit()  # once the thread runs, a cancelled call could not say whether it wrote anything
            if touches:
                await snapshots.touch_changed(paths)
            with volume.applying(paths, force=params.force, dry_run=params.dry_run) as run:
                done = await in_thread(run.write, call.raise_if_cancelled)
                is_written = not params.dry_run and (params.force or not done.conflicts)
                if is_written:
                    run.finish(done)
                    step.wrote = bool(done.changes)
        return done, is_written, step

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
