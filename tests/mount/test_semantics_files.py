"""Files, their content and who shares them: appends, locks, mappings, open files.  Each test also runs on tmpfs."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import EACH_ENGINE_AND_BACKEND_ONCE
from tests.mount.programs import Program

libc = ctypes.CDLL(None, use_errno=True)
PAGE = 4096
BIG = 2**63 - 1
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
O_DIRECT = getattr(os, "O_DIRECT", 0)


@pytest.fixture
def two(place: Path) -> Iterator[tuple[Program, Program]]:
    with Program(cwd=place) as one, Program(cwd=place) as other:
        yield one, other


def errno_of(action: object, *arguments: object) -> int:
    with pytest.raises(OSError, match=r".") as raised:
        action(*arguments)  # type: ignore[operator]
    assert raised.value.errno is not None
    return raised.value.errno


# -- appending --------------------------------------------------------------------------------------
def test_records_of_two_writers_that_append_stay_whole(place: Path, two: tuple[Program, Program]) -> None:
    code = """
fd = os.open('log', os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for n in range(500): os.write(fd, b'%s %06d %s|' % (who, n, who * (n % 300)))
"""
    for program, who in zip(two, (b"a", b"b"), strict=True):
        program.begin(code, who=who)
    for program in two:
        program.result()
    records = (place / "log").read_bytes().split(b"|")[:-1]
    assert len(records) == 1000
    for who in (b"a", b"b"):
        of_one = [record for record in records if record.startswith(who)]
        assert of_one == [b"%s %06d %s" % (who, n, who * (n % 300)) for n in range(500)]


def test_appending_goes_to_the_end_that_another_has_moved(place: Path, two: tuple[Program, Program]) -> None:
    one, other = two
    one("fd = os.open('log', os.O_RDWR | os.O_APPEND | os.O_CREAT); os.write(fd, b'one')")
    other("os.truncate('log', 10)")
    one("os.write(fd, b'end')")
    assert (place / "log").read_bytes() == b"one" + bytes(7) + b"end"
    other("os.truncate('log', 0)")
    one("os.write(fd, b'again')")
    assert (place / "log").read_bytes() == b"again"


# -- locks ------------------------------------------------------------------------------------------
LOCKS = {
    "flock": ("fcntl.flock(fd, fcntl.LOCK_EX{nb})", "fcntl.flock(fd, fcntl.LOCK_UN)"),
    "lockf": ("fcntl.lockf(fd, fcntl.LOCK_EX{nb}, 10, 5)", "fcntl.lockf(fd, fcntl.LOCK_UN, 10, 5)"),
}


@pytest.mark.parametrize("kind_of_lock", LOCKS)
def test_a_lock_keeps_another_process_out_until_it_is_given_back(
    two: tuple[Program, Program], kind_of_lock: str
) -> None:
    lock, unlock = LOCKS[kind_of_lock]
    one, other = two
    for program in two:
        program("fd = os.open('f', os.O_RDWR | os.O_CREAT)")
    one(lock.format(nb=""))
    assert errno_of(other, lock.format(nb=" | fcntl.LOCK_NB")) in (errno.EAGAIN, errno.EACCES)
    other.begin(lock.format(nb="") + "; os.write(fd, b'mine')")
    one("os.pwrite(fd, b'before', 100)")
    one(unlock)
    other.result()
    assert one("os.pread(fd, 4, 0)") == b"mine"


@pytest.mark.parametrize("kind_of_lock", LOCKS)
def test_a_lock_ends_with_its_process(two: tuple[Program, Program], kind_of_lock: str) -> None:
    lock, _ = LOCKS[kind_of_lock]
    one, other = two
    for program in two:
        program("fd = os.open('f', os.O_RDWR | os.O_CREAT)")
    one(lock.format(nb=""))
    other.begin(lock.format(nb=""))
    os.kill(one.pid, signal.SIGKILL)
    other.result()


def test_locks_on_ranges_that_do_not_overlap_live_side_by_side(two: tuple[Program, Program]) -> None:
    one, other = two
    for program in two:
        program("fd = os.open('f', os.O_RDWR | os.O_CREAT)")
    one("fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)")
    other("fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 10)")
    assert errno_of(other, "fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 9)") in (errno.EAGAIN, errno.EACCES)
    one("fcntl.lockf(fd, fcntl.LOCK_SH, 10, 0)")
    other("fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 9)")


def test_a_deadlock_of_locks_is_found(two: tuple[Program, Program]) -> None:
    one, other = two
    for program, at in zip(two, (0, 1), strict=True):
        program("fd = os.open('f', os.O_RDWR | os.O_CREAT)")
        program(f"fcntl.lockf(fd, fcntl.LOCK_EX, 1, {at})")
    one.begin("fcntl.lockf(fd, fcntl.LOCK_EX, 1, 1)")
    while f"-> POSIX  ADVISORY  WRITE {one.pid} " not in Path("/proc/locks").read_text():
        os.sched_yield()
    assert errno_of(other, "fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)") == errno.EDEADLK
    other("os.close(fd)")
    one.result()


# -- mappings ---------------------------------------------------------------------------------------
def test_a_shared_mapping_is_what_others_map_and_read(place: Path, two: tuple[Program, Program]) -> None:
    one, other = two
    (place / "f").write_bytes(bytes(3 * PAGE))
    for program in two:
        program("fd = os.open('f', os.O_RDWR); m = mmap.mmap(fd, 3 * 4096)")
    one("m[5000:5005] = b'hello'")
    assert other("m[5000:5005]") == b"hello"
    assert other("os.pread(fd, 5, 5000)") == b"hello"
    other("os.pwrite(fd, b'HELLO', 5000)")
    assert one("m[5000:5005]") == b"HELLO"
    one("m[0:4] = b'sync'; m.flush()")
    assert (place / "f").read_bytes()[:4] == b"sync"
    one("m[8192:8196] = b'left'; m.close(); os.close(fd)")
    assert other("os.pread(fd, 4, 8192)") == b"left"


def test_a_private_mapping_keeps_its_changes_to_itself(place: Path, two: tuple[Program, Program]) -> None:
    one, other = two
    (place / "f").write_bytes(b"content")
    one("fd = os.open('f', os.O_RDONLY); m = mmap.mmap(fd, 7, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)")
    one("m[0:7] = b'changed'")
    assert one("m[0:7]") == b"changed"
    assert other("open('f').read()") == "content"


def test_a_mapping_past_the_end_faults_and_its_last_page_is_zeros(place: Path) -> None:
    (place / "f").write_bytes(b"x" * (PAGE + 10))
    with Program(cwd=place) as program:
        program("fd = os.open('f', os.O_RDWR); m = mmap.mmap(fd, 4096 + 10)")
        assert program("m[4096:4106]") == b"x" * 10
        program("os.ftruncate(fd, 4096)")
        program.begin("m[4096]")
        with pytest.raises(AssertionError, match="has died"):
            program.result()
    with Program(cwd=place) as program:
        program("fd = os.open('f', os.O_RDWR); os.ftruncate(fd, 100); m = mmap.mmap(fd, 100)")
        program("os.ftruncate(fd, 4096)")
        assert program("os.pread(fd, 9999, 100) == bytes(3996)")


def test_what_is_mapped_beyond_the_end_of_a_file_is_not_kept(place: Path) -> None:
    (place / "f").write_bytes(b"x" * 10)
    with Program(cwd=place) as program:
        # mmap's own length stops at the file's; the page goes on.
        program("fd = os.open('f', os.O_RDWR); m = mmap.mmap(fd, 0); m[0:1] = b'y'; m.flush(); m.close()")
    os.truncate(place / "f", 20)
    assert (place / "f").read_bytes() == b"y" + b"x" * 9 + bytes(10)


def test_a_truncate_takes_away_the_pages_of_others(place: Path, two: tuple[Program, Program]) -> None:
    one, other = two
    (place / "f").write_bytes(b"x" * 2 * PAGE)
    one("fd = os.open('f', os.O_RDWR); m = mmap.mmap(fd, 2 * 4096); m[4096:4097]")
    other("os.truncate('f', 100); os.truncate('f', 8192)")
    assert one("m[0:100] == b'x' * 100 and m[100:8192] == bytes(8092)")


def test_a_mapping_outlives_descriptor_and_name(place: Path) -> None:
    (place / "f").write_bytes(b"x" * PAGE)
    with Program(cwd=place) as program:
        program("fd = os.open('f', os.O_RDWR); m = mmap.mmap(fd, 4096); os.close(fd); os.unlink('f')")
        program("m[0:1] = b'y'; m.flush()")
        assert program("m[0:2]") == b"yx"


# -- files that are open ------------------------------------------------------------------------------
def test_an_unlinked_file_is_whole_until_it_is_closed(place: Path, two: tuple[Program, Program]) -> None:
    one, other = two
    one("fd = os.open('f', os.O_RDWR | os.O_CREAT); os.write(fd, b'content'); other = os.dup(fd)")
    other("os.unlink('f'); open('f', 'x').write('another')")
    assert one("os.fstat(fd).st_nlink, os.pread(fd, 99, 0)") == (0, b"content")
    one("os.pwrite(fd, b'more', 7); os.ftruncate(fd, 9); os.fchmod(fd, 0o600); os.fsync(fd)")
    assert one("os.pread(other, 99, 0), oct(os.fstat(fd).st_mode)") == (b"contentmo", "0o100600")
    assert one("open(f'/proc/self/fd/{fd}').read()") == "contentmo"
    assert (place / "f").read_text() == "another"


def test_a_file_that_is_renamed_over_stays_what_its_openers_have(place: Path, two: tuple[Program, Program]) -> None:
    one, other = two
    (place / "f").write_text("old")
    one("fd = os.open('f', os.O_RDONLY)")
    other("open('new', 'x').write('new'); os.rename('new', 'f')")
    assert one("os.read(fd, 9), open('f').read(), os.fstat(fd).st_nlink") == (b"old", "new", 0)


def test_a_descriptor_follows_its_file_when_it_is_renamed(place: Path, two: tuple[Program, Program]) -> None:
    one, other = two
    one("fd = os.open('f', os.O_WRONLY | os.O_CREAT); os.mkdir('d')")
    other("os.rename('f', 'd/g')")
    one("os.write(fd, b'content')")
    assert (place / "d" / "g").read_text() == "content"


@pytest.mark.parametrize("on", EACH_ENGINE_AND_BACKEND_ONCE, indirect=True)
def test_a_thousand_names_of_one_file(place: Path) -> None:
    (place / "f").write_text("content")
    for number in range(1000):
        os.link(place / "f", place / f"l{number}")
    assert os.stat(place / "f").st_nlink == 1001
    (place / "l999").write_text("changed")
    assert (place / "f").read_text() == "changed"
    for number in range(1000):
        os.unlink(place / f"l{number}")
    assert os.stat(place / "f").st_nlink == 1


def link_open(fd: int, path: Path) -> int:
    """linkat(2) of an open file; the errno."""
    at_fdcwd, at_symlink_follow = -100, 0x400
    name = f"/proc/self/fd/{fd}".encode()
    return ctypes.get_errno() if libc.linkat(at_fdcwd, name, at_fdcwd, os.fsencode(path), at_symlink_follow) else 0


def test_o_tmpfile_makes_a_file_that_can_be_given_a_name(place: Path, kind: str) -> None:
    if kind == "pyfuse3":
        assert errno_of(os.open, place, os.O_TMPFILE | os.O_RDWR) == errno.EOPNOTSUPP
        return
    fd = os.open(place, os.O_TMPFILE | os.O_RDWR, 0o640)
    os.write(fd, b"content")
    assert os.fstat(fd).st_nlink == 0
    assert os.listdir(place) == []
    assert link_open(fd, place / "named") == 0
    os.close(fd)
    assert (place / "named").read_text() == "content"
    fd = os.open(place, os.O_TMPFILE | os.O_EXCL | os.O_RDWR)
    assert link_open(fd, place / "no") == errno.ENOENT
    os.close(fd)


# -- the limits of a file -------------------------------------------------------------------------------
def test_no_file_is_larger_than_an_offset_can_say(place: Path) -> None:
    fd = os.open(place / "f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, BIG)
    assert os.fstat(fd).st_size == BIG
    assert os.pread(fd, 10, BIG - 10) == bytes(10)
    append = os.open(place / "f", os.O_WRONLY | os.O_APPEND)
    assert errno_of(os.write, append, b"x") == errno.EFBIG
    os.ftruncate(fd, BIG - 1)
    assert os.write(append, b"xy") == 1
    os.close(append)
    assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (BIG, 8)
    assert os.pread(fd, 2, BIG - 2) == bytes(1) + b"x"
    assert errno_of(os.pwrite, fd, b"xy", -2) == errno.EINVAL
    assert errno_of(os.ftruncate, fd, -1) == errno.EINVAL
    os.close(fd)


def test_a_limit_on_file_sizes_raises_sigxfsz_and_efbig(place: Path) -> None:
    with Program(cwd=place) as program:
        program("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))")
        program("signal.signal(signal.SIGXFSZ, signal.SIG_IGN); fd = os.open('f', os.O_RDWR | os.O_CREAT)")
        assert program("os.write(fd, bytes(150))") == 100
        assert errno_of(program, "os.write(fd, b'x')") == errno.EFBIG
        assert errno_of(program, "os.ftruncate(fd, 101)") == errno.EFBIG


def test_a_hole_takes_no_room(place: Path) -> None:
    before = os.statvfs(place).f_bfree
    fd = os.open(place / "f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 10**15)
    os.pwrite(fd, b"end", 10**15 - 3)
    os.fsync(fd)
    assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (10**15, 8)
    # The page that was written, and the inode and its name, which a limit of memory counts: a page more at most.
    assert before - os.statvfs(place).f_bfree <= 2
    assert os.pread(fd, PAGE, 10**14) == bytes(PAGE)
    os.close(fd)


def test_data_and_holes_can_be_told_apart(place: Path, kind: str) -> None:
    fd = os.open(place / "f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x", 16 * PAGE)
    os.ftruncate(fd, 32 * PAGE)
    if kind == "pyfuse3":
        assert (os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, 0, os.SEEK_HOLE)) == (0, 32 * PAGE)
    else:
        assert os.lseek(fd, 0, os.SEEK_DATA) == 16 * PAGE
        assert os.lseek(fd, 16 * PAGE, os.SEEK_HOLE) == 17 * PAGE
        assert errno_of(os.lseek, fd, 20 * PAGE, os.SEEK_DATA) == errno.ENXIO
    assert errno_of(os.lseek, fd, 32 * PAGE, os.SEEK_DATA) == errno.ENXIO
    os.close(fd)


def test_fallocate_reserves_and_punches(place: Path, kind: str) -> None:
    fd = os.open(place / "f", os.O_RDWR | os.O_CREAT)

    def fallocate(mode: int, offset: int, length: int) -> int:
        result = libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length))
        return ctypes.get_errno() if result else 0

    if kind == "pyfuse3":
        assert fallocate(0, 0, PAGE) == errno.EOPNOTSUPP
    else:
        assert fallocate(0, 0, 4 * PAGE) == 0
        assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (4 * PAGE, 32)
        assert errno_of(os.lseek, fd, 0, os.SEEK_DATA) == errno.ENXIO, "not written yet"
        assert fallocate(FALLOC_FL_KEEP_SIZE, 0, 8 * PAGE) == 0
        assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (4 * PAGE, 64)
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0, "allocated a second time"
        assert os.lseek(fd, 0, os.SEEK_HOLE) == 4 * PAGE
        os.pwrite(fd, b"x" * 2 * PAGE, 0)
        assert fallocate(FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, 100, PAGE) == 0
        assert os.pread(fd, 2 * PAGE, 0) == b"x" * 100 + bytes(PAGE) + b"x" * (PAGE - 100)
        assert fallocate(FALLOC_FL_PUNCH_HOLE, 0, PAGE) == errno.EOPNOTSUPP
        assert fallocate(0, 0, 0) == errno.EINVAL
        assert fallocate(0, BIG - PAGE, 2 * PAGE) == errno.EFBIG
    os.close(fd)
    fd = os.open(place / "posix", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 3 * PAGE)  # glibc writes where the file system cannot
    assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (3 * PAGE, 24)
    os.close(fd)


# -- moving content about -------------------------------------------------------------------------------
def test_content_goes_from_file_to_file_by_sendfile_splice_and_copy_file_range(place: Path) -> None:
    content = os.urandom(300_000)
    (place / "from").write_bytes(content)
    source = os.open(place / "from", os.O_RDONLY)
    for name, move in {
        "sendfile": lambda to, at: os.sendfile(to, source, at, 1 << 20),
        "copied": lambda to, at: os.copy_file_range(source, to, 1 << 20, at),
    }.items():
        target = os.open(place / name, os.O_WRONLY | os.O_CREAT)
        at = 0
        while moved := move(target, at):
            at += moved
        os.close(target)
        assert (place / name).read_bytes() == content
    reader, writer = os.pipe()
    target = os.open(place / "spliced", os.O_WRONLY | os.O_CREAT)
    at = 0
    while moved := os.splice(source, writer, 65_536, at):
        at += moved
        while moved:
            moved -= os.splice(reader, target, moved)
    assert (place / "spliced").read_bytes() == content
    for fd in (reader, writer, source, target):
        os.close(fd)


def test_copy_file_range_within_a_file_and_its_errors(place: Path) -> None:
    (place / "f").write_bytes(b"0123456789")
    fd = os.open(place / "f", os.O_RDWR)
    assert os.copy_file_range(fd, fd, 4, 0, 20) == 4
    assert os.pread(fd, 99, 0) == b"0123456789" + bytes(10) + b"0123"
    assert errno_of(lambda: os.copy_file_range(fd, fd, 8, 0, 4)) == errno.EINVAL
    assert os.copy_file_range(fd, fd, 8, 1000, 2000) == 0
    append = os.open(place / "f", os.O_WRONLY | os.O_APPEND)
    assert errno_of(lambda: os.copy_file_range(fd, append, 4, 0, 0)) == errno.EBADF
    os.close(append)
    os.close(fd)


def test_o_direct_reads_what_was_written_past_the_cache_and_through_it(place: Path) -> None:
    block = mmap.mmap(-1, 4 * PAGE)
    block[:] = os.urandom(4 * PAGE)
    fd = os.open(place / "f", os.O_RDWR | os.O_CREAT | O_DIRECT)
    assert os.pwritev(fd, [block], 0) == 4 * PAGE
    assert (place / "f").read_bytes() == block[:]
    with open(place / "f", "r+b") as cached:
        cached.write(b"cached")
    again = mmap.mmap(-1, 4 * PAGE)
    assert os.preadv(fd, [again], 0) == 4 * PAGE
    assert again[:] == b"cached" + block[6:]
    os.close(fd)


def test_what_is_synced_is_synced(place: Path) -> None:
    fd = os.open(place / "f", os.O_RDWR | os.O_CREAT | os.O_SYNC)
    os.write(fd, b"content")
    os.fsync(fd)
    os.fdatasync(fd)
    assert libc.syncfs(fd) == 0
    assert libc.sync_file_range(fd, ctypes.c_long(0), ctypes.c_long(0), 7) == 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(fd, 99, 0) == b"content"
    os.close(fd)
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)
    os.close(directory)


# -- times ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "when_ns",
    [
        -1,
        -(10**9),
        -(2**31) * 10**9,
        -(2**33) * 10**9 + 1,
        (2**31) * 10**9 + 5,
        2**32 * 10**9 + 999_999_999,
        2**34 * 10**9,
        -6_857_222_400 * 10**9,
    ],
)
def test_times_before_1970_and_past_2106_come_back_as_they_were_set(place: Path, when_ns: int) -> None:
    (place / "f").touch()
    os.utime(place / "f", ns=(when_ns, when_ns + 7))
    found = os.stat(place / "f")
    assert (found.st_atime_ns, found.st_mtime_ns) == (when_ns, when_ns + 7)
    (place / "d").mkdir()
    os.utime(place / "d", ns=(when_ns, when_ns))
    assert os.stat(place / "d").st_mtime_ns == when_ns
    os.symlink("x", place / "l")
    os.utime(place / "l", ns=(when_ns, when_ns), follow_symlinks=False)
    assert os.lstat(place / "l").st_mtime_ns == when_ns


UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2


def test_utimensat_leaves_alone_what_it_is_told_to(place: Path) -> None:
    (place / "f").touch()
    os.utime(place / "f", ns=(1_000, 2_000))
    path = os.fsencode(place / "f")

    def utimensat(atime_ns: int, mtime_ns: int) -> None:
        assert libc.utimensat(-100, path, struct.pack("qqqq", 5, atime_ns, 5, mtime_ns), 0) == 0

    before = os.stat(path)
    utimensat(UTIME_OMIT, UTIME_OMIT)
    assert os.stat(path) == before
    utimensat(UTIME_OMIT, 7)
    assert (os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns) == (1_000, 5 * 10**9 + 7)
    utimensat(UTIME_NOW, UTIME_OMIT)
    assert os.stat(path).st_atime_ns > 10**18
    assert os.stat(path).st_mtime_ns == 5 * 10**9 + 7


def test_a_time_that_is_set_between_a_store_through_a_mapping_and_its_msync_stays(place: Path) -> None:
    path = place / "f"
    for by_handle in (False, True):
        path.write_bytes(b"x" * 2 * PAGE)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[0] = 72
            os.utime(file.fileno() if by_handle else path, ns=(1, 7))
            mapped.flush()
            assert os.stat(path).st_mtime_ns == 7
        assert os.stat(path).st_mtime_ns == 7
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[PAGE] = 72
            mapped.flush()
        assert os.stat(path).st_mtime_ns > 10**18


# -- open ---------------------------------------------------------------------------------------------
def test_the_flags_of_open(place: Path) -> None:
    (place / "f").write_text("content")
    (place / "d").mkdir()
    (place / "l").symlink_to("f")
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("made")
    cases = {
        ("f", os.O_CREAT | os.O_EXCL): errno.EEXIST,
        ("l", os.O_NOFOLLOW): errno.ELOOP,
        ("loop", 0): errno.ELOOP,
        ("f", os.O_DIRECTORY): errno.ENOTDIR,
        ("f/x", 0): errno.ENOTDIR,
        ("d", os.O_WRONLY): errno.EISDIR,
        ("d", os.O_CREAT): errno.EISDIR,
        ("gone", 0): errno.ENOENT,
        ("d/gone/x", os.O_CREAT): errno.ENOENT,
        ("dangling", os.O_CREAT | os.O_EXCL): errno.EEXIST,
        ("f/", 0): errno.ENOTDIR,
        ("x" * 256, os.O_CREAT): errno.ENAMETOOLONG,
    }
    found = {case: errno_of(os.open, place / "." if not case[0] else f"{place}/{case[0]}", case[1]) for case in cases}
    assert found == cases
    os.close(os.open(place / "dangling", os.O_CREAT))
    assert (place / "made").exists()
    path_only = os.open(place / "l", os.O_PATH | os.O_NOFOLLOW)
    assert stat.S_ISLNK(os.fstat(path_only).st_mode)
    assert os.readlink(b"", dir_fd=path_only) == b"f"
    assert errno_of(os.read, path_only, 1) == errno.EBADF
    os.close(path_only)


def test_a_fifo_and_a_socket_connect_processes(place: Path, two: tuple[Program, Program]) -> None:
    one, other = two
    os.mkfifo(place / "fifo")
    one.begin("open('fifo').read()")
    other("open('fifo', 'w').write('through')")
    assert one.result() == "through"
    one("s = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen()")
    other("c = socket.socket(socket.AF_UNIX); c.connect('sock'); c.send(b'hello')")
    assert one("s.accept()[0].recv(9)") == b"hello"
    assert stat.S_ISSOCK((place / "sock").stat().st_mode)


def test_a_lease_and_a_directory_notification_can_be_asked_for(place: Path) -> None:
    (place / "f").touch()
    fd = os.open(place / "f", os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        assert fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    finally:
        os.close(fd)
