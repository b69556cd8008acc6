"""A memory volume served by an engine in a process of its own, for tests: they make system calls on the mount.

The parent writes one JSON object a line to standard input and reads one a line from standard output:
{"call": NAME, ...}, answered {"ok": RESULT} or {"error": TEXT}.  When the input ends the mount goes.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pyfuse3
import trio

from protocol.backends.memory import MemoryVolume
from protocol.volume import AttributeChanges, Caller, VolumeCapabilities
from protocol.volume_extensions import CacheInvalidation, EntryChange
from tests.support.waiting import readable
from vfsd.kernel import inotify
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine
from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine
from vfsd.kernel.invalidation import invalidate_kernel_caches

EVENTS = {
    0x2: "MODIFY",
    0x4: "ATTRIB",
    0x8: "CLOSE_WRITE",
    0x40: "MOVED_FROM",
    0x80: "MOVED_TO",
    0x100: "CREATE",
    0x200: "DELETE",
    0x400: "DELETE_SELF",
    0x8000: "IGNORED",
}
ALL = 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400
ISDIR = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


class Watcher:
    def __init__(self) -> None:
        self.fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.names: dict[int, str] = {}

    def add(self, path: str, label: str) -> None:
        number = libc.inotify_add_watch(self.fd, os.fsencode(path), ALL)
        assert number > 0, os.strerror(ctypes.get_errno())
        self.names[number] = label

    def events(self) -> list[str]:
        """What has been raised so far: events are in the queue when the system call returns that raises them."""
        found = []
        while readable(self.fd, 0):
            data = os.read(self.fd, 65536)
            while data:
                number, mask, _, length = struct.unpack_from("iIII", data)
                name = data[16 : 16 + length].rstrip(b"\0").decode()
                data = data[16 + length :]
                kind = "|".join(text for bit, text in EVENTS.items() if mask & bit)
                found.append(f"{kind}{'|DIR' if mask & ISDIR else ''} {self.names[number]}/{name}".rstrip("/"))
        return found


class Served:
    """The parent's side: `path` is the mount, `call` asks the child."""

    def __init__(self, path: str, process: subprocess.Popen[str], log: str) -> None:
        self.path = path
        self.process = process
        self.is_stopped = False
        self._log = log

    def stop(self) -> None:
        """Have the engine stop; the child has unmounted and ended when this returns."""
        self.is_stopped = True
        self.call("stop")
        self.process.wait(20)

    def call(self, call: str, /, **arguments: Any) -> Any:
        self.ask(call, **arguments)
        return self.answer()

    def ask(self, call: str, /, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, *, patience_s: float = 120) -> Any:
        """The child's answer.  A child that hangs is killed."""
        assert self.process.stdout is not None
        if not readable(self.process.stdout, patience_s):
            self.process.kill()
            raise AssertionError(f"the child hangs, and is killed\n{self.log()}")
        answer = json.loads(self.process.stdout.readline() or '{"error": "the child is gone"}')
        if "error" in answer:
            raise RuntimeError(answer["error"] + "\n" + self.log())
        return answer["ok"]

    def log(self) -> str:
        with open(self._log) as file:
            return file.read()


