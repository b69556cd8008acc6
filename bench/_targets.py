"""The targets for speed, and whether the results of a run meet them.

Each target reads `docs/bench.json`: `rows` and `awake` are from `bench.table`, `latency` is from
`bench.latency_under_load`, and `neighbours` is from `bench.neighbours`.  A target without figures is neither met nor
missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bench import _micro
from bench._filesystems import LIMIT
from bench._results import Row, ratios

OURS: Final = "vfsd native"
MICRO: Final = tuple(work.name for work in _micro.WORKLOADS)
NOT_MEASURED: Final = "not measured"
LOSS_PERCENT: Final = 2
NAMED: Final = 8  # of the rows that miss a target
Rows = Mapping[str, Row]
Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    measured: str
    is_met: bool | None  # None: the figures do not say

    @property
    def word(self) -> str:
        if self.is_met is None:
            return "" if self.measured == NOT_MEASURED else "undecided"
        return "met" if self.is_met else "not met"


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    judge: Callable[[Results], Verdict]


def ratio(row: Row, name: str, other: str) -> float | None:
    """Return the median over the rounds of the time on `name` divided by the time on `other`; None for a gap."""
    ours, theirs = (row.get(each, {}).get("each_s") for each in (name, other))
    return statistics.median(ratios(ours, theirs)) if ours and theirs else None


def _is_warm(name: str) -> bool:
    return name.rsplit(maxsplit=1)[-1] == "warm" or " warm " in name


def judge_all(rows: Rows, names: Iterable[str], other: str, limit: float) -> Verdict:
    """Judge that each row of `names` takes at most `limit` times its time on `other`."""
    names = list(names)
    found = {name: value for name in names if name in rows and (value := ratio(rows[name], OURS, other)) is not None}
    if not found:
        return Verdict(NOT_MEASURED, None)
    if len(names) == 1:
        value = found[names[0]]
        return Verdict(f"{value:.2f}", value <= limit)
    over = {name: value for name, value in found.items() if value > limit}
    missing = len(names) - len(found)
    said = f"{len(found) - len(over)} of {len(names)} rows"
    if missing:
        said += f", {missing} {NOT_MEASURED}"
    if over:
        worst = sorted(over.items(), key=lambda item: -item[1])
        said += "; not " + ", ".join(f"{name} ({value:.2f})" for name, value in worst[:NAMED])
        said += f" and {len(worst) - NAMED} more" if len(worst) > NAMED else ""
    is_met = False if over else None if missing else True
    return Verdict(said, is_met)


def table_target(text: str, names: Iterable[str], other: str, limit: float, key: str = "rows") -> Target:
    names = tuple(names)
    return Target(text, lambda results: judge_all(results.get(key, {}), names, other, limit))


def judge_every_row(results: Results) -> Verdict:
    """Judge that no row of the table with the CPUs kept awake is slower than bindfs."""
    rows = results.get("awake", {})
    return judge_all(rows, rows, "bindfs", 1.0)


def judge_latency(results: Results) -> Verdict:
    found = results.get("latency")
    if not found:
        return Verdict(NOT_MEASURED, None)
    idle, busy = (found["rows"][name]["p99_s"] for name in ("stat, idle", "stat during export"))
    return Verdict(f"{busy / idle:.1f} times ({idle * 1e3:.2f} and {busy * 1e3:.2f} ms)", busy < 5 * idle)


def judge_neighbours(results: Results) -> Verdict:
    """Judge the CPU time (`bench.neighbours` says why); undecided if a 95 % interval includes the limit."""
    found = results.get("neighbours")
    if not found:
        return Verdict(NOT_MEASURED, None)
    shown = "; ".join(
        "{} {:+.1f} % ({:+.1f} to {:+.1f})".format(title, *row["cpu"][:3]) for title, row in found["rows"].items()
    )
    spent = [row["cpu"] for row in found["rows"].values()]
    is_met = True if all(high < LOSS_PERCENT for _, _, high, _ in spent) else None
    if any(low >= LOSS_PERCENT for _, low, _, _ in spent):
        is_met = False
    return Verdict(f"{shown}; CPU time of {found['pairs']} pairs, 95 % intervals", is_met)


TARGETS: Final = (
    table_target("every micro row at most 0.5 of bindfs", MICRO, "bindfs", 0.5),
    table_target("every micro row at most 0.5 of fuse-overlayfs", MICRO, "fuse-overlayfs", 0.5),
    table_target("create and write 1 KB within 7 times tmpfs", ["create + write 1 KB"], LIMIT, 7),
    table_target("tar extract at most 0.3 of bindfs", ["tar extract"], "bindfs", 0.3),
    table_target("rm -rf at most 0.4 of bindfs", ["rm -rf"], "bindfs", 0.4),
    table_target("git clone at most 0.6 of bindfs", ["git clone"], "bindfs", 0.6),
    table_target("warm rows within 1.3 times tmpfs", filter(_is_warm, MICRO), LIMIT, 1.3),
    Target("CPUs kept awake for everybody: no row slower than bindfs", judge_every_row),
    Target("p99 of a stat during an export under 5 times idle", judge_latency),
    Target("`make -j2` with a busy mount loses less than 2 % to `--wakeups on`", judge_neighbours),
)


def targets_table(results: Results) -> str:
    """Return the table of targets in Markdown."""
    lines = ["| target | measured | |", "| --- | --- | --- |"]
    for target in TARGETS:
        verdict = target.judge(results)
        lines.append(f"| {target.text} | {verdict.measured} | {verdict.word} |")
    return "\n".join(lines)
