"""Upkeep of a daemon: compaction of a journal that an upgrade gives away, trims of memory, removals."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from protocol.backends.memory import MemoryVolume
from protocol.volume import SUPERUSER
from protocol.volume_extensions import CacheInvalidation
from vfsd.daemon.upkeep import Compaction, MemoryTrim, Removal


class LargeJournal:
    """The journal of a volume that wants to be compacted, until it is given away."""

    def __init__(self) -> None:
        self.wants_image = True

    def take_unrecorded(self) -> CacheInvalidation:
        return CacheInvalidation()

    def journal_status(self) -> Any:
        raise AssertionError("the journal of another daemon")


def test_a_journal_that_was_given_away_while_the_compaction_waited_is_left_alone() -> None:
    trio.run(_wait_for_an_upgrade)


async def _wait_for_an_upgrade() -> None:
    volume = LargeJournal()
    mounted = SimpleNamespace(compaction_lock=trio.Lock())
    compaction = Compaction(cast("Any", mounted), cast("Any", volume), cast("Any", None))
    async with trio.open_nursery() as nursery:
        async with mounted.compaction_lock:
            nursery.start_soon(compaction.attend)
            with trio.fail_after(60):
                while not mounted.compaction_lock.statistics().tasks_waiting:
                    await trio.sleep(0.01)
            volume.wants_image = False
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


MIB = 1 << 20


class Machine:
    """A clock and resident memory that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.resident_mib = 40
        self.after_trim_mib = 0
        self.trims = 0

    def trim(self) -> None:
        self.trims += 1
        self.resident_mib = self.after_trim_mib

    def checks(self, volume: Any) -> MemoryTrim:
        return MemoryTrim(
            volume, resident_bytes=lambda: self.resident_mib * MIB, trim=self.trim, clock=lambda: self.now_s
        )


@pytest.fixture
def machine() -> Machine:
    return Machine()


def filled(mib: int) -> MemoryVolume:
    volume = MemoryVolume()
    inode = volume.mknod(1, b"f", 0o100644, 0, SUPERUSER).inode
    for number in range(mib):
        volume.write(inode, number * MIB, bytes([1]) * MIB)
    return volume


def test_memory_that_content_uses_is_not_trimmed(machine: Machine) -> None:
    trim = machine.checks(filled(64))
    machine.resident_mib = 40 + 64 + 10
    assert not trim.is_due()


def test_freed_memory_is_trimmed_once(machine: Machine) -> None:
    trim = machine.checks(filled(8))
    machine.resident_mib, machine.after_trim_mib = 1000, 60
    trio.run(trim.check)
    assert machine.trims == 1
    machine.now_s += 100
    trio.run(trim.check)
    assert machine.trims == 1


def test_a_trim_that_returned_nothing_is_not_repeated(machine: Machine) -> None:
    trim = machine.checks(filled(8))
    machine.resident_mib = machine.after_trim_mib = 1000
    for _ in range(3):
        trio.run(trim.check)
        machine.now_s += 100
    assert machine.trims == 1
    machine.resident_mib += 40
    trio.run(trim.check)
    assert machine.trims == 2


def test_there_is_a_pause_between_two_trims(machine: Machine) -> None:
    trim = machine.checks(filled(8))
    machine.resident_mib, machine.after_trim_mib = 1000, 60
    trio.run(trim.check)
    machine.resident_mib = 1000
    trio.run(trim.check)
    assert machine.trims == 1
    machine.now_s += 10
    trio.run(trim.check)
    assert machine.trims == 2


def test_a_volume_without_snapshots_is_never_trimmed(machine: Machine) -> None:
    class Plain:
        capabilities = type("None", (), {"snapshots": False})

    trim = machine.checks(Plain())
    machine.resident_mib = 1000
    assert not trim.is_due()


_FREE = """
import platform
from protocol.linux.syscalls import resident_bytes, trim_heap
from vfsd.machine import interpreter
interpreter.set_up("x")
blocks = [bytes(1) + bytes([1]) * (128 * 1024 - 1) for _ in range(1024)]
del blocks[: -1]  # the last one keeps the heap from shrinking by itself
before = resident_bytes()
trim_heap()
print(platform.libc_ver()[0], (before - resident_bytes()) >> 20)
"""


def test_a_trim_returns_free_memory_below_blocks_in_use() -> None:
    result = subprocess.run([sys.executable, "-c", _FREE], capture_output=True, text=True, check=True)
    libc, _, returned_mib = result.stdout.rpartition(" ")
    if libc != "glibc":
        pytest.skip(f"the C library is {libc or 'not glibc'}: it has no malloc_trim")
    assert int(returned_mib) > 64


_REFILL = """
import os
from protocol.backends.memory import MemoryVolume
from protocol.linux.syscalls import resident_bytes
from protocol.volume import ROOT_INODE, SUPERUSER
from vfsd.machine import interpreter
LIMIT = 32 << 20
interpreter.set_up("x")
volume = MemoryVolume(max_memory=LIMIT)
def fill(prefix, size):
    for number in range(LIMIT // size):
        try:
            inode = volume.mknod(ROOT_INODE, b"%s%d" % (prefix, number), 0o100644, 0, SUPERUSER).inode
            volume.forget(inode, 1)
            volume.write(inode, 0, os.urandom(size))
        except OSError:
            return number
before = resident_bytes()
small = fill(b"small", 4096)
for number in range(small):
    if number % 10:
        volume.unlink(ROOT_INODE, b"small%d" % number)
assert small and fill(b"large", 128 * 1024)
print((resident_bytes() - before) * 100 // LIMIT)
"""


def test_large_files_in_the_place_of_small_ones_take_no_more_memory_than_the_limit() -> None:
    result = subprocess.run([sys.executable, "-c", _REFILL], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 140  # percent; 160 if the holes of the small files are not returned


def run_removal(steps: list[str], *, is_used: bool) -> str | None:
    """Remove while a connection is kept and a command runs, and note each end in `steps`; return the answer."""

    def discard() -> str:
        steps.append("removed")
        return "it stays"

    async def attend(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            steps.append("disconnected")

    async def end_commands() -> None:
        steps.append("commands ended")

    async def main() -> str | None:
        removal = Removal(discard)
        async with trio.open_nursery() as nursery:
            await nursery.start(removal.connect, attend)
            nursery.start_soon(lambda: removal.run(end_commands, is_used=is_used))
            answer = await removal.wait()
            nursery.cancel_scope.cancel()
        return answer

    return trio.run(main)


def test_commands_and_the_connection_end_before_the_container_is_removed_and_the_answer_says_what_stays() -> None:
    steps: list[str] = []
    assert run_removal(steps, is_used=True) == "it stays"
    assert steps == ["commands ended", "disconnected", "removed"]


def test_a_start_that_is_undone_removes_nothing_that_was_there_before() -> None:
    steps: list[str] = []
    assert run_removal(steps, is_used=False) is None
    assert "removed" not in steps


def test_the_answer_does_not_wait_for_ever_and_not_at_all_if_there_is_nothing_to_remove() -> None:
    async def main(removal: Removal) -> str | None:
        return await removal.wait()

    clock = trio.testing.MockClock(autojump_threshold=0)
    assert "still being removed" in (trio.run(main, Removal(lambda: None), clock=clock) or "")
    assert trio.run(main, Removal(None)) is None
