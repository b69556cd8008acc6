"""Paths that are longer than one system call takes, which programs make by entering one directory after the other."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.programs import vfsd
from vfsd.client.workspace import Workspace

MountIt = Callable[..., Workspace]
NAME = "n" * 200
LONG = 30  # directories: a path of 6,000 bytes
TOO_LONG = 330  # 66,000 bytes, more than a ZIP can name


def make_chain(top: Path, depth: int) -> None:
    """`depth` directories, each in the one before, and a file in the last."""
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir(NAME, dir_fd=at)
        below = os.open(NAME, os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    with open(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=at), "w") as file:
        file.write("needle")
    os.close(at)


def depth_of(top: Path) -> int:
    """How many directories there are until the leaf, whose content must be whole."""
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    depth = 0
    while NAME in os.listdir(at):
        below = os.open(NAME, os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
        depth += 1
    with open(os.open("leaf", os.O_RDONLY, dir_fd=at)) as file:
        assert file.read() == "needle"
    os.close(at)
    return depth


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["memory", "host", "overlay"])
def test_everything_works_on_a_path_longer_than_one_system_call_takes(mount: MountIt, workdir: Path, kind: str) -> None:
    workspace = mount(backend=kind)
    root = Path(workspace.path)
    (root / "other").write_text("1")
    workspace.snapshot("empty")
    make_chain(root, LONG)
    workspace.snapshot("chain")
    assert workspace.diff("empty", "chain").counts.added == LONG + 1
    assert workspace.export(workdir / "a.zip").skipped == {}
    with zipfile.ZipFile(workdir / "a.zip") as file:
        assert file.read("files/" + f"{NAME}/" * LONG + "leaf") == b"needle"
    if kind == "overlay":
        assert workspace.apply().applied
        assert depth_of(workdir / "below") == LONG
    for restore in (
        lambda: workspace.restore("chain"),
        lambda: workspace.restore(workdir / "a.zip"),
        lambda: workspace.import_archive(workdir / "a.zip"),
    ):
        shutil.rmtree(root / NAME)
        restore()
        assert depth_of(root) == LONG
    workspace.restore("empty")
    assert sorted(os.listdir(root)) == ["other"]
    found = vfsd("-w", workspace.name, "diff", "chain", "--patch")
    assert (found.returncode, "-needle" in found.stdout) == (0, True)


@pytest.mark.extended
def test_an_export_leaves_out_what_no_zip_can_name_and_says_so(workspace: Workspace, root: Path, workdir: Path) -> None:
    make_chain(root, TOO_LONG)
    (root / "z").write_text("is there")
    said = vfsd("-w", workspace.name, "export", workdir / "a.zip")
    assert said.returncode == 1
    assert "too long for an archive" in said.stderr
    assert max(map(len, said.stderr.splitlines())) < 500
    with zipfile.ZipFile(workdir / "a.zip") as file:
        assert file.read("files/z") == b"is there"
        assert max(len(name) for name in file.namelist()) <= 65_535
    said = vfsd("-w", workspace.name, "--json", "export", "--force", workdir / "a.zip")
    answer = json.loads(said.stdout)
    assert (said.returncode, len(answer["skipped"])) == (1, 1)
    assert len(answer["skipped"][0]["path"]) > 65_000
    shutil.rmtree(root / NAME)
    workspace.restore(workdir / "a.zip")
    assert (root / "z").read_text() == "is there"


@pytest.mark.extended
@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.TGZ", "a.7z", "-"])
def test_an_export_under_the_name_of_another_kind_of_archive_is_wrong_use(
    workspace: Workspace, workdir: Path, name: str
) -> None:
    said = vfsd("-w", workspace.name, "export", name, cwd=workdir)
    assert (said.returncode, said.stdout) == (2, "")
    assert "zip" in said.stderr
    assert os.listdir(workdir) == [] or name not in os.listdir(workdir)
    with pytest.raises(ValueError, match="zip"):
        workspace.export(name)
