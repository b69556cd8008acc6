"""The native engine's wire format and negotiation, and its loop on a socket in place of /dev/fuse."""

from __future__ import annotations

import ctypes
import errno
import io
import logging
import math
import mmap
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from protocol.backends.memory import MemoryVolume
from protocol.volume import ROOT_INODE, Caller, VolumeCapabilities
from tests.support.waiting import readable
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine, wire
from vfsd.kernel.engines.native.mounting import MAX_BACKGROUND, MAX_REQUEST_BYTES, negotiate
from vfsd.kernel.engines.native.operations import Operations
from vfsd.kernel.engines.native.replies import NO_CACHE, Replies
from vfsd.kernel.engines.native.requests import BufferPool
from vfsd.kernel.engines.native.wire import InitFlag, Opcode

ME = Caller(0, 0)
EVERYTHING_OFFERED = 0xFF_FFFF_FFFF

# sizeof() of the structs in linux/fuse.h.
SIZES = {
    "FUSE_IN_HEADER": 40,
    "FUSE_OUT_HEADER": 16,
    "FUSE_ATTR": 88,
    "FUSE_ENTRY_OUT": 128,
    "FUSE_ATTR_OUT": 104,
    "FUSE_OPEN_OUT": 16,
    "FUSE_WRITE_IN": 40,
    "FUSE_WRITE_OUT": 8,
    "FUSE_READ_IN": 40,
    "FUSE_SETATTR_IN": 88,
    "FUSE_MKNOD_IN": 16,
    "FUSE_CREATE_IN": 16,
    "FUSE_RENAME2_IN": 16,
    "FUSE_INIT_OUT": 64,
    "FUSE_KSTATFS": 80,
    "FUSE_FALLOCATE_IN": 32,
    "FUSE_LSEEK_IN": 24,
    "FUSE_COPY_FILE_RANGE_IN": 56,
    "FUSE_STATX_IN": 24,
    "FUSE_STATX_OUT": 288,
    "FUSE_SETXATTR_IN": 16,
    "FUSE_SETXATTR_IN_COMPAT": 8,
    "FUSE_DIRENT": 24,
    "FUSE_DIRENTPLUS": 152,
    "FUSE_NOTIFY_INVAL_INODE_OUT": 24,
    "FUSE_NOTIFY_INVAL_ENTRY_OUT": 16,
}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_a_struct_is_as_long_as_the_kernels(name: str, size: int) -> None:
    assert getattr(wire, name).size == size


# -- INIT --------------------------------------------------------------------------------------
def request(opcode: int, node: int = ROOT_INODE, body: bytes = b"", *, unique: int = 7, pid: int = 1) -> bytes:
    header = wire.FUSE_IN_HEADER.pack(wire.IN_HEADER_BYTES + len(body), opcode, unique, node, 0, 0, pid, 0, 0)
    return header + body


def init(flags: int, minor: int = 44, major: int = 7, readahead: int = 131072) -> bytes:
    body = wire.FUSE_INIT_IN.pack(major, minor, readahead, flags & 0xFFFFFFFF)
    return request(Opcode.INIT, 0, body + struct.pack("=I44x", flags >> 32))


def agree(message: bytes, cache_timeout_s: float = math.inf, acl: bool = False) -> tuple[Any, ...]:
    reply = negotiate(message, len(message), cache_timeout_s=cache_timeout_s, acl=acl).reply
    assert wire.FUSE_OUT_HEADER.unpack_from(reply) == (len(reply), 0, 7)
    major, minor, _, low, _, _, max_write, _, max_pages, _, high = wire.FUSE_INIT_OUT.unpack_from(reply, 16)
    return major, minor, InitFlag(low | high << 32), max_write, max_pages


def test_requests_of_one_mebibyte_are_agreed_upon() -> None:
    _, _, flags, max_write, max_pages = agree(init(EVERYTHING_OFFERED))
    assert InitFlag.MAX_PAGES in flags
    assert (max_write, max_pages) == (1024 * 1024, 256)


def test_only_what_the_kernel_offers_is_taken() -> None:
    offered = InitFlag.NO_OPEN_SUPPORT | InitFlag.NO_OPENDIR_SUPPORT | InitFlag.MAX_PAGES | InitFlag.ASYNC_READ
    assert agree(init(offered, minor=34))[1:3] == (34, offered)


