"""The tables and verdicts of `bench.journal`."""

from __future__ import annotations

from bench.journal import CREATE, EVERYSEC, READ, TMPFS, WITHOUT, WRITE_MIB, lines, verdicts

TIMES = {
    CREATE: {WITHOUT: [90.0, 100.0, 400.0], EVERYSEC: [130.0, 139.0, 150.0], TMPFS: [150.0, 150.0, 150.0]},
    WRITE_MIB: {WITHOUT: [1000.0], EVERYSEC: [1600.0], TMPFS: [1200.0]},
    READ: {WITHOUT: [50.0], EVERYSEC: [60.0], TMPFS: [50.0]},
}


def test_a_target_is_judged_by_the_ratio_of_medians() -> None:
    assert [line.rpartition(": ")[2] for line in verdicts(TIMES)] == ["met", "not met", "met", "met", "not met", "met"]
    assert verdicts(TIMES)[0] == "create + 1 KB, everysec: 1.39 times, target at most 1.40: met"


def test_the_table_has_medians_and_ratios() -> None:
    first = lines(TIMES)[1]
    assert first.split() == ["create", "+", "1", "KB", "100.0", "(1.00)", "139.0", "(1.39)", "150.0", "(1.50)"]
