"""The control socket's messages: JSON-RPC 2.0 with one object per line, and one call from the caller's side.

`vfsd.operations` declares the methods; docs/json.md describes their results as the command line prints them.  Nothing
here does I/O: the clients, and the daemon where it calls other daemons, send and receive.

Conventions: sizes are in bytes and times ISO 8601 in UTC.  A path is text: UTF-8 unchanged, a backslash doubled, and
every other byte as `\\xNN`, so that any name that Linux allows survives the round trip (`wire_path`,
`from_wire_path`).  Paths are relative to the workspace's root, except where a field is documented as absolute.

Source: https://www.jsonrpc.org/specification
"""

from __future__ import annotations

import errno as errno_numbers
import functools
import os
import re
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from vfsd.operations.catalogue import OPERATIONS
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
    """Details of an OPERATION_FAILED: the errno's name, such as "ENOENT", and the affected path.

    `subject` is "snapshot" if `path` is the name of a snapshot that does not exist.
    """

    errno: str | None = None
    path: str | None = None
    subject: Literal["snapshot"] | None = None


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


# -- a call, from the caller's side ----------------------------------------------------------------
ATTEMPTS: Final = 5  # a daemon with too many idle connections closes some, unlikely the next one of the same client
RECEIVE_BYTES: Final = 64 * 1024


class LineBuffer:
    """Buffers received bytes and returns complete lines.

    The buffer is unbounded; the caller checks `partial_bytes` and stops receiving.
    """

    __slots__ = ("_buffer", "_searched")

    def __init__(self) -> None:
        self._buffer = bytearray()
        # The buffer has no newline before this offset.  Avoids a quadratic search if a line arrives byte by byte.
        self._searched = 0

    @property
    def partial_bytes(self) -> int:
        """The number of buffered bytes."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_line(self) -> bytes | None:
        """Return the next line without its newline, or None if it is incomplete."""
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(memoryview(self._buffer)[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def skip_empty_lines(self) -> None:
        """Drop the empty lines at the start of the buffer."""
        if self._buffer.startswith(b"\n"):
            self._buffer = self._buffer.lstrip(b"\n")
            self._searched = 0

    def take_rest(self) -> bytes:
        """Return and remove the incomplete line at the end of a stream."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest


class ControlError(OSError):
    """An error that the daemon answered; `str()` is the message for the user.

    `code` is the JSON-RPC error code.  If the daemon sent an errno, `errno` is its number, `filename` the path that it
    is about, and the exception is also an instance of Python's class for it (FileNotFoundError, ...).  If the daemon
    refused an argument (INVALID_PARAMS), the exception is also a ValueError, and `errno` is EINVAL.
    """

    code: int
    subject: str | None = None  # as in `ErrorData`

    def __init__(self, code: int, message: str, errno: int | None = None, filename: str | None = None) -> None:
        if errno is None:
            super().__init__(message)
        else:
            super().__init__(errno, message, filename)
        self.code = code
        self._message = message

    def __str__(self) -> str:
        return self._message

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle cannot find the classes that `control_error` creates.
        return control_error, (self.code, self._message, self.errno, self.filename, self.subject)


@functools.cache
def _error_class(builtin: type[OSError] | type[ValueError]) -> type[ControlError]:
    if builtin is OSError:
        return ControlError
    return type("ControlError", (ControlError, builtin), {"__doc__": ControlError.__doc__})


def control_error(
    code: int, message: str, errno: int | None = None, filename: str | None = None, subject: str | None = None
) -> ControlError:
    """Return the `ControlError` for an errno; for ENOENT it is also a FileNotFoundError, and so on.

    For INVALID_PARAMS it is also a ValueError.
    """
    if code == INVALID_PARAMS:
        return _error_class(ValueError)(code, message, errno_numbers.EINVAL, filename)
    made = _error_class(OSError if errno is None else type(OSError(errno, "")))(code, message, errno, filename)
    made.subject = subject
    return made


def _from_answer(error: ErrorObject) -> ControlError:
    if error.data is None:
        return control_error(error.code, error.message)
    number = getattr(errno_numbers, error.data.errno, None) if error.data.errno else None
    path = None if error.data.path is None else _path(error.data.path)
    return control_error(error.code, error.message, number, path, error.data.subject)


def _path(wire: str) -> str:
    try:
        return os.fsdecode(from_wire_path(wire))
    except ValueError:  # not a wire path: the name of an entry in a hostile archive
        return wire


