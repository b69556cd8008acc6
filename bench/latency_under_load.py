"""How long requests and snapshots take while the workspace has other work: p50, p99 and the longest.

    python -m bench.latency_under_load [--seconds N] [--rounds N] [--files N] [--json FILE]

A stat of the mount is measured while nothing else runs, and during exports, greps and imports of a memory workspace.
These four rows take turns, so that other work of the machine affects all of them.
Snapshots are measured while four programs send requests through the mount without a pause.  `--json docs/bench.json`
adds the figures to the results of `bench.table`, for the table of targets (`bench.report`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from bench import _machine, _results
from bench._filesystems import end_cleanly, run, scratch_directory
from bench.control import FILE_BYTES, fill
from vfsd.client.workspace import Workspace

VFSD = Path(sys.executable).with_name("vfsd")
PROGRAMS = 4
# Creates, writes, renames and removes a file, again and again.
PROGRAM = """
import os, sys
top = sys.argv[1]
while True:
    with open(top + "/a", "wb") as file:
        file.write(b"x" * 1024)
    os.rename(top + "/a", top + "/b")
    os.unlink(top + "/b")
"""


def report(name: str, times: list[float]) -> dict[str, float]:
    times.sort()
    p50, p99, longest = (times[int(len(times) * share)] for share in (0.5, 0.99, 0.999999))
    print(f"{name:28}{len(times):8}{p50 * 1e3:10.3f}{p99 * 1e3:10.3f}{longest * 1e3:10.3f}", flush=True)
    return {"p50_s": p50, "p99_s": p99, "longest_s": longest}


def timed(seconds: float, body: Callable[[], object]) -> list[float]:
    times = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        body()
        times.append(time.perf_counter() - began)
    return times


def stats(place: Path, seconds: float) -> list[float]:
    """Look up names that do not exist and were never looked up: each is one request."""
    names = (f"{place}/absent{time.monotonic_ns()}.{number}" for number in iter(int, 1))
    return timed(seconds, lambda: os.path.exists(next(names)))


@contextmanager
def repeating(work: Callable[[], object]) -> Iterator[None]:
    """Repeat `work` in a thread inside the block."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def programs(place: Path) -> Iterator[None]:
    running = []
    for number in range(PROGRAMS):
        (place / f"program{number}").mkdir()
        running.append(subprocess.Popen([sys.executable, "-c", PROGRAM, place / f"program{number}"]))
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each row of stats, which share its time")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--json", metavar="FILE", help="add the figures to those in FILE")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    try:
        if options.json:
            _results.check_writable(options.json)
    except (OSError, ValueError) as error:
        parser.error(f"--json: {error}")
    end_cleanly()
    with scratch_directory() as scratch:
        archive = scratch / "out.zip"
        with Workspace.mount(scratch / "mount", name=f"latency-{os.getpid()}") as workspace:
            place = Path(workspace.path)
            fill(place, options.files, FILE_BYTES)
            workspace.export(archive, overwrite=True)
            print(f"{'ms':28}{'times':>8}{'p50':>10}{'p99':>10}{'longest':>10}")
            works: dict[str, Callable[[], object] | None] = {
                "stat, idle": None,
                "stat during export": lambda: workspace.export(archive, overwrite=True),
                "stat during grep": lambda: run(VFSD, "-w", workspace.name, "fs", "grep", "no_such_word_[0-9]+x"),
                "stat during import": lambda: workspace.import_archive(archive),
            }
            found_s: dict[str, list[float]] = {name: [] for name in works}
            for _ in range(options.rounds):
                for name, work in works.items():
                    with repeating(work) if work is not None else nullcontext():
                        found_s[name] += stats(place, options.seconds / options.rounds)
            rows = {name: report(name, times) for name, times in found_s.items()}
            for name, in_use in (("snapshot, idle", False), ("snapshot under load", True)):
                with programs(place) if in_use else repeating(lambda: time.sleep(0.1)):
                    times = timed(options.seconds, workspace.snapshot)
                rows[name] = report(name, times)
    if options.json:
        found = {"machine": _machine.machine(), "load": load, "files": options.files, "rows": rows}
        _results.save(options.json, {"latency": found})


if __name__ == "__main__":
    main()
