"""The native engine on a real mount.

The engine runs in a process of its own, so that no test can deadlock against its own mount; the test asks
that process over a pipe.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import multiprocessing
import os
import signal
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import trio

from protocol.backends.memory import MemoryVolume
from protocol.volume import ROOT_INODE, AttributeChanges, Caller, VolumeCapabilities
from tests.support.leaks import mounts
from tests.support.rights import needs_root
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine

pytestmark = pytest.mark.fuse

libc = ctypes.CDLL(None, use_errno=True)
STATX_BTIME = 0x800
AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2


# -- the process that serves -------------------------------------------------------------------
class Awaiting:
    """A volume whose every answer but `forget`'s is an awaitable.

    `read` and `statfs` wait until `needed` of them are under way at once, and for ever when `needed` is 0.
    """

    capabilities = VolumeCapabilities(acls=True)  # without shortcuts: they would bypass this class

    def __init__(self, volume: MemoryVolume) -> None:
        self._volume = volume
        self.needed = 1
        self.under_way = 0
        self.enough = trio.Event()

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
                self.enough.set()
            await self.enough.wait()
        finally:
            self.under_way -= 1


class Broken:
    """A volume whose `readlink` fails as no volume should."""

    capabilities = VolumeCapabilities(acls=True)  # without shortcuts: they would bypass this class

    def __init__(self, volume: MemoryVolume) -> None:
        self._volume = volume

    def __getattr__(self, name: str) -> Any:
        return getattr(self._volume, name)

    def readlink(self, _: int) -> bytes:
        raise ZeroDivisionError("a bug")


class Server:
    """What the test may ask of the serving process; each method runs on the loop unless it says otherwise."""

    ON_THREAD = frozenset({"invalidate_inode", "invalidate_entry"})
    ASYNC = frozenset({"drained", "has_read_all_before"})

    def __init__(self, kind: str, mountpoint: str, options: dict[str, Any]) -> None:
        self.memory = MemoryVolume()
        self.records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.records.append(handler.format(record))  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        volumes: dict[str, Callable[[MemoryVolume], Any]] = {
            "memory": lambda volume: volume, "awaiting": Awaiting, "broken": Broken
        }  # fmt: skip
        self.volume = volumes[kind](self.memory)
        self.engine = NativeEngine(self.volume, EngineSettings(mountpoint, "native-test", **options))

    def requests(self) -> int:
        return self.engine.requests

    def logged(self) -> list[str]:
        return self.records

    def stop(self) -> None:
        self.engine.stop()

    async def drained(self) -> None:
        await self.engine.drained()

    async def has_read_all_before(self) -> bool:
        return await self.engine._has_read_all_before()

    def need(self, count: int) -> None:
        self.volume.needed = count

    def under_way(self) -> int:
        return int(self.volume.under_way)

    def make_file(self, parent: int, name: str, content: bytes) -> None:
        """Behind the kernel's back."""
        made = self.memory.mknod(parent, name.encode(), stat.S_IFREG | 0o644, 0, Caller(os.geteuid(), os.getegid()))
        self.memory.write(made.inode, 0, content)
        self.memory.forget(made.inode, 1)

    def overwrite(self, inode: int, content: bytes) -> None:
        """Behind the kernel's back."""
        self.memory.setattr(inode, AttributeChanges(size=0))
        self.memory.write(inode, 0, content)

    def content(self, inode: int) -> bytes:
        return bytes(self.memory.read(inode, 0, 1 << 20))

    def count(self, inode: int, byte: bytes) -> int:
        return bytes(self.memory.read(inode, 0, 1 << 30)).count(byte)

    def invalidate_inode(self, inode: int, content: bool) -> None:
        self.engine.invalidate_inode(inode, content=content)

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self.engine.invalidate_entry(parent, name)

    def check_invariants(self) -> None:
        self.memory.check_invariants()

    async def run(self, control: Connection) -> None:
        self.engine.mount()
        try:
            token = trio.lowlevel.current_trio_token()
            threading.Thread(target=self._obey, args=(control, token), daemon=True).start()
            await self.engine.serve()
        finally:
            self.engine.unmount()
            self.engine.unmount()  # twice is as good as once
        control.send(("served", self.engine.requests))

    def _obey(self, control: Connection, token: trio.lowlevel.TrioToken) -> None:
        control.send(("mounted", None))
        try:
            while True:
                name, arguments = control.recv()
                method = getattr(self, name)
                if name == "stop":
                    control.send(("ok", None))  # the process may end before this thread goes on
                    trio.from_thread.run_sync(method, trio_token=token)
                    return
                try:
                    if name in self.ON_THREAD:
                        result = method(*arguments)
                    elif name in self.ASYNC:
                        result = trio.from_thread.run(method, trio_token=token)
                    else:
                        result = trio.from_thread.run_sync(method, *arguments, trio_token=token)
                    control.send(("ok", result))
                except OSError as error:
                    control.send(("error", error))
        except (EOFError, trio.RunFinishedError):
            pass


