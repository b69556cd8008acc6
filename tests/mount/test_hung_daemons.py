"""The mount tests' own watch: a daemon that hangs at the end of a test fails that test, soon and with its stacks."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.hung_daemons import end_watch
from tests.support.rights import needs_root
from vfsd.client.workspace import Workspace


def end_stopped(workspace: Workspace) -> None:
    """Unmount a workspace whose daemon is stopped, as a fixture ends one."""
    with end_watch(patience_s=0.5, stacks_s=0.1) as end_begins:
        os.kill(workspace.pid, signal.SIGSTOP)
        end_begins(workspace)
        with pytest.raises(ConnectionError):
            workspace.unmount()


@needs_root
def test_a_daemon_that_hangs_at_the_end_of_a_test_fails_it_and_is_killed(
    workdir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.mount(workdir / "m", name=workdir.name)
    with pytest.raises(AssertionError, match=f"hung at their end, and were killed: {workdir.name}"):
        end_stopped(workspace)
    subprocess.run(["fusermount3", "-u", "-z", workdir / "m"], check=True)
    said = capfd.readouterr().err
    assert f"the daemon of {workdir.name} hangs, and is killed" in said
    assert f"\n{workspace.pid}: " in said  # the kernel's stack of its main thread
    assert "its log:" in said


def test_a_daemon_that_ends_in_time_is_left_alone(workdir: Path) -> None:
    with end_watch(patience_s=600) as end_begins, Workspace.mount(workdir / "m", name=workdir.name) as workspace:
        end_begins(workspace)
