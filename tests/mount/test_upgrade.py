"""`vfsd upgrade`: another daemon takes a workspace over, and programs that use it notice only a pause."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.dying_upgrade import OF_NEW, OF_OLD
from tests.mount.kept_workspaces import facts, insert_rows
from tests.mount.programs import VFSD, failed, succeeded, vfsd
from tests.support.waiting import wait_until
from vfsd import __version__
from vfsd.client.arguments import mount_options
from vfsd.client.connection import ControlClient
from vfsd.client.launch import launch, log_path
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import WorkspaceRecord, read_record
from vfsd.operations.workspace import UpgradeParams, UpgradeResult
from vfsd.wire.messages import wire_path

REPOSITORY = Path(__file__).parents[2]


class Upgradable:
    """A workspace that is upgraded, with options of its own."""

    def __init__(self, workdir: Path, /, **options: Any) -> None:
        self.path = workdir / "mount"
        self.path.mkdir()
        self.name = f"{workdir.name}-up"
        self.options = {"journal_dir": workdir / "journal", **options} if options.get("persist") else options
        self.upgrades = 0

    def mount(self, **options: Any) -> Workspace:
        self.workspace = Workspace.mount(self.path, name=self.name, **self.options, **options)
        return self.workspace

    @property
    def record(self) -> WorkspaceRecord:
        record = read_record(self.name)
        assert record is not None
        return record

    def upgrade(self, executable: str = sys.executable, import_paths: list[str] | None = None) -> UpgradeResult:
        paths = [wire_path(os.fsencode(path)) for path in import_paths or []]
        with ControlClient(self.record.socket) as client:
            result: UpgradeResult = client.call("upgrade", UpgradeParams(wire_path(os.fsencode(executable)), paths))
        self.upgrades += 1
        return result

    @contextlib.contextmanager
    def being_upgraded(self, times: int = 2) -> Iterator[Callable[[], bool]]:
        """Upgrade the workspace `times` times inside the block, which goes on until the value returns True."""
        stop = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                while not stop.is_set() and self.upgrades < times:
                    self.upgrade()
            except BaseException as error:  # raised below
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield lambda: self.upgrades >= times or bool(errors)
        finally:
            stop.set()
            thread.join()
        assert not errors, errors

    def end(self) -> None:
        vfsd("unmount", self.name, "--discard")


MEMORY: dict[str, Any] = {}
KEPT: dict[str, Any] = {"persist": True}
UNKEPT: dict[str, Any] = {"persist": True, "keeper": False}


memory = fixture_of(Upgradable, Upgradable.end)
upgradable = fixture_of(Upgradable, Upgradable.end, params=[MEMORY, KEPT], ids=["memory", "kept"])


# -- programs that go on ---------------------------------------------------------------------------
@pytest.mark.extended
@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_sqlite_goes_on(memory: Upgradable, mode: str) -> None:
    memory.mount()
    with memory.being_upgraded() as is_over:
        insert_rows(memory.path, mode, lambda _: is_over())


@pytest.mark.extended
def test_tar_goes_on(upgradable: Upgradable, workdir: Path) -> None:
    upgradable.mount()
    source = workdir / "source"
    for number in range(200):
        (source / f"d{number % 10}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 10}" / f"f{number}").write_bytes(os.urandom(3000))
    subprocess.run(["tar", "cf", workdir / "a.tar", "-C", source, "."], check=True)
    turns = 0
    with upgradable.being_upgraded() as is_over:
        while not is_over():
            turns += 1
            target = upgradable.path / str(turns % 2)
            target.mkdir(exist_ok=True)
            subprocess.run(["tar", "xf", workdir / "a.tar", "-C", target], check=True)
    assert facts(target) == facts(source)
    check_invariants(Workspace.attach(upgradable.name))


@pytest.mark.extended
def test_a_file_without_a_name_is_freed_when_it_is_closed_after_an_upgrade(upgradable: Upgradable) -> None:
    workspace = upgradable.mount()
    with (upgradable.path / "gone").open("w+b") as gone:
        gone.write(bytes(1 << 20))
        gone.flush()
        (upgradable.path / "gone").unlink()
        upgradable.upgrade()
        assert (workspace.status().live_bytes or 0) > 1 << 20
    wait_until(lambda: (workspace.status().live_bytes or 0) < 1 << 20, "the file to be freed")


# -- what is kept ----------------------------------------------------------------------------------
def test_snapshots_undo_and_the_names_of_the_daemons_are_kept(upgradable: Upgradable) -> None:
    with upgradable.mount() as workspace:
        (upgradable.path / "f").write_text("one")
        workspace.snapshot("one", tag="first")
        (upgradable.path / "f").write_text("two")
        workspace.restore("one")
        before, status = workspace.snapshots(), workspace.status()
        upgraded = workspace.upgrade()
        assert (upgraded.name, upgraded.pid) == (upgradable.name, workspace.pid)
        assert workspace.pid != status.pid
        assert workspace.snapshots() == before
        after = workspace.status()
        assert (after.files, after.size_bytes, after.snapshots) == (status.files, status.size_bytes, status.snapshots)
        assert after.started_by == f"vfsd upgrade, from version {status.version}"
        assert upgradable.record.pid == upgraded.pid
        (upgradable.path / "later").touch()
        workspace.undo() if hasattr(workspace, "undo") else succeeded(vfsd("restore", "--undo", "-w", workspace.name))
        assert (upgradable.path / "f").read_text() == "two"
        assert upgraded.from_version == upgraded.to_version
        check_invariants(workspace)
    assert read_record(upgradable.name) is None


@pytest.mark.extended
def test_what_was_saved_needs_no_question_at_the_end(workdir: Path) -> None:
    upgradable = Upgradable(workdir)
    workspace = upgradable.mount()
    (upgradable.path / "f").write_text("one")
    upgradable.upgrade()
    assert "holds" in failed(vfsd("unmount", workspace.name))
    workspace.export(workdir / "a.zip")
    upgradable.upgrade()
    succeeded(vfsd("unmount", workspace.name))


@pytest.mark.extended
def test_limits_and_forks_afterwards(memory: Upgradable, workdir: Path) -> None:
    workspace = memory.mount(max_memory=32 << 20)
    (memory.path / "f").write_bytes(bytes(range(256)) * 1000)
    oom_score = Path(f"/proc/{workspace.status().pid}/oom_score_adj").read_text()
    memory.upgrade()
    # A new daemon is the first that the kernel ends when memory runs out, until it serves.
    assert Path(f"/proc/{workspace.status().pid}/oom_score_adj").read_text() == oom_score
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (memory.path / "large").write_bytes(os.urandom(40 << 20))
    (memory.path / "large").unlink()
    with workspace.fork(workdir / "fork") as fork:
        assert (workdir / "fork" / "f").stat().st_size == 256_000
        (workdir / "fork" / "new").write_text("of the fork")
        workspace.merge(fork)
    succeeded(vfsd("upgrade", workspace.name))
    assert (memory.path / "new").read_text() == "of the fork"


@pytest.mark.extended
def test_a_journal_goes_on_and_is_complete(memory: Upgradable, workdir: Path) -> None:
    options = {**UNKEPT, "journal_dir": workdir / "journal"}
    workspace = memory.mount(**options)
    (memory.path / "a").write_text("a")
    memory.upgrade()
    (memory.path / "b").write_text("b")
    with (memory.path / "b").open("rb") as file:
        os.fsync(file.fileno())
    status = workspace.status()
    assert status.journal_failure is None
    succeeded(vfsd("compact", "-w", workspace.name))
    (memory.path / "c").write_text("c")
    memory.upgrade()
    os.kill(memory.record.pid, signal.SIGKILL)
    memory.mount(**options)
    assert sorted(os.listdir(memory.path)) == ["a", "b", "c"]


# -- the command -----------------------------------------------------------------------------------
def test_the_command_says_what_it_did_and_upgrades_all(memory: Upgradable) -> None:
    workspace = memory.mount()
    text = succeeded(vfsd("upgrade", memory.name))
    assert f"restarted {memory.name} with the same version" in text
    assert "programs waited for" in text
    answer = json.loads(succeeded(vfsd("upgrade", "--json", cwd=memory.path)))
    (entry,) = answer["upgraded"]
    assert entry["pid"] == workspace.status().pid
    assert entry["mountpoint"] == str(memory.path)
    assert "give --all or a workspace" in vfsd("upgrade", memory.name, "--all").stderr


@pytest.mark.extended
def test_a_running_command_prevents_it_and_a_call_is_waited_for(memory: Upgradable) -> None:
    workspace = memory.mount(exec_on_host=True)
    command = subprocess.Popen([*VFSD, "exec", "-w", workspace.name, "--", "sleep", "100"])
    wait_until(lambda: "a command of `vfsd exec` runs" in vfsd("upgrade", workspace.name).stderr, "the command")
    assert workspace.status().pid == memory.record.pid
    command.send_signal(signal.SIGINT)
    command.wait()
    succeeded(vfsd("upgrade", workspace.name))


@pytest.mark.extended
def test_calls_that_come_meanwhile_are_made_by_the_new_daemon(upgradable: Upgradable, workdir: Path) -> None:
    workspace = upgradable.mount()
    (upgradable.path / "f").write_text("one")
    workspace.snapshot("first")
    (upgradable.path / "f").write_text("two")
    started, go = workdir / "started", workdir / "go"
    late = broken(
        workdir,
        "import os, sys, time\n"
        f"open({str(started)!r}, 'w').close()\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    )
    with ThreadPoolExecutor() as pool:
        upgrade = pool.submit(upgradable.upgrade, late)
        wait_until(started.exists, "the start of the new daemon")
        calls: list[Future[Any]] = [
            pool.submit(workspace.snapshot, "second"),
            pool.submit(workspace.restore, "first"),
            pool.submit(vfsd, "snapshot", "third", "-w", upgradable.name),
        ]
        with socket.socket(socket.AF_UNIX) as raw, raw.makefile("rb") as lines:
            raw.connect(upgradable.record.socket)
            for number, method in enumerate(("snapshot", "status")):
                request = {"jsonrpc": "2.0", "method": method, "params": {}, "id": number}
                raw.sendall(json.dumps(request).encode() + b"\n")
            assert json.loads(lines.readline())["id"] == 1  # the snapshot waits
            go.touch()
            assert json.loads(lines.readline())["method"] == "closing"
            assert lines.read() == b""
        assert upgrade.result().pid == workspace.status().pid
        for call in calls:
            call.result()
        succeeded(calls[-1].result())
    names = [info.name for info in workspace.snapshots() if info.kind == "user"]
    assert sorted(names) == ["first", "second", "third"]
    assert (upgradable.path / "f").read_text() == "one"
    check_invariants(workspace)


def test_the_engine_pyfuse3_cannot_be_upgraded(memory: Upgradable) -> None:
    memory.mount(engine="pyfuse3")
    assert "the engine pyfuse3 cannot hand a mount over" in failed(vfsd("upgrade", memory.name))


# -- a new daemon that does not come up ------------------------------------------------------------
def broken(workdir: Path, script: str) -> str:
    """Return an interpreter that runs `script` in place of the new daemon."""
    path = workdir / "python"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)
    return str(path)


def saying(message: str) -> str:
    """Return a script that sends a message in place of the new daemon, and waits for the end."""
    return f"import sys, socket; s = socket.socket(fileno=int(sys.argv[-1])); s.send(b{message!r}); s.recv(9)"


BROKEN = {
    "no interpreter": ("", "cannot be started"),
    "it ends at once": ("raise SystemExit(3)", "died before it could serve (exit status 3"),
    "it is killed": ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "a later format": (
        saying('{"type": "Hello", "version": "9.9", "format": 8}'),
        "version 9.9 is too much newer than the daemon's",
    ),
    "an older format": (
        saying('{"type": "Hello", "version": "0.0", "format": 3}'),
        "version 0.0 is too much older than the daemon's",
    ),
    "nonsense": (saying("{"), "sent something that cannot be read"),
    "it gives a reason": (saying('{"type": "Failed", "reason": "has no memory"}'), "has no memory"),
}


@pytest.mark.extended
def test_a_new_daemon_that_does_not_come_up_leaves_the_old_one(upgradable: Upgradable, workdir: Path) -> None:
    workspace = upgradable.mount()
    (upgradable.path / "f").write_text("one")
    pid = workspace.status().pid
    for script, reason in BROKEN.values():
        executable = broken(workdir, script) if script else str(workdir / "missing")
        with pytest.raises(OSError, match=re.escape(reason)):
            upgradable.upgrade(executable)
        assert (upgradable.path / "f").read_text() == "one"
        (upgradable.path / "f2").write_text(reason)
    assert workspace.status().pid == pid
    check_invariants(workspace)
    upgradable.upgrade()
    assert (upgradable.path / "f2").read_text() == reason


# -- kill -9 at each step --------------------------------------------------------------------------
class Dying:
    """A workspace both of whose daemons are killed at a step of an upgrade, while a program writes."""

    def __init__(self, upgradable: Upgradable, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.upgradable = upgradable
        self.step = workdir / "step"
        monkeypatch.setenv("VFSD_TEST_STEP", str(self.step))
        launch(
            mount_options(upgradable.path, name=upgradable.name, **upgradable.options),
            daemon_module="tests.mount.dying_upgrade",
        )
        self.executable = workdir / "python"
        script = 'import os, sys; python = sys.executable; module = "tests.mount.dying_upgrade"\n'
        script += 'os.execv(python, [python, "-P", "-m", module, "new", sys.argv[-1]])\n'
        broken(workdir, script)
        self.written = 0
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._writer = threading.Thread(target=self._write)

    def upgrade_at(self, step: str) -> None:
        """Upgrade; one of the daemons dies at `step`."""
        self.step.write_text(step)
        with contextlib.suppress(OSError):
            self.upgradable.upgrade(str(self.executable), [str(REPOSITORY)])
        assert not self.step.exists(), f"nobody died {step}"

    def _write(self) -> None:
        try:
            with (self.upgradable.path / "log").open("wb", buffering=0) as file:
                while not self._stop.is_set():
                    assert file.write(b"%9d\n" % self.written) == 10
                    (self.upgradable.path / f"f{self.written % 50}").write_bytes(b"%d" % self.written)
                    self.written += 1
                    time.sleep(0.001)
        except BaseException as error:  # raised below
            self._error = error

    @contextlib.contextmanager
    def being_written(self) -> Iterator[None]:
        self._writer.start()
        try:
            yield
        finally:
            self._stop.set()
            self._writer.join()
        assert self._error is None, self._error

    def check(self) -> None:
        """The writer goes on, nothing it wrote is lost, and one daemon serves."""
        before = self.written
        wait_until(lambda: self.written > before + 2 or self._error is not None, "the writer to go on")
        assert self._error is None, f"{self._error!r}\n{Path(log_path(self.upgradable.name)).read_text()}"
        count = self.written
        lines = (self.upgradable.path / "log").read_bytes().split(b"\n")
        assert len(lines) > count
        assert all(int(line) == number for number, line in enumerate(lines[:count]))
        wait_until(lambda: self.upgradable.record.alive, "the record of the daemon that serves")
        try:
            check_invariants(Workspace.attach(self.upgradable.name))
        except Exception as error:
            raise AssertionError(Path(log_path(self.upgradable.name)).read_text()) from error


@pytest.mark.extended
def test_the_new_daemon_is_killed_at_each_step(
    upgradable: Upgradable, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = Dying(upgradable, workdir, monkeypatch)
    pid = upgradable.record.pid
    with dying.being_written():
        for message in OF_NEW:
            for when in ("before", "after"):
                if (when, message) == ("after", "Serving"):
                    continue  # the end of a daemon after an upgrade
                dying.upgrade_at(f"{when} {message}")
                dying.check()
    if upgradable.options:
        assert upgradable.record.is_kept
    else:
        assert upgradable.record.pid == pid


@pytest.mark.extended
def test_the_old_daemon_of_a_keeper_is_killed_at_each_step(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upgradable = Upgradable(workdir, **KEPT)
    try:
        dying = Dying(upgradable, workdir, monkeypatch)
        with dying.being_written():
            for message in OF_OLD:
                for when in ("before", "after"):
                    dying.upgrade_at(f"{when} {message}")
                    dying.check()
                    wait_until(lambda: upgradable.record.is_kept, "a keeper")
        # What the user reads, with and without --json.
        dying.step.write_text("after Begin")
        reason = failed(vfsd("upgrade", upgradable.name))
        wait_until(lambda: upgradable.record.alive, "a replacement")
        serving = f"its keeper restarted it: process {upgradable.record.pid}, of version {__version__}"
        assert serving in reason
        assert f"`vfsd upgrade {upgradable.name}` tries again" in reason
        dying.step.write_text("after Finish")
        answer = json.loads(vfsd("upgrade", upgradable.name, "--json").stdout)
        assert "died during the upgrade" in answer["error"]["message"]
        assert len((upgradable.path / "log").read_bytes()) > 0
    finally:
        upgradable.end()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("options", "step"),
    [(MEMORY, "after Finish"), (MEMORY, "after Go"), (UNKEPT, "before Go")],
    ids=["memory", "memory, late", "unkept"],
)
def test_the_new_daemon_serves_if_an_old_one_without_a_keeper_is_killed(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], step: str
) -> None:
    upgradable = Upgradable(workdir, **options)
    try:
        dying = Dying(upgradable, workdir, monkeypatch)
        pid = upgradable.record.pid
        with dying.being_written():
            dying.upgrade_at(step)
            dying.check()
        assert upgradable.record.pid != pid
        dying.step.write_text(step)
        said = succeeded(vfsd("upgrade", upgradable.name))
        assert f"the old daemon died meanwhile, and process {upgradable.record.pid} serves with everything" in said
    finally:
        upgradable.end()
