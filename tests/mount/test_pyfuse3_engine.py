"""The pyfuse3 engine on a real mount: what is the engine's own, with tmpfs as the oracle where there is one."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from protocol.backends.memory import MemoryVolume
from tests.mount.engine_child import Served, libc, served
from tests.support.rights import need_root, needs_root
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine

pytestmark = pytest.mark.fuse

NOBODY = 65534
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2  # linux/fs.h
AT_FDCWD = -100


@pytest.fixture
def mount(tmp_path) -> Iterator[Served]:
    need_root()  # other users are let in
    with served(str(tmp_path), allow_other=True) as child:
        yield child


@pytest.fixture
def tmpfs(tmp_path) -> Iterator[str]:
    need_root()
    path = str(tmp_path / "tmpfs")
    os.mkdir(path)
    subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


def write(path: str, data: bytes = b"text") -> None:
    with open(path, "wb") as file:
        file.write(data)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def rename2(old: str, new: str, flags: int) -> int:
    """0 or an errno."""
    import ctypes

    return ctypes.get_errno() if libc.renameat2(AT_FDCWD, old.encode(), AT_FDCWD, new.encode(), flags) else 0


def requests(mount: Served, action) -> int:
    before = mount.call("requests")
    action()
    return mount.call("requests") - before


# -- the mount ---------------------------------------------------------------------------------


def test_the_mount_shows_as_a_workspace(mount):
    with open("/proc/self/mounts") as file:
        (line,) = [line for line in file if mount.path in line]
    source, _, kind, options, *_ = line.split()
    assert (source, kind) == ("vfsd:test", "fuse.vfsd")
    assert {"default_permissions", "allow_other"} <= set(options.split(","))


def test_a_read_only_mount_is_read_only_for_the_kernel(tmp_path):
    with served(str(tmp_path), read_only=True) as child:
        assert os.statvfs(child.path).f_flag & os.ST_RDONLY
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            write(child.path + "/file")


def test_a_mount_that_fails_says_what_libfuse_said_as_an_error_and_not_on_the_terminal(tmp_path, capfd):
    engine = Pyfuse3Engine(MemoryVolume(), EngineSettings(str(tmp_path), "test,no_such_option"))
    with pytest.raises(OSError, match="no_such_option"):
        engine.mount()
    engine.unmount()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("make", "expected"), [(lambda path: None, FileNotFoundError), (write, NotADirectoryError)], ids=["absent", "file"]
)
def test_only_a_directory_can_be_mounted_on(tmp_path, make, expected):
    path = str(tmp_path / "place")
    make(path)
    with pytest.raises(expected, match=path):
        Pyfuse3Engine(MemoryVolume(), EngineSettings(path, "test")).mount()


def test_unmounting_from_outside_ends_the_engine(tmp_path):
    with served(str(tmp_path)) as child:
        write(child.path + "/file")
        subprocess.run(["fusermount3", "-u", child.path], check=True)
        assert not os.path.ismount(child.path)


def test_a_mount_in_use_is_let_go_of_all_the_same(tmp_path):
    with served(str(tmp_path)) as child:
        descriptor = os.open(child.path, os.O_DIRECTORY)
        write(child.path + "/file")
        opened = os.open(child.path + "/file", os.O_RDWR)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.stat("file", dir_fd=descriptor)
    os.close(descriptor)
    os.close(opened)


def test_requests_whose_callers_are_killed_before_they_are_read_do_not_stop_the_loop(tmp_path):
    look = "import os, sys; sys.stdin.read(); os.path.exists(sys.argv[1])"
    with served(str(tmp_path), withdraws=True) as child:
        for number in range(3):
            victim = subprocess.Popen([sys.executable, "-c", look, f"{child.path}/{number}"], stdin=subprocess.PIPE)
            child.call("withdraw", pid=victim.pid)
            victim.communicate()
            assert victim.returncode == -signal.SIGKILL
            # No other request comes, which would end a read that waits.
            child.ask("withdrew")
            assert child.answer(patience_s=20), "the request was read before its caller was killed"
        assert not os.path.exists(child.path + "/after")


# -- what the kernel keeps ---------------------------------------------------------------------


def test_the_kernel_keeps_names_attributes_and_absence(mount):
    write(mount.path + "/file")

    def look() -> None:
        os.stat(mount.path + "/file")
        assert not os.path.exists(mount.path + "/absent")

    look()
    assert requests(mount, look) == 0


def test_a_file_that_was_read_is_read_again_from_the_page_cache(mount):
    write(mount.path + "/file", bytes(50_000))
    read(mount.path + "/file")
    os.stat(mount.path + "/file")  # reading has changed the atime
    # open and release; no flush, no read, no getattr
    assert requests(mount, lambda: read(mount.path + "/file")) == 2


def test_closing_costs_no_flush(mount):
    append(mount.path + "/file")
    os.stat(mount.path)  # creating has changed the directory
    # open, getxattr of security.capability, write, release; no flush
    assert requests(mount, lambda: append(mount.path + "/file")) == 4


def append(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, b"more")
    os.close(descriptor)


def test_with_a_finite_timeout_absence_is_asked_for_again(tmp_path):
    with served(str(tmp_path), cache_timeout_s=1.0) as child:
        os.path.exists(child.path + "/absent")
        assert requests(child, lambda: os.path.exists(child.path + "/absent")) == 1


# -- files -------------------------------------------------------------------------------------


@pytest.mark.extended
def test_large_reads_and_writes_arrive_whole(mount):
    data = os.urandom(5 * 1024 * 1024 + 17)
    write(mount.path + "/file", data)
    subprocess.run(["sh", "-c", "echo 3 > /proc/sys/vm/drop_caches"], check=False)
    assert read(mount.path + "/file") == data


def test_a_sparse_file_past_four_gibibytes(mount):
    descriptor = os.open(mount.path + "/file", os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, b"far", 5 << 30)
    assert os.pread(descriptor, 10, (5 << 30) - 2) == b"\0\0far"
    assert os.fstat(descriptor).st_size == (5 << 30) + 3
    assert os.fstat(descriptor).st_blocks * 512 < 1 << 20
    os.ftruncate(descriptor, 10**15)
    assert os.fstat(descriptor).st_size == 10**15
    os.close(descriptor)


def test_opening_with_o_trunc_truncates(mount):
    write(mount.path + "/file", b"long")
    os.close(os.open(mount.path + "/file", os.O_WRONLY | os.O_TRUNC))
    assert os.stat(mount.path + "/file").st_size == 0
    assert read(mount.path + "/file") == b""


def test_exclusive_creation_and_creation_of_what_exists(mount):
    path = mount.path + "/file"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    with pytest.raises(FileExistsError):
        os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))


def test_creating_what_the_kernel_wrongly_believes_absent_opens_it_with_its_permissions_checked(mount):
    path = mount.path + "/file"
    os.chmod(mount.path, 0o777)
    write(path, b"kept")
    os.chmod(path, 0o600)
    mount.call("snapshot", name="s")
    os.unlink(path)
    assert not os.path.exists(path)
    mount.call("restore", name="s", tell=False)
    script = f"import os; os.setuid({NOBODY}); os.open({path!r}, os.O_CREAT | os.O_WRONLY)"
    # As in a process of its own: the failing one must not have filled the cache for the one that may.
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    assert os.read(descriptor, 10) == b"kept"
    os.close(descriptor)
    mount.call("snapshot", name="t")
    os.unlink(path)
    assert not os.path.exists(path)
    mount.call("restore", name="t", tell=False)
    result = subprocess.run(["python3", "-c", script], capture_output=True, text=True, check=False)
    assert "PermissionError" in result.stderr


def test_an_unlinked_file_stays_readable_and_writable(mount):
    with open(mount.path + "/file", "w+b", buffering=0) as file:
        file.write(b"first")
        os.unlink(mount.path + "/file")
        file.write(b" second")
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_nlink == 0
        file.seek(0)
        assert file.read() == b"first second"
    assert os.listdir(mount.path) == []


def test_a_shared_mapping_is_in_the_volume_once_it_is_synced_and_drained(mount):
    with open(mount.path + "/file", "w+b") as file:
        file.truncate(8192)
        with mmap.mmap(file.fileno(), 8192) as mapped:
            mapped[4096:4103] = b"written"
            assert libc.syncfs(file.fileno()) == 0
            mount.call("drained")
            assert mount.call("content", name="file") == "\0" * 4096 + "written" + "\0" * 4089
    assert read(mount.path + "/file")[4096:4103] == b"written"


def test_dirty_pages_are_in_the_volume_once_markers_have_passed(mount):
    pages = 200  # every second one is dirty: each is a request, more than the background queue lets through at once
    with open(mount.path + "/file", "w+b") as file:
        file.truncate(pages * 4096)
        with mmap.mmap(file.fileno(), pages * 4096) as mapped:
            for page in range(0, pages, 2):
                mapped[page * 4096] = ord("x")
            assert libc.syncfs(file.fileno()) == 0
            until = time.monotonic() + 60
            while not mount.call("answered_all_before"):
                assert time.monotonic() < until, "the markers do not pass"
            assert mount.call("content", name="file").count("x") == pages // 2


def test_nanosecond_times_before_and_after_the_epoch(mount):
    write(mount.path + "/file")
    for atime, mtime in ((1_234_567_890_123_456_789, 987_654_321), (-1, -1_500_000_001)):
        os.utime(mount.path + "/file", ns=(atime, mtime))
        found = os.stat(mount.path + "/file")
        assert (found.st_atime_ns, found.st_mtime_ns) == (atime, mtime)
    before = time.time_ns()
    os.utime(mount.path + "/file")
    assert os.stat(mount.path + "/file").st_mtime_ns >= before - 10**9


# -- names -------------------------------------------------------------------------------------


def test_special_files_keep_type_and_device(mount):
    root = mount.path
    os.mkfifo(root + "/fifo", 0o600)
    os.mknod(root + "/chr", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.mknod(root + "/blk", stat.S_IFBLK | 0o600, os.makedev(7, 1))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(root + "/sock")
    assert stat.S_ISFIFO(os.stat(root + "/fifo").st_mode)
    assert stat.S_ISSOCK(os.stat(root + "/sock").st_mode)
    assert os.stat(root + "/chr").st_rdev == os.makedev(1, 3)
    assert stat.S_ISBLK(os.stat(root + "/blk").st_mode)


def test_symlinks_hard_links_and_the_umask(mount):
    root = mount.path
    os.symlink("tärget" * 100, root + "/link")
    assert os.readlink(root + "/link") == "tärget" * 100
    write(root + "/one")
    os.link(root + "/one", root + "/two")
    assert os.stat(root + "/one").st_nlink == 2
    assert os.path.samefile(root + "/one", root + "/two")
    old = os.umask(0o027)
    try:
        os.mkdir(root + "/dir", 0o777)
        os.close(os.open(root + "/file", os.O_CREAT, 0o666))
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(root + "/dir").st_mode) == 0o750
    assert stat.S_IMODE(os.stat(root + "/file").st_mode) == 0o640


def test_rename_flags(mount):
    root = mount.path
    write(root + "/a", b"a")
    write(root + "/b", b"b")
    assert rename2(root + "/a", root + "/b", RENAME_NOREPLACE) == errno.EEXIST
    assert rename2(root + "/a", root + "/b", RENAME_EXCHANGE) == 0
    assert (read(root + "/a"), read(root + "/b")) == (b"b", b"a")
    os.rename(root + "/a", root + "/b")
    assert read(root + "/b") == b"b"


def test_a_directory_of_thousands_is_listed_once_each_also_while_it_is_emptied(mount):
    names = {f"file-{number:05}" for number in range(1500)}
    for name in names:
        os.close(os.open(f"{mount.path}/{name}", os.O_CREAT | os.O_WRONLY))
    assert sorted(os.listdir(mount.path)) == sorted(names)
    seen = []
    with os.scandir(mount.path) as entries:
        for entry in entries:
            seen.append(entry.name)
            assert entry.is_file(follow_symlinks=False)
            os.unlink(entry.path)
    assert sorted(seen) == sorted(names)
    assert os.listdir(mount.path) == []


def test_listing_shows_itself_and_its_parent(mount):
    os.makedirs(mount.path + "/a/b")
    output = subprocess.run(["ls", "-ai", mount.path + "/a/b"], check=True, capture_output=True, text=True).stdout
    numbers = {name: int(number) for number, name in (line.split() for line in output.splitlines())}
    assert numbers == {".": os.stat(mount.path + "/a/b").st_ino, "..": os.stat(mount.path + "/a").st_ino}


# -- the rest ----------------------------------------------------------------------------------


def test_extended_attributes(mount):
    path = mount.path + "/file"
    write(path)
    assert os.listxattr(path) == []
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(path, "user.a")
    os.setxattr(path, "user.a", b"value" * 1000)
    os.setxattr(path, "user.empty", b"")
    assert os.getxattr(path, "user.a") == b"value" * 1000
    assert os.getxattr(path, "user.empty") == b""
    assert sorted(os.listxattr(path)) == ["user.a", "user.empty"]
    assert libc.getxattr(path.encode(), b"user.a", b"\0" * 10, 10) == -1
    with pytest.raises(FileExistsError):
        os.setxattr(path, "user.a", b"", os.XATTR_CREATE)
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.setxattr(path, "user.b", b"", os.XATTR_REPLACE)
    os.removexattr(path, "user.a")
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.removexattr(path, "user.a")
    assert os.listxattr(path) == ["user.empty"]


def test_statfs_counts_what_is_written(tmp_path):
    with served(str(tmp_path), max_bytes=10 << 20) as child:
        before = os.statvfs(child.path)
        assert before.f_blocks * before.f_frsize == 10 << 20
        assert before.f_namemax == 255
        write(child.path + "/file", bytes(1 << 20))
        after = os.statvfs(child.path)
        assert (before.f_bfree - after.f_bfree) * after.f_frsize >= 1 << 20
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            write(child.path + "/big", bytes(20 << 20))


def test_what_the_library_does_not_carry_fails_in_the_way_callers_can_handle(mount):
    write(mount.path + "/file", b"data")
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        os.open(mount.path, os.O_TMPFILE | os.O_RDWR)
    descriptor = os.open(mount.path + "/file", os.O_RDWR)
    os.posix_fallocate(descriptor, 0, 10_000)  # glibc writes instead
    assert os.fstat(descriptor).st_size == 10_000
    assert os.lseek(descriptor, 0, os.SEEK_DATA) == 0
    assert os.lseek(descriptor, 0, os.SEEK_HOLE) == 10_000
    target = os.open(mount.path + "/copy", os.O_RDWR | os.O_CREAT)
    assert os.copy_file_range(descriptor, target, 4, 0, 0) == 4
    os.close(descriptor)
    os.close(target)
    assert read(mount.path + "/copy") == b"data"


def test_an_unexpected_exception_is_eio_logged_with_its_traceback_and_kills_nothing(tmp_path):
    with served(str(tmp_path), faults=["readlink", "forget"], expected_log="readlink is broken") as child:
        os.symlink("target", child.path + "/link")
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.readlink(child.path + "/link")
        write(child.path + "/file")
        os.unlink(child.path + "/file")
        assert child.log().count("LookupError: readlink is broken") == 1
        assert "Traceback" in child.log()


# -- suid and sgid, as tmpfs has it ------------------------------------------------------------

CASES = {
    "write": "f = os.open(path, os.O_WRONLY); os.write(f, b'x')",
    "truncate": "os.truncate(path, 1)",
    "ftruncate": "f = os.open(path, os.O_WRONLY); os.ftruncate(f, 1)",
    "open with O_TRUNC": "os.open(path, os.O_WRONLY | os.O_TRUNC)",
    "chown": "os.chown(path, -1, os.getgid())",
    "chown to oneself": "os.chown(path, os.getuid(), os.getgid())",
    "chmod": "os.chmod(path, 0o6777)",
    "utime": "os.utime(path)",
    "rename": "os.rename(path, path + '2'); os.rename(path + '2', path)",
}


@pytest.mark.extended
@pytest.mark.parametrize("user", [0, NOBODY])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_suid_and_sgid_are_cleared_as_on_tmpfs(mount, tmpfs, user, kind):
    def bits(root: str, case: str, mode: int) -> str:
        path = root + "/it"
        if kind == "directory":
            os.mkdir(path)
        else:
            write(path, b"some content")
        os.chown(path, user, user)
        os.chmod(path, mode)
        script = f"import os; os.setgid({user}); os.setuid({user}); path = {path!r}; {CASES[case]}"
        failed = run_forked(script, f"assert os.access({path!r}, os.R_OK)")
        found = f"{stat.S_IMODE(os.stat(path).st_mode):o} {failed}"
        if kind == "directory":
            os.rmdir(path)
        else:
            os.unlink(path)
        return found

    for root in (mount.path, tmpfs):
        os.chmod(root, 0o777)
    os.chmod(os.path.dirname(mount.path), 0o755)
    cases = CASES if kind == "file" else [case for case in CASES if case.startswith("ch")]
    for mode in (0o6777, 0o4777, 0o2777, 0o2767):
        ours, theirs = ({case: bits(root, case, mode) for case in cases} for root in (mount.path, tmpfs))
        assert ours == theirs, oct(mode)


def run_forked(*scripts: str) -> str:
    """Runs Python as a child of this process, whose directory it may use whatever it becomes; the errors, or ""."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            names: dict[str, object] = {}
            for number, script in enumerate(scripts):
                try:
                    exec(script, names)
                except BaseException as error:
                    os.write(writer, f"{number} {type(error).__name__} ".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return file.read()


def test_tools_copy_a_tree_there_and_back(mount, tmp_path):
    source = os.path.dirname(os.__file__) + "/json"
    shutil.copytree(source, mount.path + "/json")
    shutil.copytree(mount.path + "/json", str(tmp_path / "back"))
    subprocess.run(["diff", "-r", source, str(tmp_path / "back")], check=True)
    subprocess.run([sys.executable, "-c", "import json"], cwd=mount.path, check=True)
    subprocess.run(["rm", "-rf", mount.path + "/json"], check=True)
    assert os.listdir(mount.path) == []


# -- changes beside the mount ------------------------------------------------------------------


@pytest.fixture(params=["pyfuse3", "native"])
def either(tmp_path, request) -> Iterator[Served]:
    """What is told to the kernel is the same with both engines."""
    with served(str(tmp_path), engine=request.param) as child:
        yield child


def look(root: str) -> dict[str, object]:
    """All that a program can see of `root`, by names and by listings, and that it can put into the kernel's caches."""
    seen: dict[str, object] = {}
    for name in ("one", "two", "dir", "dir/inner", "dir/link", "moved", "moved/deep"):
        path = f"{root}/{name}"
        try:
            found = os.lstat(path)
        except OSError as error:
            seen[name] = error.errno
            continue
        seen[name] = (found.st_ino, found.st_mode, found.st_nlink, found.st_size, found.st_mtime_ns, found.st_uid)
        if stat.S_ISREG(found.st_mode):
            seen[name + " content"] = read(path)
        elif stat.S_ISLNK(found.st_mode):
            seen[name + " target"] = os.readlink(path)
        else:
            seen[name + " names"] = sorted((entry.name, entry.inode()) for entry in os.scandir(path))
    seen["names"] = sorted(os.listdir(root))
    return seen


def first_state(root: str) -> None:
    write(root + "/one", b"first " * 2000)
    os.makedirs(root + "/dir")
    write(root + "/dir/inner", b"inner")
    os.symlink("here", root + "/dir/link")
    os.makedirs(root + "/moved/deep")


def second_state(root: str) -> None:
    write(root + "/one", b"second" * 2000)  # of the same size
    os.chown(root + "/dir", 7, 7)
    os.rename(root + "/dir/inner", root + "/two")
    os.unlink(root + "/dir/link")
    os.symlink("there", root + "/dir/link")
    os.rename(root + "/moved/deep", root + "/dir/inner")
    os.link(root + "/two", root + "/moved/deep")


@needs_root
def test_when_a_restore_returns_no_reader_sees_the_old_state_whatever_it_does_meanwhile(either):
    mount, root = either, either.path
    first_state(root)
    mount.call("snapshot", name="first")
    states = {"first": look(root)}
    second_state(root)
    mount.call("snapshot", name="second")
    states["second"] = look(root)
    stop = threading.Event()

    def fill_caches() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):  # between two states a path may come and go
                look(root)

    readers = [threading.Thread(target=fill_caches) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(60):
            name = ("first", "second")[turn % 2]
            mount.call("restore", name=name, replay=turn % 3 == 0)
            assert look(root) == states[name]
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_open_files_and_mappings_show_the_restored_content_at_once(either):
    mount = either
    path = mount.path + "/file"
    write(path, b"first " * 1000)
    mount.call("snapshot", name="s")
    write(path, b"second" * 1000)
    with open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:6] == file.read(6) == b"second"
        assert mount.call("restore", name="s") > 0
        assert mapped[:6] == os.pread(file.fileno(), 6, 0) == b"first "
        os.pwrite(file.fileno(), b"third ", 0)
        assert mapped[:6] == b"third "


