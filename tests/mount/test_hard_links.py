"""Hard links on each backend: what is limited to paths changes no other name; a change of links alone is a change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.types import ChangeCounts
from tests.mount.conftest import forking, mounted
from tests.mount.programs import failed, succeeded, vfsd
from vfsd.client.results import Change
from vfsd.client.workspace import Workspace


@pytest.fixture
def workspace(shared_workspace: Workspace) -> Workspace:
    return shared_workspace


@pytest.fixture
def root(workspace: Workspace, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of the test's own, with two names of one file."""
    root = Path(workspace.path) / request.node.originalname
    for name in ("in", "out"):
        (root / name).mkdir(parents=True)
    (root / "in" / "f").write_text("v1")
    os.link(root / "in" / "f", root / "out" / "f")
    yield root
    shutil.rmtree(root)


def shown(path: Path) -> tuple[str, int, int]:
    return path.read_text(), path.stat().st_mode & 0o777, path.stat().st_mtime_ns


@pytest.mark.parametrize("change", ["write", "chmod", "write-elsewhere", "replace", "replace-unchanged", "link"])
def test_a_restore_of_one_name_leaves_the_others(workspace: Workspace, root: Path, change: str) -> None:
    inner, outer = root / "in" / "f", root / "out" / "f"
    name = f"{root.name}-{change}"
    workspace.snapshot(name)
    before = shown(inner)
    if change == "write":
        inner.write_text("v2")
    elif change == "chmod":
        inner.chmod(0o600)
    elif change == "write-elsewhere":
        inner.unlink()
        outer.write_text("v2")
    elif change == "link":  # to a file with other names
        (root / "out" / "g").write_text("v2")
        (root / "in" / "f").unlink()
        os.link(root / "out" / "g", root / "in" / "f")
    else:
        inner.unlink()
        inner.write_text("v2")
        if change == "replace":
            outer.write_text("v3")
    others = {path: shown(path) for path in (root / "out").iterdir()}
    workspace.restore(name, [f"{root.name}/in"])
    assert shown(inner) == before
    assert {path: shown(path) for path in (root / "out").iterdir()} == others
    # Names of one file again only if that file is as it was.
    assert inner.samefile(outer) == (change in {"replace-unchanged", "link"})
    workspace.undo()
    assert {path: shown(path) for path in (root / "out").iterdir()} == others
    assert change == "write-elsewhere" or shown(inner) != before


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_a_restore_of_a_path_replaces_and_names_what_is_in_the_place_of_its_directory(
    workspace: Workspace, root: Path, obstacle: str
) -> None:
    for name in ("wanted", "left"):
        (root / "d" / "e" / name).mkdir(parents=True)
        (root / "d" / "e" / name / "f").write_text(name)
    name = f"{root.name}-{obstacle}"
    workspace.snapshot(name)
    shutil.rmtree(root / "d")
    if obstacle == "file":
        (root / "d").write_text("in the way")
    else:
        (root / "d").symlink_to("out")
    paths = [f"{root.name}/d/e/wanted"]
    listed = [(f"{root.name}/{path}", kind) for path, kind in
              (("d", "type"), ("d/e", "added"), ("d/e/wanted", "added"), ("d/e/wanted/f", "added"))]  # fmt: skip
    trial = workspace.restore(name, paths, dry_run=True)
    assert [(change.path, change.change) for change in trial.changes] == listed
    restored = workspace.restore(name, paths)
    assert [(change.path, change.change) for change in restored.changes] == listed
    assert sorted(path.name for path in (root / "d").rglob("*")) == ["e", "f", "wanted"]
    assert sorted(path.name for path in (root / "out").iterdir()) == ["f"]
    workspace.undo()
    assert not (root / "d").is_dir() or (root / "d").is_symlink()


def change_in_fork(top: Path, change: str) -> None:
    inner, outer = top / "in" / "f", top / "out" / "f"
    if change in {"replace", "remove"}:
        inner.unlink()
    if change == "chmod":
        inner.chmod(0o600)
    elif change == "touch":
        os.utime(inner, (1, 1))
    elif change == "link":
        os.link(outer, top / "in" / "g")
    elif change != "remove":
        (outer if change == "write-elsewhere" else inner).write_text("v2")


