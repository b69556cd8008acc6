"""The messages of the control socket: parameters and results of every method, typed.

JSON-RPC 2.0, one object a line.  A path on the wire is text: UTF-8 as it is, a backslash doubled, and
each byte that is no UTF-8 as `\\xNN`, so that every name a kernel allows goes there and back
(`wire_path`, `from_wire_path`).  Sizes are in bytes, times ISO 8601 in UTC.

Source: https://www.jsonrpc.org/specification
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from vfsd.wire.exec_messages import EXEC_METHODS
from vfsd.wire.fs_messages import FS_METHODS

# -- error codes (JSON-RPC 2.0, section 5.1; -32000 to -32099 are the server's own) ---------------
PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
OPERATION_FAILED: Final = -32000  # `data` carries the errno's name and the path

MAX_REQUEST_BYTES: Final = 1024 * 1024
PROGRESS_METHOD: Final = "progress"
OUTPUT_METHOD: Final = "output"
CANCEL_METHOD: Final = "cancel"
CLOSING_METHOD: Final = "closing"
# What may take long or run for as long as its client likes: not on the connections that are kept for short calls.
LONG_METHODS: Final = frozenset(
    {"diff", "export", "import", "exec", "fs.ls", "fs.read", "fs.glob", "fs.grep", "fs.exec"}
)

_ESCAPE = re.compile(rb"\\(\\|x[0-9a-f]{2})")


def wire_path(path: bytes) -> str:
    """The text that stands for `path` on the wire; `from_wire_path` is its inverse."""
    return path.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def from_wire_path(text: str) -> bytes:
    """The path that `text` stands for.  ValueError for a lone backslash or a NUL."""

    def unescape(match: re.Match[bytes]) -> bytes:
        return b"\\" if match[1] == b"\\" else bytes([int(match[1][1:], 16)])

    raw = text.encode()
    if b"\0" in raw or b"\\" in _ESCAPE.sub(b"", raw):
        raise ValueError(f"not a path as the control socket writes it: {text!r}")
    return _ESCAPE.sub(unescape, raw)


class InvalidParamsError(ValueError):
    """Raised by a handler for parameters of the right types that make no sense (INVALID_PARAMS)."""


# -- the envelope ---------------------------------------------------------------------------------
class Request(msgspec.Struct):
    """A call.  Without an `id` it is a notification, which is not answered."""

    jsonrpc: Literal["2.0"]
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")
    id: int | str | msgspec.UnsetType | None = msgspec.UNSET


class ErrorData(msgspec.Struct, omit_defaults=True):
    """What an error carries beside its message: the errno's name ("ENOENT") and the path it is about."""

    errno: str | None = None
    path: str | None = None


class ErrorObject(msgspec.Struct, omit_defaults=True):
    code: int
    message: str
    data: ErrorData | None = None


class Response(msgspec.Struct):
    """An answer: `result` or `error`, never both.  Defaults are written: `jsonrpc` is one, and must be there."""

    id: int | str | None
    jsonrpc: Literal["2.0"] = msgspec.field(default="2.0")
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: ErrorObject | msgspec.UnsetType = msgspec.UNSET


class ProgressReport(msgspec.Struct):
    """Params of a "progress" notification: how far request `id` is; `total` 0 when it is not known."""

    id: int | str | None
    done: int
    total: int
    unit: Literal["files", "bytes"]


class Output(msgspec.Struct):
    """Params of an "output" notification: a further piece of what request `id` puts out (base64 on the wire)."""

    id: int | str | None
    data: bytes


class CancelParams(msgspec.Struct, forbid_unknown_fields=True):
    """cancel: stop the call with the request id `id` of this connection.

    That call is answered all the same: with the error ECANCELED when it was stopped and has changed nothing, else with
    its result.  A client that wants no answer closes the connection, which cancels its calls too.
    """

    id: int | str | None


CancelState = Literal["stopping", "finishing", "unknown"]


