"""`.snapshots`: --snapshot-dir, permissions, an entry of that name, forks, and memory that a drop frees."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.mount.conftest import MountIt, check_invariants
from tests.mount.test_host_backend import run

pytestmark = pytest.mark.workspaces(engines=["native"])


def test_permissions_are_those_of_the_snapshot(mount: MountIt) -> None:
    workspace = mount(allow_other=True)
    root = Path(workspace.path)
    os.chmod(root, 0o755)
    (root / "secret").write_text("secret")
    os.chmod(root / "secret", 0o600)
    (root / "shown").write_text("shown")
    workspace.snapshot("before")
    os.chmod(root / "secret", 0o644)

    command = "cat .snapshots/before/shown; cat .snapshots/before/secret && exit 9; exit 0"
    user = ("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups")
    assert run(*user, "sh", "-c", command, cwd=root) == "shown"


def test_what_the_workspace_has_at_that_name_wins(mount: MountIt, workdir: Path) -> None:
    (workdir / "below" / ".snapshots").mkdir(parents=True)
    (workdir / "below" / ".snapshots" / "own").touch()
    workspace = mount(backend=f"overlay:{workdir}/below", snapshot_directory="visible")
    root = Path(workspace.path)
    workspace.snapshot("before")

    assert os.listdir(root) == [".snapshots"]
    assert os.listdir(root / ".snapshots") == ["own"]
    shutil.rmtree(root / ".snapshots")
    assert os.listdir(root / ".snapshots") == ["before"]
    assert os.listdir(root / ".snapshots" / "before") == [".snapshots"]
    workspace.restore("before")
    assert os.listdir(root / ".snapshots") == ["own"]


def test_listings_show_it_if_that_is_chosen(mount: MountIt) -> None:
    root = Path(mount(snapshot_directory="visible").path)
    (root / "file").touch()

    assert sorted(os.listdir(root)) == [".snapshots", "file"]
    assert stat.S_ISDIR(os.stat(root / ".snapshots").st_mode)


def test_without_it_the_name_is_free(mount: MountIt) -> None:
    root = Path(mount(snapshot_directory="off").path)

    assert not (root / ".snapshots").exists()
    (root / ".snapshots").mkdir()


def test_a_fork_has_the_snapshots_of_its_source(mount: MountIt, workdir: Path) -> None:
    source = mount()
    root = Path(source.path)
    (root / "file").write_text("old")
    source.snapshot("before")
    assert (root / ".snapshots" / "before" / "file").read_text() == "old"
    fork = source.fork(workdir / "fork")
    try:
        source.drop("before")
        (root / "file").write_text("new")
        assert (workdir / "fork" / ".snapshots" / "before" / "file").read_text() == "old"
        assert not (root / ".snapshots" / "before").exists()
        check_invariants(fork)
    finally:
        fork.unmount()


def test_a_drop_frees_the_memory_although_a_file_is_open(mount: MountIt) -> None:
    workspace = mount()
    root = Path(workspace.path)
    (root / "file").write_bytes(os.urandom(8 << 20))
    workspace.snapshot("before")
    (root / "file").unlink()
    with open(root / ".snapshots" / "before" / "file", "rb") as file:
        file.read(10)
        assert (workspace.status().snapshot_bytes or 0) >= 8 << 20
        workspace.drop("before")
        assert (workspace.status().snapshot_bytes or 0) < 1 << 20
