"""The results of the Python API: frozen values, and how the daemon's answers become them.

Paths are `str` from `os.fsdecode`, relative to the workspace's root: joined to `Workspace.path` they open the file,
whatever bytes its name contains.  Sizes are in bytes.  Times are aware datetimes in UTC.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Final, Literal, Self

import msgspec

from protocol.types import ChangeCounts
from vfsd.operations.declaration import ChangeRecord, ExpiredRecord, RepositoryRecord
from vfsd.operations.forks import BelowRecord, ConflictRecord, ForkResult
from vfsd.operations.snapshots import DiffResult, ProblemRecord
from vfsd.operations.workspace import StatusResult, UpgradeResult
from vfsd.wire.messages import from_wire_path
from vfsd.wire.options import Ready

ChangeKind = Literal["added", "modified", "removed", "type", "metadata"]
Counts = ChangeCounts
FileKind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs.

    "type" means that a file became a directory, for example; "metadata" that only mode, owner, time, xattrs or hard
    links differ.  A size is None on the side on which the path does not exist or is not a regular file.

    `linked_to`: the path became a name of the file that has this name, too (a hard link).  `unlinked_from`: it is no
    longer a name of the file that has, or had, this name.
    """

    path: str
    change: ChangeKind
    type: FileKind
    old_size: int | None = None
    new_size: int | None = None
    linked_to: str | None = None
    unlinked_from: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable state of the workspace.

    `kind`: vfsd takes "safety" snapshots before a restore or import, and "automatic" ones after a command or a call of
    a tool.  Automatic snapshots are dropped if memory is short.

    `step`: the number of undos (below 0) or redos (above 0) that go to this state; 0 if the last undo or redo went to
    it; None if none leads to it.

    `changes`: the changes since the previous snapshot; None if they were not requested.

    `unstable`: files of a host directory that changed while they were read.  `unreadable`: paths that are missing
    because they could not be read.

    `expired` is as in `Restored`.  Only `snapshot` sets it.
    """

    name: str
    created_at: datetime
    files: int
    directories: int
    size_bytes: int
    kind: Literal["user", "safety", "automatic"] = "user"
    tag: str | None = None
    changes: Counts | None = None
    unstable: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    step: int | None = None
    expired: Mapping[str, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diff:
    """The changes from state `a` to state `b` (None: the live state).  False if nothing differs.

    `changes` lists all changes or, with `complete=False`, the first 10,000; `truncated` says that there are more.
    `problems` are the files among them that another program changed below an overlay after a snapshot, so that their
    content in it is lost.
    """

    a: str
    b: str | None
    counts: Counts
    changes: tuple[Change, ...]
    truncated: bool = False
    problems: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.counts.total > 0


class Patch(bytes):
    """The bytes of a patch, and the changes that are missing from it.

    `counts` counts all changes.  `problems` maps the path of each change that a patch cannot express to the reason.
    `omitted` does so for changes that git ignores: empty directories and the content of `.git`.  Both together have at
    most 10,000 paths; comments in the patch name all.
    """

    counts: Counts
    problems: Mapping[str, str]
    omitted: Mapping[str, str]

    def __new__(cls, patch: bytes, *, counts: Counts, problems: Mapping[str, str], omitted: Mapping[str, str]) -> Self:
        made = super().__new__(cls, patch)
        made.counts, made.problems, made.omitted = counts, problems, omitted
        return made


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository that both sides have changed, and that stayed as it was in the target.

    `refs`: what the names of the other side's branches begin with in it; empty if they are not there, which `detail`
    explains.  `commands`: for a shell; they take over the commits of the other side.
    """

    detail: str
    refs: str
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Applied:
    """The changes that an apply wrote to the directory below an overlay, or with `dry_run` would write.

    `conflicts` maps paths that other programs changed there, and entries that prevent the removal of their directory,
    to the reason.  If there are any, and without `force`, `applied` is False and nothing was written.  With `force`
    such a directory is kept, and `changes` omits it; `problems` are the files that cannot be written even so, because
    another program changed them below and the workspace holds only parts of them.  `recovered` describes a killed apply
    that this one completed or undid first.  `safety_snapshot` contains the state that was written; `expired` is as in
    `Restored`.
    `repositories`, by path, are as in `Merged`.  `older` is as in `Restored`.  `merged`: the workspace is frozen, and
    `conflicts` are those of a merge with the directory.
    """

    directory: str
    applied: bool
    counts: Counts
    changes: tuple[Change, ...]
    conflicts: Mapping[str, str]
    problems: Mapping[str, str] = field(default_factory=dict)
    truncated: bool = False
    recovered: str | None = None
    safety_snapshot: str | None = None
    expired: Mapping[str, datetime] = field(default_factory=dict)
    repositories: Mapping[str, Repository] = field(default_factory=dict)
    older: int = 0
    merged: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """The changes that a restore made, or with `dry_run` would make.

    `source`: the snapshot or archive.  `safety_snapshot`: the snapshot with the state before; None for a dry run, and
    if nothing was changed.  `counts`: the numbers of all changes.  `changes` lists the first 10,000; `truncated` says
    that there are more.  `problems`: the paths that could not be restored, with the reason: another program changed
    one meanwhile, for example, and the restore left that change alone.  `step`: what `undo` or `redo` has undone or
    redone ("restore turn-1").  `undo_steps`, `redo_steps`: how many more steps can be undone and redone (0 for a dry
    run).  `expired`: dropped snapshots, with the time at which each was taken.  These are safety snapshots that no
    undo or redo leads to any more and that were too old or too many, and snapshots without a user's name that were
    dropped since the last answer because memory was needed.  `older`: how many files got other content and an
    earlier mtime, so that build tools may not notice; 0 with `touch`, and where everything was restored.
    """

    source: str
    safety_snapshot: str | None
    counts: Counts
    changes: tuple[Change, ...]
    truncated: bool = False
    problems: Mapping[str, str] = field(default_factory=dict)
    step: str | None = None
    expired: Mapping[str, datetime] = field(default_factory=dict)
    undo_steps: int = 0
    redo_steps: int = 0
    older: int = 0


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a path could not be merged.

    `reason` is one of the words in docs/forks.md, `detail` a line for people.  `kept_as`: the path with the fork's
    version, if the policy "markers" kept one.
    """

    reason: str
    detail: str
    kept_as: str | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """The changes that a merge or an adoption made, or with `dry_run` would make.

    `applied` is False for a dry run, and if `conflicts`, by path, prevented it; then nothing was changed.  `fork` is
    the name of the other workspace, and `base` the snapshot that the changes of both sides are counted from.
    `repositories`, by path, are those that both sides changed, and that the merge left as they were.  The rest is as in
    `Restored`.
    """

    fork: str
    base: str
    applied: bool
    counts: Counts
    changes: tuple[Change, ...]
    conflicts: Mapping[str, Conflict] = field(default_factory=dict)
    truncated: bool = False
    safety_snapshot: str | None = None
    expired: Mapping[str, datetime] = field(default_factory=dict)
    undo_steps: int = 0
    repositories: Mapping[str, Repository] = field(default_factory=dict)
    older: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workspaces, by name, and what a merge of one into the other would find.

    `shared`: how many paths both changed; `paths` are the first 10,000.  `conflicts` and `repositories` are as in
    `Merged`; `problem` says why the two could not be compared.
    """

    a: str
    b: str
    shared: int
    paths: tuple[str, ...]
    conflicts: Mapping[str, Conflict] = field(default_factory=dict)
    repositories: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Conflicts:
    """Every two of several workspaces; `workspaces` begins with the one that answered.

    `below`: by path, what conflicts with the directory below an overlay, and why; None for other workspaces.
    """

    workspaces: tuple[str, ...]
    pairs: tuple[Pair, ...]
    below: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Reverted:
    """The changes that a revert made, or with `dry_run` would make.

    `reverted` describes what was undone, and `ranges` are the states before and after it, the newest first; None is the
    live state.  `warnings` say why changes of other programs may be undone, too.  The rest is as in `Merged`.
    """

    reverted: str
    ranges: tuple[tuple[str, str | None], ...]
    applied: bool
    counts: Counts
    changes: tuple[Change, ...]
    conflicts: Mapping[str, Conflict] = field(default_factory=dict)
    truncated: bool = False
    safety_snapshot: str | None = None
    expired: Mapping[str, datetime] = field(default_factory=dict)
    undo_steps: int = 0
    repositories: Mapping[str, Repository] = field(default_factory=dict)
    older: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exported:
    """The archive that was written: its path, the number and size of its files, and its own size.

    `skipped` maps each path that an archive cannot contain to the reason; everything below it is left out as well.
    `hidden` counts the names that the policy hides, which are not in the archive.
    """

    path: str
    files: int
    total_bytes: int
    archive_bytes: int
    skipped: Mapping[str, str] = field(default_factory=dict)
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Imported:
    """The content that an import added; `safety_snapshot`, `problems` and `expired` are as in `Restored`."""

    path: str
    files: int
    total_bytes: int
    safety_snapshot: str | None
    counts: Counts
    problems: Mapping[str, str] = field(default_factory=dict)
    expired: Mapping[str, datetime] = field(default_factory=dict)