def test_flags_beyond_32_bits_count_only_where_the_kernel_says_that_it_sends_them() -> None:
    assert InitFlag.HAS_EXPIRE_ONLY in agree(init(EVERYTHING_OFFERED))[2]
    assert InitFlag.HAS_EXPIRE_ONLY not in agree(init(EVERYTHING_OFFERED & ~InitFlag.INIT_EXT))[2]


def test_write_back_and_truncating_opens_are_never_agreed_upon() -> None:
    taken = agree(init(EVERYTHING_OFFERED))[2]
    assert not taken & (InitFlag.WRITEBACK_CACHE | InitFlag.ATOMIC_O_TRUNC)


@pytest.mark.parametrize(
    ("timeout_s", "taken", "left"),
    [
        (math.inf, InitFlag.EXPLICIT_INVAL_DATA, InitFlag.AUTO_INVAL_DATA),
        (1.0, InitFlag.AUTO_INVAL_DATA, InitFlag.EXPLICIT_INVAL_DATA),
    ],
)
def test_pages_follow_mtime_where_caches_time_out_and_us_where_they_do_not(
    timeout_s: float, taken: InitFlag, left: InitFlag
) -> None:
    flags = agree(init(EVERYTHING_OFFERED), timeout_s)[2]
    assert taken in flags
    assert left not in flags


def test_acls_are_agreed_upon_only_for_a_volume_that_keeps_them() -> None:
    assert InitFlag.POSIX_ACL not in agree(init(EVERYTHING_OFFERED))[2]
    with_acl = agree(init(EVERYTHING_OFFERED), acl=True)[2]
    assert InitFlag.POSIX_ACL | InitFlag.DONT_MASK | InitFlag.SETXATTR_EXT in with_acl


def test_acls_that_the_kernel_is_not_to_check_are_not_agreed_upon_but_the_umask_is_ours_all_the_same() -> None:
    message = init(EVERYTHING_OFFERED)
    taken = negotiate(message, len(message), cache_timeout_s=math.inf, acl=True, checked=False).flags
    assert InitFlag.POSIX_ACL not in taken
    assert InitFlag.DONT_MASK | InitFlag.SETXATTR_EXT in taken


@pytest.mark.parametrize(
    "message",
    [init(EVERYTHING_OFFERED & ~InitFlag.NO_OPEN_SUPPORT), init(EVERYTHING_OFFERED, major=8)],
)
def test_a_kernel_that_lacks_what_we_need_is_refused(message: bytes) -> None:
    with pytest.raises(OSError, match="FUSE") as caught:
        agree(message)
    assert caught.value.errno == errno.EPROTONOSUPPORT


def test_anything_but_init_as_the_first_request_is_refused() -> None:
    with pytest.raises(OSError, match="INIT"):
        agree(request(Opcode.GETATTR, body=bytes(16)))


