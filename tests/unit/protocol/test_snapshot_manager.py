"""SnapshotManager: snapshots of any filesystem as archives in a directory."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from protocol import Filesystem, HostFilesystem, InMemoryFilesystem, SnapshotableFilesystem, SnapshotManager
from protocol.errors import ArchiveError, SnapshotExistsError, SnapshotNotFoundError
from protocol.testing.filesystem import contents


class ForeignFilesystem:
    """A third party's: the methods of `Filesystem`, and no snapshots."""

    def __init__(self) -> None:
        self._inner = InMemoryFilesystem()

    def __getattr__(self, name: str) -> Any:
        if name in {"snapshot", "restore", "export_archive", "import_archive"}:
            raise AttributeError(name)
        return getattr(self._inner, name)


def on_host(directory: Path) -> Filesystem:
    (directory / "root").mkdir()
    return HostFilesystem(directory / "root")


BACKENDS: dict[str, Callable[[Path], Any]] = {
    "memory": lambda directory: InMemoryFilesystem(),
    "host": on_host,
    "foreign": lambda directory: ForeignFilesystem(),
}


@pytest.fixture(params=BACKENDS)
def filesystem(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Filesystem:
    return BACKENDS[request.param](tmp_path_factory.mktemp("backend"))


@pytest.fixture
def manager(filesystem: Filesystem, tmp_path: Path) -> SnapshotManager:
    return SnapshotManager(filesystem, tmp_path / "snapshots")


def fill(filesystem: Filesystem) -> dict[str, bytes | None]:
    filesystem.write("a", "content of a")
    filesystem.write_bytes("d/b", b"\0\xff" * 100_000)
    filesystem.write("d/odd name\n*", "x")
    filesystem.mkdir("empty")
    return contents(filesystem)


def test_the_foreign_filesystem_is_one_without_snapshots() -> None:
    assert isinstance(ForeignFilesystem(), Filesystem)
    assert not isinstance(ForeignFilesystem(), SnapshotableFilesystem)


def test_a_rollback_makes_the_state_as_it_was(filesystem: Filesystem, manager: SnapshotManager) -> None:
    before = fill(filesystem)
    manager.snapshot("s1")
    filesystem.delete("d", recursive=True)
    filesystem.write("d", "a file now")
    filesystem.delete("a")
    filesystem.write("a/b", "a directory now")
    filesystem.write("new", "x")

    assert manager.rollback("s1").snapshot_id == "s1"

    assert contents(filesystem) == before


def test_a_record_says_what_was_kept(filesystem: Filesystem, manager: SnapshotManager, tmp_path: Path) -> None:
    record = manager.snapshot("s1", tag="before the edit")

    assert (record.snapshot_id, record.tag, record.root_path) == ("s1", "before the edit", filesystem.root)
    assert record.commit_ref == str(tmp_path / "snapshots" / "s1.fs.zip")
    assert abs((datetime.now(UTC) - record.created_at).total_seconds()) < 3_600
    assert manager.get("s1") == record
    assert zipfile.is_zipfile(record.commit_ref)


def test_an_id_is_given_or_a_uuid_and_every_manager_lists_the_oldest_first(
    filesystem: Filesystem, manager: SnapshotManager, tmp_path: Path
) -> None:
    identity = uuid4()
    records = [manager.snapshot(name) for name in ("z", "a", identity, None)]

    assert records[2].snapshot_id == str(identity)
    assert manager.get(UUID(records[3].snapshot_id)) == records[3]
    assert manager.list_snapshots() == SnapshotManager(filesystem, tmp_path / "snapshots").list_snapshots() == records


def test_a_name_in_use_is_refused_and_the_snapshot_kept(filesystem: Filesystem, manager: SnapshotManager) -> None:
    before = fill(filesystem)
    record = manager.snapshot("s1", tag="first")
    filesystem.write("new", "x")

    with pytest.raises(SnapshotExistsError):
        manager.snapshot("s1", tag="second")

    assert manager.get("s1") == record
    manager.rollback("s1")
    assert contents(filesystem) == before


def test_a_deleted_snapshot_is_gone_and_its_id_free(manager: SnapshotManager, tmp_path: Path) -> None:
    manager.snapshot("s1")
    manager.snapshot("s2")

    manager.delete("s1")

    assert [record.snapshot_id for record in manager.list_snapshots()] == ["s2"]
    assert not list((tmp_path / "snapshots").glob("s1*"))
    manager.snapshot("s1")


def test_what_is_not_there_is_not_found(filesystem: Filesystem, manager: SnapshotManager) -> None:
    before = fill(filesystem)

    for call in (manager.get, manager.rollback, manager.delete):
        with pytest.raises(SnapshotNotFoundError):
            call("missing")

    assert contents(filesystem) == before


@pytest.mark.parametrize("name", ["", "../escape", "a/b", ".hidden", "a\0", "a\n", "x" * 129, "-rf"])
def test_an_id_that_is_no_file_name_is_refused(manager: SnapshotManager, tmp_path: Path, name: str) -> None:
    for call in (manager.snapshot, manager.get, manager.rollback, manager.delete):
        with pytest.raises(ValueError, match="id"):
            call(name)

    assert os.listdir(tmp_path) == ["snapshots"]
    assert os.listdir(tmp_path / "snapshots") == []


class FailsToRead(InMemoryFilesystem):
    def export_archive(self, path: str | os.PathLike[str]) -> None:
        Path(path).with_suffix(".partial").touch()
        Path(path).with_suffix(".partial").unlink()
        raise OSError(5, "Input/output error", "a")


class ForeignThatFailsToRead(ForeignFilesystem):
    def open_read(self, path: str) -> Any:
        raise OSError(5, "Input/output error", path)


@pytest.mark.parametrize("kind", [FailsToRead, ForeignThatFailsToRead])
def test_a_capture_that_fails_gives_no_id(tmp_path: Path, kind: Callable[[], Any]) -> None:
    filesystem = kind()
    filesystem.write("a", "x")
    manager = SnapshotManager(filesystem, tmp_path / "snapshots")

    with pytest.raises(OSError, match="Input/output error"):
        manager.snapshot("s1")

    assert manager.list_snapshots() == []
    assert os.listdir(tmp_path / "snapshots") == []
    with pytest.raises(SnapshotNotFoundError):
        manager.get("s1")


@pytest.mark.parametrize("target", BACKENDS)
def test_a_snapshot_of_one_backend_is_restored_into_any_other(
    filesystem: Filesystem, manager: SnapshotManager, tmp_path: Path, target: str
) -> None:
    before = fill(filesystem)
    record = manager.snapshot("s1")
    other = BACKENDS[target](tmp_path)
    other.write("was here before", "x")

    SnapshotManager(other, tmp_path / "elsewhere").restore(record.commit_ref)

    assert contents(other) == before


def test_a_damaged_archive_is_refused_and_changes_nothing(filesystem: Filesystem, manager: SnapshotManager) -> None:
    before = fill(filesystem)
    record = manager.snapshot("s1")
    data = bytearray(Path(record.commit_ref).read_bytes())
    data[len(data) // 2] ^= 0xFF
    Path(record.commit_ref).write_bytes(data)

    with pytest.raises(ArchiveError):
        manager.rollback("s1")

    assert contents(filesystem) == before


class ForeignThatRunsFull(ForeignFilesystem):
    room = 1 << 60

    def open_write(self, path: str, **options: Any) -> Any:
        if self.room <= 0:
            self.room = 1 << 60  # once: then there is room for what was there
            raise OSError(28, "No space left on device", path)
        self.room -= 1
        return self._inner.open_write(path, **options)


def test_a_restore_that_fails_half_way_puts_the_state_back(tmp_path: Path) -> None:
    filesystem = ForeignThatRunsFull()
    manager = SnapshotManager(filesystem, tmp_path / "snapshots")
    fill(filesystem)
    manager.snapshot("s1")
    for path in ("a", "d/b", "d/odd name\n*"):
        filesystem.write(path, "changed")
    before = contents(filesystem)
    filesystem.room = 1

    with pytest.raises(OSError, match="No space left"):
        manager.rollback("s1")

    filesystem.room = 1 << 60
    assert contents(filesystem) == before


def test_snapshots_are_for_their_owner_only(manager: SnapshotManager, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "snapshots").stat().st_mode) == 0o700


def test_snapshots_do_not_lie_in_what_they_are_snapshots_of(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside the filesystem"):
        SnapshotManager(HostFilesystem(tmp_path), tmp_path / "inside")

    assert os.listdir(tmp_path) == []


def test_an_archive_that_was_put_there_by_hand_is_a_snapshot(
    filesystem: Filesystem, manager: SnapshotManager, tmp_path: Path
) -> None:
    before = fill(filesystem)
    record = manager.snapshot("s1", tag="lost")
    (tmp_path / "snapshots" / "s1.fs.json").unlink()
    filesystem.write("new", "x")

    assert [(each.snapshot_id, each.tag) for each in manager.list_snapshots()] == [("s1", None)]
    manager.rollback(record.snapshot_id)
    assert contents(filesystem) == before
