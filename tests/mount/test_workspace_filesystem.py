"""`Workspace.filesystem` and its async twin: the filesystem suites over a workspace, whose own snapshots they take."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from protocol import Filesystem, SnapshotableFilesystem
from protocol.errors import NotMountedError, SnapshotNotFoundError
from protocol.testing import (
    ArchiveContract,
    FilesystemContract,
    ReadOnlyContract,
    SnapshotContract,
    StreamingContract,
)
from protocol.tools import FileDeleted, FileEvent, FileWritten
from tests.mount.conftest import BACKENDS, mounted
from tests.support.contracts_on_mounts import BlockingFilesystem, read_only_archive
from tests.support.session_directories import new_directory
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.connection import daemon_end
from vfsd.client.filesystem import WorkspaceFilesystem
from vfsd.client.workspace import Workspace
from vfsd.machine.mounts import clear_dead_mount

Shared: TypeAlias = tuple[Workspace, SnapshotableFilesystem]


@pytest.fixture(scope="module", params=[*BACKENDS, "asyncio", "trio"])
def shared(request: pytest.FixtureRequest, session_dir: str) -> Iterator[Shared]:
    """A workspace on each backend; one in memory from either loop.  It has the snapshot "empty"."""
    top, kind = new_directory(session_dir, "shared"), request.param
    options = {"backend": kind if kind in BACKENDS else "memory", "store": top / "store" if kind == "host" else None}
    with mounted(top / "m", engine="native", name=f"{top.name}-{kind}", **options) as workspace:
        workspace.snapshot("empty")
        if kind in BACKENDS:
            yield workspace, workspace.filesystem
            return
        with start_blocking_portal(kind) as portal:
            attached = portal.call(AsyncWorkspace.attach, workspace.name)
            yield workspace, BlockingFilesystem(attached.async_filesystem, portal)


class OnWorkspace:
    @pytest.fixture
    def filesystem(self, shared: Shared) -> Iterator[SnapshotableFilesystem]:
        workspace, files = shared
        yield files
        workspace.restore("empty")
        names = [snapshot.name for snapshot in workspace.snapshots(changes=False) if snapshot.name != "empty"]
        if names:
            workspace.drop(*names)


class TestFilesystem(OnWorkspace, FilesystemContract):
    pass


class TestStreaming(OnWorkspace, StreamingContract):
    pass


class TestSnapshots(OnWorkspace, SnapshotContract):
    pass


class TestArchives(OnWorkspace, ArchiveContract):
    pass


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    directory = tmp_path_factory.mktemp("read-only")
    options = {"archive": read_only_archive(directory), "read_only": True, "engine": "native"}
    with mounted(directory / "mount", name="filesystem-ro", **options) as workspace:
        yield workspace


class TestReadOnly(ReadOnlyContract):
    @pytest.fixture
    def filesystem(self, read_only: Workspace) -> Filesystem:
        return read_only.filesystem


def test_a_snapshot_is_one_of_the_workspace(workspace: Workspace) -> None:
    files = workspace.filesystem
    taken = files.snapshot(tag="tool call 7")

    (listed,) = workspace.snapshots()

    assert (listed.name, listed.tag, listed.created_at) == (taken.commit_ref, "tool call 7", taken.created_at)
    assert files.get(taken.commit_ref) == taken
    assert files is workspace.filesystem
    with pytest.raises(SnapshotNotFoundError, match="nothing"):
        files.get("nothing")


@pytest.mark.extended
def test_another_program_restores_it_by_name_and_the_mount_shows_it(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("one")
    taken = workspace.filesystem.snapshot()
    (root / "file").write_text("changed")
    code = """
