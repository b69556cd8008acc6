"""What a request costs in the engine and the memory volume: nothing is mounted, and replies go to /dev/null.

    python -m bench.dispatch [--count N] [--rounds N] [--snapshot] [--default] [--profile OPERATION]

Each request is put into the engine's buffer and answered as the loop would.  The clock is the thread's CPU time, the
fastest of the rounds; where the machine counts instructions (perf_event_open(2)) those stand beside it, the median.
What the driver itself needs (copying the request, the write to /dev/null) is measured with an unknown opcode and is not
taken off: it is shown as "driver".

With `--default` two more engines take turns with the first: one that has `.snapshots`, and one that also logs changes,
as a mount without options does.  Their columns are what they take more than the volume alone.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import os
import pstats
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Literal

from protocol.adapters.snapshot_directory import SnapshotDirectoryVolume
from protocol.backends.memory import MemoryVolume
from protocol.volume import Volume
from vfsd.daemon.audit.log import AuditLog
from vfsd.daemon.snapshots.directory import VolumeStates
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine, wire
from vfsd.kernel.engines.native.mounting import negotiate
from vfsd.kernel.engines.native.wire import Opcode
from vfsd.machine import interpreter

Message = bytes
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}  # system call numbers
_PERF_COUNT_HW_INSTRUCTIONS = 1
_EXCLUDE_KERNEL_AND_HYPERVISOR = 1 << 5 | 1 << 6


class Instructions:
    """Counts this thread's instructions in user space, if the machine can."""

    def __init__(self) -> None:
        attributes = struct.pack(
            "=IIQQQQQ", 0, 112, _PERF_COUNT_HW_INSTRUCTIONS, 0, 0, 0, _EXCLUDE_KERNEL_AND_HYPERVISOR
        )
        call = _PERF_EVENT_OPEN.get(os.uname().machine)
        self.descriptor = -1
        if call is not None:
            buffer = ctypes.create_string_buffer(attributes, 112)
            self.descriptor = ctypes.CDLL(None, use_errno=True).syscall(call, buffer, 0, -1, -1, 0)

    def now(self) -> int:
        return int.from_bytes(os.read(self.descriptor, 8), sys.byteorder) if self.descriptor >= 0 else 0


def message(opcode: int, node: int, body: bytes = b"", unique: int = 8) -> Message:
    length = wire.IN_HEADER_BYTES + len(body)
    return wire.FUSE_IN_HEADER.pack(length, opcode, unique, node, 1000, 1000, os.getpid(), 0, 0) + body


Mount = Literal["volume", ".snapshots", "default"]  # each has what those before it have


