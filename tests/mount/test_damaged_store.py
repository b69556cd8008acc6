"""A damaged snapshot store under a mount: commands name the path, change nothing there, and exit with status 1."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from protocol.store.format.blobs import LARGE_BYTES
from tests.mount.conftest import MountIt, backend_over
from tests.mount.programs import failed, vfsd
from vfsd.client.workspace import Workspace


@pytest.fixture
def workspace(mount: MountIt, directory: Path, store: Path) -> Workspace:
    """A workspace whose snapshot "s" has a damaged large file, and which was changed since."""
    workspace = mount(backend="host", store=str(store))
    (directory / "large").write_bytes(os.urandom(LARGE_BYTES + 100))
    (directory / "small").write_bytes(b"small")
    workspace.snapshot("s")
    damage(next(path for path in (store / "objects").rglob("*") if path.is_file()))
    (directory / "large").write_bytes(b"the user's")
    (directory / "small").write_bytes(b"changed")
    return workspace


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_restore_restores_everything_else_and_its_undo_everything(workspace: Workspace, directory: Path) -> None:
    done = vfsd("restore", "s", "-w", workspace.name, "--json")

    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert [problem["path"] for problem in answer["problems"]] == ["large"]
    assert "is damaged" in answer["problems"][0]["reason"]
    assert (directory / "large").read_bytes() == b"the user's"
    assert (directory / "small").read_bytes() == b"small"
    assert vfsd("restore", "--undo", "-w", workspace.name).returncode == 0
    assert (directory / "small").read_bytes() == b"changed"


def test_an_export_and_a_patch_name_the_path(workspace: Workspace, workdir: Path) -> None:
    archive = workdir / "s.zip"

    assert "large" in failed(vfsd("export", archive, "--snapshot", "s", "-w", workspace.name))
    assert not archive.exists()
    patch = vfsd("diff", "--patch", "s", "-w", workspace.name)
    assert patch.returncode == 1
    assert "large" in patch.stderr


@pytest.mark.parametrize("backend", ["memory", "overlay"])
def test_a_restore_into_another_workspace_changes_nothing(
    mount: MountIt, workspace: Workspace, directory: Path, store: Path, workdir: Path, backend: str
) -> None:
    other = mount(backend=backend_over(backend, workdir / "lower"))
    place = Path(other.path)
    (place / "large").write_bytes(b"of the other")

    done = vfsd("restore", "s", "--of", f"host:{directory}", "--store", store, "-w", other.name)

    assert "large" in failed(done)
    assert (place / "large").read_bytes() == b"of the other"
    assert not (place / "small").exists()
    assert workspace.name != other.name
