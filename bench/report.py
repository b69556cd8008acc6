"""Pictures and tables of the documentation from the results of the benchmarks.

    python -m bench.report [--pictures] [--targets] [--results FILE] [--rewind FILE] [--docs DIRECTORY]

`--pictures` writes bench-mounts.png (from the results of `bench.table`) and bench-rewind.png (`bench.rewind`).
`--targets` writes the tables of results and of targets into performance.md, between the lines
`<!-- results: begin -->` and `<!-- results: end -->`, and the same for targets.  Without both, it prints the tables.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench import _results
from bench._filesystems import LIMIT
from bench._results import Row
from bench._targets import OURS, targets_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS: Final = Path(__file__).parents[1] / "docs"
# Row of the table, and its label in the picture.
PICTURED_ROWS: Final = {
    "stat cold": "stat, not cached",
    "open+read+close warm": "open, read, close, cached",
    "create + write 1 KB": "create a file of 1 KB",
    "SQLite WAL, 10 a transaction": "SQLite (WAL), 10 inserts a transaction",
    "git status again": "git status",
    "git clone": "git clone",
    "tar extract": "tar x",
    "rm -rf": "rm -rf",
}
PICTURED_SYSTEMS: Final = {  # column of the table: label, colour, marker
    OURS: ("vfsd", "#d1495b", "D"),
    "bindfs": ("bindfs", "#30638e", "o"),
    "fuse-overlayfs": ("fuse-overlayfs", "#6a994e", "s"),
    "passthrough_ll": ("passthrough_ll (libfuse)", "#8d99ae", "^"),
}
REWIND_LABELS: Final = {
    "vfsd call": "vfsd, Python call",
    "vfsd command": "vfsd, command",
    "git": "git",
    "cp -a": "cp -a, tmpfs",
    "cp --reflink": "cp --reflink, btrfs",
    "btrfs": "btrfs subvolume",
}
STEP_COLOURS: Final = {"snapshot": "#d1495b", "restore": "#30638e", "fork": "#6a994e"}


def mounts_title(rows: Mapping[str, Row]) -> str:
    """Return what the picture of mounts shows, in a sentence.  `rows`: those of the picture."""
    fastest, multiples = 0, []
    for row in rows.values():
        found = {name: row[name]["ratio"] for name in PICTURED_SYSTEMS if "ratio" in row.get(name, {})}
        if OURS not in found:
            continue
        multiples.append(found[OURS])
        fastest += found[OURS] == min(found.values())
    if not multiples:
        return "vfsd was not measured"
    return (
        f"vfsd is the fastest of these file systems in {fastest} of {len(multiples)} workloads,\n"
        f"and takes {number(min(multiples))} to {number(max(multiples))} times as long as tmpfs"
    )


def number(value: float) -> str:
    """Return two significant digits."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{number(seconds)} s"
    return f"{number(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{number(seconds * 1e6)} us"


def rewind_title(results: Mapping[str, Any]) -> str:
    """Return what the picture of snapshots shows, in a sentence."""
    systems = results["systems"]
    said = []
    whats = {
        "snapshot": f"takes a snapshot of {results['files']:,} files",
        "restore": "restores it",
        "fork": "forks it",
    }
    for step, what in whats.items():
        ours = systems.get("vfsd call", {}).get(step, {}).get("seconds")
        if ours is None:
            continue
        others = [
            f"{name} {number(systems[name][step]['seconds'] / ours)}"
            for name in ("git", "cp -a", "btrfs")
            if "seconds" in systems.get(name, {}).get(step, {})
        ]
        said.append(f"{what} in {duration(ours)}" + (f" ({', '.join(others)} times as long)" if others else ""))
    return "vfsd " + ",\n".join(said) if said else "vfsd was not measured"


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    # An extra ("bench") that only the pictures need.
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axis = plt.subplots(figsize=(width, height))
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)
    return figure, axis


def _save(figure: Figure, axis: Axes, path: Path) -> None:
    from matplotlib import ticker  # noqa: PLC0415

    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    figure.savefig(path, bbox_inches="tight", dpi=120, metadata={"Software": None})


