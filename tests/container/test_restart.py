"""A container that stops keeps its mount: every request fails with EIO until the container is running again."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.backends.container.podman.service import Container
from protocol.backends.container.podman.spec import ContainerMount
from tests.container.conftest import MountContainer, StartContainer, control, inside
from tests.mount.conftest import complaints
from tests.support.waiting import wait_until
from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace

STOPPED = ["it has stopped"]
pytestmark = [pytest.mark.fuse, pytest.mark.workspaces(transport="rootfs", complaints=STOPPED)]


def answers(path: Path) -> bool:
    """Whether the mount answers otherwise than with EIO."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False
    return True


def is_served_again(workspace: Workspace, times: int = 1) -> Callable[[], bool]:
    """Whether the daemon has noticed that the container was started again, for the so manyth time."""
    log = Path(log_path(workspace.name))
    return lambda: log.read_text().count("is running again and served") >= times


@pytest.fixture
def container(start_container: StartContainer) -> Container:
    return start_container()


@pytest.mark.extended
@pytest.mark.both_engines
def test_a_stopped_container_is_eio_and_comes_back_when_it_is_started_again(
    container: Container, workspace: Workspace, root: Path
) -> None:
    (root / "d").mkdir()
    (root / "d" / "f").write_text("before")
    number = (root / "d" / "f").stat().st_ino

    container.kill()
    wait_until(lambda: not answers(root))

    for attempt in (
        lambda: os.listdir(root),
        (root / "d" / "f").read_text,
        lambda: (root / "new").write_text("x"),
        lambda: os.statvfs(root),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            attempt()
    status = workspace.status()
    assert (status.connected, status.transport) == (False, "rootfs")
    wait_until(lambda: workspace.status().container == "exited with status 137")
    assert len([line for line in complaints(workspace.name) if "it has stopped" in line]) == 1

    container.start()
    wait_until(is_served_again(workspace))

    assert (root / "d" / "f").read_text() == "before"
    assert (root / "d" / "f").stat().st_ino == number
    assert (workspace.status().connected, workspace.status().container) == (True, "running")
    (root / "d" / "f").write_text("after")
    assert inside(container, "cat /workspace/d/f") == b"after"


@pytest.mark.extended
@pytest.mark.both_engines
def test_what_changed_while_it_was_not_served_is_seen(
    start_container: StartContainer, mount_container: MountContainer, workdir: Path
) -> None:
    volume = workdir / "volume"
    volume.mkdir()
    container = start_container(mounts=[ContainerMount(str(volume), "/workspace")])
    workspace = mount_container(container, transport="rootfs", complaints=STOPPED)
    root = Path(workspace.path)
    (root / "kept").write_text("old")
    (root / "gone").write_text("old")
    assert not (root / "new").exists()
    container.kill()
    wait_until(lambda: not answers(root))

    (volume / "kept").write_text("changed")
    (volume / "gone").unlink()
    (volume / "new").mkdir()
    container.start()
    wait_until(is_served_again(workspace))

    # Each of these the kernel knew otherwise.
    assert (root / "kept").read_text() == "changed"
    assert sorted(os.listdir(root)) == ["kept", "new"]
    assert (root / "new").is_dir()


@pytest.mark.extended
@pytest.mark.both_engines
def test_files_and_directories_that_were_open_go_on_after_a_restart(
    container: Container, workspace: Workspace, root: Path
) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "f").write_text("0123456789")
    directory = os.open(root / "a" / "b", os.O_RDONLY | os.O_DIRECTORY)
    with (root / "a" / "b" / "f").open("r+b", buffering=0) as file:
        assert file.read(5) == b"01234"

        control(container, "restart", timeout=0)
        wait_until(is_served_again(workspace))

        assert file.read() == b"56789"
        file.write(b"!")
        assert os.stat("f", dir_fd=directory).st_size == 11
    os.close(directory)
    assert inside(container, "cat /workspace/a/b/f") == b"0123456789!"


@pytest.mark.extended
def test_an_open_file_that_is_not_there_any_more_is_stale_and_never_another(
    container: Container, workspace: Workspace, root: Path, start_container: StartContainer
) -> None:
    (root / "f").write_text("mine")
    (root / "other").mkdir()
    file = os.open(root / "f", os.O_RDWR)
    directory = os.open(root / "other", os.O_RDONLY | os.O_DIRECTORY)
    name = container.name
    container.remove()
    wait_until(lambda: not answers(root))
    assert workspace.status().container == "removed"

    command = ("/bin/sh", "-c", "mkdir -p /workspace/f; echo not yours > /workspace/other; exec sleep 86400")
    start_container(name=name, command=command)
    wait_until(is_served_again(workspace))
    wait_until((root / "other").is_file)  # the kernel knows the directory of that name for a moment longer

    for attempt in (lambda: os.pread(file, 10, 0), lambda: os.write(file, b"x"), lambda: os.listdir(directory)):
        with pytest.raises(OSError, match="Stale file handle"):
            attempt()
    assert (root / "f").is_dir()
    wait_until(lambda: (root / "other").read_text() == "not yours\n")  # made, then written
    os.close(file)
    os.close(directory)


@pytest.mark.extended
def test_a_paused_container_is_read_and_written_through_proc(
    container: Container, root: Path, workspace: Workspace
) -> None:
    (root / "f").write_text("x")
    control(container, "pause")

    (root / "f").write_text("written while it stands still")
    assert workspace.status().container == "paused"
    assert workspace.status().connected

    control(container, "unpause")
    assert inside(container, "cat /workspace/f") == b"written while it stands still"


def test_it_is_unmounted_while_its_container_is_stopped(container: Container, workspace: Workspace) -> None:
    control(container, "stop", timeout=0)
    wait_until(lambda: not answers(Path(workspace.path)))

    workspace.unmount()

    assert os.listdir(workspace.path) == []


@pytest.mark.extended
def test_a_daemon_ends_quickly_while_it_waits_for_its_container(container: Container, workspace: Workspace) -> None:
    container.remove()
    wait_until(lambda: not answers(Path(workspace.path)))
    pid = workspace.status().pid

    os.kill(pid, 15)

    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert subprocess.run(["mountpoint", "-q", workspace.path], check=False).returncode != 0


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["rootfs", "agent"])
def test_calls_about_a_stopped_container_say_how_to_start_it(
    start_container: StartContainer, mount_container: MountContainer, python_image: str, workdir: Path, transport: str
) -> None:
    container = start_container(image=python_image)
    workspace = mount_container(container, transport=transport, complaints=["until it is running again", "syncfs"])
    Path(workspace.path, "f").write_text("f")
    workspace.snapshot("s")
    container.kill()
    wait_until(lambda: not workspace.status().connected)

    def fs(*arguments: str) -> None:
        command = [sys.executable, "-m", "vfsd.cli.main", "fs", *arguments, "-w", workspace.name]
        done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)
        answer = json.loads(done.stdout)
        raise OSError(answer["error"])

    for attempt in (
        lambda: fs("ls"),
        lambda: fs("read", "f"),
        lambda: fs("write", "g"),
        lambda: workspace.snapshot("t"),
        workspace.diff,
        lambda: workspace.export(workdir / "export.zip"),
        lambda: workspace.restore("s"),
    ):
        with pytest.raises(
            OSError,
            match=f"the container is not running .*: podman --url {container.service.address} start {container.name}",
        ):
            attempt()
    with pytest.raises(FileNotFoundError, match="no such snapshot"):
        workspace.restore("nosuch")
    container.remove()
    with pytest.raises(OSError, match=f"the container {container.name} was removed"):
        workspace.snapshot("t")
