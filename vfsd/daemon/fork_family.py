"""The memory of a workspace and all its forks, which has one limit: the `--max-memory` of the workspace.

The processes that descend from one workspace by fork(2) are its family.  They share a table (mmap(2) with MAP_SHARED),
in which each process has a slot that no other writes.  A slot contains the process's *charge*: the memory that its
volume accounts for (`VolumeUsage`), times PSS / RSS of its anonymous memory.  So memory that k processes share counts
as a k-th of it for each of them, and the sum of the charges is what the family needs.

Invariant: a fork is made only if the family's charges and the whole content of the forked process fit in the limit,
because in the worst case the fork comes to share nothing with it.

Threading: the serving loop, apart from `measure`.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import time
from typing import Final

from protocol.volume_extensions import VolumeUsage
from vfsd.machine.runtime import process_start_ticks

_SLOT_NUMBERS: Final = 3  # process id, its start in ticks, charge in bytes
_NUMBER_BYTES: Final = 8
_SLOTS: Final = 4096
# A process measures itself again after so many page faults, which make memory private, or after this time, because
# memory also stops being shared when another process of the family ends.
_FAULTS: Final = 256
_AGE_S: Final = 30.0


class ForkFamily:
    """One process's access to the table of its family.  A new process of the family calls `join`."""

    def __init__(self) -> None:
        self._table = memoryview(mmap.mmap(-1, _SLOTS * _SLOT_NUMBERS * _NUMBER_BYTES)).cast("q")
        self._slot = 0
        self._share = 1.0  # PSS / RSS
        self._faults = 0
        self._measured_at = 0.0
        self._write(0)

    def join(self) -> None:
        """Take a slot for this process, which fork(2) has made.  The caller excludes other starts.

        OSError (EAGAIN) if the family has too many processes.
        """
        for slot in range(_SLOTS):
            pid, ticks, _ = self._read(slot)
            if not pid or process_start_ticks(pid) != ticks:
                self._slot, self._share, self._faults, self._measured_at = slot, 0.0, 0, 0.0
                self._write(0)
                return
        raise OSError(errno.EAGAIN, f"the workspace has {_SLOTS} forks already: unmount some")

    def _read(self, slot: int) -> list[int]:
        return self._table[slot * _SLOT_NUMBERS : (slot + 1) * _SLOT_NUMBERS].tolist()

    def _write(self, charge: int) -> None:
        pid = os.getpid()
        for offset, number in enumerate((pid, process_start_ticks(pid) or 0, charge)):
            self._table[self._slot * _SLOT_NUMBERS + offset] = number

    # -- this process --------------------------------------------------------------------------------
    @property
    def is_due(self) -> bool:
        """Whether this process's memory has changed enough since the last measurement to measure it again."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        return faults >= _FAULTS or time.monotonic() - self._measured_at >= _AGE_S

    def measure(self) -> None:
        """Measure how much of this process's memory others share.  Takes some milliseconds; for a worker thread."""
        self._faults, self._measured_at = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.monotonic()
        sizes = {}
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            for line in file:
                name, _, size = line.partition(":")
                sizes[name] = size.split()[:1]
        proportional, resident = (int((sizes.get(name) or ["0"])[0]) for name in ("Pss_Anon", "Anonymous"))
        self._share = proportional / resident if proportional and resident else 1.0  # Pss_Anon: since Linux 5.9

    def charge(self, usage: VolumeUsage) -> int:
        """Publish the charge of this process, and return it in bytes."""
        charge = int(total(usage) * self._share)
        self._write(charge)
        return charge

    # -- the family ----------------------------------------------------------------------------------
    def others(self) -> list[int]:
        """Return the charge of each other living process of the family, in bytes."""
        found = []
        for slot in range(_SLOTS):
            pid, ticks, charge = self._read(slot)
            if pid and slot != self._slot and process_start_ticks(pid) == ticks:
                found.append(charge)
        return found

    def check_fork(self, usage: VolumeUsage) -> None:
        """OSError (ENOMEM) if the limit leaves no room for a fork that comes to share nothing with this process."""
        limit = usage.max_memory
        if limit is None:
            return
        others = self.others()
        if not others:
            self._share = 1.0
        taken, needed = self.charge(usage) + sum(others), total(usage)
        if taken + needed > limit:
            raise OSError(
                errno.ENOMEM,
                f"a fork may come to need as much memory as its source, {_mib(needed)} MiB, and this workspace"
                f"{_with_forks(len(others))} takes {_mib(taken)} of the {_mib(limit)} MiB of --max-memory: unmount"
                " forks, drop snapshots, or mount the source with a larger --max-memory",
            )


def total(usage: VolumeUsage) -> int:
    """Return the bytes that `--max-memory` bounds."""
    return (usage.live_bytes or 0) + (usage.snapshot_bytes or 0) + (usage.overhead_bytes or 0)


def _with_forks(others: int) -> str:
    return f" with {others} related fork{'s' if others > 1 else ''}" if others else ""


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
