"""`.snapshots` of real mounts: equal to a copy made then, read-only, in no listing, and gone with its snapshot."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import BACKENDS, ENGINES, MountIt, check_invariants
from tests.mount.programs import succeeded, vfsd
from tests.mount.test_host_backend import rich_tree, run, tree_of
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.workspaces(engines=ENGINES, backends=BACKENDS)
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")


@pytest.fixture
def workspace(backend: str, mount: MountIt, directory: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("VFSD_STORE_DIR", str(store))
    (directory / "lower").write_text("lower")
    return mount(backend=backend)


def fails(code: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        call()


def test_a_snapshot_equals_a_copy_that_was_made_then(workspace: Workspace, root: Path, workdir: Path) -> None:
    rich_tree(root / "rich")
    run("cp", "-a", "--sparse=always", root, workdir / "copy")
    before = tree_of(root)
    workspace.snapshot("before")
    (root / "rich" / "plain").write_bytes(b"changed")
    shutil.rmtree(root / "rich" / "dir")
    (root / "rich" / "new").mkdir()

    assert tree_of(root / ".snapshots" / "before") == before == tree_of(workdir / "copy")
    run("cp", "-a", "--sparse=always", root / ".snapshots" / "before", workdir / "again")
    assert tree_of(workdir / "again") == before
    run("diff", "-r", "--no-dereference", "--exclude=fifo", "--exclude=device", workdir / "copy", workdir / "again")


def test_programs_that_walk_the_workspace_do_not_meet_it(workspace: Workspace, root: Path, workdir: Path) -> None:
    (root / "file").write_text("needle")
    run(*GIT, "init", "-q", root)
    workspace.snapshot("before")
    assert os.stat(root / ".snapshots" / "before" / "file").st_size == 6

    assert ".snapshots" not in os.listdir(root)
    assert ".snapshots" not in run("ls", "-a", root)
    assert ".snapshots" not in run("find", root)
    assert run("rg", "--hidden", "--no-ignore", "-l", "needle", root).split() == [f"{root}/file"]
    run(*GIT, "add", "-A", cwd=root)
    assert ".snapshots" not in run(*GIT, "status", "--porcelain", cwd=root)
    assert ".snapshots" not in run("tar", "-cvf", workdir / "all.tar", "-C", root, ".")
    run("cp", "-a", root, workdir / "copy")
    assert not (workdir / "copy" / ".snapshots").exists()
    run("sh", "-c", "rm -rf ./* .git", cwd=root)
    assert (root / ".snapshots" / "before" / "file").read_text() == "needle"


def test_tar_and_find_keep_live_files_and_those_of_snapshots_apart(
    workspace: Workspace, root: Path, workdir: Path
) -> None:
    (root / "file").write_text("content")
    os.link(root / "file", root / "link")
    for name in ("one", "two"):
        workspace.snapshot(name)
    places = [root, root / ".snapshots" / "one", root / ".snapshots" / "two"]

    numbers = [os.stat(place / name).st_ino for place in places for name in ("file", "link")]
    assert [numbers[0::2].count(number) for number in numbers] == [1] * 6
    assert numbers[0::2] == numbers[1::2]
    assert {os.stat(place).st_dev for place in places} == {os.stat(root).st_dev}
    run("tar", "-cf", workdir / "all.tar", "-C", root, "file", "link", ".snapshots/one", ".snapshots/two")
    run("tar", "-xf", workdir / "all.tar", "-C", workdir)
    assert os.stat(workdir / "file").st_nlink == os.stat(workdir / ".snapshots" / "one" / "link").st_nlink == 2


@pytest.mark.both_engines
def test_every_change_is_refused(workspace: Workspace, root: Path) -> None:
    (root / "dir").mkdir()
    (root / "dir" / "file").write_text("content")
    workspace.snapshot("before")
    top = root / ".snapshots"
    inside = top / "before" / "dir"
    file = inside / "file"
    refusals = {errno.EROFS} if os.geteuid() == 0 else {errno.EROFS, errno.EACCES}
    for change in (
        (inside / "new").touch,
        (inside / "new").mkdir,
        lambda: os.symlink("x", inside / "new"),
        lambda: os.mkfifo(inside / "new"),
        lambda: os.link(root / "dir" / "file", inside / "new"),
        lambda: os.link(file, root / "new"),
        lambda: os.rename(root / "dir" / "file", inside / "file"),
        lambda: os.rename(file, root / "new"),
        lambda: os.rename(inside, top / "after"),
        lambda: os.unlink(file),
        lambda: os.rmdir(inside),
        lambda: os.rmdir(top / "before"),
        lambda: os.rmdir(top),
        (top / "new").mkdir,
        lambda: os.truncate(file, 1),
        lambda: os.open(file, os.O_WRONLY | os.O_TRUNC),
        lambda: os.chmod(file, 0o600),
        lambda: os.chown(file, os.getuid(), os.getgid()),
        lambda: os.utime(file),
        lambda: os.setxattr(file, "user.x", b"y"),
        lambda: os.removexattr(file, "user.x"),
    ):
        # Of plain users the kernel refuses some changes itself: the modes allow no writing.
        with pytest.raises(OSError, check=lambda error: error.errno in refusals):
            change()
    fails(errno.EEXIST, top.mkdir)

    assert file.read_text() == "content"
    assert sorted(os.listdir(root)) == sorted({"dir", *os.listdir(root)} - {".snapshots", "new"})


@pytest.mark.both_engines
def test_a_write_that_the_kernel_caches_is_gone_soon(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("content")
    workspace.snapshot("before")
    file = root / ".snapshots" / "before" / "file"
    # A mount without OPEN requests learns of a mapping when its pages are written back.
    with contextlib.suppress(OSError), open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 7) as mapping:
        mapping[:] = b"changed"
        mapping.flush()
    wait_until(lambda: file.read_text() == "content")


def test_what_is_copied_out_is_an_ordinary_file(workspace: Workspace, root: Path) -> None:
    (root / "file").write_bytes(os.urandom(300_000))
    workspace.snapshot("before")
    source = root / ".snapshots" / "before" / "file"
    (root / "copy").touch()

    with open(source, "rb") as old, open(root / "copy", "wb") as new:
        assert os.copy_file_range(old.fileno(), new.fileno(), 300_000) > 0
    shutil.copy2(source, root / "copy")

    assert (root / "copy").read_bytes() == (root / "file").read_bytes()


def test_a_dropped_snapshot_is_gone_and_its_name_can_be_used_again(workspace: Workspace, root: Path) -> None:
    (root / "dir").mkdir()
    (root / "dir" / "file").write_text("old")
    workspace.snapshot("before")
    place = root / ".snapshots" / "before"
    assert not (root / ".snapshots" / "after").exists()
    descriptor = os.open(place / "dir" / "file", os.O_RDONLY)
    there = os.open(place / "dir", os.O_RDONLY | os.O_DIRECTORY)
    (root / "dir" / "file").write_text("new")
    try:
        workspace.drop("before")

        assert os.listdir(root / ".snapshots") == []
        assert not place.exists()
        fails(errno.ENOENT, lambda: os.listdir(place))
        fails(errno.ESTALE, lambda: os.open("nothing", os.O_RDONLY, dir_fd=there))
        with contextlib.suppress(OSError):
            assert os.read(descriptor, 3) == b"old"  # what the kernel has in its cache
        workspace.snapshot("before")
        workspace.snapshot("after")
        assert (place / "dir" / "file").read_text() == "new"
        assert (root / ".snapshots" / "after").exists()
    finally:
        os.close(descriptor)
        os.close(there)


@pytest.mark.both_engines
@pytest.mark.parametrize("name", [".", "dir", "empty"])
def test_the_listing_of_a_dropped_snapshot_fails_where_a_program_is_inside(
    workspace: Workspace, root: Path, name: str
) -> None:
    (root / "dir").mkdir()
    (root / "dir" / "file").touch()
    (root / "empty").mkdir()
    workspace.snapshot("before")
    for was_listed in (False, True):
        place = root / ".snapshots" / "before" / name
        here = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        words = ["sh", "-c", "read begin; exec ls"]
        inside = subprocess.Popen(words, cwd=place, stdin=-1, stdout=-1, stderr=-1, env={**os.environ, "LC_ALL": "C"})
        try:
            if was_listed:
                listed_again(here)  # the kernel keeps the listing
                assert listed_again(here) == sorted(os.listdir(root if name == "." else root / name))
            workspace.drop("before")
            fails(errno.ESTALE, partial(listed_again, here))
            output, complaint = inside.communicate(b"begin\n", timeout=60)
            assert (inside.returncode, output) == (2, b"")
            assert b"Stale file handle" in complaint
        finally:
            os.close(here)
            inside.kill()
            inside.communicate()
        workspace.snapshot("before")


def listed_again(directory: int) -> list[str]:
    """List an open directory as a program does whose current directory it is."""
    again = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
    try:
        return sorted(os.listdir(again))
    finally:
        os.close(again)


@pytest.mark.both_engines
def test_a_listing_shows_each_snapshot_as_soon_as_it_was_taken(workspace: Workspace, root: Path) -> None:
    def listed() -> set[str]:
        return set(os.listdir(root / ".snapshots"))

    assert listed() == set()  # the kernel keeps this listing
    workspace.snapshot("first")
    assert listed() == {"first"}
    workspace.snapshot("second")
    assert listed() == {"first", "second"}
    (root / "file").write_text("new")
    safety = workspace.restore("first").safety_snapshot
    assert listed() == {"first", "second", safety}
    workspace.drop("second")
    assert listed() == {"first", safety}


@pytest.mark.both_engines
def test_a_listing_ends_though_its_reader_takes_snapshots(workspace: Workspace, root: Path) -> None:
    for number in range(3):
        workspace.snapshot(f"s{number}")
    with os.scandir(root / ".snapshots") as entries:
        seen = []
        for entry in entries:
            seen.append(entry.name)
            workspace.snapshot(f"{entry.name}-{len(seen)}")
            assert len(seen) <= 3, "the listing does not end"
    assert sorted(seen) == ["s0", "s1", "s2"]


@pytest.mark.extended
def test_many_entries_are_listed_once_each(workspace: Workspace, root: Path) -> None:
    names = {f"{number:04}" * 20 for number in range(1100)}
    for name in names:
        (root / name).touch()
    workspace.snapshot("before")

    listed = os.listdir(root / ".snapshots" / "before")
    assert len(listed) == len(set(listed))
    assert set(listed) >= names
    with os.scandir(root / ".snapshots" / "before") as entries:
        assert all(entry.inode() == os.stat(entry.path).st_ino for entry in list(entries)[:50])


def test_vfsd_fs_reads_a_snapshot(workspace: Workspace, root: Path) -> None:
    def answer(*words: str) -> Any:
        return json.loads(succeeded(vfsd("fs", *words, "-w", workspace.name)))["data"]

    (root / "dir").mkdir()
    (root / "dir" / "file").write_text("old needle\n")
    workspace.snapshot("before")
    (root / "dir" / "file").write_text("new\n")
    (root / "dir" / "other").write_text("needle\n")

    assert answer("read", "--at", "before", "dir/file")["content"] == "old needle\n"
    assert [entry["path"] for entry in answer("ls", "--at", "before", "dir")["entries"]] == ["dir/file"]
    assert [match["path"] for match in answer("grep", "--at", "before", "needle")["matches"]] == ["dir/file"]
    assert [found["path"] for found in answer("glob", "--at", "before", "dir/*")["files"]] == ["dir/file"]
    assert answer("stat", "--at", "before", "dir/file")["size_bytes"] == 11
    refused = vfsd("fs", "ls", "--at", "nothing", "-w", workspace.name)
    assert json.loads(refused.stdout)["error"] == "no such snapshot: nothing; `vfsd snapshots` lists them"


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


@pytest.mark.parametrize("engine", ["native"])
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