# -- the loop, on a socket that keeps message boundaries as /dev/fuse does ------------------------
class Kernel:
    """Stands in for the kernel: sends requests and receives replies."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = trio.socket.from_stdlib_socket(channel)

    async def ask(self, message: bytes) -> tuple[int, bytes]:
        """Send `message`; return the error (a positive errno) and the body of the reply."""
        await self.channel.send(message)
        return self._parse(await self.channel.recv(1 << 20), message)

    @staticmethod
    def _parse(reply: bytes, message: bytes) -> tuple[int, bytes]:
        length, error, unique = wire.FUSE_OUT_HEADER.unpack_from(reply)
        assert length == len(reply)
        assert -wire.MAX_ERRNO <= error <= 0
        if len(message) >= wire.IN_HEADER_BYTES:
            assert unique == wire.FUSE_IN_HEADER.unpack_from(message)[2]
        return -error, reply[16:]


def converse(volume: Any, dialogue: Any, **engine_options: Any) -> None:
    """Run `dialogue(kernel, engine)` against an engine over `volume`."""

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        engine = NativeEngine(volume, EngineSettings("/nowhere", "test"), **engine_options)
        # In place of what `mount` opens: the loop is what is tested, without a kernel.
        engine._device = io.FileIO(theirs.detach(), "r+")
        kernel = Kernel(ours)
        try:
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(engine.serve)
                    await dialogue(kernel, engine)
                    engine.stop()
        finally:
            engine._device.close()
            kernel.channel.close()

    trio.run(main)


def named(opcode: int, name: bytes, node: int = ROOT_INODE) -> bytes:
    return request(opcode, node, name + b"\0")


@pytest.fixture(name="volume")
def a_volume() -> Iterator[MemoryVolume]:
    volume = MemoryVolume(max_bytes=1 << 22, max_inodes=1000)
    volume.mknod(ROOT_INODE, b"file", stat.S_IFREG | 0o644, 0, ME)
    volume.mkdir(ROOT_INODE, b"dir", 0o755, ME)
    volume.symlink(ROOT_INODE, b"link", b"file", ME)
    yield volume
    volume.check_invariants()


@pytest.mark.parametrize("opcode", [Opcode.OPEN, Opcode.OPENDIR, Opcode.CREATE, Opcode.FLUSH, 31, 4095])
def test_what_is_not_served_is_answered_with_enosys(volume: MemoryVolume, opcode: int) -> None:
    async def dialogue(kernel: Kernel, _: NativeEngine) -> None:
        assert await kernel.ask(request(opcode, body=bytes(64))) == (errno.ENOSYS, b"")

    converse(volume, dialogue)


def test_a_missing_name_is_answered_as_a_negative_entry_without_limit(volume: MemoryVolume) -> None:
    async def dialogue(kernel: Kernel, _: NativeEngine) -> None:
        error, body = await kernel.ask(named(Opcode.LOOKUP, b"nope"))
        node, _, entry_valid, *_ = wire.FUSE_ENTRY_OUT.unpack(body)
        assert (error, node) == (0, 0)
        assert entry_valid >= 2**31

    converse(volume, dialogue)


def test_an_impersonators_thread_sees_its_volume_and_the_kernel_keeps_nothing_of_it(volume: MemoryVolume) -> None:
    other = MemoryVolume()
    other.mknod(ROOT_INODE, b"mirage", stat.S_IFREG | 0o600, 0, ME)

    class Impersonator:
        thread_id = 4711

        @property
        def volume(self) -> MemoryVolume:
            return other

    async def dialogue(kernel: Kernel, _: NativeEngine) -> None:
        lookup = request(Opcode.LOOKUP, body=b"mirage\0", pid=4711)
        error, body = await kernel.ask(lookup)
        _, _, entry_valid, attr_valid, entry_nsec, attr_nsec, *_ = wire.FUSE_ENTRY_OUT.unpack(body)
        assert (error, entry_valid, attr_valid, entry_nsec, attr_nsec) == (0, 0, 0, 0, 0)
        missing = request(Opcode.LOOKUP, body=b"file\0", pid=4711)
        assert await kernel.ask(missing) == (errno.ENOENT, b"")
        error, body = await kernel.ask(named(Opcode.LOOKUP, b"mirage"))
        assert (error, wire.FUSE_ENTRY_OUT.unpack(body)[0]) == (0, 0)

    converse(volume, dialogue, impersonator=Impersonator())


def test_the_kernels_own_requests_are_not_taken_for_those_of_an_impersonator_at_rest(volume: MemoryVolume) -> None:
    class Resting:
        thread_id = 0
        volume = MemoryVolume()

    async def dialogue(kernel: Kernel, _: NativeEngine) -> None:
        error, body = await kernel.ask(request(Opcode.LOOKUP, body=b"file\0", pid=0))
        assert (error, wire.FUSE_ENTRY_OUT.unpack(body)[0] > 0) == (0, True)

    converse(volume, dialogue, impersonator=Resting())


def test_an_errno_that_the_kernel_would_refuse_becomes_eio(
    volume: MemoryVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfit(_: int) -> bytes:
        raise OSError(100_000, "no errno")

    monkeypatch.setattr(volume, "readlink", unfit)

    async def dialogue(kernel: Kernel, _: NativeEngine) -> None:
        assert await kernel.ask(request(Opcode.READLINK)) == (errno.EIO, b"")

    converse(volume, dialogue)


def test_every_request_counts(volume: MemoryVolume) -> None:
    async def dialogue(kernel: Kernel, engine: NativeEngine) -> None:
        before = engine.requests
        for _ in range(5):
            await kernel.ask(request(Opcode.GETATTR, body=bytes(16)))
        assert engine.requests == before + 5

    converse(volume, dialogue)


# -- volumes that must wait ----------------------------------------------------------------------
class Gated:
    """A volume whose `getattr`, `readlink` and `write` answer once the gate is open."""

    capabilities = VolumeCapabilities(acls=True)  # without shortcuts: they would bypass this class

    def __init__(self, volume: MemoryVolume) -> None:
        self._volume = volume
        self.gate = trio.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._volume, name)
        if name not in ("getattr", "readlink", "write"):
            return method

        async def answer(*arguments: Any, **options: Any) -> Any:
            await self.gate.wait()
            return method(*arguments, **options)

        return answer


def test_drained_returns_when_what_was_asked_before_is_answered(volume: MemoryVolume) -> None:
    gated = Gated(volume)

    async def dialogue(kernel: Kernel, engine: NativeEngine) -> None:
        drained = trio.Event()

        async def drain() -> None:
            await engine.drained()
            drained.set()

        await kernel.channel.send(request(Opcode.GETATTR, body=bytes(16)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await wait_all_tasks_blocked()
            assert engine.requests == 1
            assert not drained.is_set()
            gated.gate.set()
        # The answer was there before `drained` returned.
        assert readable(kernel.channel, 0)

    converse(gated, dialogue)


class EndlessVolume:
    """A volume whose FORGET requests each make the kernel queue another one, so that the device is never empty."""

    def __init__(self, volume: MemoryVolume, device: socket.socket) -> None:
        self._volume = volume
        self._device = device
        self.is_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._volume, name)

    def forget(self, _inode: int, _count: int) -> None:
        if not self.is_ended:
            self._device.send(request(Opcode.FORGET, 99, wire.FUSE_FORGET_IN.pack(1)))


@pytest.mark.parametrize("reads", [0, MAX_BACKGROUND - 1, MAX_BACKGROUND])
def test_drained_returns_although_the_device_is_never_empty(
    volume: MemoryVolume, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """`reads`: how many requests of the kernel's background queue come between the first two markers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    endless = EndlessVolume(volume, ours)
    made = volume.lookup(ROOT_INODE, b"file")
    markers = 0

    def statvfs(_path: str) -> None:
        nonlocal markers
        markers += 1
        body = wire.FUSE_READ_IN.pack(0, 0, 1, 0, 0, 0, 0)
        for unique in range(reads if markers == 2 else 0):
            ours.send(request(Opcode.READ, made.inode, body, unique=unique + 100))
            ours.recv(4096)
        ours.send(request(Opcode.STATFS, pid=threading.get_native_id()))
        ours.recv(4096)

    monkeypatch.setattr(os, "statvfs", statvfs)

    async def main() -> None:
        theirs.setblocking(False)
        engine = NativeEngine(endless, EngineSettings("/nowhere", "test"))  # type: ignore[arg-type]
        engine._device = io.FileIO(theirs.detach(), "r+")
        try:
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(engine.serve)
                    ours.send(request(Opcode.FORGET, 99, wire.FUSE_FORGET_IN.pack(1)))
                    while not engine.requests:
                        await trio.lowlevel.checkpoint()
                    await engine.drained()
                    endless.is_ended = True
                    engine.stop()
        finally:
            engine._device.close()
            ours.close()

    trio.run(main)
    assert markers == (2 if reads < MAX_BACKGROUND else 4)


