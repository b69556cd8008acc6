"""What a method's handler is given beside its parameters: progress, output, and whether the client still waits.

Threads: methods whose names end in `_nowait` or `_from_thread`, `cancelled` and `raise_if_cancelled` may be
used from any thread; everything else only from the serving loop.
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

__all__ = ["CallCancelledError", "CallContext", "Encoded", "Handler"]

Handler = Callable[[Any, "CallContext"], Awaitable[Any]]
"""Answers one method: (parameters struct, call) to result struct, of the types that METHODS names."""

Unit = Literal["files", "bytes"]

_OUTPUT_BYTES: Final = 192 * 1024  # of one "output" message: a reader's buffer stays small (256 KiB in base64)
_logger = logging.getLogger(__name__)


class CallCancelledError(Exception):
    """The client went away or cancelled the call, or the server is stopping: nobody waits for the result."""


class Encoded(list[bytes]):
    """A result that a handler has encoded itself, in a thread and in slices: pieces of one JSON value.

    Encoding a large result on the serving loop would stop the mount meanwhile.
    """


class CallContext:
    """One request while it runs.

    When the client disconnects, or asks to cancel the call, the handler's cancel scope is cancelled.  A thread cannot
    be cancelled: long work in one checks `cancelled`, or calls `raise_if_cancelled`, every so often.

    A handler that changes something calls `commit` before it does: from there on a request to cancel no longer
    reaches it, so an answer that says "cancelled" means that nothing was changed.
    """

    __slots__ = (
        "_after",
        "_cancelled",
        "_commit_lock",
        "_committed",
        "_drop_client",
        "_id",
        "_latest",
        "_progress_ready",
        "_scope",
        "_send",
        "_signalled",
        "_silent",
        "_taken",
        "_token",
        "client",
    )

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
        """`send` puts one line out, with back-pressure; `progress_ready`, on the loop, has the progress fetched.

        A `silent` call is a notification's: it sends nothing, whatever its handler does.  `client` is equal for the
        calls of one program; `drop_client` closes the connection.
        """
        self.client = client
        self._drop_client = drop_client
        self._scope = trio.CancelScope()
        self._committed = False
        self._commit_lock = threading.Lock()
        self._id = request_id
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
        """Whether nobody waits for the answer any more."""
        return self._cancelled

    def raise_if_cancelled(self) -> None:
        """CallCancelledError once nobody waits for the answer."""
        if self._cancelled:
            raise CallCancelledError

    def commit(self) -> None:
        """Declare that the call is about to change something.  Any thread.

        CallCancelledError where it was cancelled before that; later requests to cancel it are not followed.
        """
        with self._commit_lock:
            self.raise_if_cancelled()
            self._committed = True

    async def progress(self, done: int, total: int, unit: Unit) -> None:
        """Tell how far the call is (`total` 0: not known).  A checkpoint; does not wait for the client."""
        self.progress_nowait(done, total, unit)
        await trio.lowlevel.checkpoint()

    def progress_nowait(self, done: int, total: int, unit: Unit) -> None:
        """Tell how far the call is, from any thread, without ever blocking it.

        The newest figures win: some ten a second are sent, and the last ones before the answer.
        """
        if self._silent:
            return
        self._latest = ProgressReport(self._id, done, total, unit)
        # Set before and read after the other side clears it (see `take_progress`): no figure is left behind.
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._progress_ready, self)

    async def output(self, data: bytes) -> None:
        """Send a further piece of output; waits while the client is behind.

        CallCancelledError when the client has gone.
        """
        for start in range(0, len(data), _OUTPUT_BYTES):
            await self.notify(OUTPUT_METHOD, Output(self._id, data[start : start + _OUTPUT_BYTES]))

    @property
    def request_id(self) -> int | str | None:
        """What notifications about this call name it by."""
        return self._id

    async def notify(self, method: str, params: msgspec.Struct) -> None:
        """Send a notification of another kind; waits while the client is behind.

        CallCancelledError when the client has gone.
        """
        self.raise_if_cancelled()
        if not self._silent:
            try:
                await self._send(_notification(method, params))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise CallCancelledError from None

    def output_from_thread(self, data: bytes) -> None:
        """`output` for worker threads: blocks the thread while the client is behind.

        CallCancelledError when the client has gone; so a thread that waits here always ends.
        """
        # With the token, the loop runs `output` outside the handler's scope.  Otherwise trio would raise
        # Cancelled in the thread, which passes through `except Exception` clean-up that handlers rely on.
        try:
            trio.from_thread.run(self.output, data, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise CallCancelledError from None

    def after_answer(self, callback: Callable[[], None]) -> None:
        """Have `callback` run on the loop once the answer is with the kernel, or can no longer be sent.

        So a method that stops the daemon still answers.
        """
        self._after.append(callback)

    # -- what the connection uses ---------------------------------------------------------------------
    @property
    def scope(self) -> trio.CancelScope:
        """The cancel scope that the handler runs in."""
        return self._scope

    def abandon(self) -> None:
        """From now on nobody waits for the answer."""
        self._cancelled = True

    def cancel(self) -> bool:
        """Stop the handler unless it has committed; whether it will stop.  The client waits for the answer."""
        with self._commit_lock:
            if self._committed:
                return False
            self._cancelled = True
        self._scope.cancel()
        return True

    def drop_client(self, reason: str) -> None:
        """Close the client's connection."""
        _logger.warning("control: dropped a client: %s", reason)
        self._drop_client()

    def take_progress(self) -> bytes | None:
        """The message with the newest figures, once; None where there is nothing new."""
        # Compared with what was taken before, not cleared: a thread may be storing newer figures right now.
        self._signalled = False
        latest = self._latest
        if latest is None or latest is self._taken:
            return None
        self._taken = latest
        return _notification(PROGRESS_METHOD, latest)

    def answered(self) -> None:
        """Run what `after_answer` was given; what it has run it does not run again."""
        while self._after:
            callback = self._after.pop(0)
            try:
                callback()
            except Exception:
                _logger.exception("control: what was to follow an answer failed")


def _notification(method: str, params: msgspec.Struct) -> bytes:
    return msgspec.json.encode(Request("2.0", method, msgspec.Raw(msgspec.json.encode(params)))) + b"\n"
