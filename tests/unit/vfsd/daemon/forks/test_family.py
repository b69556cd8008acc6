"""The memory of a workspace and its forks: one limit for all of them."""

from __future__ import annotations

import errno
import mmap
import os
import signal

import pytest
import trio

from protocol.backends.memory import MemoryVolume
from protocol.volume_extensions import VolumeUsage
from vfsd.daemon.backends.registry import Backend
from vfsd.daemon.forks import process
from vfsd.daemon.forks.family import ForkFamily
from vfsd.daemon.forks.forks import Forks, Steps
from vfsd.daemon.merging.lineage import MergeLog
from vfsd.daemon.snapshots.history import UndoHistory
from vfsd.operations.forks import StateId
from vfsd.wire.options import MountOptions

MIB = 1 << 20


def usage(live: int) -> VolumeUsage:
    return VolumeUsage(live_bytes=live, snapshot_bytes=0, overhead_bytes=0, max_memory=100 * MIB)


def family_of(live: int, limit: int | None = 100 * MIB) -> ForkFamily:
    return ForkFamily(limit, live)


def test_a_workspace_without_forks_needs_room_for_one_copy() -> None:
    family_of(50 * MIB).check_fork(usage(50 * MIB))
    with pytest.raises(OSError, match=r"51\.0 MiB.*takes 51\.0 of the 100\.0 MiB of --max-memory") as raised:
        family_of(51 * MIB).check_fork(usage(51 * MIB))
    assert raised.value.errno == errno.ENOMEM


def test_a_volume_without_a_limit_can_always_be_forked() -> None:
    family = family_of(1 << 50, None)
    family.check_fork(VolumeUsage(live_bytes=1 << 50))
    assert family.has_room(1 << 51, 1 << 51)


class Member:
    """A process of the family that has allocated `taken` bytes of its own."""

    def __init__(self, family: ForkFamily, live: int, taken: int) -> None:
        joined, has_joined = os.pipe()
        with family.forking():
            self.pid = os.fork()
        if not self.pid:
            family.forked()
            family.join()
            memory = bytearray(taken)
            memory[:: mmap.PAGESIZE] = b"x" * len(memory[:: mmap.PAGESIZE])
            family.publish(live + taken)
            family.check_invariants()
            os.write(has_joined, b"+")
            signal.pause()
            os._exit(0)
        assert os.read(joined, 1) == b"+"
        os.close(joined)
        os.close(has_joined)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_the_memory_of_another_process_counts_until_that_is_killed() -> None:
    family = family_of(20 * MIB)
    member = Member(family, 20 * MIB, 60 * MIB)
    try:
        assert family.others() == 1
        assert 20 * MIB + 60 * MIB <= family.bound() <= 20 * MIB + 80 * MIB, "as published"
        family.check_invariants()
        assert not family.has_room(20 * MIB, 60 * MIB)
        assert 50 * MIB <= family.bound() <= 100 * MIB, "as measured, at most what the volumes account for"
        with pytest.raises(OSError, match="with 1 related fork takes"):
            family.check_fork(usage(45 * MIB))
    finally:
        member.kill()
    family.check_fork(usage(45 * MIB))
    assert family.others() == 0
    family.check_invariants()


def test_what_this_process_removes_makes_room_at_once() -> None:
    family = family_of(20 * MIB)
    assert family.wrote(1)
    assert not family.wrote(2 * MIB), "it is time to ask"
    assert family.has_room(60 * MIB, 30 * MIB)
    assert family.wrote(1)
    assert not family.has_room(90 * MIB, 30 * MIB)
    assert not family.wrote(1), "it is full"
    assert family.has_room(60 * MIB, 30 * MIB)
    assert family.wrote(1)
    family.publish(10 * MIB)
    assert family.bound() == 10 * MIB


def test_a_slot_is_taken_again() -> None:
    family = family_of(1 * MIB)
    for _ in range(3):
        Member(family, 1 * MIB, 4 * MIB).kill()
        family.check_invariants()
    assert family.others() == 0
    family.measure()
    assert family.bound() <= 1 * MIB


async def run(*_: object, **__: object) -> None:
    pytest.fail("a fork runs")


def test_a_fork_that_the_memory_could_not_hold_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = MemoryVolume()
    base = volume.take_snapshot("base")
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 40 if name == "SC_PAGE_SIZE" else real(name))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            forks = Forks(MountOptions.of("/nowhere", "work"), Backend(volume), "native", nursery, run, None)
            with pytest.raises(OSError, match="as much memory as its source") as raised:
                forks.start(
                    "try",
                    "/nowhere/try",
                    StateId.of(base),
                    Steps(UndoHistory(), MergeLog()),
                    restores_base=False,
                    keeps_base=True,
                )
            assert raised.value.errno == errno.ENOMEM
            assert not forks.shares_memory
            assert not forks.is_base(base)
            assert forks.count == 0
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_fork_that_the_memory_could_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    process.check_memory()
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 40 if name == "SC_PAGE_SIZE" else real(name))
    with pytest.raises(OSError, match="as much memory as its source") as raised:
        process.check_memory()
    assert raised.value.errno == errno.ENOMEM
