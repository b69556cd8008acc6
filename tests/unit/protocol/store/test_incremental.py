"""An incremental snapshot equals a full scan: every change of an inode is found, whichever of its names was used.

Files become something else as they are read.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.linux.statx import StatxResult, is_racy, result_at, statx_names
from protocol.store import DirectorySource, Store
from protocol.store.directory.scan import LeafReader, VanishedError, scan
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import LARGE_BYTES, Blobs, DigestSink, StoreSink
from protocol.store.format.digests import CHUNK_BYTES, ContentDigest
from protocol.store.format.layout import Layout
from tests.unit.protocol.store.states import Chaos, State, differences, state_of, state_of_tree


class Workspace:
    """One host workspace that lives through several daemons, as `vfsd mount` sets them up."""

    def __init__(self, store: Store, root: Path) -> None:
        self.root = root
        self._count = 0
        self._store = store
        self._source = DirectorySource(root)

    def remount(self) -> None:
        """Serve the directory from a new daemon: only what is on disk survives."""
        self._store.close()
        self._store = Store(self._store.directory)
        self._source = DirectorySource(self.root)

    def take(self) -> str:
        self._count += 1
        name = f"{self._count}"
        self._store.take("w", name, self._source)
        return name

    def settle(self) -> None:
        """Take a snapshot when no timestamp is so recent that the next scan reads the file again for that reason."""
        begin_ns = time.time_ns()
        while is_racy(begin_ns | 1, time.time_ns()):
            pass
        self.take()

    def collect_garbage(self) -> None:
        """Remove a dropped snapshot and what only it needed."""
        extra = self.root / "extra"
        extra.write_bytes(b"x" * 2 * LARGE_BYTES)
        self._store.drop("w", self.take())
        extra.unlink()
        assert self._store.collect_garbage().freed_contents

    def state(self, name: str) -> State:
        with self._store.tree("w", name) as tree:
            return state_of_tree(tree)

    def counts(self, name: str) -> tuple[int, int, int]:
        info = self._store.snapshot("w", name)
        return info.files, info.directories, info.size_bytes


@pytest.fixture
def workspace(store: Store, root: Path) -> Workspace:
    (root / "z").mkdir()
    (root / "z" / "f").write_bytes(b"before")
    (root / "q").mkdir()
    return Workspace(store, root)


def by_chmod(path: Path) -> None:
    path.chmod(0o1777)


def by_write(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"BEFORE")  # the same size


def by_mapping(path: Path) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[:3] = b"map"
        mapping.flush()


@contextmanager
def link_that_stays(root: Path) -> Iterator[Path]:
    os.link(root / "z" / "f", root / "a")
    yield root / "a"


@contextmanager
def link_that_is_removed(root: Path) -> Iterator[Path]:
    os.link(root / "z" / "f", root / "a")
    yield root / "a"
    os.unlink(root / "a")


@contextmanager
def link_in_a_directory_that_is_removed(root: Path) -> Iterator[Path]:
    os.mkdir(root / "new")
    os.link(root / "z" / "f", root / "new" / "a")
    yield root / "new" / "a"
    os.unlink(root / "new" / "a")
    os.rmdir(root / "new")


@contextmanager
def link_outside(root: Path) -> Iterator[Path]:
    os.link(root / "z" / "f", root.parent / "outside")
    yield root.parent / "outside"


@contextmanager
def descriptor_of_a_removed_name(root: Path) -> Iterator[Path]:
    descriptor = os.open(root / "z" / "f", os.O_RDWR)
    os.link(root / "z" / "f", root / "q" / "a")
    os.unlink(root / "z" / "f")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("change", [by_chmod, by_write, by_mapping])
@pytest.mark.parametrize(
    "name",
    [
        link_that_stays,
        link_that_is_removed,
        link_in_a_directory_that_is_removed,
        link_outside,
        descriptor_of_a_removed_name,
    ],
)
@pytest.mark.parametrize("remounted", [False, True], ids=["same daemon", "new daemon"])
def test_a_change_through_another_name_is_found(
    workspace: Workspace, name: Callable[[Path], object], change: Callable[[Path], None], remounted: bool
) -> None:
    if remounted:
        workspace.settle()
        workspace.remount()
    workspace.settle()

    with name(workspace.root) as path:  # type: ignore[attr-defined]
        workspace.settle()
        change(path)

    assert workspace.state(workspace.take()) == state_of(workspace.root)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(10))
def test_an_incremental_snapshot_equals_a_full_scan_by_a_new_store(
    store: Store, root: Path, tmp_path: Path, seed: int, runs_long: bool
) -> None:
    chaos, steps, workspace = Chaos(root, seed), random.Random(seed), Workspace(store, root)
    for step in range(80 if runs_long else 20):
        chaos.change(steps.randrange(5))
        if steps.random() < 0.2:
            workspace.remount()
        name = workspace.take()
        with Store(tmp_path / f"oracle-{step}") as fresh:
            full = Workspace(fresh, root)
            expected = full.take()
            assert workspace.counts(name) == full.counts(expected)
            assert differences(workspace.state(name), full.state(expected)) == []
            assert workspace.state(name).links == full.state(expected).links == state_of(root).links
        assert differences(workspace.state(name), state_of(root)) == []


def test_a_later_daemon_reads_no_unchanged_file_again_after_a_garbage_collection(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.collect_garbage()
    workspace.settle()
    workspace.remount()
    looked_up: list[bytes] = []
    has = StoreSink.has
    monkeypatch.setattr(StoreSink, "has", lambda self, digest: looked_up.append(digest) or has(self, digest))

    workspace.take()

    assert looked_up == []


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