def serve(kind: str, mountpoint: str, options: dict[str, Any], control: Connection) -> None:
    trio.run(Server(kind, mountpoint, options).run, control)


# -- the test's side ---------------------------------------------------------------------------
class Mounted:
    """A mount, and the process behind it.  `ask` calls a method of `Server`."""

    def __init__(self, path: Path, control: Connection, process: Any) -> None:
        self.path = path
        self.control = control
        self.process = process
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        self.ask("stop")

    def ask(self, name: str, *arguments: Any) -> Any:
        self.control.send((name, arguments))
        return self.answer()

    def answer(self) -> Any:
        assert self.control.poll(20), "the server does not answer"
        kind, result = self.control.recv()
        if kind == "error":
            raise result
        return result

    @contextmanager
    def requests_of(self) -> Iterator[Callable[[], int]]:
        """Gives a function that tells how many requests came since."""
        before = self.ask("requests")
        yield lambda: int(self.ask("requests")) - before


def inode_of(path: Path) -> int:
    return os.stat(path).st_ino


def is_mounted(path: Path) -> bool:
    return any(mount.mountpoint == str(path) for mount in mounts())


@contextmanager
def mounted(directory: Path, kind: str = "memory", **options: Any) -> Iterator[Mounted]:
    path = directory / "mnt with blank"
    path.mkdir(exist_ok=True)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(kind, str(path), options, theirs))
    process.start()
    theirs.close()
    mount = Mounted(path, ours, process)
    try:
        mount.answer()
        yield mount
        if not mount.stopped:
            mount.ask("check_invariants")
            mount.stop()
    finally:
        process.join(20)
        if process.exitcode is None:
            process.kill()
            process.join()
        left = is_mounted(path)
        if left:
            subprocess.run(["umount", "-l", path], check=False)
        ours.close()
    assert process.exitcode == 0
    assert not left


@pytest.fixture(name="shared", scope="module")
def one_mount_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("native")) as mount:
        yield mount


@pytest.fixture(name="mount")
def a_directory_of_the_mount(shared: Mounted, request: pytest.FixtureRequest) -> Mounted:
    """The shared mount, with a new directory in it as its path."""
    path = shared.path / request.node.name[:200]
    path.mkdir()
    return Mounted(path, shared.control, shared.process)


@pytest.fixture(name="top")
def the_top(mount: Mounted) -> Path:
    return mount.path


# -- mounting ----------------------------------------------------------------------------------
def test_the_mount_shows_type_and_source(shared: Mounted) -> None:
    (found,) = [m for m in mounts() if m.mountpoint == str(shared.path)]
    assert (found.fs_type, found.source) == ("fuse.vfsd", "vfsd:native-test")


def test_a_mount_point_that_is_missing_is_refused_with_what_fusermount_said(workdir: Path) -> None:
    engine = NativeEngine(MemoryVolume(), EngineSettings(str(workdir / "missing"), "x"))
    with pytest.raises(FileNotFoundError, match="fusermount3"):
        engine.mount()
    engine.unmount()


def test_a_read_only_mount_refuses_changes(workdir: Path) -> None:
    with mounted(workdir, read_only=True) as mount:
        with pytest.raises(OSError, match="Read-only") as caught:
            (mount.path / "x").touch()
        assert caught.value.errno == errno.EROFS


def test_unmounting_from_outside_ends_serving(workdir: Path) -> None:
    with mounted(workdir) as mount:
        mount.stopped = True
        subprocess.run(["fusermount3", "-u", mount.path], check=True)
        mount.process.join(20)
        assert mount.process.exitcode == 0


def test_a_busy_mount_is_gone_from_the_mount_table_after_a_stop(workdir: Path) -> None:
    with mounted(workdir) as mount:
        (mount.path / "f").write_bytes(b"x")
        busy = os.open(mount.path / "f", os.O_RDONLY)
        mount.stop()
        mount.process.join(20)
        assert not is_mounted(mount.path)
        os.close(busy)


