"""A workspace end to end: mount, work, snapshot, restore, export, unmount."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import MountIt
from vfsd.client.workspace import Workspace


def test_restoring_a_snapshot_brings_content_names_and_times_back(workspace: Workspace, root: Path) -> None:
    (root / "kept").write_text("old")
    (root / "gone").mkdir()
    (root / "gone" / "file").write_text("x")
    before = os.stat(root / "kept")
    workspace.snapshot("one")
    (root / "kept").write_text("newer")
    (root / "gone" / "file").unlink()
    (root / "gone").rmdir()
    (root / "added").write_text("y")

    workspace.restore("one")

    assert (root / "kept").read_text() == "old"
    assert sorted(os.listdir(root)) == ["gone", "kept"]
    assert (root / "gone" / "file").read_text() == "x"
    after = os.stat(root / "kept")
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


def test_a_mountpoint_with_any_name_can_be_driven(mount: MountIt, workdir: Path) -> None:
    place = Path(os.fsdecode(bytes(workdir) + b"/odd \xff \\ name"))
    workspace = mount(place)
    assert os.path.samefile(workspace.status().mountpoint, place)
    workspace.snapshot("one")
    workspace.restore("one")


def test_a_program_that_uses_the_mount_for_a_moment_longer_does_not_keep_its_name(workdir: Path) -> None:
    place, name = workdir / "m", workdir.name
    stay = """
import os, sys, time
os.chdir(sys.argv[1])
print(flush=True)
while sys.argv[1] in open("/proc/self/mountinfo").read():
    time.sleep(0.01)
"""
    workspace = Workspace.mount(place, name=name)
    program = subprocess.Popen([sys.executable, "-c", stay, place], stdout=subprocess.PIPE)
    assert program.stdout is not None
    program.stdout.readline()
    with pytest.warns(ResourceWarning, match="was detached while in use"):
        workspace.__exit__(None, None, None)
    with program, Workspace.mount(place, name=name) as again:
        assert again.name == name
