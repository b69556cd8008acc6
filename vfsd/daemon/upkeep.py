"""Upkeep of a daemon while it serves, and when it ends: its journal, its memory, its container, its stacks.

`Compaction` replaces the journal of a workspace by an image of its state.  Steps: begin the next log; fork; the new
process writes the image of the state at that moment, and this one serves on; when the image is complete, a rename makes
it count, and the older files are removed.  If the new process fails, or this one dies, the older files count as before.
The memory that the new process copies counts for `--max-memory` (`vfsd.daemon.forks.family`).  A compaction that has no
room does not begin, and one that takes memory that a change needs is ended.

`MemoryTrim` returns freed memory to the system after a peak.  The content of a volume lives in the heap of the C
library, which keeps what is freed between two blocks that are in use: after 20 snapshots of a file of 64 MiB were
dropped, 1.3 GiB stayed resident (python -m bench.memory).  malloc_trim(3) returns whole free pages anywhere in the
heap.  A volume in memory that is near its limit does not wait for this check (`protocol.backends.memory.ledger`).

`Removal` removes what was made for a workspace, such as the container of an image, after the unmount.  The commands and
the helper in the container end first, because they would report its end as a failure.  The answer to an unmount waits
for the removal, so that it names what stays.

SIGUSR1 has a daemon write to its log where each of its threads and tasks is: for a daemon that seems to hang.
`faulthandler` writes the stacks of the threads from its C signal handler, so they appear even if no Python code runs
any more.  The serving loop, if it still runs, then calls `write_task_stacks`.

Threading: the serving loop, except for waiting and for what may take long: system calls that may wait for the disk, a
trim (about a tenth of a second for each GiB that it returns), and a removal, which nothing cancels once it has begun.
"""

from __future__ import annotations

import errno
import faulthandler
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Self, cast

import trio

from protocol.linux.syscalls import resident_bytes, trim_heap
from protocol.volume import Volume
from protocol.volume_durability import JournaledVolume, journaled
from protocol.volume_extensions import ForkableVolume, forkable, snapshotable
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
            unrecorded = self._volume.take_unrecorded()
            if unrecorded.inodes:
                await self._mounted.invalidate_caches(unrecorded)
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
            reason = f"the journal cannot be compacted ({status.failure}): `vfsd export` saves the content elsewhere"
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


# -- freed memory --------------------------------------------------------------------------------------------
_MIB: Final = 1 << 20
# A trim that returned little is not repeated: what it left is in pages that are partly in use.
_GROWN_BYTES: Final = 32 * _MIB
_UNUSED_BYTES: Final = 96 * _MIB  # the interpreter and its modules are 40 to 70 MiB of it
_UNUSED_SHARE: Final = 8  # of the content: what rounding and fragmentation cost
_PAUSE_S: Final = 5.0  # memory that is freed and used again within seconds stays


class MemoryTrim:
    """Decides when to trim: resident memory is far above what the volume accounts for, and grew since the last trim."""

    def __init__(
        self,
        volume: Volume,
        *,
        resident_bytes: Callable[[], int] = resident_bytes,
        trim: Callable[[], object] = trim_heap,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._volume = snapshotable(volume)
        self._resident_bytes = resident_bytes
        self._trim = trim
        self._clock = clock
        self._least_bytes = self._resident_bytes()  # since the last trim
        self._not_before = 0.0

    async def check(self) -> None:
        """Trim if it is worth it.  Call it about once a second."""
        if self.is_due():
            await trio.to_thread.run_sync(self._trim)
            self._least_bytes = self._resident_bytes()
            self._not_before = self._clock() + _PAUSE_S

    def is_due(self) -> bool:
        """Whether a trim would probably return memory."""
        volume = self._volume
        if volume is None or self._clock() < self._not_before:
            return False
        resident = self._resident_bytes()
        self._least_bytes = min(self._least_bytes, resident)
        if resident - self._least_bytes < _GROWN_BYTES:
            return False
        usage = volume.usage()
        if usage.live_bytes is None:
            return False  # it holds its content elsewhere, or does not know
        used = usage.live_bytes + (usage.snapshot_bytes or 0) + (usage.overhead_bytes or 0)
        return resident - used >= _UNUSED_BYTES + used // _UNUSED_SHARE


# -- the removal of what was made for a workspace ------------------------------------------------------------
_RELEASE_S: Final = 30.0  # how long what uses the container may take to end
_ANSWER_S: Final = 60.0  # after which the answer to an unmount does not wait any more
_REMOVAL_POLL_S: Final = 0.01


class Removal:
    """Removes with `discard` (`vfsd.daemon.backends.Backend.discard`), if that is given."""

    def __init__(self, discard: Callable[[], str | None] | None) -> None:
        self._discard = discard
        self._is_over = trio.Event()
        self._left: str | None = None
        self._connecting = trio.CancelScope()
        self._is_connected = False

    async def connect(
        self, attend: Callable[..., Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep the container connected, which `attend` does, until it is removed."""
        self._is_connected = True
        try:
            with trio.CancelScope() as self._connecting:
                await attend(task_status=task_status)
        finally:
            self._is_connected = False

    async def run(self, end_commands: Callable[[], Awaitable[None]], *, is_used: bool) -> None:
        """Remove, after the unmount.

        Without `is_used`, programs could not use the mount: a start that is undone leaves what was there before it,
        such as the container of a daemon that died.
        """
        if self._discard is not None and is_used:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(_RELEASE_S):
                    await end_commands()
                    self._connecting.cancel()
                    while self._is_connected:
                        await trio.sleep(_REMOVAL_POLL_S)
                self._left = await trio.to_thread.run_sync(self._discard)
        self._is_over.set()

    async def wait(self) -> str | None:
        """Wait, after the unmount, for the removal.

        Return a sentence for the user if something stays, or if that takes long.
        """
        if self._discard is None:
            return None
        with trio.move_on_after(_ANSWER_S):
            await self._is_over.wait()
            return self._left
        return (
            f"the container is still being removed: Podman has not answered for {_ANSWER_S:g} s; if that fails,"
            " `vfsd doctor` lists the container"
        )


# -- stacks --------------------------------------------------------------------------------------------------
STACKS_SIGNAL: Final = signal.SIGUSR1
_LOG_FD: Final = 2  # a fork of the daemon has its own log there


def dump_threads_on_signal() -> None:
    """Have STACKS_SIGNAL write the stacks of all threads, and then call the handler that the signal has now."""
    faulthandler.unregister(STACKS_SIGNAL)  # in a fork it counts as registered, although trio has set its own handler
    faulthandler.register(STACKS_SIGNAL, file=_LOG_FD, all_threads=True, chain=True)


def write_task_stacks() -> None:
    """Write a line for each task of the running loop, nested as their nurseries are, and a line for each frame."""
    root = trio.lowlevel.current_root_task()
    if root is not None:
        sys.stderr.write("Tasks:\n" + "\n".join(_lines(root, "  ")) + "\n")
        sys.stderr.flush()


def _lines(task: trio.lowlevel.Task, indent: str) -> Iterator[str]:
    yield f"{indent}{task.name}"
    for frame, line in task.iter_await_frames():
        yield f"{indent}    {frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda child: child.name):
            yield from _lines(child, indent + "  ")