@pytest.mark.extended
def test_a_mount_that_covers_ours_is_not_taken_away_with_it(workdir: Path) -> None:
    with mounted(workdir) as mount:
        subprocess.run(["mount", "-t", "tmpfs", "stranger", mount.path], check=True)
        mount.stop()
        mount.process.join(20)
        covered = {m.source for m in mounts() if m.mountpoint == str(mount.path)}
        for _ in covered:
            subprocess.run(["umount", "-l", mount.path], check=True)
        assert covered == {"stranger", "vfsd:native-test"}


# -- files -------------------------------------------------------------------------------------
def test_content_comes_back(top: Path) -> None:
    data = os.urandom(3_000_001)
    (top / "f").write_bytes(data)
    assert (top / "f").read_bytes() == data
    with open(top / "f", "r+b") as file:
        file.seek(1_000_000)
        file.write(b"new")
    assert (top / "f").read_bytes() == data[:1_000_000] + b"new" + data[1_000_003:]


def test_cold_content_comes_back_in_all_request_sizes(mount: Mounted) -> None:
    data = os.urandom(3_000_001)
    (mount.path / "f").write_bytes(data)
    inode = os.stat(mount.path / "f").st_ino
    for size in (1, 4096, 100_000, 1 << 20, 1 << 22):
        mount.ask("invalidate_inode", inode, True)
        with open(mount.path / "f", "rb", buffering=0) as file:
            got = [file.read(size), file.read()]
        assert b"".join(got) == data


def test_opening_with_truncate_and_with_append(top: Path) -> None:
    (top / "f").write_bytes(b"long content")
    (top / "f").write_bytes(b"short")
    assert (top / "f").read_bytes() == b"short"
    with open(top / "f", "ab") as file:
        file.write(b" and more")
    assert (top / "f").read_bytes() == b"short and more"


def test_offsets_beyond_four_gibibytes(top: Path) -> None:
    offset = 5 * 2**30 + 3
    fd = os.open(top / "big", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"far", offset)
    os.truncate(top / "big", 10**15)
    assert os.fstat(fd).st_size == 10**15
    assert os.pread(fd, 5, offset - 1) == b"\0far\0"
    os.pwrite(fd, b"!", 2**62)
    assert os.fstat(fd).st_size == 2**62 + 1
    os.close(fd)


def test_an_unlinked_open_file_stays_readable_and_writable(mount: Mounted) -> None:
    fd = os.open(mount.path / "f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"still")
    os.unlink(mount.path / "f")
    os.write(fd, b" here")
    assert os.pread(fd, 100, 0) == b"still here"
    assert os.fstat(fd).st_nlink == 0
    assert os.listdir(mount.path) == []
    os.close(fd)


def test_shared_mappings_are_written_back(mount: Mounted) -> None:
    fd = os.open(mount.path / "f", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, 10_000)
    with mmap.mmap(fd, 10_000) as mapped:
        mapped[5000:5005] = b"dirty"
        libc.syncfs(fd)
        mount.ask("drained")
        assert mount.ask("content", os.fstat(fd).st_ino)[5000:5005] == b"dirty"
    os.close(fd)


def test_dirty_pages_are_in_the_volume_once_markers_have_passed(mount: Mounted) -> None:
    """What `drained` relies on if the device is never empty."""
    pages = 1000  # every second one is dirty: each is a request, more than the background queue lets through at once
    fd = os.open(mount.path / "f", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, pages * 4096)
    with mmap.mmap(fd, pages * 4096) as mapped:
        for page in range(0, pages, 2):
            mapped[page * 4096] = ord("x")
        libc.syncfs(fd)
        until = time.monotonic() + 60
        while not mount.ask("has_read_all_before"):
            assert time.monotonic() < until, "the markers do not pass"
        assert mount.ask("count", os.fstat(fd).st_ino, b"x") == pages // 2
    os.close(fd)
    os.unlink(mount.path / "f")


@pytest.mark.extended
def test_markers_do_not_pass_on_a_mount_that_is_covered(workdir: Path) -> None:
    with mounted(workdir) as mount:
        subprocess.run(["mount", "-t", "tmpfs", "stranger", mount.path], check=True)
        passed = mount.ask("has_read_all_before")
        subprocess.run(["umount", "-l", mount.path], check=True)
        assert not passed
        assert mount.ask("has_read_all_before")


def test_holes_are_found_and_made(top: Path) -> None:
    fd = os.open(top / "f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x" * 65536, 1 << 20)
    assert os.lseek(fd, 0, os.SEEK_DATA) == 1 << 20
    assert os.lseek(fd, 1 << 20, os.SEEK_HOLE) == (1 << 20) + 65536
    with pytest.raises(OSError, match="No such device or address"):
        os.lseek(fd, 1 << 21, os.SEEK_DATA)
    allocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 1 << 20, 4096)
    assert os.pread(fd, 4097, 1 << 20) == bytes(4096) + b"x"
    os.posix_fallocate(fd, 0, 1 << 22)
    assert os.fstat(fd).st_size == 1 << 22
    os.close(fd)