class Status(StatusResult, frozen=True, kw_only=True):
    """The state of a running workspace: `vfsd.operations.workspace.StatusResult`, with the start as a time."""

    started_at: datetime  # type: ignore[assignment]


class Upgraded(UpgradeResult, frozen=True):
    """A completed upgrade: `vfsd.operations.workspace.UpgradeResult`.  Requests of programs waited for `pause_ms`."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The patterns, in gitignore's syntax, of what no program may change (`protect`) and of what none sees (`hide`).

    `open_files`: protected files that programs have open for writing since before they were protected: their writes
    fail, and what they change through a mapping is visible for up to a second.
    """

    protect: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    open_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unmounted:
    """A completed unmount.  `holders` are the processes that still had files open ("pid 12 (bash)").

    `left`: a sentence on what was to be removed and is still there, such as the container of an image.
    """

    mountpoint: str
    lazy: bool
    holders: tuple[str, ...] = ()
    left: str | None = None


# -- from the daemon's answers ---------------------------------------------------------------------
_PIECE_BYTES: Final = 64 * 1024
_change_records = msgspec.json.Decoder(ChangeRecord)


def _unchanged(value: Any) -> Any:
    return value


def _path(wire: str) -> str:
    if wire.isascii() and "\\" not in wire and "\0" not in wire:
        return wire  # a conversion of 10,000 changes takes a quarter of the time
    return os.fsdecode(from_wire_path(wire))


