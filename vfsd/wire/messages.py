"""The messages of the control socket: the parameters and the result of every method.

Protocol: JSON-RPC 2.0 with one object per line.  `METHODS` is the list of methods; docs/json.md describes the results
as the command line prints them.

Conventions: sizes are in bytes and times ISO 8601 in UTC.  A path is text: UTF-8 unchanged, a backslash doubled, and
every other byte as `\\xNN`, so that any name that Linux allows survives the round trip (`wire_path`,
`from_wire_path`).  Paths are relative to the workspace's root, except where a field is documented as absolute.

Source: https://www.jsonrpc.org/specification
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec

from protocol.types import ChangeCounts as ChangeCounts  # noqa: PLC0414 (part of several messages)
from vfsd.wire.audit_messages import AUDIT_METHODS
from vfsd.wire.base import ChangeRecord as ChangeRecord  # noqa: PLC0414 (here and below: part of several messages)
from vfsd.wire.base import Empty as Empty  # noqa: PLC0414
from vfsd.wire.base import ExpiredRecord as ExpiredRecord  # noqa: PLC0414
from vfsd.wire.base import Params, Peer
from vfsd.wire.exec_messages import EXEC_METHODS
from vfsd.wire.fs_messages import FS_METHODS
from vfsd.wire.merge_messages import MERGE_METHODS
from vfsd.wire.options import CacheChoice

# -- error codes (JSON-RPC 2.0, section 5.1, which leaves -32000 to -32099 to the server) -----------
PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
OPERATION_FAILED: Final = -32000  # see `ErrorData`

MAX_REQUEST_BYTES: Final = 1024 * 1024
PROGRESS_METHOD: Final = "progress"
OUTPUT_METHOD: Final = "output"
CANCEL_METHOD: Final = "cancel"
CLOSING_METHOD: Final = "closing"
# Methods that may run for long; the server does not run them on connections that it reserves for short calls.
LONG_METHODS: Final = frozenset(
    {
        "diff",
        "export",
        "import",
        "save",
        "merge",
        "adopt",
        "changes",
        "compact",
        "upgrade",
        "policy",
        "exec",
        "fs.ls",
        "fs.read",
        "fs.glob",
        "fs.grep",
        "fs.exec",
        "log",
        "watch",
    }
)

_ESCAPE = re.compile(rb"\\(\\|x[0-9a-f]{2})")


def wire_path(path: bytes) -> str:
    """Encode `path` as text for the wire; `from_wire_path` decodes it."""
    return path.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def from_wire_path(text: str) -> bytes:
    """Decode a path from the wire.  ValueError for a single backslash or a NUL."""

    def unescape(match: re.Match[bytes]) -> bytes:
        return b"\\" if match[1] == b"\\" else bytes([int(match[1][1:], 16)])

    raw = text.encode()
    if b"\0" in raw or b"\\" in _ESCAPE.sub(b"", raw):
        raise ValueError(f"not a path in the control socket's encoding (a backslash is \\\\, a byte \\xNN): {text!r}")
    return _ESCAPE.sub(unescape, raw)


class InvalidParamsError(ValueError):
    """Raised by a handler for parameters that have the right types and invalid values (INVALID_PARAMS)."""


class InvalidNameError(InvalidParamsError):
    """A name that a snapshot cannot have.  The message is complete: it needs no method before it."""


# -- the envelope ---------------------------------------------------------------------------------
class Request(msgspec.Struct):
    """A call, or without an `id` a notification, which has no response."""

    jsonrpc: Literal["2.0"]
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")
    id: int | str | msgspec.UnsetType | None = msgspec.UNSET


class ErrorData(msgspec.Struct, omit_defaults=True):
    """Details of an OPERATION_FAILED: the errno's name, such as "ENOENT", and the affected path."""

    errno: str | None = None
    path: str | None = None


class ErrorObject(msgspec.Struct, omit_defaults=True):
    """The error of a failed call (JSON-RPC 2.0, section 5.1)."""

    code: int
    message: str
    data: ErrorData | None = None