def test_data_of_writes_that_wait_is_not_overwritten_by_the_next_request(volume: MemoryVolume) -> None:
    gated = Gated(volume)
    made = volume.lookup(ROOT_INODE, b"file")

    async def dialogue(kernel: Kernel, _: NativeEngine) -> None:
        pieces = [bytes([number]) * 5000 for number in range(1, 5)]
        for number, piece in enumerate(pieces):
            body = wire.FUSE_WRITE_IN.pack(0, number * 5000, 5000, 0, 0, 0, 0) + piece
            await kernel.channel.send(request(Opcode.WRITE, made.inode, body, unique=number))
        await wait_all_tasks_blocked()
        gated.gate.set()
        replies = [wire.WRITE_REPLY.unpack(await kernel.channel.recv(4096)) for _ in pieces]
        assert {(error, unique, count) for _, error, unique, count, _ in replies} == {(0, n, 5000) for n in range(4)}
        assert bytes(volume.read(made.inode, 0, 30_000)) == b"".join(pieces)

    converse(gated, dialogue)


def test_what_goes_wrong_while_waiting_is_answered_like_anything_else(
    volume: MemoryVolume, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = Gated(volume)
    gated.gate.set()

    def broken(_: int) -> bytes:
        raise ZeroDivisionError("a bug")

    async def dialogue(kernel: Kernel, _: NativeEngine) -> None:
        assert await kernel.ask(request(Opcode.READLINK)) == (errno.EINVAL, b"")
        monkeypatch.setattr(volume, "readlink", broken)
        assert await kernel.ask(request(Opcode.READLINK)) == (errno.EIO, b"")

    converse(gated, dialogue)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


# -- what depends on the agreement ---------------------------------------------------------------
def perform(operations: Operations, message: bytes) -> Any:
    """Return the answer of the opcode's method, before it is packed."""
    opcode, _, node, _ = wire.IN_HEADER_ROUTE.unpack_from(message)
    return operations.table[opcode].method(node, bytearray(message), len(message))


@pytest.mark.parametrize(("ours", "seen"), [(True, 0o027), (False, 0)])
def test_the_umask_reaches_the_volume_only_where_the_kernel_leaves_it(
    volume: MemoryVolume, monkeypatch: pytest.MonkeyPatch, ours: bool, seen: int
) -> None:
    callers: list[Caller] = []
    monkeypatch.setattr(volume, "mkdir", lambda parent, name, mode, caller: callers.append(caller))
    operations = Operations(volume, Replies(NO_CACHE), InitFlag.DONT_MASK if ours else InitFlag(0))
    perform(operations, request(Opcode.MKDIR, body=wire.FUSE_MKDIR_IN.pack(0o777, 0o027) + b"new\0"))
    assert callers == [Caller(0, 0, seen, 1)]


@pytest.mark.parametrize(("flags", "mode"), [(wire.FUSE_SETXATTR_ACL_KILL_SGID, 0o755), (0, 0o2755)])
def test_an_acl_set_by_a_stranger_to_the_group_clears_set_gid(
    volume: MemoryVolume, monkeypatch: pytest.MonkeyPatch, flags: int, mode: int
) -> None:
    kept: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(volume, "setxattr", lambda inode, name, value, flags: kept.append((name, value)))
    made = volume.mknod(ROOT_INODE, b"sgid", stat.S_IFREG | 0o2755, 0, ME)
    body = wire.FUSE_SETXATTR_IN.pack(3, 0, flags, 0) + b"system.posix_acl_access\0" + b"acl"
    perform(
        Operations(volume, Replies(NO_CACHE), InitFlag.SETXATTR_EXT | InitFlag.POSIX_ACL),
        request(Opcode.SETXATTR, made.inode, body),
    )
    assert stat.S_IMODE(volume.getattr(made.inode).mode) == mode
    assert kept == [(b"system.posix_acl_access", b"acl")]


@pytest.mark.parametrize(("count", "all_at_once"), [(500, True), (5000, False)])
def test_of_a_large_directory_the_kernel_gets_the_attributes_of_a_few_entries_first(
    count: int, all_at_once: bool
) -> None:
    volume = MemoryVolume()
    directory = volume.mkdir(ROOT_INODE, b"many", 0o755, ME).inode
    for number in range(count):
        volume.mknod(directory, b"%04d" % number, stat.S_IFREG, 0, ME)
    operations = Operations(volume, Replies(NO_CACHE))

    def listed(opcode: Opcode, cookie: int) -> list[tuple[bytes, int]]:
        body = wire.FUSE_READDIR_IN.pack(0, cookie, 128 << 10, 0, 0, 0, 0)
        reply: bytes = perform(operations, request(opcode, directory, body))
        at, skipped = 0, wire.FUSE_ENTRY_OUT.size if opcode == Opcode.READDIRPLUS else 0
        found = []
        while at < len(reply):
            _, offset, length, _ = wire.FUSE_DIRENT.unpack_from(reply, at + skipped)
            name = at + skipped + wire.FUSE_DIRENT.size
            found.append((reply[name : name + length], offset))
            at += wire.aligned(skipped + wire.FUSE_DIRENT.size + length)
        return found

    first = listed(Opcode.READDIRPLUS, 0)
    assert (len(first) == count + 2) == all_at_once
    assert all_at_once or 50 < len(first) < 200
    names = [name for name, _ in first]
    while more := listed(Opcode.READDIR, first[-1][1]):
        first = more
        names += [name for name, _ in more]
    assert sorted(names) == [b".", b"..", *(b"%04d" % number for number in range(count))]
    for opcode, few in ((Opcode.READDIRPLUS, 20), (Opcode.READDIR, 100)):
        before, (name, position), (after, _) = listed(Opcode.READDIR, 0)[-3:]
        sought = listed(opcode, position)
        assert sought[0][0] == after, (before, name)
        assert len(sought) < few, "a reader that moves to a position wants few entries"
        if not all_at_once:
            assert len(listed(opcode, sought[-1][1])) > 700, "a reader that goes on: all that there is room for"


NO_REPLY = {Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT}
names = st.sampled_from([b"file", b"dir", b"link", b"new", b".", b"..", b"", b"a/b", b"\xff\xfe", b"x" * 300])
bodies = st.one_of(
    st.binary(max_size=200),
    st.tuples(st.binary(max_size=112), names, names).map(lambda parts: parts[0] + parts[1] + b"\0" + parts[2] + b"\0"),
    # Small numbers reach further into the handlers than random ones do.
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 4096, 2**31, 2**63 - 1, 2**64 - 1]), max_size=14).map(
        lambda words: struct.pack(f"={len(words)}Q", *words)
    ),
)
requests = st.builds(
    lambda opcode, node, body, cut: request(opcode, node, body)[: max(cut, 1)],
    st.one_of(st.sampled_from([int(o) for o in Opcode]), st.integers(0, 2**32 - 1)),
    st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)),
    bodies,
    st.one_of(st.just(1 << 20), st.integers(1, 200)),
)


