"""The memory of a workspace and its forks: one limit for all of them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import socket
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest

from protocol.volume_extensions import MemoryAllowance, VolumeUsage
from vfsd.daemon.fork_family import ForkFamily

MIB = 1 << 20


LIMIT = 100 * MIB


def usage(live: int) -> VolumeUsage:
    return VolumeUsage(live_bytes=live, snapshot_bytes=0, overhead_bytes=0, max_memory=LIMIT)


def test_a_workspace_without_forks_needs_room_for_one_copy() -> None:
    family = ForkFamily(LIMIT)
    family.check_fork(usage(50 * MIB))
    with pytest.raises(OSError, match=r"51\.0 MiB.*takes 51\.0 of the 100\.0 MiB of --max-memory") as raised:
        family.check_fork(usage(51 * MIB))
    assert raised.value.errno == errno.ENOMEM


def test_a_volume_without_a_limit_can_always_be_forked() -> None:
    ForkFamily(None).check_fork(VolumeUsage(live_bytes=1 << 50))


class Member:
    """A process of a family that has the limit LIMIT, and does what it is told."""

    def __init__(self, family: ForkFamily) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            family.join()
            theirs.send(b"joined")
            while order := theirs.recv(1000):
                what, *numbers = msgspec.json.decode(order)
                answer = getattr(family, what)(*numbers)
                family.check_invariants()
                theirs.send(msgspec.json.encode(answer.bytes if isinstance(answer, MemoryAllowance) else answer))
            os._exit(0)
        theirs.close()
        assert self._socket.recv(1000) == b"joined"

    def do(self, what: str, *numbers: int) -> Any:
        self._socket.send(msgspec.json.encode([what, *numbers]))
        return msgspec.json.decode(self._socket.recv(1000))

    def end(self, number: int = signal.SIGKILL) -> None:
        os.kill(self._pid, number)
        os.waitpid(self._pid, 0)
        self._socket.close()


@pytest.fixture
def family() -> Iterator[tuple[ForkFamily, Member]]:
    first = ForkFamily(LIMIT)
    second = Member(first)
    second.do("publish", 0)
    yield first, second
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        second.end()


def test_what_another_process_has_allocated_counts_until_that_ends(family: tuple[ForkFamily, Member]) -> None:
    first, second = family
    assert second.do("publish", 40 * MIB) == 40 * MIB
    first.check_fork(usage(30 * MIB))
    with pytest.raises(OSError, match="with 1 related fork takes"):
        first.check_fork(usage(31 * MIB))
    second.end()
    first.check_fork(usage(50 * MIB))


def test_memory_that_two_processes_share_counts_half_for_each() -> None:
    first = ForkFamily(1 << 50)
    second = Member(first)
    try:
        second.do("measure", 1 << 40)  # more than it has: its PSS counts
        second.do("publish", 1 << 40)
        free = first.publish(0).reachable_bytes
        with open("/proc/self/status", encoding="ascii") as file:
            resident = next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:"))
        assert 0 < (1 << 50) - free < resident * 3 // 4
        second.do("publish", (1 << 40) + MIB)
        assert free - first.publish(0).reachable_bytes == MIB, "what is allocated after the measurement is private"
    finally:
        second.end()


def test_two_processes_are_never_granted_more_than_the_limit(family: tuple[ForkFamily, Member]) -> None:
    first, second = family
    totals = [0, 0]
    random = Random(1)
    ask = [lambda *numbers: first.request(*numbers).bytes, functools.partial(second.do, "request")]
    allowances = [0, 0]
    for _ in range(200):
        which = random.randrange(2)
        needed = totals[which] + random.randrange(1, 8 * MIB)
        if needed > allowances[which]:
            allowances[which] = ask[which](totals[which], needed)
        if needed <= allowances[which]:
            totals[which] = needed
        assert sum(max(pair) for pair in zip(totals, allowances, strict=True)) <= LIMIT
    assert sum(totals) > LIMIT - 8 * MIB


def test_grants_that_are_not_used_are_given_back(family: tuple[ForkFamily, Member]) -> None:
    first, second = family
    assert second.do("request", 0, 90 * MIB) >= 90 * MIB
    assert first.request(0, 20 * MIB).bytes == 0
    second.do("publish", MIB)
    time.sleep(0.06)  # a refusal holds for 50 ms
    assert first.request(0, 20 * MIB).bytes >= 20 * MIB


def test_the_grant_of_a_killed_process_is_free_again(family: tuple[ForkFamily, Member]) -> None:
    first, second = family
    assert second.do("request", 0, 90 * MIB) >= 90 * MIB
    second.end()
    assert first.request(0, 90 * MIB).bytes >= 90 * MIB


def test_processes_that_ask_at_the_same_time_get_no_more_than_the_limit() -> None:
    first = ForkFamily(LIMIT)
    members = [Member(first) for _ in range(4)]
    try:
        for _ in range(20):
            for member in members:
                member.do("publish", 0)
            for member in members:
                member._socket.send(msgspec.json.encode(["request", 0, 30 * MIB]))
            granted = [msgspec.json.decode(member._socket.recv(1000)) for member in members]
            assert sum(granted) <= LIMIT
    finally:
        for member in members:
            member.end()
