"""`--persist`: what was answered is there after kill -9 and after an unmount; a full disk and damage lose nothing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.journal.directory import read_journal
from protocol.volume import ROOT_INODE
from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.programs import failed, succeeded, vfsd, wait_ended
from tests.support.host_directories import mounted_tmpfs
from tests.support.rights import need_root
from tests.support.tree_hash import tree_hash
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.machine.directories import journal_directory


class Persistent:
    """A workspace that is mounted again and again."""

    def __init__(self, workdir: Path) -> None:
        self.path = workdir / "mount"
        self.path.mkdir()
        self.name = f"{workdir.name}-persist"
        self.journal = Path(workdir, "journal")
        self.running: Workspace | None = None

    def mount(self, **options: Any) -> Workspace:
        self.running = Workspace.mount(
            self.path, name=self.name, persist=True, **{"journal_dir": self.journal, "keeper": False, **options}
        )
        return self.running

    def kill(self) -> None:
        assert self.running is not None
        pid = self.running.status().pid
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            vfsd("unmount", self.name, "--discard")


persistent = fixture_of(Persistent, Persistent.end)


@pytest.mark.parametrize("engine", ["native", "pyfuse3"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_content_snapshots_history_and_inodes_are_there_again(
    persistent: Persistent, engine: str, is_killed: bool
) -> None:
    workspace = persistent.mount(engine=engine)
    root = persistent.path
    (root / "file").write_bytes(b"first")
    (root / "dir" / "below").mkdir(parents=True)
    (root / "dir" / "link").symlink_to("../file")
    os.link(root / "file", root / "dir" / "second name")
    os.setxattr(root / "file", "user.note", b"value")
    workspace.snapshot("one")
    (root / "file").write_bytes(b"second")
    (root / "dir" / "below").rmdir()
    workspace.restore("one")
    os.utime(root / "dir", ns=(5, 6))
    before = tree_hash(root), os.stat(root / "file")
    snapshots = [(each.name, each.created_at) for each in workspace.snapshots()]
    if is_killed:
        persistent.kill()
    else:
        workspace.unmount()
    workspace = persistent.mount(engine=engine)
    after = tree_hash(root), os.stat(root / "file")
    assert after[0] == before[0]
    assert (after[1].st_ino, after[1].st_mtime_ns, after[1].st_ctime_ns, after[1].st_nlink) == (
        before[1].st_ino, before[1].st_mtime_ns, before[1].st_ctime_ns, 2
    )  # fmt: skip
    assert os.getxattr(root / "file", "user.note") == b"value"
    assert [(each.name, each.created_at) for each in workspace.snapshots()] == snapshots
    workspace.undo()
    assert (root / "file").read_bytes() == b"second"
    workspace.redo()
    assert (root / "file").read_bytes() == b"first"


WRITER = """
import os, random, sys
root, seed = sys.argv[1], int(sys.argv[2])
choice = random.Random(seed)
os.chdir(root)
while True:
    name = f"f{choice.randrange(30)}"
    what = choice.randrange(5)
    data = bytes([choice.randrange(256)]) * choice.choice((1, 100, 5000, 200_000))
    offset = choice.choice((0, 10, 4096, 150_000))
    try:
        if what < 3:
            descriptor = os.open(name, os.O_CREAT | os.O_WRONLY)
            os.pwrite(descriptor, data, offset)
            os.close(descriptor)
            print("write", name, offset, data[0], len(data), flush=True)
        elif what == 3:
            os.unlink(name)
            print("unlink", name, flush=True)
        else:
            other = f"f{choice.randrange(30)}"
            os.rename(name, other)
            print("rename", name, other, flush=True)
    except FileNotFoundError:
        pass
