"""GroupSync: waits until a journal is on disk, with one fdatasync(2) for all calls that wait at the same time.

A sync writes everything that was appended before it began.  So a call that comes while one runs waits for the next one,
together with all others that come meanwhile: the more calls wait, the fewer syncs each of them costs.

Threading: the serving loop; the syncs run one at a time in a worker thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from protocol.journal.log import Log


class GroupSync:
    """The syncs of one workspace's journal."""

    def __init__(self) -> None:
        self._running: trio.Event | None = None  # set when the sync that runs has ended
        self._thread = trio.CapacityLimiter(1)  # its own: other work in threads may take all of the usual ones

    async def wait(self, log: Log, end: int) -> None:
        """Return when everything before the offset `end` of `log` is on disk.  OSError.  Is not cancelled."""
        with trio.CancelScope(shield=True):
            while log.synced < end or log.failure is not None:
                if self._running is not None:
                    await self._running.wait()
                    continue
                self._running = trio.Event()
                try:
                    await trio.to_thread.run_sync(log.sync, limiter=self._thread)
                finally:
                    self._running.set()
                    self._running = None