def draw_mounts(results: Mapping[str, Any], path: Path) -> None:
    """Draw a line for each row of PICTURED_ROWS, with a mark for each file system, as multiples of tmpfs."""
    rows = {name: results["rows"][name] for name in PICTURED_ROWS if name in results.get("rows", {})}
    if not rows:
        raise ValueError("the results have none of the rows of the picture: run `python -m bench.table` with them")
    figure, axis = _figure(8.5, 0.5 * len(rows) + 1.6)
    for name, (label, colour, marker) in PICTURED_SYSTEMS.items():
        points = [(row[name]["ratio"], at) for at, row in enumerate(rows.values()) if "ratio" in row.get(name, {})]
        if points:
            xs, ys = zip(*points, strict=True)
            size = 110 if name == OURS else 55
            axis.scatter(xs, ys, s=size, c=colour, marker=marker, label=label, zorder=4 if name == OURS else 3)
    for at, row in enumerate(rows.values()):
        found = [row[name]["ratio"] for name in PICTURED_SYSTEMS if "ratio" in row.get(name, {})]
        if found:
            axis.plot([min(found), max(found)], [at, at], color="#cccccc", linewidth=2, zorder=1)
        if "ratio" in row.get(OURS, {}):
            ours = row[OURS]["ratio"]
            axis.annotate(number(ours), (ours, at), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axis.axvline(1, color="#444444", linewidth=1)
    axis.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    highest = max(
        cell["ratio"]
        for row in rows.values()
        for name, cell in row.items()
        if name in PICTURED_SYSTEMS and "ratio" in cell
    )
    axis.set_xlim(0.7, max(20.0, highest * 1.3))
    axis.set_yticks(range(len(rows)), [PICTURED_ROWS[name] for name in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel(f"time as a multiple of tmpfs (1); less is better\n{where(results)}")
    axis.set_title(mounts_title(rows), loc="left", fontweight="bold")
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, -0.18), ncols=4, frameon=False)
    _save(figure, axis, path)


def draw_rewind(results: Mapping[str, Any], path: Path) -> None:
    """Draw a bar for each system and step."""
    systems = {
        name: steps for name, steps in results["systems"].items() if any("seconds" in step for step in steps.values())
    }
    if not systems:
        raise ValueError("the results have no system: run `python -m bench.rewind` again")
    figure, axis = _figure(8.5, 0.75 * len(systems) + 1.8)
    height = 0.8 / len(STEP_COLOURS)
    lowest = min(step["seconds"] for steps in systems.values() for step in steps.values() if "seconds" in step) * 1e3
    for index, (step, colour) in enumerate(STEP_COLOURS.items()):
        for at, steps in enumerate(systems.values()):
            y = at + (index - 1) * height
            cell = steps.get(step, {})
            if "seconds" in cell:
                axis.barh(y, cell["seconds"] * 1e3, height * 0.9, color=colour, label=step if at == 0 else None)
                text, x = duration(cell["seconds"]), cell["seconds"] * 1e3
            else:
                text, x = f"no {step}", lowest / 2
            axis.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    handles = [_patch(step, colour) for step, colour in STEP_COLOURS.items()]
    axis.set_xscale("log")
    axis.set_xlim(left=lowest / 2)
    axis.set_yticks(range(len(systems)), [REWIND_LABELS[name] for name in systems])
    axis.invert_yaxis()
    axis.set_xlabel(f"milliseconds; less is better\n{where(results)}")
    axis.set_title(rewind_title(results), loc="left", fontweight="bold")
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=3, frameon=False)
    _save(figure, axis, path)


def _patch(label: str, colour: str) -> Any:
    from matplotlib.patches import Patch  # noqa: PLC0415

    return Patch(color=colour, label=label)


