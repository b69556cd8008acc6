"""What CPU-bound programs lose if a mount keeps idle CPUs awake: paired builds of a C project with and without.

    python -m bench.neighbours [--pairs N] [--json FILE [--more]]

Two workspaces, one with `--wakeups on` and one with `--wakeups off`, take turns; the order within a pair alternates.
`on the mount`: `make -j2` builds the project in the workspace.  `next to it`: `make -j2` builds it in a tmpfs while a
client of the workspace makes a burst of files every 50 ms, the same number with both.

Each row is the mean change from `off` to `on` with its 95 % confidence interval, in wall-clock time and in CPU time of
make and its children.  The mean is that of the logarithms of the pairs' ratios without the largest and the smallest
fifth (a trimmed mean; the interval is Yuen's), so that a pair that was disturbed by other programs counts little.

The target is judged by CPU time.  An idle CPU that polls never runs instead of a program that is ready; it can only
slow down programs on CPUs that share its core, and that makes their CPU time longer.  Wall-clock time includes waiting
for other programs of the machine.

`--json docs/bench.json` adds the figures to the results of `bench.table`, for the table of targets (`bench.report`).
With `--more`, the pairs that FILE has count too, so that a long run can be made in pieces.  Needs root, make and cc.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from bench import _machine, _results
from bench._filesystems import end_cleanly, run, scratch_directory, tmpfs

SOURCES = 12
FUNCTIONS = 60
JOBS = 2
BURST_FILES = 20
BURST_EVERY_S = 0.05
CHOICES = ("on", "off")
VFSD = (sys.executable, "-m", "vfsd.cli.main")
TRIMMED = 0.2  # of the pairs, at each end
# Student's t for 95 % (two-sided), by degrees of freedom from 1 on; then the limit and its first correction.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True, slots=True)
class Build:
    """What one build took."""

    wall_s: float
    cpu_s: float  # of make and its children


def make_project(place: Path) -> None:
    """Write a C project that takes a compiler some seconds, with one header that all sources include."""
    place.mkdir()
    (place / "all.h").write_text("".join(f"int part{number}(int);\n" for number in range(SOURCES)))
    for number in range(SOURCES):
        functions = "".join(
            f"static int f{each}(int a) {{ for (int i = 0; i < a; i++) a ^= i * {each + 3}; return a + {number}; }}\n"
            for each in range(FUNCTIONS)
        )
        calls = " + ".join(f"f{each}(a)" for each in range(FUNCTIONS))
        (place / f"part{number}.c").write_text(
            f'#include <stdio.h>\n#include "all.h"\n{functions}int part{number}(int a) {{ return {calls}; }}\n'
        )
    total = " + ".join(f"part{number}(argc)" for number in range(SOURCES))
    (place / "main.c").write_text(f'#include "all.h"\nint main(int argc, char **argv) {{ return ({total}) & 1; }}\n')
    objects = " ".join(["main.o", *(f"part{number}.o" for number in range(SOURCES))])
    (place / "Makefile").write_text(f"program: {objects}\n\t@cc -o $@ $^\n%.o: %.c all.h\n\t@cc -O1 -c -o $@ $<\n")


def build(place: Path) -> Build:
    """Build the project in `place` from nothing."""
    for path in [*place.glob("*.o"), *place.glob("program")]:
        path.unlink()
    began = time.perf_counter()
    process = subprocess.Popen(["make", "-s", f"-j{JOBS}"], cwd=place)
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)  # Popen must not wait for it again
    if process.returncode:
        raise RuntimeError(f"make failed in {place}: exit status {process.returncode}")
    return Build(wall_s, used.ru_utime + used.ru_stime)


@contextmanager
def workspace(place: Path, choice: str) -> Iterator[tuple[Path, str]]:
    """Mount a workspace with `--wakeups CHOICE`; yield its mountpoint and its name."""
    place.mkdir()
    name = f"bench-neighbours-{choice}-{os.getpid()}"
    run(*VFSD, "mount", place, "--name", name, "--engine", "native", "--wakeups", choice)
    try:
        yield place, name
    finally:
        run(*VFSD, "unmount", name, "--discard", "--lazy")


@contextmanager
def busy(place: Path) -> Iterator[None]:
    """Make a burst of files in `place` every 50 ms, so that both workspaces have the same work."""
    ended = threading.Event()

    def work() -> None:
        due = time.monotonic()
        while not ended.is_set():
            for number in range(BURST_FILES):
                path = place / f"busy{number}"
                path.write_bytes(b"x" * 1000)
                path.unlink()
            # Bursts that the machine was too slow for are left out, not made up for.
            due = max(due + BURST_EVERY_S, time.monotonic())
            ended.wait(due - time.monotonic())

    client = threading.Thread(target=work)
    client.start()
    try:
        yield
    finally:
        ended.set()
        client.join()


def pairs(count: int, one: Callable[[str], Build]) -> list[dict[str, Build]]:
    """Run `one` with each choice `count` times; the order alternates, so that a trend of the machine cancels."""
    found = []
    for number in range(count):
        order = CHOICES if number % 2 else CHOICES[::-1]
        found.append({choice: one(choice) for choice in order})
    return found


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    return T_95[degrees - 1] if degrees <= len(T_95) else 1.96 + 2.4 / degrees + 2.8 / degrees**2


def change(with_s: list[float], without_s: list[float]) -> tuple[float, float, float]:
    """Return the trimmed mean change in per cent, and its 95 % confidence interval.  Needs two pairs."""
    logs = sorted(math.log(each / other) for each, other in zip(with_s, without_s, strict=True))
    cut = int(TRIMMED * len(logs))
    kept = logs[cut : len(logs) - cut]
    mean = statistics.mean(kept)
    # Yuen (1974): the deviation of the values with the trimmed ones moved to the nearest kept one.
    winsorized = [min(max(each, kept[0]), kept[-1]) for each in logs]
    error = statistics.stdev(winsorized) * math.sqrt(len(logs) - 1) / math.sqrt(len(kept) * (len(kept) - 1))
    half = student_t(len(kept) - 1) * error
    low, middle, high = (100 * math.expm1(each) for each in (mean - half, mean, mean + half))
    return middle, low, high


def figures(found: list[dict[str, Build]]) -> dict[str, tuple[float, float, float, float]]:
    """Return for "wall" and "cpu": the change in per cent, its interval, and the median in seconds with `off`."""

    def of(measure: Callable[[Build], float]) -> tuple[float, float, float, float]:
        on, off = ([measure(pair[choice]) for pair in found] for choice in CHOICES)
        return *change(on, off), statistics.median(off)

    return {"wall": of(lambda one: one.wall_s), "cpu": of(lambda one: one.cpu_s)}


def show(title: str, row: dict[str, tuple[float, float, float, float]]) -> None:
    cells = [f"{off_s:.2f} s, {middle:+.1f} % ({low:+.1f} to {high:+.1f})" for middle, low, high, off_s in row.values()]
    print(f"{title:14}" + "".join(f"{cell:>36}" for cell in cells), flush=True)


def measure(scratch: Path, count: int) -> dict[str, list[dict[str, Build]]]:
    """Return the pairs of each row."""
    with ExitStack() as stack:
        made = {choice: stack.enter_context(workspace(scratch / choice, choice)) for choice in CHOICES}
        aside = stack.enter_context(tmpfs(scratch / "aside")) / "project"
        make_project(aside)
        for place, _ in made.values():
            shutil.copytree(aside, place / "project")

        def on_the_mount(choice: str) -> Build:
            return build(made[choice][0] / "project")

        def next_to_it(choice: str) -> Build:
            with busy(made[choice][0]):
                return build(aside)

        found = {}
        for title, one in (("on the mount", on_the_mount), ("next to it", next_to_it)):
            for choice in CHOICES:  # the first builds fill the page cache and the kernel's dentries
                one(choice)
            found[title] = pairs(count, one)
        for choice, (_, name) in made.items():
            status = json.loads(run(*VFSD, "-w", name, "status", "--json"))
            print(f"--wakeups {choice}: {status['wakeups']}")
    return found


def earlier(path: str) -> dict[str, list[dict[str, Build]]]:
    """Return the pairs of earlier runs in the file of results."""
    stored = _results.read(path).get("neighbours", {}).get("builds", {})
    return {
        title: [{choice: Build(*pair[choice]) for choice in CHOICES} for pair in found]
        for title, found in stored.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="add the figures to those in FILE")
    parser.add_argument("--more", action="store_true", help="count the pairs that FILE has, too")
    options = parser.parse_args()
    if options.more and not options.json:
        parser.error("--more needs --json FILE")
    if options.pairs < 2:
        parser.error("--pairs: an interval needs two pairs or more")
    try:
        if options.json:
            _results.check_writable(options.json)
    except (OSError, ValueError) as error:
        parser.error(f"--json: {error}")
    end_cleanly()
    load = os.getloadavg()[0]
    with scratch_directory() as scratch:
        found = measure(scratch, options.pairs)
    if options.more:
        found = {title: [*earlier(options.json).get(title, []), *more] for title, more in found.items()}
    count = min(map(len, found.values()))
    print(f"make -j{JOBS}, {count} pairs: median with `off`, and the change with `on` (95 % interval)")
    print(f"{'':14}{'wall-clock time':>36}{'CPU time':>36}")
    rows = {title: figures(made) for title, made in found.items()}
    for title, row in rows.items():
        show(title, row)
    if options.json:
        builds = {
            title: [
                {choice: [float(f"{each:.4g}") for each in astuple(pair[choice])] for choice in CHOICES}
                for pair in made
            ]
            for title, made in found.items()
        }
        result = {"machine": _machine.machine(), "load": load, "pairs": count, "rows": rows, "builds": builds}
        _results.save(options.json, {"neighbours": result})


if __name__ == "__main__":
    main()
