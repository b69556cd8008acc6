"""One call of the control socket: decode its request, run its handler, and encode the answer or the error.

`CallContext` has the progress, output and cancellation of a call, for its handler.

Threading: any thread may use the methods whose names end in `_nowait` or `_from_thread`, `commit`, `cancelled` and
`raise_if_cancelled`; only the serving loop may use the others.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import keyword
import logging
import os
import resource
import threading
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import trio

from protocol.errors import SnapshotNotFoundError, errno_of, only_error, shortened
from protocol.paths import decode, normalise
from vfsd.daemon.snapshots.base import CallObserver, in_thread
from vfsd.machine.interpreter import clear_frames
from vfsd.operations.catalogue import OPERATIONS
from vfsd.wire.messages import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    MAX_LISTED,
    OPERATION_FAILED,
    OUTPUT_METHOD,
    PARSE_ERROR,
    PROGRESS_METHOD,
    ErrorData,
    ErrorObject,
    InvalidNameError,
    InvalidParamsError,
    Output,
    ProgressReport,
    Request,
    Response,
    from_wire_path,
    wire_path,
)

Handler = Callable[[Any, "CallContext"], Awaitable[Any]]
"""Answers one method: takes the parameters struct and the call, returns the result struct (types as in OPERATIONS)."""

Unit = Literal["files", "bytes"]

_OUTPUT_BYTES: Final = 192 * 1024  # of one "output" message, which is 256 KiB in base64: bounds the reader's buffer
_logger = logging.getLogger(__name__)


def handlers_of(*groups: object) -> dict[str, Handler]:
    """Return the methods of `groups` that answer operations: `fs_ls` answers "fs.ls", and `import_` "import"."""
    methods = {name: name.replace(".", "_") + "_" * keyword.iskeyword(name) for name in OPERATIONS}
    return {
        name: getattr(group, method)
        for name, method in methods.items()
        for group in groups
        if inspect.iscoroutinefunction(getattr(type(group), method, None))
    }


class CallCancelledError(Exception):
    """The client disconnected or cancelled the call, or the server is stopping."""


class Encoded(list[bytes]):
    """A result that the handler encoded in a worker thread: pieces of one JSON value.

    Encoding a large result on the serving loop would block the mount.
    """


class CallContext(CallObserver):
    """One request while it runs.

    When the client disconnects or cancels the call, the handler's cancel scope is cancelled.  A thread cannot be
    cancelled: long work in a thread checks `cancelled`, or calls `raise_if_cancelled`, regularly.

    A handler calls `commit` before it changes something.  After that the call cannot be cancelled, so an answer that
    says "cancelled" means that nothing was changed.
    """

    def __init__(
        self,
        request_id: int | str | None,
        *,
        silent: bool,
        send: Callable[[bytes], Awaitable[None]],
        progress_ready: Callable[[CallContext], None],
        client: Hashable = None,
        drop_client: Callable[[], None] = lambda: None,
    ) -> None:
        """`send` sends one line, with back-pressure; `progress_ready`, on the loop, schedules `take_progress`.

        A `silent` call (a JSON-RPC notification) sends nothing.  `client` is equal for the calls of one program;
        `drop_client` closes the connection.  `scope` is the cancel scope that the handler runs in.
        """
        self.client = client
        self.request_id = request_id
        self.scope = trio.CancelScope()
        self._drop_client = drop_client
        self.task: trio.lowlevel.Task | None = None  # that runs the handler
        self._committed = False
        self._has_notified = False
        self._commit_lock = threading.Lock()
        self._silent = silent
        self._send = send
        self._progress_ready = progress_ready
        self._token = trio.lowlevel.current_trio_token()
        self._latest: ProgressReport | None = None
        self._taken: ProgressReport | None = None
        self._signalled = False
        self._cancelled = False
        self._after: list[Callable[[], None]] = []

    # -- what handlers use ----------------------------------------------------------------------------
    @property
    def cancelled(self) -> bool:
        """Whether the client disconnected or cancelled the call."""
        return self._cancelled

    def raise_if_cancelled(self) -> None:
        """CallCancelledError if `cancelled`."""
        if self._cancelled:
            raise CallCancelledError

    def commit(self) -> None:
        """Declare that the call is about to change something; it cannot be cancelled any more.

        CallCancelledError if it was cancelled already.
        """
        with self._commit_lock:
            self.raise_if_cancelled()
            self._committed = True

    def progress_nowait(self, done: int, total: int, unit: Unit) -> None:
        """Report progress from any thread, without blocking.  `total` is 0 if it is not known.

        About ten reports a second are sent, each the newest, and the last one before the answer.
        """
        if self._silent:
            return
        self._latest = ProgressReport(self.request_id, done, total, unit)
        # `take_progress` clears the flag before it reads `_latest`, so no report is lost.
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._progress_ready, self)

    async def output(self, data: bytes) -> None:
        """Send a piece of output; waits while the client reads slowly.  CallCancelledError if it disconnects."""
        for start in range(0, len(data), _OUTPUT_BYTES):
            await self.notify(OUTPUT_METHOD, Output(self.request_id, data[start : start + _OUTPUT_BYTES]))

    async def notify(self, method: str, params: msgspec.Struct) -> None:
        """Send a notification; waits while the client reads slowly.  CallCancelledError if it disconnects."""
        self.raise_if_cancelled()
        self._has_notified = True
        if not self._silent:
            try:
                await self._send(_notification(method, params))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise CallCancelledError from None

    def output_from_thread(self, data: bytes) -> None:
        """`output` for worker threads: blocks the thread while the client reads slowly.

        CallCancelledError if the client disconnects, so a waiting thread always ends.
        """
        # With the token, the loop runs `output` outside the handler's scope.  Otherwise trio would raise
        # Cancelled in the thread, which `except Exception` in the handlers' clean-up does not catch.
        try:
            trio.from_thread.run(self.output, data, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise CallCancelledError from None

    def after_answer(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop when the answer was written to the socket, or cannot be sent any more.

        With it a method that stops the daemon still answers.
        """
        self._after.append(callback)

    # -- what the connection uses ---------------------------------------------------------------------
    @property
    def is_repeatable(self) -> bool:
        """Whether the client may be asked to make the call again: it changed nothing, and no output was sent."""
        return not (self._committed or self._silent or self._has_notified)

    def abandon(self) -> None:
        """Note that the client disconnected."""
        self._cancelled = True

    def cancel(self) -> bool:
        """Cancel the handler unless it has committed; return whether it was cancelled.  It is still answered."""
        with self._commit_lock:
            if self._committed:
                return False
            self._cancelled = True
        self.scope.cancel()
        return True

    def drop_client(self, reason: str) -> None:
        """Close the client's connection."""
        _logger.warning("control: dropped a client: %s", reason)
        self._drop_client()

    def take_progress(self) -> bytes | None:
        """Return the message with the newest progress; None if it was taken already."""
        # Compared, not cleared: a thread may store a newer report at the same time.
        self._signalled = False
        latest = self._latest
        if latest is None or latest is self._taken:
            return None
        self._taken = latest
        return _notification(PROGRESS_METHOD, latest)

    def answered(self) -> None:
        """Run the callbacks of `after_answer`, each once."""
        while self._after:
            callback = self._after.pop(0)
            try:
                callback()
            except Exception:
                _logger.exception("control: a callback after an answer failed")


