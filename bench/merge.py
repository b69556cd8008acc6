"""Merges of a fork: how long they take for changed files of a tree of files of 1 KB.

    python -m bench.merge [--files 100000] [--changed 1000] [--runs 5]

- `diff`: median wall time of `Workspace.diff(against=fork)`.
- `merge`: median wall time of `Workspace.merge(fork)`, which changes the files; each run is undone.
- `again`: median wall time of a merge of a fork that has not changed since.
- `cpu`: mean CPU time of both daemons for a merge that changes the files, with its undo.
- `pause`: the longest statvfs(2) in the target during as many merges more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.forks import LongestStat, fill
from vfsd.client.workspace import Workspace

_IN_A_DIRECTORY = 1000


def change(top: Path, files: int, changed: int) -> None:
    for number in range(0, files, files // changed):
        (top / f"d{number // _IN_A_DIRECTORY}" / f"f{number}").write_bytes(b"y" * 1000)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cpu_seconds(*workspaces: Workspace) -> float:
    """The CPU time that the daemons have used."""
    ticks = 0
    for workspace in workspaces:
        fields = Path(f"/proc/{workspace.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime: proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--changed", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        target_place, fork_place = Path(place, "target"), Path(place, "fork")
        with Workspace.mount(target_place, engine="native") as target:
            fill(target_place, options.files)
            with target.fork(fork_place) as fork:
                change(fork_place, options.files, options.changed)
                diffs = [timed(lambda: target.diff(against=fork)) for _ in range(options.runs)]
                merges = []
                before = cpu_seconds(target, fork)
                for _ in range(options.runs):
                    merges.append(timed(lambda: target.merge(fork)))
                    target.undo()
                used = (cpu_seconds(target, fork) - before) / options.runs
                with LongestStat(target_place) as longest:  # apart from the others, because it needs CPU time itself
                    for _ in range(options.runs):
                        target.merge(fork)
                        target.undo()
                target.merge(fork)
                again = [timed(lambda: target.merge(fork)) for _ in range(options.runs)]
    print(f"{options.changed:,} changed files of {options.files:,}, milliseconds")
    for name, seconds in (
        ("diff", statistics.median(diffs)),
        ("merge", statistics.median(merges)),
        ("again", statistics.median(again)),
        ("cpu", used),
        ("pause", longest.seconds),
    ):
        print(f"{name:6} {seconds * 1000:8.1f}")


if __name__ == "__main__":
    main()
