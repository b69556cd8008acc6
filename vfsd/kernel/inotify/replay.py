"""The thread that repeats changes for inotify, from start to end.

Threading: `run` is called on the loop; the system calls run in a thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import stat
import threading
from collections.abc import Callable, Sequence
from typing import cast

import trio

from protocol.volume import Volume
from protocol.volume_extensions import CacheInvalidation
from vfsd.kernel.inotify.answers import Answers
from vfsd.kernel.inotify.calls import ReplayAbortedError, repeat_changes
from vfsd.kernel.inotify.refresh import FileState, refresh_files

_logger = logging.getLogger(__name__)


class Replay:
    """Raises events for changes of `volume`, mounted at `mountpoint`.  Implements `Impersonator`."""

    def __init__(self, volume: Volume, mountpoint: str) -> None:
        self._answers = Answers(volume)
        self._mountpoint = mountpoint
        self.thread_id = 0  # an attribute, not a property: engines read it with every request
        self._lock = trio.Lock()
        self._drops = 0  # calls of `drop`
        self._stopped = threading.Event()  # stops the latest thread
        self._finished = trio.Event()  # set when the latest thread has ended
        self._finished.set()

    @property
    def volume(self) -> Volume:
        # `Answers` has only the methods that `Impersonator` names.
        return cast("Volume", self._answers)

    async def run(self, invalidation: CacheInvalidation) -> None:
        """Raise the events for `invalidation`, after `invalidate_kernel_caches`.

        Logs failures and raises none.  Repeats at most 10,000 changes.
        """
        if not invalidation.entries and not invalidation.inodes:
            return
        lost = dict.fromkeys(
            change.old for change in invalidation.entries if not stat.S_ISDIR(invalidation.modes.get(change.old, 0))
        )
        orphans = list(filter(self._answers.is_orphan, lost))
        drops = self._drops
        await self._run(
            lambda stopped: repeat_changes(self._mountpoint, invalidation, orphans, self._answers, stopped),
            is_dropped=lambda: self._drops != drops,
        )

    def drop(self) -> None:
        """Stop the replay that runs at its next step, and drop those that wait: their events are not raised."""
        if self._lock.locked():
            _logger.info("changes are not shown to inotify watchers: there were too many to be shown in time")
        self._drops += 1
        self._stopped.set()

    async def refresh(self, files: Sequence[FileState], open_root: Callable[[], int]) -> None:
        """Give the kernel the sizes and times of `files` (see `vfsd.kernel.inotify.refresh`).  Logs failures."""
        if files:
            await self._run(lambda _stopped: refresh_files(open_root, files))

    async def _run(
        self, work: Callable[[threading.Event], object], *, is_dropped: Callable[[], bool] = lambda: False
    ) -> None:
        """Run `work` in a thread whose requests change nothing, unless `is_dropped` when its turn has come."""
        async with self._lock:
            # A thread that was abandoned may still be in a system call, whose requests must not reach the volume.
            await self._finished.wait()
            if is_dropped():
                return
            self._finished = trio.Event()
            self._stopped = stopped = threading.Event()
            arguments = (work, stopped, trio.lowlevel.current_trio_token(), self._finished)
            threading.Thread(target=self._work, args=arguments, name="vfsd replay", daemon=True).start()
            try:
                # Cancelling abandons the thread, because it may wait for a loop that is shutting down.
                await self._finished.wait()
            finally:
                stopped.set()

    def _work(
        self,
        work: Callable[[threading.Event], object],
        stopped: threading.Event,
        loop: trio.lowlevel.TrioToken,
        finished: trio.Event,
    ) -> None:
        self.thread_id = threading.get_native_id()
        try:
            work(stopped)
        except ReplayAbortedError as error:
            level = logging.INFO if stopped.is_set() else logging.WARNING
            _logger.log(level, "changes are not shown to inotify watchers: %s", error)
        except Exception:
            _logger.exception("changes are not shown to inotify watchers")
        finally:
            self._answers.step = None
            self.thread_id = 0
            with contextlib.suppress(trio.RunFinishedError):
                loop.run_sync_soon(finished.set)