def test_a_merge_of_one_name_leaves_the_others(workspace: Workspace, root: Path, tmp_path: Path) -> None:
    changes = ("write", "conflict", "chmod", "replace", "touch", "link", "remove", "write-elsewhere")
    for change in changes:
        for name in ("in", "out"):
            (root / change / name).mkdir(parents=True)
        (root / change / "in" / "f").write_text("v1")
        os.link(root / change / "in" / "f", root / change / "out" / "f")
    with forking(tmp_path, workspace) as fork:
        copy = fork(f"{workspace.name}-copy")
        there = Path(copy.path) / root.name
        for change in changes:
            change_in_fork(there / change, change)
        (root / "conflict" / "out" / "f").write_text("v3")
        for change in changes:
            inner, outer = (root / change / name / "f" for name in ("in", "out"))
            before = shown(outer), outer.stat().st_ino
            paths = [os.fsdecode(inner.parent.relative_to(workspace.path))]
            trial = workspace.merge(copy, paths, conflicts="theirs", dry_run=True)
            merged = workspace.merge(copy, paths, conflicts="theirs")
            assert trial.changes == merged.changes, change
            assert all(each.path.startswith(f"{paths[0]}/") for each in merged.changes), change
            assert (shown(outer), outer.stat().st_ino) == before, change
            if change in {"touch", "link"}:
                assert inner.samefile(outer), change
            elif change != "remove":
                assert shown(inner) == shown(there / change / "in" / "f"), change
                assert not inner.samefile(outer), change
            assert workspace.merge(copy, paths, conflicts="theirs").counts.total == 0, change
        assert not (root / "remove" / "in" / "f").exists()
        assert shown(root / "link" / "in" / "g") == shown(root / "link" / "out" / "f")
        assert workspace.merge(copy, conflicts="theirs").applied
        for path in there.rglob("[fg]"):
            assert (root / path.relative_to(there)).read_text() == path.read_text(), path


def test_a_change_of_hard_links_alone_is_a_change(workspace: Workspace, root: Path) -> None:
    a, b = root / "a", root / "b"
    a.write_text("same")
    shutil.copy2(a, b)
    before, after = f"{root.name}-before", f"{root.name}-after"
    workspace.snapshot(before)
    b.unlink()
    os.link(a, b)
    workspace.snapshot(after)

    linked = Change(f"{root.name}/b", "metadata", "file", 4, 4, linked_to=f"{root.name}/a")
    apart = Change(f"{root.name}/b", "metadata", "file", 4, 4, unlinked_from=f"{root.name}/a")
    assert workspace.diff(before).changes == (linked,)
    assert workspace.diff(before, paths=[linked.path]).changes == (linked,)
    assert workspace.diff(after, before).changes == (apart,)
    assert workspace.snapshots()[-1].changes == ChangeCounts(0, 1, 0)
    patch = workspace.patch(before)
    assert patch.problems == {}
    assert patch.omitted == {linked.path: f"a hard link to {linked.linked_to}"}
    assert (
        succeeded(vfsd("-w", workspace.name, "diff", before)) == f"m {linked.path} (hard link to {linked.linked_to})\n"
    )

    assert workspace.restore(before, dry_run=True).changes == (apart,)
    restored = workspace.restore(before)
    assert restored.changes == (apart,)
    assert restored.counts == ChangeCounts(0, 1, 0)
    assert not a.samefile(b)
    assert workspace.undo().changes == (linked,)
    assert a.samefile(b)
    assert workspace.restore(before, [linked.path]).changes == (apart,)
    assert workspace.restore(after, [linked.path]).changes == (linked,)
    assert a.samefile(b)


def test_hard_links_alone_are_applied_and_not_lost(tmp_path: Path) -> None:
    below, top = tmp_path / "below", tmp_path / "m"
    below.mkdir()
    (below / "a").write_text("same")
    shutil.copy2(below / "a", below / "b")
    with mounted(top, backend=f"overlay:{below}", name=f"{tmp_path.name}-links") as workspace:
        (top / "b").unlink()
        os.link(top / "a", top / "b")
        assert "1 modified" in failed(vfsd("unmount", workspace.name))
        workspace.apply()
        assert (below / "a").samefile(below / "b")
        assert workspace.diff().changes == ()
        (top / "b").unlink()
        shutil.copy2(top / "a", top / "b")
        workspace.apply()
        assert not (below / "a").samefile(below / "b")
