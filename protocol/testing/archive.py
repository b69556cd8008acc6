"""The snapshots of every `SnapshotableFilesystem`, and the archives that it exports and imports."""

from __future__ import annotations

import json
import stat
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.errors import ArchiveError, SnapshotNotFoundError
from protocol.filesystem import SnapshotableFilesystem
from protocol.testing.filesystem import FilesystemSuite, contents


class ArchiveContract(FilesystemSuite):
    """The contract of archives.  `filesystem` is a new, empty, writable `SnapshotableFilesystem`."""

    def test_an_archive_is_a_zip_file_that_others_can_read(
        self, filesystem: SnapshotableFilesystem, tmp_path: Path
    ) -> None:
        filesystem.write("d/file", "content")
        filesystem.write_bytes("ünïcode", b"\0\xff")
        filesystem.mkdir("empty")

        filesystem.export_archive(tmp_path / "a.zip")

        with zipfile.ZipFile(tmp_path / "a.zip") as archive:
            manifest = json.loads(archive.read("manifest.json"))
            assert (manifest["version"], manifest["file_count"], manifest["total_bytes"]) == ("1", 2, 9)
            assert archive.read("files/d/file") == b"content"
            assert archive.read("files/ünïcode") == b"\0\xff"
            assert "files/empty/" in archive.namelist()

    def test_an_import_restores_the_exported_state(self, filesystem: SnapshotableFilesystem, tmp_path: Path) -> None:
        for path in ("a", "d/b", "d/e/c", "odd name\n*"):
            filesystem.write(path, f"content of {path}")
        filesystem.mkdir("empty/inner")
        before = contents(filesystem)
        filesystem.export_archive(tmp_path / "a.zip")
        for entry in filesystem.list():
            filesystem.delete(entry.path, recursive=True)
        filesystem.write("something/else", "x")

        filesystem.import_archive(tmp_path / "a.zip")

        assert contents(filesystem) == before

    def test_an_archive_of_another_program_is_imported(
        self, filesystem: SnapshotableFilesystem, tmp_path: Path
    ) -> None:
        filesystem.write("old", "x")
        _write_zip(tmp_path / "a.zip", {"files/run.sh": (b"#!/bin/sh\n", 0o755), "files/d/plain": (b"plain", 0o640)})

        filesystem.import_archive(tmp_path / "a.zip")

        assert contents(filesystem) == {"d": None, "d/plain": b"plain", "run.sh": b"#!/bin/sh\n"}
        assert stat.S_IMODE(filesystem.stat("run.sh").mode) == 0o755
        assert stat.S_IMODE(filesystem.stat("d/plain").mode) == 0o640

    def test_the_mode_of_a_file_survives_every_way_of_writing_it(
        self, filesystem: SnapshotableFilesystem, tmp_path: Path
    ) -> None:
        _write_zip(tmp_path / "a.zip", {"files/run.sh": (b"#!/bin/sh\n", 0o750)})
        filesystem.import_archive(tmp_path / "a.zip")

        filesystem.write("run.sh", "overwritten")
        filesystem.write("run.sh", ", appended", mode="append")
        with filesystem.open_write("run.sh") as writer:
            writer.write(b"streamed")

        assert stat.S_IMODE(filesystem.stat("run.sh").mode) == 0o750
        assert contents(filesystem) == {"run.sh": b"streamed"}

    def test_symlinks_are_followed_only_inside_the_root(
        self, filesystem: SnapshotableFilesystem, tmp_path: Path
    ) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_text("secret")
        _write_zip(
            tmp_path / "a.zip",
            {
                "files/d/file": (b"inside", 0o644),
                "files/link": (b"d/file", stat.S_IFLNK | 0o777),
                "files/to-directory": (b"./d/../d", stat.S_IFLNK | 0o777),
                "files/dangling": (b"nowhere", stat.S_IFLNK | 0o777),
                "files/loop": (b"loop", stat.S_IFLNK | 0o777),
                "files/up": (b"../" * 30 + str(outside)[1:].encode(), stat.S_IFLNK | 0o777),
            },
        )
        filesystem.import_archive(tmp_path / "a.zip")

        assert filesystem.read("link").content == "inside"
        assert filesystem.read("to-directory/file").content == "inside"
        assert filesystem.stat("link").is_symlink
        assert filesystem.stat("link").is_file
        assert not filesystem.exists("dangling")
        assert not filesystem.exists("loop")
        assert not filesystem.exists("up/secret")
        for call in (filesystem.read, filesystem.list, filesystem.stat, filesystem.delete, filesystem.open_write):
            with pytest.raises(PermissionError, match="outside"):
                call("up/secret")
        with pytest.raises(PermissionError, match="outside"):
            filesystem.write("up/new", "x")
        assert sorted(path.name for path in outside.iterdir()) == ["secret"]

        filesystem.write("link", "through the link")
        assert filesystem.read("d/file").content == "through the link"
        assert filesystem.stat("link").is_symlink
        assert filesystem.delete("to-directory", recursive=True) == 1
        assert filesystem.delete("up") == 1
        assert filesystem.exists("d/file")
        assert (outside / "secret").read_text() == "secret"

    @pytest.mark.parametrize("name", ["files/../escape", "/files/x", "files/a\\..\\..\\x/../../y"])
    def test_a_hostile_archive_is_refused_and_changes_nothing(
        self, filesystem: SnapshotableFilesystem, tmp_path: Path, name: str
    ) -> None:
        filesystem.write("file", "x")
        _write_zip(tmp_path / "a.zip", {"files/fine": (b"fine", 0o644), name: (b"x", 0o644)})

        with pytest.raises(ArchiveError):
            filesystem.import_archive(tmp_path / "a.zip")

        assert contents(filesystem) == {"file": b"x"}

    def test_a_file_that_is_no_archive_is_refused_and_changes_nothing(
        self, filesystem: SnapshotableFilesystem, tmp_path: Path
    ) -> None:
        filesystem.write("file", "x")
        (tmp_path / "a.zip").write_bytes(b"no ZIP file")

        with pytest.raises(ArchiveError):
            filesystem.import_archive(tmp_path / "a.zip")
        with pytest.raises(FileNotFoundError):
            filesystem.import_archive(tmp_path / "missing.zip")

        assert contents(filesystem) == {"file": b"x"}

    def test_an_export_does_not_change_an_existing_file(
        self, filesystem: SnapshotableFilesystem, tmp_path: Path
    ) -> None:
        (tmp_path / "a.zip").write_bytes(b"precious")

        with pytest.raises(FileExistsError):
            filesystem.export_archive(tmp_path / "a.zip")

        assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"precious"]

    def test_an_export_that_fails_leaves_nothing(self, filesystem: SnapshotableFilesystem, tmp_path: Path) -> None:
        filesystem.write("file", "x")

        with pytest.raises(OSError, match="missing"):
            filesystem.export_archive(tmp_path / "missing" / "a.zip")

        assert list(tmp_path.iterdir()) == []


