"""The host backend: that nothing leads outside its directory, and what others do to that directory meanwhile."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.backends.host import HostVolume, descriptors, listings
from protocol.backends.host.inode_table import HostInode, HostInodeTable
from protocol.linux.portable import Handle
from protocol.testing import Driver
from protocol.testing.volume.driver import fails
from protocol.volume import RENAME_EXCHANGE, ROOT_INODE, AttributeChanges, Caller
from tests.support.host_directories import mounted_tmpfs
from tests.support.rights import needs_root

ME = Caller(os.getuid(), os.getgid())
SECRET = b"what lies outside"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    place = tmp_path / "outside"
    place.mkdir()
    (place / "file").write_bytes(SECRET)
    (place / "d").mkdir()
    return place


def untouched(outside: Path) -> bool:
    return sorted(os.listdir(outside)) == ["d", "file"] and (outside / "file").read_bytes() == SECRET


# -- nothing leads outside -------------------------------------------------------------------------


def test_a_symlink_is_a_symlink_and_leads_nowhere(fs: Driver, inside: Path, outside: Path) -> None:
    os.symlink(outside / "file", inside / "link")
    os.symlink(outside, inside / "dirlink")
    number = fs.hold(b"link")
    assert stat.S_ISLNK(fs.stat(number).mode)
    for use in (
        lambda: fs.read(number),
        lambda: fs.volume.write(number, 0, b"x"),
        lambda: fs.set(number, size=0),
        lambda: fs.volume.fallocate(number, 0, 0, 1),
        lambda: fs.volume.seek(number, 0, os.SEEK_DATA),
    ):
        with fails(errno.EINVAL):
            use()
    held = fs.hold(b"dirlink")
    for use in (
        lambda: fs.volume.lookup(held, b"file"),
        lambda: fs.file(b"dirlink/new"),
        lambda: fs.directory(b"dirlink/new"),
        lambda: fs.unlink(b"dirlink/file"),
        lambda: fs.rename(b"link", b"dirlink/new"),
        lambda: list(fs.entries(held)),
        lambda: fs.volume.tmpfile(held, 0o600, ME),
    ):
        with fails(errno.ENOTDIR):
            use()
    assert untouched(outside)


def test_what_is_done_to_a_symlink_is_not_done_to_what_it_leads_to(fs: Driver, inside: Path, outside: Path) -> None:
    os.symlink(outside / "file", inside / "link")
    before = os.stat(outside / "file")
    number = fs.hold(b"link")
    fs.set(number, mtime_ns=10**18, atime_ns=10**18)
    if os.geteuid() == 0:
        fs.set(number, uid=7, gid=7)
        fs.volume.setxattr(number, b"trusted.t", b"1", 0)
        assert os.listxattr(outside / "file") == []
    with pytest.raises(OSError, match=r"."):
        fs.set(number, mode=0o777)
    fs.link(number, b"hard")
    fs.unlink(b"link")
    assert fs.volume.readlink(number) == os.fsencode(outside / "file")
    assert os.lstat(inside / "hard").st_mtime_ns == 10**18
    after = os.stat(outside / "file")
    assert (after.st_mode, after.st_uid, after.st_mtime_ns, after.st_ctime_ns, after.st_nlink) == (
        before.st_mode, before.st_uid, before.st_mtime_ns, before.st_ctime_ns, 1,
    )  # fmt: skip


@pytest.mark.parametrize("name", [b"../outside/file", b"d/../../outside/file", b"/etc/passwd", b"d/file", b""])
def test_a_name_is_one_step(fs: Driver, outside: Path, name: bytes) -> None:
    fs.directory(b"d")
    number = fs.file(b"f", b"x")
    for use in (
        lambda: fs.volume.lookup(ROOT_INODE, name),
        lambda: fs.volume.mknod(ROOT_INODE, name, stat.S_IFREG, 0, ME),
        lambda: fs.volume.mkdir(ROOT_INODE, name, 0o755, ME),
        lambda: fs.volume.symlink(ROOT_INODE, name, b"x", ME),
        lambda: fs.volume.link(number, ROOT_INODE, name),
        lambda: fs.volume.unlink(ROOT_INODE, name),
        lambda: fs.volume.rmdir(ROOT_INODE, name),
        lambda: fs.volume.rename(ROOT_INODE, b"f", ROOT_INODE, name),
        lambda: fs.volume.rename(ROOT_INODE, name, ROOT_INODE, b"g"),
    ):
        with fails(errno.EINVAL):
            use()
    assert untouched(outside)


def test_the_roots_dots_are_the_root(fs: Driver, volume: HostVolume, outside: Path) -> None:
    for name in (b".", b".."):
        assert volume.lookup(ROOT_INODE, name).inode == ROOT_INODE
        for use in (
            lambda name=name: volume.mkdir(ROOT_INODE, name, 0o755, ME),
            lambda name=name: volume.unlink(ROOT_INODE, name),
            lambda name=name: volume.rmdir(ROOT_INODE, name),
            lambda name=name: volume.rename(ROOT_INODE, name, ROOT_INODE, b"x"),
        ):
            with pytest.raises(OSError, match=r"."):
                use()
    assert [entry.inode for entry in fs.entries() if entry.name == b".."] == [ROOT_INODE]
    assert untouched(outside)


class Swapper:
    """A thread that makes `inside/d` a directory of ours and a symlink to `outside`, again and again."""

    def __init__(self, inside: Path, outside: Path) -> None:
        self._d, self._kept, self._link = inside / "d", inside / "kept", inside / "link"
        self._outside = outside
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._swap)
        self.swaps = 0

    def _swap(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        os.symlink(self._outside, self._link)
        d, link = os.fsencode(self._d), os.fsencode(self._link)
        while not self._stop.is_set():
            assert libc.renameat2(-100, d, -100, link, RENAME_EXCHANGE) == 0
            self.swaps += 1

    def __enter__(self) -> Swapper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def everything_at(fs: Driver, volume: HostVolume, turn: int) -> Iterator[Callable[[], object]]:
    """Each a call, or several, that goes through `d` from the root down, as a kernel would."""
    name = b"new%d" % turn
    yield lambda: fs.read(b"d/file")
    yield lambda: volume.write(fs.at(b"d/file"), 0, b"ours, as ever")
    yield lambda: fs.file(b"d/" + name, b"ours")
    yield lambda: fs.directory(b"d/" + name + b"-d")
    yield lambda: fs.symlink(b"d/" + name + b"-s", b"x")
    yield lambda: fs.link(fs.at(b"d/file"), b"d/" + name + b"-l")
    yield lambda: fs.names(b"d")
    yield lambda: fs.rename(b"d/" + name, b"d/" + name + b"-r")
    yield lambda: fs.set(b"d/file", size=13)
    yield lambda: fs.set(b"d/file", mode=0o600)
    yield lambda: fs.set(b"d/file", mtime_ns=1)
    yield lambda: volume.setxattr(fs.at(b"d/file"), b"user.x", b"1", 0)
    yield lambda: volume.tmpfile(fs.at(b"d"), 0o600, ME)
    yield lambda: fs.unlink(b"d/" + name + b"-r")
    yield lambda: fs.rmdir(b"d/" + name + b"-d")
    yield lambda: fs.unlink(b"d/" + name + b"-s")
    yield lambda: fs.unlink(b"d/" + name + b"-l")


FOUND_SWAPPED = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP, errno.EINVAL}


@pytest.mark.parametrize("most_open", [2, None])
def test_a_directory_swapped_for_a_symlink_never_leads_outside(
    inside: Path, outside: Path, most_open: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "RECHECK_S", 0.0)  # every use of a directory looks where it is
    (inside / "d").mkdir()
    (inside / "d" / "file").write_bytes(b"ours, as ever")
    before = os.stat(outside), os.stat(outside / "file")
    volume = HostVolume(os.fsencode(inside), descriptors=most_open)
    fs = Driver(volume)
    done = refused = 0
    with Swapper(inside, outside) as swapper:
        turn = 0
        while turn < 300 or swapper.swaps < 1000:
            turn += 1
            for call in everything_at(fs, volume, turn):
                try:
                    answer = call()
                except OSError as error:
                    if error.errno not in FOUND_SWAPPED:
                        raise
                    refused += 1
                else:
                    done += 1
                    if isinstance(answer, bytes):
                        assert answer in {b"ours, as ever", b"ours, as ever"[:13]}
    assert done > 0, "the race was never won: nothing is shown"
    assert refused > 0, "the race was never lost: nothing is shown"
    assert untouched(outside)
    after = os.stat(outside), os.stat(outside / "file")
    for old, new in zip(before, after, strict=True):
        assert (old.st_mtime_ns, old.st_ctime_ns, old.st_mode, old.st_nlink) == (
            new.st_mtime_ns, new.st_ctime_ns, new.st_mode, new.st_nlink,
        )  # fmt: skip
    volume.check_invariants()
    volume.close()


def test_a_directory_moved_outside_is_left_alone(
    fs: Driver, inside: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.directory(b"d")
    fs.directory(b"d/e")
    fs.file(b"d/e/f", b"1")
    d, e = fs.hold(b"d"), fs.hold(b"d/e")
    monkeypatch.setattr(descriptors, "RECHECK_S", 0.0)
    os.rename(inside / "d", outside / "moved")
    for directory in (d, e):
        for use in (
            lambda directory=directory: fs.volume.mknod(directory, b"new", stat.S_IFREG | 0o644, 0, ME),
            lambda directory=directory: fs.volume.lookup(directory, b"f"),
            lambda directory=directory: fs.names(directory),
        ):
            with fails(errno.ESTALE):
                use()
    assert os.listdir(outside / "moved") == ["e"]
    assert os.listdir(outside / "moved" / "e") == ["f"]


@needs_root
def test_another_file_system_mounted_inside_is_not_entered(fs: Driver, inside: Path, outside: Path) -> None:
    (inside / "other").mkdir()
    (inside / "bind").mkdir()
    (inside / "one").write_bytes(b"hidden")
    with mounted_tmpfs(inside / "tmp") as place:
        (place / "file").write_bytes(SECRET)
        subprocess.run(["mount", "--bind", outside, inside / "bind"], check=True)
        subprocess.run(["mount", "--bind", outside / "file", inside / "one"], check=True)
        try:
            with fails(errno.EXDEV):
                fs.at(b"tmp")
            for use in (
                lambda: fs.at(b"bind/file"),
                lambda: fs.names(b"bind"),
                lambda: fs.file(b"bind/new"),
                lambda: fs.unlink(b"bind/file"),
                lambda: fs.read(b"one"),
                lambda: fs.volume.write(fs.at(b"one"), 0, b"x"),
            ):
                with pytest.raises(OSError, match=r".") as caught:
                    use()
                assert caught.value.errno in {errno.EXDEV, errno.ESTALE}
        finally:
            subprocess.run(["umount", "-l", inside / "bind"], check=True)
            subprocess.run(["umount", "-l", inside / "one"], check=True)
    assert untouched(outside)
    assert fs.names(b"bind") == []
    assert fs.read(b"one") == b"hidden"


@needs_root
def test_special_files_are_not_opened(fs: Driver, inside: Path) -> None:
    os.mkfifo(inside / "fifo")
    number = fs.hold(b"fifo")
    for use in (lambda: fs.read(number), lambda: fs.volume.write(number, 0, b"x"), lambda: fs.set(number, size=0)):
        with fails(errno.EINVAL):
            use()
    fs.volume.fsync(number, data_only=False)
    # A file that has become a fifo since: opening it would wait for somebody at the other end.
    fs.file(b"f", b"x")
    held = fs.hold(b"f")
    fs.volume.forget(held, 1)
    os.unlink(inside / "f")
    os.mkfifo(inside / "f")
    with fails(errno.ESTALE):
        fs.read(held)


# -- what others do --------------------------------------------------------------------------------


def test_changes_beside_the_volume_are_seen(fs: Driver, inside: Path) -> None:
    fs.file(b"f", b"old")
    held = fs.hold(b"f")
    (inside / "f").write_bytes(b"newer")
    assert (fs.stat(held).size, fs.read(held)) == (5, b"newer")
    (inside / "g").write_bytes(b"g")
    assert fs.names() == [b"f", b"g"]
    os.chmod(inside / "f", 0o600)
    assert fs.stat(held).mode == stat.S_IFREG | 0o600
    os.unlink(inside / "g")
    with fails(errno.ENOENT):
        fs.at(b"g")
    assert fs.names() == [b"f"]


def test_a_directory_moved_within_the_tree_is_followed(
    fs: Driver, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.directory(b"d")
    fs.directory(b"other")
    held = fs.hold(b"d")
    fs.file(b"d/f", b"1")
    monkeypatch.setattr(descriptors, "RECHECK_S", 0.0)
    os.rename(inside / "d", inside / "other" / "e")
    fs.volume.mknod(held, b"new", stat.S_IFREG | 0o644, 0, ME)
    assert fs.names(b"other/e") == [b"f", b"new"]
    assert fs.at(b"other/e") == held


def test_a_directory_removed_elsewhere_is_empty_and_takes_nothing(
    fs: Driver, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.directory(b"d")
    held = fs.hold(b"d")
    assert fs.names(held) == []
    monkeypatch.setattr(descriptors, "RECHECK_S", 0.0)
    os.rmdir(inside / "d")
    with fails(errno.ENOENT):
        fs.volume.mknod(held, b"new", stat.S_IFREG | 0o644, 0, ME)
    assert fs.names(held) == []
    assert fs.stat(held).nlink == 0


def test_an_inode_number_that_the_host_gives_again_to_another_kind_is_another_inode(fs: Driver, inside: Path) -> None:
    (inside / "f").write_bytes(b"1")
    held = fs.hold(b"f")
    number = os.stat(inside / "f").st_ino
    os.unlink(inside / "f")
    (inside / "f").mkdir()
    if os.stat(inside / "f").st_ino != number:
        # Not every file system does it, and then there is no confusion.
        assert fs.at(b"f") != held
        return
    assert fs.at(b"f") != held
    with fails(errno.ESTALE):
        fs.read(held)


# -- what is kept ----------------------------------------------------------------------------------


def test_inode_numbers_are_the_hosts_and_stay_when_an_inode_was_forgotten(fs: Driver, inside: Path) -> None:
    (inside / "d").mkdir()
    (inside / "d" / "f").write_bytes(b"")
    number = fs.hold(b"d/f")
    assert number == os.stat(inside / "d" / "f").st_ino
    fs.volume.forget(number, 1)
    assert {entry.inode for entry in fs.entries(b"d") if entry.name == b"f"} == {number}


def test_descriptors_are_few_whatever_was_opened_and_all_are_closed(inside: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    volume = HostVolume(os.fsencode(inside), descriptors=16)
    fs = Driver(volume)
    held = [fs.hold(b"%d" % at) for at in range(200) if fs.file(b"%d" % at, b"%d" % at)]
    assert all(fs.read(number) == b"%d" % at for at, number in enumerate(held))
    assert len(os.listdir("/proc/self/fd")) <= before + 20
    for at, number in enumerate(held):
        fs.unlink(b"%d" % at)
        assert fs.read(number) == b"%d" % at
        volume.forget(number, 1)
    volume.check_invariants()
    volume.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # objects of other tests may have closed theirs


class FullAbove:
    """The module os, in which `open` fails while more than `most` kept descriptors are open."""

    def __init__(self, kept: descriptors.Descriptors, most: int) -> None:
        self._kept = kept
        self._most = most
        self.attempts = 0

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def open(self, path: bytes, flags: int, dir_fd: int | None = None) -> int:
        self.attempts += 1
        if len(self._kept._open) > self._most:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os.open(path, flags, dir_fd=dir_fd)


@pytest.fixture
def nodes(inside: Path) -> Iterator[tuple[descriptors.Descriptors, list[HostInode]]]:
    """Ten open files, and one that is not open."""
    root = Handle(os.open(inside, os.O_PATH))
    table = HostInodeTable(os.fstat(root.fd), lambda _: None)
    kept = descriptors.Descriptors(root, table)
    found = []
    for number in range(11):
        (inside / str(number)).touch()
        found.append(table.enter(table.root, b"%d" % number, (inside / str(number)).stat()))
    for node in found[:10]:
        kept.file(node)
    yield kept, found
    kept.close()


def test_what_is_kept_open_makes_room_for_what_is_opened(
    nodes: tuple[descriptors.Descriptors, list[HostInode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, found = nodes
    full = FullAbove(kept, 2)
    monkeypatch.setattr(descriptors, "os", full)
    assert os.fstat(kept.file(found[10]).fd).st_ino == found[10].key[1]
    assert full.attempts == 3  # with 10, 5 and 2 kept open


def test_an_open_that_never_succeeds_ends(
    nodes: tuple[descriptors.Descriptors, list[HostInode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, found = nodes
    full = FullAbove(kept, -1)
    monkeypatch.setattr(descriptors, "os", full)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as caught:
        kept.file(found[10])
    assert caught.value.errno == errno.EMFILE
    assert full.attempts < 10


def test_a_very_deep_tree_needs_no_more_descriptors_than_others(inside: Path) -> None:
    volume = HostVolume(os.fsencode(inside), descriptors=3)
    fs = Driver(volume)
    at = ROOT_INODE
    for _ in range(200):
        at = volume.mkdir(at, b"d", 0o755, ME).inode
    made = volume.mknod(at, b"f", stat.S_IFREG | 0o644, 0, ME).inode
    volume.rename(at, b"f", ROOT_INODE, b"up")
    volume.rename(ROOT_INODE, b"up", at, b"down")
    volume.link(made, ROOT_INODE, b"link")
    assert fs.at(b"link") == made == fs.at(b"d/" * 200 + b"down")
    volume.check_invariants()
    volume.close()


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Python's own limit, which `protocol.store` raises."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000)
    yield
    sys.setrecursionlimit(limit)


def test_a_place_a_thousand_levels_down_is_looked_at_once_more_after_a_while(
    volume: HostVolume, inside: Path, monkeypatch: pytest.MonkeyPatch, usual_recursion_limit: None
) -> None:
    at = ROOT_INODE
    for _ in range(1_000):
        at = volume.mkdir(at, b"d", 0o755, ME).inode
    later_s = time.monotonic() + 2 * descriptors.RECHECK_S
    monkeypatch.setattr(descriptors, "monotonic", lambda: later_s)
    assert [entry.name for entry in volume.readdir(at, 0)] == [b".", b".."]
    volume.check_invariants()
    subprocess.run(["rm", "-rf", inside / "d"], check=True)  # pytest's own removal is not that deep


def test_a_reader_continues_a_listing_after_more_directories_were_listed_than_are_kept(
    volume: HostVolume, inside: Path
) -> None:
    names = [b"%03d" % number for number in range(listings.MOST_READ_DIRECTORIES + 10)]
    for name in names:
        (inside / os.fsdecode(name)).mkdir()
    first = volume.lookup(ROOT_INODE, names[0]).inode
    for number in range(20):
        (inside / os.fsdecode(names[0]) / str(number)).touch()
    readers = []
    for number in range(20, 30):  # each reader finds more names than the one before
        entries = list(volume.readdir(first, 0))
        readers.append((entries[: number // 2], {entry.name for entry in entries}))
        volume.mknod(first, b"%d" % number, stat.S_IFREG | 0o644, 0, ME)
        (inside / os.fsdecode(names[0]) / f"outside{number}").touch()
    for at, name in enumerate(names[1:]):
        list(volume.readdir(volume.lookup(ROOT_INODE, name).inode, 0))
        volume.check_invariants()
        if at % 100 == 99:
            volume.unlink(first, b"%d" % (at // 100))
            volume.mknod(first, b"late%d" % at, stat.S_IFREG | 0o644, 0, ME)
    gone = {b"0", b"1"}
    for seen, there in readers:
        rest = list(volume.readdir(first, seen[-1].cookie))
        listed = [entry.name for entry in (*seen, *rest) if entry.name in there - gone]
        assert sorted(listed) == sorted(there - gone)
    volume.check_invariants()


def test_an_executable_that_was_written_can_be_executed_by_others_soon(
    fs: Driver, volume: HostVolume, inside: Path
) -> None:
    number = fs.file(b"run", b"")
    fs.hold(b"run")
    with open("/bin/true", "rb") as file:
        volume.write(number, 0, file.read())
    fs.set(number, mode=0o755)
    with fails(errno.ETXTBSY):
        subprocess.run([inside / "run"], check=True)
    for _ in range(2):
        volume.tidy()
    subprocess.run([inside / "run"], check=True)


def test_times_before_1970_and_of_only_one_kind(fs: Driver) -> None:
    number = fs.file(b"f")
    atime = fs.stat(number).atime_ns
    assert fs.set(number, mtime_ns=-1_500_000_000).mtime_ns == -1_500_000_000
    assert fs.stat(number).atime_ns == atime


def test_read_only_refuses_every_change(inside: Path) -> None:
    (inside / "f").write_bytes(b"1")
    volume = HostVolume(os.fsencode(inside), read_only=True)
    fs = Driver(volume)
    number = fs.at(b"f")
    for use in (
        lambda: fs.file(b"new"),
        lambda: fs.directory(b"new"),
        lambda: fs.symlink(b"new", b"x"),
        lambda: fs.link(number, b"new"),
        lambda: fs.unlink(b"f"),
        lambda: fs.rmdir(b"f"),
        lambda: fs.rename(b"f", b"g"),
        lambda: fs.set(number, mode=0),
        lambda: volume.write(number, 0, b"x"),
        lambda: volume.fallocate(number, 0, 0, 1),
        lambda: volume.copy_range(number, 0, number, 0, 1),
        lambda: volume.setxattr(number, b"user.a", b"1", 0),
        lambda: volume.removexattr(number, b"user.a"),
        lambda: volume.tmpfile(ROOT_INODE, 0o600, ME),
        lambda: volume.setattr(number, AttributeChanges()),
    ):
        with fails(errno.EROFS):
            use()
    assert fs.read(number) == b"1"
    volume.close()


UNPRIVILEGED = """
import ctypes, os, stat, sys
from protocol.backends.host import HostVolume
from protocol.testing import Driver
from protocol.volume import (Caller)
os.setgroups([]); os.setresgid(1234, 1234, 1234); os.setresuid(1234, 1234, 1234)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is its own, as after an exec
volume = HostVolume(os.fsencode(sys.argv[1]))
fs = Driver(volume)
me = Caller(1234, 1234)
number = fs.file(b"object", b"written", mode=0o444, caller=me)   # as git makes its objects
volume.write(number, 7, b" later")                               # opened anew: nobody holds it
assert fs.read(number) == b"written later"
assert fs.stat(number).mode == stat.S_IFREG | 0o444
fs.set(number, size=7)
fs.set(number, mode=0)
assert fs.read(number) == b"written"
stranger = fs.file(b"stranger", caller=Caller(77, 77))
assert (fs.stat(stranger).uid, fs.stat(stranger).gid) == (1234, 1234)
for use in (lambda: fs.set(number, uid=0), lambda: fs.read(b"private"), lambda: fs.file(b"locked/x")):
    try:
        use()
    except PermissionError:
        pass
    else:
        raise AssertionError("more than its own user may")
assert fs.read(b"public") == b"public"
inner = fs.directory(b"d", caller=me)
fs.file(b"d/f", b"1", caller=me)
fs.rename(b"d/f", b"g")
fs.link(fs.at(b"g"), b"h")
tmp = volume.tmpfile(1, 0, me).inode
volume.write(tmp, 0, b"tmp")
volume.link(tmp, 1, b"named")
fs.rmdir(b"d")
volume.check_invariants()
volume.close()
"""


@needs_root
def test_an_unprivileged_daemon_does_what_its_user_may_and_no_more(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "t") as place:
        os.chown(place, 1234, 1234)
        (place / "private").write_bytes(SECRET)
        (place / "private").chmod(0o600)
        (place / "public").write_bytes(b"public")
        (place / "locked").mkdir(0o700)
        program = [sys.executable, "-c", UNPRIVILEGED, "."]
        found = subprocess.run(program, cwd=place, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        assert stat.S_IMODE(os.stat(place / "object").st_mode) == 0
        assert os.stat(place / "named").st_uid == 1234
