"""`--fsync always`: an answer waits for the disk and delays no other request; syncs are shared."""

from __future__ import annotations

import errno
import struct
import threading
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol.backends.memory import MemoryVolume
from protocol.journal.directory import Journal
from protocol.journal.log import Log
from protocol.journal.records import Extent
from protocol.volume import ROOT_INODE, SUPERUSER
from tests.support.journals import HEADER, FileInMemory, JournalInMemory, assert_same_volume, replayed
from tests.unit.vfsd.kernel.engines.native.test_wire import Kernel, converse, request
from vfsd.daemon.backends.persistence import GroupSync
from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.wire import Opcode


class SlowFile(FileInMemory):
    """A log whose syncs wait for `opened`, and that knows what they have written."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.syncs = 0
        self.durable = len(self.content)
        self.fails = False

    def overwrites_in_place(self) -> bool:
        return False  # `durable` is the end of the last record

    def sync(self) -> None:
        end = len(self.content)
        assert self.opened.wait(20)
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        self.syncs += 1
        self.durable = end


class AlwaysJournal(JournalInMemory):
    """A journal with `--fsync always` in a `SlowFile`, of a volume that an engine serves."""

    policy = "always"

    def __init__(self, volume: MemoryVolume) -> None:
        self.file: SlowFile = SlowFile()
        self.log = Log(self.file, HEADER, Extent(len(self.file.content), 1, False, 0), "always")
        self.file.opened.set()
        volume.keep_journal(cast("Journal", self), is_new=True)
        volume.sync_with(GroupSync().wait)
        self.file.opened.clear()


def directory(name: str, unique: int) -> bytes:
    return request(Opcode.MKDIR, body=struct.pack("=II", 0o755, 0) + name.encode() + b"\0", unique=unique)


async def answered(kernel: Kernel) -> tuple[int, int]:
    """Return the number of the next request that is answered, and its error."""
    _, error, unique = wire.FUSE_OUT_HEADER.unpack_from(await kernel.channel.recv(1 << 20))
    return unique, -error


@pytest.fixture
def journal(volume: MemoryVolume) -> AlwaysJournal:
    return AlwaysJournal(volume)


def test_a_change_is_answered_when_it_is_on_disk_and_others_are_answered_meanwhile(
    volume: MemoryVolume, journal: AlwaysJournal
) -> None:
    async def dialogue(kernel: Kernel, _: Any) -> None:
        await kernel.channel.send(directory("d", 2))
        await kernel.channel.send(request(Opcode.GETATTR, body=bytes(16), unique=4))
        await kernel.channel.send(request(Opcode.STATFS, unique=6))
        await kernel.channel.send(request(Opcode.INTERRUPT, body=struct.pack("=Q", 2), unique=8))
        assert [await answered(kernel), await answered(kernel)] == [(4, 0), (6, 0)]
        assert volume.lookup(ROOT_INODE, b"d"), "it is made, and others may see it"
        await wait_all_tasks_blocked(0.01)
        journal.file.opened.set()
        assert await answered(kernel) == (2, 0), "an interrupt does not take a change back"
        assert journal.file.durable == journal.log.end

    converse(volume, dialogue)


def test_changes_that_wait_at_the_same_time_share_a_sync(volume: MemoryVolume, journal: AlwaysJournal) -> None:
    async def dialogue(kernel: Kernel, _: Any) -> None:
        for number in range(1, 21):
            await kernel.channel.send(directory(f"d{number}", 2 * number))
        await kernel.channel.send(request(Opcode.STATFS, unique=100))
        assert await answered(kernel) == (100, 0)
        journal.file.opened.set()
        assert sorted([await answered(kernel) for _ in range(20)]) == [(2 * number, 0) for number in range(1, 21)]
        assert journal.file.durable == journal.log.end
        assert journal.file.syncs <= 3

    converse(volume, dialogue)
    assert_same_volume(volume, replayed(journal.batches()))


def test_each_answer_comes_after_its_sync(volume: MemoryVolume, journal: AlwaysJournal) -> None:
    journal.file.opened.set()

    async def dialogue(kernel: Kernel, _: Any) -> None:
        for number in range(1, 30):
            await kernel.channel.send(directory(f"d{number}", 2 * number))
            assert await answered(kernel) == (2 * number, 0)
            assert journal.file.durable == journal.log.end

    converse(volume, dialogue)


def test_after_a_failed_sync_the_change_and_later_ones_fail(volume: MemoryVolume, journal: AlwaysJournal) -> None:
    journal.file.fails = True
    journal.file.opened.set()

    async def dialogue(kernel: Kernel, _: Any) -> None:
        for unique in (2, 4):
            await kernel.channel.send(directory(f"d{unique}", unique))
            assert await answered(kernel) == (unique, errno.EIO)
        await kernel.channel.send(request(Opcode.STATFS, unique=6))
        assert await answered(kernel) == (6, 0)

    converse(volume, dialogue)


def test_without_an_engine_that_waits_a_change_syncs_itself(volume: MemoryVolume, journal: AlwaysJournal) -> None:
    journal.file.opened.set()
    volume.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER)
    assert journal.file.durable == journal.log.end
    assert volume.unsynced(of_request=False) is None


def test_all_that_wait_for_a_log_that_fails_get_the_error(journal: AlwaysJournal) -> None:
    journal.log.defers_syncs = True
    journal.log.require(4)
    journal.log.append([b"data"])
    journal.file.fails = True
    failed = []

    async def wait(syncs: GroupSync) -> None:
        with pytest.raises(OSError, match=r"Input/output error|no change is accepted"):
            await syncs.wait(journal.log, journal.log.end)
        failed.append(True)

    async def main() -> None:
        syncs = GroupSync()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(wait, syncs)
            await wait_all_tasks_blocked(0.01)
            journal.file.opened.set()

    trio.run(main)
    assert len(failed) == 5
