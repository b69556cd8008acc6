"""Requests on a volume with `.snapshots`: the engine that goes round `.snapshots` replies as one that does not.

A twin engine puts each request to the volume with `.snapshots`.  Both get the same random requests, with inodes of
both kinds as node and in the body, and every reply is the same.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from typing import Final

import pytest

from protocol.adapters.snapshot_directory import FIRST_INODE, SnapshotDirectoryVolume
from protocol.backends.memory import MemoryVolume
from protocol.volume import ROOT_INODE
from tests.support.seeds import campaign_seed
from vfsd.daemon.snapshots.directory import VolumeStates
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine, wire
from vfsd.kernel.engines.native.wire import Opcode

REQUESTS: Final = 2000
NAMES: Final = (b".snapshots", b"a", b"b", b"d", b"one", b"two")


class Twin:
    """An engine over a volume of its own, whose replies come back.  `direct`: it calls the volume below directly."""

    def __init__(self, *, direct: bool, is_visible: bool) -> None:
        self.below = MemoryVolume(clock=lambda: 10**18)
        self.volume = SnapshotDirectoryVolume(self.below, VolumeStates(self.below), is_visible=is_visible)
        self.engine = NativeEngine(self.volume, EngineSettings("/nowhere", "twin"))
        if not direct:
            self.engine._operations = self.engine._plain_operations(self.volume, self.engine._replies)
        self.replies, self._device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.replies.setblocking(False)

    def close(self) -> None:
        self.replies.close()
        self._device.close()

    def answer(self, message: bytes) -> bytes | None:
        """Return the reply to a request; None if there is none."""
        self.engine._buffer[: len(message)] = message
        self.engine._respond(self._device.fileno(), len(message))
        try:
            return self.replies.recv(8192)
        except BlockingIOError:
            return None


def chosen(dice: random.Random, nodes: list[int]) -> int:
    """An inode, often the root: most names are there."""
    return ROOT_INODE if dice.random() < 0.4 else dice.choice(nodes)


def bodies(dice: random.Random, nodes: list[int]) -> dict[Opcode, Callable[[], bytes]]:
    """The opcodes, each with a function that makes a random body."""

    def name() -> bytes:
        return dice.choice(NAMES) + b"\0"

    def node() -> int:
        return chosen(dice, nodes)

    def listing() -> bytes:
        return wire.FUSE_READDIR_IN.pack(0, dice.choice((0, 0, 1, 2, 3)), dice.choice((200, 4096)), 0, 0, 0, 0)

    def forgets() -> bytes:
        forgotten = [(node(), dice.randint(1, 3)) for _ in range(4)]
        return wire.FUSE_BATCH_FORGET_IN.pack(4, 0) + b"".join(wire.FUSE_FORGET_ONE.pack(*one) for one in forgotten)

    def attributes() -> bytes:
        valid = dice.choice((wire.FATTR_MODE, wire.FATTR_SIZE | wire.FATTR_FH, wire.FATTR_UID))
        mode = dice.choice((0o600, 0o755))
        return wire.FUSE_SETATTR_IN.pack(valid, 0, 0, dice.randint(0, 50), 0, 0, 0, 0, 0, 0, 0, mode, 0, 1, 0, 0)

    return {
        Opcode.LOOKUP: name,
        Opcode.GETATTR: lambda: bytes(16),
        Opcode.SETATTR: attributes,
        Opcode.MKNOD: lambda: wire.FUSE_MKNOD_IN.pack(0o100644, 0, 0, 0) + name(),
        Opcode.MKDIR: lambda: wire.FUSE_MKDIR_IN.pack(0o755, 0) + name(),
        Opcode.SYMLINK: lambda: name() + b"target\0",
        Opcode.LINK: lambda: wire.FUSE_LINK_IN.pack(node()) + name(),
        Opcode.UNLINK: name,
        Opcode.RMDIR: name,
        Opcode.RENAME: lambda: wire.FUSE_RENAME_IN.pack(node()) + name() + name(),
        Opcode.RENAME2: lambda: wire.FUSE_RENAME2_IN.pack(node(), dice.choice((0, 1, 2)), 0) + name() + name(),
        Opcode.READDIR: listing,
        Opcode.READDIRPLUS: listing,
        Opcode.READ: lambda: wire.FUSE_READ_IN.pack(0, 0, 4096, 0, 0, 0, 0),
        Opcode.WRITE: lambda: wire.FUSE_WRITE_IN.pack(0, dice.randint(0, 20), 7, 0, 0, 1, 0) + b"content",
        Opcode.LSEEK: lambda: wire.FUSE_LSEEK_IN.pack(0, dice.randint(0, 20), dice.choice((3, 4)), 0),
        Opcode.COPY_FILE_RANGE: lambda: wire.FUSE_COPY_FILE_RANGE_IN.pack(0, 0, node(), 0, 3, 10, 0),
        Opcode.READLINK: lambda: b"",
        Opcode.LISTXATTR: lambda: wire.FUSE_GETXATTR_IN.pack(4096, 0),
        Opcode.FORGET: lambda: wire.FUSE_FORGET_IN.pack(dice.randint(1, 2)),
        Opcode.BATCH_FORGET: forgets,
        Opcode.STATFS: lambda: b"",
    }


class Twins:
    """Both engines, and the inodes that the kernel would know."""

    def __init__(self, *, is_visible: bool) -> None:
        self.both = [Twin(direct=direct, is_visible=is_visible) for direct in (True, False)]
        self.nodes = [ROOT_INODE, ROOT_INODE, FIRST_INODE]
        self.seen: set[tuple[Opcode, bool, bool]] = set()  # opcode, of a snapshot, carried out

    def close(self) -> None:
        for twin in self.both:
            twin.close()

    def request(self, opcode: Opcode, node: int, body: bytes) -> int:
        """Make a request; return the inode that it found or made, or 0."""
        length = wire.IN_HEADER_BYTES + len(body)
        header = wire.FUSE_IN_HEADER.pack(length, opcode, 8, node, 0, 0, os.getpid(), 0, 0)
        reply, other = (twin.answer(header + body) for twin in self.both)
        assert reply == other, f"{opcode.name} of {node:x}, {body!r}"
        is_done = reply is not None and not int.from_bytes(reply[4:8], "little")
        self.seen.add((opcode, node >= FIRST_INODE, is_done))
        if reply is None or not is_done or opcode not in {Opcode.LOOKUP, Opcode.MKNOD, Opcode.MKDIR, Opcode.LINK}:
            return 0
        found = int.from_bytes(reply[16:24], "little")
        if found and found not in self.nodes:
            self.nodes.append(found)
            del self.nodes[3:-30]
        return found

    def take_snapshot(self, name: str) -> None:
        """Take a snapshot, in place of one of that name, and look up what is in it."""
        for twin in self.both:
            if name in {info.name for info in twin.below.snapshots()}:
                twin.below.drop_snapshot(name)
            twin.below.take_snapshot(name)
        at = self.request(Opcode.LOOKUP, FIRST_INODE, name.encode() + b"\0")
        for below in NAMES:
            self.request(Opcode.LOOKUP, at, below + b"\0")


@pytest.mark.parametrize("is_visible", [False, True])
def test_every_request_gets_the_reply_of_the_volume_with_snapshots(
    is_visible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    dice = random.Random(seed := campaign_seed())
    twins = Twins(is_visible=is_visible)
    makers = bodies(dice, twins.nodes)
    opcodes = [*makers, Opcode.LOOKUP, Opcode.MKNOD]
    try:
        twins.request(Opcode.MKNOD, ROOT_INODE, wire.FUSE_MKNOD_IN.pack(0o100644, 0, 0, 0) + b"a\0")
        twins.take_snapshot("one")
        for node in tuple(twins.nodes):
            twins.request(Opcode.READ, node, makers[Opcode.READ]())
        assert {(Opcode.READ, True, True), (Opcode.READ, False, True)} <= twins.seen
        for at in range(REQUESTS):
            if at % 100 == 99:
                twins.take_snapshot(dice.choice(("one", "two")))
            opcode = dice.choice(opcodes)
            twins.request(opcode, chosen(dice, twins.nodes), makers[opcode]())
        for twin in twins.both:
            twin.volume.check_invariants()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        twins.close()
