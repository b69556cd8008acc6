"""`image:REF`: a container that is made for a workspace, and gone with it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.backends.container.podman.ownership import WORKSPACE_LABEL, create_owned, remove_orphans
from protocol.backends.container.podman.service import PodmanService
from protocol.backends.container.podman.spec import ContainerSpec
from protocol.backends.container.workspace import open_container, open_image
from tests.container.conftest import MountContainer, StartContainer, inside, shown
from tests.mount.conftest import socket_of
from vfsd.client.daemon_exit import daemon_end
from vfsd.client.workspace import Workspace
from vfsd.machine.mounts import clear_dead_mount

pytestmark = pytest.mark.fuse


def ours(podman: PodmanService, workspace: str) -> list[str]:
    """The ids of the containers made for a workspace."""
    return [state.id for state in podman.labelled({WORKSPACE_LABEL: workspace})]


@pytest.fixture
def killed(busybox_image: str, podman: PodmanService, workdir: Path) -> Iterator[str]:
    """The name of a workspace whose daemon was killed, and whose mount is cleared away; its container is left."""
    place = workdir / "killed"
    workspace = Workspace.mount(place, f"image:{busybox_image}", podman_url=podman.address.url, name=workdir.name)
    pid = workspace.status().pid
    with daemon_end(pid) as wait_ended:
        os.kill(pid, signal.SIGKILL)
        wait_ended()
    clear_dead_mount(str(place))
    yield workdir.name
    os.unlink(socket_of(workspace))
    os.unlink(socket_of(workspace).removesuffix(".sock") + ".json")


def test_a_workspace_of_an_image_has_a_container_of_its_own_until_it_is_unmounted(
    mount_container: MountContainer, podman: PodmanService, busybox_image: str
) -> None:
    workspace = mount_container(None, backend=f"image:{busybox_image}")
    (made,) = ours(podman, workspace.name)
    state = podman.inspect(made)
    Path(workspace.path, "f").write_text("x")

    whole = shown(podman.container(made))
    assert (whole["HostConfig"]["NetworkMode"], whole["ImageName"]) == ("none", busybox_image)
    assert whole["HostConfig"]["PidsLimit"] > 0
    assert workspace.status().container == "running"
    assert state.name.startswith(f"vfsd-{workspace.name}-")
    assert inside(podman.container(made), "cat /workspace/f") == b"x"
    workspace.unmount()
    assert ours(podman, workspace.name) == []


def test_a_signal_ends_the_container_too(
    mount_container: MountContainer, podman: PodmanService, busybox_image: str
) -> None:
    workspace = mount_container(None, backend=f"image:{busybox_image}")
    pid = workspace.status().pid

    with daemon_end(pid) as wait_ended:
        os.kill(pid, signal.SIGTERM)
        wait_ended()

    assert ours(podman, workspace.name) == []


def test_what_a_killed_daemon_left_goes_with_the_next_start_and_nothing_else_does(
    killed: str,
    mount_container: MountContainer,
    start_container: StartContainer,
    podman: PodmanService,
    busybox_image: str,
) -> None:
    users_own = start_container()
    assert len(ours(podman, killed)) == 1

    first = mount_container(None, backend=f"image:{busybox_image}")
    assert ours(podman, killed) == []
    second = mount_container(None, backend=f"image:{busybox_image}")

    assert len(ours(podman, first.name)) == len(ours(podman, second.name)) == 1
    assert users_own.inspect().running


def test_a_container_of_another_machine_or_of_a_living_daemon_is_left_alone(
    start_container: StartContainer, podman: PodmanService
) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + ":" + os.readlink("/proc/self/ns/pid")
    machine = create_labels(podman)["vfsd.machine"]
    dead = f"{2**22 + 1}:1"  # no process has such a number: kernel/pid_max
    labels = {WORKSPACE_LABEL: "w", "vfsd.machine": machine, "vfsd.boot": boot, "vfsd.daemon": dead}
    elsewhere = start_container(labels={**labels, "vfsd.machine": "another:0"})
    namespace = os.readlink("/proc/self/ns/pid")
    other_boot = start_container(labels={**labels, "vfsd.boot": f"another:{namespace}"})
    stopped = start_container(labels={**labels, "vfsd.boot": f"another:{namespace}"})
    stopped.kill()
    orphan = start_container(labels=labels)
    foreign = {
        "another namespace": boot.partition(":")[0] + ":pid:[1]",
        "another boot and namespace": "another:pid:[1]",
        "an owner that could not tell its namespace": boot.partition(":")[0] + ":",
    }
    unknown = [start_container(labels={**labels, "vfsd.boot": label}) for label in foreign.values()]
    for container in unknown:
        container.kill()

    removed = remove_orphans(podman)

    left = {state.id for state in podman.labelled({WORKSPACE_LABEL: "w"})}
    assert left - {stopped.id} == {elsewhere.id, other_boot.id, *(container.id for container in unknown)}
    assert orphan.id not in left
    # Only the initial namespace has the same number in every boot.
    assert (stopped.id in left) == (namespace != "pid:[4026531836]")
    assert removed == ["w"] * (1 + (stopped.id not in left))


OWNER_ELSEWHERE = """
import contextlib
import sys
from protocol.backends.container.podman.ownership import create_owned
from protocol.backends.container.podman.service import PodmanService
from protocol.backends.container.podman.spec import ContainerSpec
with contextlib.closing(PodmanService(sys.argv[1])) as service:
    container = create_owned(service, ContainerSpec(sys.argv[2]), "elsewhere")
    container.kill()
    print(container.id, flush=True)
    sys.stdin.read()
    container.remove()