def _write_zip(path: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """Write an archive as another program would; `files` maps each entry to (content, mode)."""
    total = sum(len(data) for data, mode in files.values() if not stat.S_ISLNK(mode))
    count = sum(not stat.S_ISLNK(mode) for _, mode in files.values())
    manifest = {
        "version": "1",
        "created_at": "2024-01-01T00:00:00+00:00",
        "file_count": count,
        "total_bytes": total,
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for name, (data, mode) in files.items():
            info = zipfile.ZipInfo(name)
            info.create_system = 3
            info.external_attr = (mode if stat.S_IFMT(mode) else stat.S_IFREG | mode) << 16
            archive.writestr(info, data)


class SnapshotContract(FilesystemSuite):
    """The contract of snapshots.  `filesystem` is a new, empty, writable `SnapshotableFilesystem`."""

    def test_it_has_every_method_of_the_contract(self, filesystem: SnapshotableFilesystem) -> None:
        assert isinstance(filesystem, SnapshotableFilesystem)

    def test_a_snapshot_describes_itself(self, filesystem: SnapshotableFilesystem) -> None:
        first = filesystem.snapshot(tag="before the edit")
        second = filesystem.snapshot()

        assert (first.tag, second.tag) == ("before the edit", None)
        assert first.root_path == filesystem.root
        assert first.commit_ref
        assert first.snapshot_id != second.snapshot_id
        assert abs((datetime.now(UTC) - first.created_at).total_seconds()) < 3_600

    def test_a_restore_undoes_every_kind_of_change(self, filesystem: SnapshotableFilesystem) -> None:
        for path in ("kept", "changed", "deleted", "d/inner", "becomes-directory", "becomes-file/inner"):
            filesystem.write(path, f"content of {path}")
        filesystem.mkdir("empty")
        before = contents(filesystem)
        snapshot = filesystem.snapshot()

        filesystem.write("changed", "something else")
        filesystem.write("kept", "more", mode="append")
        filesystem.delete("deleted")
        filesystem.delete("d", recursive=True)
        filesystem.delete("empty")
        filesystem.delete("becomes-directory")
        filesystem.write("becomes-directory/inner", "x")
        filesystem.delete("becomes-file", recursive=True)
        filesystem.write("becomes-file", "x")
        filesystem.write("new-file", "x")
        filesystem.write("new/deep/file", "x")
        filesystem.restore(snapshot)

        assert contents(filesystem) == before

    def test_later_changes_do_not_change_a_snapshot(self, filesystem: SnapshotableFilesystem) -> None:
        filesystem.write("file", "one")
        one = filesystem.snapshot()
        filesystem.write("file", "two")
        two = filesystem.snapshot()
        filesystem.write("file", "three")

        found = []
        for snapshot in (one, two, one, two):
            filesystem.restore(snapshot)
            found.append(filesystem.read("file").content)
            filesystem.write("file", "something else")

        assert found == ["one", "two", "one", "two"]

    def test_an_empty_state_can_be_restored(self, filesystem: SnapshotableFilesystem) -> None:
        snapshot = filesystem.snapshot()
        filesystem.write("a/b", "x")

        filesystem.restore(snapshot)

        assert contents(filesystem) == {}

    def test_unchanged_files_keep_their_time(self, filesystem: SnapshotableFilesystem) -> None:
        filesystem.write("kept", "x")
        filesystem.write("changed", "x")
        before = filesystem.stat("kept").modified_at
        snapshot = filesystem.snapshot()
        filesystem.write("changed", "y")

        filesystem.restore(snapshot)

        assert filesystem.stat("kept").modified_at == before

    def test_restoring_an_unknown_snapshot_fails_and_changes_nothing(self, filesystem: SnapshotableFilesystem) -> None:
        filesystem.write("file", "x")
        snapshot = filesystem.snapshot()
        filesystem.write("file", "y")
        stranger = replace(snapshot, snapshot_id="stranger", commit_ref="stranger")

        with pytest.raises(SnapshotNotFoundError):
            filesystem.restore(stranger)

        assert contents(filesystem) == {"file": b"y"}
