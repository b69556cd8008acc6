"""A volume that shows its snapshots keeps the contract of protocol.volume, and its own invariants."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import pytest

from protocol.adapters.snapshot_directory import FIRST_INODE, SnapshotDirectoryVolume, shown_name
from protocol.backends.memory import MemoryVolume
from protocol.testing import MakeVolume, VolumeContract
from protocol.tree import Tree
from protocol.volume import ROOT_INODE, SUPERUSER, Attributes, Volume
from protocol.volume_extensions import SnapshotInfo

T = TypeVar("T")


class States:
    """The snapshots of a volume, opened for each call."""

    def __init__(self, volume: MemoryVolume) -> None:
        self._volume = volume

    def infos(self) -> Sequence[SnapshotInfo]:
        return self._volume.snapshots()

    def using(self, info: SnapshotInfo, read: Callable[[Tree], T]) -> T:
        with self._volume.tree(info.name) as tree:
            return read(tree)


class TestSnapshotDirectoryVolume(VolumeContract):
    @pytest.fixture
    def volume(self) -> MakeVolume:
        def make(
            *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
        ) -> Volume:
            volume = MemoryVolume(max_bytes, max_inodes, clock=clock or time.time_ns)
            return SnapshotDirectoryVolume(volume, States(volume), is_visible=False)

        return make


@pytest.fixture
def below() -> MemoryVolume:
    return MemoryVolume()


@pytest.fixture
def volume(below: MemoryVolume) -> SnapshotDirectoryVolume:
    return SnapshotDirectoryVolume(below, States(below), is_visible=False)


def lookup(volume: SnapshotDirectoryVolume, *names: bytes) -> int:
    at = ROOT_INODE
    for name in names:
        at = cast("Attributes", volume.lookup(at, name)).inode
    return at


def test_numbers_are_the_same_after_the_kernel_forgot_them(
    below: MemoryVolume, volume: SnapshotDirectoryVolume
) -> None:
    directory = cast("Attributes", volume.mkdir(ROOT_INODE, b"dir", 0o755, SUPERUSER)).inode
    volume.mknod(directory, b"file", 0o100644, 0, SUPERUSER)
    below.take_snapshot("one")
    path = (b".snapshots", b"one", b"dir", b"file")

    number = lookup(volume, *path)
    assert number > FIRST_INODE
    dice = random.Random(1)
    for _ in range(200):
        names = path[: dice.randint(1, 4)]
        found = lookup(volume, *names)
        volume.check_invariants()
        if dice.random() < 0.7:
            volume.forget(found, dice.randint(1, 3))
            volume.check_invariants()
    for known in [lookup(volume, *path[:length]) for length in range(1, 5)]:
        volume.forget(known, 1 << 30)
    assert not volume.is_entered
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        volume.getattr(number)
    assert lookup(volume, *path) == number


def test_the_same_path_in_another_snapshot_has_another_number(
    below: MemoryVolume, volume: SnapshotDirectoryVolume
) -> None:
    volume.mknod(ROOT_INODE, b"file", 0o100644, 0, SUPERUSER)
    below.take_snapshot("one")
    below.take_snapshot("two")
    first = lookup(volume, b".snapshots", b"one", b"file")
    assert first != lookup(volume, b".snapshots", b"two", b"file")
    below.drop_snapshot("one")
    below.take_snapshot("one")
    assert first != lookup(volume, b".snapshots", b"one", b"file")


def test_the_kernel_is_asked_to_forget_dropped_snapshots_and_all_if_they_are_too_many(
    below: MemoryVolume, volume: SnapshotDirectoryVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    below.take_snapshot("one")
    below.take_snapshot("two")
    first, second = (lookup(volume, b".snapshots", name) for name in (b"one", b"two"))
    assert volume.names_to_invalidate(below.snapshots()) == []
    below.drop_snapshot("one")
    assert volume.names_to_invalidate(below.snapshots()) == [(b"one", first)]
    monkeypatch.setattr("protocol.adapters.snapshot_directory.MOST_BYTES", 10)
    assert volume.names_to_invalidate(below.snapshots()) == [(b"one", first), (b"two", second)]


def test_inodes_of_dropped_snapshots_are_stale_while_the_kernel_knows_them(
    below: MemoryVolume, volume: SnapshotDirectoryVolume
) -> None:
    volume.mknod(ROOT_INODE, b"file", 0o100644, 0, SUPERUSER)
    below.take_snapshot("one")
    below.take_snapshot("two")
    top, file = lookup(volume, b".snapshots", b"one"), lookup(volume, b".snapshots", b"one", b"file")
    lookup(volume, b".snapshots", b"two", b"file")
    assert volume.stale_inodes(below.snapshots()) == []
    below.drop_snapshot("one")
    assert volume.stale_inodes(below.snapshots()) == [(top, True), (file, False)]
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        volume.readdir(top, 0)
    volume.forget(file, 1)
    assert volume.stale_inodes(below.snapshots()) == [(top, True)]


def test_a_directory_that_its_state_lacks_is_stale_not_empty(
    below: MemoryVolume, volume: SnapshotDirectoryVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOENT would be the end of the listing for readdir(3)."""
    volume.mkdir(ROOT_INODE, b"dir", 0o755, SUPERUSER)
    below.take_snapshot("one")
    directory = lookup(volume, b".snapshots", b"one", b"dir")

    def missing(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file")

    monkeypatch.setattr(States, "using", missing)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        volume.readdir(directory, 0)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "x" * 256, "a\0b"])
def test_a_snapshot_whose_name_is_no_file_name_is_not_shown(
    below: MemoryVolume, volume: SnapshotDirectoryVolume, name: str
) -> None:
    info = SnapshotInfo(name, 1, 0, 0, 0, 0)
    assert shown_name(info) is None
    assert shown_name(SnapshotInfo("caf\udce9 \u202e", 1, 0, 0, 0, 0)) == os.fsencode("caf\udce9 \u202e")
    assert len(list(below.readdir(ROOT_INODE, 0))) == 2
    assert not volume.is_entered
