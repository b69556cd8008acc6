"""--podman-url ssh://: a real ssh, to a real sshd on this machine, leads to the Podman service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from protocol.backends.container.podman.service import PodmanService
from tests.container.conftest import MountContainer, StartContainer, inside
from tests.container.sshd import NoSshdError, Sshd, running_sshd
from tests.container.test_exec import where_of
from tests.support.exec_suite import run


@pytest.fixture(scope="module")
def server(session_dir: str, no_leaks_of_the_session: None) -> Iterator[Sshd]:
    try:
        with running_sshd(Path(session_dir, "sshd")) as server:
            yield server
    except NoSshdError as error:
        pytest.skip(f"no sshd can be run here: {error}")


@pytest.fixture
def sshd(server: Sshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """The module's sshd, with `ssh` in PATH; a test may change the known hosts."""
    known_hosts = server.known_hosts.read_text()
    monkeypatch.setenv("PATH", f"{server.programs}:{os.environ['PATH']}")
    yield server
    server.known_hosts.write_text(known_hosts)


@pytest.mark.extended
@pytest.mark.fuse
def test_a_workspace_and_its_commands_reach_the_container_through_ssh(
    mount_container: MountContainer,
    start_container: StartContainer,
    python_image: str,
    podman: PodmanService,
    sshd: Sshd,
) -> None:
    container = start_container(python_image)
    workspace = mount_container(container, podman_url=f"ssh://{sshd.host}{podman.address.path}")
    file = Path(workspace.path, "f")

    file.write_text("from here")

    assert inside(container, "cat /workspace/f") == b"from here"
    assert (workspace.status().transport, workspace.status().container) == ("agent", "running")
    workspace.snapshot("one")
    inside(container, "echo inside > /workspace/f; rm -f /workspace/g")
    workspace.restore("one")
    assert inside(container, "cat /workspace/f") == b"from here"
    done = run(where_of(workspace, container), "--", "sh", "-c", "cat f; exit 3")
    assert (done.returncode, done.stdout) == (3, b"from here")
    done = run(where_of(workspace, container), "-i", "--", "cat", stdin=b"through two pipes")
    assert (done.returncode, done.stdout) == (0, b"through two pipes")


@pytest.mark.extended
@pytest.mark.fuse
def test_a_workspace_of_an_image_of_another_machine_removes_its_container(
    mount_container: MountContainer, python_image: str, podman: PodmanService, sshd: Sshd
) -> None:
    workspace = mount_container(
        None, backend=f"image:{python_image}", podman_url=f"ssh://{sshd.host}{podman.address.path}"
    )
    (made,) = podman.labelled({"vfsd.workspace": workspace.name})
    Path(workspace.path, "f").write_text("x")
    assert inside(podman.container(made.id), "cat /workspace/f") == b"x"

    workspace.unmount()

    assert podman.labelled({"vfsd.workspace": workspace.name}) == []


@pytest.mark.extended
def test_errors_on_the_way_are_those_of_ssh(podman: PodmanService, sshd: Sshd) -> None:
    with (
        closing(PodmanService(f"ssh://{sshd.host}/nowhere/podman.sock")) as nowhere,
        pytest.raises(OSError, match="no Podman service answers at /nowhere") as caught,
    ):
        nowhere.inspect("x")
    assert caught.value.filename == nowhere.address.url
    sshd.known_hosts.write_text("")
    with (
        closing(PodmanService(f"ssh://{sshd.host}{podman.address.path}")) as unknown,
        pytest.raises(ConnectionRefusedError, match="Host key verification failed"),
    ):
        unknown.inspect("x")
