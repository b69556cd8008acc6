"""A memory volume as a whole: its methods, what a subclass may do, and what a fork(2) drops."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.volume import Caller
from tests.support.journals import JournalInMemory


@pytest.mark.parametrize("kind", [MemoryVolume, OverlayVolume])
def test_no_method_is_assigned_to_an_instance(kind: type[MemoryVolume], tmp_path: Path) -> None:
    volume = MemoryVolume() if kind is MemoryVolume else OverlayVolume(os.fsencode(tmp_path))
    journal = JournalInMemory()
    journal.keep(volume)
    volume.share_limit(None)
    volume.connect(is_known=True)
    assert {name for name in vars(volume) if callable(getattr(kind, name, None))} == set()


USER = Caller(0, 0)


def test_lookups_and_inodes_without_links_are_dropped() -> None:
    volume = MemoryVolume()
    kept = volume.mknod(1, b"kept", 0o100644, 0, USER)
    orphan = volume.mknod(1, b"orphan", 0o100644, 0, USER)
    volume.write(orphan.inode, 0, b"x" * 10_000)
    volume.unlink(1, b"orphan")
    assert volume.lookup_counts().keys() == {1, kept.inode, orphan.inode}
    used = volume.usage().used_bytes
    with volume.forking():
        pass
    volume.forked()
    assert volume.lookup_counts() == {1: 1}
    assert volume.usage().used_bytes == (used or 0) - 12_288
    assert volume.lookup(1, b"kept").inode == kept.inode
    volume.check_invariants()


def test_an_orphan_that_a_snapshot_holds_is_dropped_and_can_be_restored() -> None:
    volume = MemoryVolume()
    directory = volume.mkdir(1, b"directory", 0o755, USER)
    file = volume.mknod(directory.inode, b"file", 0o100644, 0, USER)
    volume.tmpfile(1, 0o600, USER)
    volume.take_snapshot("one")
    volume.unlink(directory.inode, b"file")
    volume.rmdir(1, b"directory")
    volume.restore_snapshot("one")
    directory = volume.lookup(1, b"directory")  # another one: the kernel holds the removed one
    volume.unlink(directory.inode, b"file")
    volume.forked()
    volume.check_invariants()
    assert volume.lookup_counts() == {1: 1}
    volume.restore_snapshot("one")
    assert volume.lookup(directory.inode, b"file").inode == file.inode
    volume.check_invariants()


def test_open_views_are_closed() -> None:
    volume = MemoryVolume()
    volume.mknod(1, b"file", 0o100644, 0, USER)
    kept = volume.usage().snapshot_bytes
    views = contextlib.ExitStack()
    views.enter_context(volume.tree())
    assert volume.usage().snapshot_bytes != kept
    volume.forked()  # the thread that reads the view is not in the new process
    assert volume.usage().snapshot_bytes == kept
    volume.take_snapshot("one")
    volume.drop_snapshot("one")
    assert volume.usage().snapshot_bytes == kept
    views.close()  # changes nothing any more
    assert volume.usage().snapshot_bytes == kept
    volume.check_invariants()


def test_memory_that_an_import_borrowed_is_taken_back() -> None:
    volume = MemoryVolume(max_memory=64 << 20)
    before = volume.usage().overhead_bytes
    stage = volume.new_stage()
    file = stage.mknod(1, b"file", 0o100644, 0, USER)
    stage.write(file.inode, 0, b"x" * (1 << 20))
    assert (volume.usage().overhead_bytes or 0) >= (before or 0) + (1 << 20)
    volume.forked()
    assert volume.usage().overhead_bytes == before
    volume.check_invariants()
