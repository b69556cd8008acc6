"""Files that become something else as they are read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from protocol.linux.statx import StatxResult, result_at, statx_names
from protocol.store.directory.scan import LeafReader, VanishedError, scan
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import LARGE_BYTES, Blobs, DigestSink
from protocol.store.format.digests import CHUNK_BYTES, ContentDigest
from protocol.store.format.layout import Layout

HOUR_NS = 3_600 * 10**9


class Directory:
    """A directory, and what takes its files in."""

    def __init__(self, root: Path) -> None:
        self.path = root
        self.descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self.sink = DigestSink(Blobs(Layout(os.fspath(root.parent / "store"))))

    def seen(self, name: bytes) -> StatxResult:
        return result_at(statx_names(self.descriptor, [name])[0], 0)


@pytest.fixture
def directory(root: Path):  # type: ignore[no-untyped-def]
    made = Directory(root)
    yield made
    os.close(made.descriptor)


def digest(data: bytes) -> bytes:
    content = ContentDigest()
    content.feed(data)
    return content.digest()


def deny(path: bytes, error: OSError) -> None:
    raise AssertionError(path) from error


def test_a_file_of_the_future_is_not_waited_for(directory: Directory) -> None:
    (directory.path / "file").write_bytes(b"large" * LARGE_BYTES)
    seen = directory.seen(b"file")._replace(ctime_ns=time.time_ns() + HOUR_NS)
    leaves = LeafReader(directory.sink, deny, lambda _: None)

    row, _ = leaves.take(directory.descriptor, b"file", b"file", seen)

    assert row.content == digest(b"large" * LARGE_BYTES)


def test_a_file_that_grows_large_as_it_is_read_has_the_digest_of_what_is_stored(directory: Directory) -> None:
    states = [bytes([number]) * 100 for number in range(1, 5)] + [b"grown" * CHUNK_BYTES]
    had = [b"first"]
    (directory.path / "file").write_bytes(b"first")

    def change(_: int) -> None:
        if states:
            had.append(states.pop(0))
            (directory.path / "file").write_bytes(had[-1])

    leaves = LeafReader(directory.sink, deny, change)
    row, _ = leaves.take(directory.descriptor, b"file", b"file", directory.seen(b"file"))

    assert row.content in {digest(each) for each in had}


def test_a_directory_in_place_of_a_file_is_no_error_of_reading(directory: Directory) -> None:
    (directory.path / "name").write_bytes(b"file")
    seen = directory.seen(b"name")
    (directory.path / "name").unlink()
    (directory.path / "name").mkdir()

    with pytest.raises(VanishedError):
        LeafReader(directory.sink, deny, lambda _: None).take(directory.descriptor, b"name", b"name", seen)


def test_a_name_that_becomes_something_else_meanwhile_is_kept_as_that(directory: Directory) -> None:
    root = directory.path
    for name in ("1-first", "2-link", "3-directory"):
        (root / name).write_bytes(b"file " + name.encode())

    class Swapping(DigestSink):
        def small(self, data: bytes) -> bytes:
            if data == b"file 1-first":
                os.symlink("elsewhere", root / "new")
                os.rename(root / "new", root / "2-link")
                (root / "3-directory").unlink()
                (root / "3-directory").mkdir()
                (root / "3-directory" / "below").write_bytes(b"below")
            return super().small(data)

    sink = Swapping(Blobs(Layout(os.fspath(root.parent / "store"))))
    found = scan(directory.descriptor, sink, StatCache(), unreadable="fail")
    rows = {row.name: row for row in sink.rows(found.root.content)}

    assert rows[b"2-link"].content == b"elsewhere"
    assert [row.name for row in sink.rows(rows[b"3-directory"].content)] == [b"below"]
