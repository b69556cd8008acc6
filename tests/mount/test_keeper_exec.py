"""The keeper of `exec:` workspaces: the helper at the other end outlives the daemon, and the next one continues."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.kept_workspaces import (
    KeptCommand,
    check_dead_without_keeper,
    end_kept,
    insert_rows,
)
from tests.mount.programs import log_of, succeeded, vfsd, wait_ended
from tests.support.waiting import wait_until
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace
from vfsd.kernel.engines.native.wire import Opcode

kept = fixture_of(KeptCommand, end_kept)


@pytest.mark.extended
def test_without_resending_a_request_that_was_read_after_a_write_fails(
    kept: KeptCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFSD_TEST_NO_RESEND", "1")  # as before Linux 6.9
    kept.mount_dying()
    (kept.path / "file").write_bytes(b"content")  # answered by the helper, so later than it is read
    with kept.dying_at(Opcode.MKDIR, "read"), pytest.raises(OSError, match="Input/output error"):
        (kept.path / "new").mkdir()
    assert (kept.path / "file").read_bytes() == b"content"
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_writers_at_once_lose_nothing_and_see_no_error(kept: KeptCommand, workdir: Path) -> None:
    """Appends, mkdir loops, tar, git and a database: many requests are in flight at each death."""
    workspace = kept.mount()
    stop = workdir / "stop"
    source = workdir / "source"
    for number in range(60):
        (source / f"d{number % 7}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 7}" / f"f{number}").write_bytes(os.urandom(3000))
    subprocess.run(["tar", "cf", workdir / "a.tar", "-C", source, "."], check=True)
    scripts = [
        f"for n in $(seq 100000); do test -e {stop} && break; echo $n >> log{at}; mkdir m{at}.$n; rmdir m{at}.$n; done"
        for at in range(4)
    ]
    scripts.append(
        f"while ! test -e {stop}; do mkdir t; tar xf {workdir}/a.tar -C t; diff -r {source} t; rm -r t; done"
    )
    scripts.append(
        "git init -q g; cd g; git config user.email a@b; git config user.name a; git config gc.auto 0; "
        f"for n in $(seq 10000); do test -e {stop} && break; echo $n > f$n; git add .; git commit -qm $n; done; "
        "git fsck"
    )
    programs = [subprocess.Popen(["sh", "-ec", script], cwd=kept.path) for script in scripts]
    times = 100
    try:
        with kept.being_killed(2, times):
            insert_rows(kept.path, "wal", lambda rows: rows > 3 and kept.kills == times)
    finally:
        stop.touch()
        statuses = [program.wait(120) for program in programs]
    assert statuses == [0] * len(programs)
    for at in range(4):
        numbers = (kept.below / f"log{at}").read_text().split()
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    check_invariants(workspace)


def test_a_command_in_a_shell_does_not_wait_for_the_mount(kept: KeptCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell looks at the directories in these variables when it starts."""
    for name in ("PWD", "OLDPWD"):
        monkeypatch.setenv(name, str(kept.path))
    wrapper = kept.path.with_name("wrapper")
    wrapper.write_text(f'#!/bin/bash\nexec {kept.python} "$@"\n')
    wrapper.chmod(0o755)
    kept.mount(backend=f"exec:{wrapper}")
    (kept.path / "file").touch()
    kept.kill()
    assert os.listdir(kept.path) == ["file"]


@pytest.mark.extended
def test_a_helper_that_ends_while_no_daemon_runs_ends_the_mount(kept: KeptCommand) -> None:
    kept.mount()
    record = kept.record
    assert record.keeper is not None
    (helper,) = kept.processes()
    os.kill(record.keeper, signal.SIGSTOP)
    os.kill(record.pid, signal.SIGKILL)
    os.kill(helper, signal.SIGKILL)
    os.kill(record.keeper, signal.SIGCONT)
    wait_ended(record.keeper)
    with pytest.raises(OSError, match="not connected"):
        os.statvfs(kept.path)
    assert "the helper that has the files open has ended" in log_of(kept.name)


def test_another_end_that_cannot_be_reached_is_tried_again(kept: KeptCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.mount()
    with (kept.path / "file").open("w+b", buffering=0) as file:
        file.write(b"content")
        (kept.path / "file").unlink()
        away = kept.python.rename(kept.python.with_name("away"))
        try:
            os.kill(kept.record.pid, signal.SIGKILL)
            wait_until(lambda: "tried again in 2 s" in (kept.record.failure or ""), "more than one attempt")
            with monkeypatch.context() as patch:
                patch.setattr("vfsd.machine.runtime._RESTART_TIMEOUT_S", 0.0)
                said = CliRunner().invoke(cli, ["status", "-w", kept.name], prog_name="vfsd").stderr
        finally:
            away.rename(kept.python)
        assert "there is no program" in said
        assert "is starting another one" in said
        assert os.pread(file.fileno(), 9, 0) == b"content"
        assert "restarted the daemon 1 time" in succeeded(vfsd("status", "-w", kept.name))


@pytest.mark.extended
def test_a_helper_that_ends_under_a_daemon_is_started_again_and_the_keeper_goes_on(kept: KeptCommand) -> None:
    kept.mount()
    (kept.path / "file").write_bytes(b"x")
    kept.kill()
    os.kill(kept.processes()[0], signal.SIGKILL)

    def is_served() -> bool:
        try:
            return (kept.path / "file").read_bytes() == b"x" and (kept.path / "new").write_bytes(b"new") == 3
        except OSError:
            return False

    wait_until(is_served, "the next helper")
    assert "keeper\tpid" in succeeded(vfsd("status", "-w", kept.name))
    with (kept.path / "new").open("r+b", buffering=0) as file:
        kept.kill()
        succeeded(vfsd("upgrade", kept.name))
        file.write(b"N")
    assert (kept.below / "new").read_bytes() == b"New"


@pytest.mark.extended
def test_the_helper_ends_with_an_unmount_and_with_a_mount_without_a_keeper(kept: KeptCommand) -> None:
    kept.mount()
    kept.kill()
    assert len(kept.processes()) == 2
    succeeded(vfsd("unmount", kept.name))
    wait_until(lambda: not kept.processes(), "the end of the helper")
    check_dead_without_keeper(kept)
    wait_until(lambda: not kept.processes(), "the end of the helper")