class Response(msgspec.Struct):
    """The response to a call: either `result` or `error`."""

    # Not `omit_defaults`: the specification requires `jsonrpc`.

    id: int | str | None
    jsonrpc: Literal["2.0"] = msgspec.field(default="2.0")
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: ErrorObject | msgspec.UnsetType = msgspec.UNSET


class ProgressReport(msgspec.Struct):
    """Parameters of a "progress" notification about the call `id`.  `total` is 0 if it is unknown."""

    id: int | str | None
    done: int
    total: int
    unit: Literal["files", "bytes"]


class Output(msgspec.Struct):
    """Parameters of an "output" notification: the next piece of the output of the call `id` (base64 on the wire)."""

    id: int | str | None
    data: bytes


class CancelParams(Params):
    """Parameters of `cancel`: stop the call `id` of this connection.

    The cancelled call still gets a response: the error ECANCELED if it was stopped without changing anything, else its
    result.  Closing the connection cancels all of its calls.
    """

    id: int | str | None


CancelState = Literal["stopping", "finishing", "unknown"]


class CancelResult(msgspec.Struct):
    """The state of the call to cancel.

    "stopping": the call will not change anything.  "finishing": it has started to change something and will complete.
    "unknown": no such call is running; it may have completed already.
    """

    state: CancelState


# -- parameters and results -----------------------------------------------------------------------
class StatusResult(msgspec.Struct, frozen=True):
    """Result of `status`.

    A field is None if the backend does not have the value, or would have to walk its tree for it.

    `max_bytes` bounds `used_bytes`: content in whole pages without holes, and metadata beyond 4 MiB.  `max_memory`
    bounds the sum of `live_bytes` (files, names, attributes), `snapshot_bytes` (content that only snapshots refer to)
    and `overhead_bytes` (reserved for removals, restores and imports, or cached from below an overlay).
    """

    name: str
    mountpoint: str
    backend: str
    engine: str
    pid: int
    version: str
    started_at: str
    read_only: bool
    files: int | None
    directories: int | None
    size_bytes: int | None
    used_bytes: int | None
    max_bytes: int | None
    max_inodes: int | None
    snapshots: int | None
    requests: int  # answered by the engine since it started
    live_bytes: int | None = None
    snapshot_bytes: int | None = None
    overhead_bytes: int | None = None
    max_memory: int | None = None
    pruned: int | None = None  # automatic snapshots that were dropped to free memory
    changed_below: int | None = None  # files of overlay:DIR that other programs changed after the overlay read them
    # Of an overlay over a snapshot in an object store only.
    source: str | None = None  # its URL, with the snapshot's name
    fetched_bytes: int | None = None  # received from there since the start of the process that fetches
    prefetch: str | None = None  # the state of --prefetch
    fetch_failure: str | None = None  # while it is not null, reads of what is not in the cache fail
    cache: CacheChoice = "writethrough"
    forked_from: str | None = None  # the name of the workspace that this one is a fork of
    base: str | None = None  # of a fork: the snapshot that both workspaces have
    # Of the daemons of forks and their sources, in bytes: pages that several processes have, and the others.
    shared_memory: int | None = None
    private_memory: int | None = None
    started_by: str | None = None  # "the fork server", or "a new interpreter" and why, ...
    keeper: str | None = None  # the process that restarts the daemon if it dies, or why there is none
    engine_reason: str | None = None  # why the engine is not the preferred one
    wakeups: str | None = None  # what the engine does about slow wake-ups of idle CPUs
    # The journal of a workspace with --persist.
    journal: str | None = None  # its directory
    fsync: str | None = None  # when it is synced: "always", "everysec" or "no"
    journal_bytes: int | None = None  # its size on disk
    journal_unsynced_bytes: int | None = None  # at the end of the journal, not known to be on disk
    journal_failure: str | None = None  # why it does not keep the content any more
    interrupted: str | None = None  # an interrupted restore or apply, and how to finish or undo it
    commands: str | None = None  # where `vfsd exec` runs commands, such as "on this host"; None: it cannot
    # Backends container:NAME and image:REF only.
    container: str | None = None  # its state in Podman: "running", "paused", "exited with status 137", ...
    # These and exec:COMMAND only.
    transport: Literal["rootfs", "agent"] | None = None
    connected: bool | None = None  # while False, every request fails with EIO
    remote: str | None = None  # exec:COMMAND only: "connected", or why not


