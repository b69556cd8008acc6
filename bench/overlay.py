"""What an overlay costs over a directory: mounting it, reading what is below, changing a byte of it.

    python -m bench.overlay [--json FILE]

What is below is a tmpfs, which is also what reading is compared with; medians of several rounds, in turn on each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench._filesystems import end_cleanly, tmpfs
from bench.snapshots import rss_bytes
from vfsd.client.workspace import Workspace

ROUNDS = 9
FILES = 1000
FILE_BYTES = 1024
LARGE_BYTES = 64 << 20
GIANT_BYTES = 1 << 30
TREES = (100, 100_000)
FILES_PER_DIRECTORY = 100


def timed_us(body: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    body()
    return (time.perf_counter_ns() - begin) / 1000


def fill(place: Path, count: int) -> None:
    for number in range(count):
        if number % FILES_PER_DIRECTORY == 0:
            directory = place / f"d{number // FILES_PER_DIRECTORY}"
            directory.mkdir()
        (directory / f"f{number}").write_bytes(b"x" * FILE_BYTES)


@contextmanager
def mounted(scratch: Path, below: Path) -> Iterator[Workspace]:
    mountpoint = scratch / "mount"
    mountpoint.mkdir(exist_ok=True)
    with Workspace.mount(mountpoint, f"overlay:{below}", name=f"bench-overlay-{os.getpid()}") as workspace:
        yield workspace


def mount_time(scratch: Path, below: Path, count: int) -> dict[str, float]:
    """Until the mount answers, over so many files; the daemon's start is in it."""
    place = below / f"tree{count}"
    place.mkdir()
    fill(place, count)
    times = []
    for _ in range(ROUNDS):
        with ExitStack() as stack:
            begin = time.perf_counter()
            stack.enter_context(mounted(scratch, place))
            times.append(time.perf_counter() - begin)
    return {f"mount over {count} files, ms": statistics.median(times) * 1000}


def read_files(place: Path) -> None:
    for number in range(FILES):
        descriptor = os.open(place / f"d{number // FILES_PER_DIRECTORY}" / f"f{number}", os.O_RDONLY)
        os.read(descriptor, 4096)
        os.close(descriptor)


def read_large(place: Path) -> None:
    descriptor = os.open(place / "large", os.O_RDONLY)
    while os.read(descriptor, 128 << 10):
        pass
    os.close(descriptor)


def reading(scratch: Path, below: Path) -> dict[str, float]:
    """First and warm reads of what is below, through the mount and without it."""
    place = below / "reading"
    place.mkdir()
    fill(place, FILES)
    (place / "large").write_bytes(os.urandom(LARGE_BYTES))
    found: dict[str, float] = {}
    with mounted(scratch, place) as workspace:
        root = Path(workspace.path)
        for name, read in (("1,000 files of 1 KB", read_files), ("a file of 64 MiB", read_large)):
            found[f"{name}, first read, us"] = timed_us(lambda read=read: read(root))  # type: ignore[misc]
            read(place)
            before = workspace.status().requests
            ratios = []
            for _ in range(ROUNDS):
                warm = timed_us(lambda read=read: read(root))  # type: ignore[misc]
                ratios.append(warm / timed_us(lambda read=read: read(place)))  # type: ignore[misc]
            found[f"{name}, warm, times tmpfs"] = statistics.median(ratios)
            found[f"{name}, warm, requests"] = float(workspace.status().requests - before)
    return found


def one_byte(scratch: Path, below: Path) -> dict[str, float]:
    """A byte changed in a file of a gibibyte: time with open and close, and the daemon's memory."""
    place = below / "giant"
    place.mkdir()
    with (place / "f").open("wb") as file:
        file.truncate(GIANT_BYTES)
        for offset in range(0, GIANT_BYTES, 64 << 20):
            file.seek(offset)
            file.write(os.urandom(1 << 20))

    def edit(root: Path, offset: int) -> None:
        with (root / "f").open("r+b") as file:
            file.seek(offset)
            file.write(b"!")

    with mounted(scratch, place) as workspace:
        root = Path(workspace.path)
        edit(root, 7)  # what any first write costs is not the file's
        before = rss_bytes(workspace.pid)
        took_us = timed_us(lambda: edit(root, (GIANT_BYTES >> 1) + 7))
        return {
            "one byte of 1 GiB, ms": took_us / 1000,
            "one byte of 1 GiB, KiB of memory": (rss_bytes(workspace.pid) - before) / 1024,
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overlay", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    end_cleanly()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="vfsd-bench-") as directory:
        scratch = Path(directory)
        os.environ["VFSD_RUNTIME_DIR"] = str(scratch / "run")
        with tmpfs(scratch / "below") as below:
            for count in TREES:
                found |= mount_time(scratch, below, count)
            found |= reading(scratch, below)
            found |= one_byte(scratch, below)
    for name, value in found.items():
        print(f"{name:45} {value:12.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
