"""When a keeper gives up, and the notes of a daemon for the next one."""

from __future__ import annotations

import os
import time

import pytest

from vfsd.daemon.keeper.kept import ANSWERED, SERVING_NS, Notes, deaths_in_a_row, shared_memory
from vfsd.kernel.engines.native.mounting import SHARED_BYTES


@pytest.mark.parametrize(
    ("answered", "served_s", "deaths"),
    [(0, None, 4), (0, 1, 4), (1, 1, 0), (0, 61, 0)],
    ids=["it never served", "it answered nothing", "it answered something", "nobody used it"],
)
def test_a_daemon_that_did_its_work_ends_a_row_of_deaths(answered: int, served_s: int | None, deaths: int) -> None:
    _, memory = shared_memory()
    memory[ANSWERED] = answered
    if served_s is not None:
        memory[SERVING_NS] = max(1, time.monotonic_ns() - served_s * 10**9)
    assert deaths_in_a_row(memory, 3) == deaths
    assert deaths_in_a_row(memory, deaths) == deaths + 1  # of the next daemon, which did nothing yet


def test_the_next_daemon_reads_what_was_set_last() -> None:
    memory, _ = shared_memory()
    notes = Notes(memory)
    assert notes.get("one") is None
    notes.set("one", ["\udce9"])
    for number in range(3):
        notes.set("two", number)
        again = Notes(memory)
        assert again.get("one") == ["\udce9"]
        assert again.get("two") == number
    again.set("one", 7)
    assert Notes(memory).get("one") == 7
    assert Notes(memory).get("two") == 2
    os.close(memory)


@pytest.mark.parametrize("written", range(1, 60, 7))
def test_a_change_that_was_not_completed_leaves_the_one_before(written: int) -> None:
    memory, _ = shared_memory()
    notes = Notes(memory)
    notes.set("key", "before")
    size = os.fstat(memory).st_size
    notes.set("key", "after")
    after = os.pread(memory, 4 << 20, SHARED_BYTES)
    assert after[0], "the second change is in the first slot"
    os.pwrite(memory, bytes(200), SHARED_BYTES)
    os.ftruncate(memory, size)
    os.pwrite(memory, after[:written], SHARED_BYTES)
    assert Notes(memory).get("key") == "before"
    os.close(memory)
