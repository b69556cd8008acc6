"""The keeper: a daemon that is killed gets a replacement, and programs that use the mount notice only a pause."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from click.testing import CliRunner

from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.kept_workspaces import (
    Kept,
    end_kept,
    kill_replacements,
)
from tests.mount.programs import VFSD, Program, failed, log_of, succeeded, vfsd, wait_ended
from tests.support.waiting import wait_until
from vfsd.cli.main import cli
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.connection import ControlClient
from vfsd.client.log import LoggedChange, Missed
from vfsd.client.workspace import Workspace
from vfsd.daemon.keeper.keeping import DEATHS_MAX
from vfsd.kernel.engines.native.wire import Opcode
from vfsd.machine.runtime import WorkspaceRecord, read_record, write_record
from vfsd.operations.workspace import LabelParams

kept = fixture_of(Kept, end_kept)


# -- programs that go on ---------------------------------------------------------------------------
def test_a_directory_in_use_keeps_its_path_after_a_recovery_from_an_image(kept: Kept) -> None:
    kept.mount()
    (kept.path / "dir" / "below").mkdir(parents=True)
    with Program() as program:
        program(f"os.chdir({str(kept.path / 'dir' / 'below')!r})")
        succeeded(vfsd("compact", "-w", kept.name))
        kept.kill()
        assert program("os.getcwd()") == str(kept.path / "dir" / "below")


@pytest.mark.extended
def test_a_program_in_a_removed_directory_that_a_later_daemon_restores_finds_it_empty(kept: Kept) -> None:
    workspace = kept.mount()
    file = kept.path / "dir" / "file"
    file.parent.mkdir()
    file.write_text("content")
    workspace.snapshot("one")
    with Program(cwd=file.parent) as program:
        program("fd = os.open('file', os.O_RDONLY)")
        for end in (kept.kill, workspace.upgrade, lambda: succeeded(vfsd("compact", "-w", kept.name))):
            shutil.rmtree(file.parent)
            end()
            workspace.restore("one")
            assert file.read_text() == "content"
            assert program("os.listdir('.'), os.stat('.').st_nlink, os.pread(fd, 9, 0)") == ([], 0, b"content")
            kept.kill()
            assert file.read_text() == "content"
            assert program("os.listdir('.')") == []
    check_invariants(workspace)


@pytest.mark.extended
def test_rm_that_is_interrupted_between_two_listings_removes_everything(kept: Kept) -> None:
    kept.mount()
    while not kept.kills:
        (kept.path / "d").mkdir()
        for number in range(4000):
            (kept.path / "d" / f"a-longer-name-{number}").touch()
        with kept.being_killed(5):
            subprocess.run(["rm", "-r", kept.path / "d"], check=True)


# -- one request, at each step ---------------------------------------------------------------------
# -- more deaths -----------------------------------------------------------------------------------
@pytest.mark.extended
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


@pytest.mark.extended
def test_a_workspace_that_is_used_over_its_socket_only_is_not_given_up(kept: Kept) -> None:
    workspace = kept.mount()
    for number in range(DEATHS_MAX + 1):
        workspace.filesystem.write_bytes(f"f{number}", b"kept")
        kept.kill()
    assert len(os.listdir(kept.path)) == DEATHS_MAX + 1


def test_a_daemon_that_only_refuses_requests_has_done_its_work(kept: Kept) -> None:
    kept.mount()
    for number in range(DEATHS_MAX + 1):
        with pytest.raises(FileNotFoundError):
            (kept.path / f"missing{number}").stat()
        kept.kill()
    assert os.listdir(kept.path) == []


@pytest.mark.extended
def test_reads_that_the_kernel_answers_do_not_count_as_work_of_the_daemon(kept: Kept) -> None:
    kept.mount()
    (kept.path / "f").write_bytes(b"cached")
    with (kept.path / "f").open("rb", buffering=0) as file:
        assert file.read() == b"cached"
        keeper = kept.record.keeper
        assert keeper is not None
        kept.kill()
        for _ in range(DEATHS_MAX - 1):
            assert os.pread(file.fileno(), 6, 0) == b"cached"
            kept.kill()
        assert os.pread(file.fileno(), 6, 0) == b"cached"
        os.kill(kept.record.pid, signal.SIGKILL)
        wait_ended(keeper)


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
@pytest.mark.extended
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
        listed = CliRunner().invoke(cli, ["list"], prog_name="vfsd")
        assert f"the daemon of {kept.name} died, and its keeper (process {record.keeper}) is to start" in listed.stderr
    finally:
        os.kill(record.keeper, signal.SIGCONT)
    wait_until(lambda: kept.record.alive, "a replacement")
    assert os.path.ismount(kept.path)


@pytest.mark.parametrize("comes_up", [True, False])
def test_an_unmount_waits_for_a_replacement_whose_keeper_is_dead(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, comes_up: bool
) -> None:
    """The replacement serves on without the keeper, so "unmounted" would be untrue."""
    kept.mount()
    record = kept.record
    # Until the replacement has written its record, there is that of the dead daemon.
    write_record(msgspec.structs.replace(record, pid_start_ticks=-1, keeper_start_ticks=-1))

    def read_again(name: str) -> WorkspaceRecord | None:
        if comes_up:
            write_record(record)
        return read_record(name)

    monkeypatch.setattr("vfsd.cli.unmount.read_record", read_again)
    monkeypatch.setattr("vfsd.cli.unmount._SUCCESSOR_TIMEOUT_S", 60 if comes_up else 0)
    done = CliRunner().invoke(cli, ["unmount", kept.name], prog_name="vfsd")
    assert os.path.ismount(kept.path) == (not comes_up)
    if comes_up:
        assert (done.exit_code, read_record(kept.name)) == (0, None), done.output
        assert "was dead" not in done.stderr
    else:
        assert done.exit_code == 1
        assert "another process holds its mount" in done.stderr
        assert not kept.record.alive
        write_record(record)


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


def test_a_workspace_without_a_journal_has_no_keeper(workdir: Path) -> None:
    done = vfsd("mount", workdir / "mount", "--no-keeper")
    assert done.returncode == 2
    assert "--persist" in done.stderr


def test_a_follower_of_the_log_goes_on_with_the_next_daemon(kept: Kept) -> None:
    workspace = kept.mount()
    command = [*VFSD, "log", "-w", workspace.name, "--follow", "--json", "--since", "1h"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for name, then in (("first", kept.kill), ("second", workspace.upgrade), ("third", kept.end)):
            (kept.path / name).mkdir()
            assert json.loads(program.stdout.readline())["path"] == name
            then()
        _, errors = program.communicate(timeout=30)
    assert program.returncode == 0
    assert "died; changes of its last seconds may be missing here" in errors
    assert "was unmounted" in errors


def test_follow_in_python_goes_on_with_the_next_daemon(kept: Kept) -> None:
    workspace = kept.mount()
    with workspace.follow(since=datetime.fromtimestamp(0, UTC)) as changes:
        (kept.path / "first").mkdir()
        assert _path_of(next(changes)) == "first"
        for name, next_daemon in (("second", kept.kill), ("third", workspace.upgrade)):
            next_daemon()
            assert next(changes) == Missed(0)
            (kept.path / name).mkdir()
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
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFSD_TEST_NO_RESEND", "1")
    kept.mount_dying()
    (kept.path / "file").write_bytes(b"content")
    with (kept.path / "file").open("rb") as file:
        with kept.dying_at(Opcode.MKDIR, "recorded"), pytest.raises(OSError, match="Input/output error") as raised:
            (kept.path / "new").mkdir()
        assert raised.value.errno == errno.EIO
        assert file.read() == b"content"
        for _ in range(3):
            kept.kill()
            (kept.path / "file").write_bytes(b"content")
    assert "failed with EIO" in log_of(kept.name)
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
def test_without_its_journal_a_workspace_is_not_continued_as_an_empty_one(kept: Kept) -> None:
    kept.mount()
    (kept.path / "f").write_bytes(b"content")
    record = kept.record
    assert record.keeper is not None
    away = kept.journal.with_name("away")
    kept.journal.rename(away)
    (kept.path / "g").write_bytes(b"later")
    assert "the journal cannot be compacted (its files were removed" in failed(vfsd("compact", "-w", kept.name))
    os.kill(record.pid, signal.SIGKILL)
    wait_ended(record.keeper)
    with pytest.raises(OSError, match="not connected") as raised:
        os.listdir(kept.path)
    assert raised.value.errno == errno.ENOTCONN
    why = "put it back, and mount the workspace again"
    assert why in log_of(kept.name)
    assert why in failed(vfsd("status", "-w", kept.name))
    assert why in vfsd("list").stderr
    listed = json.loads(succeeded(vfsd("list", "--json")))["workspaces"]
    assert why in next(each["failure"] for each in listed if each["name"] == kept.name)
    assert not kept.journal.exists()
    away.rename(kept.journal)
    mounted = vfsd("mount", kept.path, "--name", kept.name, "--persist", "--journal-dir", kept.journal)
    assert mounted.returncode == 0, mounted.stderr
    assert why in mounted.stdout + mounted.stderr
    assert (kept.path / "f").read_bytes() + (kept.path / "g").read_bytes() == b"contentlater"


@pytest.mark.extended
@pytest.mark.parametrize("options", [{}, {"persist": False, "journal_dir": None}], ids=["persist", "memory"])
def test_snapshots_that_were_dropped_for_lack_of_memory_are_named_by_the_next_daemon(
    kept: Kept, options: dict[str, Any]
) -> None:
    workspace = kept.mount(max_memory=16 << 20, **options)
    file = kept.path / "file"
    file.touch()
    workspace.snapshot("empty")
    for number in range(3):
        file.write_bytes(b"%d" % number + os.urandom(2 << 20))
        workspace.restore("empty")

    def go_on() -> None:
        if options:
            workspace.upgrade()
        else:
            kept.kill()

    file.write_bytes(os.urandom(10 << 20))  # which makes some go
    go_on()
    named = list(workspace.snapshot("one").expired)
    assert named == [f"safety-{number}" for number in range(1, len(named) + 1)]
    assert named
    file.write_bytes(b"")  # with which it is recorded that they were named
    go_on()
    assert list(workspace.snapshot("two").expired) == []
    for _ in range(3 - len(named)):
        assert workspace.undo().step == "restore empty"
    with pytest.raises(OSError, match="memory"):
        workspace.undo()
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
def test_labels_survive_a_death_and_an_upgrade(kept: Kept) -> None:
    workspace = kept.mount()
    with subprocess.Popen(["sh", "-c", "read line; mkdir e"], cwd=kept.path, stdin=subprocess.PIPE) as other:
        with ControlClient(workspace.socket) as client:
            client.call("label", LabelParams("another's", other.pid))
        with workspace.label("turn 1"):
            kept.kill()
            (kept.path / "a").mkdir()
            workspace.upgrade()
            (kept.path / "b").mkdir()
            kept.kill()
            subprocess.run(["mkdir", kept.path / "c"], check=True)
            found = {change.path: change.label for change in workspace.log()}
            assert found == {"c": "turn 1"}
        kept.kill()
        (kept.path / "d").mkdir()
        other.communicate(b"\n")
    assert {change.path: change.label for change in workspace.log()} == {"d": None, "e": "another's"}


@pytest.mark.extended
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
