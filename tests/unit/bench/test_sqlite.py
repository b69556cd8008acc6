"""The rows of SQLite: each inserts what it says, in the journal mode that it says."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bench._sqlite import INSERTS, Inserts, measure


@pytest.mark.parametrize("inserts", INSERTS, ids=lambda inserts: inserts.name)
def test_the_database_has_all_rows_and_the_journal_mode(inserts: Inserts, tmp_path: Path) -> None:
    ticks = iter([10.0, 20.0])
    transactions = max(1, inserts.transactions // 10)
    assert measure(inserts, str(tmp_path), lambda: next(ticks), 0.1) == 10.0 / (transactions * inserts.rows)
    with closing(sqlite3.connect(tmp_path / "db")) as database:
        assert database.execute("select count(distinct a) from t").fetchone() == (transactions * inserts.rows,)
        assert database.execute("pragma journal_mode").fetchone() == (inserts.journal,)
