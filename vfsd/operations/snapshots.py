"""The messages of the control socket about snapshots: take, drop, restore, compare, and write states elsewhere."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from protocol.types import ChangeCounts
from vfsd.operations.declaration import (
    UNCHANGED,
    UNDO_HINT,
    ChangeRecord,
    ExpiredRecord,
    Operation,
    Params,
    Peer,
    RepositoryRecord,
)
from vfsd.operations.forks import Conflicts


class SnapshotRecord(msgspec.Struct):
    """A snapshot: the result of `snapshot`, and an element of that of `snapshots`.

    `kind` is "user", "safety" for a snapshot that vfsd took before a restore or import, or "automatic" for one taken
    after a command (`--snapshot-each`) or by the hooks of an agent; on disk that is "user".  `directories` includes the
    workspace's root for snapshots in memory, not for snapshots on disk.  `step`: the number of undo steps (negative) or
    redo steps (positive) that lead to this snapshot; 0 if the last undo or redo went to it; None if no number of steps
    leads to it.
    """

    name: str
    created_at: str
    files: int
    directories: int
    size_bytes: int
    kind: Literal["user", "safety", "automatic"]
    tag: str | None = None
    changes: ChangeCounts | None = None  # since the previous snapshot; None if not requested
    unstable: list[str] = []  # files that changed while they were read; the snapshot may mix old and new data
    unreadable: list[str] = []  # paths that could not be read and are not in the snapshot
    step: int | None = None
    expired: list[ExpiredRecord] = []  # in the result of `snapshot` only
    needed: str | None = None  # why a running fork or a later merge needs it: "base of a fork", "merged into edit"


class SnapshotParams(Params):
    """Parameters of `snapshot`.  Without a `name` the daemon picks one: "snap-1", ...

    An `automatic` snapshot in memory may be dropped to make room (`SnapshotRecord.kind`); on disk it is like any other.
    """

    name: str | None = None
    tag: str | None = None
    automatic: bool = False


class SnapshotsParams(Params):
    """Parameters of `snapshots`.

    `changes` counts for each snapshot the changes since the previous one; with `newest`, only for so many snapshots,
    the newest ones.
    """

    changes: bool = True
    newest: Annotated[int, msgspec.Meta(ge=0)] | None = None


class SnapshotsResult(msgspec.Struct):
    """Result of `snapshots`: all snapshots, oldest first."""

    snapshots: list[SnapshotRecord]


class DropParams(Params):
    """Parameters of `drop`: delete the snapshots `name` and `also`, or none of them if one does not exist.

    EBUSY if a running workspace needs one of them to be merged with this one, unless `force` is set.

    With `created_at`, none of them unless each is still the one that a client has seen: ENOENT if one was not taken at
    the time that this maps its name to, as `SnapshotRecord` writes it, and EBUSY if one is needed now.
    """

    name: str
    also: list[str] = []
    force: bool = False
    created_at: dict[str, str] | None = None


class DroppedStepRecord(msgspec.Struct):
    """A dropped snapshot that an undo (negative `step`) or a redo (positive `step`) would have restored."""

    name: str
    step: int


class DropResult(msgspec.Struct):
    """Result of `drop`.  `undo_steps` and `redo_steps` are the numbers of steps that remain."""

    dropped: list[str] = []
    steps: list[DroppedStepRecord] = []
    undo_steps: int = 0
    redo_steps: int = 0


class FromSnapshot(Params, tag="snapshot"):
    """The snapshot `name`.

    With `created_at`, ENOENT unless it was taken at that time, as `SnapshotRecord` writes it: a name can be used again
    after a drop.
    """

    name: str
    created_at: str | None = None


class FromOther(Params, tag="other"):
    """The snapshot `name` of another workspace: `of` is its key in the store ("host:" and the real path of its
    directory), and `store` the absolute path of that store, or None for the daemon's own.
    """

    name: str
    of: str
    store: str | None = None


class FromArchive(Params, tag="archive"):
    """A ZIP file, by its absolute path."""

    path: str


class Undo(Params, tag="undo"):
    """The state before the last step: a restore, import, merge, adoption, apply or discard.

    With `created_at`, ESTALE unless the state that the step goes to was kept at that time: another client may have made
    or undone a step.
    """

    created_at: str | None = None


class Redo(Params, tag="redo"):
    """The state before the last undo; `created_at` is as for `Undo`.  Only as a whole, without `paths`."""

    created_at: str | None = None


class FromBelow(Params, tag="below"):
    """The directory below an overlay."""


class RestoreParams(Params):
    """Parameters of `restore`: make the workspace, or `paths` in it, equal to `source`.

    `touch` gives the files whose content it changes one present mtime; else they get the recorded ones.  `dry_run`
    reports the changes without making them; `stream` then sends them as `DiffParams` describes.
    """

    source: FromSnapshot | FromOther | FromArchive | Undo | Redo | FromBelow
    paths: list[str] = []
    dry_run: bool = False
    stream: bool = False
    touch: bool = False


class ProblemRecord(msgspec.Struct):
    """A path that could not be processed, and the reason."""

    path: str
    reason: str


class RestoreResult(msgspec.Struct):
    """Result of `restore`.

    `counts` covers all changes, `changes` lists the first CHANGES_LISTED.  `safety_snapshot` is the state before the
    restore; None if nothing changed.  `problems` are the paths that could not be restored.  `step` describes the step
    that an undo or a redo reverted or repeated.
    """

    source: str
    safety_snapshot: str | None
    counts: ChangeCounts
    changes: list[ChangeRecord]
    truncated: bool = False
    problems: list[ProblemRecord] = []
    step: str | None = None
    expired: list[ExpiredRecord] = []
    undo_steps: int = 0  # how many steps can be undone now
    redo_steps: int = 0  # how many can be redone
    older: int = 0  # files that got other content and an earlier mtime; 0 with --touch, and if everything was restored


CHANGES_LISTED: Final = 10_000


class DiffParams(Params):
    """Parameters of `diff`: compare state `a` with state `b`.

    `a`: a snapshot; "" for the directory below an overlay; None for the newest snapshot, or, in an overlay without
    snapshots or with a given `b`, for the directory below.  `b`: a snapshot; None for the live state.  `against`:
    compare the live state with that of another workspace, which has a state in common with this one; then both are
    None.  `include` and `exclude`: gitignore patterns.

    Modes "names" and "stat" return at most CHANGES_LISTED `changes`; with `stream` they send all of them before the
    response, in "output" notifications with one ChangeRecord per line of JSON.  Mode "patch" sends a unified diff in
    "output" notifications; `include_git` adds changes that git refuses to apply, such as those in `.git`.
    """

    a: str | None = None
    b: str | None = None
    against: Peer | None = None
    mode: Literal["names", "stat", "patch"] = "names"
    paths: list[str] = []
    include: list[str] = []
    exclude: list[str] = []
    include_git: bool = False
    stream: bool = False


class DiffResult(msgspec.Struct):
    """Result of `diff`.  `counts` covers all changes that the patterns select.  With `against`, `a` is "" and `b` the
    name of the other workspace.

    `problems`: files that another program changed below an overlay after a snapshot, so that their content in the
    snapshot is lost; in mode "stat" also files that cannot be read.

    Mode "patch": `problems` are changes that the patch cannot express; `omitted` are those that git does not track
    (empty directories, the content of `.git`).  Both together list at most CHANGES_LISTED.  `patch_bytes` is the size.
    """

    a: str
    b: str | None
    counts: ChangeCounts
    changes: list[ChangeRecord]
    truncated: bool = False
    problems: list[ProblemRecord] = []
    omitted: list[ProblemRecord] = []
    patch_bytes: int = 0
    git_only: bool = False  # a directory replaces another entry, or the other way round: not for GNU patch


class ExportParams(Params):
    """Parameters of `export`: write the ZIP file `path` (absolute); `overwrite` replaces an existing file.

    `snapshot`: the state to export; None for the live state.  `changes_only` exports the files of an overlay that
    differ from the directory below, and their parent directories.  `source_date_epoch` is the archive's date in seconds
    since 1970 ($SOURCE_DATE_EPOCH); None for the current time.  `include` and `exclude`: gitignore patterns.
    """

    path: str
    snapshot: str | None = None
    overwrite: bool = False
    changes_only: bool = False
    source_date_epoch: int | None = None
    include: list[str] = []
    exclude: list[str] = []


class ExportResult(msgspec.Struct):
    """Result of `export`.  `skipped` are the paths that a ZIP file cannot hold; paths below them are not listed.

    `hidden`: how many names the policy hides, which are not in the archive, without those below a hidden directory.
    """

    path: str
    files: int
    total_bytes: int
    archive_bytes: int
    skipped: list[ProblemRecord] = []
    hidden: int = 0


class SaveParams(Params):
    """Parameters of `save`: put the state `snapshot`, None for the live state, into the snapshot store on disk."""

    snapshot: str | None = None


class SaveResult(msgspec.Struct):
    """Result of `save`: snapshot `name` of `workspace` in the store `directory`.

    The caller drops it when it has read it, if `is_temporary`.  `hidden` as in `ExportResult`.
    """

    directory: str
    workspace: str
    name: str
    is_temporary: bool = False
    hidden: int = 0


class ImportParams(Params):
    """Parameters of `import`: add the content of the ZIP file `path` (absolute) and replace existing files."""

    path: str


class ImportResult(msgspec.Struct):
    """Result of `import`.  `safety_snapshot` is the state before the import; None if nothing changed."""

    path: str
    files: int
    total_bytes: int
    safety_snapshot: str | None
    counts: ChangeCounts
    problems: list[ProblemRecord] = []
    expired: list[ExpiredRecord] = []


class ApplyParams(Params):
    """Parameters of `apply`: write the changes of an overlay, or those at `paths`, into the directory below it.

    If other programs changed the same files in that directory, nothing is written unless `force` is set.  `stream`
    sends the changes as `DiffParams` describes.  `touch` gives the files whose content is written one present mtime,
    here and below.

    A frozen overlay is merged with the directory: ours is the directory, theirs the workspace.  Then `conflicts` is as
    in `MergeParams`, and `force` is "theirs".
    """

    paths: list[str] = []
    dry_run: bool = False
    force: bool = False
    conflicts: Conflicts = "fail"
    stream: bool = False
    touch: bool = False


class ApplyResult(msgspec.Struct):
    """Result of `apply`.  If there are `conflicts`, nothing was written unless `force` was set."""

    directory: str
    applied: bool
    counts: ChangeCounts
    changes: list[ChangeRecord]
    conflicts: list[ProblemRecord]  # paths that another program changed too, or that prevent a directory's removal
    problems: list[ProblemRecord] = []  # with `force`: files that could not be written, because their content is lost
    truncated: bool = False
    recovered: str | None = None  # an interrupted apply that this one finished or undid first
    safety_snapshot: str | None = None  # the state that was written; `undo` returns to it
    older: int = 0  # as in RestoreResult
    expired: list[ExpiredRecord] = []
    repositories: list[RepositoryRecord] = []  # of `changes` and `conflicts`, those in them are left out
    merged: bool = False  # the changes of a frozen overlay, with those in the directory


_SNAPSHOT: Final = ("the snapshot", "no snapshot was taken", "the snapshot was taken; `vfsd drop` removes it")
_REMOVAL: Final = ("the removal", "the snapshot is still there", "the snapshot was dropped")
_RESTORE: Final = ("the restore", UNCHANGED, f"the restore is complete{UNDO_HINT}")
_EXPORT: Final = ("the export", "no file was written", "the archive is complete")
_IMPORT: Final = ("the import", UNCHANGED, f"the import is complete{UNDO_HINT}")
_APPLY: Final = ("the apply", "nothing was written", "the apply is complete")
OPERATIONS: Final = (
    Operation("snapshot", SnapshotParams, SnapshotRecord, *_SNAPSHOT),
    Operation("snapshots", SnapshotsParams, SnapshotsResult, reads=True),
    Operation("drop", DropParams, DropResult, *_REMOVAL),
    Operation("restore", RestoreParams, RestoreResult, *_RESTORE, audited=True),
    Operation("diff", DiffParams, DiffResult, reads=True),
    Operation("export", ExportParams, ExportResult, *_EXPORT, reads=True),
    Operation("import", ImportParams, ImportResult, *_IMPORT, audited=True),
    Operation("save", SaveParams, SaveResult),
    Operation("apply", ApplyParams, ApplyResult, *_APPLY, audited=True),
)