def _notification(method: str, params: msgspec.Struct) -> bytes:
    return msgspec.json.encode(Request("2.0", method, msgspec.Raw(msgspec.json.encode(params)))) + b"\n"


# -- requests and answers --------------------------------------------------------------------------
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
    subject: Literal["snapshot"] | None = "snapshot" if isinstance(error, SnapshotNotFoundError) else None
    data = ErrorData(_ERRNO_NAMES.get(code) if code else None, path, subject)
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


def error_line(number: RequestId, code: int, message: str, data: ErrorData | None = None) -> bytes:
    """Return an error response, newline included."""
    # The text of an exception may hold surrogates (from a file name that is not UTF-8), which JSON cannot.
    readable = message.encode("utf-8", "backslashreplace").decode()
    return msgspec.json.encode(Response(number, error=ErrorObject(code, readable, data))) + b"\n"


# -- text from the wire; InvalidParamsError if it is malformed -------------------------------------
_DECODED_AT_ONCE: Final = 256  # more paths are decoded in a worker thread


def _decoded(wire: str) -> bytes:
    try:
        return from_wire_path(wire)
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None


def host_text(wire: str) -> str:
    """Decode a path, or other text, of this host."""
    return os.fsdecode(_decoded(wire))


def host_environment(wire: Mapping[str, str] | None) -> dict[str, str] | None:
    """Decode the caller's environment."""
    return None if wire is None else {host_text(name): host_text(value) for name, value in wire.items()}


def absolute_path(wire: str) -> str:
    """Decode an absolute path of this host."""
    path = host_text(wire)
    if not os.path.isabs(path):
        raise InvalidParamsError(f"not an absolute path: {wire!r}")
    return path


def filesystem_path(wire: str) -> str:
    """Decode a path in the workspace, in the form that `protocol.filesystem.Filesystem` takes."""
    try:
        return decode(_decoded(wire))
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None


def working_directory(wire: str) -> str:
    """Decode the directory of a command: a normalised path in the workspace."""
    try:
        return normalise(filesystem_path(wire))
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None


async def tree_paths(wire: Sequence[str]) -> list[bytes]:
    """Decode paths in the workspace, in the form that `protocol.tree.Tree` takes."""
    return _tree_paths(wire) if len(wire) <= _DECODED_AT_ONCE else await in_thread(_tree_paths, wire)


def _tree_paths(wire: Sequence[str]) -> list[bytes]:
    paths = []
    for text in wire:
        parts = [part for part in _decoded(text).split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise InvalidParamsError(f"a path with '..': {text!r}")
        paths.append(b"/".join(parts))
    return paths
