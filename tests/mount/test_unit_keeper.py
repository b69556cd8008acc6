"""The units of systemd: their keeper restarts the daemon, and what is in memory outlives a restart of the unit."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.mount.conftest import check_invariants
from tests.mount.kept_workspaces import change_at_random, facts
from tests.mount.programs import Program, succeeded, vfsd
from tests.support import connection
from tests.support.processes import child_running
from tests.support.service_manager import ServiceManager, Unit
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_record

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNIT = SYSTEMD / "vfsd@.service"
USER_UNIT = SYSTEMD / "user" / UNIT.name
STARTED = (sys.executable, "-m", "vfsd.cli.main")
BACKENDS = ["memory", "overlay", "host"]


def unit(workdir: Path, backend: str = "memory", *options: str, file: Path = UNIT) -> Unit:
    below = workdir / "below"
    below.mkdir()
    named = {"memory": ("--backend", "memory"), "overlay": ("--backend", f"overlay:{below}")}
    words = (*named.get(backend, ("--backend", f"{backend}:{below}")), *options)
    return Unit(file, workdir, STARTED, " ".join(words))


def keeper(name: str) -> str:
    status = json.loads(succeeded(vfsd("status", "-w", name, "--json")))
    return str(status["keeper"])


def daemon(service: Unit) -> int:
    record = read_record(service.name)
    assert record is not None
    return record.pid


def kill(service: Unit) -> None:
    """Kill the daemon; return when another one serves."""
    pid = daemon(service)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: daemon(service) != pid, "a replacement")


@pytest.mark.extended
@pytest.mark.parametrize("backend", BACKENDS)
def test_programs_continue_after_the_daemon_was_killed(workdir: Path, backend: str) -> None:
    service = unit(workdir, backend)
    root = service.mountpoint
    with service.managed() as manager, Program() as program:
        (root / "dir").mkdir()
        (root / "file").write_bytes(b"content")
        program(f"os.chdir({str(root / 'dir')!r})")
        program("held = open('../file', 'r+b')")
        program("fcntl.flock(held, fcntl.LOCK_EX)")
        before = (root / "file").stat().st_ino
        kill(service)
        assert keeper(service.name) == f"pid {manager.main}, restarted the daemon 1 time"
        assert manager.starts == 1
        assert program("os.getcwd()") == str(root / "dir")
        assert program("os.pread(held.fileno(), 9, 0)") == b"content"
        program("os.pwrite(held.fileno(), b'C', 0)")
        with (root / "file").open("rb") as file:
            assert file.read() == b"Content"
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert (root / "file").stat().st_ino == before
        check_invariants(Workspace.attach(service.name))


@pytest.mark.extended
def test_a_random_writer_sees_what_its_twin_sees(workdir: Path, runs_long: bool) -> None:
    service = unit(workdir, "host")
    twin = workdir / "twin"
    twin.mkdir()
    most = 100 if runs_long else 2
    with service.managed() as manager:
        choice = random.Random(1)

        def kill_often() -> None:
            for _ in range(most):
                kill(service)
                time.sleep(choice.random() * 0.2)  # not to wait for anything: the moments of the deaths are random

        thread = threading.Thread(target=kill_often)
        thread.start()
        change_at_random([service.mountpoint, twin], 1, lambda: not thread.is_alive())
        thread.join()
        assert manager.starts == 1
        assert facts(service.mountpoint) == facts(twin)
        check_invariants(Workspace.attach(service.name))


@pytest.mark.extended
@pytest.mark.parametrize("end", ["stop", "unmount"])
def test_the_unit_ends_with_its_mount(workdir: Path, end: str) -> None:
    service = unit(workdir, file=USER_UNIT)
    with service.managed() as manager:
        if end == "unmount":
            succeeded(vfsd("unmount", service.name))
        else:
            manager.stop()
        manager.wait_over()
        assert manager.ended == 0
        assert os.listdir(service.mountpoint) == []
        assert not os.path.ismount(service.mountpoint)
        assert read_record(service.name) is None


def test_a_fork_in_the_unit_sends_the_manager_nothing(workdir: Path) -> None:
    service = unit(workdir)
    fork = workdir / "fork"
    with service.managed() as manager:
        succeeded(vfsd("fork", fork, "--name", f"{service.name}-fork", "-w", service.name))
        try:
            (fork / "file").write_text("content")
        finally:
            succeeded(vfsd("unmount", f"{service.name}-fork", "--discard"))
        assert manager.ignored == set()


def test_a_stop_that_comes_before_the_next_daemon_serves_unmounts(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed() as manager:
        os.kill(daemon(service), signal.SIGKILL)
        wait_until(lambda: "starts another one" in manager.log.read_text(), "a restart")
        manager.stop()
        assert not os.path.ismount(service.mountpoint)


@pytest.mark.extended
def test_an_unmount_while_no_daemon_runs_ends_the_unit(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed() as manager:
        (service.mountpoint / "file").write_text("content")
        os.kill(manager.main, signal.SIGSTOP)
        os.kill(daemon(service), signal.SIGKILL)
        # Not umount(8), which asks the daemon for the attributes of the mountpoint.
        subprocess.run(["fusermount3", "-u", service.mountpoint], check=True)
        os.kill(manager.main, signal.SIGCONT)
        manager.wait_over()
        assert manager.ended == 0
        assert os.listdir(service.mountpoint) == []
    with service.managed():
        assert (service.mountpoint / "file").read_text() == "content"


@pytest.mark.extended
def test_a_start_without_its_journal_says_why_and_a_later_one_has_the_content(workdir: Path) -> None:
    service = unit(workdir)
    journals, away = service.state / "vfsd", service.state / "away"
    with service.managed() as manager:
        (service.mountpoint / "file").write_bytes(b"content")
        journals.rename(away)
        manager.most_starts = 2
        os.kill(daemon(service), signal.SIGKILL)
        wait_until(lambda: manager.starts == 2 and manager.ended, "a start that fails")
        assert manager.log.read_text().count("put it back") > 1
        with pytest.raises(OSError, match="not connected"):  # an empty directory would be taken for the content
            os.listdir(service.mountpoint)
        away.rename(journals)
        manager.most_starts = 3
        manager.wait_ready(3)
        assert (service.mountpoint / "file").read_bytes() == b"content"


@pytest.mark.extended
def test_a_daemon_that_hangs_is_killed_and_programs_go_on(workdir: Path) -> None:
    service = unit(workdir)
    service.variables["WATCHDOG_USEC"] = "1000000"
    with service.managed() as manager:
        (service.mountpoint / "file").write_bytes(b"content")
        wait_until(lambda: manager.fed > 1, "the watchdog is fed")
        pid = daemon(service)
        os.kill(pid, signal.SIGSTOP)
        assert (service.mountpoint / "file").read_bytes() == b"content"
        wait_until(lambda: daemon(service) != pid, "a replacement")
        fed = manager.fed
        wait_until(lambda: manager.fed > fed + 1, "the watchdog is fed")
        assert manager.starts == 1


@pytest.mark.extended
def test_after_five_deaths_without_an_answer_the_unit_makes_another_mount(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed() as manager, Program() as program:
        (service.mountpoint / "file").write_text("content")
        program(f"held = os.open({str(service.mountpoint / 'file')!r}, os.O_RDONLY)")
        for _ in range(5):
            kill(service)
        os.kill(daemon(service), signal.SIGKILL)
        manager.wait_ready(2)
        assert "died 5 times in a row without answering a request" in manager.log.read_text()
        with pytest.raises(OSError, match="not connected"):
            program("os.fchmod(held, 0o600)")  # fstat(2) may be answered from the kernel's cache
        assert (service.mountpoint / "file").read_text() == "content"


def test_without_a_keeper_the_daemon_is_the_main_process(workdir: Path) -> None:
    service = unit(workdir, "memory", "--no-keeper")
    with service.managed() as manager:
        assert manager.main == daemon(service)


@pytest.mark.extended
def test_an_upgraded_daemon_is_kept(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed() as manager, Program() as program:
        (service.mountpoint / "file").write_text("content")
        program(f"held = os.open({str(service.mountpoint / 'file')!r}, os.O_RDONLY)")
        for _ in range(2):
            upgrade(service, manager)
            kill(service)
            assert keeper(service.name) == f"pid {manager.main}, restarted the daemon 1 time"
        assert program("os.read(held, 9)") == b"content"
        assert manager.starts == 1


def upgrade(service: Unit, manager: ServiceManager) -> None:
    """Upgrade; return when the manager knows the next main process."""
    main = manager.main
    succeeded(vfsd("upgrade", service.name))
    wait_until(lambda: manager.main != main, "the next main process")


@pytest.mark.extended
def test_an_exec_workspace_goes_on_with_its_helper(workdir: Path) -> None:
    (below := workdir / "there").mkdir()
    command = workdir / "far"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -ISE {connection.__file__} {sys.executable} "$@"\n')
    command.chmod(0o755)
    service = Unit(UNIT, workdir, STARTED, f"--backend exec:{command} --workdir {below}")
    with service.managed() as manager, (service.mountpoint / "gone").open("w+b", buffering=0) as gone:
        (service.mountpoint / "gone").unlink()
        gone.write(b"1")
        kill(service)
        gone.write(b"2")
        os.kill(child_running(daemon(service), connection.__file__), signal.SIGKILL)
        wait_until(lambda: "is running again and served" in manager.log.read_text(), "the next connection")
        gone.write(b"3")
        kill(service)
        gone.write(b"4")
        upgrade(service, manager)
        kill(service)
        assert keeper(service.name) == f"pid {manager.main}, restarted the daemon 1 time"
        assert os.pread(gone.fileno(), 9, 0) == b"1234"
        check_invariants(Workspace.attach(service.name))


@pytest.mark.extended
@pytest.mark.parametrize(("backend", "upgrades", "options"), [("host", 2, ()), ("overlay", 1, ("--exclude", "left"))])
def test_a_tightened_policy_holds_after_an_upgrade_and_a_death(
    workdir: Path, backend: str, upgrades: int, options: tuple[str, ...]
) -> None:
    service = unit(workdir, backend, "--hide", "nothing", *options)
    root = service.mountpoint
    with service.managed() as manager, Program() as program:
        (root / "secret").write_text("secret")
        (root / "file").write_bytes(b"content")
        program(f"held = os.open({str(root / 'file')!r}, os.O_RDONLY)")
        succeeded(vfsd("policy", "-w", service.name, "--hide", "secret"))
        for _ in range(upgrades):
            upgrade(service, manager)
            kill(service)
            assert keeper(service.name) == f"pid {manager.main}, restarted the daemon 1 time"
            assert program("os.pread(held, 9, 0)") == b"content"
            assert os.listdir(root) == ["file"]
            with pytest.raises(FileNotFoundError):
                (root / "secret").lstat()


# -- restarts of the unit --------------------------------------------------------------------------------
@pytest.mark.extended
@pytest.mark.parametrize(
    ("file", "options"),
    [(UNIT, "--max-bytes 64MiB"), (USER_UNIT, "--backend memory"), (USER_UNIT, "--fsync always --backend=memory")],
)
def test_content_and_snapshots_in_memory_outlive_stops_and_crashes(file: Path, workdir: Path, options: str) -> None:
    service = Unit(file, workdir, STARTED, options)
    for number in range(3):
        with service.managed() as manager:
            before = (service.mountpoint / "a").read_text() if number else None
            assert before == (str(number - 1) if number else None)
            assert len(Workspace.attach(service.name).snapshots()) == number
            (service.mountpoint / "a").write_text(str(number))
            Workspace.attach(service.name).snapshot(f"s{number}")
            if number == 1:
                manager.most_starts = 1
                os.killpg(manager.main, signal.SIGKILL)  # the keeper and the daemon


@pytest.mark.extended
@pytest.mark.parametrize("option", ["--backend overlay:{}", "--max-memory 1GiB --backend=overlay:{}"])
def test_the_changes_of_an_overlay_outlive_a_restart(option: str, workdir: Path) -> None:
    (workdir / "below").mkdir()
    (workdir / "below" / "removed").touch()
    service = Unit(UNIT, workdir, STARTED, option.format(workdir / "below"))
    with service.managed():
        (service.mountpoint / "a").write_text("x")
        (service.mountpoint / "removed").unlink()
    with service.managed():
        assert os.listdir(service.mountpoint) == ["a"]
    assert os.listdir(workdir / "below") == ["removed"]


@pytest.mark.parametrize("option", ["--backend host:{}", "--backend=host:{}"])
def test_a_backend_that_keeps_its_content_itself_has_no_journal(option: str, workdir: Path) -> None:
    (workdir / "memory").mkdir()
    service = Unit(UNIT, workdir, STARTED, option.format(workdir / "memory"))
    with service.managed():
        (service.mountpoint / "a").write_text("x")
    assert os.listdir(workdir / "memory") == ["a"]
    assert not journal(service).exists()


def test_an_archive_is_read_until_there_is_a_journal(workdir: Path) -> None:
    archive = workdir / "a.zip"
    (workdir / "other").mkdir()
    with Workspace.mount(workdir / "other", name=f"{workdir.name}-other") as other:
        (workdir / "other" / "a").write_text("archived")
        other.export(archive)
    service = Unit(UNIT, workdir, STARTED, f"--from {archive}")
    for content in ("archived", "changed"):
        with service.managed():
            assert (service.mountpoint / "a").read_text() == content
            (service.mountpoint / "a").write_text("changed")
    assert journal(service).is_dir()


def journal(service: Unit) -> Path:
    return service.state / "vfsd" / "journals" / service.name
