"""Forks of a memory workspace: how long they take, and what memory they need, for trees of several sizes.

    python -m bench.forks [--files 1000 100000] [--forks 64]

For each number of files of 1 KB:

- `fork`: median wall time of `Workspace.fork`, until the mount answers; `all`: of all forks, one after the other.
- `pause`: the longest stat(2) in the source while the forks are made.
- `memory`: the sum of the proportional set sizes of the source and all forks, as a multiple of the source's resident
  set before; right after the forks, and after every file was read in each (`--read`, by default in 8 of them).
- `cp -a`: wall time of a copy of the source's mount into a tmpfs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from bench._filesystems import tmpfs
from bench.many import memory
from vfsd.client.workspace import Workspace

_IN_A_DIRECTORY = 1000


def fill(top: Path, files: int) -> None:
    for number in range(files):
        folder = top / f"d{number // _IN_A_DIRECTORY}"
        if number % _IN_A_DIRECTORY == 0:
            folder.mkdir()
        (folder / f"f{number}").write_bytes(b"x" * 1000)


def read_all(top: str) -> None:
    for directory, _, names in os.walk(top):
        for name in names:
            Path(directory, name).read_bytes()


class LongestStat:
    """The longest stat(2) of a path during a block, in seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds = 0.0

    def _run(self) -> None:
        while not self._ended.is_set():
            began = time.perf_counter()
            os.statvfs(self._path)
            self.seconds = max(self.seconds, time.perf_counter() - began)
            time.sleep(0.001)

    def __enter__(self) -> LongestStat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def measure(files: int, forks: int, read: int, base: Path) -> str:
    """Measure one size, and return a row of the table."""
    with Workspace.mount(base / f"source-{files}", engine="native") as source:
        fill(Path(source.path), files)
        resident = memory(source.pid)["Rss"]
        made: list[Workspace] = []
        times = []
        try:
            with LongestStat(Path(source.path)) as longest:
                began = time.perf_counter()
                for number in range(forks):
                    started = time.perf_counter()
                    made.append(source.fork(base / f"fork-{files}-{number}"))
                    times.append(time.perf_counter() - started)
                all_s = time.perf_counter() - began
            pids = [source.pid, *(each.pid for each in made)]
            right_after = sum(memory(pid)["Pss"] for pid in pids) / resident
            for each in made[:read]:
                read_all(each.path)
            after_reading = sum(memory(pid)["Pss"] for pid in pids) / resident
        finally:
            for each in made:
                each.unmount()
        began = time.perf_counter()
        subprocess.run(["cp", "-a", source.path, base / f"copy-{files}"], check=True)
        copy_s = time.perf_counter() - began
    return (
        f"{files:>9,} {1e3 * statistics.median(times):7.0f} ms {all_s:7.2f} s {1e3 * longest.seconds:7.0f} ms"
        f" {right_after:9.2f} {after_reading:9.2f} {copy_s:8.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--forks", type=int, default=64)
    parser.add_argument("--read", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, tmpfs(Path(place, "memory")) as base:
        print(f"load {os.getloadavg()[0]:.1f}, {arguments.forks} forks, {arguments.read} of them read whole")
        print(f"{'files':>9} {'fork':>10} {'all':>9} {'pause':>10} {'memory':>9} {'read':>9} {'cp -a':>10}")
        for files in arguments.files:
            print(measure(files, arguments.forks, arguments.read, base), flush=True)


if __name__ == "__main__":
    main()
