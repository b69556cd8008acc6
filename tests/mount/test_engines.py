"""The engines on real mounts: caches, requests, volumes that wait or fail.  `test_semantics_*` have POSIX behaviour.

The engine runs in a process of its own, so that no test can deadlock against its own mount.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.volume import ROOT_INODE
from tests.mount.engine_child import Served, libc, served
from tests.support.leaks import mounts
from tests.support.rights import need_root, needs_root
from tests.support.session_directories import new_directory
from tests.support.suites import one_of
from tests.support.waiting import wait_until
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine
from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine

pytestmark = pytest.mark.fuse

NOBODY = 65534
STATX_BTIME = 0x800
ENGINES = {"native": NativeEngine, "pyfuse3": Pyfuse3Engine}
_numbers = itertools.count()
engine = one_of(list(ENGINES))


@pytest.fixture(scope="module", params=ENGINES)
def shared(request: pytest.FixtureRequest, session_dir: str) -> Iterator[Served]:
    """One mount of each engine, for the tests that need no other."""
    with served(str(new_directory(session_dir, "engine")), engine=request.param) as child:
        yield child


@pytest.fixture
def top(shared: Served) -> Path:
    """A new directory in the mount."""
    path = Path(shared.path, f"d{next(_numbers)}")
    path.mkdir()
    return path


native = pytest.mark.parametrize("shared", ["native"], indirect=True)
pyfuse3 = pytest.mark.parametrize("shared", ["pyfuse3"], indirect=True)


@pytest.fixture
def mount(engine: str, workdir: Path) -> Iterator[Served]:
    with served(str(workdir), engine=engine) as child:
        yield child


def requests(mount: Served, action: Callable[[], object]) -> int:
    """The number of requests that an action sends."""
    before = mount.call("requests")
    action()
    return int(mount.call("requests") - before)


def is_mounted(path: str) -> bool:
    return any(mount.mountpoint == path for mount in mounts())


def inode_of(path: Path) -> int:
    return path.stat().st_ino


# -- mounting ----------------------------------------------------------------------------------
def test_the_mount_shows_type_and_source(shared: Served) -> None:
    (found,) = [mount for mount in mounts() if mount.mountpoint == shared.path]
    assert (found.fs_type, found.source) == ("fuse.vfsd", "vfsd:test")


@pytest.mark.parametrize(
    ("engine", "make", "expected", "said"),
    [
        ("native", None, FileNotFoundError, "fusermount3"),
        ("pyfuse3", None, FileNotFoundError, "place"),
        ("pyfuse3", Path.touch, NotADirectoryError, "place"),
    ],
)
def test_only_a_directory_can_be_mounted_on(
    engine: str, workdir: Path, make: Callable[[Path], object] | None, expected: type[OSError], said: str
) -> None:
    place = workdir / "place"
    if make is not None:
        make(place)
    subject = ENGINES[engine](MemoryVolume(), EngineSettings(str(place), "test"))
    with pytest.raises(expected, match=said):
        subject.mount()
    subject.unmount()


def test_a_mount_that_fails_says_what_libfuse_said_as_an_error_and_not_on_the_terminal(
    workdir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    subject = Pyfuse3Engine(MemoryVolume(), EngineSettings(str(workdir), "test,no_such_option"))
    with pytest.raises(OSError, match="no_such_option"):
        subject.mount()
    subject.unmount()
    assert capfd.readouterr().err == ""


def test_a_read_only_mount_is_read_only_for_the_kernel(engine: str, workdir: Path) -> None:
    with served(str(workdir), engine=engine, read_only=True) as child:
        assert os.statvfs(child.path).f_flag & os.ST_RDONLY
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            Path(child.path, "file").touch()


def test_unmounting_from_outside_ends_serving(mount: Served) -> None:
    subprocess.run(["fusermount3", "-u", mount.path], check=True)
    mount.call("wait_served")


def test_a_busy_mount_is_gone_from_the_mount_table_after_a_stop(mount: Served) -> None:
    directory = os.open(mount.path, os.O_DIRECTORY)
    opened = os.open("file", os.O_CREAT | os.O_RDWR, dir_fd=directory)
    mount.stop()
    assert not is_mounted(mount.path)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.statvfs(directory)
    for descriptor in (directory, opened):
        with contextlib.suppress(OSError):  # what flushes says ENOTCONN, too
            os.close(descriptor)


@pytest.mark.extended
def test_a_mount_that_covers_ours_is_not_taken_away_with_it(workdir: Path) -> None:
    with served(str(workdir), engine="native", expected_log="covered by another mount") as mount:
        subprocess.run(["mount", "-t", "tmpfs", "stranger", mount.path], check=True)
        passed = mount.call("answered_all_before")
        mount.stop()
        covered = {each.source for each in mounts() if each.mountpoint == mount.path}
        for _ in covered:
            subprocess.run(["umount", "-l", mount.path], check=True)
    assert covered == {"stranger", "vfsd:test"}
    assert not passed  # the markers, which did not reach the mount


def test_requests_whose_callers_are_killed_before_they_are_read_do_not_stop_the_loop(workdir: Path) -> None:
    look = "import os, sys; sys.stdin.read(); os.path.exists(sys.argv[1])"
    with served(str(workdir), withdraws=True) as child:
        for number in range(3):
            victim = subprocess.Popen([sys.executable, "-c", look, f"{child.path}/{number}"], stdin=subprocess.PIPE)
            child.call("withdraw", pid=victim.pid)
            victim.communicate()
            assert victim.returncode == -signal.SIGKILL
            # No other request comes, which would end a read that waits.
            child.ask("withdrew")
            assert child.answer(patience_s=20), "the request was read before its caller was killed"
        assert not os.path.exists(child.path + "/after")


# -- content -----------------------------------------------------------------------------------
def test_cold_content_comes_back_in_all_request_sizes(shared: Served, top: Path) -> None:
    data = os.urandom(5_000_017)
    (top / "f").write_bytes(data)
    for size in (1, 4096, 100_000, 1 << 20, 1 << 22):
        shared.call("invalidate_inode", inode=inode_of(top / "f"))
        with open(top / "f", "rb", buffering=0) as file:
            assert b"".join([file.read(size), file.read()]) == data


def test_dirty_pages_are_in_the_volume_once_the_engine_is_drained(shared: Served, top: Path) -> None:
    with open(top / "f", "w+b") as file:
        file.truncate(8192)
        with mmap.mmap(file.fileno(), 8192) as mapped:
            mapped[4096:4103] = b"written"
            assert libc.syncfs(file.fileno()) == 0
            shared.call("drained")
            assert shared.call("content", inode=inode_of(top / "f")) == "\0" * 4096 + "written" + "\0" * 4089


def test_dirty_pages_are_in_the_volume_once_markers_have_passed(shared: Served, top: Path) -> None:
    """What `drained` relies on if the device is never empty."""
    pages = 1000  # every second one is dirty: each is a request, more than the background queue lets through at once
    with open(top / "f", "w+b") as file:
        file.truncate(pages * 4096)
        with mmap.mmap(file.fileno(), pages * 4096) as mapped:
            for page in range(0, pages, 2):
                mapped[page * 4096] = ord("x")
            assert libc.syncfs(file.fileno()) == 0
            wait_until(lambda: bool(shared.call("answered_all_before")), "the markers pass")
            assert shared.call("content", inode=inode_of(top / "f")).count("x") == pages // 2
    os.unlink(top / "f")


@native
def test_fsync_brings_what_was_mapped_into_the_volume(shared: Served, top: Path) -> None:
    (top / "f").write_bytes(bytes(8192))
    with open(top / "f", "r+b") as file:
        for number in (1, 2):
            with mmap.mmap(file.fileno(), 0) as pages:
                pages[4096:4099] = b"%03d" % number
                os.fsync(file.fileno())
                assert shared.call("content", inode=inode_of(top / "f"))[4096:4099] == f"{number:03d}"


@native
def test_a_copy_of_a_range_is_done_by_the_volume(shared: Served, top: Path) -> None:
    data = os.urandom(1 << 20)
    (top / "a").write_bytes(data)
    with open(top / "a", "rb") as source, open(top / "b", "w+b") as target:
        descriptors = source.fileno(), target.fileno()
        # No reads and writes of 500,000 bytes.
        assert requests(shared, lambda: os.copy_file_range(*descriptors, 500_000, 100, 7)) <= 5
        assert target.read() == bytes(7) + data[100:500_100]


# -- attributes and names ----------------------------------------------------------------------
@native
def test_statx_shows_the_time_of_birth(top: Path) -> None:
    (top / "f").write_bytes(b"x")
    born = os.stat(top / "f").st_mtime_ns
    os.utime(top / "f", ns=(0, 0))
    buffer = ctypes.create_string_buffer(256)
    assert libc.statx(-100, os.fsencode(top / "f"), 0, 0xFFF, buffer) == 0
    mask, _, _, nlink, uid, gid, mode, _, inode, size, blocks, _ = struct.unpack_from("=IIQIIIHHQQQQ", buffer)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 80)
    assert mask & STATX_BTIME
    assert born - 10**9 < seconds * 10**9 + nanoseconds <= born
    found = os.stat(top / "f")
    assert (nlink, uid, gid, mode) == (1, found.st_uid, found.st_gid, found.st_mode)
    assert (inode, size, blocks) == (found.st_ino, 1, found.st_blocks)


# What the kernel need not check it need not ask for: with allow_other it wants the directory's mode before each change.
@pytest.mark.extended
@pytest.mark.parametrize(("allow_other", "more"), [(False, 0), (True, 1)])
def test_where_only_root_enters_a_change_of_a_directory_asks_nothing_for_permissions(
    workdir: Path, allow_other: bool, more: int
) -> None:
    with served(str(workdir), engine="native", allow_other=allow_other) as mount:
        table = Path("/proc/self/mountinfo").read_text().splitlines()
        assert ("default_permissions" in next(line for line in table if str(workdir) in line)) == allow_other
        os.mkdir(mount.path + "/first")
        assert requests(mount, lambda: os.mkdir(mount.path + "/second")) == 2 + more  # LOOKUP, MKDIR
        assert requests(mount, lambda: os.rename(mount.path + "/second", mount.path + "/third")) == 2 + more


@pytest.mark.extended
@pytest.mark.parametrize("allow_other", [False, True])
def test_root_may_do_all_but_execute_what_nobody_may(workdir: Path, allow_other: bool) -> None:
    with served(str(workdir), engine="native", allow_other=allow_other) as mount:
        script, closed = Path(mount.path, "script"), Path(mount.path, "closed")
        script.write_text("#!/bin/sh\nexit 7\n")
        os.chown(script, NOBODY, NOBODY)
        for mode, executable in ((0o000, False), (0o666, False), (0o001, True), (0o700, True)):
            os.chmod(script, mode)
            assert os.access(script, os.R_OK | os.W_OK)
            assert os.access(script, os.X_OK) == executable
            with contextlib.nullcontext() if executable else pytest.raises(PermissionError):
                assert subprocess.run([script], check=False).returncode == 7
        closed.mkdir(0)
        assert os.access(closed, os.R_OK | os.W_OK | os.X_OK)
        (closed / "f").touch()
        assert subprocess.run(["ls"], cwd=closed, capture_output=True, check=True).stdout == b"f\n"
        assert not os.access(mount.path + "/absent", os.F_OK)


@native
def test_the_mode_that_an_acl_brings_is_seen_at_once(top: Path) -> None:
    (top / "f").touch()
    os.chmod(top / "f", 0o644)
    entries = ((0x01, 6, -1), (0x02, 7, NOBODY), (0x04, 4, -1), (0x10, 7, -1), (0x20, 0, -1))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    assert stat.S_IMODE(os.stat(top / "f").st_mode) == 0o644
    os.setxattr(top / "f", "system.posix_acl_access", acl)
    assert stat.S_IMODE(os.stat(top / "f").st_mode) == 0o670


def test_listing_shows_itself_and_its_parent(top: Path) -> None:
    (top / "a").mkdir()
    output = subprocess.run(["ls", "-ai", top / "a"], check=True, capture_output=True, text=True).stdout
    numbers = {name: int(number) for number, name in (line.split() for line in output.splitlines())}
    assert numbers == {".": inode_of(top / "a"), "..": inode_of(top)}


def test_extended_attributes(top: Path) -> None:
    path = top / "file"
    path.touch()
    assert os.listxattr(path) == []
    os.setxattr(path, "user.a", b"value" * 1000)
    os.setxattr(path, "user.empty", b"")
    assert os.getxattr(path, "user.a") == b"value" * 1000
    assert os.getxattr(path, "user.empty") == b""
    assert sorted(os.listxattr(path)) == ["user.a", "user.empty"]
    assert libc.getxattr(os.fsencode(path), b"user.a", b"\0" * 10, 10) == -1
    assert ctypes.get_errno() == errno.ERANGE
    with pytest.raises(FileExistsError):
        os.setxattr(path, "user.a", b"", os.XATTR_CREATE)
    os.removexattr(path, "user.a")
    for refused in (
        lambda: os.setxattr(path, "user.a", b"", os.XATTR_REPLACE),
        lambda: os.removexattr(path, "user.a"),
        lambda: os.getxattr(path, "user.a"),
    ):
        with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
            refused()
    assert os.listxattr(path) == ["user.empty"]


@native
def test_an_unknown_ioctl_is_refused_as_such(top: Path) -> None:
    with open(top / "f", "wb") as file, pytest.raises(OSError, match="ioctl") as caught:
        fcntl.ioctl(file, 0x12345678)
    assert caught.value.errno == errno.ENOTTY


@pytest.mark.extended
@pytest.mark.parametrize(("awaits", "sent"), [(False, 0), (True, 2)])
def test_a_volume_is_asked_to_make_durable_only_if_it_has_anything_durable(
    workdir: Path, awaits: bool, sent: int
) -> None:
    with served(str(workdir), engine="native", awaits=awaits) as mount:
        opened = os.open(mount.path + "/f", os.O_CREAT | os.O_RDWR), os.open(mount.path, os.O_RDONLY)

        def sync() -> None:
            for descriptor in opened:
                os.fsync(descriptor)

        sync()
        assert requests(mount, sync) == sent
        for descriptor in opened:
            os.close(descriptor)


# -- caches ------------------------------------------------------------------------------------
def test_the_kernel_keeps_names_attributes_and_absence(shared: Served, top: Path) -> None:
    (top / "file").touch()

    def look() -> None:
        os.stat(top / "file")
        assert not (top / "absent").exists()

    look()
    assert requests(shared, look) == 0


def test_a_file_that_was_read_is_read_again_from_the_page_cache(shared: Served, top: Path) -> None:
    (top / "f").write_bytes(b"x" * 10_000)

    def read() -> None:
        with open(top / "f", "rb", buffering=0) as file:
            assert len(file.read(20_000)) == 10_000

    read()
    os.stat(top / "f")  # reading has changed the atime
    # pyfuse3: open and release; no flush, no read, no getattr.
    assert requests(shared, read) == (2 if shared.call("name") == "pyfuse3" else 0)


@pyfuse3
def test_closing_costs_no_flush(shared: Served, top: Path) -> None:
    def append() -> None:
        descriptor = os.open(top / "f", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b"more")
        os.close(descriptor)

    append()
    os.stat(top)  # creating has changed the directory
    # open, getxattr of security.capability, write, release; no flush
    assert requests(shared, append) == 4


@pytest.mark.extended
def test_with_a_finite_timeout_absence_is_asked_for_again(engine: str, workdir: Path) -> None:
    with served(str(workdir), engine=engine, cache_timeout_s=60.0) as mount:
        path = Path(mount.path, "f")
        assert not path.exists()
        mount.call("make_file", parent=ROOT_INODE, name="f", content="there")
        assert path.read_bytes() == b"there"


def test_creating_what_the_kernel_wrongly_believes_absent_opens_it(shared: Served, top: Path) -> None:
    assert not (top / "f").exists()
    shared.call("make_file", parent=inode_of(top), name="f", content="there")
    with pytest.raises(FileExistsError):
        os.open(top / "f", os.O_CREAT | os.O_EXCL | os.O_RDWR)
    assert not (top / "g").exists()
    shared.call("make_file", parent=inode_of(top), name="g", content="there")
    fd = os.open(top / "g", os.O_CREAT | os.O_RDWR)
    assert os.read(fd, 10) == b"there"
    os.close(fd)
    assert not (top / "h").exists()
    shared.call("make_file", parent=inode_of(top), name="h", content="there")
    with pytest.raises(FileExistsError):
        os.mknod(top / "h")


def test_creating_what_the_kernel_wrongly_believes_absent_checks_permissions(engine: str, workdir: Path) -> None:
    need_root()  # other users are let in
    with served(str(workdir), engine=engine, allow_other=True) as mount:
        os.chmod(mount.path, 0o777)
        path = mount.path + "/f"
        assert not os.path.exists(path)
        mount.call("make_file", parent=ROOT_INODE, name="f", content="kept")
        script = f"import os; os.setuid({NOBODY}); os.open({path!r}, os.O_CREAT | os.O_WRONLY)"
        done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
        # The mode, which the kernel did not know, is 0644.
        assert "PermissionError" in done.stderr


@native
def test_a_listing_and_a_symlink_are_kept(shared: Served, top: Path) -> None:
    os.symlink("d", top / "l")

    def look() -> None:
        assert os.listdir(top) == ["l"]
        assert os.readlink(top / "l") == "d"

    look()
    os.stat(top)
    assert requests(shared, look) == 0


@native
def test_a_write_asks_for_no_attribute_before_each_and_programs_write_in_large_pieces(
    shared: Served, top: Path
) -> None:
    with open(top / "f", "wb", buffering=0) as file:
        file.write(b"first")
        assert requests(shared, lambda: file.writelines([b"more"] * 20)) == 20
    assert requests(shared, lambda: (top / "g").write_bytes(b"a line of some length\n" * 5000)) < 10


def test_an_invalidated_inode_is_seen_anew_at_once(shared: Served, top: Path) -> None:
    (top / "f").write_bytes(b"old")
    assert (top / "f").read_bytes() == b"old"
    shared.call("overwrite", inode=inode_of(top / "f"), content="new content")
    shared.call("invalidate_inode", inode=inode_of(top / "f"))
    assert os.stat(top / "f").st_size == 11
    assert (top / "f").read_bytes() == b"new content"


def test_an_invalidated_entry_is_seen_anew_at_once(shared: Served, top: Path) -> None:
    assert not (top / "f").exists()
    assert os.listdir(top) == []
    shared.call("make_file", parent=inode_of(top), name="f", content="there")
    assert not (top / "f").exists()  # the kernel had no reason to ask
    shared.call("invalidate_entry", parent=inode_of(top), name="f")
    assert (top / "f").read_bytes() == b"there"
    assert os.listdir(top) == ["f"]


@native
def test_what_the_kernel_does_not_know_can_be_invalidated(shared: Served) -> None:
    shared.call("invalidate_entry", parent=ROOT_INODE, name="never heard of")
    shared.call("invalidate_entry", parent=4711, name="x")
    shared.call("invalidate_inode", inode=4711)


@pytest.mark.parametrize("engine", ["native"], indirect=True)
def test_with_a_timeout_of_zero_changes_behind_the_mount_are_seen(engine: str, workdir: Path) -> None:
    with served(str(workdir), engine=engine, cache_timeout_s=0.0) as mount:
        root = Path(mount.path)
        (root / "f").write_bytes(b"old")
        assert (root / "f").read_bytes() == b"old"
        assert not (root / "g").exists()
        mount.call("overwrite", inode=inode_of(root / "f"), content="newer")
        mount.call("make_file", parent=ROOT_INODE, name="g", content="g")
        assert (root / "f").read_bytes() == b"newer"
        assert (root / "g").read_bytes() == b"g"
        assert sorted(os.listdir(root)) == ["f", "g"]


# -- volumes that must wait, and volumes that fail -----------------------------------------------
@pytest.fixture
def waiting(workdir: Path) -> Iterator[Served]:
    with served(str(workdir), engine="native", awaits=True) as child:
        yield child


@pytest.mark.extended
def test_a_volume_that_must_wait_serves_the_same(waiting: Served) -> None:
    top = Path(waiting.path)
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
    waiting.call("drained")


def test_a_request_that_waits_holds_up_no_other(waiting: Served) -> None:
    for number in range(3):
        path = Path(waiting.path, f"f{number}")
        path.write_bytes(b"x" * 100)
        waiting.call("invalidate_inode", inode=inode_of(path))
    waiting.call("need", count=3)
    # None of the three is answered before all three are asked.
    readers = [subprocess.Popen(["cat", f"{waiting.path}/f{n}"], stdout=subprocess.PIPE) for n in range(3)]
    assert [reader.communicate(timeout=20)[0] for reader in readers] == [b"x" * 100] * 3


@pytest.mark.extended
@pytest.mark.parametrize("end", ["interrupt", "stop"])
def test_an_interrupt_and_a_stop_end_a_request_that_waits(waiting: Served, end: str) -> None:
    waiting.call("need", count=0)
    asker = subprocess.Popen(["stat", "-f", waiting.path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while not waiting.call("under_way"):
        assert asker.poll() is None
    if end == "interrupt":
        asker.send_signal(signal.SIGINT)
    else:
        waiting.stop()
    asker.communicate(timeout=20)
    assert asker.returncode == (-signal.SIGINT if end == "interrupt" else 1)
    if end == "interrupt":
        assert waiting.call("under_way") == 0


def test_an_unexpected_exception_is_eio_logged_once_with_its_traceback_and_kills_nothing(
    engine: str, workdir: Path
) -> None:
    faults = ["readlink", *(["forget"] if engine == "pyfuse3" else [])]
    with served(str(workdir), engine=engine, faults=faults, expected_log="readlink is broken") as child:
        os.symlink("target", child.path + "/link")
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.readlink(child.path + "/link")
        Path(child.path, "file").touch()
        os.unlink(child.path + "/file")
        assert child.log().count("LookupError: readlink is broken") == 1
        assert "Traceback" in child.log()


# -- changes beside the mount ------------------------------------------------------------------
def look(root: str) -> dict[str, object]:
    """All that a program can see of `root`, by names and by listings, and that it can put into the kernel's caches."""
    seen: dict[str, object] = {}
    for name in ("one", "two", "dir", "dir/inner", "dir/link", "moved", "moved/deep"):
        path = Path(root, name)
        try:
            found = path.lstat()
        except OSError as error:
            seen[name] = error.errno
            continue
        seen[name] = (found.st_ino, found.st_mode, found.st_nlink, found.st_size, found.st_mtime_ns, found.st_uid)
        if stat.S_ISREG(found.st_mode):
            seen[name + " content"] = path.read_bytes()
        elif stat.S_ISLNK(found.st_mode):
            seen[name + " target"] = os.readlink(path)
        else:
            seen[name + " names"] = sorted((entry.name, entry.inode()) for entry in os.scandir(path))
    seen["names"] = sorted(os.listdir(root))
    return seen