"""


@pytest.mark.parametrize("options", [["--mount-proc"], []], ids=["own proc", "proc of the parent namespace"])
def test_the_container_of_a_daemon_in_another_pid_namespace_is_left_alone(
    podman: PodmanService, busybox_image: str, options: list[str]
) -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", *options, sys.executable, "-c", OWNER_ELSEWHERE]
    owner = subprocess.Popen(
        [*command, podman.address.url, busybox_image], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        made = owner.stdout.readline().strip()

        assert remove_orphans(podman) == []

        assert not podman.inspect(made).running
    assert podman.labelled({WORKSPACE_LABEL: ""}) == []


def create_labels(podman: PodmanService) -> dict[str, str]:
    """The labels of a container of this process's."""
    container = create_owned(podman, ContainerSpec("localhost/vfsd-test-busybox:latest"), "labels")
    try:
        assert remove_orphans(podman) == []  # this process lives
        return dict(container.inspect().labels)
    finally:
        container.remove()


def test_a_start_that_fails_leaves_no_container(
    mount_container: MountContainer, podman: PodmanService, busybox_image: str, workdir: Path
) -> None:
    # The image has no Python, which a search for one would complain about.
    for options in ({"workdir": "/etc/passwd"}, {"network": "no-such-network"}):
        with pytest.raises(OSError, match=r"(?i)not a directory|no-such-network"):
            open_image(busybox_image, "w", podman_url=podman.address.url, **options)
    (workdir / "full" / "x").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        mount_container(None, backend=f"image:{busybox_image}", place=workdir / "full")

    assert podman.labelled({WORKSPACE_LABEL: ""}) == []


def test_an_image_without_a_shell_is_an_error_that_says_what_it_lacks(podman: PodmanService, workdir: Path) -> None:
    with tarfile.open(workdir / "empty.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("file"))
    command = ["podman", "--url", podman.address.url, "import", workdir / "empty.tar", "localhost/empty:1"]
    subprocess.run(command, check=True, capture_output=True)

    with pytest.raises(OSError, match="lacks /bin/sh"):
        open_image("localhost/empty:1", "w", podman_url=podman.address.url)

    assert podman.labelled({WORKSPACE_LABEL: ""}) == []


def test_a_container_that_does_not_run_is_an_error_that_says_how_to_start_it(
    mount_container: MountContainer, start_container: StartContainer, podman: PodmanService
) -> None:
    container = start_container()
    container.kill()

    with pytest.raises(OSError, match=f"exited with status 137.*podman start {container.name}"):
        mount_container(container)
    with pytest.raises(FileNotFoundError, match="podman ps -a"):
        open_container("nobody", podman_url=podman.address.url)
