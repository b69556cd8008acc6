"""Mounts on a machine without fusermount3: root, also of a user namespace, calls mount(2) and umount(2)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.mount.programs import VFSD, succeeded, vfsd, wait_ended
from tests.support.rights import needs_root
from tests.support.waiting import wait_until
from vfsd.machine.mountinfo import mount_at
from vfsd.machine.runtime import read_record

pytestmark = [needs_root, pytest.mark.usefixtures("without_fusermount")]


@pytest.fixture
def without_fusermount(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "no-programs").mkdir()
    monkeypatch.setenv("PATH", str(workdir / "no-programs"))


def test_root_mounts_and_unmounts(workdir: Path) -> None:
    place = workdir / "mnt"
    place.mkdir()
    name = f"direct-{workdir.name}"
    succeeded(vfsd("mount", place, "--name", name))
    (place / "file").write_text("text")
    with open(place / "file"):
        busy = vfsd("unmount", name, "--discard")
        assert "busy: held by pid" in busy.stderr
        record = read_record(name)
        assert record is not None
        os.kill(record.pid, signal.SIGTERM)  # the daemon detaches its mount although it is busy
        wait_until(lambda: mount_at(str(place)) is None, "it is detached")


def test_root_clears_the_mount_of_a_dead_daemon(workdir: Path) -> None:
    place = workdir / "mnt"
    place.mkdir()
    name = f"dead-{workdir.name}"
    succeeded(vfsd("mount", place, "--name", name))
    record = read_record(name)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    wait_ended(record.pid)
    succeeded(vfsd("unmount", name))
    assert mount_at(str(place)) is None


def in_user_namespace(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script as root of a new user namespace."""
    unshare, sh = shutil.which("unshare", path=os.defpath), shutil.which("sh", path=os.defpath)
    assert unshare is not None
    assert sh is not None
    command = [unshare, "--user", "--map-root-user", *options, sh, "-ec", script, *VFSD]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_root_of_a_user_namespace_mounts_and_unmounts(workdir: Path) -> None:
    (workdir / "mnt").mkdir()
    script = f'cd {workdir}; v="$0 $*"; $v mount mnt --name inner; $v snapshot -w inner s; echo > mnt/file'
    done = in_user_namespace(f"{script}; $v diff -w inner; $v unmount inner --discard", "--mount")
    assert done.stdout.splitlines()[1:3] == ["s", "A file"], done.stderr
    assert done.returncode == 0, done.stderr


def test_a_user_is_told_what_to_install(workdir: Path) -> None:
    (workdir / "mnt").mkdir()
    done = in_user_namespace(f"$0 $* mount {workdir}/mnt")  # without mounts of its own
    assert done.returncode == 1
    assert "fusermount3, which mounts for users, is missing: install it (package fuse3)" in done.stderr
