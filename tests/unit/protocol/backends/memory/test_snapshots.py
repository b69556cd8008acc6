"""Snapshots of the memory backend: what a random walk seldom reaches, each by its name."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.diff.tree_diff import changes
from protocol.tree import TreeEntry, filled
from protocol.volume import ROOT_INODE, AttributeChanges, Caller
from protocol.volume_extensions import EntryChange, InodeChange
from tests.support.trees import DictTree

CALLER = Caller(0, 0)


@pytest.fixture
def volume() -> Iterator[MemoryVolume]:
    volume = MemoryVolume(max_bytes=100 * 4096, clock=iter(range(1_000, 10**9)).__next__)
    yield volume
    volume.check_invariants()


def make(volume: MemoryVolume, parent: int, name: bytes, data: bytes | None = None) -> int:
    """A file with `data`, or a directory; nobody holds it."""
    if data is None:
        number = volume.mkdir(parent, name, 0o755, CALLER).inode
    else:
        number = volume.mknod(parent, name, stat.S_IFREG | 0o644, 0, CALLER).inode
        volume.write(number, 0, data)
    volume.forget(number, 1)
    return number


def at(volume: MemoryVolume, path: bytes) -> int:
    number = ROOT_INODE
    for name in path.split(b"/"):
        number = volume.lookup(number, name).inode
        volume.forget(number, 1)
    return number


def read(volume: MemoryVolume, path: bytes) -> bytes:
    return bytes(volume.read(at(volume, path), 0, 1 << 20))


def state(volume: MemoryVolume) -> list[object]:
    with volume.tree() as tree:
        return [(entry, b"".join(filled(tree.chunks(entry.path))) if entry.is_file else b"") for entry in tree.walk()]


@pytest.mark.parametrize("paths", [(), (b"d", b"linked", b"moved")])
def test_a_directory_removed_while_it_was_held_comes_back_with_another_number(
    volume: MemoryVolume, paths: Sequence[bytes]
) -> None:
    number = make(volume, ROOT_INODE, b"d")
    below = make(volume, number, b"below")
    file = make(volume, below, b"file", b"x")
    volume.link(file, ROOT_INODE, b"linked")
    for parent, name in ((ROOT_INODE, b"d"), (number, b"below")):
        volume.lookup(parent, name)
    volume.take_snapshot("s")
    before = volume.getattr(number)
    for _ in range(2):
        below = volume.lookup(volume.lookup(ROOT_INODE, b"d").inode, b"below").inode
        volume.rename(below, b"file", ROOT_INODE, b"moved")
        volume.rmdir(volume.lookup(ROOT_INODE, b"d").inode, b"below")
        volume.rmdir(ROOT_INODE, b"d")
        coherence = volume.restore_snapshot("s", paths)
        volume.check_invariants()
        made = volume.lookup(ROOT_INODE, b"d")
        assert EntryChange(ROOT_INODE, b"d", 0, made.inode) in coherence.entries
        assert volume.getattr(number).nlink == 0
        assert list(volume.readdir(number, 2)) == []
        assert (made.inode != number, made.mode, made.mtime_ns, made.birth_ns) == (
            True, before.mode, before.mtime_ns, before.birth_ns,
        )  # fmt: skip
        below = volume.lookup(made.inode, b"below").inode
        assert volume.lookup(below, b"file").inode == file
        assert sorted(volume.getattr(file).links) == [(ROOT_INODE, b"linked"), (below, b"file")]
        with volume.tree("s") as old, volume.tree() as new:
            assert list(changes(old, new)) == []


def test_the_copy_of_a_directory_that_was_held_stays_in_later_restores(volume: MemoryVolume) -> None:
    number = make(volume, ROOT_INODE, b"d")
    make(volume, make(volume, number, b"below"), b"file", b"x")
    make(volume, number, b"empty")
    held = [volume.lookup(ROOT_INODE, b"d"), volume.lookup(number, b"below"), volume.lookup(number, b"empty")]
    volume.take_snapshot("s")
    volume.unlink(held[1].inode, b"file")
    for name in (b"below", b"empty"):
        volume.rmdir(number, name)
    volume.rmdir(ROOT_INODE, b"d")
    volume.restore_snapshot("s")
    copies = [volume.lookup(ROOT_INODE, b"d").inode]
    copies += [volume.lookup(copies[0], name).inode for name in (b"below", b"empty")]
    assert not set(copies) & {one.inode for one in held}
    volume.take_snapshot("later")
    for at in range(3):
        if at:
            make(volume, copies[1], b"new", b"y")
            make(volume, copies[2], b"new", b"y")
            volume.rename(copies[1], b"file", ROOT_INODE, b"moved")
            volume.setattr(copies[0], AttributeChanges(mode=0o700))
        if at == 2:
            for each in held:
                volume.forget(each.inode, volume.lookup_counts()[each.inode])  # the old numbers are free
        volume.restore_snapshot("s")
        volume.check_invariants()
        again = [volume.lookup(ROOT_INODE, b"d").inode]
        again += [volume.lookup(copies[0], name).inode for name in (b"below", b"empty")]
        assert again == copies
        with volume.tree("s") as old, volume.tree() as new:
            assert list(changes(old, new)) == []
    volume.restore_snapshot("later")
    assert volume.lookup(ROOT_INODE, b"d").inode == copies[0]
    volume.check_invariants()


def test_a_transaction_that_fails_gives_a_directory_that_it_removed_its_number_back(volume: MemoryVolume) -> None:
    number = make(volume, ROOT_INODE, b"d")
    volume.lookup(ROOT_INODE, b"d")

    def fail() -> None:
        with volume.changes():
            volume.rmdir(ROOT_INODE, b"d")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert volume.lookup(ROOT_INODE, b"d").inode == number
    volume.check_invariants()


@pytest.mark.parametrize("path", [b"latin\xe9", b"f/latin\xe9"])
def test_an_error_names_a_missing_path_that_is_not_utf_8_exactly(volume: MemoryVolume, path: bytes) -> None:
    make(volume, ROOT_INODE, b"f", b"content")
    volume.take_snapshot("s")
    with pytest.raises(OSError, match="latin") as restored:
        volume.restore_snapshot("s", [path])
    assert os.fsencode(restored.value.filename) == path
    with volume.tree("s") as old, volume.tree() as new, pytest.raises(FileNotFoundError) as compared:
        list(changes(old, new, paths=[path]))
    assert os.fsencode(compared.value.filename) == path


@pytest.mark.parametrize("paths", [[b"d", b"missing"], [b"f", b"missing"], [b"d", b"f", b"moved", b"missing"]])
def test_a_restore_that_fails_half_way_leaves_everything_as_it_was(volume: MemoryVolume, paths: list[bytes]) -> None:
    directory = make(volume, ROOT_INODE, b"d")
    make(volume, directory, b"inside", b"1")
    number = make(volume, ROOT_INODE, b"f", b"then")
    moved = make(volume, ROOT_INODE, b"to be moved")
    for name in (b"d", b"f", b"to be moved"):
        volume.lookup(ROOT_INODE, name)
    volume.take_snapshot("s")
    volume.unlink(directory, b"inside")
    volume.rmdir(ROOT_INODE, b"d")
    volume.unlink(ROOT_INODE, b"f")
    volume.write(number, 0, b"when unlinked")
    volume.rename(ROOT_INODE, b"to be moved", ROOT_INODE, b"moved")
    before = state(volume)
    with pytest.raises(FileNotFoundError):
        volume.restore_snapshot("s", paths)
    assert state(volume) == before
    assert volume.read(number, 0, 100) == b"when unlinked"
    assert [volume.getattr(each).generation for each in (directory, moved)] == [0, 0]
    assert volume.getattr(directory).nlink == volume.getattr(number).nlink == 0


def test_restoring_a_path_whose_directory_was_moved_copies_and_does_not_link(volume: MemoryVolume) -> None:
    number = make(volume, make(volume, ROOT_INODE, b"d"), b"f", b"then")
    volume.write(number, 4, b"!")  # in place: the block is one that can be changed
    volume.take_snapshot("s")
    volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"e")
    make(volume, ROOT_INODE, b"d")
    volume.restore_snapshot("s", [b"d"])
    volume.drop_snapshot("s")
    volume.write(at(volume, b"e/f"), 0, b"X")
    assert (read(volume, b"d/f"), read(volume, b"e/f")) == (b"then!", b"Xhen!")
    assert at(volume, b"d/f") != at(volume, b"e/f") == number


def test_an_import_does_not_write_through_hard_links_that_its_tree_keeps_apart(volume: MemoryVolume) -> None:
    number = make(volume, ROOT_INODE, b"a", b"live")
    for name in (b"b", b"outside"):
        volume.link(number, ROOT_INODE, name)
        volume.forget(number, 1)
    file = stat.S_IFREG | 0o644
    tree = DictTree(
        {
            b"a": (TreeEntry(b"a", file, nlink=2, inode=7), b"first"),
            b"b": (TreeEntry(b"b", file, nlink=2, inode=8), b"second"),
            b"c": (TreeEntry(b"c", file, nlink=2, inode=7), b"first"),
            b"d": (TreeEntry(b"d", file, nlink=2, inode=8), b"second"),
        }
    )
    volume.import_tree(tree, replace=False)
    assert [read(volume, name) for name in (b"a", b"b", b"c", b"d", b"outside")] == [
        b"first",
        b"second",
        b"first",
        b"second",
        b"live",
    ]
    assert at(volume, b"a") == at(volume, b"c") != at(volume, b"b") == at(volume, b"d")


def test_a_device_whose_number_differs_is_another_inode(volume: MemoryVolume) -> None:
    number = volume.mknod(ROOT_INODE, b"null", stat.S_IFCHR | 0o666, os.makedev(1, 3), CALLER).inode
    entry = TreeEntry(b"null", stat.S_IFCHR | 0o666, rdev=os.makedev(1, 5))
    coherence = volume.import_tree(DictTree({b"null": (entry, b"")}), replace=True)
    assert volume.getattr(at(volume, b"null")).rdev == os.makedev(1, 5)
    assert [(change.old, change.new) for change in coherence.entries] == [(number, at(volume, b"null"))]


def test_room_that_an_import_makes_late_counts(volume: MemoryVolume) -> None:
    make(volume, ROOT_INODE, b"z", b"z" * 80 * 4096)
    volume.import_tree(DictTree({b"a": b"a" * 80 * 4096}), replace=True)
    assert read(volume, b"a") == b"a" * 80 * 4096


def test_trees_deeper_than_the_recursion_limit_are_diffed_and_restored(volume: MemoryVolume) -> None:
    parent = ROOT_INODE
    for _ in range(3_000):
        parent = make(volume, parent, b"d")
    volume.take_snapshot("s")
    number = make(volume, parent, b"f", b"x")
    path = b"d/" * 3_000 + b"f"
    with volume.tree("s") as old, volume.tree() as new:
        assert [(change.path, change.kind) for change in changes(old, new)] == [(path, "added")]
    coherence = volume.restore_snapshot("s")
    assert coherence.entries == [EntryChange(parent, b"f", number, 0)]


def test_an_unchanged_file_is_not_touched_by_a_restore(volume: MemoryVolume) -> None:
    number = make(volume, ROOT_INODE, b"same", b"same")
    changed = make(volume, ROOT_INODE, b"changed", b"then")
    volume.take_snapshot("s")
    before = volume.getattr(number)
    volume.setattr(changed, AttributeChanges(size=1))
    coherence = volume.restore_snapshot("s")
    assert volume.getattr(number) is before
    assert coherence.inodes == [InodeChange(changed, content=True)]


def test_a_tree_finds_what_it_has_folder_by_folder_and_nothing_else(volume: MemoryVolume) -> None:
    a = make(volume, ROOT_INODE, b"a")
    make(volume, a, b"f", b"1")
    make(volume, ROOT_INODE, b"f", b"22")
    with volume.tree() as tree:
        # Where one is found in the folder of the last one, and where not.
        for path, size in ((b"a/f", 1), (b"f", 2), (b"a/f", 1), (b"a", 0), (b"", 0), (b"f", 2)):
            assert tree.entry(path).size == size
        for missing in (b"/", b"/a", b"/f", b"//a", b"a/", b"a//f", b"b", b"b/f", b"a/g"):
            with pytest.raises(FileNotFoundError):
                tree.entry(missing)
        for below_a_file in (b"f/", b"f/g", b"a/f/g"):
            with pytest.raises(NotADirectoryError):
                tree.entry(below_a_file)
