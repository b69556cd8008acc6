"""`make bench`: one table, rows are workloads, columns are file systems, each cell a ratio to tmpfs in the same run.

File systems take turns (A B C A B C ...), so that other work on the machine affects all of them.  A cell is the
median over the rounds of "time here / time on tmpfs in this round", followed by the lowest and highest ratio.
"(once)" follows a cell that was measured in one round only; "gap" is what a file system could not do, with the reason
below.

With `--awake both`, the default, each round measures all file systems twice: with the machine as it is (first line of
a row), and with idle CPUs kept awake for everybody (second line).  On most virtual machines the wake-ups of halted CPUs
are a large part of each request; the second line compares the file systems without them.

    python -m bench.table [--short] [--budget SECONDS] [--awake both|yes|no] [--quick] [--cpu] [--rows REGEX]
                          [--only REGEX] [--rounds N] [--json FILE]

The figures of one run can be compared with each other, and not with those of other runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import _machine, _micro, _real, _results, _sqlite
from bench._filesystems import LIMIT, OURS, PEERS, Mounted, all_mounted, cpu_clock, end_cleanly, scratch_directory
from bench._machine import AS_IT_IS, Modes
from bench._results import Budget, Cells, Row

# A file system that needs longer than this for one round of a row is measured in the first one only.
PATIENCE_S = 6.0
SHORT_SYSTEMS = "^(vfsd native|bindfs|fuse-overlayfs|passthrough_ll)$"
SHORT_LEAVES_OUT = frozenset({"compileall", "pip install into a venv"})  # mostly CPU time of Python
SHORT_SHARE = 1 / 3  # of the files of the real workloads
SLOW_SHARE = 1 / 10
KEYS = {AS_IT_IS: "rows", _machine.AWAKE: "awake"}  # of the results in JSON
Measure = Callable[[Mounted, Path, Callable[[], float]], float]  # on this file system, in this place, by this clock
_places = itertools.count()


@dataclass(frozen=True, slots=True)
class Job:
    """One row: `unit` is what a second of it is divided by."""

    name: str
    unit: str
    measure: Measure


class RowRun:
    """The rounds of one row: its cells for each mode, and the failures with their reasons."""

    def __init__(self, job: Job, mounted: list[Mounted], modes: Modes, *, uses_cpu_time: bool) -> None:
        self.job = job
        self.rounds = 0
        self.longest_s = 0.0  # of a round
        self._modes = modes
        self._uses_cpu_time = uses_cpu_time
        self._mounted = {mode: [each for each in mounted if mode in each.modes] for mode in modes.names}
        self.cells: dict[str, Cells] = {
            mode: {each.name: [] for each in present} for mode, present in self._mounted.items()
        }
        self.failed: dict[str, dict[str, str]] = {mode: {} for mode in modes.names}
        self._slow: set[str] = set()

    def summaries(self) -> dict[str, Row]:
        """Return the row for each mode."""
        return {mode: _results.summary(cells, self.failed[mode], LIMIT) for mode, cells in self.cells.items()}

    def one_round(self) -> None:
        """Measure the row once more, in each mode."""
        number, began = self.rounds, time.monotonic()
        # The order changes from round to round, so that no file system always follows the same one.
        for mode in self._modes.names if number % 2 else self._modes.names[::-1]:
            if LIMIT not in self.failed[mode]:
                self._modes.switch(mode)
                self._one_round(mode, number)
        self.rounds += 1
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _one_round(self, mode: str, number: int) -> None:
        present, failed = self._mounted[mode], self.failed[mode]
        turn = number % len(present)
        for each in present[turn:] + present[:turn]:
            if each.name in failed or (number and each.name in self._slow):
                continue
            began = time.monotonic()
            try:
                self.cells[mode][each.name].append(self._one_cell(each))
            except Exception as error:  # a peer that cannot do it is a gap in this row, with the reason
                failed[each.name] = reason(error, each.path)
                if each.name == LIMIT:  # nothing to compare with
                    failed |= {one.name: failed[LIMIT] for one in present}
                    return
            if each.name.startswith("vfsd"):
                self._modes.rest()  # its daemon may have kept the CPUs awake, and the next file system would gain
            if each.is_slow or (time.monotonic() - began > PATIENCE_S and each.name != LIMIT):
                self._slow.add(each.name)

    def _one_cell(self, on: Mounted) -> float:
        # Never a name twice: what a file system failed to remove must not fail its next rows.
        place = on.path / f"place{next(_places)}"
        try:
            place.mkdir()
            clock = cpu_clock(on.pid) if self._uses_cpu_time else time.perf_counter
            return self.job.measure(on, place, clock)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def reason(error: Exception, place: Path) -> str:
    """Return the start of the error's message without the paths of this machine: others read the results."""
    said = str(error).replace(f"{place}/", "").replace(f"{sys.prefix}/", "")
    return " ".join(said.split())[:100]


