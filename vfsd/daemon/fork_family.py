"""The memory of a workspace and all its forks, which has one limit: the `--max-memory` of the workspace.

The processes that descend from one workspace by fork(2) are its family.  They share a table (mmap(2) with MAP_SHARED),
in which each process has a slot that no other writes.  A slot contains two figures in bytes:

- the *charge*: the memory that the process's volume accounts for (`VolumeUsage`), or the PSS of the process's anonymous
  memory if that is less.  In the PSS, memory that k processes share counts as a k-th of it for each of them, so the sum
  of the charges is what the family needs.  What the volume allocates after the measurement counts in full;
- the *grant*: what the volume may allocate without asking again.

Invariants (`check_invariants`):

1. When a grant is given, the charges and grants of the living processes add up to at most the limit.  So what the
   family's volumes account for stays within it.  The sum can exceed the limit only by memory that stops being shared
   without an allocation (Python writes to objects that it reads); the next measurement notices this, and from then on
   no grant is given until the sum is below the limit again.
2. A volume's allowance is what it had accounted for when its charge was published, plus its grant.
3. A fork is made only if the family's charges and the whole content of the forked process fit in the limit, because in
   the worst case the fork comes to share nothing with it.

A process publishes the grant that it wants, then reads the other slots, and withdraws if the sum exceeds the limit.  Of
two processes that ask at the same time at least one sees the other's grant, so no lock is needed; both may withdraw and
ask again.  A process that was killed leaves its slot; its pid and start time show that it has ended.

Threading: the serving loop; `measure` on a worker thread; `request` also on the thread that unpacks an import.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
import time
from typing import Final, NamedTuple

import trio

from protocol.volume_extensions import ForkableVolume, MemoryAllowance, VolumeUsage
from vfsd.machine.runtime import process_start_ticks

_SLOT_NUMBERS: Final = 4  # those of `_Slot`
_NUMBER_BYTES: Final = 8
_SLOTS: Final = 4096
# A process measures itself again after so many page faults, which make memory private, or after this time, because
# memory also stops being shared when another process of the family ends.
_FAULTS: Final = 256
_AGE_S: Final = 30.0
_PUBLISH_S: Final = 1.0
_GRANT_BYTES: Final = 4 << 20  # at least, if so much is free: asking reads a file in /proc for each process
_ATTEMPTS: Final = 3
_REFUSED_S: Final = 0.05  # so long a refusal holds, so that a program that retries does not read /proc all the time


class _Slot(NamedTuple):
    pid: int
    start_ticks: int
    charge_bytes: int
    grant_bytes: int


class ForkFamily:
    """One process's access to the table of its family, whose limit is `limit` bytes.

    A new process of the family calls `join`.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._table = memoryview(mmap.mmap(-1, (_SLOTS * _SLOT_NUMBERS + 1) * _NUMBER_BYTES)).cast("q")
        self._slot = 0
        self._proportional_bytes: int | None = None  # PSS at the last measurement
        # What the volume accounted for at the last measurement, or at the fork.
        self._measured_bytes: int | None = 0
        self._highest_bytes = 0  # that the volume is known to have accounted for since then
        self._faults = 0
        self._measured_at = 0.0
        self._grant = 0
        self._lock = threading.Lock()
        self._refused = (0.0, 0)  # until when, and from how many bytes on
        self._publish(0, 0)

    def join(self) -> None:
        """Take a slot for this process, which fork(2) has made.  The caller excludes other starts.

        Until the first measurement, what the process had at the fork is charged to its source.

        OSError (EAGAIN) if the family has too many processes.
        """
        self._lock = threading.Lock()
        for slot in range(_SLOTS):
            if not _is_alive(self._read(slot)):
                self._slot, self._proportional_bytes, self._faults, self._measured_at = slot, 0, 0, 0.0
                self._measured_bytes, self._highest_bytes, self._refused = None, 0, (0.0, 0)
                self._publish(0, 0)
                self._table[-1] = max(self._table[-1], slot)
                return
        raise OSError(errno.EAGAIN, f"the workspace has {_SLOTS} forks already: unmount some")

    def _read(self, slot: int) -> _Slot:
        return _Slot(*self._table[slot * _SLOT_NUMBERS : (slot + 1) * _SLOT_NUMBERS].tolist())

    def _publish(self, charge: int, grant: int) -> None:
        self._grant = grant
        values = _Slot(os.getpid(), process_start_ticks(os.getpid()) or 0, charge, grant)
        for offset, number in enumerate(values):
            self._table[self._slot * _SLOT_NUMBERS + offset] = number

    # -- this process --------------------------------------------------------------------------------
    @property
    def is_due(self) -> bool:
        """Whether this process's memory has changed enough since the last measurement to measure it again."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        return faults >= _FAULTS or time.monotonic() - self._measured_at >= _AGE_S

    def measure(self, total_bytes: int) -> None:
        """Measure how much of this process's memory others share; its volume accounts for `total_bytes`.

        Takes some milliseconds; for a worker thread.
        """
        with self._lock:
            self._measure(total_bytes)

    def _measure(self, total_bytes: int) -> None:
        self._faults, self._measured_at = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.monotonic()
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            found = [int(line.split()[1]) << 10 for line in file if line.startswith("Pss_Anon:")]
        self._proportional_bytes = found[0] if found else None  # since Linux 5.9
        self._measured_bytes = self._highest_bytes = total_bytes

    def _charge(self, total_bytes: int) -> int:
        if self._measured_bytes is None:
            self._measured_bytes = total_bytes
        self._highest_bytes = max(self._highest_bytes, total_bytes)
        if self._proportional_bytes is None:
            return total_bytes
        return min(total_bytes, self._proportional_bytes + max(0, total_bytes - self._measured_bytes))

    def publish(self, total_bytes: int) -> MemoryAllowance:
        """Publish the charge of a volume that accounts for `total_bytes`, without a grant."""
        with self._lock:
            charge = self._charge(total_bytes)
            self._publish(charge, 0)
            return MemoryAllowance(total_bytes, total_bytes + max(0, self._free(charge)))

    def request(self, total_bytes: int, needed_bytes: int) -> MemoryAllowance:
        """See `RequestMemory`."""
        with self._lock:
            until, refused_bytes = self._refused
            if needed_bytes >= refused_bytes and time.monotonic() < until:
                return MemoryAllowance(total_bytes, total_bytes)
            if total_bytes < self._highest_bytes:  # of what was freed, others may share a part
                self._measure(total_bytes)
            charge = self._charge(total_bytes)
            wanted = needed_bytes - total_bytes
            free = 0
            for _ in range(_ATTEMPTS):
                free = self._free(charge)
                if free < wanted:
                    break
                grant = max(wanted, min(free, max(_GRANT_BYTES, free // 8)))
                self._publish(charge, grant)
                if self._free(charge + grant) >= 0:
                    return MemoryAllowance(total_bytes + grant, total_bytes + free)
                self._publish(charge, 0)
            self._publish(charge, 0)
            self._refused = (time.monotonic() + _REFUSED_S, needed_bytes)
            return MemoryAllowance(total_bytes, total_bytes + max(0, free))

    async def follow(self, volume: ForkableVolume) -> None:
        """Publish about once a second what `volume` takes, and give back what it was granted and did not use."""
        while self._limit is not None:
            published_bytes = self.divide(volume)
            while True:
                await trio.sleep(_PUBLISH_S)
                total_bytes = total(volume.usage())
                if self.is_due:
                    await trio.to_thread.run_sync(self.measure, total_bytes)
                    break
                if self._grant or total_bytes != published_bytes:
                    break

    def divide(self, volume: ForkableVolume) -> int:
        """Have `volume` ask the family before it allocates more; return the bytes that it accounts for now."""
        total_bytes = total(volume.usage())
        if self._limit is not None:
            volume.share_memory_limit(self.publish(total_bytes), self.request)
        return total_bytes

    # -- the family ----------------------------------------------------------------------------------
    def _others(self) -> list[_Slot]:
        """Return the slots of the other living processes of the family."""
        slots = map(self._read, range(self._table[-1] + 1))
        return [each for number, each in enumerate(slots) if number != self._slot and _is_alive(each)]

    def _free(self, taken: int) -> int:
        """Return what the other processes leave of the limit if this one takes `taken` bytes; negative if too much."""
        assert self._limit is not None
        return self._limit - taken - sum(each.charge_bytes + each.grant_bytes for each in self._others())

    def check_fork(self, usage: VolumeUsage) -> None:
        """OSError (ENOMEM) if the limit leaves no room for a fork that comes to share nothing with this process."""
        limit = self._limit
        if limit is None:
            return
        others = self._others()
        needed = total(usage)
        if not others:
            self._proportional_bytes = None
        taken = self._charge(needed) + sum(each.charge_bytes for each in others)
        if taken + needed > limit:
            raise OSError(
                errno.ENOMEM,
                f"a fork may come to need as much memory as its source, {_mib(needed)} MiB, and this workspace"
                f"{_with_forks(len(others))} takes {_mib(taken)} of the {_mib(limit)} MiB of --max-memory: unmount"
                " forks, drop snapshots, or mount the source with a larger --max-memory",
            )

    def check_invariants(self) -> None:
        """Raise AssertionError if this process's slot contradicts what the process knows, or names another process."""
        slot = self._read(self._slot)
        assert slot.pid == os.getpid(), "the slot of another process"
        assert slot.grant_bytes == self._grant, "another grant"
        assert slot.charge_bytes >= 0
        assert self._slot <= self._table[-1], "a slot beyond the highest one"


def total(usage: VolumeUsage) -> int:
    """Return the bytes that `--max-memory` bounds."""
    return (usage.live_bytes or 0) + (usage.snapshot_bytes or 0) + (usage.overhead_bytes or 0)


def _is_alive(slot: _Slot) -> bool:
    return slot.pid != 0 and process_start_ticks(slot.pid) == slot.start_ticks


def _with_forks(others: int) -> str:
    return f" with {others} related fork{'s' if others > 1 else ''}" if others else ""


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
