"""`--cache writeback` against the default and tmpfs: small writes, SQLite, new files, and what a snapshot costs.

    python -m bench.write_back [--rounds N]

The file systems take turns within each round.  A cell is the median of the rounds as a multiple of tmpfs; tmpfs has
its own medians in microseconds for an operation.  The second table has the milliseconds of a snapshot that is requested
right after so many MiB were written, medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tarfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, get_args

from bench import _sqlite
from bench._filesystems import LIMIT, end_cleanly, scratch_directory, tmpfs
from vfsd.client.workspace import Workspace
from vfsd.operations.declaration import CacheChoice

DATA: Final = os.urandom(1 << 20)
DIRTY_MIB: Final = (0, 1, 16, 64)
FILES: Final = 300
WRITES: Final = 2_000
Work = Callable[[Path], float]  # in a new directory; returns seconds for an operation


def per_operation(count: int, body: Callable[[Path], object], place: Path) -> float:
    began = time.perf_counter()
    body(place)
    return (time.perf_counter() - began) / count


def append_100(place: Path) -> None:
    with (place / "log").open("ab", buffering=0) as file:
        for _ in range(WRITES):
            file.write(DATA[:100])


def write_4k(place: Path) -> None:
    with (place / "file").open("wb", buffering=0) as file:
        for number in range(WRITES):
            os.pwrite(file.fileno(), DATA[:4096], number % 500 * 4096)


def write_and_sync(place: Path) -> None:
    """Write ten pages and sync them, again and again, as a database does."""
    with (place / "file").open("wb", buffering=0) as file:
        for number in range(WRITES // 10):
            for page in range(10):
                os.pwrite(file.fileno(), DATA[:4096], (number * 7 + page * 13) % 500 * 4096)
            os.fsync(file.fileno())


def create(place: Path) -> None:
    for number in range(FILES):
        (place / f"f{number}").write_bytes(DATA[:1024])


def make_tarball(path: Path) -> None:
    """FILES files of 0 to 12 KB in 30 directories."""
    source = path.with_suffix("")
    for number in range(FILES):
        file = source / f"d{number % 30}" / f"f{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(DATA[: number * 40])
    with tarfile.open(path, "w") as archive:
        archive.add(source, "tree")


def extract(tarball: Path, place: Path) -> None:
    subprocess.run(["tar", "-xf", tarball, "-C", place], check=True)


def rows(tarball: Path) -> dict[str, Work]:
    plain: tuple[tuple[str, int, Callable[[Path], object]], ...] = (
        ("append 100 B", WRITES, append_100),
        ("write 4 KB", WRITES, write_4k),
        ("10 x 4 KB and fsync, a write", WRITES, write_and_sync),
        ("create + 1 KB", FILES, create),
        ("tar x, a file", FILES, partial(extract, tarball)),
    )
    works: dict[str, Work] = {name: partial(per_operation, count, body) for name, count, body in plain}
    for inserts in _sqlite.INSERTS:
        works[inserts.name] = partial(_insert, inserts)
    return works


def _insert(inserts: _sqlite.Inserts, place: Path) -> float:
    return _sqlite.measure(inserts, str(place), time.perf_counter)


def measure(places: dict[str, Path], works: dict[str, Work], rounds: int) -> None:
    times: dict[tuple[str, str], list[float]] = {(row, name): [] for row in works for name in places}
    for number in range(rounds):
        for (row, name), found in times.items():
            directory = places[name] / f"round{number}"
            directory.mkdir()
            found.append(works[row](directory))
            shutil.rmtree(directory)
    caches = [name for name in places if name != LIMIT]
    print(f"| row | {LIMIT}, us | {' | '.join(caches)} |\n| --- | {' | '.join('---' for _ in places)} |")
    for row in works:
        limit = statistics.median(times[row, LIMIT])
        cells = [f"{statistics.median(times[row, name]) / limit:.1f}" for name in caches]
        print(f"| {row} | {limit * 1e6:.1f} | {' | '.join(cells)} |", flush=True)


def measure_snapshots(workspaces: dict[str, Workspace], rounds: int) -> None:
    times: dict[tuple[str, int], list[float]] = {(name, mib): [] for name in workspaces for mib in DIRTY_MIB}
    for _ in range(rounds):
        for (name, mib), found in times.items():
            workspace = workspaces[name]
            path = Path(workspace.path, "dirty")
            with path.open("wb", buffering=0) as file:
                for _mib in range(mib):
                    file.write(DATA)
                began = time.perf_counter()
                workspace.snapshot("dirty")
                found.append(time.perf_counter() - began)
            workspace.drop("dirty")
            path.unlink()
    print(f"\n| snapshot, ms | {' | '.join(f'{mib} MiB' for mib in DIRTY_MIB)} |")
    print(f"| --- | {' | '.join('---' for _ in DIRTY_MIB)} |")
    for name in workspaces:
        cells = [f"{statistics.median(times[name, mib]) * 1e3:.1f}" for mib in DIRTY_MIB]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    end_cleanly()
    with scratch_directory() as scratch, ExitStack() as stack:
        make_tarball(scratch / "tree.tar")
        places = {LIMIT: stack.enter_context(tmpfs(scratch / "tmpfs"))}
        workspaces = {}
        for cache in get_args(CacheChoice):
            workspaces[cache] = stack.enter_context(Workspace.mount(scratch / cache, cache=cache, engine="native"))
            places[cache] = Path(workspaces[cache].path)
        measure(places, rows(scratch / "tree.tar"), options.rounds)
        measure_snapshots(workspaces, options.rounds)


if __name__ == "__main__":
    main()
