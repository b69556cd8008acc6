"""The operations of agents' tools on files, and commands with or without live input and output.

Paths are wire paths (`vfsd.wire.messages`) and relative to the workspace's root; "" is the root.  Content that a method
reads arrives in "output" notifications before the response, so that no message is large.  A request is limited to
MAX_REQUEST_BYTES; to write more, pass a file of the host as `source`.

The response to `exec` follows when the command has ended.  Before that the client receives an "exec.started"
notification with the session's name, which the other methods take, and "exec.output" notifications.  Flow control: at
most `window_bytes` of output, measured by `cost`, are sent before the client acknowledges them with `exec.more`; then
the command blocks when it writes.  A client that stops reading therefore delays no other client, uses no memory in the
daemon, and can still send signals.  For input, the response to `exec.input` follows when the command has read the data.
exec.more, exec.signal and exec.resize may be sent as notifications, since their results are empty.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from protocol.tool_messages import (
    EditFileParams,
    EditFileResult,
    GlobParams,
    GlobResult,
    GrepParams,
    GrepResult,
    RmParams,
    RmResult,
)
from protocol.types import WriteResult
from protocol.volume import USUAL_UMASK
from vfsd.operations.declaration import Empty, Operation, Params

NotNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]

DEFAULT_ENTRIES: Final = 10_000


class FsEntry(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The file at a path.  Symlinks are followed; type "symlink" means that the target is not in the workspace.

    `mode` is the permission bits in octal, such as "0755".
    """

    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    mode: str
    modified_at: str | None = None
    is_symlink: bool = False


class FsLsParams(Params):
    """Parameters of `fs.ls`: list the directory `path`, sorted by the bytes of the names.

    `after`: list only names that follow this one.  `snapshot`: list it as it was in that snapshot.
    """

    path: str = ""
    limit: Positive = DEFAULT_ENTRIES
    after: str | None = None
    snapshot: str | None = None


class FsLsResult(msgspec.Struct):
    """Result of `fs.ls`.  `truncated`: there are more entries than `limit`."""

    path: str
    entries: list[FsEntry]
    truncated: bool = False


class FsStatParams(Params):
    """Parameters of `fs.stat`: describe the file at `path`, as it is now or was in `snapshot`."""

    path: str
    snapshot: str | None = None


class FsGlobParams(GlobParams, frozen=True):
    """Parameters of `fs.glob`: those of the agents' tool, and the `snapshot` to search."""

    snapshot: str | None = None


class FsGrepParams(GrepParams, frozen=True):
    """Parameters of `fs.grep`: those of the agents' tool, and the `snapshot` to search."""

    snapshot: str | None = None


class FsReadParams(Params):
    """Parameters of `fs.read`: read `limit` lines from line `offset` (0 is the first), or bytes with `as_bytes`.

    Without a `limit`: 2,000 lines, or all bytes.  A binary file is returned as bytes if no page was requested.
    `snapshot`: read it as it was in that snapshot.
    """

    path: str
    offset: NotNegative = 0
    limit: Positive | None = None
    as_bytes: bool = False
    snapshot: str | None = None


class FsReadResult(msgspec.Struct, omit_defaults=True):
    """Result of `fs.read`: describes the preceding "output".  `offset`, `limit` and `total` are counted in `unit`."""

    path: str
    unit: Literal["lines", "bytes"]
    offset: int
    limit: int
    total: int
    truncated: bool = False


class FsWriteParams(Params):
    """Parameters of `fs.write`: write `content`, or the content of the host file `source` (absolute).

    `umask` is that of the caller, for new files and directories.
    """

    path: str
    content: bytes | None = None
    source: str | None = None
    mode: Literal["create", "overwrite", "append"] = "overwrite"
    create_parents: bool = True
    umask: Annotated[int, Meta(ge=0, le=0o777)] = USUAL_UMASK


class FsExecParams(Params):
    """Parameters of `fs.exec`: run a command in the workspace's directory `cwd` and return its output.

    `argv`, `env` and the caller's `environment` as in `exec_messages.ExecParams`.  With `stream`, large output is sent
    before the response, in "output" notifications: standard output first, then standard error.
    """

    argv: Annotated[list[str], Meta(min_length=1)]
    cwd: str = ""
    env: dict[str, str] = {}
    environment: dict[str, str] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    output_limit_bytes: Annotated[int, Meta(ge=0, le=16 * 1024 * 1024)] = 256 * 1024
    stdin: bytes = b""
    stream: bool = False