@contextmanager
def served(directory: str, user: int = 0, **settings: Any) -> Iterator[Served]:
    """A mount at `directory`/mnt, gone at the end; `settings` for EngineSettings and MemoryVolume, and `engine`.

    `awaits`: the volume's answers are awaitables.
    `user`: what the child runs as, once it has mounted.  `replay_limit`: the number of changes that a replay shows.
    `withdraws`: the child can `withdraw`.  `expected_log`: a part of its log, which is empty otherwise."""
    path = os.path.join(directory, "mnt")
    os.mkdir(path)
    log = os.path.join(directory, "log")
    expected = settings.pop("expected_log", "")
    with open(log, "w") as errors:
        command = [sys.executable, "-m", "tests.mount.engine_child"]
        process = subprocess.Popen(
            [*command, json.dumps({"mountpoint": path, "user": user, **settings})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    child = Served(path, process, log)
    try:
        child.call("ready")
        yield child
        if not child.is_stopped:
            child.call("check")
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        left = os.path.ismount(path)
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)
    assert not left, "the mount was left behind"
    assert process.returncode == 0, f"{process.returncode} {child.log()}"
    if expected:
        assert expected in child.log()
    else:
        assert not child.log(), child.log()


class _Child:
    def __init__(self, mountpoint: str, settings: dict[str, Any]) -> None:
        self.volume = MemoryVolume(max_bytes=settings.pop("max_bytes", None))
        self.user = settings.pop("user")
        faults = settings.pop("faults", None)
        self.withdraws = settings.pop("withdraws", False)
        vars(inotify)["_MAX_CHANGES"] = settings.pop("replay_limit", vars(inotify)["_MAX_CHANGES"])
        self.victim: int | None = None
        self.found_empty: bool | None = None
        kind = {"pyfuse3": Pyfuse3Engine, "native": NativeEngine}[settings.pop("engine", "pyfuse3")]
        self.awaiting = _Awaiting(self.volume) if settings.pop("awaits", False) else None
        self.replay = inotify.Replay(self.volume, mountpoint)
        subject: Any = _Faulty(self.volume, faults) if faults else self.awaiting or self.volume
        settings.setdefault("cache_timeout_s", math.inf)
        engine_settings = EngineSettings(mountpoint, "test", **settings)
        self.engine = kind(subject, engine_settings, self.replay)
        self.told: CacheInvalidation | None = None
        self.served = trio.Event()
        self.is_stopped = False

    async def run(self) -> None:
        self.engine.mount()
        if self.withdraws:
            self.kill_in_time()
        if self.user:
            os.setegid(self.user)
            os.seteuid(self.user)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.serve)
                await self.obey(nursery)
                self.engine.stop()
                nursery.cancel_scope.cancel()
        finally:
            if self.user:
                os.seteuid(0)  # waits for all threads: not for one that waits for this loop
            self.engine.unmount()
            self.engine.unmount()

    async def serve(self) -> None:
        await self.engine.serve()
        self.served.set()

    async def obey(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        while not self.is_stopped and (line := await trio.to_thread.run_sync(sys.stdin.readline)):
            message = json.loads(line)
            try:
                result = await getattr(self, message.pop("call"))(**message)
                answer = {"ok": result}
            except Exception as error:
                answer = {"error": repr(error)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    async def ready(self) -> None:
        return None

    async def name(self) -> str:
        return "native" if isinstance(self.engine, NativeEngine) else "pyfuse3"

    async def requests(self) -> int:
        await self.engine.drained()  # the kernel waits for no answer to a release
        return self.engine.requests

    async def drained(self) -> None:
        await self.engine.drained()

    async def answered_all_before(self) -> bool:
        engine: Any = self.engine
        is_native = isinstance(engine, NativeEngine)
        return bool(await (engine._has_read_all_before() if is_native else engine._has_answered_all_before()))

    async def wait_served(self) -> None:
        """Return when the engine has stopped serving by itself."""
        with trio.fail_after(20):
            await self.served.wait()

    async def stop(self) -> None:
        self.engine.stop()
        await self.wait_served()
        self.is_stopped = True

    async def need(self, count: int) -> None:
        assert self.awaiting is not None
        self.awaiting.needed = count

    async def under_way(self) -> int:
        assert self.awaiting is not None
        return self.awaiting.under_way

    async def make_file(self, parent: int, name: str, content: str) -> None:
        """Make a file behind the kernel's back."""
        made = self.volume.mknod(parent, name.encode(), stat.S_IFREG | 0o644, 0, Caller(os.geteuid(), os.getegid()))
        self.volume.write(made.inode, 0, content.encode())
        self.volume.forget(made.inode, 1)

    async def overwrite(self, inode: int, content: str) -> None:
        """Change a file behind the kernel's back."""
        self.volume.setattr(inode, AttributeChanges(size=0))
        self.volume.write(inode, 0, content.encode())

    async def invalidate_inode(self, inode: int) -> None:
        await trio.to_thread.run_sync(partial(self.engine.invalidate_inode, inode, content=True))

    async def invalidate_entry(self, parent: int, name: str) -> None:
        await trio.to_thread.run_sync(self.engine.invalidate_entry, parent, name.encode())

    def kill_in_time(self) -> None:
        """Have pyfuse3's loop kill `victim`, if it is set, when it is about to read a request."""
        name = "_wait_fuse_readable"
        wait = vars(pyfuse3)[name]

        async def wait_and_kill() -> bool:
            is_readable: bool = await wait()
            if self.victim is not None:
                victim, self.victim = self.victim, None
                signal.pidfd_send_signal(victim, signal.SIGKILL)
                assert readable(victim, 20)  # it has ended
                os.close(victim)
                self.found_empty = not readable(self.engine._fd, 0)  # type: ignore[attr-defined]  # pyfuse3's
            return is_readable

        vars(pyfuse3)[name] = wait_and_kill

    async def withdraw(self, pid: int) -> None:
        """Kill `pid`, which makes the next request, right before the loop reads that request."""
        self.found_empty = None
        self.victim = os.pidfd_open(pid)

    async def withdrew(self) -> bool | None:
        """Whether the device was empty after `withdraw`; None if that has not happened yet."""
        return self.found_empty

    async def check(self) -> None:
        self.volume.check_invariants()

    async def snapshot(self, name: str) -> None:
        self.volume.take_snapshot(name)

    async def restore(self, name: str, tell: bool = True, replay: bool = False) -> int:
        """How many changes there were."""
        self.told = self.volume.restore_snapshot(name)
        if tell:
            await invalidate_kernel_caches(self.engine, self.told)
        if replay:
            await self.replay.run(self.told)
        return len(self.told.entries) + len(self.told.inodes)

    async def start_replay(self) -> None:
        assert self.told is not None
        self.nursery.start_soon(self.replay.run, self.told)

    async def drop_replays(self) -> None:
        self.replay.drop()

    async def replay_again(self, give_up_s: float = math.inf) -> None:
        assert self.told is not None
        with trio.move_on_after(give_up_s):
            await self.replay.run(self.told)

    async def replay_something(self) -> None:
        await self.replay.run(CacheInvalidation(entries=[EntryChange(1, b"gone", 99, 0)], paths={1: b""}))

    async def content(self, inode: int) -> str:
        """What the volume, not the kernel, has in the file."""
        return bytes(self.volume.read(inode, 0, 1 << 30)).decode()


class _Awaiting:
    """A volume whose every answer but `forget`'s is an awaitable.

    `read` and `statfs` wait until `needed` of them are under way at once, and for ever when `needed` is 0.
    """

    capabilities = VolumeCapabilities(acls=True)  # without shortcuts: they would bypass this class

    def __init__(self, volume: MemoryVolume) -> None:
        self._volume = volume
        self.needed = 1
        self.under_way = 0
        self._enough = trio.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._volume, name)
        if name == "forget" or not callable(method):
            return method

        async def answer(*arguments: Any, **options: Any) -> Any:
            if name in ("read", "statfs"):
                await self._wait()
            await trio.lowlevel.checkpoint()
            return method(*arguments, **options)

        return answer

    async def _wait(self) -> None:
        self.under_way += 1
        try:
            if self.under_way == self.needed:
                self._enough.set()
            await self._enough.wait()
        finally:
            self.under_way -= 1


class _Faulty:
    """A volume whose methods in `faults` raise something that no engine expects."""

    capabilities = VolumeCapabilities(acls=True)  # without shortcuts: they would bypass this class

    def __init__(self, volume: MemoryVolume, faults: list[str]) -> None:
        self._volume = volume
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        if name in self._faults:
            raise LookupError(f"{name} is broken")
        return getattr(self._volume, name)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    settings = json.loads(sys.argv[1])
    trio.run(_Child(settings.pop("mountpoint"), settings).run)


if __name__ == "__main__":
    main()