def _paths(wire: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(_path, wire))


def _changes(records: Iterable[ChangeRecord]) -> tuple[Change, ...]:
    return tuple(
        Change(
            _path(record.path),
            record.change,
            record.type,
            record.old_size,
            record.new_size,
            None if record.linked_to is None else _path(record.linked_to),
            None if record.unlinked_from is None else _path(record.unlinked_from),
        )
        for record in records
    )


def _reasons(records: Iterable[ProblemRecord | BelowRecord]) -> dict[str, str]:
    return {_path(record.path): record.reason for record in records}


def _expired(records: Iterable[ExpiredRecord]) -> dict[str, datetime]:
    return {record.name: datetime.fromisoformat(record.created_at) for record in records}


def _repositories(records: Iterable[RepositoryRecord]) -> dict[str, Repository]:
    return {_path(each.path): Repository(each.detail, each.refs, tuple(each.commands)) for each in records}


# Field name -> conversion.  Other fields are taken as they are.
_CONVERSIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "path": _path,
    "mountpoint": _path,
    "directory": _path,
    "unstable": _paths,
    "protect": _paths,
    "hide": _paths,
    "open_files": _paths,
    "unreadable": _paths,
    "holders": tuple,
    "created_at": datetime.fromisoformat,
    "changes": _changes,
    "problems": _reasons,
    "omitted": _reasons,
    "skipped": _reasons,
    "conflicts": _reasons,
    "expired": _expired,
    "repositories": _repositories,
}


def _convert(kind: type[Any], **others: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that makes a `kind` of a message; `others` are conversions of its own."""
    conversions = {**_CONVERSIONS, **others}
    names = [(each.name, conversions.get(each.name, _unchanged)) for each in fields(kind)]

    def convert(answer: Any) -> Any:
        return kind(**{name: to(getattr(answer, name)) for name, to in names})

    return convert


def _records(output: bytes) -> Iterator[ChangeRecord]:
    """Decode the records in `output` piece by piece: other threads, such as an event loop, run in between."""
    start = 0
    while start < len(output):
        end = output.find(b"\n", start + _PIECE_BYTES) + 1 or len(output)
        yield from _change_records.decode_lines(memoryview(output)[start:end])
        start = end


def _diff(answer: DiffResult, output: bytes) -> Diff:
    changes = _changes(_records(output)) if output else _changes(answer.changes)
    return Diff(
        a=answer.a,
        b=answer.b,
        counts=answer.counts,
        changes=changes,
        truncated=answer.truncated,
        problems=_reasons(answer.problems),
    )


def _patch(answer: DiffResult, output: bytes) -> Patch:
    problems, omitted = _reasons(answer.problems), _reasons(answer.omitted)
    return Patch(output, counts=answer.counts, problems=problems, omitted=omitted)


def _merged_conflicts(records: Iterable[ConflictRecord]) -> dict[str, Conflict]:
    return {
        _path(each.path): Conflict(each.reason, each.detail, None if each.kept_as is None else _path(each.kept_as))
        for each in records
    }


def _status(answer: StatusResult) -> Status:
    values = msgspec.structs.asdict(answer)
    values |= {"mountpoint": _path(answer.mountpoint), "started_at": datetime.fromisoformat(answer.started_at)}
    return Status(**values)


def _ready(answer: ForkResult) -> Ready:
    mountpoint, socket = _path(answer.mountpoint), _path(answer.socket)
    return Ready(answer.name, mountpoint, socket, answer.pid, answer.engine, warnings=tuple(answer.warnings))


_pair = _convert(Pair, paths=_paths, conflicts=_merged_conflicts, repositories=_paths)

CONVERTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "Snapshot": _convert(Snapshot, changes=_unchanged),
    "Merged": _convert(Merged, conflicts=_merged_conflicts),
    "Conflicts": _convert(
        Conflicts,
        workspaces=tuple,
        pairs=lambda records: tuple(map(_pair, records)),
        below=lambda records: None if records is None else _reasons(records),
    ),
    "Reverted": _convert(
        Reverted,
        conflicts=_merged_conflicts,
        ranges=lambda records: tuple((each.since, each.until) for each in records),
        warnings=tuple,
    ),
    "Diff": _diff,
    "Patch": _patch,
    "Status": _status,
    "Ready": _ready,
    "Upgraded": lambda answer: Upgraded(**msgspec.structs.asdict(answer)),
    **{
        kind.__name__: _convert(kind)
        for kind in (
            Applied,
            Exported,
            Imported,
            Policy,
            Restored,
            Unmounted,
        )
    },
}
