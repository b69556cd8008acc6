"""The memory of a workspace and all its forks, which has one limit: the `--max-memory` of the workspace.

The processes that descend from one workspace by fork(2) are its family, and those that replaced one of them in an
upgrade.  They share a table (memfd_create(2)), in which each process has a slot that no other writes:

- `total`: the memory that its volume accounts for (`VolumeUsage`), shared or not;
- `growth`: memory that came into the family through this process.  It only increases, also from one process to the next
  that takes the slot.

A process measures the family by reading the proportional set size (PSS) of each member, and notes each member's growth
at that time.  From then on it knows without a system call how much memory all take at most: the measured PSS and the
growth since, and no more than all the `total`.  A page that a process makes private is growth of that process, though
it raises the PSS of others, too: only the sums are right.

Invariants:

- The family takes at most `bound`, apart from the memory that `slack_bytes` names.
- A process whose memory would exceed the limit with that sum measures the family again.  If there is still no room, its
  volume refuses what needs memory (`has_room`), and `check_fork` refuses a fork.
- A process that has ended counts until the next measurement, which comes before any refusal.

The process that writes an image of the journal (`vfsd.daemon.upkeep`) has a slot of its own, after the others.  It
only reads, and publishes the pages that it copies.  If it takes memory that a change needs, it is killed, and the
change goes on: a compaction can be repeated.

Growth is published in steps of STEP_BYTES that are written or allocated.  It is what the volume accounts for, plus page
faults.  So new memory counts twice, which only makes the next measurement earlier.

Threading: `has_room` runs on the serving loop and in threads that unpack an import, under a lock that is held for a
measurement, a few milliseconds for each member.  `forking` holds the lock across fork(2).  All else is for the serving
loop.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import resource
import select
import signal
import threading
import time
import weakref
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from protocol.volume_extensions import VolumeUsage
from vfsd.machine.runtime import process_start_ticks

_NUMBERS: Final = 4  # in a slot: process id, its start in ticks, total, growth
_TOTAL, _GROWTH = 2, 3
_NUMBER_BYTES: Final = 8
_SLOTS: Final = 4096
_WRITER: Final = _SLOTS  # the slot of the process that writes an image
_WRITER_END_S: Final = 5.0  # a killed process frees its memory
# The process that writes an image copies the objects of each inode, and a page of each block of content.
_WRITER_BYTES_OF_INODE: Final = 1024
_WRITER_SHARE: Final = 32
_MEASURED_BELOW: Final = 4  # statfs(2) measures if less than this part of the limit seems to be free
STEP_BYTES: Final = 1 << 20
# Memory of a daemon that is not its volume's: private memory of a fork, and at most that of the first process.
DAEMON_BYTES: Final = 10 << 20
INTERPRETER_BYTES: Final = 48 << 20
# A measurement takes a few milliseconds for each member, so programs that try again after ENOSPC do not cause one each
# time.
_PAUSE: Final = 20  # times what the last measurement took
_ENDED_PAUSE: Final = 4  # the same, if a member has ended
_PAGE_BYTES: Final = mmap.PAGESIZE


def slack_bytes(members: int) -> int:
    """Return what a family may take beyond its limit while nothing is freed and only writing needs memory."""
    return INTERPRETER_BYTES + members * (DAEMON_BYTES + STEP_BYTES)


class _Measured(NamedTuple):
    """A member when the family was measured: its process, the PSS of its volume, and its growth."""

    pid: int
    taken: int
    growth: int


class ForkFamily:
    """One process's access to the table of its family, as the `SharedLimit` of its volume.

    `limit`: in bytes, None for no limit.  `total`: what the volume of this process accounts for.  A new process of the
    family calls `join`.  `table`: a descriptor of the table of a relative; None to make one.  The attribute
    `table` is a descriptor of it in this process.
    """

    def __init__(self, limit: int | None, total: int, table: int | None = None) -> None:
        self.limit = limit
        self.bases: set[str] = set()
        size = (_SLOTS + 1) * _NUMBERS * _NUMBER_BYTES
        self.table = os.memfd_create("vfsd-family", os.MFD_CLOEXEC) if table is None else table
        weakref.finalize(self, os.close, self.table)
        os.ftruncate(self.table, size)
        self._table = memoryview(mmap.mmap(self.table, size)).cast("q")
        self._lock = threading.Lock()
        self._slot = -1
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._total = total  # as published
        # The part of the interpreter and its modules that all members share.
        self._interpreter = min(max(0, _proportional_bytes(os.getpid()) - total), INTERPRETER_BYTES)
        self._written = 0  # since the last step
        self._is_full = False
        self._next_measurement = 0.0
        self._next_if_ended = 0.0
        self.writers_killed = 0  # by this process, because a change needed their memory
        self._ended: dict[int, int] = {}  # processes that had ended when the family was measured, by slot
        self._measured: dict[int, _Measured] = {}
        if table is None:
            self._claim(0, total)
            self._measured[0] = _Measured(os.getpid(), total, 0)

    def _claim(self, slot: int, total: int) -> None:
        pid = os.getpid()
        start = slot * _NUMBERS
        self._table[start], self._table[start + 1] = pid, process_start_ticks(pid) or 0
        self._table[start + _TOTAL] = total
        self._slot = slot

    def join(self) -> None:
        """Take a slot for this process, which fork(2) has made.  The caller excludes other starts.

        OSError (EAGAIN) if the family has too many processes.
        """
        for slot in range(_SLOTS):
            if not self._is_alive(slot):
                self._claim(slot, self._total)
                self._faults = self._written = 0
                return
        raise OSError(errno.EAGAIN, f"the workspace has {_SLOTS} forks already: unmount some")

    def join_alone(self) -> None:
        """Take a slot for this process, which shares no memory with the others.  Errors as for `join`."""
        total, faults, self._total = self._total, self._faults, 0
        self.join()
        self._faults = faults
        self.publish(total)  # all of it is growth of the family
        self.measure()

    def forking(self) -> AbstractContextManager[object]:
        return self._lock

    def forked(self) -> None:
        self._slot = -1  # of the old process

    def _is_alive(self, slot: int) -> bool:
        pid, ticks = self._table[slot * _NUMBERS : slot * _NUMBERS + 2]
        return bool(pid) and process_start_ticks(pid) == ticks

    def _members(self) -> list[int]:
        """The slots of all processes, whether they have ended or not: slots are taken from the first on."""
        members = list(itertools.takewhile(lambda slot: self._table[slot * _NUMBERS], range(_SLOTS)))
        return [*members, _WRITER] if self._table[_WRITER * _NUMBERS] else members

    # -- what the family takes -----------------------------------------------------------------------
    def bound(self) -> int:
        """Return how many bytes the family takes at most, as far as it is published."""
        members = self._members()
        totals = sum(
            self._table[slot * _NUMBERS + _TOTAL]
            for slot in members
            if self._ended.get(slot) != self._table[slot * _NUMBERS]
        )
        return min(totals, sum(map(self._bound_of, members)))

    def _bound_of(self, slot: int) -> int:
        """Return what a member had when it was measured, and its growth since then."""
        start = slot * _NUMBERS
        pid, growth = self._table[start], self._table[start + _GROWTH]
        measured = self._measured.get(slot)
        if measured is None:
            return growth
        taken = measured.taken if measured.pid == pid else 0
        return taken + growth - measured.growth

    def measure(self) -> None:
        """Measure all members; forget those that have ended."""
        began = time.monotonic()
        growths = {slot: self._table[slot * _NUMBERS + _GROWTH] for slot in self._members()}
        alive = {slot for slot in growths if self._is_alive(slot)}
        own = DAEMON_BYTES + self._interpreter // max(1, len(alive))
        self._ended = {slot: self._table[slot * _NUMBERS] for slot in growths.keys() - alive}
        measured = {}
        for slot, growth in growths.items():
            pid, _, taken = self._table[slot * _NUMBERS : slot * _NUMBERS + _TOTAL + 1]
            if slot not in alive:
                pid = taken = 0
            elif len(alive) > 1:  # else nothing is shared
                # After an upgrade, the interpreter is not shared either.
                taken = min(taken, max(0, _proportional_bytes(pid) - own))
            measured[slot] = _Measured(pid, taken, growth)
        self._measured = measured
        now = time.monotonic()
        self._next_measurement = now + _PAUSE * (now - began)
        self._next_if_ended = now + _ENDED_PAUSE * (now - began)

    def others(self) -> int:
        """Return the number of other living processes of the family."""
        return sum(slot not in (self._slot, _WRITER) and self._is_alive(slot) for slot in self._members())

    # -- this process --------------------------------------------------------------------------------
    def publish(self, total: int) -> None:
        """Publish what this process has taken since the last call; `total` is what its volume accounts for now."""
        total = max(0, total)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = self._slot * _NUMBERS
        self._table[start + _GROWTH] += max(0, total - self._total) + (faults - self._faults) * _PAGE_BYTES
        self._table[start + _TOTAL] = self._total = total
        self._faults, self._written = faults, 0

    def wrote(self, count: int) -> bool:
        self._written += max(count, _PAGE_BYTES)
        return self._written < STEP_BYTES and not self._is_full

    def has_room(self, total: int, count: int) -> bool:
        limit = self.limit
        if limit is None or self._slot < 0:
            return True
        if not self._is_full and max(self._written, total - self._total) + count < STEP_BYTES:
            return True
        with self._lock:
            self.publish(total)
            room = limit - count - self.bound()
            if room < 0 and (not self._is_full or self._may_measure()):
                self.measure()
                room = limit - count - self.bound()
            if room < 0 and self._kill_writer():
                self.measure()
                room = limit - count - self.bound()
            self._is_full = room < 0
            return not self._is_full

    def room(self, total: int) -> int | None:
        limit = self.limit
        if limit is None or self._slot < 0:
            return None
        with self._lock:
            self.publish(total)
            # Memory that came since the last measurement counts twice, so it may look full long before it is.
            if limit - self.bound() < limit // _MEASURED_BELOW and self._may_measure():
                self.measure()
            return max(0, limit - self.bound())

    def _may_measure(self) -> bool:
        now = time.monotonic()
        if now >= self._next_measurement:
            return True
        return now >= self._next_if_ended and any(
            self._bound_of(slot) and not self._is_alive(slot) for slot in self._members()
        )

    def check_fork(self, usage: VolumeUsage) -> None:
        """OSError (ENOMEM) if the limit leaves no room for a fork that comes to share nothing with this process."""
        needed = total(usage)
        self._check_room(
            needed,
            needed,
            f"a fork may come to need as much memory as its source, {_mib(needed)} MiB",
            "unmount forks, drop snapshots, or mount the source with a larger --max-memory",
        )

    def check_upgrade(self, usage: VolumeUsage) -> None:
        """OSError (ENOMEM) if the limit leaves no room for a process that replaces this one, and shares nothing."""
        needed = total(usage)
        self._check_room(
            needed,
            needed,
            f"the new daemon shares no memory with forks, and needs {_mib(needed)} MiB",
            "merge or unmount forks, or drop snapshots",
        )

    def _check_room(self, taken: int, needed: int, purpose: str, advice: str) -> None:
        """OSError (ENOMEM) if the limit leaves no room for `needed` bytes; `taken` is what the volume accounts for."""
        with self._lock:
            self.publish(taken)
            if self.limit is None or self.bound() + needed <= self.limit:
                return
            self.measure()
            if (bound := self.bound()) + needed > self.limit:
                raise OSError(
                    errno.ENOMEM,
                    f"{purpose}, and this workspace{_with_forks(self.others())} takes {_mib(bound)} of the"
                    f" {_mib(self.limit)} MiB of --max-memory: {advice}",
                )

    # -- the process that writes an image ------------------------------------------------------------
    def check_writer(self, usage: VolumeUsage) -> None:
        """OSError (ENOMEM) if the limit leaves no room for a process that writes an image of the state."""
        taken = total(usage)
        inodes = (usage.files or 0) + (usage.directories or 0)
        needed = min(taken, inodes * _WRITER_BYTES_OF_INODE + taken // _WRITER_SHARE)
        self._check_room(
            taken,
            needed,
            f"writing an image of the state takes about {_mib(needed)} MiB of memory",
            "the journal stays as it is; remove files, drop snapshots, or mount with a larger --max-memory",
        )

    def write_in(self, pid: int) -> None:
        """Count the process `pid`, which was forked to write an image and waits.  The caller excludes another one."""
        start = _WRITER * _NUMBERS
        self._table[start + _TOTAL] = self._total
        self._table[start + 1] = process_start_ticks(pid) or 0
        self._table[start] = pid
        self._measured[_WRITER] = _Measured(pid, 0, self._table[start + _GROWTH])

    def publish_writer(self) -> None:
        """In the process that writes an image: publish what it has copied."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if self._slot != _WRITER:
            self._slot, self._faults = _WRITER, 0
        self._table[_WRITER * _NUMBERS + _GROWTH] += (faults - self._faults) * _PAGE_BYTES
        self._faults = faults

    def _kill_writer(self) -> bool:
        """Kill the process that writes an image, if there is one; return whether there was."""
        pid = self._table[_WRITER * _NUMBERS]
        if not pid:
            return False
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it has ended, or no descriptor is left
            return False
        try:
            if not self._is_alive(_WRITER):
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(_WRITER_END_S * 1000)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        self.writers_killed += 1
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError if the table contradicts itself."""
        assert self._table[self._slot * _NUMBERS] == os.getpid(), "another process has this slot"
        for slot in self._members():
            growth = self._table[slot * _NUMBERS + _GROWTH]
            assert growth >= 0
            assert slot not in self._measured or growth >= self._measured[slot].growth, "growth decreased"
            assert self._bound_of(slot) >= 0
            assert self._table[slot * _NUMBERS + _TOTAL] >= 0


def _proportional_bytes(pid: int) -> int:
    """Return a process's proportional set size of anonymous memory; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            sizes = {name: size for name, _, size in (line.partition(":") for line in file)}
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = sizes.get("Pss_Anon") or sizes.get("Pss") or "0 kB"  # Pss_Anon: since Linux 5.9
    return int(found.split()[0]) * 1024


def total(usage: VolumeUsage) -> int:
    """Return the bytes that `--max-memory` bounds."""
    return (usage.live_bytes or 0) + (usage.snapshot_bytes or 0) + (usage.overhead_bytes or 0)


def _with_forks(others: int) -> str:
    return f" with {others} related fork{'s' if others > 1 else ''}" if others else ""


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
