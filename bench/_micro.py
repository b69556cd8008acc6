"""The micro workloads: one system call, or one short pattern of them, many times over."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DATA = os.urandom(1 << 20)


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is done: `files` of 1 KB, `entries` of the large directory, `data_bytes` of the large file."""

    files: int
    entries: int
    data_bytes: int


FULL = Amounts(files=1000, entries=10_000, data_bytes=32 << 20)
SHORT = Amounts(files=500, entries=10_000, data_bytes=16 << 20)
FEW = Amounts(files=50, entries=500, data_bytes=4 << 20)  # for a file system that is slow


Work = Callable[[str, Amounts], float]
Prepare = Callable[[str, Amounts], object]


def drop_caches() -> None:
    """Make the kernel forget clean pages, dentries and inodes.  Root only."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


@dataclass(frozen=True, slots=True)
class Workload:
    """`prepare` is not measured; `work` is, and returns how many operations (or MiB) it did."""

    name: str
    work: Work
    prepare: Prepare = lambda _place, _amounts: None
    is_cold: bool = False
    unit: str = "op"


def files(place: str, amounts: Amounts) -> None:
    for number in range(amounts.files):
        with open(f"{place}/f{number}", "wb") as file:
            file.write(DATA[:1024])


def entries(place: str, amounts: Amounts) -> None:
    os.mkdir(f"{place}/big")
    for number in range(amounts.entries):
        os.mknod(f"{place}/big/entry{number}")


def each(action: Callable[[str], object], pattern: str = "f{}") -> Work:
    def work(place: str, amounts: Amounts) -> float:
        for number in range(amounts.files):
            action(f"{place}/{pattern.format(number)}")
        return amounts.files

    return work


def warmed(work: Work, prepare: Prepare) -> Prepare:
    def prepare_and_warm(place: str, amounts: Amounts) -> None:
        prepare(place, amounts)
        work(place, amounts)

    return prepare_and_warm


def create(path: str) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
    os.write(descriptor, DATA[:1024])
    os.close(descriptor)


def read_all(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.read(descriptor, 4096)
    os.close(descriptor)


def absent(path: str) -> None:
    try:
        os.stat(path)
    except FileNotFoundError:
        pass


def list_directory(place: str, amounts: Amounts) -> float:
    with os.scandir(f"{place}/big") as found:
        assert sum(1 for _ in found) == amounts.entries
    return amounts.entries / FULL.entries


def write_blocks(size: int) -> Work:
    def work(place: str, amounts: Amounts) -> float:
        descriptor = os.open(f"{place}/data", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        for _ in range(amounts.data_bytes // size):
            os.write(descriptor, DATA[:size])
        os.close(descriptor)
        return amounts.data_bytes / (1 << 20)

    return work


def data_file(place: str, amounts: Amounts) -> None:
    write_blocks(1 << 20)(place, amounts)


def read_blocks(size: int) -> Work:
    def work(place: str, amounts: Amounts) -> float:
        descriptor = os.open(f"{place}/data", os.O_RDONLY)
        while os.read(descriptor, size):
            pass
        os.close(descriptor)
        return amounts.data_bytes / (1 << 20)

    return work


def at_random(size: int, *, writing: bool) -> Work:
    def work(place: str, amounts: Amounts) -> float:
        offsets = list(range(0, amounts.data_bytes, size))
        random.Random(size).shuffle(offsets)
        offsets = offsets[:1000]
        descriptor = os.open(f"{place}/data", os.O_RDWR)
        for offset in offsets:
            if writing:
                os.pwrite(descriptor, DATA[:size], offset)
            else:
                os.pread(descriptor, size, offset)
        os.close(descriptor)
        return len(offsets) * size / (1 << 20)

    return work


def fsync(place: str, _amounts: Amounts) -> float:
    descriptor = os.open(f"{place}/f0", os.O_WRONLY)
    for _ in range(200):
        os.pwrite(descriptor, b"x", 0)
        os.fsync(descriptor)
    os.close(descriptor)
    return 200


SIZES = ((4096, "4 KB"), (128 << 10, "128 KB"), (1 << 20, "1 MB"))

WORKLOADS = (
    Workload("stat cold", each(os.stat), files, is_cold=True),
    Workload("stat warm", each(os.stat), warmed(each(os.stat), files)),
    Workload("negative lookup warm", each(absent, "no{}"), warmed(each(absent, "no{}"), files)),
    Workload("open+read+close cold", each(read_all), files, is_cold=True),
    Workload("open+read+close warm", each(read_all), warmed(each(read_all), files)),
    Workload("create + write 1 KB", each(create, "new{}")),
    Workload("mkdir", each(os.mkdir, "dir{}")),
    Workload("symlink", each(lambda path: os.symlink("target", path), "link{}")),
    Workload("rename", each(lambda path: os.rename(path, path + "x")), files),
    Workload("chmod", each(lambda path: os.chmod(path, 0o600)), files),
    Workload("unlink", each(os.unlink), files),
    Workload("readdir 10,000 cold", list_directory, entries, is_cold=True),
    Workload("readdir 10,000 warm", list_directory, warmed(list_directory, entries)),
    *(Workload(f"write {name}", write_blocks(size), unit="MiB") for size, name in SIZES),
    *(Workload(f"read cold {name}", read_blocks(size), data_file, is_cold=True, unit="MiB") for size, name in SIZES),
    *(
        Workload(f"read warm {name}", read_blocks(size), warmed(read_blocks(size), data_file), unit="MiB")
        for size, name in SIZES[1:2]
    ),
    *(Workload(f"random write {name}", at_random(size, writing=True), data_file, unit="MiB") for size, name in SIZES),
    *(
        Workload(f"random read cold {name}", at_random(size, writing=False), data_file, is_cold=True, unit="MiB")
        for size, name in SIZES
    ),
    Workload("write 1 B + fsync", fsync, files),
)


def measure(workload: Workload, place: str, clock: Callable[[], float], amounts: Amounts) -> float:
    """Seconds, by `clock`, for one operation (or MiB).  `place` is an empty directory."""
    workload.prepare(place, amounts)
    if workload.is_cold:
        drop_caches()
    began = clock()
    count = workload.work(place, amounts)
    return (clock() - began) / count