import sys
from vfsd import Workspace
files = Workspace.attach(sys.argv[1]).filesystem
files.restore(files.get(sys.argv[2]))
"""

    subprocess.run([sys.executable, "-c", code, workspace.name, taken.commit_ref], check=True, timeout=60)

    assert (root / "file").read_text() == "one"
    workspace.undo()
    assert (root / "file").read_text() == "changed"


def test_a_name_that_was_used_again_is_another_snapshot(workspace: Workspace, root: Path) -> None:
    files = workspace.filesystem
    taken = files.snapshot()
    workspace.drop(taken.commit_ref)
    (root / "file").write_text("x")
    again = workspace.snapshot(taken.commit_ref)
    assert again.created_at != taken.created_at

    with pytest.raises(SnapshotNotFoundError, match=taken.commit_ref):
        files.restore(taken)

    assert (root / "file").read_text() == "x"


def test_a_stored_snapshot_is_restored_after_the_workspace_was_mounted_again(workdir: Path) -> None:
    below, options = workdir / "below", {"store": workdir / "store"}
    below.mkdir()
    (below / "file").write_text("one")
    with Workspace.mount(workdir / "first", f"host:{below}", **options) as first:
        taken = first.filesystem.snapshot()
        first.filesystem.write("file", "changed")

    with Workspace.mount(workdir / "second", f"host:{below}", **options) as second:
        second.filesystem.restore(taken)

    assert (below / "file").read_text() == "one"


def test_changes_through_the_object_are_published_when_they_are_made(workdir: Path) -> None:
    with Workspace.mount(workdir / "mount") as workspace:
        files, seen = workspace.filesystem, list[tuple[FileEvent, bool]]()
        unsubscribe = files.events.subscribe(lambda event: seen.append((event, files.exists("d/a"))))

        with files.open_write("d/a") as writer:
            writer.write(b"12")
            assert seen == []
        files.write("d/a", "3", mode="append")
        files.delete("d", recursive=True)
        assert seen == [(FileWritten("d/a", 2), True), (FileWritten("d/a", 1), True), (FileDeleted("d", 2), False)]

        seen.clear()
        with contextlib.suppress(KeyError), files.open_write("b") as writer:
            writer.write(b"discarded")
            raise KeyError
        with pytest.raises(FileNotFoundError):
            files.delete("b")
        Path(workspace.path, "c").write_text("another program")
        assert seen == []

        unsubscribe()
        files.write("e", "")
        assert seen == []


def _assert_refused(files: WorkspaceFilesystem) -> None:
    calls: list[Callable[[], object]] = [
        lambda: files.write("kept", "x"),
        lambda: files.write("new/name", "x", mode="create"),
        lambda: files.write("kept", "x", mode="append"),
        lambda: files.mkdir("directory"),
        lambda: files.delete("kept"),
        lambda: files.read("kept"),
        lambda: files.exists("kept"),
        lambda: files.stat("."),
        files.list,
        lambda: files.glob("*"),
        lambda: files.grep("x"),
        files.snapshot,
    ]
    for call in calls:
        with pytest.raises(NotMountedError):
            call()


def test_no_call_works_on_the_directory_below_a_mount_that_is_gone_or_on_the_next_mount_there(workdir: Path) -> None:
    place, name = workdir / "mount", workdir.name
    workspace = Workspace.mount(place, name=name)
    files, never_used = workspace.filesystem, Workspace.attach(name)
    awaited = AsyncWorkspace(workspace._daemon, unmount_at_exit=False)
    files.write("kept", "x")
    Workspace.attach(name).unmount()

    _assert_refused(files)
    with pytest.raises(NotMountedError):
        never_used.filesystem.write("kept", "x")
    assert not any(place.iterdir())

    with Workspace.mount(place, name=name, exec_on_host=True) as other:
        _assert_refused(files)
        assert not any(place.iterdir())

        touch = ["touch", "ran"]
        for call in (
            lambda: workspace.snapshot("s"),
            lambda: workspace.executor.run(touch),
            workspace.unmount,
            lambda: other.merge(workspace),
            lambda: anyio.run(awaited.snapshot, "s"),
            lambda: anyio.run(awaited.async_executor.run, touch),
            lambda: anyio.run(awaited.async_executor.start, touch),
            lambda: anyio.run(awaited.unmount),
        ):
            with pytest.raises(NotMountedError):
                call()
        with workspace:
            pass  # its end unmounts no other workspace
        assert (other.snapshots(), list(place.iterdir())) == ([], [])


def test_every_call_notices_a_daemon_that_has_died(workdir: Path) -> None:
    workspace = Workspace.mount(workdir / "mount")
    files = workspace.filesystem
    files.write("kept", "x")
    assert files.read("kept").content == "x"  # from now on the kernel could answer from its caches

    with daemon_end(workspace.pid) as wait_ended:
        os.kill(workspace.pid, signal.SIGKILL)
        wait_ended(10)

    _assert_refused(files)
    clear_dead_mount(workspace.path)
    _assert_refused(files)