def first_state(root: Path) -> None:
    (root / "one").write_bytes(b"first " * 2000)
    (root / "dir").mkdir()
    (root / "dir/inner").write_bytes(b"inner")
    os.symlink("here", root / "dir/link")
    os.makedirs(root / "moved/deep")


def second_state(root: Path) -> None:
    (root / "one").write_bytes(b"second" * 2000)  # of the same size
    os.chown(root / "dir", 7, 7)
    os.rename(root / "dir/inner", root / "two")
    os.unlink(root / "dir/link")
    os.symlink("there", root / "dir/link")
    os.rename(root / "moved/deep", root / "dir/inner")
    os.link(root / "two", root / "moved/deep")


@needs_root
def test_when_a_restore_returns_no_reader_sees_the_old_state_whatever_it_does_meanwhile(mount: Served) -> None:
    states = {}
    for name, make in (("first", first_state), ("second", second_state)):
        make(Path(mount.path))
        mount.call("snapshot", name=name)
        states[name] = look(mount.path)
    stop = threading.Event()

    def fill_caches() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):  # between two states a path may come and go
                look(mount.path)

    readers = [threading.Thread(target=fill_caches) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(60):
            name = ("first", "second")[turn % 2]
            mount.call("restore", name=name, replay=turn % 3 == 0)
            assert look(mount.path) == states[name]
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_the_mount_can_be_closed_while_changes_are_being_replayed(mount: Served) -> None:
    mount.call("snapshot", name="s")
    for number in range(500):
        os.mkdir(f"{mount.path}/{number}")
    mount.call("restore", name="s")
    mount.call("start_replay")


def test_a_replay_of_more_than_the_limit_is_cut_and_says_so(workdir: Path, runs_long: bool) -> None:
    limit = 10_000 if runs_long else 1000
    settings = {} if runs_long else {"replay_limit": limit}
    with served(str(workdir), expected_log=f"of {limit + 50} changes {limit} were shown", **settings) as child:
        child.call("snapshot", name="s")
        descriptor = os.open(child.path, os.O_DIRECTORY)
        for number in range(limit + 50):
            os.mknod(str(number), dir_fd=descriptor)
        os.close(descriptor)
        child.call("restore", name="s", replay=True)
        assert os.listdir(child.path) == []