@given(st.lists(requests, min_size=1, max_size=12))
def test_no_request_however_malformed_ends_the_loop_or_is_unexpected(messages: list[bytes]) -> None:
    volume = MemoryVolume(max_bytes=1 << 22, max_inodes=1000)
    volume.mknod(ROOT_INODE, b"file", stat.S_IFREG | 0o644, 0, ME)
    volume.mkdir(ROOT_INODE, b"dir", 0o755, ME)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]

    async def dialogue(kernel: Kernel, _: NativeEngine) -> None:
        for message in messages:
            opcode = int.from_bytes(message[4:8], "little") if len(message) >= 8 else 0
            if opcode in NO_REPLY or len(message) < wire.IN_HEADER_BYTES:
                await kernel.channel.send(message)
            else:
                await kernel.ask(message)
        error, _body = await kernel.ask(request(Opcode.GETATTR, body=bytes(16), unique=99))
        assert error == 0

    logging.getLogger("vfsd.kernel.engines.native").addHandler(handler)
    try:
        converse(volume, dialogue)
    finally:
        logging.getLogger("vfsd.kernel.engines.native").removeHandler(handler)
    assert [record.exc_info for record in records] == []


def _resident_pages(buffer: mmap.mmap) -> int:
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    states = (ctypes.c_ubyte * -(-len(buffer) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(buffer)), states) == 0
    return sum(state & 1 for state in states)


def test_with_a_keeper_each_page_exists_before_a_request_is_read() -> None:
    buffer = BufferPool(is_kept=True).take()
    assert _resident_pages(buffer) == -(-MAX_REQUEST_BYTES // mmap.PAGESIZE)


@pytest.mark.parametrize(("is_kept", "is_seen"), [(True, True), (False, False)])
def test_with_a_keeper_fork_does_not_make_the_pages_copies(is_kept: bool, is_seen: bool) -> None:
    buffer = BufferPool(is_kept=is_kept).take()
    child = os.fork()
    if not child:
        buffer[:1] = b"x"
        os._exit(0)
    os.waitpid(child, 0)
    assert (buffer[:1] == b"x") is is_seen


def test_buffers_are_used_again_once_they_are_given_back() -> None:
    pool = BufferPool()
    first, second = pool.take(), pool.take()
    assert first is not second
    pool.give_back(first)
    assert pool.take() is first


def test_only_a_few_spare_buffers_are_kept() -> None:
    pool = BufferPool()
    buffers = [pool.take() for _ in range(6)]
    for buffer in buffers:
        pool.give_back(buffer)
    assert sum(pool.take() in buffers for _ in range(6)) == 4