"""


def expected_after(lines: list[list[str]], before: Mapping[str, bytes]) -> dict[str, bytearray]:
    files = {name: bytearray(content) for name, content in before.items()}
    for what, name, *rest in lines:
        if what == "write":
            offset, byte, length = map(int, rest)
            content = files.setdefault(name, bytearray())
            content.extend(bytes(max(0, offset + length - len(content))))
            content[offset : offset + length] = bytes([byte]) * length
        elif what == "unlink":
            del files[name]
        elif rest[0] != name:
            files[rest[0]] = files.pop(name)
    return files


@pytest.mark.parametrize("seed", range(4))
def test_what_a_writer_was_answered_is_there_after_kill_9(persistent: Persistent, seed: int) -> None:
    persistent.mount()
    check_killed_writer(persistent, seed, {})


def check_killed_writer(persistent: Persistent, seed: int, before: Mapping[str, bytes]) -> None:
    """Kill the daemon while a program writes, and compare what is there after the next mount."""
    command = [sys.executable, "-c", WRITER, str(persistent.path), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(random.Random(seed).randrange(50, 400))]
        persistent.kill()
        lines += writer.stdout.readlines()
    done = [line.split() for line in lines if line.endswith("\n")]
    persistent.mount()
    found = {path.name: path.read_bytes() for path in persistent.path.iterdir()}
    wanted = expected_after(done, before)
    # One call may have been made and not answered: then one file differs, and renames touch two.
    different = {name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)}
    assert len(different) <= 2, different


def test_fsync_fdatasync_and_o_sync_sync_the_journal(persistent: Persistent) -> None:
    workspace = persistent.mount(fsync="no")
    for flags, sync in ((0, os.fsync), (0, os.fdatasync), (os.O_SYNC, None)):
        descriptor = os.open(persistent.path / "file", os.O_CREAT | os.O_WRONLY | flags)
        os.write(descriptor, b"data")
        if sync is not None:
            sync(descriptor)
        os.close(descriptor)
        assert workspace.status().journal_unsynced_bytes == 0
    os.mkdir(persistent.path / "dir")
    assert (workspace.status().journal_unsynced_bytes or 0) > 0


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_what_the_tools_of_agents_wrote_is_there_after_kill_9(persistent: Persistent, fsync: str) -> None:
    filesystem = persistent.mount(fsync=fsync).filesystem
    filesystem.write_bytes("new", b"first")
    filesystem.write_bytes("new", b"second")
    filesystem.write_bytes("new", b" third", mode="append")
    persistent.kill()
    again = persistent.mount(fsync=fsync)
    assert (persistent.path / "new").read_bytes() == b"second third"
    assert os.listdir(persistent.path) == ["new"]
    check_invariants(again)


def test_a_second_daemon_is_refused(persistent: Persistent, workdir: Path) -> None:
    persistent.mount()
    other = workdir / "other"
    other.mkdir()
    with pytest.raises(BlockingIOError, match="another daemon uses this journal"):
        Workspace.mount(other, name=f"{persistent.name}-2", persist=True, journal_dir=persistent.journal)
    assert "another daemon" in failed(vfsd("persisted", "drop", "--journal-dir", str(persistent.journal)))


def test_a_damaged_journal_stops_the_mount_and_says_what_to_do(persistent: Persistent) -> None:
    workspace = persistent.mount()
    for number in range(20):
        (persistent.path / f"f{number}").write_bytes(b"x" * 1000)
    workspace.unmount()
    log = persistent.journal / "log-00000001"
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    with pytest.raises(OSError, match="vfsd persisted check") as raised:
        persistent.mount()
    assert raised.value.errno == errno.EBADMSG
    message = failed(vfsd("persisted", "check", "--journal-dir", str(persistent.journal)))
    assert "backup" in message
    assert "vfsd persisted drop" in message
    assert log.read_bytes() == bytes(content)
    succeeded(vfsd("persisted", "drop", "--journal-dir", str(persistent.journal)))
    persistent.mount()
    assert os.listdir(persistent.path) == []


def test_an_interrupted_write_at_the_end_is_cut_off_and_reported(persistent: Persistent) -> None:
    persistent.mount()
    (persistent.path / "kept").write_bytes(b"x")
    persistent.kill()
    log = persistent.journal / "log-00000001"
    end = read_journal(str(persistent.journal)).last.extent.end
    log.write_bytes(log.read_bytes()[:end] + b"\x01" * 100)
    facts = vfsd("persisted", "check", "--journal-dir", str(persistent.journal)).stderr
    assert "an interrupted write of 100 bytes" in facts
    persistent.mount()
    assert os.listdir(persistent.path) == ["kept"]


@pytest.fixture
def disk(persistent: Persistent, workdir: Path) -> Iterator[Path]:
    """A disk of 8 MiB, for the journal."""
    with mounted_tmpfs(workdir / "disk", max_bytes=8 << 20) as place:
        persistent.journal = place / "journal"
        yield place
        persistent.end()


def until_refused(change: Callable[[int], object]) -> int | None:
    for number in range(100_000):
        try:
            change(number)
        except OSError as error:
            return error.errno
    return None


@pytest.mark.extended
def test_on_a_full_disk_changes_fail_and_work_again_later(persistent: Persistent, disk: Path) -> None:
    workspace = persistent.mount()
    root = persistent.path
    assert until_refused(lambda number: (root / f"f{number}").write_bytes(os.urandom(500_000))) == errno.ENOSPC
    assert until_refused(lambda number: (root / f"small{number}").touch()) == errno.ENOSPC
    assert "no space for an image" in failed(vfsd("compact", "-w", workspace.name))
    (root / "f0").unlink()
    content = tree_hash(root)
    workspace.unmount()
    assert "journal is complete" in succeeded(vfsd("persisted", "check", "--journal-dir", str(persistent.journal)))
    subprocess.run(["mount", "-o", "remount,size=32m", disk], check=True)
    persistent.mount()
    persistent.kill()
    persistent.mount()
    assert tree_hash(root) == content
    (root / "after").write_bytes(os.urandom(500_000))
    workspace = persistent.running or workspace
    workspace.unmount()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert "journal is complete" in succeeded(vfsd("persisted", "check", "--journal-dir", str(persistent.journal)))
    assert "Read-only" in failed(vfsd("persisted", "drop", "--journal-dir", str(persistent.journal)))
    for journal in (persistent.journal, disk / "new"):
        refused = failed(vfsd("mount", persistent.path, "--persist", "--journal-dir", journal))
        assert "on a read-only file system: make that writable, and mount the workspace again" in refused
        assert not os.path.ismount(persistent.path)


@pytest.mark.extended
def test_when_a_disk_that_reported_errors_works_again_changes_do_and_all_that_was_answered_survives(
    persistent: Persistent, workdir: Path
) -> None:
    """The disk is a file with holes on a full tmpfs: what the file system wrote to its cache cannot be written back."""
    need_root()
    outer, disk = workdir / "outer", workdir / "disk"
    outer.mkdir()
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", outer], check=True)
    try:
        (outer / "image").touch()
        os.truncate(outer / "image", 64 << 20)
        made = ["mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard", outer / "image"]
        subprocess.run(made, check=True)
        subprocess.run(["mount", "-o", "loop", outer / "image", disk], check=True)
        persistent.journal = disk / "journal"
        workspace, root = persistent.mount(), persistent.path
        with contextlib.suppress(OSError), (outer / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        (root / "answered").write_bytes(os.urandom(100_000))
        with pytest.raises(OSError, match=r"Input/output error|No space left"), (root / "answered").open("rb") as file:
            os.fsync(file.fileno())
        with pytest.raises(OSError, match=r"Input/output error|No space left"):
            (root / "refused").touch()
        assert workspace.status().journal_failure
        content = (root / "answered").read_bytes()
        (outer / "filler").unlink()
        wait_until(lambda: workspace.status().journal_failure is None, "the journal is written again")
        assert os.listdir(root) == ["answered"]
        (root / "later").write_bytes(b"x")
        persistent.kill()
        persistent.mount()
        assert {each.name: each.read_bytes() for each in root.iterdir()} == {"answered": content, "later": b"x"}
    finally:
        persistent.end()
        for place in (disk, outer):
            subprocess.run(["umount", "-l", place], check=False)


@pytest.mark.parametrize("event", ["compaction", "death"])
def test_files_can_be_removed_on_a_disk_that_another_program_fills(
    persistent: Persistent, disk: Path, event: str
) -> None:
    options = {"keeper": True} if event == "death" else {}
    workspace, root = persistent.mount(**options), persistent.path
    (root / "f").write_bytes(b"content")
    if event == "compaction":
        succeeded(vfsd("compact", "-w", workspace.name))
    else:
        pid = workspace.status().pid
        os.kill(pid, signal.SIGKILL)
        assert (root / "f").read_bytes() == b"content"
        assert workspace.status().pid != pid
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    assert until_refused(lambda number: (root / f"new{number}").write_bytes(os.urandom(100_000))) == errno.ENOSPC
    for name in os.listdir(root):
        (root / name).unlink()
    (disk / "filler").unlink()
    (root / "new").touch()
    workspace.unmount()
    persistent.mount()
    assert os.listdir(root) == ["new"]


def test_a_disk_that_only_the_journal_fills_is_usable_again_after_removing_files_and_compacting(
    persistent: Persistent, disk: Path
) -> None:
    workspace, root = persistent.mount(), persistent.path
    assert until_refused(lambda number: (root / f"f{number}").write_bytes(os.urandom(500_000))) == errno.ENOSPC
    assert until_refused(lambda number: (root / f"small{number}").write_bytes(os.urandom(9000))) == errno.ENOSPC
    workspace.unmount()  # frees what the journal had allocated for removals
    workspace = persistent.mount()
    for name in os.listdir(root):
        (root / name).unlink()
    succeeded(vfsd("compact", "-w", workspace.name))
    (root / "after").write_bytes(os.urandom(2_000_000))
    workspace.unmount()
    persistent.mount()
    assert os.listdir(root) == ["after"]


def test_after_a_crash_check_and_mount_say_once_that_the_daemon_had_died(persistent: Persistent) -> None:
    persistent.mount()
    (persistent.path / "f").write_bytes(b"x")
    persistent.kill()
    journal = ("--journal-dir", str(persistent.journal))
    checked = vfsd("persisted", "check", *journal)
    assert succeeded(checked).startswith("no damage found: 1 file")
    assert "did not end cleanly" in checked.stderr
    done = vfsd("mount", persistent.path, "--persist", "--no-keeper", "--name", persistent.name, *journal)
    succeeded(done)
    assert "continued from the journal" in done.stderr
    assert done.stderr.count("its daemon had died") == 1
    assert "continues it" not in done.stderr
    assert (persistent.path / "f").read_bytes() == b"x"


def test_an_unmount_asks_nothing_and_says_what_is_kept(persistent: Persistent) -> None:
    persistent.mount()
    (persistent.path / "f").write_bytes(b"x")
    done = vfsd("unmount", persistent.name)
    assert done.returncode == 0
    assert "are kept" in done.stderr
    assert (
        f"`vfsd mount {persistent.path} --persist --name {persistent.name} --journal-dir {persistent.journal}`"
        in done.stderr
    )
    assert f"`vfsd persisted drop --journal-dir {persistent.journal}`" in done.stderr
    persistent.mount()
    assert (persistent.path / "f").read_bytes() == b"x"


def test_a_workspace_whose_journal_was_removed_says_so_and_asks_at_the_unmount(persistent: Persistent) -> None:
    workspace = persistent.mount()
    (persistent.path / "f").write_bytes(b"x")
    shutil.rmtree(persistent.journal)
    assert "removed" in (workspace.status().journal_failure or "")
    assert "not exported" in failed(vfsd("unmount", persistent.name))
    assert "are kept" not in vfsd("unmount", persistent.name, "--discard").stderr


def test_a_fork_writes_nothing_to_the_journal_of_its_source(persistent: Persistent, workdir: Path) -> None:
    workspace = persistent.mount()
    (persistent.path / "f").write_bytes(b"source")
    fork = workspace.fork(workdir / "fork")
    (workdir / "fork" / "f").write_bytes(b"fork")
    assert fork.status().journal is None
    fork.unmount()
    (persistent.path / "g").write_bytes(b"source")
    persistent.kill()
    persistent.mount()
    assert (persistent.path / "f").read_bytes() == b"source"
    assert sorted(os.listdir(persistent.path)) == ["f", "g"]


def test_journals_are_listed_checked_and_dropped_by_name(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(workdir / "state"))
    place = workdir / "mount"
    place.mkdir()
    name = f"{workdir.name}-named"
    with Workspace.mount(place, name=name, persist=True) as workspace:
        (place / "f").write_bytes(b"x")
        assert f"{name}\tin use\t" in succeeded(vfsd("persisted", "list"))
        assert os.stat(journal_directory(name)).st_mode & 0o777 == 0o700
        workspace.unmount()
    assert f"{name}\tkept\t" in succeeded(vfsd("persisted", "list"))
    done = vfsd("mount", place, "--name", name)
    assert f"{name} has a journal" in done.stderr
    succeeded(vfsd("unmount", name))
    assert "1 file" in succeeded(vfsd("persisted", "check", name))
    succeeded(vfsd("persisted", "drop", name))
    assert name not in succeeded(vfsd("persisted", "list"))
    assert "there is no journal" in failed(vfsd("persisted", "drop", name))


def test_a_compacted_journal_is_small_and_complete(persistent: Persistent) -> None:
    workspace = persistent.mount()
    root = persistent.path
    for number in range(40):
        (root / "file").write_bytes(os.urandom(200_000))
        if number == 20:
            workspace.snapshot("middle")
    with (root / "unlinked").open("wb", buffering=0) as file:
        (root / "unlinked").unlink()
        facts = json.loads(succeeded(vfsd("compact", "-w", persistent.name, "--json")))
        file.write(b"a change of a file without a name, after the image")
    assert facts["after_bytes"] < facts["before_bytes"] // 2
    assert sorted(os.listdir(persistent.journal)) == ["image-00000002", "lock", "log-00000002"]
    (root / "after").write_bytes(b"the image")
    content = tree_hash(root)
    persistent.kill()
    workspace = persistent.mount()
    assert tree_hash(root) == content
    assert [each.name for each in workspace.snapshots()] == ["middle"]
    check_invariants(workspace)


@pytest.mark.extended
def test_the_workspace_changes_while_its_journal_is_compacted(persistent: Persistent) -> None:
    persistent.mount()
    for number in range(300):
        (persistent.path / f"f{number}").write_bytes(os.urandom(20_000))
    command = ["vfsd", "compact", "-w", persistent.name]
    with subprocess.Popen([sys.executable, "-m", "vfsd.cli.main", *command[1:]], stdout=subprocess.DEVNULL) as run:
        count = 0
        while run.poll() is None:
            (persistent.path / f"f{count % 300}").write_bytes(os.urandom(5_000))
            count += 1
    assert run.returncode == 0
    content = tree_hash(persistent.path)
    persistent.kill()
    persistent.mount()
    assert tree_hash(persistent.path) == content


@pytest.mark.extended
@pytest.mark.slow
def test_a_copy_of_a_journal_in_use_is_a_state_of_that_time_or_is_refused(
    persistent: Persistent, workdir: Path
) -> None:
    workspace = persistent.mount()
    is_over = threading.Event()

    def write() -> None:
        for number in itertools.count():
            (persistent.path / f"{number}").write_bytes(b"%d" % number * 500)
            if is_over.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    for number in range(6):
        copy = workdir / f"copy-{number}"
        if number % 3 == 2:
            succeeded(vfsd("compact", "-w", workspace.name))
        subprocess.run(["cp", "-a", persistent.journal, copy], check=False)  # a file may be gone
        check = vfsd("persisted", "check", "--journal-dir", str(copy))
        if check.returncode:
            failed(check)
            continue
        volume = MemoryVolume()
        volume.replay(read_journal(str(copy)).batches())
        found = {int(name) for name in volume._state.inodes[ROOT_INODE].children or ()}
        assert found == set(range(len(found)))
    is_over.set()
    writer.join()
    persistent.end()
    wait_ended(workspace.pid)


def test_a_workspace_without_a_journal_cannot_be_compacted(workdir: Path) -> None:
    place = workdir / "mount"
    place.mkdir()
    with Workspace.mount(place, name=f"{workdir.name}-plain"):
        assert "mount it with --persist" in failed(vfsd("compact", "-w", f"{workdir.name}-plain"))


@pytest.mark.parametrize("backend", ["host", "exec"])
def test_other_backends_refuse_a_journal(workdir: Path, backend: str) -> None:
    below = workdir / "below"
    below.mkdir()
    done = vfsd("mount", workdir / "mount", "--backend", f"{backend}:{below}", "--persist")
    assert done.returncode == 2
    assert "--persist goes with memory or overlay" in done.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_git_repository_is_intact_after_kill_9(persistent: Persistent) -> None:
    persistent.mount()
    repository = persistent.path / "repository"
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "init", "-q", repository], check=True)
    for number in range(5):
        (repository / f"f{number}").write_bytes(os.urandom(5000))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", str(number)], check=True)
    persistent.kill()
    persistent.mount()
    subprocess.run([*git, "fsck", "--strict"], check=True, capture_output=True)
    assert subprocess.run([*git, "status", "--short"], check=True, capture_output=True).stdout == b""
