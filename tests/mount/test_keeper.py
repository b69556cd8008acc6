"""The keeper: a daemon that is killed gets a replacement, and programs that use the mount notice only a pause."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from tests.mount.conftest import check_invariants
from tests.mount.dying_daemon import STEPS
from tests.mount.programs import Program, failed, log_of, succeeded, vfsd, wait_ended
from tests.support.fork_server import wait_until
from vfsd.cli.main import cli
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.launch import launch
from vfsd.client.log_results import LoggedChange, Missed
from vfsd.client.mount_arguments import mount_options
from vfsd.client.workspace import Workspace
from vfsd.kernel.engines.native.wire import Opcode
from vfsd.machine.runtime import WorkspaceRecord, read_record


class Kept:
    """A workspace with a journal and a keeper."""

    def __init__(self, workdir: Path) -> None:
        self.path = workdir / "mount"
        self.path.mkdir()
        self.name = f"{workdir.name}-kept"
        self.journal = workdir / "journal"
        self.kills = 0

    def mount(self, **options: Any) -> Workspace:
        return Workspace.mount(self.path, name=self.name, persist=True, **{"journal_dir": self.journal, **options})

    @property
    def record(self) -> WorkspaceRecord:
        record = read_record(self.name)
        assert record is not None
        return record

    def kill(self) -> None:
        """Kill the daemon that has written its record; return when its replacement has written its own."""
        record = self.record
        os.kill(record.pid, signal.SIGKILL)
        self.kills += 1
        wait_until(lambda: self.record.pid != record.pid, "a replacement")

    @contextlib.contextmanager
    def being_killed(self, seed: int, times: int | None = None) -> Iterator[None]:
        """Kill the daemon again and again at random moments, inside the block, or `times` times."""
        choice, stop = random.Random(seed), threading.Event()

        def run() -> None:
            while not stop.wait(choice.random() * 0.15) and (times is None or self.kills < times):
                self.kill()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            if times is None:
                stop.set()
            thread.join()

    def end(self) -> None:
        vfsd("unmount", self.name, "--discard")


@pytest.fixture
def kept(workdir: Path) -> Iterator[Kept]:
    workspace = Kept(workdir)
    yield workspace
    end_kept(workspace)


def end_kept(workspace: Kept) -> None:
    """Unmount, and wait until the keeper has ended."""
    keeper = read_record(workspace.name)
    workspace.end()
    if keeper is not None and keeper.keeper is not None and keeper.is_kept:
        wait_ended(keeper.keeper)


def facts(root: Path) -> dict[str, Any]:
    """What the twins have in common: names, modes, link counts, targets, content, and attributes of the user."""
    found: dict[str, Any] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            content: Any = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = path.read_bytes()
            links = 0 if path.is_dir() and not path.is_symlink() else status.st_nlink
            found[str(path.relative_to(root))] = (status.st_mode, links, content)
    return found


# -- programs that go on ---------------------------------------------------------------------------
def change_at_random(roots: list[Path], seed: int, is_over: Callable[[], bool]) -> int:
    """Make the same random changes below each of `roots` until `is_over`; the answers must agree.  Return how many."""
    choice = random.Random(seed)
    count = 0
    while not is_over():
        count += 1
        call = random_call(choice)
        answers = []
        for root in roots:
            try:
                answers.append(call(root))
            except OSError as error:
                answers.append(error.errno)
        assert answers[0] == answers[1], (count, answers)
    return count


def random_call(choice: random.Random) -> Callable[[Path], Any]:
    def name() -> str:
        return f"d{choice.randrange(3)}/n{choice.randrange(12)}" if choice.randrange(3) else f"n{choice.randrange(12)}"

    one, other, what = name(), name(), choice.randrange(14)
    data, offset = bytes([choice.randrange(256)]) * choice.choice((1, 700, 9000, 70_000)), choice.randrange(60_000)

    def change(path: Path, flags: int, call: Callable[[int], Any]) -> Any:
        descriptor = os.open(path, flags, 0o644)
        try:
            return call(descriptor)
        finally:
            os.close(descriptor)

    return [
        lambda root: change(root / one, os.O_CREAT | os.O_WRONLY, lambda f: os.pwrite(f, data, offset)),
        lambda root: change(root / one, os.O_CREAT | os.O_WRONLY | os.O_APPEND, lambda f: os.write(f, data)),
        lambda root: change(root / one, os.O_CREAT | os.O_WRONLY | os.O_EXCL, lambda f: os.write(f, data)),
        lambda root: change(root / one, os.O_WRONLY | os.O_TRUNC, lambda f: os.write(f, data[:5])),
        lambda root: os.mkdir(root / f"d{offset % 3}"),
        lambda root: os.rmdir(root / f"d{offset % 3}"),
        lambda root: os.unlink(root / one),
        lambda root: os.rename(root / one, root / other),
        lambda root: os.link(root / one, root / other),
        lambda root: os.symlink(other, root / one),
        lambda root: os.chmod(root / one, 0o600 + offset % 8, follow_symlinks=True),
        lambda root: os.truncate(root / one, offset),
        lambda root: sorted(os.listdir(root)),
        lambda root: (root / one).read_bytes(),
    ][what]


def test_a_random_writer_sees_what_its_twin_sees(kept: Kept, workdir: Path, runs_long: bool) -> None:
    workspace = kept.mount()
    twin = workdir / "twin"
    twin.mkdir()
    deadline = time.monotonic() + (600 if runs_long else 4)
    with kept.being_killed(1):
        change_at_random([kept.path, twin], 1, lambda: time.monotonic() > deadline and kept.kills > 5)
    assert facts(kept.path) == facts(twin)
    check_invariants(workspace)


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_sqlite_goes_on(kept: Kept, mode: str, runs_long: bool) -> None:
    kept.mount()
    count = 2000 if runs_long else 120
    with kept.being_killed(2), contextlib.closing(sqlite3.connect(kept.path / "base.db")) as base:
        assert base.execute(f"pragma journal_mode={mode}").fetchone() == (mode,)
        base.execute("create table t (n integer, data text)")
        written = 0
        while written < count or kept.kills < 2:
            base.execute("insert into t values (?, ?)", (written, "x" * 500))
            base.commit()
            written += 1
        assert base.execute("pragma integrity_check").fetchone() == ("ok",)
        assert base.execute("select count(*), sum(n) from t").fetchone() == (written, written * (written - 1) // 2)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_and_tar_go_on(kept: Kept, workdir: Path, runs_long: bool) -> None:
    kept.mount()
    source = workdir / "source"
    for number in range(200):
        (source / f"d{number % 10}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 10}" / f"f{number}").write_bytes(os.urandom(3000))
    subprocess.run(["tar", "cf", workdir / "a.tar", "-C", source, "."], check=True)
    git = ["git", "-C", str(kept.path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    with kept.being_killed(3):
        subprocess.run(["git", "init", "-q", kept.path], check=True)
        turn = 0
        while turn < (30 if runs_long else 2) or kept.kills < 2:
            turn += 1
            subprocess.run(["tar", "xf", workdir / "a.tar", "-C", kept.path], check=True)
            (kept.path / "turn").write_text(str(turn))
            subprocess.run([*git, "add", "."], check=True)
            subprocess.run([*git, "commit", "-qm", str(turn)], check=True)
            subprocess.run(["rm", "-r", *(kept.path / f"d{number}" for number in range(10))], check=True)
        subprocess.run([*git, "checkout", "-q", "."], check=True)
    subprocess.run([*git, "fsck", "--strict"], check=True, capture_output=True)
    assert subprocess.run([*git, "status", "--short"], check=True, capture_output=True).stdout == b""


@pytest.mark.long
def test_a_thousand_changes_of_pid(kept: Kept, workdir: Path) -> None:
    kept.mount()
    twin = workdir / "twin"
    twin.mkdir()
    with kept.being_killed(4, times=1000):
        change_at_random([kept.path, twin], 4, lambda: kept.kills >= 1000)
    assert facts(kept.path) == facts(twin)


def test_open_files_mappings_directories_and_locks_continue(kept: Kept) -> None:
    kept.mount()
    root = kept.path
    (root / "dir" / "below").mkdir(parents=True)
    for number in range(3000):
        (root / "dir" / f"f{number}").touch()
    (root / "file").write_bytes(b"a" * 10_000)
    with Program() as program, (root / "gone").open("w+b", buffering=0) as gone, (root / "file").open("r+b") as file:
        (root / "gone").unlink()
        gone.write(b"without a name")
        program(f"os.chdir({str(root / 'dir' / 'below')!r})")
        program(f"held = open({str(root / 'file')!r}, 'r+b')")
        program("fcntl.flock(held, fcntl.LOCK_EX)")
        program("fcntl.lockf(held, fcntl.LOCK_EX, 10)")
        listing = os.scandir(root / "dir")
        seen = {next(listing).name for _ in range(100)}
        with mmap.mmap(file.fileno(), 0) as mapping:
            mapping[0:1] = b"b"
            for _ in range(2):
                kept.kill()
                (root / "dir" / f"f{random.randrange(3000)}").write_bytes(b"x")
            mapping[1:2] = b"c"
            mapping.flush()
            assert (root / "file").read_bytes()[:3] == b"bca"
        assert program("os.getcwd()") == str(root / "dir" / "below")
        program("open('new', 'w').close()")
        gone.write(b", and it lives")
        gone.seek(0)
        assert gone.read() == b"without a name, and it lives"
        for lock in (fcntl.flock, fcntl.lockf):
            with pytest.raises(BlockingIOError):
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        program("held.close()")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert len(seen | {entry.name for entry in listing}) == 3001
    check_invariants(Workspace.attach(kept.name))


def test_a_directory_in_use_keeps_its_path_after_a_recovery_from_an_image(kept: Kept) -> None:
    kept.mount()
    (kept.path / "dir" / "below").mkdir(parents=True)
    with Program() as program:
        program(f"os.chdir({str(kept.path / 'dir' / 'below')!r})")
        succeeded(vfsd("compact", "-w", kept.name))
        kept.kill()
        assert program("os.getcwd()") == str(kept.path / "dir" / "below")


def test_rm_that_is_interrupted_between_two_listings_removes_everything(kept: Kept) -> None:
    kept.mount()
    while not kept.kills:
        (kept.path / "d").mkdir()
        for number in range(4000):
            (kept.path / "d" / f"a-longer-name-{number}").touch()
        with kept.being_killed(5):
            subprocess.run(["rm", "-r", kept.path / "d"], check=True)


# -- one request, at each step ---------------------------------------------------------------------
def fill(root: Path) -> None:
    (root / "dir").mkdir()
    (root / "file").write_bytes(b"content")
    (root / "victim").write_bytes(b"victim")
    os.setxattr(root / "file", "user.old", b"old")


def _with(path: Path, flags: int, call: Callable[[int], Any]) -> None:
    descriptor = os.open(path, flags, 0o644)
    try:
        call(descriptor)
    finally:
        os.close(descriptor)


def _copied(root: Path) -> None:
    with (root / "file").open("rb") as source, (root / "victim").open("r+b") as target:
        os.copy_file_range(source.fileno(), target.fileno(), 7, 0, 2)


CHANGES: dict[str, tuple[Opcode, Callable[[Path], Any]]] = {
    "mkdir": (Opcode.MKDIR, lambda root: (root / "new").mkdir()),
    "exclusive create": (Opcode.MKNOD, lambda root: _with(root / "new", os.O_CREAT | os.O_EXCL, lambda _: None)),
    "symlink": (Opcode.SYMLINK, lambda root: (root / "new").symlink_to("target")),
    "link": (Opcode.LINK, lambda root: (root / "new").hardlink_to(root / "file")),
    "unlink": (Opcode.UNLINK, lambda root: (root / "file").unlink()),
    "rmdir": (Opcode.RMDIR, lambda root: (root / "dir").rmdir()),
    "rename": (Opcode.RENAME, lambda root: (root / "file").rename(root / "victim")),
    "append": (Opcode.WRITE, lambda root: _with(root / "file", os.O_WRONLY | os.O_APPEND, lambda f: os.write(f, b"!"))),
    "truncate": (Opcode.SETATTR, lambda root: os.truncate(root / "file", 3)),
    "fallocate": (
        Opcode.FALLOCATE, lambda root: _with(root / "file", os.O_WRONLY, lambda f: os.posix_fallocate(f, 0, 100))
    ),
    "exclusive setxattr": (
        Opcode.SETXATTR, lambda root: os.setxattr(root / "file", "user.new", b"new", os.XATTR_CREATE)
    ),
    "removexattr": (Opcode.REMOVEXATTR, lambda root: os.removexattr(root / "file", "user.old")),
    "copy": (Opcode.COPY_FILE_RANGE, _copied),
    "temporary file": (
        Opcode.TMPFILE, lambda root: _with(root, os.O_TMPFILE | os.O_WRONLY, lambda f: os.write(f, b"x"))
    ),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_request_is_executed_once_at_whichever_step_the_daemon_dies(
    kept: Kept, workdir: Path, monkeypatch: pytest.MonkeyPatch, change: str, step: str
) -> None:
    flag, twin = workdir / "flag", workdir / "twin"
    opcode, call = CHANGES[change]
    for name, value in (("OPCODE", opcode.name), ("STEP", step), ("FLAG", str(flag))):
        monkeypatch.setenv(f"VFSD_TEST_{name}", value)
    options = mount_options(kept.path, name=kept.name, persist=True, journal_dir=kept.journal)
    launch(options, daemon_module="tests.mount.dying_daemon")
    twin.mkdir()
    for root in (kept.path, twin):
        fill(root)
    before = kept.record
    flag.touch()
    for root in (kept.path, twin):
        call(root)
    wait_until(lambda: not flag.exists(), "the death")
    wait_until(lambda: kept.record.pid != before.pid, "a replacement")
    assert facts(kept.path) == facts(twin)
    assert [os.listxattr(root / "file") for root in (kept.path, twin) if (root / "file").exists()] in (
        [], [os.listxattr(twin / "file") if (twin / "file").exists() else []] * 2
    )  # fmt: skip
    check_invariants(Workspace.attach(kept.name))


# -- more deaths -----------------------------------------------------------------------------------
def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_replacements(kept: Kept, count: int) -> None:
    keeper = kept.record.keeper
    assert keeper is not None
    killed = {0}
    for _ in range(count):
        wait_until(lambda: not killed.issuperset(children(keeper)), "the next daemon")
        (daemon,) = children(keeper)
        os.kill(daemon, signal.SIGKILL)
        killed.add(daemon)


def test_a_replacement_may_be_killed_four_times_in_a_row(kept: Kept) -> None:
    workspace = kept.mount()
    for number in range(2000):
        (kept.path / f"f{number}").write_bytes(b"x" * 100)
    kill_replacements(kept, 5)  # the first daemon, too
    assert len(os.listdir(kept.path)) == 2000
    (kept.path / "after").write_bytes(b"x")
    check_invariants(workspace)


def test_five_deaths_in_a_row_end_the_mount_with_a_message(kept: Kept) -> None:
    kept.mount()
    (kept.path / "f").write_bytes(b"kept")
    keeper = kept.record.keeper
    assert keeper is not None
    kill_replacements(kept, 6)  # the first one answered a request
    wait_ended(keeper)
    with pytest.raises(OSError, match="not connected") as raised:
        os.statvfs(kept.path)
    assert raised.value.errno == errno.ENOTCONN
    message = failed(vfsd("status", "-w", kept.name))
    assert "died 5 times in a row" in message
    assert "continues it" in message
    assert "died 5 times in a row" in log_of(kept.name)
    assert "dead" in succeeded(vfsd("list"))
    kept.mount()
    assert (kept.path / "f").read_bytes() == b"kept"


def test_keeper_and_daemon_killed_together_lose_nothing_that_was_answered(kept: Kept) -> None:
    kept.mount()
    (kept.path / "f").write_bytes(b"kept")
    record = kept.record
    assert record.keeper is not None
    os.kill(record.keeper, signal.SIGKILL)
    os.kill(record.pid, signal.SIGKILL)
    wait_ended(record.pid)
    done = vfsd("mount", kept.path, "--persist", "--name", kept.name, "--journal-dir", str(kept.journal))
    succeeded(done)
    assert (kept.path / "f").read_bytes() == b"kept"


def test_without_its_keeper_a_daemon_serves_on_and_says_so(kept: Kept) -> None:
    workspace = kept.mount()
    record = kept.record
    assert record.keeper is not None
    assert f"pid {record.keeper}" in (workspace.status().keeper or "")
    os.kill(record.keeper, signal.SIGKILL)
    wait_until(lambda: "none" in (workspace.status().keeper or ""), "a status without a keeper")
    (kept.path / "f").write_bytes(b"x")
    assert not kept.record.is_kept


# -- the end ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["unmount", "SIGTERM to the daemon", "SIGTERM to the keeper", "fusermount3"])
def test_an_unmount_ends_daemon_and_keeper(kept: Kept, way: str) -> None:
    kept.mount()
    kept.kill()
    record = kept.record
    assert record.keeper is not None
    if way == "unmount":
        succeeded(vfsd("unmount", kept.name))
    elif way == "fusermount3":
        subprocess.run(["fusermount3", "-u", kept.path], check=True)
    else:
        os.kill(record.keeper if "keeper" in way else record.pid, signal.SIGTERM)
    wait_ended(record.keeper)
    assert not os.path.ismount(kept.path)
    assert read_record(kept.name) is None


def test_an_unmount_does_not_remove_what_the_keeper_is_about_to_bring_back(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.mount()
    monkeypatch.setattr("vfsd.machine.runtime._RESTART_TIMEOUT_S", 0.2)
    record = kept.record
    assert record.keeper is not None
    os.kill(record.keeper, signal.SIGSTOP)
    try:
        os.kill(record.pid, signal.SIGKILL)
        wait_until(lambda: not record.alive, "the daemon's end")
        done = CliRunner().invoke(cli, ["unmount", kept.name], prog_name="vfsd")
        assert done.exit_code == 1
        assert f"its keeper (process {record.keeper}) is starting another one: repeat the command" in done.stderr
    finally:
        os.kill(record.keeper, signal.SIGCONT)
    wait_until(lambda: kept.record.alive, "a replacement")
    assert os.path.ismount(kept.path)


def test_commands_wait_for_the_replacement(kept: Kept) -> None:
    workspace = kept.mount()
    (kept.path / "f").write_bytes(b"x")
    record = kept.record
    os.kill(record.pid, signal.SIGKILL)
    wait_until(lambda: not record.alive, "the daemon's end")  # else it may have the request and not answer it
    assert "keeper\tpid" in succeeded(vfsd("status", "-w", kept.name))
    assert "restarted the daemon 1 time" in (workspace.status().keeper or "")


def test_a_change_through_the_control_socket_survives_like_any_other(kept: Kept) -> None:
    workspace = kept.mount()
    (kept.path / "f").write_bytes(b"one")
    workspace.snapshot("one")
    (kept.path / "f").write_bytes(b"two and more")
    kept.kill()
    workspace = Workspace.attach(kept.name)
    workspace.restore("one")
    kept.kill()
    assert (kept.path / "f").read_bytes() == b"one"
    Workspace.attach(kept.name).undo()
    assert (kept.path / "f").read_bytes() == b"two and more"


def test_no_keeper_leaves_a_dead_mount(kept: Kept) -> None:
    kept.mount(keeper=False)
    record = kept.record
    assert record.keeper is None
    os.kill(record.pid, signal.SIGKILL)
    wait_ended(record.pid)
    with pytest.raises(OSError, match="not connected"):
        os.statvfs(kept.path)
    kept.mount()


def test_a_workspace_without_a_journal_has_no_keeper(workdir: Path) -> None:
    done = vfsd("mount", workdir / "mount", "--no-keeper")
    assert done.returncode == 2
    assert "--persist" in done.stderr


def test_a_follower_of_the_log_goes_on_with_the_next_daemon(kept: Kept) -> None:
    name = kept.mount().name
    with subprocess.Popen(
        [sys.executable, "-m", "vfsd.cli.main", "log", "-w", name, "--follow", "--json", "--since", "1h"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        (kept.path / "first").mkdir()
        assert json.loads(program.stdout.readline())["path"] == "first"
        kept.kill()
        (kept.path / "second").mkdir()
        assert json.loads(program.stdout.readline())["path"] == "second"
        kept.end()
        _, errors = program.communicate(timeout=30)
    assert program.returncode == 0
    assert "died; changes of its last seconds may be missing here" in errors
    assert "was unmounted" in errors


def test_follow_in_python_goes_on_with_the_next_daemon(kept: Kept) -> None:
    kept.mount()
    with Workspace.attach(kept.name).follow(since=datetime.fromtimestamp(0, UTC)) as changes:
        (kept.path / "first").mkdir()
        assert _path_of(next(changes)) == "first"
        for name in ("second", "third"):
            kept.kill()
            (kept.path / name).mkdir()
            assert next(changes) == Missed(0)
            assert _path_of(next(changes)) == name
        kept.end()
        with pytest.raises(ConnectionError):
            next(changes)


def test_follow_in_async_python_goes_on_with_the_next_daemon(kept: Kept) -> None:
    kept.mount()

    async def follow() -> None:
        async with AsyncWorkspace.attach(kept.name) as workspace, workspace.follow() as changes:
            await trio.to_thread.run_sync((kept.path / "first").mkdir)
            assert _path_of(await anext(changes)) == "first"
            await trio.to_thread.run_sync(kept.kill)
            await trio.to_thread.run_sync((kept.path / "second").mkdir)
            assert await anext(changes) == Missed(0)
            assert _path_of(await anext(changes)) == "second"

    trio.run(follow)


def _path_of(change: LoggedChange | Missed) -> str | None:
    assert isinstance(change, LoggedChange)
    return change.path


# -- kernels before Linux 6.9 ------------------------------------------------------------------------
def test_without_resending_a_request_in_progress_fails_and_the_mount_continues(
    kept: Kept, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = workdir / "flag"
    settings = {"TEST_OPCODE": "MKDIR", "TEST_STEP": "recorded", "TEST_FLAG": str(flag), "TEST_NO_RESEND": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"VFSD_{name}", value)
    options = mount_options(kept.path, name=kept.name, persist=True, journal_dir=kept.journal)
    launch(options, daemon_module="tests.mount.dying_daemon")
    (kept.path / "file").write_bytes(b"content")
    before = kept.record
    with (kept.path / "file").open("rb") as file:
        flag.touch()
        with pytest.raises(OSError, match="Input/output error") as raised:
            (kept.path / "new").mkdir()
        assert raised.value.errno == errno.EIO
        wait_until(lambda: kept.record.pid != before.pid, "a replacement")
        assert file.read() == b"content"
        for _ in range(3):
            kept.kill()
            (kept.path / "file").write_bytes(b"content")
    assert "failed with EIO" in log_of(kept.name)
    check_invariants(Workspace.attach(kept.name))


def test_snapshots_that_were_read_can_be_read_and_listed_after_a_death_and_an_upgrade(kept: Kept) -> None:
    workspace = kept.mount()
    (kept.path / "dir").mkdir()
    (kept.path / "dir" / "file").write_text("old")
    workspace.snapshot("first")
    snapshots = kept.path / ".snapshots"

    def check(names: set[str]) -> None:
        assert set(os.listdir(snapshots)) == names
        assert os.listdir(snapshots / "first") == ["dir"]
        assert os.listdir(snapshots / "first" / "dir") == ["file"]
        assert (snapshots / "first" / "dir" / "file").read_text() == "old"

    check({"first"})
    kept.kill()
    check({"first"})
    workspace.snapshot("second")
    check({"first", "second"})
    succeeded(vfsd("upgrade", kept.name))
    check({"first", "second"})
    workspace.drop("second")
    check({"first"})
