"""Compaction: replaces the journal of a workspace by an image of its state.

Steps: begin the next log; fork; the new process writes the image of the state at that moment, and this one serves on;
when the image is complete, a rename makes it count, and the older files are removed.  If the new process fails, or this
one dies, the older files count as before.

The memory that the new process copies counts for `--max-memory` (`vfsd.daemon.forks.family`).  A compaction that has no
room does not begin, and one that takes memory that a change needs is ended.

Threading: the serving loop, except for waiting and for system calls that may wait for the disk.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
from typing import Final, Self, cast

import trio

from protocol.volume_durability import JournaledVolume, journaled
from protocol.volume_extensions import ForkableVolume, forkable
from vfsd.daemon.forks.family import ForkFamily
from vfsd.daemon.forks.forks import Forks
from vfsd.daemon.forks.process import fork_writer
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.machine.logs import log_failure

_logger = logging.getLogger(__name__)
_CHECK_S: Final = 1.0
_RETRY_S: Final = 60.0  # after a compaction for which there was no memory


class Compaction:
    """The compaction of one workspace's journal."""

    def __init__(self, mounted: MountedVolume, volume: JournaledVolume, forks: Forks) -> None:
        self._mounted = mounted
        self._volume = volume
        self._forks = forks

    @classmethod
    def of(cls, mounted: MountedVolume, forks: Forks) -> Self | None:
        """Return the compaction of a volume that has a journal and can be forked; None for others."""
        volume = journaled(mounted.volume)
        return None if volume is None or forkable(mounted.volume) is None else cls(mounted, volume, forks)

    async def attend(self) -> None:
        """Compact the journal whenever it has grown enough, until cancelled."""
        while True:
            await trio.sleep(_CHECK_S)
            try:
                await self._compact_if_large()
            except OSError as error:
                self._mounted.uncompacted = error.strerror
                log_failure(_logger, "compacting the journal", error, level=logging.WARNING)
                if error.errno == errno.ENOMEM:
                    await trio.sleep(_RETRY_S)

    async def _compact_if_large(self) -> None:
        if not self._volume.wants_image:
            return
        async with self._mounted.compaction_lock:
            if self._volume.wants_image:  # still: an upgrade may have given the journal away meanwhile
                before, after = await self._compact()
                _logger.info("compacted the journal from %d to %d bytes", before, after)

    async def compact(self) -> tuple[int, int]:
        """Compact now; return the size of the journal on disk before and after, in bytes.

        OSError if the image cannot be written, ENOMEM if there is no memory for it; the journal then stays as it is.
        """
        async with self._mounted.compaction_lock:
            return await self._compact()

    async def _compact(self) -> tuple[int, int]:
        """Do what `compact` does, with the lock held."""
        status = self._volume.journal_status()
        if status.failure is not None:
            reason = f"the journal cannot be compacted ({status.failure}): export the content, and mount it again"
            raise OSError(errno.EIO, reason, status.directory)
        before = status.size_bytes
        async with self._mounted.change_lock:  # no import is in preparation
            forked = cast(ForkableVolume, self._volume)
            limit = self._limit(forked)
            number = self._volume.begin_image()
            progress = (lambda: None) if limit is None else limit.publish_writer
            write = functools.partial(self._volume.write_image, number, progress)
            started = (lambda _: None) if limit is None else limit.write_in
            killed = 0 if limit is None else limit.writers_killed
            pid, pidfds = fork_writer(forked, write, self._mounted.mountpoint, started)
        with trio.CancelScope(shield=True):  # a process that is not waited for stays as a zombie
            ended = await _ended(pid, pidfds)
            finish = functools.partial(self._volume.finish_image, number, is_complete=ended == 0)
            await trio.to_thread.run_sync(finish)
            self._volume.keep_room()
        is_killed = limit is not None and limit.writers_killed > killed
        self._forks.leave_family(forked)
        if ended:
            raise self._out_of_memory() if is_killed else self._failure(os.waitstatus_to_exitcode(ended))
        self._mounted.uncompacted = None
        return before, self._volume.journal_status().size_bytes

    def _limit(self, volume: ForkableVolume) -> ForkFamily | None:
        """Return the limit that the new process counts for; None without one.  ENOMEM if there is no room for it."""
        usage = volume.usage()
        if usage.max_memory is None:
            return None
        family = self._forks.family(volume, usage)
        try:
            family.check_writer(usage)
        except OSError:
            self._forks.leave_family(volume)
            raise
        return family

    def _out_of_memory(self) -> OSError:
        reason = (
            "the workspace needed the memory (--max-memory) that the process took which wrote the image; the journal"
            " stays as it is, and is compacted later"
        )
        return OSError(errno.ENOMEM, reason, self._volume.journal_status().directory)

    def _failure(self, code: int) -> OSError:
        """Describe why the process that writes the image ended with `code`."""
        directory = self._volume.journal_status().directory
        if code < 0:
            reason = f"the process that wrote the image was killed by {signal.Signals(-code).name}"
            return OSError(errno.EIO, f"{reason}; the journal stays as it is: try again", directory)
        if code in {errno.ENOSPC, errno.EDQUOT}:
            advice = "the journal stays as it is: free space on its file system, and try again"
            return OSError(code, f"no space for an image of the state beside the journal; {advice}", directory)
        reason = f"the image of the journal could not be written ({os.strerror(code)})"
        return OSError(errno.EIO, f"{reason}; the journal stays as it is, and the daemon's log may say more", directory)


async def _ended(pid: int, pidfds: list[int]) -> int:
    """Wait until a child has ended; return its status, 0 for success.  Closes its descriptors."""
    try:
        await trio.lowlevel.wait_readable(pidfds[0])
        return os.waitpid(pid, 0)[1]
    finally:
        for each in pidfds:
            os.close(each)