def cell(row: Row, name: str, unit: str) -> str:
    entry = row[name]
    if "gap" in entry:
        return "gap"
    if name == LIMIT:
        return show_time(entry["seconds"], unit)
    if entry["rounds"] == 1:
        return f"{entry['ratio']:.2f} (once)"
    return f"{entry['ratio']:.2f} ({entry['low']:.2f}-{entry['high']:.2f})"


def show_time(seconds: float, unit: str) -> str:
    if unit == "MiB":
        return f"{1 / seconds:,.0f} MiB/s"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def jobs(pattern: str, inputs: Path, *, is_short: bool) -> list[Job]:
    """Return the rows whose name matches."""
    amounts = _micro.SHORT if is_short else _micro.FULL

    def micro(work: _micro.Workload) -> Job:
        return Job(
            work.name,
            work.unit,
            lambda on, place, clock: _micro.measure(work, str(place), clock, _micro.FEW if on.is_slow else amounts),
        )

    def real(work: _real.Real) -> Job:
        return Job(work.name, "run", lambda _on, place, clock: _real.measure(work, place, inputs, clock))

    def inserts(work: _sqlite.Inserts) -> Job:
        return Job(
            work.name,
            "row",
            lambda on, place, clock: _sqlite.measure(work, str(place), clock, SLOW_SHARE if on.is_slow else 1.0),
        )

    found = [
        *map(micro, _micro.WORKLOADS),
        *map(inserts, _sqlite.INSERTS),
        *(real(work) for work in _real.REAL if not (is_short and work.name in SHORT_LEAVES_OUT)),
    ]
    return [job for job in found if re.search(pattern, job.name)]


def show_row(run: RowRun, names: list[str]) -> None:
    for number, (mode, row) in enumerate(run.summaries().items()):
        title = f"  {mode}" if number else run.job.name
        print(f"{title:32}" + "".join(f"{cell(row, name, run.job.unit):>22}" for name in names))
    said = {f"{peer}: {why}" for failed in run.failed.values() for peer, why in failed.items()}
    for line in sorted(said):
        print(f"{'':32}gap: {line}")


def run_rows(runs: list[RowRun], rounds: int, budget: Budget) -> None:
    """Measure all rows once, then again, and so on; a row that `budget` has no time for is left out of a round.

    So a short time means fewer rounds, and work of others on the machine affects one round of many rows rather than
    many rounds of one row.
    """
    for number in range(rounds):
        began = time.monotonic()
        measured = 0
        for run in runs:
            if budget.allows(run.longest_s):
                run.one_round()
                measured += 1
        if not measured:
            return
        took_s = time.monotonic() - began
        print(f"round {number + 1}: {measured} of {len(runs)} rows in {took_s:.0f} s", file=sys.stderr, flush=True)


