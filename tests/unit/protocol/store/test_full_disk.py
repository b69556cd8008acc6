"""A full disk, under the store or under the directory: nothing is torn, and the error names the place."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store
from protocol.store.format.blobs import LARGE_BYTES
from tests.support.host_directories import mounted_tmpfs
from tests.unit.protocol.store.states import differences, state_of, state_of_tree

SIZE_BYTES = 4 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    place = tmp_path / "small"
    with mounted_tmpfs(place, max_bytes=SIZE_BYTES):
        yield place


@contextlib.contextmanager
def filled(place: Path, left_bytes: int = 0) -> Iterator[None]:
    """The file system at `place` with so much space left, for the length of a block."""
    with open(place / "ballast", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)) == 4096:
                pass
        file.truncate(max(0, os.fstat(file.fileno()).st_size - left_bytes))
    try:
        yield
    finally:
        (place / "ballast").unlink()


def content(size: int) -> bytes:
    return os.urandom(size)


@pytest.mark.parametrize("left_bytes", [0, 4096, 100_000, LARGE_BYTES])
def test_a_snapshot_that_does_not_fit_is_not_there_and_the_others_are_whole(
    small: Path, root: Path, left_bytes: int
) -> None:
    with Store(small / "store") as store:
        (root / "file").write_bytes(content(50_000))
        store.take("w", "before", DirectorySource(root))
        before = state_of(root)
        for number in range(10):
            (root / f"small-{number}").write_bytes(content(20_000))
        (root / "large").write_bytes(content(LARGE_BYTES * 2))
        with filled(small, left_bytes):
            with pytest.raises(OSError, match="No space left on device for the snapshot store") as caught:
                store.take("w", "after", DirectorySource(root))
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small / "store"))
            assert [info.name for info in store.snapshots("w")] == ["before"]
            assert store.check().damages == ()
            assert store.check().leftover_bytes == 0
            with store.tree("w", "before") as tree:
                assert differences(state_of_tree(tree), before) == []
        store.take("w", "after", DirectorySource(root))
        with store.tree("w", "after") as tree:
            assert differences(state_of_tree(tree), state_of(root)) == []


@pytest.mark.parametrize("left_bytes", [0, 4096, 50_000])
def test_a_restore_onto_a_full_disk_tears_nothing_and_is_finished_later(
    small: Path, tmp_path: Path, left_bytes: int
) -> None:
    root = small / "root"
    root.mkdir()
    with Store(tmp_path / "store") as store:
        for number in range(5):
            (root / f"small-{number}").write_bytes(content(30_000))
        (root / "large").write_bytes(content(LARGE_BYTES + 1))
        store.take("w", "s", DirectorySource(root))
        wanted = state_of(root)
        for path in root.iterdir():
            path.write_bytes(b"changed")
        changed = state_of(root)
        with filled(small, left_bytes):
            with pytest.raises(OSError, match="No space left on device") as caught:
                store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe"))
            assert os.fsdecode(caught.value.filename) in {os.fsdecode(path) for path in wanted.files}
            now = state_of(root)
            for path in now.files:
                assert now.files[path][5] in {wanted.files[path][5], changed.files[path][5]}, path
            assert store.interrupted("w") is not None
        assert store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe-2")).problems == ()
        assert differences(state_of(root), wanted) == []
        assert store.interrupted("w") is None


def test_a_restore_whose_safety_snapshot_does_not_fit_changes_nothing(small: Path, root: Path) -> None:
    with Store(small / "store") as store:
        (root / "file").write_bytes(b"before")
        store.take("w", "s", DirectorySource(root))
        (root / "file").write_bytes(content(100_000))
        changed = state_of(root)
        with filled(small):
            with pytest.raises(OSError, match="for the snapshot store"):
                store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe"))
            assert differences(state_of(root), changed) == []
            assert store.interrupted("w") is None
        store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="safe"))
        assert (root / "file").read_bytes() == b"before"


def test_dropping_and_collecting_make_room_on_a_full_disk(small: Path, root: Path) -> None:
    with Store(small / "store") as store:
        for name in ("first", "second", "third"):
            (root / "large").write_bytes(content(LARGE_BYTES + 1))
            for number in range(3):
                (root / f"small-{number}").write_bytes(content(20_000))
            store.take("w", name, DirectorySource(root))
        expected = state_of(root)
        with filled(small):
            store.drop("w", "first")
            store.drop("w", "second")
            report = store.collect_garbage()
            assert report.freed_bytes > 2 * LARGE_BYTES
            assert store.check().damages == ()
            (root / "new").write_bytes(content(30_000))
            store.take("w", "fourth", DirectorySource(root))
        (root / "new").unlink()
        with store.tree("w", "third") as tree:
            assert state_of_tree(tree).files[b"large"] == expected.files[b"large"]
