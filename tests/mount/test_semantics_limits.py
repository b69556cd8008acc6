"""A full volume: what fits is kept, what does not fit leaves no trace.  Each test also runs on a tmpfs of the size."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mount.conftest import WRITE_BACK, provided

MIB = 1 << 20
PAGE = 4096
_numbers = itertools.count()
Limited = Callable[..., Path]


@pytest.fixture
def limited(on: str, workdir: Path) -> Iterator[Limited]:
    """Makes a place of its own with limits: `limited(max_bytes=MIB)`."""
    with ExitStack() as stack:

        def make(**limits: int) -> Path:
            path = workdir / f"limited{next(_numbers)}"
            path.mkdir()
            return stack.enter_context(provided(on, path, **limits))

        yield make


def until(condition: Callable[[], bool]) -> None:
    """Ask until it holds: what was removed is free when the kernel's FORGET for it has been read."""
    while not condition():
        os.sched_yield()


def no_space(action: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError, match=r".") as raised:
        action(*arguments)
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.write_through  # a write-back cache: see test_write_back.py
def test_a_write_that_fits_in_part_is_short_and_the_next_fails(limited: Limited) -> None:
    root = limited(max_bytes=MIB)
    fd = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    content = os.urandom(2 * MIB)
    assert os.write(fd, content) == MIB
    no_space(os.write, fd, b"x")
    assert os.fstat(fd).st_size == MIB
    assert os.pread(fd, 2 * MIB, 0) == content[:MIB]
    assert os.statvfs(root).f_bfree == 0
    assert os.pwrite(fd, b"over", 100) == 4  # what is there already takes no more room
    os.ftruncate(fd, 10 * MIB)  # nor does a hole
    no_space(os.pwrite, fd, b"x", 5 * MIB)
    os.ftruncate(fd, MIB // 2)
    assert os.pwrite(fd, b"x" * PAGE, MIB) == PAGE
    os.close(fd)


@pytest.mark.write_through
def test_an_append_that_fits_in_part_is_made_once(limited: Limited) -> None:
    log = limited(max_bytes=2 * PAGE) / "log"
    log.write_bytes(b"x" * 5000)
    with log.open("ab", 0) as file:
        assert file.write(b"y" * 5000) == 3192
        no_space(file.write, b"z")
    assert log.read_bytes() == b"x" * 5000 + b"y" * 3192


def test_a_full_volume_still_lets_things_be_named_moved_and_removed(limited: Limited, on: str) -> None:
    root = limited(max_bytes=MIB)
    (root / "f").write_bytes(bytes(range(256)) * (MIB // 256))
    (root / "empty").touch()
    (root / "d").mkdir()
    (root / "l").symlink_to("f")
    os.link(root / "f", root / "hard")
    os.rename(root / "f", root / "d" / "f")
    no_space((root / "empty").write_bytes, b"x")
    assert (root / "empty").stat().st_size == (1 if on == WRITE_BACK else 0)  # a byte that reads as zero
    (root / "hard").unlink()
    (root / "d" / "f").unlink()
    until(lambda: os.statvfs(root).f_bfree == MIB // PAGE)
    (root / "empty").write_bytes(b"x" * MIB)


def test_a_file_that_is_open_keeps_its_room_until_it_is_closed(limited: Limited) -> None:
    root = limited(max_bytes=MIB)
    fd = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * MIB)
    os.fsync(fd)
    os.unlink(root / "f")
    no_space((root / "g").write_bytes, b"x" * MIB)
    assert os.pread(fd, 1, MIB - 1) == b"x"
    os.close(fd)
    until(lambda: os.statvfs(root).f_bfree == MIB // PAGE)
    (root / "g").write_bytes(b"x" * MIB)


def test_fallocate_beyond_the_limit_reserves_nothing(limited: Limited, kind: str) -> None:
    root = limited(max_bytes=MIB)
    fd = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    no_space(os.posix_fallocate, fd, 0, 2 * MIB)
    if kind != "pyfuse3":  # where glibc has written what it could
        assert os.fstat(fd).st_blocks == 0
    os.ftruncate(fd, 0)
    os.posix_fallocate(fd, 0, MIB)
    assert os.pwrite(fd, b"x" * MIB, 0) == MIB  # room that was reserved is there
    no_space((root / "g").write_bytes, b"x")
    os.close(fd)


def test_the_number_of_inodes_is_bounded_and_counts_open_files(limited: Limited) -> None:
    root = limited(max_inodes=10)
    free = os.statvfs(root).f_ffree
    for number in range(free):
        (root / f"f{number}").touch()
    for make in ((root / "x").touch, (root / "x").mkdir, lambda: os.symlink("y", root / "x")):
        no_space(make)
    assert len(os.listdir(root)) == free
    fd = os.open(root / "f0", os.O_RDONLY)
    os.unlink(root / "f0")
    no_space((root / "x").touch)
    os.close(fd)
    until(lambda: os.statvfs(root).f_ffree == 1)
    (root / "x").mkdir()


def test_a_mapped_page_for_which_there_is_no_room_is_not_kept(limited: Limited, kind: str) -> None:
    root = limited(max_bytes=MIB)
    (root / "f").write_bytes(b"x" * (MIB - PAGE))
    fd = os.open(root / "sparse", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 64 * PAGE)
    with mmap.mmap(fd, 64 * PAGE) as mapped:
        mapped[0] = 1
        mapped.flush()
        if kind != "tmpfs":  # which would end this process with SIGBUS
            mapped[10 * PAGE] = 1
            no_space(mapped.flush)
    assert os.pread(fd, 1, 0) == b"\1"
    os.close(fd)
    assert os.statvfs(root).f_bfree == 0


def test_df_says_what_there_is_and_what_is_left(limited: Limited) -> None:
    root = limited(max_bytes=4 * MIB, max_inodes=100)
    (root / "f").write_bytes(b"x" * MIB)
    found = os.statvfs(root)
    assert (found.f_bsize, found.f_frsize, found.f_namemax) == (PAGE, PAGE, 255)
    assert (found.f_blocks, found.f_bfree, found.f_bavail) == (1024, 768, 768)
    assert (found.f_files, found.f_ffree) == (100, 98)
    fields = "--output=size,used,avail,pcent,itotal,iused"
    said = subprocess.run(["df", "-k", fields, root], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[1].split() == ["4096", "1024", "3072", "25%", "100", "2"]


@pytest.fixture
def busy_device() -> Iterator[Callable[[Path], None]]:
    """Keeps requests of other threads in the kernel's queue; then some of them are read before a FORGET."""
    ended = threading.Event()

    def ask(root: Path) -> None:
        while not ended.is_set():
            os.statvfs(root)

    with ThreadPoolExecutor(4) as threads:
        try:
            yield lambda root: [threads.submit(ask, root) for _ in range(4)].clear()
        finally:
            ended.set()


def test_the_space_of_a_removed_file_is_free_for_the_next_write(
    limited: Limited, busy_device: Callable[[Path], None]
) -> None:
    root = limited(max_bytes=MIB)
    busy_device(root)
    for _ in range(60):
        fd = os.open(root / "f", os.O_WRONLY | os.O_CREAT)
        assert os.write(fd, b"x" * MIB) == MIB
        os.close(fd)
        (root / "f").unlink()


def test_the_inodes_of_removed_files_are_free_for_the_next_files(
    limited: Limited, busy_device: Callable[[Path], None]
) -> None:
    root = limited(max_inodes=2)
    busy_device(root)
    for _ in range(60):
        (root / "f").touch()
        (root / "f").unlink()
        (root / "d").mkdir()
        (root / "d").rmdir()