def allocate(fd: int, mode: int, offset: int, length: int) -> None:
    arguments = (ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_long(offset), ctypes.c_long(length))
    assert libc.fallocate(*arguments) == 0, os.strerror(ctypes.get_errno())


def test_a_copy_of_a_range_is_done_by_the_volume(mount: Mounted) -> None:
    data = os.urandom(1 << 20)
    (mount.path / "a").write_bytes(data)
    source = os.open(mount.path / "a", os.O_RDONLY)
    target = os.open(mount.path / "b", os.O_RDWR | os.O_CREAT)
    with mount.requests_of() as count:
        copied = os.copy_file_range(source, target, 500_000, 100, 7)
        requests = count()
    assert copied == 500_000
    assert requests <= 5  # no reads and writes of 500,000 bytes
    assert os.pread(target, 600_000, 0) == bytes(7) + data[100:500_100]
    os.close(source)
    os.close(target)


def test_times_have_nanoseconds_and_may_lie_before_the_epoch(top: Path) -> None:
    (top / "f").touch()
    for atime, mtime in ((1_234_567_890_123_456_789, 987_654_321_987_654_321), (-1, -(10**18) - 7)):
        os.utime(top / "f", ns=(atime, mtime))
        found = os.stat(top / "f")
        assert (found.st_atime_ns, found.st_mtime_ns) == (atime, mtime)
    before = time.time_ns()
    os.utime(top / "f")
    assert before <= os.stat(top / "f").st_mtime_ns <= time.time_ns()


def test_statx_shows_the_time_of_birth(top: Path) -> None:
    before = time.time_ns()
    (top / "f").write_bytes(b"x")
    os.utime(top / "f", ns=(0, 0))
    buffer = ctypes.create_string_buffer(256)
    assert libc.statx(-100, os.fsencode(top / "f"), 0, 0xFFF, buffer) == 0
    mask, _, _, nlink, uid, gid, mode, _, inode, size, blocks, _ = struct.unpack_from("=IIQIIIHHQQQQ", buffer)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 80)
    assert mask & STATX_BTIME
    assert before <= seconds * 10**9 + nanoseconds <= time.time_ns()
    found = os.stat(top / "f")
    assert (nlink, uid, gid, mode) == (1, found.st_uid, found.st_gid, found.st_mode)
    assert (inode, size, blocks) == (found.st_ino, 1, found.st_blocks)


@pytest.mark.extended
def test_changing_content_as_another_user_clears_set_id_bits(workdir: Path) -> None:
    with mounted(workdir, allow_other=True) as mount:
        os.chmod(mount.path, 0o755)
        for name, act in (("w", "printf x >>"), ("t", ": >")):
            file = mount.path / name
            file.write_bytes(b"content")
            os.chmod(file, 0o6777)
            subprocess.run([*AS_NOBODY, "sh", "-c", f"{act} {name}"], cwd=mount.path, check=True)
            assert stat.S_IMODE(os.stat(file).st_mode) == 0o777
        os.chmod(file, 0o6755)
        os.chown(file, 1, 1)
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o755


@pytest.mark.extended
def test_permissions_are_checked_by_the_kernel(workdir: Path) -> None:
    with mounted(workdir, allow_other=True) as mount:
        (mount.path / "secret").write_bytes(b"x")
        os.chmod(mount.path / "secret", 0o600)
        os.chmod(mount.path, 0o755)
        done = subprocess.run([*AS_NOBODY, "cat", "secret"], cwd=mount.path, capture_output=True, check=False)
        assert done.returncode == 1
        assert b"Permission denied" in done.stderr


