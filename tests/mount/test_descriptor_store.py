"""systemd as the keeper: it holds the descriptors of a mount while it restarts the daemon, and programs go on."""

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
from tests.mount.programs import Program, failed, succeeded, vfsd
from tests.support import connection
from tests.support.processes import child_running
from tests.support.service_manager import ServiceManager, Unit
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_record

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNIT = SYSTEMD / "vfsd@.service"
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


def is_alive(name: str) -> bool:
    record = read_record(name)
    return record is not None and record.alive


def failure(name: str) -> str | None:
    record = read_record(name)
    return None if record is None else record.failure


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
        manager.kill()
        assert keeper(service.name) == "systemd, restarted the daemon 1 time"
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

        def kill() -> None:
            for _ in range(most):
                manager.kill()
                time.sleep(choice.random() * 0.2)  # not to wait for anything: the moments of the deaths are random

        thread = threading.Thread(target=kill)
        thread.start()
        change_at_random([service.mountpoint, twin], 1, lambda: not thread.is_alive())
        thread.join()
        assert manager.starts == most + 1
        assert facts(service.mountpoint) == facts(twin)
        check_invariants(Workspace.attach(service.name))


@pytest.mark.extended
@pytest.mark.parametrize("end", ["stop", "unmount"])
def test_nothing_is_stored_after_a_clean_end(workdir: Path, end: str) -> None:
    service = unit(workdir, file=SYSTEMD / "user" / UNIT.name)
    with service.managed() as manager:
        assert sorted(name.split(".")[0] for name in manager.names) == [
            "vfsd-device", "vfsd-log", "vfsd-memory", "vfsd-saved"
        ]  # fmt: skip
        names = manager.names
        if end == "unmount":
            succeeded(vfsd("unmount", service.name))
        else:
            manager.stop()
        manager.wait_over()
        assert manager.removed >= set(names)  # names under which nothing is stored may be removed, too
        assert os.listdir(service.mountpoint) == []
        assert not os.path.ismount(service.mountpoint)


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
        starts = manager.starts
        os.kill(manager.main, signal.SIGKILL)
        wait_until(lambda: manager.starts > starts, "a start")
        wait_until(lambda: "continues its mount" in manager.log.read_text(), "the mount is taken over")
        manager.stop()
        assert not os.path.ismount(service.mountpoint)


