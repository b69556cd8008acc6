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

import msgspec
import pytest
from msgspec.structs import replace

from protocol.linux.statx import StatxResult, is_racy, result_at, statx_names
from protocol.store import DirectorySource, Store, TreeSource
from protocol.store.directory.scan import LeafReader, VanishedError, scan
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import LARGE_BYTES, Blobs, DigestSink, StoreSink
from protocol.store.format.digests import CHUNK_BYTES, ContentDigest
from protocol.store.format.layout import Layout
from protocol.store.format.rows import decode_record, encode_record
from protocol.store.trees import MerkleTree
from protocol.tree import TreeEntry
from tests.support.trees import DictTree
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


KEY = "host:/w"


def numbers_and_ctimes(root: Path) -> dict[bytes, tuple[int, int]]:
    """What the file system says of everything below a directory."""
    paths = [path for path in root.rglob("*") if not path.name.startswith(".vfsd")]
    return {os.fsencode(path.relative_to(root)): (path.lstat().st_ino, path.lstat().st_ctime_ns) for path in paths}


def kept(store: Store, name: str) -> dict[bytes, tuple[int, int]]:
    """The same of a snapshot; {} if it has none of it."""
    with store.leased(KEY, name) as (record, blobs):
        if record.inodes is None:
            return {}
        tree = MerkleTree(record.inodes, blobs.listing, blobs)
        paths = [entry.path for entry in tree.walk() if entry.path]
        return {path: (tree.row(path).size, tree.row(path).mtime_ns) for path in paths}


def fill_with_links(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "empty").mkdir()
    for place in (root, root / "a", root / "a" / "b"):
        (place / "file").write_bytes(bytes(place))
    os.link(root / "file", root / "a" / "second")
    (root / "link").symlink_to("file")
    os.mkfifo(root / "fifo")


def test_they_are_those_of_the_directory_at_every_snapshot(root: Path, store: Store) -> None:
    fill_with_links(root)
    for turn in range(3):
        store.take(KEY, f"{turn}", DirectorySource(root))
        assert kept(store, f"{turn}") == numbers_and_ctimes(root)
        os.chmod(root / "a" / "b" / "file", 0o600 + turn)
        os.rename(root / "empty", root / "a" / "moved")
        os.rename(root / "a" / "moved", root / "empty")
    with Store(store.directory) as another:  # with the stat cache on disk
        another.take(KEY, "another", DirectorySource(root))
        assert kept(another, "another") == numbers_and_ctimes(root)


def test_they_make_no_difference_between_states(root: Path, store: Store) -> None:
    fill_with_links(root)
    first = store.take(KEY, "first", DirectorySource(root))
    (root / "a" / "file").write_bytes((root / "a" / "file").read_bytes())  # the same content, another ctime
    mtime_ns = 1_600_000_000_000_000_000
    for name in ("second", "third"):
        os.utime(root / "a" / "file", ns=(mtime_ns, mtime_ns))
        store.take(KEY, name, DirectorySource(root))
    with store.tree(KEY, "second") as second, store.tree(KEY, "third") as third:
        assert second.root == third.root
        assert third.touched(second) == []
    assert first.size_bytes == store.snapshot(KEY, "third").size_bytes


def test_a_collection_keeps_those_of_snapshots_and_frees_the_others(root: Path, store: Store) -> None:
    fill_with_links(root)
    store.take(KEY, "dropped", DirectorySource(root))
    os.chmod(root / "a" / "file", 0o600)
    store.take(KEY, "stays", DirectorySource(root))
    expected = kept(store, "stays")
    with store.leased(KEY, "dropped") as (record, blobs):
        assert record.inodes is not None
        store.drop(KEY, "dropped")
        store.collect_garbage()
        blobs.packs.refresh()
        assert blobs.has(record.inodes.content), "a leased snapshot lost its inode listings"
    store.collect_garbage()
    assert kept(store, "stays") == expected
    assert not store.blobs.has(record.inodes.content)


def test_a_damaged_inode_listing_is_named_and_a_mount_does_without(root: Path, tmp_path: Path) -> None:
    fill_with_links(root)
    place_of_store = tmp_path / "damaged"
    with Store(place_of_store) as store:
        store.take(KEY, "one", DirectorySource(root))
    with Store(place_of_store) as store, store.leased(KEY, "one") as (record, blobs):
        inodes = MerkleTree(record.inodes, blobs.listing, blobs).row(b"a") if record.inodes is not None else None
        place = None if inodes is None else blobs.packs.find(inodes.content)
    assert place is not None
    (pack,) = (place_of_store / "packs").glob(f"{place.pack}*")
    os.chmod(pack, 0o600)
    with pack.open("r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with Store(place_of_store) as again:
        mounted = again.mounted(KEY, "one")
        assert mounted.entry(b"file").ctime_ns
        assert mounted.inode_failure is None
        assert not any(entry.ctime_ns for entry in mounted.entries(b"a"))
        assert "ctimes below a are lost" in (mounted.inode_failure or "")
        assert mounted.read(b"a/file", 0, 100) == (root / "a" / "file").read_bytes()
        mounted.close()
    with Store(place_of_store) as again:
        (damage,) = again.check().damages
    assert damage.paths == ()
    assert damage.without_inodes == (b"a",)


def test_a_record_without_them_is_one_of_an_older_version(root: Path, store: Store) -> None:
    fill_with_links(root)
    store.take(KEY, "one", DirectorySource(root))
    with store.leased(KEY, "one") as (record, _):
        older = msgspec.msgpack.encode(msgspec.msgpack.decode(encode_record(record))[:-1])
    found = decode_record(older)
    assert found.inodes is None
    assert found.root == record.root
    assert decode_record(encode_record(record)) == record


def test_a_tree_without_ctimes_has_none(store: Store) -> None:
    store.take(KEY, "tree", TreeSource(DictTree({b"file": b"1", b"directory/file": b"2"})))
    assert kept(store, "tree") == {}


class LiveTree:
    """A tree that a program changes after its content was read."""

    def __init__(self) -> None:
        self._tree = DictTree({b"changed": b"1", b"d/stays": b"2", b"d/removed": b"3", b"d/replaced": b"4"})
        self._walks = 0

    def walk(self) -> Iterator[TreeEntry]:
        self._walks += 1
        for number, entry in enumerate(self._tree.walk(), 10):
            seen = replace(entry, inode=number, ctime_ns=1000)
            if self._walks > 1:
                seen = {
                    b"changed": replace(seen, ctime_ns=1001),
                    b"d/removed": replace(seen, path=b"d/made"),
                    b"d/replaced": replace(seen, inode=99, ctime_ns=1001),
                }.get(entry.path, seen)
            yield seen

    def chunks(self, path: bytes, size: int) -> Iterator[bytes]:
        return self._tree.chunks(path, size)


def test_what_changes_during_the_scan_of_a_tree_has_none(store: Store) -> None:
    store.take(KEY, "live", TreeSource(LiveTree(), may_change=True))  # type: ignore[arg-type]
    found = kept(store, "live")
    assert set(found) == {b"changed", b"d", b"d/stays", b"d/replaced"}
    assert [path for path, (number, _) in found.items() if not number] == [b"changed", b"d/replaced"]
    store.take(KEY, "still", TreeSource(LiveTree()))  # type: ignore[arg-type]
    assert all(number for number, _ in kept(store, "still").values())
    with store.tree(KEY, "live") as live, store.tree(KEY, "still") as still:
        assert live.root == still.root
