"""A helper that sends wrong replies, too much, or nothing costs an EIO and its link, but no memory and no daemon."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from protocol.backends.container.agent.helper_transport import helper_command, helper_program
from protocol.backends.container.agent.link import STDERR, STDOUT, AgentLink, Output
from protocol.backends.container.agent.replies import entries_in
from protocol.backends.container.agent.volume import AgentVolume
from protocol.backends.container.helper import files
from protocol.backends.container.helper.wire import ENTRY, FORGET, HEADER, MAGIC, Op, pack, unpack
from protocol.backends.container.inode_map import IdMap, swapped
from protocol.backends.host import listings
from protocol.volume import COOKIE_END, AttributeChanges, Caller
from tests.support.agents import LocalStream, local_agent
from tests.support.rights import needs_root

ME = Caller(0, 0)
FILE = (5, stat.S_IFREG | 0o644, 1, 0, 0, 0, 3, 8, 1, 2, 3, 0, 0, 0, 0, 0)
DIRECTORY = (6, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 8, 1, 2, 3, 0, 0, 0, 0, 0)
Answer = Callable[[int, int, tuple[int, ...], list[bytes]], bytes | None]


class Scripted:
    """A helper whose answers a test writes: `answer(number, op, numbers, strings)` is sent, None for nothing."""

    def __init__(self, answer: Answer, begins: bytes = MAGIC) -> None:
        self.answer = answer
        self.asked: list[tuple[int, tuple[int, ...], list[bytes]]] = []
        self.closed = False
        self._started = False
        self._begins = begins
        self._buffer = b""
        self._send, self._output = trio.open_memory_channel[Output](10000)

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if not self._started:
            self._started = True
            self.say(self._begins)
            return
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            length, number, op = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            numbers, strings = unpack(self._buffer[HEADER.size : end])
            self._buffer = self._buffer[end:]
            self.asked.append((op, numbers, strings))
            said = None if op == Op.FORGET else self.answer(number, op, numbers, strings)
            if said is not None:
                self.say(said)

    def send_nowait(self, data: bytes) -> int:
        return 0

    def say(self, data: bytes, channel: Any = STDOUT) -> None:
        self._send.send_nowait(Output(channel, data))

    def forgets(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for op, _, strings in self.asked:
            if op == Op.FORGET:
                for inode, count in FORGET.iter_unpack(strings[0]):
                    found[inode] = found.get(inode, 0) + count
        return found

    def end(self) -> None:
        self._send.close()

    async def receive(self, max_bytes: int = 65536) -> Output | None:
        try:
            return await self._output.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            return None

    async def aclose(self) -> None:
        self.closed = True
        self._send.close()
        self._output.close()


@asynccontextmanager
async def linked(helper: Any, *, timeout_s: float = 60) -> AsyncIterator[AgentVolume]:
    link = AgentLink(helper, timeout_s=timeout_s, start_s=5)
    try:
        await link.start(b"the program")
    except BaseException:
        await helper.aclose()
        raise
    async with link.running():
        yield AgentVolume(link)


def link_of(volume: AgentVolume) -> AgentLink:
    return volume._link


async def result(answer: Any) -> Any:
    return await answer if isinstance(answer, Awaitable) else answer


async def fails(code: int, answer: Any) -> None:
    with pytest.raises(OSError, check=lambda error: error.errno == code):
        await result(answer)


def always(body: Callable[[int], bytes]) -> Answer:
    return lambda number, _op, _numbers, _strings: body(number)


def impatient() -> trio.testing.MockClock:
    """A clock that goes on whenever everybody waits."""
    return trio.testing.MockClock(autojump_threshold=0)


def attributes(*, at: int, value: int, of: tuple[int, ...] = FILE) -> tuple[int, ...]:
    return (*of[:at], value, *of[at + 1 :])


def entry(cookie: int, name: bytes, of: tuple[int, ...] = FILE, length: int | None = None) -> bytes:
    return ENTRY.pack(cookie, *of, len(name) if length is None else length) + name


# -- frames that are none ----------------------------------------------------------------------
NONSENSE: dict[str, Callable[[int], bytes]] = {
    "a reply to nothing": lambda number: pack(number + 1, 0, FILE),
    "a length of gigabytes": lambda number: HEADER.pack(2**32 - 1, number, 0),
    "a length of more than was asked for": lambda number: HEADER.pack(100_000, number, 0),
    "two replies": lambda number: pack(number, 0, FILE) * 2,
    "noise": lambda _number: os.urandom(1000),
    "half a body": lambda number: HEADER.pack(3, number, 0) + b"\1\0\0",
    "strings that are not there": lambda number: HEADER.pack(8, number, 0) + b"\0\0\1\0\xff\xff\xff\xff",
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=list(NONSENSE))
def test_what_is_no_reply_ends_the_link_and_all_is_eio(said: Callable[[int], bytes]) -> None:
    async def main() -> None:
        async with linked(Scripted(always(said))) as volume:
            # Where a good reply comes first, it counts.
            with (
                pytest.raises(OSError, check=lambda error: error.errno == errno.EIO)
                if (said is not NONSENSE["two replies"])
                else trio.CancelScope()
            ):
                await volume.getattr(5)
            await link_of(volume).lost.wait()
            assert link_of(volume).reason
            for ask in (volume.getattr(5), volume.read(5, 0, 10), volume.readdir(1, 0), volume.unlink(1, b"x")):
                await fails(errno.EIO, ask)
            volume.forget(5, 1)

    trio.run(main)


def test_what_begins_like_no_helper_is_none() -> None:
    async def main() -> None:
        for begins in (b"HTTP/1.1 400 Bad Request\r\n", b"vfsd-helper 9\n"):
            helper = Scripted(always(lambda number: pack(number, 0)), begins)
            with pytest.raises(OSError, match="not a helper"):
                async with linked(helper):
                    pass
            assert helper.closed

    trio.run(main)


def test_a_helper_that_never_begins_is_given_up() -> None:
    async def main() -> None:
        helper = Scripted(always(lambda number: pack(number, 0)), b"")
        with pytest.raises(TimeoutError):
            async with linked(helper):
                pass
        assert helper.closed

    trio.run(main, clock=impatient())


def test_silence_is_eio_after_the_timeout_and_ends_the_link() -> None:
    async def main() -> None:
        async with linked(Scripted(lambda *_: None), timeout_s=20) as volume:
            asked = trio.current_time()
            async with trio.open_nursery() as nursery:
                for inode in range(2, 12):
                    nursery.start_soon(fails, errno.EIO, volume.getattr(inode))
            assert 20 <= trio.current_time() - asked < 30
            assert "no answer" in link_of(volume).reason

    trio.run(main, clock=impatient())


def test_gigabytes_of_anything_are_not_kept() -> None:
    async def main() -> None:
        helper = Scripted(lambda *_: None)
        async with linked(helper) as volume, trio.open_nursery() as nursery:
            nursery.start_soon(fails, errno.EIO, volume.read(5, 0, 1 << 20))
            await trio.testing.wait_all_tasks_blocked()
            before = tracemalloc.get_traced_memory()[0]
            noise = b"E" * 65536
            for _ in range(2000):
                helper.say(noise, STDERR)
                await trio.testing.wait_all_tasks_blocked()
            assert len(link_of(volume).stderr) <= 2000
            helper.say(HEADER.pack(2**31, 1, 0))
            for _ in range(2000):
                try:
                    helper.say(noise)
                except trio.BrokenResourceError:
                    break
                await trio.testing.wait_all_tasks_blocked()
                if link_of(volume).lost.is_set():
                    break
            assert tracemalloc.get_traced_memory()[0] - before < 4 << 20

    tracemalloc.start()
    try:
        trio.run(main)
    finally:
        tracemalloc.stop()


# -- replies that make no sense ----------------------------------------------------------------
LIES: dict[str, tuple[Callable[[AgentVolume], Any], bytes]] = {
    "too few attributes": (lambda v: v.getattr(5), pack(1, 0, FILE[:-1])),
    "strings for attributes": (lambda v: v.getattr(5), pack(1, 0, (), (b"attributes",))),
    "attributes of another inode": (lambda v: v.getattr(5), pack(1, 0, attributes(at=0, value=6))),
    "the root below itself": (lambda v: v.lookup(1, b"x"), pack(1, 0, attributes(at=0, value=1, of=DIRECTORY))),
    "inode 0": (lambda v: v.lookup(1, b"x"), pack(1, 0, attributes(at=0, value=0))),
    "an inode of 64 bits": (lambda v: v.lookup(1, b"x"), pack(1, 0, attributes(at=0, value=-1))),
    "no type": (lambda v: v.lookup(1, b"x"), pack(1, 0, attributes(at=1, value=0o644))),
    "a type that there is not": (lambda v: v.lookup(1, b"x"), pack(1, 0, attributes(at=1, value=0o170644))),
    "negative links": (lambda v: v.lookup(1, b"x"), pack(1, 0, attributes(at=2, value=-1))),
    "a user of 33 bits": (lambda v: v.lookup(1, b"x"), pack(1, 0, attributes(at=3, value=2**32))),
    "a negative size": (lambda v: v.lookup(1, b"x"), pack(1, 0, attributes(at=6, value=-1))),
    "a file for a directory": (lambda v: v.mkdir(1, b"x", 0o755, ME), pack(1, 0, FILE)),
    "a directory for a file": (lambda v: v.mknod(1, b"x", 0o100644, 0, ME), pack(1, 0, DIRECTORY)),
    "more than was to be read": (lambda v: v.read(5, 0, 10), pack(1, 0, (), (b"x" * 11,))),
    "no data": (lambda v: v.read(5, 0, 10), pack(1, 0)),
    "more written than there was": (lambda v: v.write(5, 0, b"abc"), pack(1, 0, (4,))),
    "less than nothing written": (lambda v: v.write(5, 0, b"abc"), pack(1, 0, (-1,))),
    "a negative offset": (lambda v: v.seek(5, 0, os.SEEK_DATA), pack(1, 0, (-1,))),
    "more copied than was asked for": (lambda v: v.copy_range(5, 0, 7, 0, 10), pack(1, 0, (11,))),
    "a link without an end": (lambda v: v.readlink(5), pack(1, 0, (), (b"x" * 5000,))),
    "blocks of no size": (lambda v: v.statfs(), pack(1, 0, (0, 1, 1, 1, 1, 255))),
    "half an entry": (lambda v: v.readdir(1, 0), pack(1, 0, (), (entry(3, b"name")[:-1],))),
    "a name with a slash": (lambda v: v.readdir(1, 0), pack(1, 0, (), (entry(3, b"a/b"),))),
    "a name that goes up": (lambda v: v.readdir(1, 0), pack(1, 0, (), (entry(3, b".."),))),
    "an empty name": (lambda v: v.readdir(1, 0), pack(1, 0, (), (entry(3, b""),))),
    "a name with a NUL": (lambda v: v.readdir(1, 0), pack(1, 0, (), (entry(3, b"a\0b"),))),
    "a name of 256 bytes": (lambda v: v.readdir(1, 0), pack(1, 0, (), (entry(3, b"x" * 256),))),
    "a cookie twice": (lambda v: v.readdir(1, 0), pack(1, 0, (), (entry(3, b"a") + entry(3, b"b"),))),
    "a cookie from before": (lambda v: v.readdir(1, 9), pack(1, 0, (), (entry(4, b"a"),))),
    "no page": (lambda v: v.readdir(1, 0), pack(1, 0, (1,))),
    "attributes of another after a change": (
        lambda v: v.setattr(5, AttributeChanges(mode=0o600)),
        pack(1, 0, attributes(at=0, value=8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ask", "said"), LIES.values(), ids=list(LIES))
def test_a_reply_that_makes_no_sense_is_eio_and_ends_the_link(ask: Callable[[AgentVolume], Any], said: bytes) -> None:
    async def main() -> None:
        async with linked(Scripted(always(lambda _number: said))) as volume:
            await fails(errno.EIO, ask(volume))
            assert link_of(volume).lost.is_set()

    trio.run(main)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (errno.ENOENT, errno.ENOENT),
        (errno.ENOSPC, errno.ENOSPC),
        (errno.ENOSYS, errno.EOPNOTSUPP),  # a kernel would never ask again
        (errno.EINTR, errno.EIO),
        (512, errno.EIO),  # ERESTARTSYS, which is the kernel's own
        (65535, errno.EIO),
    ],
)
def test_an_errno_is_passed_on_unless_it_would_mean_more(said: int, told: int) -> None:
    async def main() -> None:
        async with linked(Scripted(always(lambda number: pack(number, said)))) as volume:
            await fails(told, volume.getattr(5))
            assert not link_of(volume).lost.is_set()

    trio.run(main)


def test_names_that_are_none_never_reach_the_helper() -> None:
    async def main() -> None:
        helper = Scripted(always(lambda number: pack(number, 0, FILE)))
        async with linked(helper) as volume:
            for name in (b"..", b".", b"a/b", b"/", b"", b"a\0b", b"../x"):
                for ask in (
                    lambda name=name: volume.unlink(1, name),
                    lambda name=name: volume.rmdir(1, name),
                    lambda name=name: volume.rename(1, b"x", 1, name),
                    lambda name=name: volume.rename(1, name, 1, b"x"),
                    lambda name=name: volume.mkdir(1, name, 0o755, ME),
                    lambda name=name: volume.link(5, 1, name),
                ):
                    with pytest.raises(OSError, check=lambda error: error.errno != errno.EIO):
                        await ask()
            assert helper.asked == []

    trio.run(main)


# -- listings ----------------------------------------------------------------------------------
def test_readers_continue_after_more_directories_were_listed_than_the_helper_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "MOST_READ_DIRECTORIES", 3)
    helper = files.Files(os.fsencode(tmp_path))
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    numbers = {one.entry.name: one.entry.inode for one in entries_in(helper.readdir(1, 0, 100)[1][0], 0)}

    def listed(cookie: int) -> list[tuple[bytes, int]]:
        page = helper.readdir(numbers[b"a"], cookie, 100)[1][0]
        return [(one.entry.name, one.entry.cookie) for one in entries_in(page, cookie)]

    readers = []
    for number in range(20):
        (tmp_path / "a" / f"{number}").touch()
        entries = listed(0)
        readers.append((entries[: number // 2 + 3], {name for name, _ in entries}))
        if number % 5 == 0:
            for name in (b"b", b"c", b"d"):
                helper.readdir(numbers[name], 0, 100)
    (tmp_path / "a" / "late").touch()
    for seen, there in readers:
        names = [name for name, _ in (*seen, *listed(seen[-1][1])) if name in there]
        assert sorted(names) == sorted(there)
    assert listed(0)[-1][1] < COOKIE_END


# -- lookups are given back --------------------------------------------------------------------
def test_what_nobody_took_from_a_listing_is_given_back() -> None:
    def answer(number: int, op: int, numbers: tuple[int, ...], _: list[bytes]) -> bytes:
        if op == Op.READDIR:
            page = b"".join(
                entry(3 + at, b"%d" % at, attributes(at=0, value=10 + at)) for at in range(5) if not numbers[1]
            )
            return pack(number, 0, (), (page,))
        return pack(number, 0)

    async def main() -> None:
        helper = Scripted(answer)
        async with linked(helper) as volume:
            page = list(await volume.readdir(1, 0))
            assert [one.name for one in page] == [b"0", b"1", b"2", b"3", b"4"]
            seen = await result(volume.lookup(1, b"2"))
            assert seen.inode == 12
            assert [op for op, _, _ in helper.asked] == [Op.READDIR]  # one trip for both
            await volume.unlink(1, b"0")  # what was listed may have changed
            await trio.testing.wait_all_tasks_blocked()
            assert helper.forgets() == {10: 1, 11: 1, 13: 1, 14: 1}

    trio.run(main)


def test_an_interrupted_lookup_is_given_back_when_its_answer_comes() -> None:
    late: list[bytes] = []

    def answer(number: int, *_: Any) -> None:
        late.append(pack(number, 0, FILE))

    async def main() -> None:
        helper = Scripted(answer)
        async with linked(helper) as volume:
            with trio.move_on_after(1) as scope:
                await result(volume.lookup(1, b"x"))
            assert scope.cancelled_caught
            helper.say(late[0])
            await trio.testing.wait_all_tasks_blocked()
            assert helper.forgets() == {5: 1}
            assert not link_of(volume).lost.is_set()

    trio.run(main, clock=impatient())


def test_an_interrupted_request_that_is_answered_at_once_has_its_answer() -> None:
    asked: list[int] = []

    async def main() -> None:
        helper = Scripted(lambda number, *_: asked.append(number))
        async with linked(helper) as volume:
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()
                seen: list[Any] = []

                async def ask() -> None:
                    with scope:
                        seen.append(await volume.mkdir(1, b"d", 0o755, ME))

                nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
                await trio.sleep(0.5)
                helper.say(pack(asked[0], 0, DIRECTORY))
            assert [one.inode for one in seen] == [6]

    trio.run(main, clock=impatient())


# -- many at once ------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_thousand_requests_are_under_way_together_and_memory_for_them_is_bounded() -> None:
    waiting: list[tuple[int, int]] = []
    most = 0

    def answer(number: int, _op: int, numbers: tuple[int, ...], _strings: list[bytes]) -> None:
        waiting.append((number, numbers[0]))

    async def main() -> None:
        nonlocal most
        helper = Scripted(answer)
        async with linked(helper) as volume:
            found: list[int] = []

            async def ask(inode: int) -> None:
                found.append((await volume.getattr(inode)).inode)

            async with trio.open_nursery() as nursery:
                for inode in range(2, 1002):
                    nursery.start_soon(ask, inode)
                await trio.testing.wait_all_tasks_blocked()
                while waiting:
                    most = max(most, len(waiting))
                    for number, inode in reversed(waiting):
                        helper.say(pack(number, 0, attributes(at=0, value=inode)))
                    waiting.clear()
                    await trio.testing.wait_all_tasks_blocked()
            assert sorted(found) == list(range(2, 1002))
            assert 100 < most <= 256

    trio.run(main)


def test_when_the_helper_ends_everybody_who_waits_gets_eio_at_once() -> None:
    async def main() -> None:
        helper = Scripted(lambda *_: None)
        async with linked(helper) as volume, trio.open_nursery() as nursery:
            for inode in range(2, 500):
                nursery.start_soon(fails, errno.EIO, volume.getattr(inode))
            await trio.testing.wait_all_tasks_blocked()
            helper.say(b"Killed\n", STDERR)
            helper.end()
            await link_of(volume).lost.wait()
            assert "Killed" in link_of(volume).reason

    trio.run(main)


@needs_root
def test_the_user_of_vfsd_and_the_containers_root_are_swapped(tmp_path: Path) -> None:
    """As in a rootless container: the helper is 0 there and its user 1000 here."""
    ids = IdMap(swapped(0, 1000), swapped(0, 100))
    (tmp_path / "of root").write_text("x")
    with local_agent(str(tmp_path), ids=ids) as agent:
        made = agent.mknod(1, b"made", 0o100644, 0, Caller(1000, 100))
        shown = agent.lookup(1, b"of root")
        assert (made.uid, made.gid) == (shown.uid, shown.gid) == (1000, 100)
        assert (tmp_path / "made").stat().st_uid == (tmp_path / "made").stat().st_gid == 0
        agent.setattr(made.inode, AttributeChanges(uid=0, gid=7))
        assert (agent.getattr(made.inode).uid, agent.getattr(made.inode).gid) == (0, 7)
        assert ((tmp_path / "made").stat().st_uid, (tmp_path / "made").stat().st_gid) == (1000, 7)
        listed = {entry.path: (entry.uid, entry.gid) for entry in agent.tree(ids).walk()}
        assert listed[b"made"] == (0, 7)
        assert listed[b"of root"] == (1000, 100)


def test_a_file_is_found_by_its_other_name_after_a_rename_at_the_other_end(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("content")
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    with local_agent(str(tmp_path)) as agent:
        number = agent.lookup(1, b"one").inode
        assert agent.lookup(1, b"two").inode == number

        (tmp_path / "two").rename(tmp_path / "three")

        assert bytes(agent.read(number, 0, 100)) == b"content"


def test_an_executable_takes_space_and_is_written_though_no_descriptor_stays_open(tmp_path: Path) -> None:
    with local_agent(str(tmp_path)) as agent:
        made = agent.mknod(1, b"program", 0o100755, 0, Caller(os.geteuid(), os.getegid()))

        agent.fallocate(made.inode, 0, 0, 10_000)
        assert agent.write(made.inode, 0, b"#!/bin/sh\n") == 10

        assert (tmp_path / "program").read_bytes() == b"#!/bin/sh\n" + bytes(9_990)


# A read of the file "slow" waits until there is a file "go".
SLOW_READS = b"""
import os, sys, time
files = sys.modules["protocol.backends.host.files"]
class Slow:
    def __getattr__(self, name):
        return getattr(os, name)
    def pread(self, fd, size, offset):
        if os.readlink("/proc/self/fd/%d" % fd).endswith("/slow"):
            while not os.path.exists(go):
                time.sleep(0.001)
        return os.pread(fd, size, offset)
