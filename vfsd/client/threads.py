"""Run blocking work in worker threads for an async caller, with defined effects of cancellation.

`finish` is for work that changes something: it returns or raises only when the thread has ended, or the work was never
begun.  anyio guarantees that for cancellation by its own scopes and by trio, but asyncio's `Task.cancel` (which
`asyncio.timeout` and `asyncio.wait_for` use) ends an await on a thread at once, and the thread would go on: a write
could follow a restore.  `abandon` is for work that only reads: it leaves the thread alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")
_POLL_S: Final = 0.002


async def finish(work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Run `work` in a worker thread, to its end.

    If the caller is cancelled meanwhile, and so cannot get the result, `undo` is called with it in a worker thread.
    """
    job = _Job(work)
    try:
        return await anyio.to_thread.run_sync(job.run)
    except BaseException:
        if not job.was_begun():
            raise
        with anyio.CancelScope(shield=True):
            while not job.ended.is_set():
                await anyio.sleep(_POLL_S)
            if undo is not None and job.results:
                await anyio.to_thread.run_sync(undo, job.results[0])
        raise


async def abandon(work: Callable[[], T]) -> T:
    """Run `work`, which changes nothing, in a worker thread.  A cancelled caller does not wait for its end."""
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


class _Job(Generic[T]):
    """`work`, and whether it was begun: the thread begins, or the caller leaves.  `_claim` decides."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._claim = threading.Lock()
        self.ended = threading.Event()
        self.results: list[T] = []

    def run(self) -> T:
        """Run the work.  Worker thread."""
        if not self._claim.acquire(blocking=False):
            raise RuntimeError("the caller was cancelled before the work began")  # nobody receives this
        try:
            self.results.append(self._work())
            return self.results[0]
        finally:
            self.ended.set()

    def was_begun(self) -> bool:
        """Return whether the thread has begun; if it has not, it will do nothing.  Loop."""
        return not self._claim.acquire(blocking=False)