class SnapshotRecord(msgspec.Struct):
    """A snapshot: the result of `snapshot`, and an element of that of `snapshots`."""

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
    # The number of undo steps (negative) or redo steps (positive) that lead to this snapshot; 0 if the live state
    # started from it; None if no number of steps leads to it.
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


class RestoreParams(Params):
    """Parameters of `restore`.  Exactly one of these says what to restore:

    - `name`: a snapshot.  With `created_at`, ENOENT unless it was taken at that time, as `SnapshotRecord` writes it: a
      name can be used again after a drop.  With `of` it is a snapshot of another workspace, given by its key in the
      store ("host:" and the real path of its directory); `store` is the absolute path of that store.
    - `archive`: the absolute path of a ZIP file.
    - `undo` or `redo`: one restore, import or apply back or forward.  With `created_at`, ESTALE unless the state that
      the step goes to was kept at that time: another client may have made or undone a step.
    - `base`: the directory below an overlay.

    `paths` limits the restore to these paths.  `dry_run` reports the changes without making them; `stream` then sends
    them as `DiffParams` describes.
    """

    name: str | None = None
    created_at: str | None = None
    of: str | None = None
    store: str | None = None
    archive: str | None = None
    undo: bool = False
    redo: bool = False
    base: bool = False
    paths: list[str] = []
    dry_run: bool = False
    stream: bool = False


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
    undo_steps: int = 0  # the numbers of steps that can be undone and redone now
    redo_steps: int = 0


CHANGES_LISTED: Final = 10_000


class DiffParams(Params):
    """Parameters of `diff`: compare state `a` with state `b`.

    `a`: a snapshot; None for the newest one, or for the directory below an overlay.  `b`: a snapshot; None for the live
    state.  `against`: compare the live state with that of another workspace, which has a state in common with this one;
    then both are None.  `include` and `exclude`: gitignore patterns.

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
    sends the changes as `DiffParams` describes.
    """

    paths: list[str] = []
    dry_run: bool = False
    force: bool = False
    stream: bool = False


class ApplyResult(msgspec.Struct):
    """Result of `apply`.  If there are `conflicts`, nothing was written unless `force` was set."""

    directory: str
    applied: bool
    counts: ChangeCounts
    changes: list[ChangeRecord]
    conflicts: list[ProblemRecord]  # paths that another program changed too, or that prevent a directory's removal
    truncated: bool = False
    recovered: str | None = None  # an interrupted apply that this one finished or undid first
    safety_snapshot: str | None = None  # the state that was written; `undo` returns to it
    expired: list[ExpiredRecord] = []


class UnmountParams(Params):
    """Parameters of `unmount`.

    A busy mount is the error EBUSY, which names the processes that use it; `lazy` detaches it at once instead.
    Unsaved changes are the error ENOTEMPTY unless `discard` is set, or `token` comes from an `unsaved` result and
    nothing has changed since.
    """

    lazy: bool = False
    discard: bool = False
    token: str | None = None


class ForkParams(Params):
    """Parameters of `fork`: the fork's name and its mountpoint, an empty directory.

    `snapshot`: fork that state; None: the present one.
    """

    name: str
    mountpoint: str
    snapshot: str | None = None


class ForkResult(msgspec.Struct):
    """Result of `fork`: the new workspace.  `base` is the snapshot of both that is their common state."""

    name: str
    mountpoint: str
    socket: str
    pid: int
    engine: str
    base: str
    warnings: list[str] = []


