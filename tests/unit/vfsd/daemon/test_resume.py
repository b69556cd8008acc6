"""What a daemon hands on to the next one: its encoding, and its place in the memory of a keeper."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest
import trio

from vfsd.daemon.merging.lineage import MergeLog
from vfsd.daemon.resume import FORMAT, Resume, Slots, decoded, encoded
from vfsd.daemon.snapshots.history import HistoryState, PrunedRecord, UndoHistory
from vfsd.daemon.upgrading.giving import NewDaemon
from vfsd.daemon.upgrading.messages import Channel, Failed
from vfsd.operations.forks import Ancestor, MergedState, StateId

AT = 4096
STATE = StateId("fork-1", 7, 1)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def test_everything_is_read_as_it_was_handed_on() -> None:
    merges = MergeLog()
    merges.record(3, [MergedState("instance", "name", STATE, (b"sub\xff",))])
    resume = Resume(
        options='{"name": "\udce9"}',
        negotiated="{}",
        labels=((1, 2, "turn \udce9"),),
        history=UndoHistory((HistoryState(1, "restore r1"), HistoryState()), 1),
        merges=merges.encoded().decode(),
        pruned=(PrunedRecord("s", 1, 2, is_waiting=True, is_lost=False),),
        instance="instance",
        kept_bases=("fork-1",),
        forks_made=2,
        family_limit=1 << 30,
        family_bases=("fork-1",),
        source="source",
        base="fork-1",
        ancestors=(Ancestor("other", "source", STATE),),
        twin=(StateId("base", 1, 2), STATE),
    )
    again = decoded(encoded(resume))
    assert again == resume
    assert again.merge_log is not None
    assert again.merge_log.now == merges.now
    assert again.base_state == StateId("base", 1, 2)


@pytest.mark.parametrize("data", [b'{"format": 9, "version": "9.9"}', b'{"version": "9.9", "labels": []}'])
def test_what_another_version_hands_on_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(OSError, match=rf"version 9\.9 .* reads format {FORMAT}: unmount it") as raised:
        decoded(data)
    assert raised.value.errno == errno.EPROTONOSUPPORT


def test_the_next_daemon_reads_what_was_written_last(memory: int) -> None:
    slots = Slots(memory, AT)
    assert slots.read() == Resume()
    for number in range(4):
        slots.write(Resume(instance=str(number)))
        again = Slots(memory, AT)
        assert again.read() == Resume(instance=str(number))
    again.write(Resume(instance="of the next daemon"))
    assert Slots(memory, AT).read().instance == "of the next daemon"


def test_what_is_too_large_leaves_what_was_written_before(memory: int) -> None:
    slots = Slots(memory, AT)
    slots.write(Resume(instance="before"))
    with pytest.raises(OSError, match="too many"):
        slots.write(Resume(instance="x" * (2 << 20)))
    assert slots.read() == Slots(memory, AT).read() == Resume(instance="before")


@pytest.mark.parametrize("written", range(1, 60, 7))
def test_a_change_that_was_not_completed_leaves_the_one_before(memory: int, written: int) -> None:
    slots = Slots(memory, AT)
    slots.write(Resume(instance="before"))
    size = os.fstat(memory).st_size
    slots.write(Resume(instance="after"))
    after = os.pread(memory, 4 << 20, AT)
    assert after[0], "the second change is in the first slot"
    os.pwrite(memory, bytes(1000), AT)
    os.ftruncate(memory, size)
    os.pwrite(memory, after[:written], AT)
    assert Slots(memory, AT).read().instance == "before"


@pytest.mark.parametrize(
    "end", [lambda theirs: theirs.send(Failed("no memory")), lambda theirs: theirs.close()], ids=["fails", "dies"]
)
def test_a_new_daemon_that_does_not_serve_and_has_no_keeper_is_ended(end: Callable[[Channel], None]) -> None:
    trio.run(_wait_for_serving, end)


async def _wait_for_serving(end: Callable[[Channel], None]) -> None:
    ours, theirs = (Channel(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    process = subprocess.Popen(["sleep", "600"])
    new = NewDaemon(process, ours)
    new._pidfd = os.pidfd_open(process.pid)
    end(theirs)
    try:
        with trio.fail_after(60):
            assert not await new.is_serving()
        assert process.returncode is not None
    finally:
        process.kill()
        process.wait()
        os.close(new._pidfd)
        ours.close()
        theirs.close()
