"""A volume of another package that declares snapshots gets every verb that the built-in ones get."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import check_invariants, complaints, unmount_when_idle
from tests.mount.programs import failed, succeeded, vfsd
from tests.support import third_party_volume
from tests.support.toy_backend import install_backend
from vfsd.client.connection import ControlClient
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import socket_path


@pytest.fixture
def workspace(engine: str, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    packages = workdir / "packages"
    packages.mkdir()
    source = Path(third_party_volume.__file__).read_text()
    (workdir / "mnt").mkdir()
    name = f"{workdir.name}-third"
    with monkeypatch.context() as installed:  # only the daemon needs the package; other commands can be forked
        install_backend(packages, installed, "third", "third_party:open_third_party", source=source)
        succeeded(vfsd("mount", workdir / "mnt", "--backend", "third:x", "--name", name, "--engine", engine))
    workspace = Workspace.attach(name)
    yield workspace
    if (workdir / "mnt").is_mount():
        check_invariants(workspace)
        unmount_when_idle(workspace)
    assert complaints(name) == []


def files(workspace: Workspace) -> dict[str, str]:
    root = Path(workspace.path)
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.both_engines
def test_programs_use_it_as_any_file_system(workspace: Workspace) -> None:
    root = Path(workspace.path)
    (root / "d").mkdir()
    (root / "d" / "a").write_text("one")
    (root / "d" / "a").rename(root / "b")
    (root / "c").symlink_to("b")
    assert (root / "c").read_text() == "one"
    assert sorted(path.name for path in root.iterdir()) == ["b", "c", "d"]


def test_it_cannot_be_upgraded(workspace: Workspace) -> None:
    assert "the backend third cannot be upgraded" in failed(vfsd("upgrade", workspace.name))
    assert list(Path(workspace.path).iterdir()) == []


def test_a_restore_an_undo_and_a_redo_go_between_its_states(workspace: Workspace) -> None:
    root = Path(workspace.path)
    (root / "kept").write_text("same")
    (root / "a").write_text("one")
    taken = workspace.snapshot("first")
    (root / "a").write_text("two")
    (root / "new").mkdir()
    (root / "new" / "b").write_text("three")

    found = workspace.diff("first")
    assert [(change.path, change.change) for change in found.changes] == [
        ("a", "modified"), ("new", "added"), ("new/b", "added"),
    ]  # fmt: skip
    planned = workspace.restore("first", dry_run=True)
    done = workspace.restore("first")
    assert (done.counts, done.changes) == (planned.counts, planned.changes)
    assert files(workspace) == {"a": "one", "kept": "same"}
    workspace.undo()
    assert files(workspace) == {"a": "two", "kept": "same", "new/b": "three"}
    workspace.redo()
    assert files(workspace) == {"a": "one", "kept": "same"}
    assert taken.name in [info.name for info in workspace.snapshots()]
    workspace.drop("first")
    assert taken.name not in [info.name for info in workspace.snapshots()]


def test_an_archive_is_exported_imported_and_restored(workspace: Workspace, workdir: Path) -> None:
    root = Path(workspace.path)
    (root / "a").write_text("one")
    archive = workdir / "out.zip"
    assert workspace.export(archive).files == 1
    (root / "a").unlink()
    (root / "b").write_text("two")
    imported = workspace.import_archive(archive)
    assert (imported.files, imported.counts.added) == (1, 1)
    assert files(workspace) == {"a": "one", "b": "two"}
    restored = workspace.restore(archive)
    assert (restored.counts.removed, restored.counts.total) == (1, 1)
    assert files(workspace) == {"a": "one"}
    workspace.undo()
    assert files(workspace) == {"a": "one", "b": "two"}


def test_a_damaged_archive_changes_nothing(workspace: Workspace, workdir: Path) -> None:
    (Path(workspace.path) / "a").write_text("one")
    archive = workdir / "bad.zip"
    workspace.export(archive)
    data = bytearray(archive.read_bytes())
    at = data.index(b"one")
    data[at] ^= 1
    archive.write_bytes(data)
    (Path(workspace.path) / "a").write_text("two")
    with pytest.raises(OSError, match="the entry has a bad CRC: files/a"):
        workspace.restore(archive)
    assert files(workspace) == {"a": "two"}
    assert workspace.snapshots() == []


def test_the_agents_tools_change_it_in_one_step(workspace: Workspace) -> None:
    root = Path(workspace.path)
    (root / "a").write_text("one\n")
    assert (root / "a").stat().st_size == 4
    wanted = json.dumps({"old_text": "one", "new_text": "the first"})
    succeeded(vfsd("fs", "edit", "-w", workspace.name, "a", input=wanted))
    assert (root / "a").read_text() == "the first\n"
    found = json.loads(succeeded(vfsd("fs", "grep", "-w", workspace.name, "first")))["data"]["matches"]
    assert [(match["path"], match["line_number"]) for match in found] == [("a", 1)]


def test_status_and_check_answer(workspace: Workspace) -> None:
    (Path(workspace.path) / "a").write_text("one")
    workspace.snapshot()
    status = workspace.status()
    assert (status.backend, status.files, status.directories, status.size_bytes) == ("third:x", 1, 1, 3)
    assert (status.snapshots, status.changed_below, status.interrupted) == (1, None, None)
    with ControlClient(socket_path(workspace.name)) as client:
        client.call("check")


def test_what_it_does_not_declare_is_refused_in_one_line(workspace: Workspace) -> None:
    assert "overlay" in failed(vfsd("apply", "-w", workspace.name))
    with pytest.raises(OSError, match="overlay") as caught:
        workspace.discard()
    assert caught.value.errno == errno.EOPNOTSUPP


def test_an_unmount_that_would_lose_changes_is_refused_until_they_are_exported(
    workspace: Workspace, workdir: Path
) -> None:
    (Path(workspace.path) / "a").write_text("one")
    assert "were not exported: 1 file (3 B)" in failed(vfsd("unmount", workspace.name))
    workspace.export(workdir / "out.zip")
    succeeded(vfsd("unmount", workspace.name))
    assert not Path(workspace.path).is_mount()
