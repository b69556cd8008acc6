"""`--persist` of overlays: a resumed overlay has its changes, snapshots and base; what changed below is noticed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import MountIt
from tests.mount.programs import succeeded, vfsd
from tests.mount.test_keeper_backends import numbers
from tests.mount.test_overlay_backend import contents
from tests.mount.test_persist import Persistent, check_killed_writer, until_refused
from tests.support.rights import need_root
from tests.support.tree_hash import tree_hash
from vfsd.client.workspace import Workspace

BLOCK = 128 * 1024


class PersistentOverlay(Persistent):
    """An overlay over `below` that is mounted again and again."""

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self.below = workdir / "below"
        self.below.mkdir()
        self.backend = f"overlay:{self.below}"

    def mount(self, **options: Any) -> Workspace:
        return super().mount(**{"backend": self.backend, **options})


@pytest.fixture
def overlay(workdir: Path) -> Iterator[PersistentOverlay]:
    workspace = PersistentOverlay(workdir)
    (workspace.below / "dir" / "deep").mkdir(parents=True)
    (workspace.below / "dir" / "deep" / "untouched").write_bytes(b"untouched")
    (workspace.below / "dir" / "large").write_bytes(b"l" * (3 * BLOCK))
    (workspace.below / "file").write_bytes(b"file")
    os.link(workspace.below / "file", workspace.below / "dir" / "second name")
    (workspace.below / "gone").write_bytes(b"gone")
    (workspace.below / "moved").mkdir()
    (workspace.below / "moved" / "inside").write_bytes(b"inside")
    yield workspace
    workspace.end()


def change(root: Path) -> None:
    (root / "new").write_bytes(b"new")
    with (root / "dir" / "large").open("r+b") as file:
        file.seek(BLOCK + 10)
        file.write(b"changed")
    os.chmod(root / "file", 0o600)
    (root / "gone").unlink()
    (root / "moved").rename(root / "dir" / "elsewhere")


def diff(workspace: Workspace) -> list[tuple[str, str]]:
    """What differs from the directory below."""
    return sorted((change.path, change.change) for change in workspace.diff("").changes)


@pytest.mark.parametrize("engine", ["native", "pyfuse3"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_changes_snapshots_history_and_inodes_are_there_again(
    overlay: PersistentOverlay, engine: str, is_killed: bool
) -> None:
    workspace = overlay.mount(engine=engine)
    root = overlay.path
    os.stat(root / "dir" / "deep" / "untouched")
    change(root)
    workspace.snapshot("one")
    (root / "new").write_bytes(b"second")
    (root / "dir" / "elsewhere" / "inside").unlink()
    workspace.restore("one")
    before = tree_hash(root), numbers(root), diff(workspace)
    if is_killed:
        overlay.kill()
    else:
        workspace.unmount()
    workspace = overlay.mount(engine=engine)
    assert diff(workspace) == before[2]
    assert (tree_hash(root), numbers(root)) == before[:2]
    workspace.undo()
    assert (root / "new").read_bytes() == b"second"
    assert not (root / "dir" / "elsewhere" / "inside").exists()
    workspace.redo()
    assert tree_hash(root) == before[0]
    succeeded(vfsd("discard", "-w", workspace.name))
    assert tree_hash(root) == tree_hash(overlay.below)
    assert numbers(root) == numbers(overlay.below)


def test_a_resumed_overlay_can_be_applied_forked_and_compacted(overlay: PersistentOverlay, workdir: Path) -> None:
    overlay.mount()
    change(overlay.path)
    overlay.kill()
    workspace = overlay.mount()
    shown = tree_hash(overlay.path)
    succeeded(vfsd("compact", "-w", workspace.name))
    fork = workdir / "fork"
    succeeded(vfsd("fork", fork, "-w", workspace.name, "--name", f"{workspace.name}-fork"))
    assert tree_hash(fork) == shown
    (fork / "of the fork").write_bytes(b"fork")
    succeeded(vfsd("merge", f"{workspace.name}-fork", "-w", workspace.name))
    succeeded(vfsd("unmount", f"{workspace.name}-fork", "--discard"))
    assert (overlay.path / "of the fork").read_bytes() == b"fork"
    overlay.kill()
    workspace = overlay.mount()
    shown = contents(overlay.path)
    succeeded(vfsd("apply", "-w", workspace.name))
    assert contents(overlay.below) == shown
    assert diff(workspace) == []


@pytest.mark.extended
@pytest.mark.parametrize("size", [1000, 5 * BLOCK])
@pytest.mark.parametrize("is_compacted", [True, False])
def test_after_an_apply_and_a_crash_snapshots_have_the_old_content(
    overlay: PersistentOverlay, size: int, is_compacted: bool
) -> None:
    (overlay.below / "file").write_bytes(b"o" * size)
    workspace = overlay.mount()
    (overlay.path / "new").write_bytes(b"applied")
    workspace.snapshot("before")
    (overlay.path / "file").write_bytes(b"n" * size)
    (overlay.path / "left").write_bytes(b"not applied")
    succeeded(vfsd("apply", "-w", workspace.name, "file", "dir/second name", "new"))
    if is_compacted:
        succeeded(vfsd("compact", "-w", workspace.name))
    overlay.kill()
    workspace = overlay.mount()
    assert diff(workspace) == [("left", "added")]
    assert (overlay.path / "file").read_bytes() == b"n" * size
    workspace.restore("before")
    assert (overlay.path / "file").read_bytes() == b"o" * size
    assert ("file", "modified") in diff(workspace)
    succeeded(vfsd("apply", "-w", workspace.name))
    assert (overlay.below / "file").read_bytes() == b"o" * size


def test_files_that_changed_below_meanwhile_are_treated_as_under_a_mount(overlay: PersistentOverlay) -> None:
    overlay.mount()
    change(overlay.path)
    overlay.kill()
    (overlay.below / "dir" / "large").write_bytes(b"L" * (3 * BLOCK))
    (overlay.below / "dir" / "deep" / "untouched").write_bytes(b"another")
    (overlay.below / "dir" / "deep" / "late").write_bytes(b"late")
    (overlay.below / "late").write_bytes(b"late")
    workspace = overlay.mount()
    root = overlay.path
    assert (root / "dir" / "deep" / "untouched").read_bytes() == b"another"
    assert (root / "dir" / "deep" / "late").read_bytes() == b"late"
    assert not (root / "late").exists()  # the workspace changed this directory, so it has the entries of that moment
    with (root / "dir" / "large").open("rb") as file:
        file.seek(BLOCK)
        assert file.read(20) == b"l" * 10 + b"changed" + b"l" * 3
        file.seek(0)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            file.read(20)
    refused = vfsd("apply", "-w", workspace.name, "dir/large")
    assert refused.returncode == 1
    assert "changed by another program" in refused.stderr
    succeeded(vfsd("discard", "-w", workspace.name, "dir/large"))


def test_what_fills_the_disk_of_the_journal_can_be_applied(overlay: PersistentOverlay, workdir: Path) -> None:
    need_root()
    disk = workdir / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
    try:
        overlay.journal = disk / "journal"
        workspace = overlay.mount()
        refused = until_refused(lambda number: (overlay.path / f"n{number}").write_bytes(os.urandom(500_000)))
        assert refused == errno.ENOSPC
        written = {path.name: path.read_bytes() for path in overlay.path.glob("n*")}
        succeeded(vfsd("apply", "-w", workspace.name))
        assert {path.name: path.read_bytes() for path in overlay.below.glob("n*")} == written
        overlay.kill()
        assert diff(overlay.mount()) == []
    finally:
        overlay.end()
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("meanwhile", ["mounted", "unmounted"])
def test_files_of_a_snapshot_that_go_below_are_lost_in_it_also_if_the_workspace_is_not_mounted(
    overlay: PersistentOverlay, meanwhile: str
) -> None:
    workspace = overlay.mount()
    assert len(list(overlay.path.rglob("*"))) == len(list(overlay.below.rglob("*")))
    workspace.snapshot("before")
    for directory in ("", "dir", "moved"):  # the journal has the names in directories with changes
        (overlay.path / directory / "new").touch()
    if meanwhile == "unmounted":
        workspace.unmount()
    (overlay.below / "gone").unlink()
    (overlay.below / "dir" / "large").unlink()
    (overlay.below / "dir" / "large").mkdir()
    (overlay.below / "moved" / "inside").unlink()
    (overlay.below / "moved" / "inside").symlink_to("/etc/passwd")
    if meanwhile == "unmounted":
        workspace = overlay.mount()
    lost = ["dir/large", "gone", "moved/inside"]
    found = workspace.diff("before")
    assert [change.path for change in found.changes if change.change == "modified"] == lost
    assert sorted(workspace.restore("before").problems) == lost
    for path in lost:
        for place in (overlay.path / ".snapshots" / "before", overlay.path):
            with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                (place / path).read_bytes()


def test_an_overlay_over_another_directory_is_refused(overlay: PersistentOverlay) -> None:
    workspace = overlay.mount()
    change(overlay.path)
    workspace.unmount()
    overlay.below.rename(overlay.below.with_name("renamed"))
    overlay.below.mkdir()
    with pytest.raises(OSError, match="is not that one") as caught:
        overlay.mount()
    assert str(overlay.below) in str(caught.value)
    workspace = overlay.mount(backend=f"overlay:{overlay.below.with_name('renamed')}")
    assert (overlay.path / "new").read_bytes() == b"new"
    workspace.unmount()
    with pytest.raises(OSError, match="neither --include nor --exclude"):
        overlay.mount(backend=f"overlay:{overlay.below.with_name('renamed')}", exclude=["*.o"])


@pytest.mark.parametrize("layer", ["archive", "snapshot"])
def test_overlays_over_archives_and_stored_snapshots_are_resumed(
    overlay: PersistentOverlay, workdir: Path, layer: str
) -> None:
    source = workdir / "source"
    source.mkdir()
    with Workspace.mount(source, name=f"{workdir.name}-source", backend=f"host:{overlay.below}") as of_host:
        if layer == "archive":
            archive = workdir / "below.zip"
            of_host.export(archive)
            overlay.backend = f"overlay:{archive}"
        else:
            of_host.snapshot("kept")
            overlay.backend = f"overlay:snapshot:kept@{overlay.below}"
        overlay.mount()
        change(overlay.path)
        before = tree_hash(overlay.path), numbers(overlay.path)
        overlay.kill()
        overlay.mount()
        assert (tree_hash(overlay.path), numbers(overlay.path)) == before
        overlay.kill()
        if layer == "archive":
            (overlay.below / "file").write_bytes(b"FILE")
            archive.unlink()
            of_host.export(archive)
            with pytest.raises(OSError, match="is not that one"):
                overlay.mount()


def test_the_journal_of_an_overlay_is_checked_without_its_directory(overlay: PersistentOverlay) -> None:
    workspace = overlay.mount()
    change(overlay.path)
    workspace.unmount()
    overlay.below.rename(overlay.below.with_name("renamed"))
    said = succeeded(vfsd("persisted", "check", "--journal-dir", overlay.journal))
    assert "the journal is complete" in said
    assert "that the workspace changed" in said


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(3))
def test_what_a_writer_was_answered_is_there_after_kill_9(workdir: Path, seed: int) -> None:
    workspace = PersistentOverlay(workdir)
    before = {f"f{number}": bytes([number]) * (number * 12_345) for number in range(0, 30, 2)}
    for name, content in before.items():
        (workspace.below / name).write_bytes(content)
    workspace.mount()
    check_killed_writer(workspace, seed, before)
    workspace.end()


def test_a_snapshot_below_a_kept_journal_stays(
    overlay: PersistentOverlay, mount: MountIt, monkeypatch: pytest.MonkeyPatch, workdir: Path
) -> None:
    state = workdir / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    of_host = mount(name="of-host", backend=f"host:{overlay.below}")
    for name in ("base", "second", "third"):
        of_host.snapshot(name)
        (overlay.below / "file").write_text(name)
    place = workdir / "over-base"
    place.mkdir()
    over = Workspace.mount(place, name="over-base", backend=f"overlay:snapshot:base@{overlay.below}", persist=True)
    (place / "mine").write_text("kept")
    over.unmount()
    key = f"host:{overlay.below}"

    said = succeeded(vfsd("prune", "--keep-last", "1", "--gc", key))
    assert "below the journal over-base" in said
    assert [info.name for info in of_host.snapshots()] == ["base", "third"]
    refused = vfsd("store", "drop", key, "base")
    assert refused.returncode == 1
    assert "`vfsd persisted drop`" in refused.stderr

    over = Workspace.mount(place, name="over-base", backend=f"overlay:snapshot:base@{overlay.below}", persist=True)
    assert (place / "mine").read_text() == "kept"
    assert (place / "file").read_bytes() == b"file"
    over.unmount()
    succeeded(vfsd("persisted", "drop", "over-base"))
    succeeded(vfsd("store", "drop", key, "base"))
