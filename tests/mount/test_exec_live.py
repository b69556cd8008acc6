"""`vfsd exec` with --on-host: commands in the mount that their daemon serves."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import MountIt, mounted, socket_of
from tests.support.exec_suite import ExecSuite, Where, run
from tests.unit.vfsd.cli.test_exec import running_here
from vfsd.client.workspace import Workspace
from vfsd.machine.resources import CPU_LATENCY_DEVICE
from vfsd.machine.runtime import read_record


def where_of(workspace: Workspace) -> Where:
    return Where(workspace.name, socket_of(workspace), Path(workspace.path), workspace.path, running_here)


@pytest.mark.long
class TestInTheMount(ExecSuite):
    """Commands on this host, in a workspace in memory."""

    @pytest.fixture(scope="class")
    @classmethod
    def where(cls, session_dir: str) -> Iterator[Where]:
        place = Path(tempfile.mkdtemp(dir=f"{session_dir}/work", prefix="x"))
        with mounted(place / "m", name=place.name, exec_on_host=True) as workspace:
            yield where_of(workspace)


def test_the_daemon_serves_the_mount_while_a_command_in_it_fails_to_start(mount: MountIt, workdir: Path) -> None:
    # Nothing is cached: each look at the directory is a request to the daemon.
    (workdir / "below").mkdir()
    workspace = mount(backend=f"host:{workdir}/below", exec_on_host=True, cache_timeout_s=0)
    for args in (["--cwd", "missing", "--", "true"], ["--cwd", "missing/deep", "--", "no-such-program"]):
        done = run(where_of(workspace), *args)
        assert done.returncode == 125
        assert b"missing" in done.stderr
    assert run(where_of(workspace), "--", "no-such-program").returncode == 127


def test_a_command_has_the_environment_of_its_caller_and_no_credentials_of_the_daemon(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, new_interpreters: None
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("OF", "the mount")
    script = "echo $OF $ADDED $VFSD_WORKSPACE; env; cat /proc/$PPID/environ"

    def check() -> None:
        record = read_record(workspace.name)
        assert record is not None
        command = f"{script} /proc/{record.pid}/environ /proc/{record.keeper}/environ"
        outputs = [
            workspace.executor.run(["sh", "-c", command], env={"ADDED": "added"}).stdout,
            run(where_of(workspace), "-e", "ADDED=added", "--", "sh", "-c", command).stdout,
        ]
        for output in outputs:
            assert output.startswith(f"the caller \\ \udcff added {workspace.name}\n".encode(errors="surrogateescape"))
            assert b"s3cret" not in output

    with mounted(workdir / "m", exec_on_host=True, persist=True, journal_dir=workdir / "journal") as workspace:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("OF", "the caller \\ \udcff")
        check()
        started = workdir / "environment"
        python = workdir / "python"
        python.write_text(f'#!/bin/sh\nenv > {started}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        workspace.upgrade()
        assert b"s3cret" not in started.read_bytes()
        check()


def test_each_command_is_followed_by_a_snapshot_where_that_is_asked_for(mount: MountIt) -> None:
    workspace = mount(exec_on_host=True, snapshot_each=True)
    root = Path(workspace.path)
    run(where_of(workspace), "--", "sh", "-c", "mkdir src; echo one > src/f")
    run(where_of(workspace), "--", "rm", "-r", "src")
    assert [snapshot.tag for snapshot in workspace.snapshots()] == ["sh -c 'mkdir src; echo one > src/f'", "rm -r src"]
    workspace.restore("exec-1")
    assert (root / "src" / "f").read_text() == "one\n"
    workspace.snapshot("exec-3")  # a name that is taken is left to its owner
    assert workspace.executor.run(["true"]).exit_status == 0
    assert [snapshot.name for snapshot in workspace.snapshots() if snapshot.kind == "automatic"][-1] == "exec-4"
    (root / "new").write_text("")
    assert workspace.diff().a == "exec-4", "without a name, diff compares with the newest snapshot of all"


def test_a_command_does_not_inherit_the_daemon_s_precise_waits(mount: MountIt) -> None:
    workspace = mount(exec_on_host=True)
    # Who reads /proc/self is a child of the shell, and has what the shell has.
    done = run(where_of(workspace), "--", "sh", "-c", "cat /proc/self/timerslack_ns")
    assert done.stdout.strip() == b"50000"


@pytest.mark.parametrize("engine", ["native"])
def test_a_command_does_not_inherit_what_keeps_the_cpus_awake(mount: MountIt) -> None:
    can_hold = os.access(CPU_LATENCY_DEVICE, os.W_OK)
    workspace = mount(exec_on_host=True, wakeups="on" if can_hold else "off")
    # The daemon holds the device during a burst of requests: some commands are started within one.
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            os.statvfs(workspace.path)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        while can_hold and not _holds_the_device(workspace.pid):
            os.sched_yield()
        for _ in range(5):
            done = run(where_of(workspace), "--", "sh", "-c", "ls -l /proc/self/fd /proc/$$/fd")
            assert done.returncode == 0
            assert CPU_LATENCY_DEVICE.encode() not in done.stdout
    finally:
        ended.set()
        thread.join()


def _holds_the_device(pid: int | None) -> bool:
    paths = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            paths.append(os.readlink(entry.path))
    return CPU_LATENCY_DEVICE in paths