class FsExecResult(msgspec.Struct):
    """Result of `fs.exec`.

    `exit_status` is negative if a signal killed the command.  `truncated`: the output exceeded the limit.  `snapshot`
    is the snapshot that was taken after the command, if any; `snapshot_error` is the reason if taking it failed.
    `streamed_stdout_bytes` is set if the output was sent before: so many bytes of it are standard output.
    """

    exit_status: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    snapshot: str | None = None
    snapshot_error: str | None = None
    streamed_stdout_bytes: int | msgspec.UnsetType = msgspec.UNSET


STARTED: Final = "exec.started"
OUTPUT: Final = "exec.output"
WINDOW_BYTES: Final = 64 * 1024
# The overhead of a message in a socket's buffer: sk_buff and JSON.  A window of one-byte messages must fit in the
# buffer too.
_MESSAGE_BYTES: Final = 1024


def cost(data: bytes) -> int:
    """Return the number of bytes that a piece of output uses of the window."""
    return max(len(data), _MESSAGE_BYTES)


Dimension = Annotated[int, Meta(ge=0, le=0xFFFF)]


class TerminalSize(msgspec.Struct, forbid_unknown_fields=True):
    """The size of a terminal in characters."""

    rows: Dimension = 24
    columns: Dimension = 80


class ExecParams(Params):
    """Parameters of `exec`: run a command in the workspace's directory `cwd`.

    The words of `argv` are encoded like paths, and so is the caller's `environment`, which the command has on this
    host; None: that of the daemon, without credentials.  `env` is added to it, or to that of the container or sandbox.
    `terminal` runs the command in a terminal of this size.  `input`: the command reads what `exec.input` sends, else
    its input is empty.  None means no limit.
    """

    argv: Annotated[list[str], Meta(min_length=1)]
    cwd: str = ""
    env: dict[str, str] = {}
    environment: dict[str, str] | None = None
    user: str | None = None
    terminal: TerminalSize | None = None
    input: bool = False
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    output_limit_bytes: Annotated[int, Meta(ge=0)] | None = None
    window_bytes: Annotated[int, Meta(ge=4 * _MESSAGE_BYTES, le=1 << 20)] = WINDOW_BYTES


class ExecStarted(msgspec.Struct):
    """Parameters of an "exec.started" notification: the call `id` runs as `session`."""

    id: int | str | None
    session: str


class ExecOutput(msgspec.Struct):
    """Parameters of an "exec.output" notification.  All output of a terminal is "stdout"."""

    id: int | str | None
    stream: Literal["stdout", "stderr"]
    data: bytes


class ExecEnded(msgspec.Struct, omit_defaults=True):
    """Result of `exec`.

    `exit_status` is negative if a signal killed the command and the runner reports that.  `truncated`: the output
    exceeded the limit and the rest was discarded.  `snapshot` is the snapshot that was taken after the command;
    `snapshot_error` is the reason if taking it failed.
    """

    exit_status: int
    timed_out: bool = False
    truncated: bool = False
    snapshot: str | None = None
    snapshot_error: str | None = None


class ExecInputParams(Params):
    """Parameters of `exec.input`: data for the command to read; `end` closes its input.

    EPIPE if the command has closed its input.
    """

    session: str
    data: bytes = b""
    end: bool = False


class ExecMoreParams(Params):
    """Parameters of `exec.more`: acknowledge output whose `cost` is `taken_bytes`."""

    session: str
    taken_bytes: Annotated[int, Meta(ge=0)]


class ExecSignalParams(Params):
    """Parameters of `exec.signal`: send "INT", "TERM", ... to the command and its foreground processes."""

    session: str
    signal: str


class ExecResizeParams(Params):
    """Parameters of `exec.resize`: change the size of the command's terminal."""

    session: str
    size: TerminalSize


_COMMAND: Final = ("the command", "it was killed with all of its processes", "the command has run")
OPERATIONS: Final = (
    Operation("fs.ls", FsLsParams, FsLsResult, reads=True),
    Operation("fs.stat", FsStatParams, FsEntry, reads=True),
    Operation("fs.read", FsReadParams, FsReadResult, reads=True),
    Operation("fs.write", FsWriteParams, WriteResult, audited=True, done="the file was written"),
    Operation("fs.edit", EditFileParams, EditFileResult, audited=True, done="the file was edited"),
    Operation("fs.glob", FsGlobParams, GlobResult, reads=True),
    Operation("fs.grep", FsGrepParams, GrepResult, reads=True),
    Operation("fs.rm", RmParams, RmResult, audited=True, done="the path was deleted"),
    Operation("fs.exec", FsExecParams, FsExecResult, *_COMMAND, runs_command=True),
    Operation("exec", ExecParams, ExecEnded, runs_command=True),
    Operation("exec.input", ExecInputParams, Empty),
    Operation("exec.more", ExecMoreParams, Empty),
    Operation("exec.signal", ExecSignalParams, Empty),
    Operation("exec.resize", ExecResizeParams, Empty),
)
