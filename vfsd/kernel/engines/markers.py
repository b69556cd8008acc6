"""Markers: requests that this process makes itself to learn that the loop has read every earlier request.

The kernel queues requests in order, and the loop reads them in order.  So when the loop reads a marker, it has read
every request that was queued before the marker, even if the device is never empty.

A marker is a statfs(2) of the mount, which the kernel always forwards.  A worker thread makes it, because the loop has
to answer it, and the loop recognizes it by the thread's id in the request's header.
"""

from __future__ import annotations

import contextlib
import os
import threading

import trio


class Markers:
    """The markers of one mount at `mountpoint`."""

    def __init__(self, mountpoint: str) -> None:
        self._mountpoint = mountpoint
        self._was_read: dict[int, bool] = {}  # by the id of the thread that waits

    def record(self, thread_id: int) -> None:
        """Record that the loop has read a statfs request of the thread `thread_id`."""
        if thread_id in self._was_read:
            self._was_read[thread_id] = True

    async def pass_one(self) -> bool:
        """Send a marker and wait for its answer.  Return whether the loop has read it.

        False: the path leads to another mount now, or the mount is gone.
        """
        # Abandoned on cancellation: a loop that is ending does not answer.
        return await trio.to_thread.run_sync(self._send, abandon_on_cancel=True)

    def _send(self) -> bool:
        thread_id = threading.get_native_id()
        self._was_read[thread_id] = False
        with contextlib.suppress(OSError):
            os.statvfs(self._mountpoint)
        return self._was_read.pop(thread_id)