def results_table(results: Mapping[str, Any]) -> str:
    """Return the ratios to tmpfs in Markdown: as the machine is, and after a slash with the CPUs kept awake."""
    tables = [results[key] for key in ("rows", "awake") if results.get(key)]
    names = list(dict.fromkeys(name for table in tables for row in table.values() for name in row))
    lines = [f"| row | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for title in dict.fromkeys(title for table in tables for title in table):
        shown = [table[title] for table in tables if title in table]
        unit = results.get("units", {}).get(title, "")
        cells = [" / ".join(_cell(row.get(name, {}), name, unit) for row in shown) for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: Mapping[str, Any], name: str, unit: str) -> str:
    if "ratio" not in found:
        return "gap"
    if name != LIMIT:
        return f"{found['ratio']:.1f}" if found["ratio"] >= 2 else f"{found['ratio']:.2f}"
    return f"{1 / found['seconds']:,.0f} MiB/s" if unit == "MiB" else duration(found["seconds"])


def where(results: Mapping[str, Any]) -> str:
    """Return the machine in a few words."""
    machine = results["machine"]
    kind = "virtual machine, " if machine.get("idle", {}).get("guest") == "yes" else ""
    return (
        f"{kind}{machine['cpus']} CPUs, Linux {machine['kernel'].partition('-')[0]}, load {machine['load_before']:.1f}"
    )


def conditions(results: Mapping[str, Any]) -> str:
    """Return a paragraph about the machine and the run."""
    machine = results["machine"]
    idle = machine.get("idle", {})
    rounds = [
        cell["rounds"] for key in ("rows", "awake") for row in results.get(key, {}).values() for cell in row.values()
        if "rounds" in cell
    ]  # fmt: skip
    kind = "virtual machine" if idle.get("guest") == "yes" else "machine"
    parameters = ", ".join(
        f"{name} {value}" for name, value in idle.items() if name in ("driver", "guest_halt_poll_ns")
    )
    return (
        f"Measured on {machine.get('date', 'an unknown day')}: {kind} with {machine['cpus']} CPUs, "
        f"Linux {machine['kernel'].partition('-')[0]}, Python {machine['python']}; "
        f"idle CPUs: {parameters or 'unknown'}; load "
        f"{machine['load_before']:.1f} at the start and {machine['load_after']:.1f} at the end; "
        f"{min(rounds, default=0)} to {max(rounds, default=0)} rounds (median {statistics.median(rounds or [0]):.0f})."
    )


def between(text: str, name: str, content: str) -> str:
    """Return `text` with `content` between the markers `name`.  ValueError: it does not have both, in order, once."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page needs the lines `{begin}` and `{end}`, once each and in this order")
    head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    return f"{head}\n\n{content}\n\n{tail}"


def write_tables(results: Mapping[str, Any], page: Path) -> None:
    """Write the tables of results and targets into `page`."""
    text = page.read_text(encoding="utf-8")
    text = between(text, "results", f"{conditions(results)}\n\n{results_table(results)}")
    text = between(text, "targets", targets_table(results))
    _results.write_whole(page, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true")
    parser.add_argument("--targets", action="store_true")
    parser.add_argument("--results", type=Path, default=DOCS / "bench.json")
    parser.add_argument("--rewind", type=Path, default=DOCS / "bench-rewind.json")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the pictures and performance.md are")
    options = parser.parse_args()
    if options.pictures and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--pictures needs matplotlib: .venv/bin/pip install --editable '.[bench]'")
    try:
        results = _results.read(options.results)
        rewind = _results.read(options.rewind)
        if not results.get("rows") and not results.get("awake"):
            sys.exit(f"{options.results} has no rows: run `python -m bench.table --json {options.results}` first")
        if options.pictures:
            draw_mounts(results, options.docs / "bench-mounts.png")
            if rewind:
                draw_rewind(rewind, options.docs / "bench-rewind.png")
            else:
                print(
                    f"no bench-rewind.png: run `python -m bench.rewind --json {options.rewind}` first", file=sys.stderr
                )
        if options.targets:
            write_tables(results, options.docs / "performance.md")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if not options.pictures and not options.targets:
        print(f"{conditions(results)}\n\n{results_table(results)}\n\n{targets_table(results)}")


if __name__ == "__main__":
    main()
