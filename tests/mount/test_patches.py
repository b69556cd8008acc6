"""Diffs and patches of real workspaces, by the real command line and with the real git; and filtered exports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from tests.mount.conftest import MountIt, mounted
from tests.mount.programs import VFSD
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.workspace import Workspace

MANY = 10_500  # more than one answer lists
GIT = ("git", "-c", "core.autocrlf=false", "-c", "init.defaultBranch=main")


@dataclass(frozen=True, slots=True)
class Place:
    """A workspace that the tests of this module share, each in a directory of its own."""

    workspace: Workspace
    root: Path
    scratch: Path

    def vfsd(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [*VFSD, "-w", self.workspace.name, *words], cwd="/", capture_output=True, check=False, timeout=120
        )
        assert done.returncode == status, (done.stdout, done.stderr)
        return done


@pytest.fixture
def place(shared_workspace: Workspace, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    root = Path(shared_workspace.path, request.node.originalname)
    root.mkdir()
    yield Place(shared_workspace, root, tmp_path)
    shutil.rmtree(root)


def contents(top: Path) -> dict[str, tuple[bool, bytes] | str]:
    """Files and symlinks below `top`, without `.git`."""
    found: dict[str, tuple[bool, bytes] | str] = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if ".git" in path.parts:
            continue
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = (bool(path.stat().st_mode & 0o100), path.read_bytes())
    return found


def fill(root: Path) -> None:
    subprocess.run([*GIT, "init", "-q"], cwd=root, check=True)
    (root / "sub").mkdir()
    (root / "picture").write_bytes(bytes(range(256)) * 300)
    (root / "gone.bin").write_bytes(b"\0" * 70_000)
    (root / "text").write_bytes(b"one\r\ntwo")
    (root / "script").write_text("#!/bin/sh\n")
    (root / "sub" / "to-link").write_bytes(b"\0binary")
    (root / "to-directory").write_text("x\n")
    (root / "link").symlink_to("text")


def change(root: Path) -> None:
    (root / "picture").write_bytes(bytes(range(255)) * 301)
    (root / "gone.bin").unlink()
    (root / "new.bin").write_bytes(os.urandom(100_000))
    (root / "text").write_bytes(b"one\r\n2\n")
    (root / "script").chmod(0o755)
    (root / "sub" / "to-link").unlink()
    (root / "sub" / "to-link").symlink_to("../picture")
    (root / "to-directory").unlink()
    (root / "to-directory").mkdir()
    (root / "to-directory" / "caf\udce9 \n").write_bytes(b"\0\xff")
    (root / "link").unlink()
    (root / "link").symlink_to("new.bin")
    subprocess.run([*GIT, "add", "--all"], cwd=root, check=True)


@pytest.mark.extended
def test_git_apply_of_a_patch_makes_the_second_state_of_the_first(place: Place) -> None:
    fill(place.root)
    copy = place.scratch / "copy"
    shutil.copytree(place.root, copy, symlinks=True)
    before = contents(copy)
    subprocess.run([*GIT, "add", "--all"], cwd=copy, check=True)
    place.workspace.snapshot("first")
    change(place.root)
    done = place.vfsd("diff", "first", "--patch", "--", str(place.root))
    assert done.stderr.decode().splitlines()[0] == (
        f"vfsd: not in this patch: {place.root.name}/.git (--include-git includes it; `git apply` rejects it)"
    )
    for options in ([], ["-R"], ["--index"]):
        subprocess.run([*GIT, "update-index", "-q", "--refresh"], cwd=copy, check=False)
        subprocess.run([*GIT, "apply", "-p2", *options, "-"], cwd=copy, input=done.stdout, check=True)
        assert contents(copy) == (before if options == ["-R"] else contents(place.root))
    by_api = place.workspace.patch("first", paths=[place.root])
    assert by_api == done.stdout
    assert (dict(by_api.problems), list(by_api.omitted)) == ({}, [f"{place.root.name}/.git"])
    with_git = place.workspace.patch("first", paths=[place.root], include_git=True)
    assert b"/.git/index" in with_git
    assert by_api.counts.total < with_git.counts.total
    assert with_git.counts == place.workspace.diff("first", paths=[place.root]).counts


def test_what_a_patch_cannot_carry_is_named_with_status_1(place: Place) -> None:
    place.workspace.snapshot("carried")
    os.mkfifo(place.root / "fifo")
    (place.root / "empty").mkdir()
    (place.root / "file").write_text("x\n")
    name = place.root.name
    done = place.vfsd("diff", "carried", "--patch", "--", str(place.root), status=1)
    elsewhere = "at the top of a copy (in a subdirectory of a larger repository: `--directory=SUBDIRECTORY`)"
    assert done.stderr.decode().splitlines() == [
        f"vfsd: not in this patch: {name}/empty (an empty directory)",
        f"vfsd: not in this patch: {name}/fifo (a special file)",
        f"vfsd: `git apply` {elsewhere} applies it",
        "vfsd: error: the patch lacks 1 change; `vfsd export` contains everything",
    ]
    assert f"# Not in this patch: {name}/fifo (a special file)\n".encode() in done.stdout
    answer = json.loads(place.vfsd("diff", "carried", "-p", "--json", "--", str(place.root), status=1).stdout)
    assert answer["problems"] == [{"path": f"{name}/fifo", "reason": "a special file"}]
    assert answer["omitted"] == [{"path": f"{name}/empty", "reason": "an empty directory"}]
    assert dict(place.workspace.patch("carried", paths=[place.root]).problems) == {f"{name}/fifo": "a special file"}


@pytest.mark.extended
def test_patterns_limit_a_diff_and_its_counts(place: Place) -> None:
    place.workspace.snapshot("filtered")
    for path in ("a.py", "b.log", "sub/c.py", "sub/d.log", "build/e.py", "sub/build/f.py"):
        (place.root / path).parent.mkdir(exist_ok=True, parents=True)
        (place.root / path).write_text("x\n")
    name = place.root.name

    def listed(*words: str) -> list[str]:
        answer = json.loads(place.vfsd("diff", "filtered", "--json", *words, "--", str(place.root)).stdout)
        assert answer["counts"]["added"] == len(answer["changes"])
        assert place.vfsd("diff", "filtered", *words, "--", str(place.root)).stdout.count(b"\n") == len(
            answer["changes"]
        )
        return [each["path"].removeprefix(name).lstrip("/") for each in answer["changes"] if each["type"] == "file"]

    assert listed("--exclude", "*.log", "--exclude", "build/") == ["a.py", "sub/c.py"]
    assert listed("--include", "*.log") == ["b.log", "sub/d.log"]
    assert listed("--include", "*.py", "--exclude", f"/{name}/build") == ["a.py", "sub/build/f.py", "sub/c.py"]
    assert listed("--exclude", name) == []
    patch = place.workspace.patch("filtered", paths=[place.root], include=["*.log"])
    assert [line for line in patch.splitlines() if line.startswith(b"diff")] == [
        f"diff --git a/{name}/{path} b/{name}/{path}".encode() for path in ("b.log", "sub/d.log")
    ]
    # What the directories hold is hidden, and they are not empty.
    assert (patch.omitted, patch.problems) == ({}, {})
    assert place.workspace.diff("filtered", paths=[place.root], include=["*.log"]).counts.added == 2
    # A directory is listed if it matches itself.
    everything = place.workspace.diff("filtered", paths=[place.root], include=["build/"])
    assert [each.path.removeprefix(f"{name}/") for each in everything.changes] == [
        "build",
        "build/e.py",
        "sub/build",
        "sub/build/f.py",
    ]
    stat = place.vfsd("diff", "filtered", "--stat", "--include", "*.log", "--", str(place.root)).stdout
    assert b"2 paths changed, 2 insertions(+)" in stat
    done = place.vfsd("diff", "filtered", "--exclude", "!", status=1)
    assert done.stderr.count(b"\n") == 1
    assert b"'!'" in done.stderr


@pytest.mark.extended
def test_an_export_with_patterns_is_an_archive_of_what_is_left(place: Place) -> None:
    name = place.root.name
    (place.root / "cache").mkdir()
    (place.root / "cache" / "a").write_bytes(b"linked")
    os.link(place.root / "cache" / "a", place.root / "b")
    os.link(place.root / "cache" / "a", place.root / "c")
    (place.root / "d.log").write_bytes(b"no")
    archive = place.scratch / "part.zip"
    place.vfsd("export", str(archive), "--exclude", "cache/", "--exclude", "*.log")
    with zipfile.ZipFile(archive) as read:
        assert [each for each in read.namelist() if name in each and not each.endswith("/")] == [
            f"files/{name}/b",
            f"files/{name}/c",
        ]
    with mounted(place.scratch / "again", name=f"{place.workspace.name}-again", archive=archive) as again:
        copy = Path(again.path) / name
        assert (copy / "b").read_bytes() == b"linked"
        assert os.path.samefile(copy / "b", copy / "c")
        assert sorted(os.listdir(copy)) == ["b", "c"]
    exported = place.workspace.export(place.scratch / "api.zip", include=["d.log"])
    assert exported.files == 1


@pytest.mark.extended
def test_many_changes_are_listed_whole(tmp_path: Path, workdir: Path) -> None:
    below = workdir / "below"
    (below / "d").mkdir(parents=True)
    for number in range(MANY):
        (below / "d" / f"f{number}").touch()
    with mounted(workdir / "m", backend=f"overlay:{below}", name=f"{workdir.name}-many") as workspace:
        place = Place(workspace, Path(workspace.path), tmp_path)
        os.rename(place.root / "d", place.root / "e")
        changes = 2 * (MANY + 1)
        assert place.vfsd("diff", "--names").stdout.count(b"\n") == changes
        assert len(json.loads(place.vfsd("diff", "--json").stdout)["changes"]) == changes
        assert place.vfsd("apply", "--dry-run").stdout.count(b"\n") == changes
        assert place.vfsd("discard", "--dry-run").stdout.count(b"\n") == changes
        assert len(workspace.diff().changes) == changes
        workspace.snapshot("moved")
        workspace.discard()
        assert len(json.loads(place.vfsd("restore", "moved", "-n", "--json").stdout)["changes"]) == changes

        async def at_once() -> int:
            async with AsyncWorkspace.attach(workspace.name) as attached:
                return len((await attached.diff("moved")).changes)

        assert trio.run(at_once) == changes


def test_the_command_that_is_named_applies_a_patch_in_a_larger_repository(mount: MountIt, workdir: Path) -> None:
    top, place = workdir / "top", workdir / "top" / "sub dir" / "project"
    place.mkdir(parents=True)
    (place / "file").write_text("1\n")
    (place / "directory").mkdir()
    (place / "link").symlink_to("directory")
    subprocess.run(["git", "init", "-q", top], check=True)
    workspace = mount(backend=f"overlay:{place}")
    root = Path(workspace.path)
    (root / "file").write_text("2\n")
    (root / "link").unlink()
    (root / "link").mkdir()
    (root / "link" / "new").write_text("new\n")
    command = [*VFSD, "-w", workspace.name, "diff", "--patch"]
    done = subprocess.run(command, cwd="/", capture_output=True, check=True, timeout=120)
    said = done.stderr.decode().splitlines()[-1]
    named = said.split("`")[1]
    assert named == f"git -C {top} apply '--directory=sub dir/project'"
    assert said.endswith("applies it; `patch` does not: it would write through links, or reject directories")
    subprocess.run(named, shell=True, input=done.stdout, check=True)
    assert (place / "file").read_text() == "2\n"
    assert (place / "link" / "new").read_text() == "new\n"
    assert not list((place / "directory").iterdir())
