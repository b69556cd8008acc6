"""SharedLog: what one process wrote, another one reads, whenever the first one died."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from protocol.linux.shared_log import SharedLog


@pytest.fixture
def log() -> Iterator[SharedLog]:
    made = SharedLog.create()
    yield made
    os.close(made.descriptor)


def again(log: SharedLog) -> SharedLog:
    return SharedLog(log.descriptor)


def test_another_process_reads_the_records_and_continues(log: SharedLog) -> None:
    records = [b"", b"one", b"x" * 3_000_000, b"two"]
    for record in records:
        log.append(record)
    other = again(log)
    assert list(other.records()) == records
    other.append(b"three")
    assert list(again(log).records()) == [*records, b"three"]


def test_a_record_that_was_not_written_completely_does_not_count(log: SharedLog) -> None:
    log.append(b"one")
    complete = os.fstat(log.descriptor).st_size
    log.append(b"a longer record")
    data = os.pread(log.descriptor, 100, complete)
    for length in range(len(data)):
        os.ftruncate(log.descriptor, complete)
        os.pwrite(log.descriptor, data[:length], complete)
        other = again(log)
        assert list(other.records()) == [b"one"]
        other.append(b"two")
        assert list(again(log).records()) == [b"one", b"two"]


def test_replace_leaves_the_new_records_and_frees_the_memory(log: SharedLog) -> None:
    for _ in range(3000):
        log.append(b"x" * 1000)
    assert log.is_large
    log.replace([b"a", b"b"])
    assert not log.is_large
    log.append(b"c")
    assert list(again(log).records()) == [b"a", b"b", b"c"]
    assert os.fstat(log.descriptor).st_blocks * 512 < 100_000


def test_the_slot_is_shared(log: SharedLog) -> None:
    log.slot[3] = 2**64 - 1
    assert again(log).slot[3] == 2**64 - 1


def test_a_log_without_memory_says_that_it_is_incomplete(
    log: SharedLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log.append(b"one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: 0)
        log.append(b"two")
        log.append(b"three")
    assert [record.message for record in caplog.records] == [
        "files that are used from now on get ESTALE if the daemon dies: no memory"
    ]
    assert list(again(log).records()) == [b"one"]
