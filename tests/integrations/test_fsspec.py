"""fsspec: its own abstract tests on a real mount, and what vfsd:// promises besides."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")

from fsspec.tests import abstract  # noqa: E402

from tests.mount.conftest import mounted  # noqa: E402
from vfsd.client.workspace import Workspace  # noqa: E402


@pytest.fixture(scope="module")
def shared(session_dir: str) -> Iterator[Workspace]:
    """One mount for the abstract tests, which remove what they create."""
    place = Path(session_dir, "work", "fsspec")
    place.mkdir()
    with mounted(place, name=f"fsspec-{os.getpid()}") as workspace:
        yield workspace


class OnAWorkspace(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, shared: Workspace) -> Any:
        return fsspec.filesystem("vfsd")

    @pytest.fixture
    def fs_path(self, shared: Workspace) -> str:
        return shared.name


class TestCopy(OnAWorkspace, abstract.AbstractCopyTests): ...


class TestGet(OnAWorkspace, abstract.AbstractGetTests): ...


class TestPut(OnAWorkspace, abstract.AbstractPutTests): ...


class TestOpen(OnAWorkspace, abstract.AbstractOpenTests): ...


class TestPipe(OnAWorkspace, abstract.AbstractPipeTests): ...


@pytest.fixture
def fs() -> Any:
    return fsspec.filesystem("vfsd")


@pytest.fixture
def other(workdir: Path) -> Iterator[Workspace]:
    (workdir / "other").mkdir()
    with mounted(workdir / "other", name=f"{workdir.name}-other") as workspace:
        yield workspace


def test_a_url_opens_a_file_that_programs_in_the_mount_see(workspace: Workspace) -> None:
    with fsspec.open(f"vfsd://{workspace.name}/a/b.txt", "w") as file:
        file.write("hello\n")
    assert Path(workspace.path, "a/b.txt").read_text() == "hello\n"
    Path(workspace.path, "a/b.txt").write_text("changed\n")
    with fsspec.open(f"vfsd://{workspace.name}/a/b.txt") as file:
        assert file.read() == b"changed\n"


@pytest.mark.parametrize("mode", ["ab", "r+b", "a+b"])
def test_files_open_in_every_mode(fs: Any, workspace: Workspace, mode: str) -> None:
    fs.pipe(f"{workspace.name}/f", b"before ")
    with fs.open(f"{workspace.name}/f", mode) as file:
        file.seek(0, os.SEEK_END)
        file.write(b"after")
    assert fs.cat(f"{workspace.name}/f") == b"before after"


def test_the_root_lists_the_running_workspaces(fs: Any, workspace: Workspace, other: Workspace) -> None:
    names = fs.ls("vfsd://", detail=False)
    assert {workspace.name, other.name} <= set(names)
    assert fs.isdir(workspace.name)
    assert not fs.exists("no-such-workspace/a")
    with pytest.raises(FileNotFoundError, match="vfsd list"):
        fs.ls("no-such-workspace")
    with pytest.raises(FileNotFoundError):
        fs.pipe("no-such-workspace/a", b"")


def test_a_workspace_itself_is_not_removed(fs: Any, workspace: Workspace) -> None:
    fs.pipe(f"{workspace.name}/f", b"x")
    for remove in (lambda: fs.rm(workspace.name, recursive=True), lambda: fs.rmdir(workspace.name)):
        with pytest.raises(ValueError, match="is a workspace"):
            remove()
    assert fs.cat(f"{workspace.name}/f") == b"x"


def test_snapshots_are_the_workspaces_own(fs: Any, workspace: Workspace) -> None:
    fs.pipe(f"{workspace.name}/f", b"before")
    fs.workspace(workspace.name).snapshot("one")
    fs.rm(f"{workspace.name}/f")
    workspace.restore("one")
    assert fs.cat(f"{workspace.name}/f") == b"before"


def test_no_path_leads_outside_the_workspace(fs: Any, workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path, f"{workspace.path}/out")
    os.symlink(tmp_path / "secret", f"{workspace.path}/link")
    for call in (fs.cat_file, fs.info, lambda path: fs.pipe_file(path, b"x"), fs.touch):
        for path in ("out/secret", "link"):
            with pytest.raises(PermissionError):
                call(f"{workspace.name}/{path}")
        for path in ("../secret", "a/../../x"):
            with pytest.raises(ValueError, match="must not contain"):
                call(f"{workspace.name}/{path}")
    assert {entry["name"].rpartition("/")[2]: entry["type"] for entry in fs.ls(workspace.name)} == {
        "link": "other",
        "out": "other",
    }
    fs.rm([f"{workspace.name}/out", f"{workspace.name}/link"], recursive=True)
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_directory_that_links_to_itself_is_walked_once(fs: Any, workspace: Workspace) -> None:
    fs.makedirs(f"{workspace.name}/a/b")
    os.symlink("..", f"{workspace.path}/a/b/up")
    fs.pipe(f"{workspace.name}/a/f", b"x")
    os.symlink("f", f"{workspace.path}/a/g")
    assert fs.find(workspace.name) == [f"{workspace.name}/{each}" for each in ("a/b/up", "a/f", "a/g")]
    assert fs.cat(f"{workspace.name}/a/g") == b"x"
    assert fs.info(f"{workspace.name}/a/g")["destination"] == "f"


def test_a_move_renames_in_a_workspace_and_copies_to_another(fs: Any, workspace: Workspace, other: Workspace) -> None:
    fs.pipe(f"{workspace.name}/d/f", b"x")
    inode = fs.info(f"{workspace.name}/d/f")["ino"]
    fs.mv(f"{workspace.name}/d", f"{workspace.name}/new/e")
    assert fs.info(f"{workspace.name}/new/e/f")["ino"] == inode
    fs.mv(f"{workspace.name}/new", f"{other.name}/new", recursive=True)
    assert fs.cat(f"{other.name}/new/e/f") == b"x"
    assert fs.ls(workspace.name) == []


def test_a_file_is_not_copied_onto_itself(fs: Any, workspace: Workspace) -> None:
    fs.pipe(f"{workspace.name}/f", b"x")
    os.link(f"{workspace.path}/f", f"{workspace.path}/g")
    for target in ("f", "g"):
        with pytest.raises(shutil.SameFileError):
            fs.cp_file(f"{workspace.name}/f", f"{workspace.name}/{target}")
    assert fs.cat(f"{workspace.name}/f") == b"x"


def test_a_transaction_writes_all_its_files_or_none(fs: Any, workspace: Workspace) -> None:
    fs.pipe(f"{workspace.name}/f", b"before")

    def abandoned() -> None:
        with fs.transaction:
            with fs.open(f"{workspace.name}/f", "wb") as file:
                file.write(b"lost")
            raise RuntimeError("abandon")

    with pytest.raises(RuntimeError, match="abandon"):
        abandoned()
    assert fs.cat(f"{workspace.name}/f") == b"before"
    with fs.transaction:
        for name in ("f", "g"):
            with fs.open(f"{workspace.name}/{name}", "wb") as file:
                file.write(b"after")
        assert fs.cat(f"{workspace.name}/f") == b"before"
    assert fs.cat([f"{workspace.name}/{name}" for name in ("f", "g")]) == {
        f"{workspace.name}/{name}": b"after" for name in ("f", "g")
    }
    assert len(fs.ls(workspace.name)) == 2


def test_names_and_contents_are_any_bytes(fs: Any, workspace: Workspace) -> None:
    name = os.fsdecode(b"\xff \n*?[")
    fs.pipe_file(f"{workspace.name}/{name}", bytes(range(256)) * 5000)
    assert fs.ls(workspace.name, detail=False) == [f"{workspace.name}/{name}"]
    assert fs.cat_file(f"{workspace.name}/{name}", 255, 257) == b"\xff\x00"


def test_a_fifo_does_not_block(fs: Any, workspace: Workspace) -> None:
    os.mkfifo(f"{workspace.path}/fifo")
    with pytest.raises(OSError, match="not a regular file"):
        fs.cat_file(f"{workspace.name}/fifo")


def test_the_filesystem_can_be_sent_to_another_process(fs: Any) -> None:
    assert pickle.loads(pickle.dumps(fs)) == fs


def test_nothing_holds_the_mount(fs: Any, workdir: Path) -> None:
    workspace = Workspace.mount(workdir / "ws")
    fs.pipe(f"{workspace.name}/a/f", b"x")
    fs.find(workspace.name)
    workspace.unmount()
    assert not fs.exists(f"{workspace.name}/a/f")


def test_the_example_runs(workspace: Workspace) -> None:
    example = Path(__file__).parents[2] / "examples" / "fsspec_files.py"
    done = subprocess.run([sys.executable, example, workspace.name], capture_output=True, text=True, check=True)
    assert done.stdout == "['data/a.csv', 'data/b.csv']\n3 lines\nrestored: ['data/a.csv', 'data/b.csv']\n"
