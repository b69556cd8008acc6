"""What snapshots of the memory backend cost, inside the volume: time by number of files, memory by change.

    python bench/snapshots.py [--json FILE] [--quick]

Medians of several runs; each size in a process of its own, so that memory is its own too.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import stat
import statistics
import sys
import time
from collections.abc import Callable

from protocol.backends.memory import MemoryVolume
from protocol.diff.tree_diff import changes
from protocol.volume import ROOT_INODE, AttributeChanges, Caller

CALLER = Caller(0, 0)
FILES_PER_DIRECTORY = 100
FILE_BYTES = 1024
CHANGED_FILES = 10
SIZES = (1_000, 10_000, 100_000)
SNAPSHOTS = 10_000


def rss_bytes(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(volume: MemoryVolume, count: int) -> list[int]:
    """Make `count` files of 1 KiB, as a kernel would; returns their inode numbers."""
    files: list[int] = []
    directory = ROOT_INODE
    for at in range(count):
        if at % FILES_PER_DIRECTORY == 0:
            directory = volume.mkdir(ROOT_INODE, b"directory-%06d" % at, 0o755, CALLER).inode
        number = volume.mknod(directory, b"file-%06d.txt" % at, stat.S_IFREG | 0o644, 0, CALLER).inode
        volume.write(number, 0, b"%d" % at * 8 + bytes(FILE_BYTES - 8 * len(b"%d" % at)))
        files.append(number)
    return files


def median_us(runs: int, body: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """The median time of `body` in microseconds; `before` is not measured."""
    times = []
    for _ in range(runs):
        before()
        begin = time.perf_counter_ns()
        body()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def change_some(volume: MemoryVolume, files: list[int], stamp: bytes) -> None:
    step = len(files) // CHANGED_FILES
    for number in files[::step][:CHANGED_FILES]:
        volume.write(number, 0, stamp)


def diff_count(volume: MemoryVolume, name: str) -> int:
    with volume.tree(name) as old, volume.tree() as new:
        return len(list(changes(old, new)))


def by_size(count: int) -> dict[str, float]:
    """Snapshot, restore, diff, drop among `count` files."""
    before = rss_bytes()
    volume = MemoryVolume()
    files = fill(volume, count)
    gc.collect()
    result: dict[str, float] = {"files": count, "bytes_per_file": (rss_bytes() - before) / count}
    taken = iter(range(10**9))
    result["snapshot_us"] = median_us(501, lambda: volume.take_snapshot(f"s{next(taken)}"))
    for info in volume.snapshots():
        volume.drop_snapshot(info.name)
    volume.take_snapshot("base")
    stamps = iter(range(10**9))

    def change() -> None:
        change_some(volume, files, b"%d" % next(stamps))

    result["restore_10_us"] = median_us(51, lambda: volume.restore_snapshot("base"), change)
    change()
    assert diff_count(volume, "base") == CHANGED_FILES
    result["diff_10_us"] = median_us(51, lambda: diff_count(volume, "base"))

    def snapshot_and_change() -> None:
        volume.take_snapshot("dropped")
        change()

    result["drop_10_us"] = median_us(51, lambda: volume.drop_snapshot("dropped"), snapshot_and_change)
    return result


def many_snapshots(count: int, snapshots: int) -> dict[str, float]:
    """Many snapshots with one small change between each; then all dropped, oldest first."""
    volume = MemoryVolume()
    files = fill(volume, count)
    gc.collect()
    before = rss_bytes()
    begin = time.perf_counter()
    for at in range(snapshots):
        volume.take_snapshot(f"s{at}")
        volume.write(files[at * 7919 % count], 0, b"%d" % at)
    took_s = time.perf_counter() - begin
    gc.collect()
    grown = rss_bytes() - before
    begin = time.perf_counter()
    volume.restore_snapshot("s0")
    restore_s = time.perf_counter() - begin
    begin = time.perf_counter()
    for at in range(snapshots):
        volume.drop_snapshot(f"s{at}")
    return {
        "files": count,
        "snapshots": snapshots,
        "total_s": took_s,
        "us_per_snapshot_and_change": took_s / snapshots * 1e6,
        "bytes_per_snapshot_and_change": grown / snapshots,
        "restore_the_oldest_s": restore_s,
        "drop_all_oldest_first_s": time.perf_counter() - begin,
    }


def metadata_only(count: int, snapshots: int) -> dict[str, float]:
    """The same with chmod: what a snapshot costs without content."""
    volume = MemoryVolume()
    files = fill(volume, count)
    gc.collect()
    before = rss_bytes()
    for at in range(snapshots):
        volume.take_snapshot(f"s{at}")
        volume.setattr(files[at * 7919 % count], AttributeChanges(mode=at & 0o777))
    gc.collect()
    return {"files": count, "snapshots": snapshots, "bytes_per_snapshot_and_chmod": (rss_bytes() - before) / snapshots}


def show(title: str, rows: list[dict[str, float]]) -> None:
    print(title)
    for name in rows[0]:
        cells = "".join(f"{row[name]:>14,.0f}" if row[name] >= 100 else f"{row[name]:>14,.2f}" for row in rows)
        print(f"  {name:<32}{cells}")
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="a tenth of the files and snapshots")
    arguments = parser.parse_args()
    part = 10 if arguments.quick else 1
    sizes = [size // part for size in SIZES]
    fresh = multiprocessing.get_context("spawn")
    with fresh.Pool(1, maxtasksperchild=1) as pool:
        figures = {
            "by_size": [pool.apply(by_size, (size,)) for size in sizes],
            "many_snapshots": [pool.apply(many_snapshots, (sizes[-1], SNAPSHOTS // part))],
            "metadata_only": [pool.apply(metadata_only, (sizes[-1], SNAPSHOTS // part))],
        }
    show("Ten files of 1 KiB changed, among so many; medians", figures["by_size"])
    show("Snapshots with one small write between each", figures["many_snapshots"])
    show("Snapshots with one chmod between each", figures["metadata_only"])
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"python": sys.version.split()[0], **figures}, file, indent=2)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
