"""A real Podman for the tests: a service of this worker's own, with its own storage, images made here.

Nothing of the user's own Podman is touched, and workers do not meet: root, runroot, locks and socket lie in the
session's directory, and go with it.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from podman import PodmanClient

from protocol.backends.container.podman.ownership import WORKSPACE_LABEL
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.podman.spec import ContainerSpec
from tests.container.service import NoPodmanError, running_service, write_busybox_image, write_python_image
from tests.mount.conftest import ENGINES, check_invariants, complaints, socket_of
from tests.support.rights import need_root
from tests.support.unmounting import unmount_when_idle
from vfsd.client.workspace import Workspace

BUSYBOX = "localhost/vfsd-test-busybox:latest"
PYTHON = "localhost/vfsd-test-python:latest"
# Options of `PodmanService.create` for a container whose users are others to the host: 0 is 200000 there.
MAPPED = {
    "userns_mode": "private",
    "idmappings": {
        "HostUIDMapping": False,
        "HostGIDMapping": False,
        "UIDMap": [{"container_id": 0, "host_id": 200000, "size": 65536}],
        "GIDMap": [{"container_id": 0, "host_id": 300000, "size": 65536}],
    },
}

StartContainer = Callable[..., Container]


def containers_of(podman: PodmanService, workspace: str) -> list[Container]:
    """The containers that vfsd made for a workspace."""
    return [Container(podman, state.id, state.name) for state in podman.labelled({WORKSPACE_LABEL: workspace})]


def tmpfs(place: str, **options: int) -> dict[str, Any]:
    """Options of `PodmanService.create` for a tmpfs in the container."""
    return {"mounts": [{"type": "tmpfs", "target": place, **options}]}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.container)


@pytest.fixture(scope="session")
def podman_url(session_dir: str, no_leaks_of_the_session: None) -> Iterator[str]:
    """The URL of a Podman service of this worker's own."""
    need_root()
    with ExitStack() as stack:
        try:
            url = stack.enter_context(running_service(Path(session_dir, "podman")))
        except NoPodmanError as error:
            pytest.skip(f"no Podman service can be run here: {error}")
        yield url
        with PodmanClient(base_url=url) as client:
            left = [str(one.name) for one in client.containers.list(all=True)]
            for name in left:
                client.containers.get(name).remove(v=True, force=True)
        assert left == [], "containers left behind (and now removed)"


@pytest.fixture(scope="session")
def podman(podman_url: str) -> Iterator[PodmanService]:
    with closing(PodmanService(podman_url)) as service:
        yield service


def import_image(url: str, archive: Path, reference: str) -> str:
    subprocess.run(["podman", "--url", url, "import", archive, reference], check=True, capture_output=True)
    return reference


@pytest.fixture(scope="session")
def busybox_image(podman_url: str, session_dir: str) -> str:
    """An image with a shell and its tools, no Python; users root and dev (1000)."""
    archive = Path(session_dir, "busybox.tar")
    write_busybox_image(archive)
    import_image(podman_url, archive, BUSYBOX)
    archive.unlink()
    return BUSYBOX


@pytest.fixture(scope="session")
def python_archive(session_dir: str) -> Path:
    """The archive of `python_image`, written once for the Podman of root and that of a plain user."""
    archive = Path(session_dir, "python.tar")
    write_python_image(archive)
    return archive


@pytest.fixture(scope="session")
def python_image(podman_url: str, python_archive: Path) -> str:
    """As busybox_image, and with /usr/bin/python3."""
    return import_image(podman_url, python_archive, PYTHON)


_numbers = itertools.count(1)


@pytest.fixture
def start_container(podman: PodmanService, busybox_image: str, no_leaks: None) -> Iterator[StartContainer]:
    """Starts containers that end with the test: `start_container(image=busybox, **the rest of ContainerSpec)`."""
    made: list[Container] = []

    def start(image: str = busybox_image, **options: Any) -> Container:
        options.setdefault("name", f"t{next(_numbers)}")
        container = podman.create(ContainerSpec(image, **options))
        made.append(container)
        container.start()
        return container

    yield start
    for container in made:
        container.remove()


