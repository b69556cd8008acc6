"""SnapshotContract: the snapshots of every `SnapshotableFilesystem`."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from protocol.errors import SnapshotNotFoundError
from protocol.filesystem import SnapshotableFilesystem
from protocol.testing.checks import FilesystemSuite, contents


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