class Driver:
    """An engine over a fresh volume, and requests for it."""

    def __init__(self, count: int, snapshot: bool, mount: Mount) -> None:
        self.count = count
        self.volume = MemoryVolume()
        served: Volume = self.volume
        if mount != "volume":
            served = SnapshotDirectoryVolume(self.volume, VolumeStates(self.volume), is_visible=False)
        self.engine = NativeEngine(served, EngineSettings("/nowhere", "dispatch"))
        init = message(Opcode.INIT, 0, struct.pack("=IIIII44x", 7, 44, 131072, 0xFFFFFFFF, 0xFF))
        self.engine._agreement = negotiate(init, len(init), cache_timeout_s=float("inf"), acl=True)
        self.engine._operations = self.engine._operations_over(served, self.engine._replies)
        self.log = AuditLog(self.volume) if mount == "default" else None
        if self.log is not None:
            self.engine.observe(self.log)
        self.null = os.open(os.devnull, os.O_WRONLY)
        self.snapshot = snapshot
        self.first = 0

    def close(self) -> None:
        os.close(self.null)
        if self.log is not None:
            self.log.close()

    def steps(self) -> Iterator[tuple[str, list[Message]]]:
        """The requests of one round, each kind with its name; what one makes the next finds."""
        numbers = range(self.count)
        names = [b"file%06d" % n for n in numbers]
        yield "driver", [message(4000, 1)] * self.count
        yield "lookup absent", [message(Opcode.LOOKUP, 1, name + b"\0") for name in names]
        mknod = wire.FUSE_MKNOD_IN.pack(0o100644, 0, 0o022, 0)
        self.first = self.volume._state.next_inode
        yield "mknod", [message(Opcode.MKNOD, 1, mknod + name + b"\0") for name in names]
        files = range(self.first, self.first + self.count)
        if self.snapshot:
            self.volume.take_snapshot("s")
        capability = wire.FUSE_GETXATTR_IN.pack(0, 0) + b"security.capability\0"
        yield "getxattr capability", [message(Opcode.GETXATTR, node, capability) for node in files]
        write = wire.FUSE_WRITE_IN.pack(0, 0, 1024, 0, 0, 1, 0) + bytes(1024)
        yield "write 1 KB, new", [message(Opcode.WRITE, node, write) for node in files]
        # Before anything is read: a file whose pages may be dirty is written back first.
        times = wire.FUSE_SETATTR_IN.pack(
            wire.FATTR_ATIME | wire.FATTR_MTIME, 0, 0, 0, 0, 1_700_000_000, 1_700_000_001, 0, 5, 6, 0, 0, 0, 0, 0, 0
        )
        yield "setattr times", [message(Opcode.SETATTR, node, times) for node in files]
        yield "getattr", [message(Opcode.GETATTR, node, bytes(16)) for node in files]
        yield "lookup", [message(Opcode.LOOKUP, 1, name + b"\0") for name in names]
        block = bytes(4096)
        yield (
            "write 4 KB, appended",
            [
                message(Opcode.WRITE, self.first, wire.FUSE_WRITE_IN.pack(0, n * 4096, 4096, 0, 0, 1, 0) + block)
                for n in numbers
            ],
        )
        yield (
            "write 4 KB, over",
            [
                message(Opcode.WRITE, self.first, wire.FUSE_WRITE_IN.pack(0, n * 4096, 4096, 0, 0, 1, 0) + block)
                for n in numbers
            ],
        )
        read = wire.FUSE_READ_IN.pack(0, 0, 4096, 0, 0, 0, 0)
        yield "read 1 KB", [message(Opcode.READ, node, read) for node in files[1:]]
        chmod = wire.FUSE_SETATTR_IN.pack(wire.FATTR_MODE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0o100600, 0, 0, 0, 0)
        yield "setattr mode", [message(Opcode.SETATTR, node, chmod) for node in files]
        plus = wire.FUSE_READDIR_IN.pack(0, 0, 4096, 0, 0, 0, 0)
        yield "readdirplus 4 KB", [message(Opcode.READDIRPLUS, 1, plus)] * (self.count // 10)
        rename = wire.FUSE_RENAME_IN.pack(1)
        yield "rename", [message(Opcode.RENAME, 1, rename + name + b"\0r" + name + b"\0") for name in names]
        yield "unlink", [message(Opcode.UNLINK, 1, b"r" + name + b"\0") for name in names]
        # READDIRPLUS gave lookups too: more are taken than there can be.
        yield "forget", [message(Opcode.FORGET, node, wire.FUSE_FORGET_IN.pack(1 << 40)) for node in files]
        mkdir = wire.FUSE_MKDIR_IN.pack(0o755, 0o022)
        yield "mkdir", [message(Opcode.MKDIR, 1, mkdir + name + b"\0") for name in names]
        yield "rmdir", [message(Opcode.RMDIR, 1, name + b"\0") for name in names]
        yield "symlink", [message(Opcode.SYMLINK, 1, name + b"\0target\0") for name in names]
        yield "unlink symlink", [message(Opcode.UNLINK, 1, name + b"\0") for name in names]
        after = range(self.first + self.count, self.first + 3 * self.count)
        forgets = b"".join(wire.FUSE_FORGET_ONE.pack(node, 1 << 40) for node in after)
        yield "batch forget", [message(Opcode.BATCH_FORGET, 0, wire.FUSE_BATCH_FORGET_IN.pack(len(after), 0) + forgets)]
        if self.snapshot:
            self.volume.drop_snapshot("s")

    def answer(self, messages: list[Message]) -> None:
        engine, null = self.engine, self.null
        buffer, respond = engine._buffer, engine._respond
        for request in messages:
            length = len(request)
            buffer[:length] = request
            respond(null, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="requests of each kind in a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--snapshot", action="store_true", help="a snapshot is taken once the files are made")
    parser.add_argument("--default", action="store_true", help="also what a mount without options adds to each request")
    parser.add_argument("--profile", metavar="OPERATION", help="where one kind spends its calls, instead of the table")
    options = parser.parse_args()
    interpreter.set_up("bench")
    with ExitStack() as stack:
        mounts: tuple[Mount, ...] = ("volume", ".snapshots", "default") if options.default else ("volume",)
        drivers = {mount: Driver(options.count, options.snapshot, mount) for mount in mounts}
        for driver in drivers.values():
            stack.callback(driver.close)
        if options.profile:
            profile(driver, options.rounds, options.profile)
        else:
            table(drivers, options.rounds)


def table(drivers: dict[Mount, Driver], rounds: int) -> None:
    """Print what each kind of request costs with the first driver, and what it costs more with each other one."""
    instructions = Instructions()
    costs: dict[Mount, dict[str, list[tuple[float, float]]]] = {mount: {} for mount in drivers}

    for _ in range(rounds):
        for mount, driver in drivers.items():
            for name, messages in driver.steps():
                counted, started = instructions.now(), time.thread_time_ns()
                driver.answer(messages)
                cpu_ns, counted = time.thread_time_ns() - started, instructions.now() - counted
                costs[mount].setdefault(name, []).append((cpu_ns / len(messages), counted / len(messages)))

    first, *others = costs
    print(f"{'request':24}{'us':>8}{'instructions':>14}" + "".join(f"{mount:>12}{'':>14}" for mount in others))
    for name in costs[first]:
        (cpu_us, count), *more = [
            (min(cpu for cpu, _ in found[name]) / 1000, statistics.median(count for _, count in found[name]))
            for found in costs.values()
        ]
        added = "".join(f"{with_us - cpu_us:+12.2f}{with_count - count:+14,.0f}" for with_us, with_count in more)
        print(f"{name:24}{cpu_us:8.2f}{count:14,.0f}{added}")


def profile(driver: Driver, rounds: int, wanted: str) -> None:
    profiler = cProfile.Profile()
    for _ in range(rounds):
        for name, messages in driver.steps():
            if name == wanted:
                profiler.runcall(driver.answer, messages)
            else:
                driver.answer(messages)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
