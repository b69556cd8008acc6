"""The envelope of the control socket's messages, and the encoding of paths.

Protocol: JSON-RPC 2.0 with one object per line.  `vfsd.operations` declares the methods; docs/json.md describes their
results as the command line prints them.

Conventions: sizes are in bytes and times ISO 8601 in UTC.  A path is text: UTF-8 unchanged, a backslash doubled, and
every other byte as `\\xNN`, so that any name that Linux allows survives the round trip (`wire_path`,
`from_wire_path`).  Paths are relative to the workspace's root, except where a field is documented as absolute.

Source: https://www.jsonrpc.org/specification
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from vfsd.operations.declaration import Params

# -- error codes (JSON-RPC 2.0, section 5.1, which leaves -32000 to -32099 to the server) -----------
PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
OPERATION_FAILED: Final = -32000  # see `ErrorData`

MAX_REQUEST_BYTES: Final = 1024 * 1024
MAX_LISTED: Final = 25_000  # elements of one list or map in the parameters of a request
PROGRESS_METHOD: Final = "progress"
OUTPUT_METHOD: Final = "output"
CANCEL_METHOD: Final = "cancel"
CLOSING_METHOD: Final = "closing"

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
