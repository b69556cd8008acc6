"""The messages of `exec`: an interactive command, whose input and output are exchanged while it runs.

The response to `exec` follows when the command has ended.  Before that the client receives an "exec.started"
notification with the session's name, which the other methods take, and "exec.output" notifications.

Flow control: at most `window_bytes` of output, measured by `cost`, are sent before the client acknowledges them with
`exec.more`; then the command blocks when it writes.  A client that stops reading therefore delays no other client,
uses no memory in the daemon, and can still send signals.  For input, the response to `exec.input` follows when the
command has read the data.

exec.more, exec.signal and exec.resize may be sent as notifications, since their results are empty.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from vfsd.operations.declaration import Empty, Operation, Params

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


OPERATIONS: Final = (
    Operation("exec", ExecParams, ExecEnded, runs_command=True),
    Operation("exec.input", ExecInputParams, Empty),
    Operation("exec.more", ExecMoreParams, Empty),
    Operation("exec.signal", ExecSignalParams, Empty),
    Operation("exec.resize", ExecResizeParams, Empty),
)
