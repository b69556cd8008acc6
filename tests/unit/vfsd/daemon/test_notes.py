"""The notes of a daemon for the next one."""

from __future__ import annotations

import os

import pytest

from vfsd.daemon.keeper.kept import shared_memory
from vfsd.daemon.keeper.notes import Notes
from vfsd.kernel.engines.native.abandoned import SHARED_BYTES


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
