"""kill -9 of the source or of the fork at each step of a fork: no mount, record, base or zombie is left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.killed_fork import FORK_STEPS, NO_DESCRIPTOR, SOURCE_STEPS, WAITING
from tests.support.processes import children
from tests.support.unmounting import unmount_when_idle
from tests.support.waiting import wait_until
from vfsd import Workspace
from vfsd.client.arguments import mount_options
from vfsd.client.launch import launch
from vfsd.machine.logs import log_path
from vfsd.machine.mountinfo import mount_at
from vfsd.machine.runtime import read_record

# Other workers run these tests, too, and a daemon has only the beginning of its name for all to see.
UNBORN, LATE = f"u{os.getpid()}", f"l{os.getpid()}"


@pytest.fixture
def source(workdir: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.setenv("VFSD_TEST_STEP", step)
    monkeypatch.setenv("VFSD_TEST_GO", str(workdir / "go"))
    (workdir / "source").mkdir()
    launch(mount_options(workdir / "source", name="source", engine="native"), daemon_module="tests.mount.killed_fork")
    workspace = Workspace.attach("source")
    (workdir / "source" / "file").write_text("source")
    yield workspace
    if os.path.exists(f"/proc/{workspace.pid}"):
        unmount_when_idle(workspace)
    else:
        command = [sys.executable, "-m", "vfsd.cli.main", "unmount", "source"]
        subprocess.run(command, check=True, capture_output=True)


def daemons(mountpoint: Path) -> list[str]:
    """The processes whose mount is, or would be, at `mountpoint`: they have the name of the workspace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                comm = Path(f"/proc/{name}/comm").read_text().strip()
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if comm == f"vfsd:{mountpoint.name}":
                found.append(f"{name} {state}")
    return found


def nothing_is_left(place: Path) -> bool:
    return mount_at(str(place)) is None and read_record(place.name) is None and not daemons(place)


@pytest.mark.extended
@pytest.mark.parametrize("step", SOURCE_STEPS)
def test_a_source_that_is_killed_leaves_no_fork(source: Workspace, workdir: Path) -> None:
    with pytest.raises(OSError, match=r"(?s)."):
        source.fork(workdir / UNBORN, name=UNBORN)
    wait_until(lambda: nothing_is_left(workdir / UNBORN), "the fork has ended and its mount is gone")


@pytest.mark.extended
@pytest.mark.parametrize("step", [*FORK_STEPS, NO_DESCRIPTOR])
def test_a_fork_that_is_killed_before_it_is_ready_leaves_nothing(source: Workspace, workdir: Path, step: str) -> None:
    for _ in range(2):
        with pytest.raises(
            OSError,
            match=rf"daemon died while starting: see .*{UNBORN}\.log" if step in FORK_STEPS else "lack of a descriptor",
        ) as raised:
            source.fork(workdir / UNBORN, name=UNBORN)
        assert raised.value.errno == (errno.EIO if step in FORK_STEPS else errno.EMFILE)
        wait_until(lambda: nothing_is_left(workdir / UNBORN), "the killed process is gone")
        assert not (workdir / UNBORN).exists()
        assert source.snapshots() == []
        wait_until(lambda: not children(source.pid), "the fork is no zombie")
    assert (workdir / "source" / "file").read_text() == "source"


@pytest.mark.parametrize("step", [WAITING])
def test_a_caller_that_is_killed_leaves_a_whole_fork_or_none(source: Workspace, workdir: Path) -> None:
    place = workdir / LATE
    command = [sys.executable, "-m", "vfsd.cli.main", "fork", "-w", "source", str(place), "--name", LATE]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as caller:
        wait_until((workdir / "go.waits").exists, "the fork is about to mount")
        caller.kill()
    (workdir / "go").touch()

    def is_reported() -> bool:  # until then the fork may still be undone
        return "mounted, served" in Path(log_path(LATE)).read_text()

    wait_until(lambda: is_reported() or nothing_is_left(place), "the fork has started, or ended")
    if not is_reported():
        wait_until(lambda: source.snapshots() == [], "the base is dropped")
        return
    fork = Workspace.attach(LATE)
    assert (place / "file").read_text() == "source"
    assert fork.status().base in {each.name for each in source.snapshots()}
    unmount_when_idle(fork)
    wait_until(lambda: source.snapshots() == [], "the base is dropped")