def test_a_file_that_a_restore_removed_stays_open_with_no_links(either):
    mount = either
    mount.call("snapshot", name="s")
    with open(mount.path + "/file", "w+b", buffering=0) as file:
        file.write(b"content")
        assert os.fstat(file.fileno()).st_nlink == 1
        mount.call("restore", name="s")
        assert os.fstat(file.fileno()).st_nlink == 0
        assert os.pread(file.fileno(), 10, 0) == b"content"


def test_the_mount_can_be_closed_while_changes_are_being_replayed(either):
    either.call("snapshot", name="s")
    for number in range(500):
        os.mkdir(f"{either.path}/{number}")
    either.call("restore", name="s")
    either.call("start_replay")


def test_a_replay_of_more_than_the_limit_is_cut_and_says_so(tmp_path, runs_long):
    limit = 10_000 if runs_long else 1000
    settings = {} if runs_long else {"replay_limit": limit}
    with served(str(tmp_path), expected_log=f"of {limit + 50} changes {limit} were shown", **settings) as child:
        child.call("snapshot", name="s")
        descriptor = os.open(child.path, os.O_DIRECTORY)
        for number in range(limit + 50):
            os.mknod(str(number), dir_fd=descriptor)
        os.close(descriptor)
        child.call("restore", name="s", replay=True)
        assert os.listdir(child.path) == []
