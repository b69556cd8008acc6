"""Snapshots keep inode numbers and ctimes, apart from the content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from protocol.store import DirectorySource, Store, TreeSource
from protocol.store.format.rows import decode_record, encode_record
from protocol.store.trees import MerkleTree
from protocol.tree import TreeEntry
from tests.support.trees import DictTree

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


def fill(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "empty").mkdir()
    for place in (root, root / "a", root / "a" / "b"):
        (place / "file").write_bytes(bytes(place))
    os.link(root / "file", root / "a" / "second")
    (root / "link").symlink_to("file")
    os.mkfifo(root / "fifo")


def test_they_are_those_of_the_directory_at_every_snapshot(root: Path, store: Store) -> None:
    fill(root)
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
    fill(root)
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
    fill(root)
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
    fill(root)
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
    fill(root)
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
