"""Transactions on real mounts: files, open files, killed daemons, killed programs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import mounted
from vfsd.client.workspace import Workspace


class Stop(Exception):
    pass


@pytest.fixture
def place(shared_workspace: Workspace, request: pytest.FixtureRequest) -> Path:
    path = Path(shared_workspace.path, request.node.name.partition("[")[0])
    path.mkdir()
    return path


def transactions_of(workspace: Workspace) -> list[str]:
    return [each.name for each in workspace.snapshots(changes=False) if each.name.startswith("transaction-")]


def test_a_block_that_raises_leaves_the_mount_as_it_was(shared_workspace: Workspace, place: Path) -> None:
    (place / "kept").write_text("old")
    (place / "gone").mkdir()
    (place / "gone" / "file").write_text("x")

    with contextlib.suppress(Stop), shared_workspace.transaction(tag="tool-call-7") as t:
        (place / "kept").write_text("new")
        (place / "gone" / "file").unlink()
        (place / "gone").rmdir()
        subprocess.run(["cp", "-a", place / "kept", place / "added"], check=True)
        raise Stop

    assert (place / "kept").read_text() == "old"
    assert sorted(path.name for path in place.rglob("*")) == ["file", "gone", "kept"]
    assert t.undone is not None
    assert {change.path: change.change for change in t.undone.changes} == {
        f"{place.name}/added": "removed",
        f"{place.name}/gone": "added",
        f"{place.name}/gone/file": "added",
        f"{place.name}/kept": "modified",
    }
    assert transactions_of(shared_workspace) == []
    shared_workspace.undo()
    assert (place / "added").read_text() == "new"


def test_a_block_that_fails_in_a_read_only_workspace_has_nothing_to_undo(workdir: Path) -> None:
    with mounted(workdir / "m", name=workdir.name, read_only=True) as workspace:
        with pytest.raises(OSError, match="Read-only") as caught, workspace.transaction() as t:
            Path(workspace.path, "file").touch()
        assert (t.state, t.undone, transactions_of(workspace)) == ("restored", None, [])
        assert not hasattr(caught.value, "__notes__")


def test_a_killed_daemon_does_not_hide_the_exception(workdir: Path) -> None:
    workspace = Workspace.mount(workdir / "m", name=workdir.name)
    try:
        with pytest.raises(Stop) as caught, workspace.transaction("call 7"):
            kill_and_fail(workspace)
        assert "('call 7') may not be undone" in caught.value.__notes__[0]
    finally:
        subprocess.run(["umount", "-l", workspace.path], check=False)


def kill_and_fail(workspace: Workspace) -> None:
    """Kill the daemon, and raise Stop when the mount fails."""
    os.kill(workspace.pid, signal.SIGKILL)
    try:
        while True:
            Path(workspace.path, "file").write_text("x")
    except OSError:
        raise Stop from None


def test_ctrl_c_undoes_the_block_and_kill_9_leaves_its_snapshot(shared_workspace: Workspace, place: Path) -> None:
    code = """
import sys, time
from vfsd import Workspace
with Workspace.attach(sys.argv[1]).transaction("of a program") as t:
    open(sys.argv[2], "w").write("x")
    print(t.snapshot, flush=True)
    time.sleep(60)
"""
    for number in (signal.SIGINT, signal.SIGKILL):
        command = [sys.executable, "-c", code, shared_workspace.name, place / "file"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
            assert program.stdout is not None
            snapshot = program.stdout.readline().strip()
            assert (place / "file").read_text() == "x"
            program.send_signal(number)
            program.wait(60)
        assert (place / "file").exists() == (number == signal.SIGKILL)

    (left,) = (each for each in shared_workspace.snapshots(changes=False) if each.name == snapshot)
    assert left.tag == "of a program"
    shared_workspace.restore(snapshot)
    assert not (place / "file").exists()
    shared_workspace.drop(snapshot)