class UnmountResult(msgspec.Struct):
    """Result of `unmount`."""

    mountpoint: str
    lazy: bool
    holders: list[str]  # processes that still use the mount: "pid 12 (bash)", ...
    snapshots: int = 0  # the number of user snapshots that were lost with the daemon's memory
    changed_late: bool = False  # a change between the check for unsaved changes and the unmount was lost
    journal: str | None = None  # the directory of the journal that keeps content, snapshots and undo history


class CompactResult(msgspec.Struct):
    """Result of `compact`: the size of the journal on disk, in bytes, before and after."""

    before_bytes: int
    after_bytes: int


class UpgradeParams(msgspec.Struct):
    """The Python interpreter of the version to upgrade to, and the directories beside its own to import from.

    `instead_of`: the process id of the daemon to replace; 0: of the one that gets the call.
    """

    executable: str
    import_paths: list[str] = []
    instead_of: int = 0


class UpgradeResult(msgspec.Struct):
    """Result of `upgrade`: the versions, the new daemon's process id, and how long requests waited.

    `meanwhile`: another call had replaced the daemon of `UpgradeParams.instead_of` before, so this one did nothing.
    """

    name: str
    from_version: str
    to_version: str
    pid: int
    pause_ms: float
    meanwhile: bool = False


class PolicyParams(Params):
    """Parameters of `policy`: patterns to add, in gitignore's syntax, written as paths are.  A policy only grows."""

    protect: list[str] = []
    hide: list[str] = []


class PolicyResult(msgspec.Struct):
    """Result of `policy`: the patterns that hold now, in their order, written as paths are.

    `open_files`: protected files that programs have open for writing since before they were protected.  Their writes
    fail, and pages that they change through a mapping are dropped within about a second.
    """

    protect: list[str]
    hide: list[str]
    open_files: list[str] = []


class UnsavedResult(msgspec.Struct):
    """Result of `unsaved`: the state that an unmount would lose because it is only in the daemon's memory.

    `unsaved`: whether the live state changed since the mount, the last complete export or the last complete apply.
    False if it is empty and there is no user snapshot.  For a memory workspace, `files` and `size_bytes` describe the
    whole live state.  For an overlay, `changes` counts the changes that were not applied; `truncated` means that there
    are at least so many.
    """

    unsaved: bool
    token: str  # identifies this state for `unmount`
    files: int | None = None
    size_bytes: int | None = None
    changes: ChangeCounts | None = None
    truncated: bool = False
    snapshots: int = 0  # the number of user snapshots
    saved_at: str | None = None


# Each method with its parameters and result; server and clients use this table.
METHODS: Final[dict[str, tuple[type[Any], type[Any]]]] = {
    "ping": (Empty, Empty),
    "cancel": (CancelParams, CancelResult),  # answered by the connection, without a handler
    "status": (Empty, StatusResult),
    "snapshot": (SnapshotParams, SnapshotRecord),
    "snapshots": (SnapshotsParams, SnapshotsResult),
    "drop": (DropParams, DropResult),
    "restore": (RestoreParams, RestoreResult),
    "diff": (DiffParams, DiffResult),
    "export": (ExportParams, ExportResult),
    "import": (ImportParams, ImportResult),
    "save": (SaveParams, SaveResult),
    "apply": (ApplyParams, ApplyResult),
    "unsaved": (Empty, UnsavedResult),
    "compact": (Empty, CompactResult),
    "upgrade": (UpgradeParams, UpgradeResult),
    "policy": (PolicyParams, PolicyResult),
    "unmount": (UnmountParams, UnmountResult),
    "fork": (ForkParams, ForkResult),
    # Runs the volume's check_invariants, for tests and bug reports.
    "check": (Empty, Empty),
    **AUDIT_METHODS,
    **MERGE_METHODS,
    **FS_METHODS,
    **EXEC_METHODS,
}
