"""Forks on real mounts: copies that share memory, in daemons that do not depend on each other."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.mount.conftest import Fork, check_invariants, mounted, text
from tests.support.unmounting import unmount_when_idle
from tests.support.waiting import wait_until
from vfsd import Workspace
from vfsd.cli.main import cli


@pytest.fixture(params=["memory", "overlay"])
def source(request: pytest.FixtureRequest, workdir: Path) -> Iterator[Workspace]:
    """A workspace with a few files, those of an overlay partly below it."""
    below = workdir / "below"
    (below / "lower").mkdir(parents=True)
    (below / "lower" / "file").write_text("below")
    with mounted(workdir / "source", backend=request.param, engine="native", name="source") as workspace:
        (workdir / "source" / "tree").mkdir()
        (workdir / "source" / "tree" / "file").write_text("source")
        yield workspace


def write(workspace: Workspace, content: str, path: str = "tree/file") -> None:
    Path(workspace.path, path).write_text(content)


def test_neither_side_sees_the_changes_of_the_other(source: Workspace, fork: Fork) -> None:
    copy = fork("copy")
    assert text(copy) == "source"
    write(copy, "of the fork")
    write(source, "of the source")
    Path(copy.path, "tree", "new").mkdir()
    Path(source.path, "tree", "file").rename(Path(source.path, "moved"))
    assert text(copy) == "of the fork"
    assert text(source, "moved") == "of the source"
    assert sorted(os.listdir(Path(copy.path, "tree"))) == ["file", "new"]
    assert os.listdir(Path(source.path, "tree")) == []


def test_a_fork_keeps_inode_numbers_and_times(source: Workspace, fork: Fork) -> None:
    before = os.stat(Path(source.path, "tree", "file"))
    after = os.stat(Path(fork("copy").path, "tree", "file"))
    assert (before.st_ino, before.st_mtime_ns, before.st_ctime_ns, before.st_mode) == (
        after.st_ino, after.st_mtime_ns, after.st_ctime_ns, after.st_mode,
    )  # fmt: skip


@pytest.mark.parametrize("source", ["overlay"], indirect=True)
def test_what_is_below_an_overlay_is_read_by_the_fork(source: Workspace, fork: Fork) -> None:
    copy = fork("copy")
    assert text(copy, "lower/file") == "below"
    write(copy, "changed", "lower/file")
    assert text(source, "lower/file") == "below"
    copy.discard()
    assert text(copy, "lower/file") == "below"
    assert not os.path.exists(Path(copy.path, "tree"))
    assert text(source) == "source"


def test_a_fork_has_the_snapshots_and_the_undo_steps_of_its_source(source: Workspace, fork: Fork) -> None:
    source.snapshot("one")
    write(source, "second")
    source.restore("one")
    write(source, "third")
    copy = fork("copy")
    assert {"one", "safety-1"} <= {each.name for each in copy.snapshots()}
    copy.undo()
    assert text(copy) == "second"
    copy.redo()
    assert text(copy) == "third"
    copy.restore("one")
    assert text(copy) == "source"
    assert text(source) == "third"
    source.drop("one")
    assert "one" in {each.name for each in copy.snapshots()}


def test_an_older_state_can_be_forked(source: Workspace, fork: Fork) -> None:
    source.snapshot("one")
    write(source, "later")
    copy = fork("copy", snapshot="one")
    assert text(copy) == "source"
    assert text(source) == "later"
    assert copy.status().base == "one"
    with pytest.raises(FileNotFoundError):
        fork("other", snapshot="missing")
    assert not os.path.exists(Path(source.path).parent / "other")


@pytest.mark.extended
def test_forks_of_forks_outlive_their_source(source: Workspace, fork: Fork, workdir: Path) -> None:
    first = fork("first")
    write(first, "first")
    second = fork("second", of=first)
    write(second, "second")
    os.kill(first.pid, signal.SIGKILL)
    assert text(second) == "second"
    assert text(source) == "source"
    assert second.status().forked_from == "first"
    third = fork("third", of=second)
    unmount_when_idle(second)
    assert text(third) == "second"
    Workspace.attach("first")  # dead, and still listed until something is mounted there
    subprocess.run([sys.executable, "-m", "vfsd.cli.main", "unmount", "first"], check=True, capture_output=True)
    assert not os.path.ismount(workdir / "first")


@pytest.mark.extended
def test_the_source_keeps_the_base_until_the_forks_have_ended(source: Workspace, fork: Fork) -> None:
    def names() -> set[str]:
        return {each.name for each in source.snapshots()}

    first = fork("first")
    base = first.status().base
    assert base is not None
    second = fork("second", snapshot=base)
    unmount_when_idle(first)
    assert base in names()
    assert {each.name for each in second.snapshots()} >= {base}
    os.kill(second.pid, signal.SIGKILL)
    wait_until(lambda: base not in names(), "the source dropped the base")
    wait_until(lambda: not os.path.exists(f"/proc/{second.pid}"), "the source reaped its fork")
    subprocess.run([sys.executable, "-m", "vfsd.cli.main", "unmount", "second"], check=True, capture_output=True)


def test_a_users_snapshot_with_the_name_of_a_base_is_not_the_base(source: Workspace, fork: Fork) -> None:
    first = fork("first")
    base = str(first.status().base)
    for workspace in (source, first):
        assert run("drop", base, "--force", "-w", workspace.name).exit_code == 0
        write(workspace, "precious")
        workspace.snapshot(base)
    assert run("unmount", "first").exit_code == 1, "its snapshot would be lost"
    unmount_when_idle(first)
    second = fork("second")
    assert second.status().base != base
    unmount_when_idle(second)
    wait_until(lambda: [each.name for each in source.snapshots()] == [base], "the base of the second is gone")


def test_a_fork_whose_client_dies_does_not_prevent_the_next_one(source: Workspace, fork: Fork, workdir: Path) -> None:
    places = [workdir / f"left-{number}" for number in range(3)]
    runtime = Path(os.environ["VFSD_RUNTIME_DIR"], "vfsd")
    for number, place in enumerate(places):
        place.mkdir()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(runtime / "source.sock"))
            parameters = {"name": place.name, "mountpoint": str(place)}
            request = {"jsonrpc": "2.0", "id": 1, "method": "fork", "params": parameters}
            client.sendall(json.dumps(request).encode() + b"\n")
            wait_until((runtime / f"{place.name}.log").exists, "it is being forked")
        unmount_when_idle(fork(f"next-{number}"))

    def ended() -> bool:
        for place in filter(os.path.ismount, places):  # it was made before its client was missed
            run("unmount", place.name, "--discard")
        return [each.name for each in source.snapshots()] == []

    wait_until(ended, "the bases are dropped with the last fork")


def test_a_hangup_leaves_no_part_of_several_forks(source: Workspace, workdir: Path) -> None:
    words = ["fork", "-w", source.name, str(workdir / "agents"), "--count", "20"]
    with subprocess.Popen(
        [sys.executable, "-m", "vfsd.cli.main", *words], stderr=subprocess.PIPE, text=True
    ) as command:
        wait_until(lambda: os.path.ismount(workdir / "agents" / "1"), "the first one is made")
        command.send_signal(signal.SIGHUP)
        _, said = command.communicate(timeout=60)
    assert command.returncode == 128 + signal.SIGHUP, said
    assert "no fork was made" in said
    assert [each["name"] for each in json.loads(run("list", "--json").stdout)["workspaces"]] == ["source"]
    assert not os.path.exists(workdir / "agents")


def test_a_fork_names_the_links_that_lead_out_of_it(source: Workspace, workdir: Path) -> None:
    (Path(source.path, "absolute")).mkdir()
    (Path(source.path, "inside")).mkdir()
    write(source, "gitdir: /elsewhere/.git/worktrees/absolute\n", "absolute/.git")
    write(source, "gitdir: ../tree/.git/worktrees/inside\n", "inside/.git")
    os.mkfifo(Path(source.path, ".git"))
    os.symlink(source.path + "/tree", Path(source.path, "link"))
    os.symlink("tree", Path(source.path, "relative"))
    answer = run("fork", "-w", "source", str(workdir / "agents"), "--count", "2")
    assert answer.exit_code == 0
    git, link = answer.stderr.splitlines()
    assert "absolute is a linked git work tree: commits in the fork land in the repository that has /elsewhere/" in git
    assert f"the symlink link in the fork leads into the source, {source.path}" in link
    for name in ("agents-1", "agents-2"):
        unmount_when_idle(Workspace.attach(name))


def test_files_that_the_source_has_unlinked_and_open_are_not_in_the_fork(source: Workspace, fork: Fork) -> None:
    used = source.status().used_bytes
    with open(Path(source.path, "orphan"), "w+") as file:
        file.write("x" * (1 << 20))
        file.flush()
        os.unlink(file.name)
        copy = fork("copy")
        assert copy.status().used_bytes == used
        file.seek(0)
        assert len(file.read()) == 1 << 20


@pytest.mark.extended
def test_a_fork_during_an_export_has_no_open_views(source: Workspace, fork: Fork, workdir: Path) -> None:
    write(source, "x" * (32 << 20), "large")
    done = threading.Event()

    def export() -> None:
        source.export(workdir / "archive.zip", overwrite=True)
        done.set()

    thread = threading.Thread(target=export)
    thread.start()
    copy = fork("copy")
    os.unlink(Path(copy.path, "large"))
    copy.snapshot("after")
    copy.drop("after")
    for info in copy.snapshots():
        copy.drop(info.name, force=True)
    wait_until(lambda: (copy.status().snapshot_bytes or 0) < 1 << 20, "the fork keeps nothing for a view")
    check_invariants(copy)
    thread.join()
    assert done.is_set()
    with zipfile.ZipFile(workdir / "archive.zip") as archive:
        assert archive.testzip() is None


@pytest.mark.extended
def test_a_fork_during_an_import_owes_it_no_memory(source: Workspace, fork: Fork, workdir: Path) -> None:
    many = Path(source.path, "many")
    many.mkdir()
    for number in range(1000):
        (many / str(number)).write_text(str(number) * 100)
    source.export(workdir / "many.zip")
    shutil.rmtree(many)
    failed: list[BaseException] = []

    def import_it() -> None:
        try:
            source.import_archive(workdir / "many.zip")
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=import_it)
    thread.start()
    copies = [fork(f"copy-{number}") for number in range(3)]
    thread.join()
    assert failed == []
    for copy in copies:
        found = Path(copy.path, "many")
        assert len(os.listdir(found)) == 1000 if found.exists() else True, "an import is in a fork whole or not at all"
        check_invariants(copy)


@pytest.mark.extended
def test_many_forks_at_once(source: Workspace, workdir: Path) -> None:
    names = [f"fork-of-{number}" for number in range(6)]
    with ThreadPoolExecutor(len(names)) as threads:
        copies = list(threads.map(lambda name: source.fork(workdir / name, name=name), names))
    for number, copy in enumerate(copies):
        write(copy, str(number))
    assert [text(copy) for copy in copies] == [str(number) for number in range(len(names))]
    for copy in copies:
        check_invariants(copy)
        unmount_when_idle(copy)


def test_a_fork_that_cannot_be_mounted_leaves_nothing(source: Workspace, fork: Fork, workdir: Path) -> None:
    before = [each.name for each in source.snapshots()]
    (workdir / "full").mkdir()
    (workdir / "full" / "file").touch()
    with pytest.raises(OSError, match="not empty") as raised:
        fork("full")
    assert raised.value.errno == errno.ENOTEMPTY
    with pytest.raises(OSError, match="inside its source") as raised:
        source.fork(Path(source.path, "tree", "inside"), name="inside")
    assert raised.value.errno == errno.EINVAL
    assert not os.path.exists(Path(source.path, "tree", "inside"))
    with pytest.raises(FileExistsError, match="a workspace named 'source'"):
        source.fork(workdir / "taken", name="source")
    assert not os.path.exists(workdir / "taken")
    with pytest.raises(ValueError, match="name"):
        source.fork(workdir / "odd", name="../odd")
    with pytest.raises(FileNotFoundError):
        source.fork(workdir / "missing" / "parent", name="parent")
    assert [each.name for each in source.snapshots()] == before


def test_the_descriptors_of_the_source_are_not_in_the_fork(source: Workspace, fork: Fork) -> None:
    copy = fork("copy")
    links = []
    for name in os.listdir(f"/proc/{copy.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{copy.pid}/fd/{name}"))
    assert sum(link == "/dev/fuse" for link in links) == 1
    assert not [link for link in links if "source.log" in link]
    assert not [link for link in links if link.startswith(source.path)]


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, list(words))


def test_the_command_makes_one_fork_or_several(source: Workspace, workdir: Path) -> None:
    one = json.loads(run("fork", "-w", "source", str(workdir / "one"), "--json").stdout)
    assert (one["name"], one["engine"]) == ("one", "native")
    write(source, "later")
    answer = run("fork", "-w", "source", str(workdir / "agents"), "--count", "3", "--name", "agent")
    assert answer.exit_code == 0, answer.output
    names = ["agent-1", "agent-2", "agent-3"]
    assert [line.split()[1] for line in answer.stdout.splitlines()] == names
    assert [text(Workspace.attach(name)) for name in names] == ["later"] * 3
    listed = json.loads(run("list", "--json").stdout)["workspaces"]
    assert {each["name"]: each["forked_from"] for each in listed} == {
        "source": None, "one": "source", **dict.fromkeys(names, "source"),
    }  # fmt: skip
    more = json.loads(run("fork", "-w", "source", str(workdir / "agents"), "--count", "2", "--json").stdout)["forks"]
    assert [(each["name"], each["mountpoint"]) for each in more] == [
        (f"agents-{number}", f"{workdir}/agents/{number}") for number in (4, 5)
    ]
    names += ["agents-4", "agents-5"]
    failed = run("fork", "-w", "source", str(workdir / "others"), "--count", "3", "--name", "agent")
    assert failed.exit_code == 1
    assert "a workspace named agent-1 is mounted at" in failed.stderr
    assert not os.path.exists(workdir / "others")
    missing = run("fork", "-w", "source", str(workdir / "none"), "--count", "3", "--snapshot", "missing")
    assert missing.exit_code == 1
    assert not os.path.exists(workdir / "none")
    for name in ("one", *names):
        unmount_when_idle(Workspace.attach(name))


def test_a_diff_is_since_the_newest_snapshot_or_since_the_fork(workdir: Path) -> None:
    with mounted(workdir / "source", engine="native", name="source") as source:
        source.snapshot("one")
        write(source, "edited", "file")
        with source.fork(workdir / "copy", name="copy") as copy:
            write(copy, "in the fork", "new")
            assert [each.path for each in copy.diff().changes] == ["new"]
            assert [each.path for each in source.diff().changes] == ["file"]


@pytest.mark.extended
def test_an_unmount_of_a_fork_loses_its_own_changes_only(source: Workspace, fork: Fork) -> None:
    fork("unchanged")
    changed, with_snapshot = fork("changed"), fork("with-snapshot")
    write(changed, "of the fork")
    with_snapshot.snapshot("named")
    for workspace in (changed, with_snapshot):
        assert run("unmount", workspace.name).exit_code == 1
    write(changed, "source")
    assert run("unmount", "changed").exit_code == 1, "its times changed"
    assert run("unmount", "unchanged").exit_code == 0
    orphan = fork("orphan", of=changed)
    unmount_when_idle(changed)
    assert run("unmount", "orphan").exit_code == 1, "its source, which was in that state, has ended"
    assert os.path.ismount(orphan.path)


@pytest.mark.extended
def test_a_fork_that_max_memory_does_not_allow_is_refused(workdir: Path) -> None:
    mib = 1 << 20

    def refused(source: Workspace) -> bool:
        try:
            source.fork(workdir / "another", name="another").unmount()
        except OSError as error:
            return error.errno == errno.ENOMEM and "--max-memory" in str(error)
        return False

    with mounted(workdir / "source", engine="native", name="source", max_memory=128 * mib) as source:
        Path(source.path, "large").write_bytes(os.urandom(80 * mib))
        assert refused(source)
        assert not (workdir / "another").exists()
        assert source.snapshots() == []
    with mounted(workdir / "source", engine="native", name="source", max_memory=128 * mib) as source:
        Path(source.path, "small").write_bytes(os.urandom(40 * mib))
        with source.fork(workdir / "copy", name="copy") as copy:
            assert not refused(source), "what both share counts once"
            Path(copy.path, "more").write_bytes(os.urandom(70 * mib))
            wait_until(lambda: refused(source), "what the fork has written counts")
            wait_until(lambda: refused(copy), "in each of them")
        assert not refused(source)