# What the kernel need not check it need not ask for: with allow_other it wants the directory's mode before each change.
@pytest.mark.extended
@pytest.mark.parametrize(("allow_other", "requests"), [(False, 0), (True, 1)])
def test_where_only_root_enters_a_change_of_a_directory_asks_nothing_for_permissions(
    workdir: Path, allow_other: bool, requests: int
) -> None:
    with mounted(workdir, allow_other=allow_other) as mount:
        table = Path("/proc/self/mountinfo").read_text().splitlines()
        assert ("default_permissions" in next(line for line in table if str(workdir) in line)) == allow_other
        os.mkdir(mount.path / "first")
        with mount.requests_of() as count:
            os.mkdir(mount.path / "second")
            assert count() == 2 + requests  # LOOKUP, MKDIR
        with mount.requests_of() as count:
            os.rename(mount.path / "second", mount.path / "third")
            assert count() == 2 + requests  # LOOKUP, RENAME


@pytest.mark.extended
@pytest.mark.parametrize("allow_other", [False, True])
def test_root_may_do_all_but_execute_what_nobody_may(workdir: Path, allow_other: bool) -> None:
    with mounted(workdir, allow_other=allow_other) as mount:
        script = mount.path / "script"
        script.write_text("#!/bin/sh\nexit 7\n")
        os.chown(script, 65534, 65534)
        for mode, executable in ((0o000, False), (0o666, False), (0o001, True), (0o700, True)):
            os.chmod(script, mode)
            assert os.access(script, os.R_OK | os.W_OK)
            assert os.access(script, os.X_OK) == executable
            if executable:
                assert subprocess.run([script], check=False).returncode == 7
            else:
                with pytest.raises(PermissionError):
                    subprocess.run([script], check=False)
        os.mkdir(mount.path / "closed", 0)
        assert os.access(mount.path / "closed", os.R_OK | os.W_OK | os.X_OK)
        (mount.path / "closed" / "f").touch()
        assert subprocess.run(["ls"], cwd=mount.path / "closed", capture_output=True, check=True).stdout == b"f\n"
        assert not os.access(mount.path / "absent", os.F_OK)


@pytest.mark.extended
def test_the_mode_that_an_acl_brings_is_seen_at_once(workdir: Path) -> None:
    with mounted(workdir) as mount:
        (mount.path / "f").touch()
        os.chmod(mount.path / "f", 0o644)
        entries = ((0x01, 6, -1), (0x02, 7, 65534), (0x04, 4, -1), (0x10, 7, -1), (0x20, 0, -1))
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
        assert stat.S_IMODE(os.stat(mount.path / "f").st_mode) == 0o644
        os.setxattr(mount.path / "f", "system.posix_acl_access", acl)
        assert stat.S_IMODE(os.stat(mount.path / "f").st_mode) == 0o670


# -- names -------------------------------------------------------------------------------------
@needs_root
def test_names_of_all_kinds_come_and_go(top: Path) -> None:
    os.mkdir(top / "d", 0o750)
    os.symlink("d/no such", top / "l")
    os.mkfifo(top / "p", 0o600)
    os.mknod(top / "dev", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    (top / "f").write_bytes(b"x")
    os.link(top / "f", top / "d" / "g")
    assert os.readlink(top / "l") == "d/no such"
    assert os.stat(top / "f").st_ino == os.stat(top / "d" / "g").st_ino
    assert os.stat(top / "f").st_nlink == 2
    assert os.stat(top / "dev").st_rdev == os.makedev(1, 3)
    assert stat.S_ISFIFO(os.stat(top / "p").st_mode)
    assert stat.S_IMODE(os.stat(top / "d").st_mode) == 0o750
    assert sorted(os.listdir(top)) == ["d", "dev", "f", "l", "p"]
    with pytest.raises(OSError, match="not empty"):
        os.rmdir(top / "d")
    for name in ("l", "p", "dev", "f", "d/g"):
        os.unlink(top / name)
    os.rmdir(top / "d")
    assert os.listdir(top) == []


def test_the_longest_name_fits_and_a_longer_one_does_not(top: Path) -> None:
    (top / ("x" * 255)).touch()
    assert os.listdir(top) == ["x" * 255]
    with pytest.raises(OSError, match="too long"):
        (top / ("x" * 256)).touch()


def test_names_need_not_be_text(top: Path) -> None:
    name = os.fsencode(top) + b"/\xff\xfe\n"
    os.close(os.open(name, os.O_CREAT))
    assert os.listdir(os.fsencode(top)) == [b"\xff\xfe\n"]


def rename(old: Path, new: Path, flags: int) -> int:
    """The errno of renameat2(2), 0 for success."""
    return 0 if libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags) == 0 else ctypes.get_errno()


