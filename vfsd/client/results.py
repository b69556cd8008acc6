"""What the Python API answers with: frozen values.

Paths are `str` as `os.fsdecode` makes them, relative to the workspace's root: joined to `Workspace.path`
they open the file, whatever bytes its name has.  Sizes are in bytes, times aware datetimes in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Self

__all__ = [
    "Applied",
    "Change",
    "ChangeKind",
    "Counts",
    "Diff",
    "Exported",
    "FileKind",
    "Imported",
    "Patch",
    "Restored",
    "Snapshot",
    "Status",
    "Unmounted",
]

ChangeKind = Literal["added", "modified", "removed", "type", "metadata"]
FileKind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many paths were added, modified (content, type or metadata) and removed."""

    added: int = 0
    modified: int = 0
    removed: int = 0

    @property
    def total(self) -> int:
        return self.added + self.modified + self.removed


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs: "type" is a file that became a directory, say; "metadata" mode, owner, time or xattrs.

    A size is None on the side where the path is missing, or is no regular file.
    """

    path: str
    change: ChangeKind
    type: FileKind
    old_size: int | None = None
    new_size: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable state of the workspace.  `kind` "safety" was taken by vfsd itself, before a restore or import,
    "automatic" after a command; these are dropped where memory is short.

    `step` says how many times `undo` (below 0) or `redo` (above 0) go to it; 0 where the live state came from it by one
    of these; None where they do not lead to it.

    `changes` is what changed since the snapshot before it, None where that was not asked for.  Of a directory of the
    host, `unstable` are files that changed while they were read, `unreadable` what it lacks for want of permission.

    `expired`, which only `snapshot` sets, is as in `Restored`.
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
    """What leads from state `a` to state `b` (None: the live state).  False where nothing differs.

    `changes` are all of them; `truncated` is always False.
    """

    a: str
    b: str | None
    counts: Counts
    changes: tuple[Change, ...]
    truncated: bool = False

    def __bool__(self) -> bool:
        return self.counts.total > 0


class Patch(bytes):
    """The bytes of a patch, and what it lacks.

    `counts` is of all changes.  `problems` maps the path of each change that the patch cannot carry to the reason;
    `omitted` those that git itself ignores: empty directories and what is in `.git`.  Both together have at most
    10,000 paths; comments in the patch name all.
    """

    counts: Counts
    problems: Mapping[str, str]
    omitted: Mapping[str, str]

    def __new__(cls, patch: bytes, *, counts: Counts, problems: Mapping[str, str], omitted: Mapping[str, str]) -> Self:
        made = super().__new__(cls, patch)
        made.counts, made.problems, made.omitted = counts, problems, omitted
        return made


@dataclass(frozen=True, slots=True)
class Applied:
    """What was written into the directory below an overlay, or with `dry_run` would be.

    `conflicts` maps paths that others changed there to what they did; with any, and without `force`, `applied` is
    False, and nothing was written.  `recovered`: what an apply that was killed had left, and this one finished or
    undid first.  `safety_snapshot` holds the state that was written; `expired` is as in `Restored`.
    """

    directory: str
    applied: bool
    counts: Counts
    changes: tuple[Change, ...]
    conflicts: Mapping[str, str]
    truncated: bool = False
    recovered: str | None = None
    safety_snapshot: str | None = None
    expired: Mapping[str, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore changed, or with `dry_run` would change.

    `source` is the snapshot or archive; `safety_snapshot` holds the state before, None for a dry run and where there
    was nothing to change.  `step` is what `undo` or `redo` has undone or redone ("restore turn-1"), `undo_steps` and
    `redo_steps` say how many times one can go on in each direction (0 for a dry run).  `expired` maps snapshots that
    were dropped to when they were taken: safety snapshots to which no undo or redo led any more, and which were too old
    or too many; and those that no user named and that were dropped since the last answer, because memory was needed.
    `counts` is of all changes; `changes` lists the first 10,000 of them, and `truncated` says that there are more.
    `problems` maps paths that are not as they were to be to the reason:
    what others changed at the same moment is left to them, say.
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


@dataclass(frozen=True, slots=True)
class Exported:
    """The archive that was written: where, how many files, their content's size and its own.

    `skipped` maps each path that an archive cannot hold to the reason; what is below such a path is left out too.
    """

    path: str
    files: int
    total_bytes: int
    archive_bytes: int
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import brought in; `safety_snapshot`, `problems` and `expired` are as in `Restored`."""

    path: str
    files: int
    total_bytes: int
    safety_snapshot: str | None
    counts: Counts
    problems: Mapping[str, str] = field(default_factory=dict)
    expired: Mapping[str, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """A running workspace.

    What a backend does not know without walking its tree, or has none of, is None.
    `used_bytes` is what `max_bytes` bounds: content in whole pages, holes not counted, and metadata beyond 4 MiB.
    `live_bytes` (files, names, attributes), `snapshot_bytes` (what only snapshots hold) and `overhead_bytes` (what is
    reserved for removing and restoring, lent to an import, or remembered of below an overlay) are what `max_memory`
    bounds together; `pruned` counts the automatic snapshots that were dropped to make room.
    `requests` what was served; `engine_reason` says why this engine serves where another would be preferred;
    `changed_below` how many files others changed below an overlay;
    `interrupted` tells of a restore or an apply that is half done, and how to finish or undo it.
    `commands` says where commands run ("on this host", ...), None where nowhere.
    Of a container `container` is what Podman says of it, `transport` how it is reached, and `connected` whether it is:
    while it is not, everything in the mount fails with EIO.
    """

    name: str
    mountpoint: str
    backend: str
    engine: str
    pid: int
    version: str
    started_at: datetime
    read_only: bool
    files: int | None
    directories: int | None
    size_bytes: int | None
    used_bytes: int | None
    max_bytes: int | None
    max_inodes: int | None
    snapshots: int | None
    requests: int
    live_bytes: int | None = None
    snapshot_bytes: int | None = None
    overhead_bytes: int | None = None
    max_memory: int | None = None
    pruned: int | None = None
    changed_below: int | None = None
    engine_reason: str | None = None
    interrupted: str | None = None
    commands: str | None = None
    container: str | None = None
    transport: Literal["rootfs", "agent"] | None = None
    connected: bool | None = None


@dataclass(frozen=True, slots=True)
class Unmounted:
    """A mount that is gone.  `holders` are the processes that still had files open in it ("pid 12 (bash)")."""

    mountpoint: str
    lazy: bool
    holders: tuple[str, ...] = ()
