"""`image:REF`: an interrupted start leaves no container of its own, and an unmount says what it cannot remove."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.backends.container.podman.ownership import orphans
from protocol.backends.container.podman.service import Container, PodmanService
from tests.container.conftest import MountContainer, containers_of, inside
from tests.container.held_service import HeldService
from tests.container.workspaces import left_by_a_killed_daemon
from tests.mount.programs import VFSD, log_of, succeeded, vfsd
from tests.support.waiting import wait_until
from vfsd.client.arguments import mount_options
from vfsd.client.launch import launch
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse

CREATED = "POST .*/containers/create"
STARTED = "POST .*/containers/.*/start"


class Mounting:
    """`vfsd mount` of an image as the workspace `name`, to be interrupted before the mount answers."""

    def __init__(self, workdir: Path, name: str, image: str, url: str) -> None:
        place = workdir / "interrupted"
        place.mkdir()
        arguments = [place, "--name", name, "--backend", f"image:{image}", "--podman-url", url]
        self._name = name
        self._command = subprocess.Popen(
            [*VFSD, "mount", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def interrupt(self) -> None:
        """Send Ctrl-C, and return when the daemon undoes its start."""
        self._command.send_signal(signal.SIGINT)
        wait_until(lambda: "the start is undone" in log_of(self._name), "the daemon's notice of the interruption")

    def check_interrupted(self, timeout_s: float = 120) -> None:
        out, error = self._command.communicate(timeout=timeout_s)
        assert (self._command.returncode, out) == (130, ""), error
        assert "interrupted" in error


def interrupt_start(workdir: Path, name: str, image: str, service: HeldService) -> None:
    """Start `vfsd mount`, and interrupt it while the answer to a request of the daemon is held."""
    with service.running():
        mounting = Mounting(workdir, name, image, service.url)
        service.wait_held()
        mounting.interrupt()
        service.release()
        mounting.check_interrupted()


@pytest.mark.extended
@pytest.mark.parametrize("request_line", [CREATED, STARTED, "GET .*/containers/[0-9a-f]{64}/json"])
def test_an_interrupted_mount_leaves_no_container(
    podman: PodmanService, busybox_image: str, workdir: Path, request_line: str
) -> None:
    service = HeldService(workdir / "held.sock", podman.address.path, request_line)
    interrupt_start(workdir, workdir.name, busybox_image, service)
    wait_until(lambda: containers_of(podman, workdir.name) == [], "the removal of the container")


def test_a_mount_that_pulls_an_image_is_interrupted_at_once(podman: PodmanService, workdir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as registry:  # which never answers
        image = f"127.0.0.1:{registry.getsockname()[1]}/image:1"
        mounting = Mounting(workdir, workdir.name, image, podman.address.url)
        with registry.accept()[0]:
            mounting.interrupt()
            mounting.check_interrupted(timeout_s=50)  # less than it waits for the removal of a container
    assert containers_of(podman, workdir.name) == []


@pytest.fixture
def left(busybox_image: str, podman: PodmanService, workdir: Path) -> Iterator[Container]:
    """The container of the workspace `workdir.name`, with the file `f`, which a killed daemon left; it is stopped."""
    with left_by_a_killed_daemon(workdir / "left", workdir.name, podman, busybox_image) as container:
        container.kill()
        yield container


@pytest.mark.extended
def test_an_interrupted_mount_leaves_the_container_that_it_was_to_continue_in(
    left: Container, podman: PodmanService, busybox_image: str, workdir: Path
) -> None:
    service = HeldService(workdir / "held.sock", podman.address.path, STARTED)
    interrupt_start(workdir, workdir.name, busybox_image, service)
    check_left(left, podman, workdir.name)


def test_a_signal_before_the_mount_is_reported_leaves_that_container_too(
    left: Container, podman: PodmanService, busybox_image: str, workdir: Path
) -> None:
    (workdir / "m").mkdir()
    options = mount_options(workdir / "m", f"image:{busybox_image}", name=workdir.name, podman_url=podman.address.url)
    with pytest.raises(OSError, match="died while starting"):
        launch(options, daemon_module="tests.container.signalled_daemon")
    check_left(left, podman, workdir.name)


def check_left(left: Container, podman: PodmanService, workspace: str) -> None:
    wait_until(lambda: [state.id for state in orphans(podman)] == [left.id], "the end of the daemon")
    assert containers_of(podman, workspace) == [left]
    left.start()
    assert inside(left, "cat /workspace/f") == b"work"


@pytest.mark.extended
def test_an_unmount_that_cannot_remove_the_container_says_what_stays(
    mount_container: MountContainer, podman: PodmanService, busybox_image: str, workdir: Path
) -> None:
    address = workdir / "podman.sock"
    address.symlink_to(podman.address.path)
    options = {"backend": f"image:{busybox_image}", "podman_url": f"unix://{address}", "name": workdir.name}
    first = mount_container(None, **options, complaints=["was not removed"])
    Path(first.path, "f").write_text("x")
    (container,) = containers_of(podman, first.name)
    remove = f"podman --url unix://{address} rm --force --volumes {container.name}"
    address.unlink()

    done = vfsd("unmount", first.name, "--discard")

    assert succeeded(done) == f"unmounted {first.name} from {first.path}\n"
    assert f"the container {container.name} was not removed (no Podman service is there" in done.stderr
    assert f"`{remove}` removes it" in done.stderr
    address.symlink_to(podman.address.path)
    # `vfsd doctor` lists these.  The keeper has the lease until it ends, shortly after the daemon.
    wait_until(lambda: [state.name for state in orphans(podman)] == [container.name], "the end of the keeper")

    again = mount_container(None, **options, complaints=["was not removed"])
    assert "continues in the container" in log_of(again.name)
    assert Path(again.path, "f").read_text() == "x"
    address.unlink()
    (document,) = json.loads(succeeded(vfsd("unmount", again.name, "--discard", "--json")))["unmounted"]
    assert remove in document["left"]
    address.symlink_to(podman.address.path)

    container.remove()


def test_the_end_of_a_with_block_warns_of_a_container_that_was_not_removed(
    podman: PodmanService, busybox_image: str, workdir: Path
) -> None:
    address = workdir / "podman.sock"
    address.symlink_to(podman.address.path)
    options = {"podman_url": f"unix://{address}", "name": workdir.name}
    workspace = Workspace.mount(workdir / "m", f"image:{busybox_image}", **options)
    (container,) = containers_of(podman, workdir.name)
    with pytest.warns(ResourceWarning, match=f"podman --url unix://{address} rm --force"), workspace:
        address.unlink()
    container.remove()


def test_an_unmount_ends_the_commands_before_it_removes_the_container(
    mount_container: MountContainer, podman: PodmanService, busybox_image: str
) -> None:
    workspace = mount_container(None, backend=f"image:{busybox_image}")
    command = subprocess.Popen(
        [*VFSD, "exec", "-w", workspace.name, "--", "sh", "-c", "echo begun; sleep 100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with command:
        assert command.stdout is not None
        assert command.stdout.readline() == "begun\n"
        succeeded(vfsd("unmount", workspace.name, "--discard"))
        _, error = command.communicate(timeout=60)
    assert command.returncode == 125, error  # no exit status of a command
    assert containers_of(podman, workspace.name) == []