def measure_all(options: argparse.Namespace, modes: Modes, budget: Budget, scratch: Path) -> dict[str, object]:
    """Measure all rows and print them; return the parts of the results."""
    inputs = scratch / "inputs"
    inputs.mkdir()
    _real.make_inputs(inputs, SHORT_SHARE if options.short else 1.0)

    def wanted(name: str) -> bool:
        return name == LIMIT or re.search(options.only, name) is not None

    with all_mounted(scratch, wanted, modes.names) as (mounted, gaps):
        for peer, why in gaps.items():
            print(f"gap: {peer}: {why}")
        names = list(dict.fromkeys(each.name for each in mounted))
        found = jobs(options.rows, inputs, is_short=options.short)
        runs = [RowRun(job, mounted, modes, uses_cpu_time=options.cpu) for job in found]
        try:
            run_rows(runs, options.rounds, budget)
        finally:  # after Ctrl-C too
            print(f"{'':32}" + "".join(f"{name:>22}" for name in names))
            for run in runs:
                if run.rounds:
                    show_row(run, names)
    left_out = [run.job.name for run in runs if not run.rounds]
    if left_out:
        print(f"left out, because --budget was used up: {', '.join(left_out)}")
    rows = [(run.job.name, run.summaries()) for run in runs if run.rounds]
    return {
        "gaps": gaps,
        "left_out": left_out,
        "units": {run.job.name: run.job.unit for run in runs},
        **{key: {name: row[mode] for name, row in rows if mode in row} for mode, key in KEYS.items()},
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows that match this expression")
    parser.add_argument("--only", default="", help="only file systems that match (tmpfs is always measured)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each row is measured (5)")
    parser.add_argument("--quick", action="store_const", const=2, dest="rounds", help="two rounds")
    parser.add_argument("--short", action="store_true", help="vfsd and three peers, with a third of the files")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="end after about so long, with fewer rounds, or rows left out"
    )
    parser.add_argument(
        "--awake", choices=_machine.CHOICES, help='with idle CPUs kept awake, or as they are, or "both" (the default)'
    )
    parser.add_argument(
        "--cpu", action="store_true",
        help="CPU time of client and server instead of wall-clock time, for a machine with other work; --awake is no",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the figures there; parts of other benches remain")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if options.budget is not None and not options.budget > 0:
        parser.error("--budget: more than 0 seconds")
    if options.short and not options.only:
        options.only = SHORT_SYSTEMS
    for name, there in (
        ("rows", [job.name for job in jobs("", Path(), is_short=options.short)]),
        ("only", [*OURS, *PEERS]),
    ):
        try:
            if not any(re.search(getattr(options, name), each) for each in there):
                parser.error(f"--{name}: nothing matches; there are {', '.join(there)}")
        except re.error as error:
            parser.error(f"--{name}: not a regular expression: {error}")
    return options


def main() -> None:
    options = arguments()
    if os.geteuid() != 0:
        sys.exit("the benchmark mounts tmpfs and drops caches: run it as root")
    try:
        if options.json:
            _results.check_writable(options.json)
        modes = Modes(options.awake or ("no" if options.cpu else "both"))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    end_cleanly()
    budget = Budget(options.budget)
    load, began = os.getloadavg()[0], time.monotonic()
    print(f"{_machine.describe()}\nload at the start: {load:.1f}; up to {options.rounds} rounds")
    if modes.gap:
        print(f"gap: {modes.gap}")
    with scratch_directory() as scratch, modes:
        parts = measure_all(options, modes, budget, scratch)
    machine = {
        **_machine.machine(),
        "modes": modes.names, "awake_gap": modes.gap,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load_before": load, "load_after": os.getloadavg()[0], "took_s": round(time.monotonic() - began),
        "cpu_time": options.cpu, "rounds": options.rounds, "short": options.short, "budget_s": options.budget,
    }  # fmt: skip
    if not any(parts[key] for key in KEYS.values()):
        sys.exit("no row was measured before --budget was used up, so no results are written: allow more seconds")
    print(f"took {machine['took_s']} s; load at the end: {machine['load_after']:.1f}")
    if options.json:
        _results.save(options.json, {"machine": machine, **parts})
    failures(parts)


def failures(parts: dict[str, object]) -> None:
    """Exit with status 1 if vfsd or tmpfs failed in a row."""
    failed = [
        f"{name} on {system}"
        for key in KEYS.values()
        for name, row in parts[key].items()  # type: ignore[attr-defined]
        for system in row
        if system.startswith(("vfsd", LIMIT)) and "gap" in row[system]
    ]
    if failed:
        sys.exit(f"failed: {', '.join(dict.fromkeys(failed))}")


if __name__ == "__main__":
    main()
