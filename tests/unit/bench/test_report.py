"""Tables, titles and verdicts that the report computes from results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench._results import Row, summary
from bench._targets import MICRO, OURS, TARGETS, Target, targets_table

MACHINE = {"cpus": 2, "kernel": "6.18", "python": "3.11.2", "load_before": 0.1, "load_after": 0.2}


def row(ours: float, bindfs: float, overlayfs: float = 9.0) -> Row:
    return summary({"tmpfs": [1.0], OURS: [ours], "bindfs": [bindfs], "fuse-overlayfs": [overlayfs]}, {}, "tmpfs")


def target(text: str) -> Target:
    (found,) = [each for each in TARGETS if text in each.text]
    return found


def test_a_target_is_met_by_the_median_of_the_ratios_of_the_rounds() -> None:
    cells = {"tmpfs": [1.0, 1.0, 1.0], OURS: [1.0, 1.0, 9.0], "bindfs": [4.0, 5.0, 1.0]}
    verdict = target("tar extract").judge({"rows": {"tar extract": summary(cells, {}, "tmpfs")}})
    assert (verdict.measured, verdict.word) == ("0.25", "met")


@pytest.mark.parametrize(("ours", "word"), [(5.9, "met"), (6.1, "not met")])
def test_a_target_has_its_own_limit(ours: float, word: str) -> None:
    assert target("git clone").judge({"rows": {"git clone": row(ours, 10.0)}}).word == word


def test_rows_that_miss_a_target_are_named_with_the_worst_first() -> None:
    rows = {name: row(1.0, 10.0) for name in MICRO} | {"mkdir": row(6.0, 10.0), "chmod": row(20.0, 10.0)}
    verdict = target("0.5 of bindfs").judge({"rows": rows})
    assert verdict.measured == f"{len(MICRO) - 2} of {len(MICRO)} rows; not chmod (2.00), mkdir (0.60)"
    assert verdict.word == "not met"


def test_a_row_that_is_missing_leaves_a_target_undecided_unless_another_misses_it() -> None:
    rows = {name: row(1.0, 10.0) for name in MICRO[1:]}
    verdict = target("0.5 of bindfs").judge({"rows": rows})
    assert verdict.word == "undecided"
    assert "1 not measured" in verdict.measured
    assert target("0.5 of bindfs").judge({"rows": rows | {MICRO[1]: row(9.0, 10.0)}}).word == "not met"


def test_a_gap_of_a_peer_is_not_measured() -> None:
    cells = {"tmpfs": [1.0], OURS: [1.0], "bindfs": []}
    verdict = target("rm -rf").judge({"rows": {"rm -rf": summary(cells, {"bindfs": "missing"}, "tmpfs")}})
    assert (verdict.measured, verdict.word) == ("not measured", "")


def test_only_the_rows_with_cpus_kept_awake_are_compared_for_everybody() -> None:
    verdict = target("kept awake").judge({"rows": {"a": row(3.0, 1.0)}, "awake": {"a": row(1.0, 1.0)}})
    assert verdict.word == "met"


@pytest.mark.parametrize(
    ("interval", "word"), [((-1.0, 1.9), "met"), ((1.0, 3.0), "undecided"), ((2.5, 4.0), "not met")]
)
def test_the_loss_of_neighbours_is_judged_by_its_interval(interval: tuple[float, float], word: str) -> None:
    low, high = interval
    rows = {"on the mount": {"cpu": [(low + high) / 2, low, high, 1.0]}}
    assert target("make -j2").judge({"neighbours": {"pairs": 20, "rows": rows}}).word == word


def test_the_table_of_targets_has_a_line_for_each_without_any_results() -> None:
    lines = targets_table({}).splitlines()
    assert len(lines) == 2 + len(TARGETS)
    assert all(line.endswith("| not measured |  |") for line in lines[2:])


def test_the_title_counts_the_rows_in_which_vfsd_is_the_fastest() -> None:
    rows = {"stat cold": row(2.0, 3.0), "git clone": row(12.4, 8.0), "rm -rf": row(4.0, 5.0)}
    title = report.mounts_title(rows)
    assert "2 of 3 workloads" in title
    assert "2.0 to 12 times" in title


def test_the_title_of_snapshots_compares_with_the_systems_that_were_measured() -> None:
    def steps(seconds: float) -> dict[str, dict[str, float]]:
        return {"snapshot": {"seconds": seconds}, "restore": {"seconds": 2 * seconds}}

    gap = {step: {"gap": "no loop device"} for step in ("snapshot", "restore", "fork")}
    found: dict[str, Any] = {
        "files": 1000,
        "changes": 40,
        "systems": {"vfsd call": steps(0.001), "git": steps(0.05), "btrfs": gap},
    }
    title = report.rewind_title(found)
    assert "1,000 files in 1.0 ms (git 50 times as long)" in title
    assert "btrfs" not in title
    assert "forks" not in title
    found["systems"]["vfsd call"]["fork"] = {"seconds": 0.02}
    assert report.rewind_title(found).endswith(",\nforks it in 20 ms")


def test_a_cell_of_the_table_has_both_figures_and_the_unit_of_its_row() -> None:
    found: dict[str, Any] = {
        "machine": MACHINE,
        "units": {"chmod": "op", "write 4 KB": "MiB"},
        "rows": {"chmod": row(2.5, 3.0), "write 4 KB": row(1.0, 4.0)},
        "awake": {"chmod": row(1.25, 3.0)},
    }
    lines = report.results_table(found).splitlines()
    assert lines[2] == f"| chmod | 1.0 s / 1.0 s | 2.5 / 1.25 | {'3.0 / 3.0'} | 9.0 / 9.0 |"
    assert lines[3] == "| write 4 KB | 1 MiB/s | 1.00 | 4.0 | 9.0 |"


def test_tables_replace_what_is_between_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(
        "a\n<!-- results: begin -->\nold\n<!-- results: end -->\nb\n<!-- targets: begin -->\n<!-- targets: end -->\nc\n"
    )
    found = {"machine": MACHINE, "rows": {"chmod": row(2.5, 3.0)}, "awake": {}}
    report.write_tables(found, page)
    once = page.read_text()
    report.write_tables(found, page)
    assert page.read_text() == once
    assert "old" not in once
    assert once.startswith("a\n<!-- results: begin -->")
    assert once.endswith("<!-- targets: end -->\nc\n")
    assert "| chmod |" in once


@pytest.mark.parametrize("text", ["", "<!-- x: end --><!-- x: begin -->", "<!-- x: begin -->" * 2 + "<!-- x: end -->"])
def test_a_page_without_the_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the page needs the lines"):
        report.between(text, "x", "content")


def test_the_page_of_the_documentation_has_the_markers() -> None:
    text = (report.DOCS / "performance.md").read_text(encoding="utf-8")
    for name in ("results", "targets"):
        report.between(text, name, "")