class CancelResult(msgspec.Struct):
    """ "stopping": the call changes nothing.  "finishing": it has begun to change something and is completed.
    "unknown": no such call is running; it may have been answered already."""

    state: CancelState


# -- parameters and results -----------------------------------------------------------------------
class Empty(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters, or nothing to say."""


class StatusResult(msgspec.Struct):
    name: str
    mountpoint: str
    backend: str
    engine: str
    pid: int
    version: str
    started_at: str
    read_only: bool
    # None of a backend that would have to walk its tree to know, or that has no such thing.
    files: int | None
    directories: int | None
    size_bytes: int | None
    used_bytes: int | None  # what max_bytes bounds: content in whole pages, holes not counted, and much metadata
    max_bytes: int | None
    max_inodes: int | None
    snapshots: int | None
    requests: int  # served by the engine since it started
    # What the workspace takes of memory, which max_memory bounds together.
    live_bytes: int | None = None  # files, names, attributes
    snapshot_bytes: int | None = None  # what only snapshots hold
    overhead_bytes: int | None = None  # reserved for removing and restoring, lent to an import, remembered of below
    max_memory: int | None = None
    pruned: int | None = None  # automatic snapshots that were dropped to make room
    changed_below: int | None = None  # files of overlay:DIR that others changed since they were looked at
    engine_reason: str | None = None  # why this engine serves, where another would be preferred
    interrupted: str | None = None  # a restore or an apply that is half done, and how to finish or undo it
    commands: str | None = None  # where `vfsd exec` runs them: "on this host", ...; None: nowhere
    # Of container:NAME and image:REF.
    container: str | None = None  # what Podman says of it: "running", "paused", "exited with status 137", ...
    transport: Literal["rootfs", "agent"] | None = None
    connected: bool | None = None  # while it is not, every request fails with EIO


class ChangeCounts(msgspec.Struct):
    added: int = 0
    modified: int = 0
    removed: int = 0


class ExpiredRecord(msgspec.Struct):
    """A snapshot that was dropped without a command to do so.

    "unneeded": a safety snapshot to which no undo or redo led any more, too old or one of too many.  "memory": one that
    no user named, since the last answer that said so, because --max-memory was reached.
    """

    name: str
    created_at: str
    reason: Literal["unneeded", "memory"] = "unneeded"


class SnapshotRecord(msgspec.Struct):
    name: str
    created_at: str
    files: int
    directories: int
    size_bytes: int
    kind: Literal["user", "safety", "automatic"]
    tag: str | None = None
    changes: ChangeCounts | None = None  # against the snapshot before it; None where not asked for
    unstable: list[str] = []  # files that changed while they were read: they may be of more than one moment
    unreadable: list[str] = []  # what could not be read, and is not in it
    # How many steps `--undo` (below 0) or `--redo` (above 0) is away from that state; 0: the live state came from it.
    step: int | None = None  # None: no number of steps leads there
    expired: list[ExpiredRecord] = []  # in the answer of `snapshot` alone


class SnapshotParams(msgspec.Struct, forbid_unknown_fields=True):
    """snapshot: `name` None makes one up ("snap-1", ...)."""

    name: str | None = None
    tag: str | None = None


class SnapshotsParams(msgspec.Struct, forbid_unknown_fields=True):
    """snapshots: `changes` counts what each changed against the one before it."""

    changes: bool = True


class SnapshotsResult(msgspec.Struct):
    snapshots: list[SnapshotRecord]


class DropParams(msgspec.Struct, forbid_unknown_fields=True):
    """drop: snapshot `name` and those of `also`: all of them or, where one does not exist, none."""

    name: str
    also: list[str] = []


class DroppedStepRecord(msgspec.Struct):
    """A dropped snapshot that `step` undos (below 0) or redos (above 0) led to."""

    name: str
    step: int


class DropResult(msgspec.Struct):
    """`dropped` has each name once.  `undo_steps` and `redo_steps` say how many steps are left."""

    dropped: list[str] = []
    steps: list[DroppedStepRecord] = []
    undo_steps: int = 0
    redo_steps: int = 0


class ChangeRecord(msgspec.Struct, omit_defaults=True):
    """One path that differs.  `lines_*` only with --stat, for text files."""

    path: str
    change: Literal["added", "modified", "removed", "type", "metadata"]
    type: Literal["file", "directory", "symlink", "fifo", "socket", "device"]
    old_size: int | None = None
    new_size: int | None = None
    lines_added: int | None = None
    lines_removed: int | None = None
    binary: bool = False


class RestoreParams(msgspec.Struct, forbid_unknown_fields=True):
    """restore: from snapshot `name`, or from the ZIP file `archive` (absolute), or, with `undo`, one restore, import
    or apply back, or, with `redo`, one forward again, or, with `base`, to what is below an overlay.  `of` says that the
    snapshot is another workspace's, by its key in the store: "host:" and the real path of its directory; `store` is
    that store's directory (absolute).  `paths` (wire paths) limits it.  `dry_run` only says what it would do;
    `stream` then sends the changes as that of `DiffParams` does."""

    name: str | None = None
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
    """A path that is not as it was to be, and why."""

    path: str
    reason: str


class RestoreResult(msgspec.Struct):
    """`changes` lists at most CHANGES_LISTED paths; `counts` is of all.  `problems` are of what could not be done.

    `safety_snapshot` is None where nothing was changed.  `step` is what an undo or a redo has undone or redone.
    """

    source: str
    safety_snapshot: str | None
    counts: ChangeCounts
    changes: list[ChangeRecord]
    truncated: bool = False
    problems: list[ProblemRecord] = []
    step: str | None = None
    expired: list[ExpiredRecord] = []
    undo_steps: int = 0  # how many steps can be undone now, and redone
    redo_steps: int = 0


CHANGES_LISTED: Final = 10_000


class DiffParams(msgspec.Struct, forbid_unknown_fields=True):
    """diff: from state `a` to state `b`.  `a` None is the newest snapshot, or what is below an overlay; `b` None the
    live state.

    "names" and "stat" answer with `changes`, at most CHANGES_LISTED of them; with `stream` they send all of them before
    the answer, in "output" notifications, each ChangeRecord as a line of JSON.  "patch" streams a unified diff in
    "output" notifications; `include_git` with what git refuses, as in `.git`.  `include` and `exclude` are patterns in
    gitignore's syntax, as those of `vfsd mount`.
    """

    a: str | None = None
    b: str | None = None
    mode: Literal["names", "stat", "patch"] = "names"
    paths: list[str] = []
    include: list[str] = []
    exclude: list[str] = []
    include_git: bool = False
    stream: bool = False


class DiffResult(msgspec.Struct):
    """`counts` is of all changes, hidden ones apart.  With "patch": `problems` are changes that the patch lacks,
    `omitted` those that git has no notion of (empty directories, what is in `.git`), both together at most
    CHANGES_LISTED, and `patch_bytes` is its size."""

    a: str
    b: str | None
    counts: ChangeCounts
    changes: list[ChangeRecord]
    truncated: bool = False
    problems: list[ProblemRecord] = []
    omitted: list[ProblemRecord] = []
    patch_bytes: int = 0


class ExportParams(msgspec.Struct, forbid_unknown_fields=True):
    """export: write the ZIP file `path` (absolute); a file there is replaced only with `overwrite`.

    `source_date_epoch`, the caller's $SOURCE_DATE_EPOCH in seconds, dates the archive; None: the time now.
    `include` and `exclude` are patterns in gitignore's syntax, as those of `vfsd mount`.
    """

    path: str
    snapshot: str | None = None
    overwrite: bool = False
    changes_only: bool = False  # of an overlay: what differs from below, and the directories that it is in
    source_date_epoch: int | None = None
    include: list[str] = []
    exclude: list[str] = []


class ExportResult(msgspec.Struct):
    """`skipped` are the paths that an archive cannot hold; what is below such a path is left out and not listed."""

    path: str
    files: int
    total_bytes: int
    archive_bytes: int
    skipped: list[ProblemRecord] = []


class ImportParams(msgspec.Struct, forbid_unknown_fields=True):
    """import: lay the content of ZIP file `path` (absolute) over the workspace."""

    path: str


class ImportResult(msgspec.Struct):
    path: str
    files: int
    total_bytes: int
    safety_snapshot: str | None
    counts: ChangeCounts
    problems: list[ProblemRecord] = []
    expired: list[ExpiredRecord] = []


class ApplyParams(msgspec.Struct, forbid_unknown_fields=True):
    """apply: write what an overlay holds (below `paths`) into the directory below it.

    Where that was changed by others since, nothing is written, unless `force` is set.  `stream` sends the changes as
    that of `DiffParams` does.
    """

    paths: list[str] = []
    dry_run: bool = False
    force: bool = False
    stream: bool = False


class ConflictRecord(msgspec.Struct):
    path: str
    reason: str


class ApplyResult(msgspec.Struct):
    """With `conflicts`, and without `force`, nothing was written."""

    directory: str
    applied: bool
    counts: ChangeCounts
    changes: list[ChangeRecord]
    conflicts: list[ConflictRecord]
    truncated: bool = False
    recovered: str | None = None  # what an apply that was killed had left, and this one finished or undid first
    safety_snapshot: str | None = None  # the state that was written: `undo` goes back to that
    expired: list[ExpiredRecord] = []


class UnmountParams(msgspec.Struct, forbid_unknown_fields=True):
    """unmount: `lazy` detaches a busy mount at once; without it a busy mount is EBUSY, naming who holds it.

    Where only the daemon holds changes (`unsaved`), it is ENOTEMPTY without `discard`, unless `token` is that of an
    answer of `unsaved` and nothing was changed since.
    """

    lazy: bool = False
    discard: bool = False
    token: str | None = None


class UnmountResult(msgspec.Struct):
    mountpoint: str
    lazy: bool
    holders: list[str]  # "pid 12 (bash)", ...
    snapshots: int = 0  # that a user named, and that went with the daemon's memory
    changed_late: bool = False  # changed between the check for unsaved changes and the unmount: that change is lost


class UnsavedResult(msgspec.Struct):
    """What only the daemon's memory holds, and an unmount loses.

    `unsaved`: whether the live state has changes since the mount, the last complete export of it, or the last complete
    apply; none where it is empty and no snapshot was named.  Of a memory workspace `files` and `size_bytes` are of the
    whole live state; of an overlay `changes` counts what was not applied (`truncated`: at least so many).
    """

    unsaved: bool
    token: str  # for `unmount`: of this state
    files: int | None = None
    size_bytes: int | None = None
    changes: ChangeCounts | None = None
    truncated: bool = False
    snapshots: int = 0  # that a user named
    saved_at: str | None = None


# method name -> (parameters, result): the one table that server and client share.
METHODS: Final[dict[str, tuple[type[Any], type[Any]]]] = {
    "ping": (Empty, Empty),
    "cancel": (CancelParams, CancelResult),  # answered by the connection itself, without a handler
    "status": (Empty, StatusResult),
    "snapshot": (SnapshotParams, SnapshotRecord),
    "snapshots": (SnapshotsParams, SnapshotsResult),
    "drop": (DropParams, DropResult),
    "restore": (RestoreParams, RestoreResult),
    "diff": (DiffParams, DiffResult),
    "export": (ExportParams, ExportResult),
    "import": (ImportParams, ImportResult),
    "apply": (ApplyParams, ApplyResult),
    "unsaved": (Empty, UnsavedResult),
    "unmount": (UnmountParams, UnmountResult),
    # Runs the volume's own check_invariants: what tests, and a bug report, want to know.
    "check": (Empty, Empty),
    **FS_METHODS,
    **EXEC_METHODS,
}