def test_rename_in_all_its_kinds(top: Path) -> None:
    (top / "a").write_bytes(b"a")
    (top / "b").write_bytes(b"b")
    assert rename(top / "a", top / "b", RENAME_NOREPLACE) == errno.EEXIST
    assert rename(top / "a", top / "b", RENAME_EXCHANGE) == 0
    assert ((top / "a").read_bytes(), (top / "b").read_bytes()) == (b"b", b"a")
    assert rename(top / "a", top / "c", RENAME_NOREPLACE) == 0
    os.rename(top / "c", top / "b")
    assert sorted(os.listdir(top)) == ["b"]
    assert (top / "b").read_bytes() == b"b"
    assert rename(top / "b", top / "d", RENAME_WHITEOUT) == 0
    left = os.stat(top / "b")
    assert (stat.S_IFMT(left.st_mode), left.st_rdev) == (stat.S_IFCHR, 0)


def test_an_unnamed_file_can_be_given_a_name(top: Path) -> None:
    fd = os.open(top, os.O_TMPFILE | os.O_RDWR, 0o640)
    os.write(fd, b"content")
    assert os.listdir(top) == []
    assert libc.linkat(-100, f"/proc/self/fd/{fd}".encode(), -100, os.fsencode(top / "named"), 0x400) == 0
    os.close(fd)
    assert (top / "named").read_bytes() == b"content"
    assert stat.S_IMODE(os.stat(top / "named").st_mode) == 0o640


def test_a_large_directory_is_listed_completely_also_while_it_is_emptied(top: Path) -> None:
    expected = {f"file-with-a-long-name-{number}" for number in range(3000)}
    for name in expected:
        os.mknod(top / name)
    with os.scandir(top) as entries:
        assert {entry.name for entry in entries if entry.stat().st_nlink == 1} == expected
    with os.scandir(top) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(top) == []


def test_the_umask_is_applied_by_the_kernel(top: Path) -> None:
    old = os.umask(0o027)
    try:
        os.mkdir(top / "d", 0o777)
        os.close(os.open(top / "f", os.O_CREAT, 0o666))
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(top / "d").st_mode) == 0o750
    assert stat.S_IMODE(os.stat(top / "f").st_mode) == 0o640


# -- the rest ----------------------------------------------------------------------------------
def test_extended_attributes(top: Path) -> None:
    (top / "f").touch()
    os.setxattr(top / "f", "user.one", b"1" * 1000)
    os.setxattr(top / "f", "user.empty", b"")
    assert sorted(os.listxattr(top / "f")) == ["user.empty", "user.one"]
    assert os.getxattr(top / "f", "user.one") == b"1" * 1000
    assert os.getxattr(top / "f", "user.empty") == b""
    with pytest.raises(FileExistsError):
        os.setxattr(top / "f", "user.one", b"", os.XATTR_CREATE)
    os.removexattr(top / "f", "user.one")
    with pytest.raises(OSError, match="No data") as caught:
        os.getxattr(top / "f", "user.one")
    assert caught.value.errno == errno.ENODATA
    small = ctypes.create_string_buffer(1)
    os.setxattr(top / "f", "user.one", b"12")
    assert libc.getxattr(os.fsencode(top / "f"), b"user.one", small, 1) == -1
    assert ctypes.get_errno() == errno.ERANGE


def test_statfs(top: Path) -> None:
    found = os.statvfs(top)
    assert found.f_namemax == 255
    assert found.f_bsize > 0
    assert 0 < found.f_bfree <= found.f_blocks


def test_locks_hold_between_processes(top: Path) -> None:
    with open(top / "f", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = subprocess.run(["flock", "-n", top / "f", "true"], check=False)
        assert done.returncode == 1
        fcntl.flock(file, fcntl.LOCK_UN)
        subprocess.run(["flock", "-n", top / "f", "true"], check=True)


def test_an_unknown_ioctl_is_refused_as_such(top: Path) -> None:
    with open(top / "f", "wb") as file, pytest.raises(OSError, match="ioctl") as caught:
        fcntl.ioctl(file, 0x12345678)
    assert caught.value.errno == errno.ENOTTY


def test_fsync_of_files_and_directories(top: Path) -> None:
    for path, flags in ((top / "f", os.O_CREAT | os.O_WRONLY), (top, os.O_RDONLY)):
        fd = os.open(path, flags)
        os.fsync(fd)
        os.fdatasync(fd)
        os.close(fd)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "requests"), [("memory", 0), ("awaiting", 2)])
