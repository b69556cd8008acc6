"""The messages of `exec`: a command that runs while its client watches it, and types.

`exec` is answered when the command has ended.  On the way its client is sent an "exec.started" notification with
the name of the session, which the other methods take, and "exec.output" for what the command writes.

Output flows as the client has room: at most `window_bytes` that it has not acknowledged with `exec.more` are on
their way, by `cost`; a command that writes more waits.  So a client that stops reading, or is stopped itself, holds
up nobody else, costs no memory, and can still send signals.  Input is asked for the same way: `exec.input` is answered
when the command has taken it.

exec.more, exec.signal and exec.resize may be sent as notifications: an answer would say nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "EXEC_METHODS",
    "OUTPUT",
    "STARTED",
    "WINDOW_BYTES",
    "ExecEnded",
    "ExecInputParams",
    "ExecMoreParams",
    "ExecOutput",
    "ExecParams",
    "ExecResizeParams",
    "ExecSignalParams",
    "ExecStarted",
    "Nothing",
    "TerminalSize",
    "cost",
]

STARTED: Final = "exec.started"
OUTPUT: Final = "exec.output"
WINDOW_BYTES: Final = 64 * 1024
# What a message takes in a socket's buffer beside its data: sk_buff and its like, and JSON.  A window of one-byte
# messages must fit in there too.
_MESSAGE_BYTES: Final = 1024


def cost(data: bytes) -> int:
    """What a piece of output takes of the window."""
    return max(len(data), _MESSAGE_BYTES)


class _Params(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


Dimension = Annotated[int, Meta(ge=0, le=0xFFFF)]


class TerminalSize(msgspec.Struct, forbid_unknown_fields=True):
    rows: Dimension = 24
    columns: Dimension = 80


class ExecParams(_Params):
    """exec: the words of `argv`, and `cwd` in the workspace, are written as paths are; `env` is added to what the
    command's place gives.

    `terminal` gives it one.  With `input` it has the input that `exec.input` sends, else none.  None is no limit.
    """

    argv: Annotated[list[str], Meta(min_length=1)]
    cwd: str = ""
    env: dict[str, str] = {}
    user: str | None = None
    terminal: TerminalSize | None = None
    input: bool = False
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    output_limit_bytes: Annotated[int, Meta(ge=0)] | None = None
    window_bytes: Annotated[int, Meta(ge=4 * _MESSAGE_BYTES, le=1 << 20)] = WINDOW_BYTES


class ExecStarted(msgspec.Struct):
    """Params of an "exec.started" notification: request `id` runs as `session`."""

    id: int | str | None
    session: str


class ExecOutput(msgspec.Struct):
    """Params of an "exec.output" notification; a terminal's output is all "stdout"."""

    id: int | str | None
    stream: Literal["stdout", "stderr"]
    data: bytes


class ExecEnded(msgspec.Struct, omit_defaults=True):
    """How it ended; `exit_status` is negative for what a signal killed, where that is known.

    `truncated`: it wrote more than the limit, which was thrown away.  `snapshot` was taken after it;
    `snapshot_error` says why a snapshot that was to be taken is missing.
    """

    exit_status: int
    timed_out: bool = False
    truncated: bool = False
    snapshot: str | None = None
    snapshot_error: str | None = None


class ExecInputParams(_Params):
    """exec.input: `data` for it to read, and with `end` no more.  EPIPE once it reads no more."""

    session: str
    data: bytes = b""
    end: bool = False


class ExecMoreParams(_Params):
    """exec.more: the client has done with output that cost `taken_bytes`."""

    session: str
    taken_bytes: Annotated[int, Meta(ge=0)]


class ExecSignalParams(_Params):
    """exec.signal: "INT", "TERM", ... for the command and what it runs in the foreground."""

    session: str
    signal: str


class ExecResizeParams(_Params):
    """exec.resize: its terminal has this size now."""

    session: str
    size: TerminalSize


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing to say."""


EXEC_METHODS: Final[dict[str, tuple[type[Any], type[Any]]]] = {
    "exec": (ExecParams, ExecEnded),
    "exec.input": (ExecInputParams, Nothing),
    "exec.more": (ExecMoreParams, Nothing),
    "exec.signal": (ExecSignalParams, Nothing),
    "exec.resize": (ExecResizeParams, Nothing),
}
