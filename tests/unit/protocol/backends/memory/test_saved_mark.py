"""Whether the live state of a volume is kept elsewhere: what counts as a change, and what as saving."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.volume import ROOT_INODE, AttributeChanges, Caller
from tests.support.trees import DictTree

CALLER = Caller(0, 0)


@pytest.fixture(params=["memory", "overlay"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryVolume]:
    """With the file "f" and the empty directory "d" in it, all saved."""
    if request.param == "memory":
        volume = MemoryVolume()
        make(volume, b"f")
        volume.forget(volume.mkdir(ROOT_INODE, b"d", 0o755, CALLER).inode, 1)
    else:
        (tmp_path / "f").write_bytes(b"data")
        (tmp_path / "d").mkdir()
        volume = OverlayVolume(tmp_path)
    volume.mark_saved()
    yield volume
    volume.check_invariants()


def make(volume: MemoryVolume, name: bytes) -> None:
    node = volume.mknod(ROOT_INODE, name, stat.S_IFREG | 0o644, 0, CALLER)
    volume.write(node.inode, 0, b"data")
    volume.forget(node.inode, 1)


def at(volume: MemoryVolume, name: bytes) -> int:
    return volume.lookup(ROOT_INODE, name).inode


def link(volume: MemoryVolume) -> None:
    volume.link(at(volume, b"f"), at(volume, b"d"), b"too")


CHANGES: dict[str, Callable[[MemoryVolume], object]] = {
    "create": lambda volume: make(volume, b"new"),
    "write": lambda volume: volume.write(at(volume, b"f"), 0, b"D"),
    "truncate": lambda volume: volume.setattr(at(volume, b"f"), AttributeChanges(size=1)),
    "fallocate": lambda volume: volume.fallocate(at(volume, b"f"), 0, 0, 9000),
    "chmod": lambda volume: volume.setattr(at(volume, b"f"), AttributeChanges(mode=0o600)),
    "chown of a directory": lambda volume: volume.setattr(at(volume, b"d"), AttributeChanges(uid=7)),
    "utimes": lambda volume: volume.setattr(at(volume, b"f"), AttributeChanges(mtime_ns=5)),
    "setxattr": lambda volume: volume.setxattr(at(volume, b"f"), b"user.x", b"1", 0),
    "rename": lambda volume: volume.rename(ROOT_INODE, b"f", ROOT_INODE, b"g"),
    "rename of a directory": lambda volume: volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"e"),
    "link": link,
    "symlink": lambda volume: volume.symlink(ROOT_INODE, b"s", b"f", CALLER),
    "unlink": lambda volume: volume.unlink(ROOT_INODE, b"f"),
    "rmdir": lambda volume: volume.rmdir(ROOT_INODE, b"d"),
    "mkdir": lambda volume: volume.mkdir(at(volume, b"d"), b"in", 0o755, CALLER),
}


@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_one_before_and_after_each_mark(volume: MemoryVolume, change: str, *, with_snapshot: bool) -> None:
    if with_snapshot:
        volume.take_snapshot("s")
    assert volume.is_saved
    CHANGES[change](volume)
    assert not volume.is_saved
    volume.mark_saved()
    assert volume.is_saved


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_each_write_after_a_mark_counts_though_the_file_was_changed_before(
    volume: MemoryVolume, *, with_snapshot: bool
) -> None:
    if with_snapshot:
        volume.take_snapshot("s")
    number = at(volume, b"f")
    for _ in range(3):
        volume.write(number, 0, b"D")
        mark = volume.mark()
        assert not volume.changed_since(mark)
        volume.write(number, 0, b"E")
        assert volume.changed_since(mark)


def test_looking_snapshots_and_views_are_no_changes(volume: MemoryVolume) -> None:
    number = at(volume, b"f")
    volume.read(number, 0, 10)
    list(volume.readdir(ROOT_INODE, 0))
    volume.take_snapshot("s")
    with volume.tree() as tree:
        list(tree.walk())
    volume.restore_snapshot("s")
    volume.drop_snapshot("s")
    volume.take_snapshot("t")
    assert volume.is_saved


def test_a_file_without_a_name_is_nothing_to_lose_until_it_gets_one(volume: MemoryVolume) -> None:
    number = volume.tmpfile(ROOT_INODE, 0o600, CALLER).inode
    volume.write(number, 0, b"data")
    assert volume.is_saved
    volume.mark_saved()
    volume.write(number, 0, b"more")
    assert volume.is_saved
    volume.link(number, ROOT_INODE, b"named")
    assert not volume.is_saved


def test_restores_undone_changes_and_imports_are_changes(volume: MemoryVolume) -> None:
    volume.take_snapshot("s")
    volume.write(at(volume, b"f"), 0, b"D")
    volume.mark_saved()
    volume.restore_snapshot("s")
    assert not volume.is_saved
    volume.mark_saved()
    volume.import_tree(DictTree({b"new": b"data"}), replace=False)
    assert not volume.is_saved


def test_what_changes_while_a_view_is_saved_is_not_saved(volume: MemoryVolume) -> None:
    make(volume, b"new")
    with volume.tree() as tree:
        volume.write(at(volume, b"f"), 0, b"D")
        volume.mark_saved(tree)
        assert not volume.is_saved
    with volume.tree() as tree:
        volume.mark_saved(tree)
    assert volume.is_saved


def test_saving_a_snapshot_saves_the_live_state_if_that_is_the_same(volume: MemoryVolume) -> None:
    make(volume, b"new")
    volume.take_snapshot("s")
    with volume.tree("s") as tree:
        volume.mark_saved(tree)
        assert volume.is_saved
        make(volume, b"newer")
        volume.mark_saved(tree)
        assert not volume.is_saved


def test_an_older_state_that_is_saved_later_takes_nothing_back(volume: MemoryVolume) -> None:
    volume.take_snapshot("s")
    make(volume, b"new")
    volume.mark_saved()
    with volume.tree("s") as tree:
        volume.mark_saved(tree)
    assert volume.is_saved


def test_a_view_of_another_volume_saves_nothing(volume: MemoryVolume) -> None:
    make(volume, b"new")
    other = MemoryVolume()
    for _ in range(10):
        other.mark()
    with other.tree() as tree:
        volume.mark_saved(tree)
    assert not volume.is_saved