MountContainer = Callable[..., Workspace]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What a container does is the same on both engines: pyfuse3 has those tests that are marked `both_engines`."""
    if "engine" in metafunc.fixturenames:
        both = metafunc.definition.get_closest_marker("both_engines")
        metafunc.parametrize("engine", ENGINES if both else ["native"])


@pytest.fixture
def mount_container(
    engine: str, workdir: Path, podman: PodmanService, start_container: StartContainer
) -> Iterator[MountContainer]:
    """Mounts a container's directory: `mount_container(container, **Workspace.mount's)`; what `complaints` of its log
    are expected is said by the test: `complaints=["it has stopped"]`."""
    with ExitStack() as stack:

        def mount(container: Container | None, *, complaints: Sequence[str] = (), **options: Any) -> Workspace:
            if container is not None:
                options.setdefault("backend", f"container:{container.name}")
            number = next(_numbers)
            place = options.pop("place", workdir / f"m{number}")
            options = {
                "engine": engine,
                "name": f"{workdir.name}-{number}",
                "podman_url": podman.address.url,
                **options,
            }
            return stack.enter_context(_mounted(place, complaints, **options))

        yield mount


@pytest.fixture
def container(start_container: StartContainer, python_image: str) -> Container:
    return start_container(python_image)


@pytest.fixture
def workspace(mount_container: MountContainer, container: Container, request: pytest.FixtureRequest) -> Workspace:
    """The directory of `container`, with the options of the marker `workspaces`."""
    marker = request.node.get_closest_marker("workspaces")
    return mount_container(container, **marker.kwargs)


@contextmanager
def running_container(podman: PodmanService, image: str, **options: Any) -> Iterator[Container]:
    """A container for the tests of a module."""
    container = podman.create(ContainerSpec(image, **options))
    try:
        container.start()
        yield container
    finally:
        container.remove()


@contextmanager
def _mounted(place: Path, expected: Sequence[str], **options: Any) -> Iterator[Workspace]:
    with Workspace.mount(place, **options) as workspace:
        yield workspace
        if os.path.exists(socket_of(workspace)):  # else the test has unmounted it
            check_invariants(workspace)
            unmount_when_idle(workspace)
    unexpected = [line for line in complaints(workspace.name) if not any(part in line for part in expected)]
    assert unexpected == []


def attempt(container: Container, *argv: str, **options: Any) -> tuple[int, bytes, bytes]:
    """Run a command inside: its exit status, standard output and standard error."""
    with PodmanClient(base_url=container.service.address.url) as client:
        status, (out, error) = client.containers.get(container.id).exec_run(list(argv), demux=True, **options)
    return int(status), out or b"", error or b""


def control(container: Container, verb: str, **options: Any) -> None:
    """Stop, restart, pause or unpause a container by podman-py's method of that name."""
    container.service.call(f"{verb} {container.name}", container.id, lambda one: getattr(one, verb)(**options))


def shown(container: Container) -> dict[str, Any]:
    """The whole of what `podman inspect` shows of a container."""
    return dict(container.service.call("inspecting", container.id, lambda one: one.attrs))


def inside(container: Container, *argv: str, **options: Any) -> bytes:
    """What a command that succeeds inside says; one word is a line for /bin/sh."""
    command = ("/bin/sh", "-c", argv[0]) if len(argv) == 1 else argv
    status, out, error = attempt(container, *command, **options)
    assert status == 0, (argv, status, out, error)
    return out


def git(*args: str) -> str:
    return subprocess.run(["git", *args], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


def check_git_works(root: Path, workdir: Path, container: Container) -> None:
    """git clones into the mount `root` of /workspace and commits there, and the container sees the result."""
    origin = workdir / "origin"
    git("init", "-q", "-b", "main", str(origin))
    for number in range(30):
        (origin / f"f{number}").write_text("line\n" * number)
    git("-C", str(origin), "add", ".")
    git("-C", str(origin), "commit", "-q", "-m", "first")

    git("clone", "-q", str(origin), str(root / "clone"))
    (root / "clone" / "f1").write_text("changed\n")
    git("-C", str(root / "clone"), "commit", "-q", "-a", "-m", "second")

    assert git("-C", str(root / "clone"), "status", "--porcelain") == ""
    git("-C", str(root / "clone"), "fsck", "--strict")
    assert inside(container, "cat /workspace/clone/f1; ls /workspace/clone | wc -l").split() == [b"changed", b"30"]
