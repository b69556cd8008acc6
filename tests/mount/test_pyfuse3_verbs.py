"""Each verb once on a mount of the pyfuse3 engine; the other modules test the verbs on the native engine."""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import mounted
from tests.support.verbs import check_a_range_is_reverted
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.short


@pytest.fixture
def memory(workdir: Path) -> Iterator[Workspace]:
    with mounted(
        workdir / "m", engine="pyfuse3", name=f"v-{workdir.name}", exec_on_host=True, hide=["secret"]
    ) as workspace:
        (Path(workspace.path) / "file").write_text("old\n")
        yield workspace


def content(workspace: Workspace, name: str = "file") -> str:
    return (Path(workspace.path) / name).read_text()


def test_snapshots_are_listed_compared_restored_undone_redone_and_dropped(memory: Workspace) -> None:
    root = Path(memory.path)
    memory.snapshot("one")
    assert content(memory) == "old\n"  # the kernel has the page now
    (root / "file").write_text("new\n")
    (root / "more").touch()
    assert [snapshot.name for snapshot in memory.snapshots()] == ["one"]
    assert [(change.change, change.path) for change in memory.diff("one").changes] == [
        ("modified", "file"),
        ("added", "more"),
    ]
    assert b"+new" in memory.patch("one")
    assert memory.restore("one", dry_run=True).counts.total == 2
    memory.restore("one")
    assert (content(memory), (root / "more").exists()) == ("old\n", False)
    memory.undo()
    assert (content(memory), (root / "more").exists()) == ("new\n", True)
    memory.redo()
    assert content(memory) == "old\n"
    memory.drop("one")
    assert "one" not in {snapshot.name for snapshot in memory.snapshots()}


def test_a_range_is_reverted(memory: Workspace) -> None:
    (Path(memory.path) / "file").unlink()
    check_a_range_is_reverted(memory)
    assert memory.conflicts().workspaces == (memory.name,)


def test_an_archive_is_exported_and_imported(memory: Workspace, workdir: Path) -> None:
    memory.export(workdir / "state.zip")
    assert zipfile.ZipFile(workdir / "state.zip").read("files/file") == b"old\n"
    (Path(memory.path) / "file").write_text("new\n")
    memory.import_archive(workdir / "state.zip")
    assert content(memory) == "old\n"


def test_the_log_names_a_change_and_a_policy_refuses_one(memory: Workspace) -> None:
    assert "file" in {change.path for change in memory.log()}
    memory.policy(protect=["file"])
    with pytest.raises(OSError, match=r"\[Errno \d+\]") as refused:
        (Path(memory.path) / "file").write_text("new\n")
    assert refused.value.errno in {errno.EPERM, errno.EACCES, errno.EROFS}
    assert content(memory) == "old\n"


def test_commands_run_in_it_and_the_agents_filesystem_writes_to_it(memory: Workspace) -> None:
    memory.filesystem.write("by-tool", "text")
    assert memory.executor.run(["cat", "by-tool"]).stdout == b"text"


def test_a_fork_says_that_it_needs_the_native_engine(memory: Workspace, workdir: Path) -> None:
    with pytest.raises(OSError, match="native") as refused:
        memory.fork(workdir / "fork")
    assert refused.value.errno == errno.EOPNOTSUPP
    assert not (workdir / "fork").exists()


def test_changes_of_an_overlay_are_applied_and_discarded(workdir: Path) -> None:
    below = workdir / "below"
    below.mkdir()
    (below / "file").write_text("old\n")
    with mounted(workdir / "o", engine="pyfuse3", backend=f"overlay:{below}", name=f"o-{workdir.name}") as workspace:
        root = Path(workspace.path)
        (root / "file").write_text("new\n")
        workspace.discard()
        assert content(workspace) == "old\n"
        (root / "file").write_text("new\n")
        workspace.apply()
        assert (below / "file").read_text() == "new\n"


def test_a_directory_is_served_and_restored(workdir: Path) -> None:
    below = workdir / "below"
    below.mkdir()
    (below / "file").write_text("old\n")
    with mounted(workdir / "h", engine="pyfuse3", backend=f"host:{below}", name=f"h-{workdir.name}") as workspace:
        workspace.snapshot("one")
        (Path(workspace.path) / "file").write_text("new\n")
        assert (below / "file").read_text() == "new\n"
        workspace.restore("one")
        assert content(workspace) == "old\n"
