"""What the log of changes costs `git clone` and `make -j8`: paired runs on a mount with the log and on one without.

    python -m bench.audit [--pairs N] [--files 3000] [--engine native|pyfuse3]

Two workspaces, one of them mounted with `--no-audit`, take turns; the order within a pair alternates.  `git clone`
clones a repository of `--files` files that the bench makes in a tmpfs; `make -j8` builds a C project in the workspace.
A clone is short and makes many changes, so there are CLONES pairs of it for each of `--pairs`.  Eight pairs take under
three minutes on an idle machine.  `python -m bench.dispatch --default` measures the same without other programs, which
is what to look at on a busy machine: there the polling and waiting of the daemons differ by more than the log costs.

CPU time is that of the command, its children and the daemon.  Each row has the median of the pairs' ratios, with the
log to without, and their quartiles, in CPU time and in wall-clock time; and the mean change in CPU time with its 95 %
confidence interval (as in `bench.neighbours`: trimmed, so that a disturbed pair counts little).  The target is at most
3 % of the CPU time.  Needs root, git, make and cc.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench._filesystems import end_cleanly, run, scratch_directory, tmpfs
from bench.neighbours import CHOICES, Build, change, make_project, pairs
from vfsd.client.workspace import Workspace

CLONES = 3
JOBS = 8
DIRECTORY_FILES = 100
_SETTLE_S = 0.2  # in which a daemon completes what it does after its answers
_GIT = ("git", "-c", "user.name=bench", "-c", "user.email=bench@example.org", "-c", "gc.auto=0")


def make_repository(place: Path, files: int) -> None:
    """Make a repository whose only commit has `files` small files, as a pack."""
    for number in range(files):
        directory = place / f"d{number // DIRECTORY_FILES:03}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number:05}").write_text(f"{number}\n" * (1 + number % 200))
    run("git", "init", "-q", place)
    run(*_GIT, "add", "-A", cwd=place)
    run(*_GIT, "commit", "-q", "-m", "all", cwd=place)
    run(*_GIT, "repack", "-q", "-a", "-d", cwd=place)


def cpu_s(pid: int) -> float:
    """Return the CPU time of the commands that ended, and of the process `pid` with its ended threads."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    clock = (~pid << 3) | 2  # clock_getcpuclockid(3); Linux, include/linux/posix-timers_types.h
    return children.ru_utime + children.ru_stime + time.clock_gettime(clock)


def measured(pid: int, command: Sequence[str | Path], directory: Path) -> Build:
    """Run `command`, and return what it took together with the daemon `pid`."""
    time.sleep(_SETTLE_S)
    before_s, began = cpu_s(pid), time.perf_counter()
    run(*command, cwd=directory)
    wall_s = time.perf_counter() - began
    time.sleep(_SETTLE_S)
    return Build(wall_s, cpu_s(pid) - before_s)


def measure(scratch: Path, count: int, files: int, engine: str) -> dict[str, list[dict[str, Build]]]:
    """Return the pairs of each row."""
    with ExitStack() as stack:
        aside = stack.enter_context(tmpfs(scratch / "aside"))
        make_repository(aside / "repository", files)
        made: dict[str, tuple[Path, int]] = {}
        for choice in CHOICES:
            name = f"bench-audit-{choice}-{os.getpid()}"
            mounted = Workspace.mount(scratch / choice, name=name, engine=engine, audit=choice == "on")
            workspace = stack.enter_context(mounted)
            made[choice] = Path(workspace.path), workspace.pid
            make_project(Path(workspace.path) / "project")

        def clone(choice: str) -> Build:
            root, pid = made[choice]
            shutil.rmtree(root / "clone", ignore_errors=True)
            return measured(pid, [*_GIT, "clone", "-q", aside / "repository", root / "clone"], root)

        def make(choice: str) -> Build:
            root, pid = made[choice]
            for path in [*(root / "project").glob("*.o"), root / "project" / "program"]:
                path.unlink(missing_ok=True)
            return measured(pid, ["make", "-s", f"-j{JOBS}"], root / "project")

        rows = (("git clone", clone, CLONES * count), (f"make -j{JOBS}", make, count))
        found = {}
        for title, one, times in rows:
            # The first runs fill caches and the log, which then drops an entry for each new one.
            for choice in (*CHOICES, *CHOICES):
                one(choice)
            found[title] = pairs(times, one)
        return found


def ratio(found: Sequence[dict[str, Build]], of: Callable[[Build], float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile of the ratios with / without.  Needs two pairs."""
    low, middle, high = statistics.quantiles([of(pair["on"]) / of(pair["off"]) for pair in found], method="inclusive")
    return low, middle, high


def line(title: str, found: Sequence[dict[str, Build]]) -> str:
    """Return a row of the table."""

    def cell(of: Callable[[Build], float]) -> str:
        low, middle, high = ratio(found, of)
        without_s = statistics.median(of(pair["off"]) for pair in found)
        return f"{without_s:.2f} s, x {middle:.3f} ({low:.3f} to {high:.3f})"

    on, off = ([pair[choice].cpu_s for pair in found] for choice in CHOICES)
    middle, low, high = change(on, off)
    mean = f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"
    cells = [cell(lambda one: one.cpu_s), cell(lambda one: one.wall_s), mean]
    return f"{title:10}{len(found):>6}" + "".join(f"{each:>36}" for each in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--engine", choices=("native", "pyfuse3"), default="native")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs: quartiles need two pairs or more")
    end_cleanly()
    load = os.getloadavg()[0]
    with scratch_directory() as scratch:
        found = measure(scratch, options.pairs, options.files, options.engine)
    print(f"load {load:.1f} to {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs, {options.files:,} files in the clone")
    print("median without the log, and median ratio with the log to without (quartiles)")
    print(f"{'':10}{'pairs':>6}{'CPU time':>36}{'wall-clock time':>36}{'mean CPU change (95 %)':>36}")
    for title, made in found.items():
        print(line(title, made), flush=True)


if __name__ == "__main__":
    main()
