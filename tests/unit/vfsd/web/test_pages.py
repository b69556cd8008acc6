"""What pages are made of: the first changes, for which a page does not wait long, and the rows of a comparison."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from protocol.types import ChangeCounts
from vfsd.client.requests import RemoteCall
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.snapshots import DiffResult
from vfsd.web.pages import FirstChanges, first_changes, side_by_side
from vfsd.web.sources import WorkspaceSource

LINES = b"".join(msgspec.json.encode(ChangeRecord(f"f{n}", "added", "file")) + b"\n" for n in range(25))


@dataclass
class Daemon:
    """Sends `pieces`, one a second, and after `counting_s` the answer."""

    pieces: Sequence[bytes]
    counting_s: float = 0

    async def run(self, call: RemoteCall[Any]) -> DiffResult:
        assert call.on_output is not None
        for piece in self.pieces:
            await trio.sleep(1)
            call.on_output(piece)
        await trio.sleep(self.counting_s)
        return DiffResult("a", "b", ChangeCounts(added=25), [])


def asked(daemon: Daemon, start: int, soon_s: float | None) -> tuple[FirstChanges, float]:
    """Return ten changes and the seconds that it took, by a clock that passes over waits."""

    async def ask() -> tuple[FirstChanges, float]:
        found = await first_changes(cast("WorkspaceSource", daemon), "a", "b", "", start, 10, soon_s)
        return found, trio.current_time() - began

    clock = trio.testing.MockClock(autojump_threshold=0)
    began = clock.current_time()
    return trio.run(ask, clock=clock)


def names(found: FirstChanges) -> list[str]:
    return [record.path for record in found.records]


@pytest.mark.parametrize("size", [1, 7, 40, len(LINES)])
@pytest.mark.parametrize("start", [0, 5, 15, 20, 25, 10**18])
def test_a_part_of_the_list_however_the_output_is_cut(start: int, size: int) -> None:
    pieces = [LINES[at : at + size] for at in range(0, len(LINES), size)]
    found, _ = asked(Daemon(pieces), start, None)
    assert names(found) == [f"f{n}" for n in range(25)][start : start + 10]
    assert found.has_more == (start < 15)
    assert found.counts == ChangeCounts(added=25)


def test_counting_is_cut_off_once_the_lines_are_there() -> None:
    slow = Daemon([LINES], counting_s=1000)
    found, took_s = asked(slow, 0, 3)
    assert (names(found)[-1], found.has_more, found.counts, took_s) == ("f9", True, None, pytest.approx(3))
    found, took_s = asked(slow, 0, 0.4)  # the lines come after that: it ends with them
    assert (len(found.records), found.counts, took_s) == (10, None, pytest.approx(1))


def test_the_lines_are_waited_for_and_the_counts_if_asked() -> None:
    late = Daemon([b"", b"", LINES[:50], LINES[50:]], counting_s=1000)
    found, took_s = asked(late, 0, 0.4)
    assert (len(found.records), found.counts, took_s) == (10, None, pytest.approx(4))
    found, took_s = asked(late, 0, None)
    assert (len(found.records), found.counts, took_s) == (10, ChangeCounts(added=25), pytest.approx(1004))


PATCH = st.lists(st.sampled_from(["a", "b", "-- x", "++ y", "@@ -1 +1 @@", "\\ no", "", " "]), max_size=12)


@given(old=PATCH, new=PATCH, context=st.integers(0, 12))
def test_the_rows_have_the_lines_of_both_files(old: list[str], new: list[str], context: int) -> None:
    hunks = list(difflib.unified_diff(old, new, "a/f", "b/f", n=context, lineterm=""))
    rows = list(side_by_side("\n".join(["diff --git a/f b/f", *hunks, ""]).encode()))
    for row in rows:
        if row.old_number is not None:
            assert old[row.old_number - 1] == row.old
        if row.new_number is not None:
            assert new[row.new_number - 1] == row.new
        if row.kind == "same":
            assert row.old == row.new
    if context == 12 and old != new:  # everything is in one hunk
        assert [row.old for row in rows if row.old is not None] == old
        assert [row.new for row in rows if row.new is not None] == new


def test_a_binary_patch_has_no_rows() -> None:
    head = b"diff --git a/f b/f\nindex 1..2 100644\nGIT binary patch\n"
    assert list(side_by_side(head + b"literal 3\nKcmZQzU|?imU|?V\n\nliteral 0\nHcmV?d00001\n\n")) == []


def test_a_very_long_line_is_cut() -> None:
    rows = list(side_by_side(b"@@ -1 +1 @@\n-" + b"x" * 10_000 + b"\n+y\n"))
    assert len(rows[0].old or "") < 2_100
