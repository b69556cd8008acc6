"""CallContext: progress, output and cancellation of one call, for its handler.

Threading: any thread may use the methods whose names end in `_nowait` or `_from_thread`, `commit`, `cancelled` and
`raise_if_cancelled`; only the serving loop may use the others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Final, Literal

import msgspec
import trio

from vfsd.wire.messages import OUTPUT_METHOD, PROGRESS_METHOD, Output, ProgressReport, Request

Handler = Callable[[Any, "CallContext"], Awaitable[Any]]
"""Answers one method: takes the parameters struct and the call, returns the result struct (types as in OPERATIONS)."""

Unit = Literal["files", "bytes"]

_OUTPUT_BYTES: Final = 192 * 1024  # of one "output" message, which is 256 KiB in base64: bounds the reader's buffer
_logger = logging.getLogger(__name__)


class CallCancelledError(Exception):
    """The client disconnected or cancelled the call, or the server is stopping."""


class Encoded(list[bytes]):
    """A result that the handler encoded in a worker thread: pieces of one JSON value.

    Encoding a large result on the serving loop would block the mount.
    """


class CallContext:
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
