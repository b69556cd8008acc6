"""Snapshots of a host directory: taken, restored, compared and carried away while programs work, on each engine."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import MountIt, complaints, mounted
from tests.mount.engine_child import Watcher
from tests.mount.programs import Program, failed, succeeded, vfsd
from tests.mount.test_host_backend import rich_tree, run, tree_of
from tests.support.host_directories import mounted_tmpfs
from tests.support.rights import need_root, needs_root
from tests.support.waiting import wait_until
from vfsd.client.arguments import mount_options
from vfsd.client.connection import daemon_end
from vfsd.client.launch import launch
from vfsd.client.workspace import Workspace
from vfsd.wire.options import Ready

# The kernel's cache entries must not expire while a test looks whether they were invalidated.
pytestmark = pytest.mark.workspaces(backend="host", cache_timeout_s=3600.0)


def without_directory_times(tree: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    return {
        path: fields[:6] + fields[7:] if stat.S_ISDIR(fields[0]) else fields  # type: ignore[arg-type]
        for path, fields in tree.items()
    }


# -- the cycle ---------------------------------------------------------------------------------------
@pytest.mark.extended
@pytest.mark.both_engines
def test_a_restore_brings_back_everything_that_was_there_and_nothing_else(
    workspace: Workspace, root: Path, directory: Path
) -> None:
    rich_tree(directory / "tree")
    (directory / "tree" / ".git").mkdir()
    (directory / "tree" / ".gitignore").write_text("ignored\n")
    (directory / "tree" / "ignored").write_text("kept all the same")
    expected = tree_of(directory)
    workspace.snapshot("one")
    shutil.rmtree(root / "tree" / "dir")
    (root / "tree" / "plain").write_text("changed")
    (root / "tree" / "empty").chmod(0o600)
    (root / "tree" / "script").unlink()
    (root / "tree" / "script").mkdir()
    (root / "tree" / "new").mkdir()
    (root / "tree" / "new" / "file").write_text("x")
    restored = workspace.restore("one")
    assert tree_of(directory) == expected
    assert tree_of(root) == expected
    assert restored.counts.total
    assert {change.path: change.change for change in restored.changes}["tree/script"] == "type"
    # Hard links are one file again.
    assert os.stat(root / "tree" / "plain").st_ino == os.stat(root / "tree" / "dir" / "hard").st_ino


def test_what_is_the_same_is_not_touched(workspace: Workspace, root: Path, directory: Path) -> None:
    for number in range(50):
        (root / f"f{number}").write_text(f"{number}")
    workspace.snapshot("one")
    before = {path.name: (path.stat().st_ino, path.stat().st_ctime_ns) for path in directory.iterdir()}
    (root / "f7").write_text("changed")
    workspace.restore("one")
    after = {path.name: (path.stat().st_ino, path.stat().st_ctime_ns) for path in directory.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"f7"}


@pytest.mark.extended
def test_a_snapshot_after_each_tool_call_and_back_to_any_of_them(
    workspace: Workspace, root: Path, directory: Path, workdir: Path
) -> None:
    git = ("git", "-c", "user.email=a@b", "-c", "user.name=n")
    calls = [
        ["git", "init", "-q"],
        ["sh", "-c", "mkdir -p src/deep; for i in 1 2 3 4 5 6 7 8 9; do echo $i > src/deep/f$i; done"],
        [*git, "add", "-A"],
        [*git, "commit", "-qm", "one"],
        ["sh", "-c", "rm -r src/deep; echo new > src/new; ln -s new src/link"],
        [*git, "commit", "-qam", "two"],
        ["sed", "-i", "s/new/newer/", "src/new"],
        ["mv", "src", "source"],
    ]
    states = []
    for number, call in enumerate(calls):
        run(*call, cwd=root)
        workspace.snapshot(f"call-{number}", tag=call[0])
        states.append(tree_of(directory))
    assert [info.tag for info in workspace.snapshots()][:2] == ["git", "sh"]
    for number in (3, 7, 0, 5, 4, 7):
        workspace.restore(f"call-{number}")
        assert tree_of(directory) == states[number]
        assert without_directory_times(tree_of(root)) == without_directory_times(states[number])
    workspace.restore("call-5")
    run("git", "fsck", "--strict", cwd=root)
    assert run("git", "log", "--format=%s", cwd=root).split() == ["two", "one"]


def test_snapshots_count_what_each_changed(workspace: Workspace, root: Path) -> None:
    (root / "a").write_text("a")
    (root / "b").write_text("b")
    workspace.snapshot("one")
    (root / "a").write_text("changed")
    (root / "b").unlink()
    (root / "c").write_text("c")
    workspace.snapshot("two")
    two = workspace.snapshots()[1]
    assert two.changes is not None
    assert (two.changes.added, two.changes.modified, two.changes.removed) == (1, 1, 1)
    assert (two.files, two.size_bytes) == (2, 8)


# -- beside and behind the mount -----------------------------------------------------------------------
def test_what_was_changed_behind_the_mount_is_in_a_snapshot_and_comes_back(
    workspace: Workspace, root: Path, directory: Path
) -> None:
    (root / "file").write_text("one")
    assert (root / "file").read_text() == "one"
    (directory / "file").write_text("behind the mount")
    (directory / "unseen").write_text("never looked up")
    workspace.snapshot("one")
    (directory / "file").unlink()
    (directory / "unseen").write_text("changed unseen")
    workspace.restore("one")
    assert (directory / "file").read_text() == "behind the mount"
    assert (directory / "unseen").read_text() == "never looked up"


@pytest.mark.both_engines
def test_what_was_written_through_a_mapping_and_never_synced_is_in_a_snapshot(
    workspace: Workspace, root: Path, program: Program
) -> None:
    (root / "file").write_bytes(b"x" * 100_000)
    program("fd = os.open(root + '/file', os.O_RDWR); m = mmap.mmap(fd, 0)")
    program("m[0:3] = b'one'; m[90000:90003] = b'one'")
    workspace.snapshot("one")
    (root / "file").write_bytes(b"y")
    workspace.restore("one")
    content = (root / "file").read_bytes()
    assert (len(content), content[:3], content[90000:90003]) == (100_000, b"one", b"one")


@pytest.mark.both_engines
def test_no_reader_sees_what_was_there_before_the_restore(workspace: Workspace, root: Path, directory: Path) -> None:
    (root / "d").mkdir()
    for name in ("same-size", "d/deep", "removed", "mode"):
        (root / name).write_text("one")
    for name in ("same-size", "mode"):
        os.utime(root / name, ns=(10**18, 10**18))
    workspace.snapshot("one")
    (root / "same-size").write_text("two")
    os.utime(root / "same-size", ns=(10**18, 10**18))  # neither size nor mtime tells it apart
    (root / "d" / "deep").write_text("changed")
    (root / "removed").unlink()
    (root / "mode").chmod(0o600)
    (root / "new").write_text("new")
    # The kernel knows all of it, and what is not there, for an hour.
    for name in ("same-size", "d/deep", "new"):
        (root / name).read_text()
    os.listdir(root)
    assert not (root / "removed").exists()
    assert stat.S_IMODE((root / "mode").stat().st_mode) == 0o600
    workspace.restore("one")
    assert (root / "same-size").read_text() == "one"
    assert (root / "d" / "deep").read_text() == "one"
    assert (root / "removed").read_text() == "one"
    assert stat.S_IMODE((root / "mode").stat().st_mode) == 0o644
    assert not (root / "new").exists()
    assert sorted(os.listdir(root)) == sorted(os.listdir(directory))


@pytest.mark.both_engines
def test_open_files_go_on_as_if_the_restore_had_renamed_others_over_them(
    workspace: Workspace, root: Path, program: Program
) -> None:
    (root / "changed").write_text("one")
    (root / "kept").write_text("kept")
    workspace.snapshot("one")
    program("changed = os.open(root + '/changed', os.O_RDWR); os.pwrite(changed, b'two', 0)")
    program("kept = os.open(root + '/kept', os.O_RDWR)")
    program("os.mkdir(root + '/d'); new = os.open(root + '/d/new', os.O_RDWR | os.O_CREAT); os.write(new, b'mine')")
    program("os.chdir(root + '/d')")
    workspace.restore("one")
    assert program("os.pread(changed, 9, 0), os.fstat(changed).st_nlink") == (b"two", 0)
    assert program("os.pwrite(changed, b'three', 0), os.pread(changed, 9, 0)") == (5, b"three")
    assert (root / "changed").read_text() == "one"
    assert program("os.pwrite(new, b'MINE', 0), os.pread(new, 9, 0), os.fstat(new).st_nlink") == (4, b"MINE", 0)
    assert program("os.pwrite(kept, b'K', 0), os.fstat(kept).st_nlink") == (1, 1)
    assert (root / "kept").read_text() == "Kept"
    assert sorted(os.listdir(root)) == ["changed", "kept"]
    assert program("os.listdir('.')") == []
    # The same again, now that what is open has no name.
    workspace.undo()
    assert (root / "changed").read_text() == "two"
    assert program("os.pread(changed, 9, 0)") == b"three"


@pytest.mark.extended
@pytest.mark.both_engines
def test_many_files_are_restored_under_a_program_that_reads_them(
    workspace: Workspace, root: Path, program: Program
) -> None:
    for number in range(300):
        (root / f"f{number}").write_text(f"one {number}")
    workspace.snapshot("one")
    for number in range(0, 300, 2):
        (root / f"f{number}").write_text(f"two {number}")
    workspace.snapshot("two")
    program(
        "seen = set(); stop = threading.Event()\n"
        "def read():\n"
        "    while not stop.is_set():\n"
        "        for number in range(300):\n"
        "            with open(f'{root}/f{number}') as file: seen.add((number, file.read()))\n"
        "thread = threading.Thread(target=read); thread.start()"
    )
    for name in ("one", "two", "one", "two", "one"):
        workspace.restore(name)
        for number in range(300):
            word = "two" if name == "two" and number % 2 == 0 else "one"
            assert (root / f"f{number}").read_text() == f"{word} {number}"
    program("stop.set(); thread.join()")
    torn = {f"{word} {number}" for word in ("one", "two") for number in range(300)}
    assert {content for _, content in program("seen")} <= torn


@pytest.mark.both_engines
def test_watchers_are_told_what_a_restore_changed(workspace: Workspace, root: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "back").write_text("x")
    (root / "d" / "changed").write_text("one")
    workspace.snapshot("one")
    (root / "d" / "back").unlink()
    (root / "d" / "changed").write_text("two")
    (root / "d" / "new").write_text("x")
    watcher = Watcher()
    try:
        watcher.add(str(root / "d"), "d")
        workspace.restore("one")
        expected = {"DELETE d/new", "CREATE d/back", "DELETE d/changed", "CREATE d/changed"}
        seen: set[str] = set()

        def told() -> bool:  # the events follow the answer
            seen.update(watcher.events())
            return expected <= seen

        wait_until(told)
    finally:
        os.close(watcher.fd)


# -- comparing ---------------------------------------------------------------------------------------
def test_a_file_of_the_same_size_and_time_is_found_changed(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("one")
    workspace.snapshot("one")
    seen = (root / "file").stat()
    (root / "file").write_text("two")
    os.utime(root / "file", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert [(change.path, change.change) for change in workspace.diff("one").changes] == [("file", "modified")]


# -- archives ----------------------------------------------------------------------------------------
def test_an_export_is_the_state_at_one_moment_whatever_is_written_meanwhile(
    workspace: Workspace, root: Path, directory: Path, workdir: Path
) -> None:
    for number in range(40):
        (directory / f"f{number}").write_bytes(bytes([number]) * 200_000)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            for number in range(40):
                with open(directory / f"f{number}", "r+b") as file:
                    file.truncate(1000)
                    file.write(bytes([number]) * 150_000)
                    file.truncate(200_000)

    thread = threading.Thread(target=write)

    def begin(_: object) -> None:
        if not thread.is_alive() and not ended.is_set():
            thread.start()

    workspace.snapshot("one")
    try:
        workspace.export(workdir / "live.zip", on_progress=begin)
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
    with zipfile.ZipFile(workdir / "live.zip") as archive:
        assert archive.testzip() is None
        assert {len(archive.read(f"files/f{number}")) for number in range(40)} == {200_000}
    assert [info.name for info in workspace.snapshots()] == ["one"]


@pytest.mark.extended
def test_a_state_goes_from_the_host_into_memory_and_into_an_overlay_and_back(
    mount: MountIt, workspace: Workspace, root: Path, directory: Path, workdir: Path
) -> None:
    rich_tree(directory / "tree")
    expected = tree_of(directory)
    workspace.snapshot("one")
    workspace.export(workdir / "one.zip", snapshot="one")
    memory = mount(archive=workdir / "one.zip")
    assert tree_of(Path(memory.path)) == expected
    (workdir / "lower").mkdir()
    overlay = mount(backend=f"overlay:{workdir}/lower")
    overlay.restore(workdir / "one.zip")
    assert tree_of(Path(overlay.path)) == expected
    memory.export(workdir / "two.zip")
    shutil.rmtree(root / "tree")
    (root / "since").write_text("x")
    restored = workspace.restore(workdir / "two.zip")
    assert tree_of(directory) == expected
    assert ("since", "removed") in {(change.path, change.change) for change in restored.changes}
    workspace.undo()
    assert os.listdir(directory) == ["since"]
    # Two of safety, and no trace of the archive.
    assert [info.name for info in workspace.snapshots()] == ["one", "safety-1", "safety-2"]


@pytest.mark.extended
def test_a_snapshot_of_a_directory_is_restored_into_any_other_workspace(
    mount: MountIt, workspace: Workspace, directory: Path, workdir: Path
) -> None:
    rich_tree(directory / "tree")
    expected = tree_of(directory)
    workspace.snapshot("one")
    shutil.rmtree(directory / "tree")
    (workdir / "lower").mkdir()
    (workdir / "lower" / "own").write_text("x")
    (workdir / "second").mkdir()
    others = [mount(), mount(backend=f"overlay:{workdir}/lower"), mount(backend=f"host:{workdir}/second")]
    for other in others:
        (Path(other.path) / "before").write_text("x")
        planned = other.restore("one", of=f"host:{directory}", dry_run=True)
        restored = other.restore("one", of=f"host:{directory}")
        assert restored.counts == planned.counts
        assert restored.source == f"one of host:{directory}"
        assert tree_of(Path(other.path)) == expected
        assert other.undo().step == "restore one"
        assert "before" in os.listdir(other.path)
        assert not (Path(other.path) / "tree").exists()
    os.symlink(directory, workdir / "alias")
    succeeded(vfsd("restore", "one", "tree/dir", "--of", "host:alias", "-w", others[0].name, cwd=workdir))
    assert sorted(os.listdir(Path(others[0].path) / "tree" / "dir")) == sorted(
        path.removeprefix("tree/dir/") for path in expected if path.startswith("tree/dir/") and path.count("/") == 2
    )
    with pytest.raises(FileNotFoundError):
        others[0].restore("nothing", of=f"host:{directory}")
    with pytest.raises(FileNotFoundError):
        others[0].restore("one", of=f"host:{workdir}")
    with pytest.raises(FileNotFoundError):
        others[0].restore("one", of=f"host:{directory}", store=workdir / "none")
    small = mount(max_bytes=4096)
    (Path(small.path) / "own").write_text("x")
    with pytest.raises(OSError, match="No space"):
        small.restore("one", of=f"host:{directory}")
    assert os.listdir(small.path) == ["own"]


def test_an_import_is_laid_over_what_is_there(workspace: Workspace, root: Path, directory: Path, workdir: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "a").write_text("from the archive")
    (root / "e" / "f").mkdir(parents=True)
    (root / "e" / "f" / "g").write_text("deep")
    (root / "kind").write_text("a file")
    workspace.export(workdir / "x.zip")
    ctimes = {path: path.stat().st_ctime_ns for path in directory.rglob("*")}
    assert workspace.import_archive(workdir / "x.zip").counts.total == 0
    assert {path: path.stat().st_ctime_ns for path in directory.rglob("*")} == ctimes
    shutil.rmtree(root / "e")
    (root / "d" / "a").write_text("changed")
    (root / "d" / "own").write_text("own")
    (root / "kind").unlink()
    (root / "kind").mkdir()
    (root / "kind" / "in").write_text("x")
    (root / "other").write_text("other")
    imported = workspace.import_archive(workdir / "x.zip")
    assert (imported.files, imported.counts.added, imported.counts.modified) == (3, 3, 2)
    assert (root / "d" / "a").read_text() == "from the archive"
    assert (root / "e" / "f" / "g").read_text() == "deep"
    assert (root / "kind").read_text() == "a file"
    assert ((root / "d" / "own").read_text(), (root / "other").read_text()) == ("own", "other")
    workspace.undo()
    assert (root / "kind" / "in").read_text() == "x"
    assert not (directory / "e").exists()


def test_a_damaged_archive_changes_nothing(workspace: Workspace, root: Path, directory: Path, workdir: Path) -> None:
    (root / "a").write_bytes(os.urandom(10_000))
    workspace.export(workdir / "x.zip")
    data = bytearray((workdir / "x.zip").read_bytes())
    at = data.index(b"files/a") + 2000
    data[at] ^= 255
    (workdir / "x.zip").write_bytes(data)
    (root / "a").write_text("changed")
    before = tree_of(directory)
    for attempt in (workspace.import_archive, workspace.restore):
        with pytest.raises(OSError, match="files/a"):
            attempt(workdir / "x.zip")
    assert tree_of(directory) == before
    assert workspace.snapshots() == []


# -- when it fails -----------------------------------------------------------------------------------
def test_what_a_restore_may_not_change_is_named_and_the_rest_is_done(
    workspace: Workspace, root: Path, directory: Path
) -> None:
    need_root()
    (root / "a").write_text("one")
    (root / "d").mkdir()
    (root / "d" / "b").write_text("one")
    workspace.snapshot("one")
    (root / "a").write_text("two")
    (root / "d" / "b").write_text("two")
    run("chattr", "+i", directory / "d")
    try:
        restored = workspace.restore("one")
        assert "d/b" in restored.problems
        assert [change.path for change in restored.changes] == ["a"]
        assert ((root / "a").read_text(), (root / "d" / "b").read_text()) == ("one", "two")
        again = vfsd("restore", "one", "-w", workspace.name)
        assert again.returncode == 1
        assert "d/b: " in again.stderr
    finally:
        run("chattr", "-i", directory / "d")
    assert workspace.restore("one").problems == {}
    assert (root / "d" / "b").read_text() == "one"
    assert workspace.status().interrupted is None


def test_a_restore_that_fails_leaves_the_state_before_and_no_safety_snapshot(
    workdir: Path, directory: Path, engine: str
) -> None:
    need_root()
    root = workdir / "m"
    root.mkdir()
    with (
        mounted_tmpfs(workdir / "small", max_bytes=2 << 20) as small,
        mounted(root, backend=f"host:{small}", cache_timeout_s=3600.0, engine=engine, name=workdir.name) as workspace,
    ):
        (root / "a").write_text("one")
        (root / "big").write_bytes(os.urandom(1 << 20))
        workspace.snapshot("one")
        (root / "a").write_text("two")
        (root / "big").unlink()
        (root / "other").write_bytes(os.urandom(1536 << 10))
        before = tree_of(small)
        with pytest.raises(OSError, match="No space") as caught:
            workspace.restore("one")
        assert caught.value.errno == errno.ENOSPC
        assert tree_of(small) == before
        assert tree_of(root) == before
        assert [info.name for info in workspace.snapshots()] == ["one"]
        assert workspace.status().interrupted is None
        (root / "other").unlink()
        workspace.restore("one")
        assert (root / "a").read_text() == "one"


def test_a_read_only_mount_is_compared_and_exported_and_never_restored(
    mount: MountIt, directory: Path, workdir: Path
) -> None:
    (directory / "a").write_text("one")
    workspace = mount(backend=f"host:{directory}", read_only=True)
    workspace.snapshot("one")
    (directory / "a").write_text("changed")
    assert workspace.diff("one").counts.modified == 1
    workspace.export(workdir / "x.zip", snapshot="one")
    for attempt in (lambda: workspace.restore("one"), lambda: workspace.import_archive(workdir / "x.zip")):
        with pytest.raises(OSError, match="read-only") as caught:
            attempt()
        assert caught.value.errno == errno.EROFS
    assert (directory / "a").read_text() == "changed"


@pytest.mark.extended
def test_progress_is_told_and_a_client_that_goes_ends_the_work(workspace: Workspace, root: Path) -> None:
    for number in range(64):
        (root / f"f{number}").write_bytes(os.urandom(256 * 1024))
    steps: list[int] = []
    workspace.snapshot("one", on_progress=lambda step: steps.append(step.done))
    assert steps
    for number in range(64):
        (root / f"f{number}").write_bytes(os.urandom(256 * 1024))

    class Gone(Exception):
        pass

    def leave(_: object) -> None:
        raise Gone

    with contextlib.suppress(Gone):
        workspace.snapshot("two", on_progress=leave)
    # Taken as a whole, or not at all.
    assert {info.name for info in workspace.snapshots()} <= {"one", "two"}
    workspace.snapshot("three")
    steps.clear()
    workspace.restore("one", on_progress=lambda step: steps.append(step.done))
    assert steps


# -- without privileges --------------------------------------------------------------------------------
@pytest.mark.extended
@pytest.mark.both_engines
@needs_root
@pytest.mark.extended
def test_a_daemon_without_privileges_keeps_and_restores_what_is_its_users(
    public: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = 1234
    for name in ("mnt", "host", "run", "store"):
        (public / name).mkdir(mode=0o700)
        os.chown(public / name, user, user)
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(public / "run"))
    monkeypatch.setenv("VFSD_STORE_DIR", str(public / "store"))
    host = public / "host"
    for name, mode in (("roots", 0o600), ("shown", 0o644)):
        (host / name).write_text("of root")
        (host / name).chmod(mode)
    as_user = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    picked = ("-w", "unprivileged")
    command = [sys.executable, "-P", "-m", "tests.mount.unprivileged_daemon", public / "mnt", host, "unprivileged"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [*map(str, command), engine, str(user)], stdout=subprocess.PIPE, text=True, env=environment
    ) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == "ready\n"
            write = "mkdir -p d/e; echo one > d/e/f; ln d/e/f hard; ln -s d link; chmod 4755 hard"
            run(*as_user, "sh", "-c", write, cwd=public / "mnt")
            taken = vfsd("snapshot", "one", *picked, before=as_user)
            assert succeeded(taken) == "one\n"
            assert "roots: could not be read" in taken.stderr
            found = json.loads(succeeded(vfsd(*picked, "fs", "grep", "root", before=as_user)))["data"]
            assert [match["path"] for match in found["matches"]] == ["shown"]
            assert found["unreadable"] == [{"path": "roots", "reason": "Permission denied"}]
            assert found["unreadable_count"] == 1
            assert succeeded(vfsd("diff", "one", "--patch", *picked, before=as_user)) == ""
            expected = tree_of(host)
            change = "rm -r d hard; echo two > hard; rm -f shown; echo mine > shown; echo new > new"
            run(*as_user, "sh", "-c", change, cwd=public / "mnt")
            restored = vfsd("restore", "one", *picked, before=as_user)
            # What root owned cannot be given back to root; all else is as it was.
            assert restored.returncode == 1
            assert "shown: owner 0:0" in restored.stderr
            found = tree_of(host)
            assert found.pop("shown")[7] == expected.pop("shown")[7]
            assert found == expected
            assert (host / "roots").read_text() == "of root"
            assert os.stat(host / "d" / "e" / "f").st_ino == os.stat(host / "hard").st_ino
            run(*as_user, "sh", "-c", "test ! -e new && test $(cat d/e/f) = one", cwd=public / "mnt")
        finally:
            subprocess.run(["umount", "-l", public / "mnt"], check=False, capture_output=True)
            assert daemon.wait(20) == 0
    assert {path.stat().st_uid for path in (public / "store").rglob("*")} == {user}


# -- the daemon's end ----------------------------------------------------------------------------------
def started(place: Path, backend: str, **options: object) -> Ready:
    """Mount without a keeper, so that the daemon can be killed for good."""
    return launch(mount_options(place, backend, name=place.parent.name, keeper=False, **options))  # type: ignore[arg-type]


def kill(ready: Ready) -> None:
    with daemon_end(ready.pid) as wait_ended:
        os.kill(ready.pid, signal.SIGKILL)
        wait_ended()


def test_snapshots_outlive_the_daemon(workdir: Path, directory: Path, engine: str) -> None:
    (workdir / "m").mkdir()
    (workdir / "elsewhere").mkdir()
    with Workspace.mount(workdir / "m", f"host:{directory}", name=f"{workdir.name}a", engine=engine) as first:  # type: ignore[arg-type]
        (Path(first.path) / "file").write_text("one")
        first.snapshot("one", tag="kept")
        (Path(first.path) / "file").write_text("two")
    (directory / "since").write_text("x")
    os.symlink(directory, workdir / "alias")
    second = Workspace.mount(workdir / "elsewhere", f"host:{workdir}/alias", name=f"{workdir.name}b", engine=engine)  # type: ignore[arg-type]
    with second:
        assert [(info.name, info.tag) for info in second.snapshots()] == [("one", "kept")]
        second.restore("one")
        assert (Path(second.path) / "file").read_text() == "one"
        assert sorted(os.listdir(directory)) == ["file"]
        second.undo()
        assert (directory / "file").read_text() == "two"


def kill_amid(ready: Ready, work: Callable[[Workspace], object], is_under_way: Callable[[], bool]) -> None:
    """Kill the daemon while it does `work`."""
    failure: list[BaseException] = []

    def run_it() -> None:
        try:
            work(Workspace.attach(ready.name))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run_it)
    thread.start()
    while not is_under_way():
        assert thread.is_alive()
        time.sleep(0.001)  # the daemon needs the CPU
    kill(ready)
    thread.join()
    [error] = failure
    assert isinstance(error, ConnectionError)


FILES = 1500  # enough that work on them is seen under way, and not over when the kill comes


class Half:
    """A directory with one state kept as "one", and another in it, that work on many files is to change."""

    def __init__(self, workdir: Path, directory: Path, engine: str) -> None:
        self.place = workdir / "m"
        self.place.mkdir()
        self.directory = directory
        self.name = workdir.name
        self._mount = (self.place, "--backend", f"host:{directory}", "--name", self.name, "--engine", engine)
        for number in range(FILES):
            (directory / f"d{number % 6}").mkdir(exist_ok=True)
            (directory / f"d{number % 6}" / f"f{number}").write_text(f"one {number}")
        self.ready = started(self.place, f"host:{directory}", engine=engine)
        Workspace.attach(self.name).snapshot("one")
        self.one = tree_of(directory)

    def change(self) -> None:
        for number in range(FILES):
            (self.place / f"d{number % 6}" / f"f{number}").write_text(f"two, and longer {number}")
        shutil.rmtree(self.place / "d3")
        (self.place / "new").write_text("new")
        self.two = tree_of(self.directory)

    def is_under_way(self) -> bool:
        return (self.directory / "d0" / "f0").read_text().startswith("one")

    @contextlib.contextmanager
    def mounted_again(self) -> Iterator[str]:
        """What the mount says of what it found."""
        remounted = vfsd("mount", *self._mount)
        assert succeeded(remounted)
        try:
            [said] = [line for line in remounted.stderr.splitlines() if "was interrupted" in line]
            assert Workspace.attach(self.name).status().interrupted in said
            yield said
            assert Workspace.attach(self.name).status().interrupted is None
            assert any("was interrupted" in line for line in complaints(self.name))
            assert not [path for path in self.directory.rglob("*") if "vfsd" in path.name]
        finally:
            succeeded(vfsd("unmount", self.name))


@pytest.mark.extended
@pytest.mark.parametrize("way", ["finish", "undo"])
@pytest.mark.slow
def test_a_restore_whose_daemon_is_killed_is_finished_or_undone_by_the_next(
    workdir: Path, directory: Path, engine: str, way: str
) -> None:
    half = Half(workdir, directory, engine)
    half.change()
    kill_amid(half.ready, lambda workspace: workspace.restore("one"), half.is_under_way)
    with half.mounted_again() as said:
        assert "`vfsd restore one` finishes it" in said
        assert "`vfsd restore --undo`" in said
        workspace = Workspace.attach(half.name)
        if way == "finish":
            workspace.restore("one")
        else:
            workspace.undo()
        expected = half.one if way == "finish" else half.two
        assert tree_of(directory) == expected
        assert tree_of(half.place) == expected


@pytest.mark.extended
def test_a_restore_of_some_paths_that_was_killed_is_finished_with_these(
    workdir: Path, directory: Path, engine: str
) -> None:
    half = Half(workdir, directory, engine)
    half.change()
    paths = ["d0", "d3", "d5"]
    kill_amid(half.ready, lambda workspace: workspace.restore("one", paths), half.is_under_way)
    with half.mounted_again() as said:
        assert "`vfsd restore one d0 d3 d5` finishes it" in said
        succeeded(vfsd("restore", "one", *paths, "-w", half.name))
        expected = {path: half.one.get(path) for path in half.one if path.partition("/")[0] in paths}
        expected |= {path: half.two[path] for path in half.two if path.partition("/")[0] not in paths}
        assert tree_of(directory) == expected


@pytest.mark.extended
@pytest.mark.parametrize("way", ["finish", "undo"])
def test_an_import_whose_daemon_is_killed_is_finished_or_undone_by_the_next(
    workdir: Path, directory: Path, engine: str, way: str
) -> None:
    half = Half(workdir, directory, engine)
    Workspace.attach(half.name).export(workdir / "one.zip")
    half.change()
    kill_amid(half.ready, lambda workspace: workspace.import_archive(workdir / "one.zip"), half.is_under_way)
    with half.mounted_again() as said:
        assert f"an import of {workdir}/one.zip was interrupted" in said
        workspace = Workspace.attach(half.name)
        assert "archive" not in "".join(info.name for info in workspace.snapshots())
        if way == "finish":
            succeeded(vfsd("restore", "archive-1", "-w", half.name))
        else:
            workspace.undo()
        expected = half.one | {"new": half.two["new"]} if way == "finish" else half.two
        assert tree_of(directory) == expected
        with pytest.raises(FileNotFoundError):
            workspace.restore("archive-1")


# -- the store ---------------------------------------------------------------------------------------
def test_a_store_inside_the_directory_is_refused(workdir: Path, directory: Path) -> None:
    (workdir / "m").mkdir()
    os.symlink(directory, workdir / "alias")
    for store in (directory / "store", workdir / "alias" / "deep" / "store", directory):
        refused = vfsd("mount", workdir / "m", "--backend", f"host:{directory}", "--store", store)
        assert "inside" in failed(refused)
    assert os.listdir(directory) == []


def test_a_store_of_ones_own_holds_the_snapshots(mount: MountIt, directory: Path, workdir: Path) -> None:
    workspace = mount(backend=f"host:{directory}", store=workdir / "own")
    (directory / "a").write_text("x")
    workspace.snapshot("one")
    assert (workdir / "own").is_dir()
    assert stat.S_IMODE((workdir / "own").stat().st_mode) == 0o700


def test_what_dropped_snapshots_held_is_freed_in_time(mount: MountIt, directory: Path, workdir: Path) -> None:
    workspace = mount(backend=f"host:{directory}", store=workdir / "own")
    for number in range(20):
        (directory / "large").write_bytes(os.urandom(300 << 10))
        workspace.snapshot(f"s{number}")

    def size() -> int:
        return sum(path.stat().st_size for path in (workdir / "own").rglob("*") if path.is_file())

    before = size()
    for number in range(19):
        workspace.drop(f"s{number}")
    wait_until(lambda: size() < before - 15 * (300 << 10))
    (directory / "large").unlink()
    workspace.restore("s19")
    assert (directory / "large").stat().st_size == 300 << 10
