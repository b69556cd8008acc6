"""`make bench`: one table, rows are workloads, columns are file systems, each cell a ratio to tmpfs in the same run.

File systems take turns (A B C A B C ...), so that what else the machine does hits all of them; a cell is the
median over the rounds of "time here / time on tmpfs in this round", with the lowest and highest beside it.
"(once)" stands beside a cell that was measured in one round only, because it took too long; "gap" for what a
file system could not do, with the reason below.

    python -m bench.table [--quick] [--cpu] [--rows REGEX] [--only REGEX] [--rounds N] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import _micro, _real
from bench._filesystems import LIMIT, Mounted, all_mounted, cpu_clock, end_cleanly

# A file system that needs longer than this for one round of a row is measured in the first one only.
PATIENCE_S = 6.0
Measure = Callable[[Mounted, Path, Callable[[], float]], float]  # on this file system, in this place, by this clock
_places = itertools.count()
Cells = dict[str, list[float]]  # file system -> seconds, a value a round, the first rounds where not all


def measure_row(mounted: list[Mounted], options: argparse.Namespace, measure: Measure) -> tuple[Cells, dict[str, str]]:
    cells: Cells = {each.name: [] for each in mounted}
    failed: dict[str, str] = {}
    slow: set[str] = set()
    for number in range(options.rounds):
        # Each begins once, so that nobody always comes after the same neighbour's dirty caches.
        turn = number % len(mounted)
        for each in mounted[turn:] + mounted[:turn]:
            if each.name in failed or each.name in slow:
                continue
            # Never a name twice: what a file system failed to remove must not fail its next rows.
            place = each.path / f"place{next(_places)}"
            began = time.monotonic()
            try:
                place.mkdir()
                clock = cpu_clock(each.pid) if options.cpu else time.perf_counter
                cells[each.name].append(measure(each, place, clock))
            except Exception as error:  # a peer that cannot do it is a gap in this row, and says so
                # Without the paths of this machine: it goes into a file that others read.
                said = str(error).replace(f"{each.path}/", "").replace(f"{sys.prefix}/", "")
                failed[each.name] = " ".join(said.split())[:100]
                if each.name == LIMIT:  # nothing to compare with
                    return cells, {one.name: failed[LIMIT] for one in mounted}
            finally:
                shutil.rmtree(place, ignore_errors=True)
            if each.is_slow or (time.monotonic() - began > PATIENCE_S and each.name != LIMIT):
                slow.add(each.name)
    return cells, failed


def ratios(cells: Cells, name: str) -> list[float]:
    return [here / limit for here, limit in zip(cells[name], cells[LIMIT], strict=False)]


def summary(cells: Cells, failed: dict[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, seconds in cells.items():
        if name in failed or not seconds:
            found[name] = {"gap": failed.get(name, "not measured")}
            continue
        of_limit = ratios(cells, name)
        found[name] = {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(of_limit),
            "low": min(of_limit),
            "high": max(of_limit),
            "rounds": len(seconds),
        }
    return found


def cell(found: dict[str, object], name: str, per: str) -> str:
    entry = found[name]
    assert isinstance(entry, dict)
    if "gap" in entry:
        return "gap"
    if name == LIMIT:
        return _time(entry["seconds"], per)
    if entry["rounds"] == 1:
        return f"{entry['ratio']:.2f} (once)"
    return f"{entry['ratio']:.2f} ({entry['low']:.2f}-{entry['high']:.2f})"


def _time(seconds: float, per: str) -> str:
    if per == "MiB":
        return f"{1 / seconds:.0f} MiB/s"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def plot(rows: dict[str, dict[str, object]], path: str, what: str) -> None:
    """A picture of the table: a dot a cell, on a logarithmic axis, tmpfs at 1."""
    # An extra ("bench") that only the picture needs.
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    names = [name for name in next(iter(rows.values())) if name != LIMIT]
    figure, axis = plt.subplots(figsize=(9, 0.28 * len(rows) + 1.5))
    for index, name in enumerate(names):
        points = [
            (row[name]["ratio"], at)  # type: ignore[index]
            for at, row in enumerate(rows.values())
            if "ratio" in row.get(name, {})  # type: ignore[operator]
        ]
        emphasis = name == "vfsd native"
        axis.plot(
            [x for x, _ in points], [y for _, y in points], "D" if emphasis else "o", label=name, color=f"C{index}",
            markersize=7 if emphasis else 4, alpha=1.0 if emphasis else 0.7,
        )  # fmt: skip
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.set_xlabel(f"{what}, as a multiple of tmpfs (less is better)")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=3, frameon=False)
    figure.savefig(path, bbox_inches="tight", dpi=110)


def jobs(pattern: str, inputs: Path) -> list[tuple[str, str, Measure]]:
    """The rows whose name matches: name, unit, and what measures it in an empty directory."""
    found: list[tuple[str, str, Measure]] = [
        (
            work.name, work.unit,
            lambda on, place, clock, work=work: _micro.measure(
                work, str(place), clock, _micro.FEW if on.is_slow else _micro.FULL
            ),
        )
        for work in _micro.WORKLOADS
    ]  # fmt: skip
    found += [
        (real.name, "run", lambda _on, place, clock, real=real: _real.measure(real, place, inputs, clock))
        for real in _real.REAL
    ]
    return [job for job in found if re.search(pattern, job[0])]


def show_row(name: str, unit: str, row: dict[str, object], mounted: list[Mounted], failed: dict[str, str]) -> None:
    print(f"{name:26}" + "".join(f"{cell(row, each.name, unit):>22}" for each in mounted), flush=True)
    for peer, reason in failed.items():
        print(f"{'':26}gap: {peer}: {reason}")


def measure_all(options: argparse.Namespace, scratch: Path) -> tuple[dict[str, dict[str, object]], dict[str, str]]:
    """All rows, printed as they come; and the peers that are missing, with the reason."""
    inputs = scratch / "inputs"
    inputs.mkdir()
    _real.make_inputs(inputs)
    rows: dict[str, dict[str, object]] = {}

    def wanted(name: str) -> bool:
        return name == LIMIT or re.search(options.only, name) is not None

    with all_mounted(scratch, wanted) as (mounted, gaps):
        for peer, reason in gaps.items():
            print(f"gap: {peer}: {reason}")
        print(f"{'':26}" + "".join(f"{each.name:>22}" for each in mounted), flush=True)
        for name, unit, measure in jobs(options.rows, inputs):
            cells, failed = measure_row(mounted, options, measure)
            rows[name] = summary(cells, failed)
            show_row(name, unit, rows[name], mounted, failed)
    return rows, gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows that match this expression")
    parser.add_argument("--only", default="", help="only file systems that match (tmpfs is always there)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_const", const=2, dest="rounds", help="two rounds")
    parser.add_argument(
        "--cpu", action="store_true",
        help="CPU time of client and server in place of the clock's: for a machine that has other work to do",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("the benchmark mounts tmpfs and drops caches: run it as root")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib: pip install 'vfsd[bench]'")
    end_cleanly()
    scratch = Path(tempfile.mkdtemp(prefix="vfsd-bench-"))
    os.environ["VFSD_RUNTIME_DIR"] = str(scratch)
    load = os.getloadavg()[0]
    print(f"load at the start: {load:.1f} on {os.cpu_count()} CPUs; {options.rounds} rounds")
    try:
        rows, gaps = measure_all(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    machine = {
        "kernel": platform.release(), "python": platform.python_version(), "cpus": os.cpu_count(),
        "load_before": load, "load_after": os.getloadavg()[0], "cpu_time": options.cpu, "rounds": options.rounds,
    }  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": machine, "gaps": gaps, "rows": rows}, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot, "CPU time of client and server" if options.cpu else "time")
    ours = [
        f"{name} on {each}" for name, row in rows.items() for each in row
        if each.startswith(("vfsd", LIMIT)) and "gap" in row[each]  # type: ignore[operator]
    ]  # fmt: skip
    if ours:
        sys.exit(f"failed: {', '.join(ours)}")


if __name__ == "__main__":
    main()