def is_unknown_snapshot(error: OSError) -> bool:
    """Whether the daemon answered that there is no snapshot with the name `error.filename`."""
    return isinstance(error, ControlError) and error.subject == "snapshot"


class ClosingError(ConnectionError):
    """The daemon closed an idle connection, and did not run the request that was sent meanwhile."""


class _Message(msgspec.Struct):
    """A message from the daemon: an answer, or a notification about a running call."""

    jsonrpc: str
    id: int | str | None = None
    method: str | None = None
    params: msgspec.Raw = msgspec.Raw(b"{}")
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: ErrorObject | msgspec.UnsetType = msgspec.UNSET


_messages = msgspec.json.Decoder(_Message)
_BINARY: Final = frozenset({"content", "data", "stdin"})  # the parameters that are bytes


class Exchange:
    """One call without I/O: builds the request's bytes and interprets each line of the answer."""

    def __init__(
        self,
        request_id: int,
        method: str,
        params: msgspec.Struct | None,
        on_progress: Callable[[ProgressReport], object] | None = None,
        on_output: Callable[[bytes], object] | None = None,
    ) -> None:
        """ValueError for a method that no operation has, TypeError for params of another method.

        Params may be those of an agents' tool, which the method's own extend by what agents do not have.
        """
        operation = OPERATIONS.get(method)
        if operation is None:
            raise ValueError(f"no such method: {method!r}")
        if params is not None and not issubclass(operation.params, type(params)):
            raise TypeError(f"{method} takes {operation.params.__name__}, not {type(params).__name__}")
        for name in () if params is None else params.__struct_fields__:
            if name not in _BINARY and isinstance(getattr(params, name), bytes):  # JSON would have it in base64
                raise TypeError(f"{name} must be a str, not bytes: decode it")
        self.operation = operation
        self.method = method
        self._id = request_id
        self._on_progress = on_progress
        self._on_output = on_output
        encoded = b"{}" if params is None else msgspec.json.encode(params)
        self.request = msgspec.json.encode(Request("2.0", method, msgspec.Raw(encoded), request_id)) + b"\n"
        self.done = False
        self.result: Any = None
        self._cancel_id = f"cancel {request_id}"
        self.cancel_state: CancelState | None = None

    def mute(self) -> None:
        """Call no callback any more."""
        self._on_progress = self._on_output = None

    @property
    def cancel_request(self) -> bytes:
        """The line that asks the daemon to stop this call.  `cancel_state` becomes its answer."""
        params = msgspec.json.encode(CancelParams(self._id))
        return msgspec.json.encode(Request("2.0", CANCEL_METHOD, msgspec.Raw(params), self._cancel_id)) + b"\n"

    def take(self, line: bytes) -> object:
        """Interpret a line from the daemon.  Once `done` is set, `result` is the answer.

        Return what the callback for progress or output returned, if the line is one of these.
        ControlError for an error answer, and for an answer that this version cannot read.  ClosingError if the daemon
        closed the connection without running the request.
        """
        try:
            event = self._take(_messages.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            text = f"cannot read the daemon's answer to {self.method!r} (is it of another version?): {error}"
            raise ControlError(INTERNAL_ERROR, text) from error
        if event is None or event.id != self._id:
            return None
        if isinstance(event, ProgressReport):
            return None if self._on_progress is None else self._on_progress(event)
        return None if self._on_output is None else self._on_output(event.data)

    def _take(self, message: _Message) -> ProgressReport | Output | None:
        if message.method == PROGRESS_METHOD:
            return msgspec.json.decode(message.params, type=ProgressReport)
        if message.method == OUTPUT_METHOD:
            return msgspec.json.decode(message.params, type=Output)
        if message.method == CLOSING_METHOD:
            raise ClosingError(f"the daemon closed the idle connection before it ran {self.method!r}; try again")
        if message.id == self._cancel_id and not isinstance(message.result, msgspec.UnsetType):
            self.cancel_state = msgspec.json.decode(message.result, type=CancelResult).state
            return None
        # An error without an id is about the connection: it was refused, a line was too long, or the client too slow.
        if not isinstance(message.error, msgspec.UnsetType) and message.id in (None, self._id):
            # The daemon then closes the connection: not `done`, so that it is not reused.
            self.done = message.id is not None
            raise _from_answer(message.error)
        if not isinstance(message.result, msgspec.UnsetType) and message.id == self._id:
            self.result = msgspec.json.decode(message.result, type=self.operation.result)
            self.done = True
        return None
