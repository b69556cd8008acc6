"""Ctrl-C during work on a real mount: what the command says of the state is true, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import MountIt
from tests.support.waiting import wait_until
from tests.support.zygote import starting_interpreters

_FILES = 300


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vfsd.cli.main", *words]
    with starting_interpreters():
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["memory", "host"])
@pytest.mark.parametrize("delay_s", [0.5])  # before, while or after the daemon works: each is right
def test_what_a_restore_says_after_control_c_is_true(
    mount: MountIt, workdir: Path, backend: str, delay_s: float
) -> None:
    workspace = mount(backend=backend)
    root = Path(workspace.path)
    for number in range(_FILES):
        (root / f"{number}").write_text("old")
    workspace.snapshot("old")
    for number in range(_FILES):
        (root / f"{number}").write_text("new")
    with started("restore", "old", "-w", workspace.name) as command:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(delay_s)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=60)
    found = {(root / f"{number}").read_text() for number in range(_FILES)}
    if "restored old" in out:
        assert found == {"old"}
        assert command.returncode in {0, 130}, (out, err)
    else:
        # A signal between the answer of the daemon and the output ends the command without a word about the restore.
        assert found == {"new"} or (found == {"old"} and "nothing was changed" not in err)
        is_vfsd_running = "Fatal Python error: init_import_site" not in err  # else the interpreter was still starting
        assert not is_vfsd_running or command.returncode in {130, -signal.SIGINT}, err
    assert workspace.restore("old").counts.total in {0, _FILES}


def test_an_export_whose_command_is_killed_leaves_no_file(mount: MountIt, workdir: Path) -> None:
    workspace = mount()
    with open(os.path.join(workspace.path, "large"), "wb") as file:
        file.writelines(os.urandom(1 << 20) for _ in range(32))
    target = workdir / "out"
    target.mkdir()
    with started("export", str(target / "x.zip"), "-w", workspace.name) as command:
        wait_until(lambda: bool(os.listdir(target)))
        command.kill()
    wait_until(lambda: os.listdir(target) in ([], ["x.zip"]))
    workspace.status()