def test_a_volume_is_asked_to_make_durable_only_if_it_has_anything_durable(
    workdir: Path, kind: str, requests: int
) -> None:
    with mounted(workdir, kind) as mount:
        file, directory = os.open(mount.path / "f", os.O_CREAT | os.O_RDWR), os.open(mount.path, os.O_RDONLY)
        for descriptor in (file, directory):
            os.fsync(descriptor)
        with mount.requests_of() as count:
            for descriptor in (file, directory):
                os.fsync(descriptor)
            assert count() == requests
        os.close(file)
        os.close(directory)


def test_fsync_brings_what_was_mapped_into_the_volume(mount: Mounted) -> None:
    (mount.path / "f").write_bytes(bytes(8192))
    with open(mount.path / "f", "r+b") as file:
        for number in (1, 2):
            with mmap.mmap(file.fileno(), 0) as pages:
                pages[4096:4099] = b"%03d" % number
                os.fsync(file.fileno())
                assert mount.ask("content", inode_of(mount.path / "f"))[4096:4099] == b"%03d" % number


# -- caches ------------------------------------------------------------------------------------
def test_a_warm_open_read_and_close_ask_nothing(mount: Mounted) -> None:
    (mount.path / "f").write_bytes(b"x" * 10_000)
    (mount.path / "f").read_bytes()
    os.stat(mount.path / "f")
    with mount.requests_of() as count:
        for _ in range(10):
            with open(mount.path / "f", "rb", buffering=0) as file:
                assert len(file.read(20_000)) == 10_000
        assert count() == 0


def test_a_name_known_to_be_missing_is_not_asked_for_again(mount: Mounted) -> None:
    assert not (mount.path / "nope").exists()
    with mount.requests_of() as count:
        assert not (mount.path / "nope").exists()
        assert count() == 0


@pytest.mark.extended
def test_absence_is_asked_for_again_where_others_may_end_it(workdir: Path) -> None:
    with mounted(workdir, cache_timeout_s=60.0) as mount:
        assert not (mount.path / "f").exists()
        mount.ask("make_file", ROOT_INODE, "f", b"there")
        assert (mount.path / "f").read_bytes() == b"there"


def test_creating_what_the_kernel_wrongly_believes_absent_opens_it(mount: Mounted) -> None:
    assert not (mount.path / "f").exists()
    mount.ask("make_file", inode_of(mount.path), "f", b"there")
    fd = os.open(mount.path / "f", os.O_CREAT | os.O_RDWR)
    assert os.read(fd, 10) == b"there"
    os.close(fd)


def test_creating_exclusively_what_the_kernel_wrongly_believes_absent_fails(mount: Mounted) -> None:
    assert not (mount.path / "f").exists()
    mount.ask("make_file", inode_of(mount.path), "f", b"there")
    with pytest.raises(FileExistsError):
        os.open(mount.path / "f", os.O_CREAT | os.O_EXCL | os.O_RDWR)
    mount.ask("make_file", inode_of(mount.path), "g", b"there")
    with pytest.raises(FileExistsError):
        os.mknod(mount.path / "g")


def test_a_listing_and_a_symlink_are_kept(mount: Mounted) -> None:
    (mount.path / "d").mkdir()
    os.symlink("d", mount.path / "l")
    assert sorted(os.listdir(mount.path)) == ["d", "l"]
    assert os.readlink(mount.path / "l") == "d"
    os.stat(mount.path)
    with mount.requests_of() as count:
        assert sorted(os.listdir(mount.path)) == ["d", "l"]
        assert os.readlink(mount.path / "l") == "d"
        assert count() == 0


def test_a_write_asks_for_no_attribute_before_each(mount: Mounted) -> None:
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"first")
        with mount.requests_of() as count:
            file.writelines([b"more"] * 20)
            assert count() == 20


def test_programs_write_in_large_pieces(mount: Mounted) -> None:
    lines = [b"a line of some length\n"] * 5000
    with mount.requests_of() as count:
        with open(mount.path / "f", "wb") as file:
            file.writelines(lines)
        assert count() < 10
    assert (mount.path / "f").read_bytes() == b"".join(lines)


def test_an_invalidated_inode_is_seen_anew_at_once(mount: Mounted) -> None:
    (mount.path / "f").write_bytes(b"old")
    assert (mount.path / "f").read_bytes() == b"old"
    inode = inode_of(mount.path / "f")
    mount.ask("overwrite", inode, b"new content")
    mount.ask("invalidate_inode", inode, True)
    assert os.stat(mount.path / "f").st_size == 11
    assert (mount.path / "f").read_bytes() == b"new content"


