"""`vfsd exec` and the `exec` methods, over the real control socket, with commands on this host."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import trio

from protocol.execution.host import HostCommandRunner
from protocol.volume_extensions import SnapshotInfo
from tests.support.exec_suite import WAIT_S, ExecSuite, Where, command_line, run
from tests.support.fake_workspace import FakeDaemon
from vfsd.client.connection import ControlClient, ControlError
from vfsd.daemon.control.calls import handlers_of
from vfsd.daemon.control.connection import ControlServer
from vfsd.daemon.control.handlers.exec import ExecMethods
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.snapshots.base import SnapshotService
from vfsd.operations.catalogue import OPERATIONS
from vfsd.operations.declaration import Empty
from vfsd.operations.fs import ExecInputParams, ExecParams, ExecSignalParams
from vfsd.wire.messages import INVALID_PARAMS


async def _ping(_params: object, _call: object) -> Empty:
    return Empty()


class ExecDaemon(FakeDaemon):
    """A daemon with the `exec` methods only, whose commands run on this host, if anywhere."""

    on_host = True

    def __init__(self, name: str, mountpoint: str) -> None:
        super().__init__(name, mountpoint)
        self.tags_taken: list[str] = []
        self.snapshots_fail_with: Exception | None = None

    async def infos(self) -> Sequence[SnapshotInfo]:
        return ()

    async def take(self, name: str, tag: str, _observer: object, *, kind: str) -> SnapshotInfo:
        assert kind == "automatic"
        if self.snapshots_fail_with is not None:
            raise self.snapshots_fail_with
        self.tags_taken.append(tag)
        return SnapshotInfo(name, len(self.tags_taken), 0, 0, 0, 0)

    async def _serve(self, started: threading.Event) -> None:
        runner = HostCommandRunner(self.mountpoint, {"VFSD_WORKSPACE": self.name}) if self.on_host else None
        commands = Commands(self.name, runner=runner, snapshots=cast("SnapshotService", self))
        methods = {**handlers_of(ExecMethods(commands)), "ping": _ping}
        self._token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(ControlServer(self.socket, methods).serve)
                started.set()


class DaemonWithNowhere(ExecDaemon):
    on_host = False


def running_here(text: str) -> int:
    """How many processes of this machine have `text` in their command lines."""
    shown = subprocess.run(["ps", "-e", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    lines = (line.split(None, 1) for line in shown.splitlines())
    ours = [args for _, args in lines if text in args and "vfsd.cli" not in args and "supervisor.py" not in args]
    return len(ours)


@pytest.fixture
def daemon(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExecDaemon]:
    monkeypatch.setenv("VFSD_WORKSPACE", "demo")
    with ExecDaemon("demo", str(place)) as daemon:
        yield daemon


@pytest.fixture
def where(daemon: ExecDaemon, place: Path) -> Where:
    return Where(daemon.name, daemon.socket, place, str(place), running_here)


class TestOnThisHost(ExecSuite):
    """Commands on this host, each under a supervisor."""


def test_every_method_has_a_handler() -> None:
    assert handlers_of(ExecMethods(Commands("m"))).keys() == {name for name in OPERATIONS if name.startswith("exec")}


def test_where_nothing_may_run_it_is_said_what_to_do(place: Path) -> None:
    with DaemonWithNowhere("demo", str(place)) as daemon:
        done = run(Where("demo", daemon.socket, place, "", running_here), "--", "touch", "made")
    assert done.returncode == 125
    assert b"--sandbox image:REF" in done.stderr
    assert b"--on-host" in done.stderr
    assert os.listdir(place) == []


def test_a_dead_daemon_is_an_error_of_vfsd(where: Where, daemon: ExecDaemon) -> None:
    daemon._end()
    done = run(where, "--", "true")
    assert done.returncode == 125
    assert b"is dead" in done.stderr


def test_another_user_is_for_containers(where: Where) -> None:
    done = run(where, "--user", "nobody", "--", "true")
    assert done.returncode == 125
    assert b"--user" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("--",),
        (),
        ("--env", "=x", "--", "true"),
        ("--env", "A=\udcff", "--", "true"),  # a byte that is not UTF-8
        ("--timeout", "0", "--", "true"),
        ("--json", "-t", "--", "true"),
    ],
)
def test_wrong_usage_is_status_2_and_runs_nothing(where: Where, args: tuple[str, ...]) -> None:
    assert run(where, *args).returncode == 2


def test_words_after_the_command_are_its_own(where: Where) -> None:
    assert run(where, "echo", "-i", "--cwd", "x", "--help").stdout == b"-i --cwd x --help\n"


def test_a_variable_without_a_value_is_the_callers(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "a b")
    done = run(where, "-e", "MINE", "-e", "NOT_SET_ANYWHERE", "--", "sh", "-c", 'echo "$MINE|${NOT_SET_ANYWHERE-no}"')
    assert done.stdout == b"a b|no\n"


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_standard_streams_that_are_closed_are_nothing_else(where: Where, closed: str) -> None:
    line = command_line(where, "-i", "--", "sh", "-c", "cat; echo said; exit 7")
    with subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *line],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as client:  # fmt: skip
        try:
            out, _ = client.communicate(timeout=WAIT_S)
        finally:
            client.kill()
    assert client.returncode == 7
    assert out == (b"" if "1>&-" in closed else b"said\n")


def test_a_command_outside_of_the_workspace_is_refused(where: Where) -> None:
    done = run(where, "--cwd", "/", "--", "true")
    assert done.returncode == 125
    assert b"not in the workspace" in done.stderr


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no room"), ValueError("no room")], ids=["OSError", "other"])
def test_a_snapshot_that_fails_is_named_and_the_command_has_its_exit_status(
    where: Where, daemon: ExecDaemon, error: Exception
) -> None:
    daemon.snapshots_fail_with = error
    done = run(where, "--json", "--", "sh", "-c", "exit 3")
    assert done.returncode == 3
    ended = json.loads(done.stdout)
    assert (ended["exit_status"], ended["snapshot"], ended["snapshot_error"]) == (3, None, "no room")
    assert b"the snapshot after it failed: no room" in run(where, "--", "true").stderr


def test_a_snapshot_follows_each_command_that_ran(where: Where, daemon: ExecDaemon) -> None:
    run(where, "--", "sh", "-c", "echo 'a  b'\nfalse")
    run(where, "--", "no-such-program")
    run(where, "--timeout", "0.5", "--", "sleep", "100")
    assert daemon.tags_taken == ["""sh -c 'echo '"'"'a b'"'"' false'""", "sleep 100"]


def test_who_did_not_start_a_command_cannot_reach_it_without_its_name(daemon: ExecDaemon) -> None:
    with ControlClient(daemon.socket) as client:
        with pytest.raises(ProcessLookupError):
            client.call("exec.input", ExecInputParams(session="1", data=b"x"))
        with pytest.raises(ControlError) as caught:
            client.call("exec.signal", ExecSignalParams(session="1", signal="NONSENSE"))
        assert caught.value.code == INVALID_PARAMS


def test_the_result_tells_what_the_exit_status_of_vfsd_cannot(daemon: ExecDaemon) -> None:
    with ControlClient(daemon.socket) as client:
        ended = client.call("exec", ExecParams(argv=["sh", "-c", "kill -9 $$"]))
        assert (ended.exit_status, ended.timed_out, ended.snapshot) == (-9, False, "exec-1")
        ended = client.call("exec", ExecParams(argv=["sleep", "100"], timeout_s=0.5))
        assert (ended.exit_status, ended.timed_out) == (-9, True)


def test_json_is_one_document_with_what_it_wrote(where: Where) -> None:
    done = run(where, "--json", "-i", "--", "sh", "-c", "cat; echo err >&2; exit 3", stdin="text é".encode())
    assert done.returncode == 3
    assert json.loads(done.stdout) == {
        "exit_status": 3,
        "stdout": "text é",
        "stderr": "err\n",
        "timed_out": False,
        "truncated": False,
        "snapshot": "exec-1",
        "snapshot_error": None,
    }
    assert done.stderr == b""
    cut = json.loads(run(where, "--json", "--output-limit", "3", "--", "printf", "12345").stdout)
    assert (cut["stdout"], cut["truncated"]) == ("123", True)
    missing = run(where, "--json", "--", "no-such-program")
    assert missing.returncode == 127
    assert json.loads(missing.stdout)["error"]["errno"] == "ENOENT"


@pytest.mark.parametrize(
    ("options", "outcome"), [((), "and the command was killed"), (("--json",), "but the command has run")]
)
def test_output_that_cannot_be_written_is_not_an_error_of_the_workspace(
    daemon: ExecDaemon, options: tuple[str, ...], outcome: str
) -> None:
    command = [sys.executable, "-m", "vfsd.cli.main", "exec", *options, "--", "sh", "-c", "echo hi; exec sleep 0.2"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 125
    assert f"cannot write to standard output: No space left on device, {outcome}" in done.stderr