@pytest.mark.extended
def test_a_mount_that_was_unmounted_meanwhile_is_made_anew(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed() as manager:
        (service.mountpoint / "file").write_text("content")
        manager.is_paused = True
        os.kill(manager.main, signal.SIGKILL)
        # Not umount(8), which asks the daemon for the attributes of the mountpoint.
        subprocess.run(["fusermount3", "-u", service.mountpoint], check=True)
        manager.is_paused = False
        manager.wait_ready(2)
        assert (service.mountpoint / "file").read_text() == "content"
        assert len(manager.names) == 4


@pytest.mark.extended
def test_a_mount_with_other_options_is_given_up(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed() as manager, Program() as program:
        (service.mountpoint / "file").write_text("content")
        program(f"held = os.open({str(service.mountpoint / 'file')!r}, os.O_RDONLY)")
        manager.environment["VFSD_OPTIONS"] += " --read-only"
        manager.kill()
        assert "the options of the unit have changed" in manager.log.read_text()
        with pytest.raises(OSError, match="not connected"):
            program("os.fchmod(held, 0o600)")  # fstat(2) may be answered from the kernel's cache
        assert (service.mountpoint / "file").read_text() == "content"
        with pytest.raises(OSError, match="Read-only"):
            (service.mountpoint / "new").touch()
        assert len(manager.names) == 4


@pytest.mark.extended
def test_a_start_that_cannot_continue_says_why_and_a_later_one_continues(workdir: Path) -> None:
    service = unit(workdir)
    journals, away = service.state / "vfsd", service.state / "away"
    with service.managed() as manager, Program() as program:
        (service.mountpoint / "file").write_bytes(b"content")
        program(f"held = os.open({str(service.mountpoint / 'file')!r}, os.O_RDONLY)")
        journals.rename(away)
        manager.most_starts = manager.starts + 1
        os.kill(manager.main, signal.SIGKILL)
        wait_until(lambda: failure(service.name) is not None, "why the next daemon did not start")
        assert "put it back" in vfsd("list").stderr
        away.rename(journals)
        manager.most_starts += 1
        manager.wait_ready(manager.most_starts)
        assert program("os.read(held, 9)") == b"content"
        assert failure(service.name) is None


@pytest.mark.long
def test_a_mount_is_given_up_after_five_deaths_without_an_answer(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed() as manager, Program() as program:
        (service.mountpoint / "file").write_text("content")
        program(f"held = os.open({str(service.mountpoint / 'file')!r}, os.O_RDONLY)")
        for number in range(1, 6):
            os.kill(manager.main, signal.SIGKILL)
            wait_until(lambda: manager.log.read_text().count("continues its mount") == number, "a replacement")  # noqa: B023
        os.kill(manager.main, signal.SIGKILL)
        manager.wait_ready(7)
        assert "died 5 times in a row without answering a request" in manager.log.read_text()
        with pytest.raises(OSError, match="not connected"):
            program("os.fstat(held)")
        assert (service.mountpoint / "file").read_text() == "content"


@pytest.mark.extended
def test_commands_wait_for_the_next_daemon_and_say_what_they_wait_for(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed() as manager:
        manager.is_paused = True
        os.kill(manager.main, signal.SIGKILL)
        wait_until(lambda: not is_alive(service.name), "the death")
        assert "systemd holds the mount" in failed(vfsd("unmount", service.name))
        (workdir / "other").mkdir()
        assert "is mounted at" in failed(vfsd("mount", workdir / "other", "--name", service.name))
        waiting = subprocess.Popen([*STARTED, "status", "-w", service.name], stdout=subprocess.PIPE, text=True, cwd="/")
        manager.is_paused = False
        said, _ = waiting.communicate(timeout=60)
        if waiting.returncode:  # on a busy machine the command gives up first, and says: repeat the command
            manager.wait_ready(2)
            said = succeeded(vfsd("status", "-w", service.name))
        assert "keeper\tsystemd" in said


@pytest.mark.extended
def test_status_does_not_promise_a_store_that_the_unit_may_not_have(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed(store_size=0):
        assert keeper(service.name) == "systemd, if its unit has Restart= and FileDescriptorStoreMax="


def test_no_keeper_stores_nothing(workdir: Path) -> None:
    with unit(workdir, "memory", "--no-keeper").managed() as manager:
        assert manager.names == []


@pytest.mark.extended
def test_an_upgraded_daemon_is_kept(workdir: Path) -> None:
    service = unit(workdir)
    with service.managed() as manager, Program() as program:
        (service.mountpoint / "file").write_text("content")
        program(f"held = os.open({str(service.mountpoint / 'file')!r}, os.O_RDONLY)")
        names, main = set(manager.names), manager.main
        succeeded(vfsd("upgrade", service.name))
        wait_until(lambda: manager.main != main and len(set(manager.names) - names) == 4, "what the new daemon stores")
        assert not set(manager.names) & names
        manager.kill()
        assert program("os.read(held, 9)") == b"content"


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
        manager.kill()
        gone.write(b"2")
        os.kill(child_running(manager.main, connection.__file__), signal.SIGKILL)
        wait_until(lambda: "is running again and served" in manager.log.read_text(), "the next connection")
        gone.write(b"3")
        manager.kill()
        gone.write(b"4")
        names, main = set(manager.names), manager.main
        succeeded(vfsd("upgrade", service.name))
        wait_until(lambda: manager.main != main and _has_device(manager, names), "what the new daemon stores")
        manager.kill()
        assert keeper(service.name) == "systemd, restarted the daemon 1 time"
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
            names, main = set(manager.names), manager.main
            succeeded(vfsd("upgrade", service.name))
            wait_until(lambda: manager.main != main and _has_device(manager, names), "what the new daemon stores")  # noqa: B023
            manager.kill()
            assert keeper(service.name) == "systemd, restarted the daemon 1 time"
            assert program("os.pread(held, 9, 0)") == b"content"
            assert os.listdir(root) == ["file"]
            with pytest.raises(FileNotFoundError):
                (root / "secret").lstat()


def _has_device(manager: ServiceManager, before: set[str]) -> bool:
    """Whether a new mount is stored.  Its device is the last thing that a daemon stores."""
    return any(name.startswith("vfsd-device.") for name in set(manager.names) - before)