files.os = Slow()
"""


def test_what_is_slow_in_the_container_does_not_hold_up_others(tmp_path: Path) -> None:
    for at in range(40):
        (tmp_path / f"slow{at}").mkdir()
        (tmp_path / f"slow{at}" / "slow").write_text("at last")
    (tmp_path / "quick").write_text("at once")
    program = helper_program(str(tmp_path)).replace(
        b"module.main(", b"go = %r\nexec(%r)\nmodule.main(" % (str(tmp_path / "go"), SLOW_READS)
    )

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            stream = await LocalStream.start(helper_command(program, sys.executable), nursery)
            link = AgentLink(stream)
            await link.start(program)
            async with link.running():
                volume = AgentVolume(link)
                read: list[bytes] = []

                async def read_slow(number: int) -> None:
                    directory = await result(volume.lookup(1, b"slow%d" % number))
                    slow = await result(volume.lookup(directory.inode, b"slow"))
                    read.append(bytes(await volume.read(slow.inode, 0, 100)))

                async with trio.open_nursery() as readers:
                    for number in range(40):
                        readers.start_soon(read_slow, number)
                    quick = await result(volume.lookup(1, b"quick"))
                    for _ in range(200):
                        assert await volume.read(quick.inode, 0, 100) == b"at once"
                    assert read == []
                    made = await volume.mknod(1, b"go", 0o100644, 0, ME)
                    volume.forget(made.inode, 1)
                assert read == [b"at last"] * 40
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_reads_and_writes_of_any_size_come_through_whole(tmp_path: Path) -> None:
    content = b"".join(number.to_bytes(4, "big") for number in itertools.islice(itertools.count(), 1 << 20))
    with local_agent(str(tmp_path)) as agent:
        made = agent.mknod(1, b"f", 0o100644, 0, ME)
        assert agent.write(made.inode, 0, content) == len(content)
        assert bytes(agent.read(made.inode, 0, 2 * len(content))) == content
        assert bytes(agent.read(made.inode, 3, 2_000_000)) == content[3:2_000_003]
    assert (tmp_path / "f").read_bytes() == content


def test_what_is_given_back_while_a_frame_is_half_sent_does_not_come_in_between(tmp_path: Path) -> None:
    for name in range(20):
        tmp_path.joinpath(str(name)).touch()
    with local_agent(str(tmp_path)) as agent:
        made = agent.mknod(1, b"large", stat.S_IFREG | 0o644, 0, ME)
        data = os.urandom(1 << 20)  # more than a pipe takes at once
        agent.run(lambda: agent.inner.readdir(1, 0))  # its lookups are given back by whatever changes anything
        assert agent.write(made.inode, 0, data) == len(data)
        assert tmp_path.joinpath("large").read_bytes() == data
        assert agent.getattr(made.inode).size == len(data)
