"""Writes that are in flight while forks are made are in each fork completely or not at all."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mount.conftest import mounted
from tests.support.waiting import wait_until
from vfsd import Workspace

RECORD = mmap.PAGESIZE
RECORDS = 16
_HEAD = struct.Struct("<QI4x")  # sequence number, CRC-32 of the rest
_BODY = struct.Struct(f"<{(RECORD - _HEAD.size) // 8}Q")  # the sequence number again and again
# Writes records in turn: number n into page n % RECORDS, through a shared mapping or with pwrite(2).  After each round
# it writes the mapping's pages back, and only then does it store the round in "done".
_PROGRAM = f"""
import mmap, os, struct, sys, zlib
top, way = sys.argv[1:]
data = os.open(top + "/data", os.O_RDWR)
done = os.open(top + "/done", os.O_RDWR | os.O_CREAT)
mapping = mmap.mmap(data, {RECORDS} * {RECORD})
number = 0
while True:
    for page in range({RECORDS}):
        body = number.to_bytes(8, "little") * {(RECORD - _HEAD.size) // 8}
        record = struct.pack("{_HEAD.format}", number, zlib.crc32(body)) + body
        if way == "mmap":
            mapping[page * {RECORD} : (page + 1) * {RECORD}] = record
        else:
            os.pwrite(data, record, page * {RECORD})
        number += 1
    if way == "mmap":
        mapping.flush()
    os.pwrite(done, b"%016d" % number, 0)
"""


@pytest.fixture
def source(workdir: Path) -> Iterator[Workspace]:
    with mounted(workdir / "source", engine="native", name="source") as workspace:
        (workdir / "source" / "data").write_bytes(bytes(RECORDS * RECORD))
        yield workspace


def numbers(top: str, way: str) -> list[int]:
    """The sequence number of each record; AssertionError for a record that is neither old nor new.

    A program stores word by word into a mapping, so a page may have words of two records in succession: then it counts
    as the older one.
    """
    content = Path(top, "data").read_bytes()
    found = []
    for page in range(RECORDS):
        record = content[page * RECORD : (page + 1) * RECORD]
        number, checksum = _HEAD.unpack_from(record)
        if (number, checksum) != (0, 0) and checksum != zlib.crc32(record[_HEAD.size :]):
            assert way == "mmap", f"page {page} is torn"
            words = _BODY.unpack_from(record, _HEAD.size)
            number = min(words)
            assert set(words) <= {number, number + RECORDS}, f"page {page} is torn"
        found.append(number)
    return found


@pytest.mark.extended
@pytest.mark.parametrize("way", ["mmap", "pwrite"])
def test_each_fork_has_whole_records_and_all_that_were_done(source: Workspace, workdir: Path, way: str) -> None:
    with ExitStack() as stack:
        program = subprocess.Popen([sys.executable, "-c", _PROGRAM, source.path, way])
        stack.callback(program.wait)
        stack.callback(program.kill)
        done = Path(source.path, "done")
        wait_until(lambda: done.exists() and done.read_bytes() != b"", "the program has written a round")
        for each in range(6):
            before = int(done.read_bytes())
            with source.fork(workdir / f"copy-{each}") as copy:
                found = numbers(copy.path, way)
                finished = int(Path(copy.path, "done").read_bytes())
                assert finished >= before, "what was done before the fork is in it"
                # Each page has its record of the last round that was done, or one of a later round.
                assert all(number >= finished - RECORDS + page for page, number in enumerate(found))
                assert all(number % RECORDS == page for page, number in enumerate(found) if number)
                if way == "pwrite":
                    newest = max(found)
                    assert sorted(found) == list(range(newest - RECORDS + 1, newest + 1)), "writes are in their order"
                assert numbers(copy.path, way) == found, "nothing of the source arrives later"


def test_dirty_pages_that_nobody_has_flushed_are_in_the_fork(source: Workspace, workdir: Path) -> None:
    with open(Path(source.path, "data"), "r+b") as file, mmap.mmap(file.fileno(), RECORDS * RECORD) as mapping:
        mapping[:] = b"m" * len(mapping)
        with source.fork(workdir / "copy") as copy:
            assert Path(copy.path, "data").read_bytes() == b"m" * len(mapping)
            mapping[:] = b"n" * len(mapping)
            mapping.flush()
            assert Path(copy.path, "data").read_bytes() == b"m" * len(mapping)


@pytest.mark.extended
def test_writers_of_many_forks_never_see_each_other(source: Workspace, workdir: Path) -> None:
    """64 programs write at once, 16 in each fork; `bench.forks` does the same with 64 forks."""
    with ExitStack() as stack:
        copies = [stack.enter_context(source.fork(workdir / f"copy-{each}")) for each in range(4)]
        failures: list[str] = []

        def write(copy: Workspace, who: int, writer: int) -> None:
            place = os.path.join(copy.path, "who")
            for step in range(40):
                Path(f"{place}-{writer}").write_text(f"{who} {writer} {step}")
                if Path(f"{place}-{writer}").read_text() != f"{who} {writer} {step}":
                    failures.append(f"{who} {writer} {step}")

        threads = [
            threading.Thread(target=write, args=(copy, who, writer))
            for who, copy in enumerate(copies)
            for writer in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        for who, copy in enumerate(copies):
            assert {Path(copy.path, f"who-{writer}").read_text() for writer in range(16)} == {
                f"{who} {writer} 39" for writer in range(16)
            }
