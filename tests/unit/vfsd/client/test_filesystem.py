"""What `Workspace.filesystem` says of a snapshot or a restore that is incomplete.  The suites run on real mounts."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from protocol.errors import ArchiveError
from tests.support.fake_workspace import FakeDaemon, on_its_directory
from vfsd import Workspace
from vfsd.client.filesystem import WorkspaceFilesystem
from vfsd.operations.snapshots import ProblemRecord


@pytest.fixture
def files(daemon: FakeDaemon) -> WorkspaceFilesystem:
    return on_its_directory(Workspace.attach("demo")).filesystem


def test_a_snapshot_that_lacks_files_warns(files: WorkspaceFilesystem, daemon: FakeDaemon) -> None:
    daemon.unreadable = ["a", "b", "c", "d", "e"]

    with pytest.warns(RuntimeWarning, match="snap-1 lacks files that could not be read: a, b, c and 2 more"):
        files.snapshot()


def test_a_restore_that_leaves_paths_out_fails_and_names_them(files: WorkspaceFilesystem, daemon: FakeDaemon) -> None:
    taken = files.snapshot()
    daemon.live[b"a.txt"] = b"two\n"
    daemon.problems = [ProblemRecord("b.txt", "another program changed it")]

    with pytest.raises(OSError, match=r"1 path could not be restored from snap-1: b.txt \(another") as caught:
        files.restore(taken)

    assert caught.value.errno == errno.EIO
    assert daemon.live == {b"a.txt": b"one\n"}


def test_an_archive_that_the_daemon_refuses_is_an_archive_error(files: WorkspaceFilesystem, workdir: Path) -> None:
    with pytest.raises(ArchiveError, match="not a ZIP archive"):
        files.import_archive(str(workdir / "a.zip"))


def test_a_daemon_that_is_gone_is_a_connection_error(workdir: Path) -> None:
    with FakeDaemon("demo", str(workdir)):
        files = on_its_directory(Workspace.attach("demo")).filesystem

    with pytest.raises(ConnectionError):
        files.snapshot()
