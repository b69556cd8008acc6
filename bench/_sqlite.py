"""SQLite inserts: rollback journal and write-ahead log, with 1, 10 and 1,000 rows in a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Final

TEXT: Final = "x" * 50


@dataclass(frozen=True, slots=True)
class Inserts:
    """`transactions` of `rows` inserts each, in the journal mode `journal` (SQLite's name)."""

    name: str
    journal: str
    rows: int
    transactions: int


INSERTS: Final = tuple(
    Inserts(f"SQLite {title}, {rows:,} a transaction", journal, rows, transactions)
    for journal, title in (("wal", "WAL"), ("delete", "rollback"))
    for rows, transactions in ((1, 200), (10, 100), (1000, 10))
)


def measure(inserts: Inserts, place: str, clock: Callable[[], float], share: float = 1.0) -> float:
    """Return seconds for a row, by `clock`, from opening the database to closing it (which ends a WAL).

    `place` is an empty directory.  `share`: of the transactions, for a slow file system.
    """
    path = f"{place}/db"
    with closing(sqlite3.connect(path)) as database:
        found = database.execute(f"pragma journal_mode = {inserts.journal}").fetchone()
        if found[0] != inserts.journal:
            raise RuntimeError(f"SQLite cannot use the journal mode {inserts.journal} here")
        database.execute("create table t (a integer, b text)")
    transactions = max(1, int(inserts.transactions * share))
    began = clock()
    # Autocommit, so that the statements below are all transactions.
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for number in range(transactions):
            database.execute("begin")
            for row in range(inserts.rows):
                database.execute("insert into t values (?, ?)", (number * inserts.rows + row, TEXT))
            database.execute("commit")
    took_s = clock() - began
    with closing(sqlite3.connect(path)) as database:
        count: int = database.execute("select count(*) from t").fetchone()[0]
    if count != transactions * inserts.rows:
        raise RuntimeError(f"the database has {count} rows instead of {transactions * inserts.rows}")
    return took_s / count