def test_an_invalidated_entry_is_seen_anew_at_once(mount: Mounted) -> None:
    assert not (mount.path / "f").exists()
    assert os.listdir(mount.path) == []
    mount.ask("make_file", inode_of(mount.path), "f", b"there")
    assert not (mount.path / "f").exists()  # the kernel had no reason to ask
    mount.ask("invalidate_entry", inode_of(mount.path), b"f")
    assert (mount.path / "f").read_bytes() == b"there"
    assert os.listdir(mount.path) == ["f"]


def test_what_the_kernel_does_not_know_can_be_invalidated(mount: Mounted) -> None:
    mount.ask("invalidate_entry", ROOT_INODE, b"never heard of")
    mount.ask("invalidate_entry", 4711, b"x")
    mount.ask("invalidate_inode", 4711, True)


def test_with_a_timeout_of_zero_changes_behind_the_mount_are_seen(workdir: Path) -> None:
    with mounted(workdir, cache_timeout_s=0.0) as mount:
        (mount.path / "f").write_bytes(b"old")
        assert (mount.path / "f").read_bytes() == b"old"
        assert not (mount.path / "g").exists()
        mount.ask("overwrite", inode_of(mount.path / "f"), b"newer")
        mount.ask("make_file", ROOT_INODE, "g", b"g")
        assert (mount.path / "f").read_bytes() == b"newer"
        assert (mount.path / "g").read_bytes() == b"g"
        assert sorted(os.listdir(mount.path)) == ["f", "g"]


# -- volumes that must wait, and volumes that fail -----------------------------------------------
@pytest.mark.extended
def test_a_volume_that_must_wait_serves_the_same(workdir: Path) -> None:
    with mounted(workdir, "awaiting") as mount:
        top = mount.path
        data = os.urandom(300_000)
        for number in range(5):
            (top / f"f{number}").write_bytes(data)
        os.setxattr(top / "f0", "user.x", b"1")
        os.rename(top / "f4", top / "g")
        assert os.getxattr(top / "f0", "user.x") == b"1"
        assert os.listxattr(top / "f0") == ["user.x"]
        assert (top / "g").read_bytes() == data
        assert not (top / "f4").exists()
        with os.scandir(top) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        assert sizes == dict.fromkeys(["f0", "f1", "f2", "f3", "g"], 300_000)
        mount.ask("drained")


def test_a_request_that_waits_holds_up_no_other(workdir: Path) -> None:
    with mounted(workdir, "awaiting") as mount:
        for number in range(3):
            (mount.path / f"f{number}").write_bytes(b"x" * 100)
            mount.ask("invalidate_inode", inode_of(mount.path / f"f{number}"), True)
        mount.ask("need", 3)
        # None of the three is answered before all three are asked.
        readers = [subprocess.Popen(["cat", mount.path / f"f{n}"], stdout=subprocess.PIPE) for n in range(3)]
        assert [reader.communicate(timeout=20)[0] for reader in readers] == [b"x" * 100] * 3


@pytest.mark.extended
def test_an_interrupted_request_stops_waiting(workdir: Path) -> None:
    with mounted(workdir, "awaiting") as mount:
        mount.ask("need", 0)
        asker = subprocess.Popen(["stat", "-f", mount.path], stdout=subprocess.PIPE)
        while not mount.ask("under_way"):
            assert asker.poll() is None
        asker.send_signal(signal.SIGINT)
        asker.communicate(timeout=20)
        assert asker.returncode == -signal.SIGINT
        assert mount.ask("under_way") == 0


@pytest.mark.extended
def test_a_stop_leaves_nobody_waiting(workdir: Path) -> None:
    with mounted(workdir, "awaiting") as mount:
        (mount.path / "f").write_bytes(b"x" * 100)
        mount.ask("invalidate_inode", inode_of(mount.path / "f"), True)
        mount.ask("need", 0)
        reader = subprocess.Popen(["cat", mount.path / "f"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        while not mount.ask("under_way"):
            assert reader.poll() is None
        mount.stop()
        reader.communicate(timeout=20)
        assert reader.returncode == 1


@pytest.mark.extended
def test_what_nobody_expected_is_eio_and_one_log_entry_with_its_traceback(workdir: Path) -> None:
    with mounted(workdir, "broken") as mount:
        os.symlink("target", mount.path / "l")
        with pytest.raises(OSError, match="Input/output") as caught:
            os.readlink(mount.path / "l")
        assert caught.value.errno == errno.EIO
        (logged,) = mount.ask("logged")
        assert "READLINK" in logged
        assert "ZeroDivisionError: a bug" in logged
        (mount.path / "f").write_bytes(b"still alive")
