"""Lines of the control socket: decode a request, run its handler, encode the answer or the error."""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from protocol.errors import errno_of, only_error, shortened
from vfsd.daemon.control.call_context import CallCancelledError, CallContext, Encoded, Handler
from vfsd.machine.interpreter import clear_frames
from vfsd.operations.catalogue import OPERATIONS
from vfsd.wire.messages import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    MAX_LISTED,
    OPERATION_FAILED,
    PARSE_ERROR,
    ErrorData,
    ErrorObject,
    InvalidNameError,
    InvalidParamsError,
    Request,
    Response,
    wire_path,
)

_logger = logging.getLogger(__name__)
_decoder: Final = msgspec.json.Decoder(Request)

# For numbers with two names, the name that the man pages of file system calls use.
_ERRNO_NAMES: Final = {**errno.errorcode, errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EDEADLK: "EDEADLK"}

_JOINED_PIECES: Final = 16  # an answer of at most so many pieces is sent as one
_NO_THREAD: Final = "the daemon cannot start a thread: a limit of processes is reached (ulimit -u); try again"

RequestId = int | str | None


def request_id(request: Request) -> RequestId:
    """Return the id of a request; None for a notification."""
    return None if isinstance(request.id, msgspec.UnsetType) else request.id


def decode_request(line: bytes) -> Request | bytes:
    """Return the request in `line`, or the error line that answers it.

    A batch (JSON-RPC 2.0, section 6) is refused as one invalid request.
    """
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError as error:
        shape_error = str(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return error_line(None, PARSE_ERROR, f"not JSON: {error}")
    # The decoder stopped at the first wrong type: the rest may not be JSON, and the id is not known yet.
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return error_line(None, PARSE_ERROR, f"not JSON: {error}")
    if isinstance(value, list):
        return error_line(None, INVALID_REQUEST, "batches are not supported: send one request per line")
    number = value.get("id") if isinstance(value, dict) else None
    known = isinstance(number, int | str) and not isinstance(number, bool)
    return error_line(number if known else None, INVALID_REQUEST, shape_error)


def decode_params(request: Request) -> Any:
    """Return the decoded parameters of a request for one of OPERATIONS, or the error line that answers it."""
    number = request_id(request)
    try:
        params = msgspec.json.decode(request.params, type=OPERATIONS[request.method].params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return error_line(number, INVALID_PARAMS, f"{request.method}: {error}")
    for field, value in msgspec.structs.asdict(params).items():
        if isinstance(value, list | dict) and len(value) > MAX_LISTED:
            text = f"`{field}` has {len(value):,} elements, at most {MAX_LISTED:,} are allowed: make several requests"
            return error_line(number, INVALID_PARAMS, f"{request.method}: {text}")
    return params


def decoded_bytes(value: object) -> int:
    """The memory that a decoded message takes."""
    size = sys.getsizeof(value)
    if isinstance(value, msgspec.Struct):
        return size + sum(decoded_bytes(getattr(value, field)) for field in value.__struct_fields__)
    if isinstance(value, dict):
        return size + sum(map(decoded_bytes, value)) + sum(map(decoded_bytes, value.values()))
    return size + sum(map(decoded_bytes, value)) if isinstance(value, list | tuple) else size


async def answer(request: Request, handler: Handler, params: Any, call: CallContext) -> Sequence[bytes]:
    """Run `handler`, and return the line that answers `request`, in pieces."""
    number = request_id(request)
    try:
        with call.scope:
            result = await handler(params, call)
            encoded = result if isinstance(result, Encoded) else [msgspec.json.encode(result)]
            return result_line(number, encoded)
        # The client cancelled the call before it committed to a change.
        return [_cancelled_line(number, request.method)]
    except Exception as group:  # noqa: BLE001 (a failing handler ends its own call, not the daemon)
        return [_raised_line(number, request.method, group, call)]


def _raised_line(number: RequestId, method: str, group: Exception, call: CallContext) -> bytes:
    """Return the error line for what a handler raised.

    Not in `answer`, whose frame is in the traceback: a variable there that refers to the exception would keep the
    parameters until the garbage collector runs.
    """
    try:
        error = only_error(group)
        if isinstance(error, CallCancelledError) and call.cancelled:
            return _cancelled_line(number, method)
        return failure_line(number, method, error)
    finally:
        clear_frames(group)


def result_line(number: RequestId, encoded: Sequence[bytes]) -> list[bytes]:
    """Return the line that answers a request as pieces, so that a large result is not copied."""
    line = msgspec.json.encode(Response(number, result=msgspec.Raw(b"null")))
    assert line.endswith(b"null}")
    pieces = [line.removesuffix(b"null}"), *encoded, b"}\n"]
    return pieces if len(pieces) > _JOINED_PIECES else [b"".join(pieces)]


def _cancelled_line(number: RequestId, method: str) -> bytes:
    effect = "its command was ended" if OPERATIONS[method].runs_command else "nothing was changed"
    text = f"{method} was cancelled: {effect}"
    return error_line(number, OPERATION_FAILED, text, ErrorData("ECANCELED"))


def failure_line(number: RequestId, method: str, error: BaseException) -> bytes:
    """Return the error response for an exception of a handler."""
    if isinstance(error, InvalidParamsError):
        text = str(error) if isinstance(error, InvalidNameError) else f"{method}: {error}"
        return error_line(number, INVALID_PARAMS, text)
    code = errno_of(error)
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        # The threading module raises this when the kernel refuses a thread: ulimit -u, TasksMax=, pids.max.
        code, error = errno.EAGAIN, OSError(errno.EAGAIN, _NO_THREAD)
    if code is None and not isinstance(error, OSError):
        _logger.error("control: %s failed unexpectedly", method, exc_info=error)
        return error_line(number, INTERNAL_ERROR, f"{method}: an error in vfsd itself; its log has the details")
    text, path = _text_and_path(error, code)
    data = ErrorData(_ERRNO_NAMES.get(code) if code else None, path)
    return error_line(number, OPERATION_FAILED, text, data)


def _text_and_path(error: BaseException, code: int | None) -> tuple[str, str | None]:
    """Return the message, and the path that it is about as wire text."""
    if not isinstance(error, OSError):
        return str(error) or os.strerror(code or 0), None
    text = error.strerror or str(error)
    if code == errno.EMFILE:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text = f"{text}: the daemon may have {soft:,} files open; close some, or mount with a higher limit (ulimit -n)"
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return text, None
    path = wire_path(os.fsencode(error.filename))
    return f"{text}: {shortened(path)}", path


def busy_line(number: RequestId) -> bytes:
    """Return the error for a request that does not fit in the budget."""
    text = "the daemon is holding too many large requests; try again"
    return error_line(number, OPERATION_FAILED, text, ErrorData("EBUSY"))


def error_line(number: RequestId, code: int, message: str, data: ErrorData | None = None) -> bytes:
    """Return an error response, newline included."""
    # The text of an exception may hold surrogates (from a file name that is not UTF-8), which JSON cannot.
    readable = message.encode("utf-8", "backslashreplace").decode()
    return msgspec.json.encode(Response(number, error=ErrorObject(code, readable, data))) + b"\n"
