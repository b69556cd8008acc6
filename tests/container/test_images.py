"""`image:REF`: a container that is made for a workspace, and gone with it, however that ends or is interrupted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.backends.container.podman.ownership import WORKSPACE_LABEL, Lease, create_owned, orphans, remove_orphans
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.podman.spec import ContainerSpec
from protocol.backends.container.workspace import open_container, open_image
from tests.container.conftest import MountContainer, StartContainer, containers_of, inside, shown
from tests.container.held_service import HeldService
from tests.container.workspaces import left_by_a_killed_daemon
from tests.mount.programs import VFSD, log_of, succeeded, vfsd
from tests.support.waiting import wait_until
from vfsd.client.arguments import mount_options
from vfsd.client.connection import daemon_end
from vfsd.client.launch import launch
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse


def ours(podman: PodmanService, workspace: str) -> list[str]:
    """The ids of the containers made for a workspace."""
    return [container.id for container in containers_of(podman, workspace)]


@pytest.fixture
def killed(busybox_image: str, podman: PodmanService, workdir: Path) -> Iterator[str]:
    """The name of a workspace whose container, with the file `f`, is left by a killed daemon."""
    with left_by_a_killed_daemon(workdir / "killed", workdir.name, podman, busybox_image):
        yield workdir.name


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


@pytest.mark.extended
def test_the_command_removes_no_container_with_files_that_no_snapshot_has(
    mount_container: MountContainer, podman: PodmanService, busybox_image: str
) -> None:
    workspace = mount_container(
        None, backend=f"image:{busybox_image}", complaints=["it has stopped", "cannot be compared"]
    )
    (made,) = ours(podman, workspace.name)

    def refused(advice: str) -> str:
        ended = vfsd("unmount", workspace.name)
        assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
        assert f"`vfsd unmount {workspace.name} {advice}" in ended.stderr
        return ended.stderr

    Path(workspace.path, "f").write_text("x")
    assert "there is no snapshot of its files" in refused("--export FILE.zip`")
    workspace.snapshot("one")
    inside(podman.container(made), "rm /workspace/f; echo y > /workspace/g; echo z > /workspace/h")
    assert "differs from the snapshot one: 2 added, 1 removed" in refused("--export FILE.zip`")
    podman.container(made).kill()
    assert "cannot be compared with a snapshot now" in refused("--discard`")
    assert ours(podman, workspace.name) == [made]
    succeeded(vfsd("unmount", workspace.name, "--discard"))
    assert ours(podman, workspace.name) == []


def test_the_command_asks_nothing_if_a_snapshot_has_all_files(
    mount_container: MountContainer, podman: PodmanService, busybox_image: str
) -> None:
    workspace = mount_container(None, backend=f"image:{busybox_image}")
    Path(workspace.path, "f").write_text("x")
    workspace.snapshot("one")
    inside(podman.container(ours(podman, workspace.name)[0]), "echo y > /workspace/f")
    workspace.restore("one")  # the newest snapshot is that of the state before
    succeeded(vfsd("unmount", workspace.name))
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


@pytest.mark.extended
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_only_a_mount_of_the_same_name_continues_in_the_container_that_a_killed_daemon_left(
    killed: str, mount_container: MountContainer, podman: PodmanService, busybox_image: str, is_stopped: bool
) -> None:
    (left,) = ours(podman, killed)
    if is_stopped:
        podman.container(left).kill()
    backend = f"image:{busybox_image}"

    other = mount_container(None, backend=backend)
    assert [state.id for state in orphans(podman)] == ours(podman, killed) == [left]
    again = mount_container(None, backend=backend, name=killed)

    assert Path(again.path, "f").read_text() == "work"
    assert ours(podman, killed) == [left] != ours(podman, other.name)
    assert list(orphans(podman)) == []
    again.unmount()
    assert ours(podman, killed) == []


def test_a_start_that_fails_leaves_the_files_of_the_daemon_before(
    killed: str, mount_container: MountContainer, podman: PodmanService, busybox_image: str, workdir: Path
) -> None:
    left = ours(podman, killed)
    (workdir / "full" / "x").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        mount_container(None, backend=f"image:{busybox_image}", name=killed, place=workdir / "full")
    assert ours(podman, killed) == left


@pytest.mark.extended
def test_other_options_make_a_new_container_and_the_mount_says_where_the_files_are(
    killed: str, mount_container: MountContainer, podman: PodmanService, busybox_image: str, workdir: Path
) -> None:
    (left,) = ours(podman, killed)
    name = podman.inspect(left).name
    image = ["--backend", f"image:{busybox_image}", "--podman-url", podman.address.url, "--name", killed]

    (workdir / "m").mkdir()

    mounted = vfsd("mount", str(workdir / "m"), *image, "--pids-limit", "100")

    assert mounted.returncode == 0
    assert f"earlier files of {killed} are in {name}" in mounted.stderr
    assert os.listdir(workdir / "m") == []
    succeeded(vfsd("unmount", killed))
    assert ours(podman, killed) == [left]
    # While a workspace shows the files, no other one takes the container over and removes it at its end.
    shown = mount_container(None, backend=f"container:{name}")
    assert Path(shown.path, "f").read_text() == "work"
    succeeded(vfsd("mount", str(workdir / "m"), *image))
    assert os.listdir(workdir / "m") == []
    succeeded(vfsd("unmount", killed))
    assert Path(shown.path, "f").read_text() == "work"


@pytest.mark.extended
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


@pytest.mark.extended
@pytest.mark.parametrize("purpose", ["sandbox", "workspace"])
def test_an_owner_is_dead_if_nobody_has_its_lease(
    start_container: StartContainer, podman: PodmanService, purpose: str
) -> None:
    own = create_labels(podman)
    assert not {"vfsd.boot", "vfsd.daemon"} & own.keys()  # earlier versions remove what these say is of the dead
    boot, pid_namespace, network = own["vfsd.scope"].split(" ")
    is_initial = pid_namespace == "pid:[4026531836]"  # the same in every boot
    scopes = {
        "this boot": (True, f"{boot} pid:[1] {network}"),  # pids say nothing
        "another network namespace": (False, f"{boot} {pid_namespace} net:[1]"),
        "unknown": (False, ""),
        "an earlier boot": (is_initial and purpose == "workspace", f"another {pid_namespace} {network}"),
        "an earlier boot, stopped": (is_initial, f"another {pid_namespace} {network}"),
        "an earlier boot, in a container": (False, f"another pid:[1] {network}"),
    }
    found = {}
    for number, (name, (_, scope)) in enumerate(scopes.items()):
        container = f"{purpose}-{number}"
        labels = {**own, "vfsd.container": container, "vfsd.scope": scope, "vfsd.purpose": purpose}
        found[start_container(name=container, labels=labels).id] = name
        if name.endswith("stopped"):
            podman.container(next(reversed(found))).kill()
    expected = {name for name, (is_dead, _) in scopes.items() if is_dead}

    start_container(
        labels={**own, "vfsd.purpose": purpose}
    )  # of an image that was committed from a container of vfsd's
    held = Lease.claim(own["vfsd.lease"])
    assert held is not None
    assert [*orphans(podman, "workspace"), *orphans(podman, "sandbox")] == []
    held.close()
    assert {found[state.id] for state in orphans(podman) if state.id in found} == (
        expected if purpose == "workspace" else set()
    )
    removed = remove_orphans(podman)

    left = {found.get(state.id, "committed") for state in podman.labelled({"vfsd.lease": own["vfsd.lease"]})}
    left.remove("committed")
    assert left == set(scopes) - (expected if purpose == "sandbox" else set())
    assert len(removed) == len(scopes) - len(left)


OWNER_ELSEWHERE = """
import contextlib
import sys
from protocol.backends.container.podman.ownership import create_owned
from protocol.backends.container.podman.service import PodmanService
from protocol.backends.container.podman.spec import ContainerSpec
with contextlib.closing(PodmanService(sys.argv[1])) as service:
    owned = create_owned(service, ContainerSpec(sys.argv[2]), "elsewhere", "sandbox")
    owned.container.kill()
    print(owned.container.id, flush=True)
    sys.stdin.read()
    owned.close()
"""


@pytest.mark.extended
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
    owned = create_owned(podman, ContainerSpec("localhost/vfsd-test-busybox:latest"), "labels", "sandbox")
    try:
        assert remove_orphans(podman) == []  # this process lives
        return dict(owned.container.inspect().labels)
    finally:
        owned.close()


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

    with pytest.raises(OSError, match=f"exited with status 137.*podman --url {podman.address} start {container.name}"):
        mount_container(container)
    with pytest.raises(FileNotFoundError, match=f"podman --url {podman.address} ps -a"):
        open_container("nobody", podman_url=podman.address.url)


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
