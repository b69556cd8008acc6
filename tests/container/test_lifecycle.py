"""PodmanService and Container: what is made, inspected, started, stopped and removed; errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
import http.server
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from protocol.backends.container.podman.address import default_address, parse_address
from protocol.backends.container.podman.service import ContainerNotFoundError, PodmanService
from protocol.backends.container.podman.spec import ContainerMount, ContainerSpec
from protocol.backends.container.workspace import open_container
from tests.container.conftest import (
    BUSYBOX,
    MountContainer,
    StartContainer,
    attempt,
    control,
    import_image,
    inside,
    shown,
)
from tests.container.service import NoPodmanError, running_service, write_busybox_image
from tests.container.sshd import NoSshdError, Sshd, running_sshd
from tests.container.test_executor import where_of
from tests.support.exec_suite import run


# -- addresses ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "url",
    [
        "unix:///run/podman/podman.sock",
        "ssh://me@host:2222/run/podman.sock",
        "tcp://host:8080",
        "ssh://h/s",
        "ssh://Me@BuildBox/s",
        "ssh://me@[fe80::1]:22/s",
        "tcp://[::1]:8080",
    ],
)
def test_an_address_is_shown_as_it_was_given(url: str) -> None:
    assert parse_address(url).url == url


@pytest.mark.parametrize(
    "url", ["", "podman.sock", "unix://relative", "ssh://host", "ssh://-oProxyCommand=x/sock", "http://x", "tcp://h:x"]
)
def test_what_is_no_address_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not the address of a Podman service"):
        parse_address(url)


def test_the_default_is_what_the_environment_names_else_the_users_own_socket() -> None:
    assert default_address({"CONTAINER_HOST": "tcp://h:1"}, 1000).url == "tcp://h:1"
    assert default_address({"XDG_RUNTIME_DIR": "/x"}, 1000).url == "unix:///x/podman/podman.sock"
    assert default_address({}, 1000).url == "unix:///run/user/1000/podman/podman.sock"
    assert default_address({"XDG_RUNTIME_DIR": "/x"}, 0).url == "unix:///run/podman/podman.sock"


# -- a service that does not answer -----------------------------------------------------------------
def test_a_missing_socket_is_an_error_that_says_how_to_start_the_service(workdir: Path) -> None:
    url = f"unix://{workdir}/none.sock"
    with pytest.raises(OSError, match=f"start one: podman system service --time=0 {url}, or leave out") as caught:
        PodmanService(url).inspect("x")
    assert caught.value.errno == errno.ENOENT


def test_a_socket_that_nobody_listens_on_is_an_error_that_says_so(workdir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(workdir / "dead.sock"))
    with pytest.raises(OSError, match="listens") as caught:
        PodmanService(f"unix://{workdir}/dead.sock").inspect("x")
    assert caught.value.errno == errno.ECONNREFUSED
    with pytest.raises(OSError, match="listens"):
        PodmanService(f"unix://{workdir}/dead.sock").connect()


# -- containers ---------------------------------------------------------------------------------------
def test_a_container_that_is_not_there_is_an_error_that_names_it(podman: PodmanService) -> None:
    with pytest.raises(ContainerNotFoundError, match=f"podman --url {podman.address} ps -a") as caught:
        podman.inspect("nobody")
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == "nobody"


def test_inspecting_shows_what_a_container_was_made_with(
    start_container: StartContainer, busybox_image: str, workdir: Path
) -> None:
    mount = ContainerMount(str(workdir), "/data", read_only=True)
    container = start_container(
        pids_limit=77, labels={"a": "b"}, mounts=[mount], options={"user": "dev", "environment": {"X": "1"}}
    )

    state = container.inspect()

    assert (state.id, state.name, state.status, state.running) == (container.id, container.name, "running", True)
    assert state.labels["a"] == "b"
    whole = shown(container)
    assert (whole["ImageName"], whole["Config"]["User"]) == (busybox_image, "dev")
    assert (whole["HostConfig"]["PidsLimit"], whole["HostConfig"]["NetworkMode"]) == (77, "none")
    assert "X=1" in whole["Config"]["Env"]
    (data,) = whole["Mounts"]
    assert (data["Type"], data["Source"], data["Destination"], data["RW"]) == ("bind", str(workdir), "/data", False)
    assert container.id.encode() in Path(f"/proc/{state.conmon_pid}/cmdline").read_bytes()
    assert inside(container, "cat /proc/self/status | grep ^Uid").split()[1] == b"1000"


@pytest.mark.extended
def test_a_container_goes_through_its_life(start_container: StartContainer) -> None:
    container = start_container()
    first = container.inspect()

    control(container, "pause")
    assert (container.inspect().status, container.inspect().running) == ("paused", True)
    control(container, "unpause")
    control(container, "stop", timeout=5)
    stopped = container.inspect()
    assert (stopped.status, stopped.running, stopped.pid) == ("exited", False, 0)
    container.start()
    container.start()
    assert container.inspect().pid not in {0, first.pid}
    container.kill()
    control(container, "restart", timeout=0)
    assert container.inspect().running
    container.remove()
    container.remove()
    with pytest.raises(ContainerNotFoundError):
        container.inspect()


def test_the_first_process_of_ours_ends_at_once_when_it_is_told_to(start_container: StartContainer) -> None:
    container = start_container()
    # The kernel drops a SIGTERM for a first process that has no handler yet (pid_namespaces(7)).  This one sets it up
    # before it sleeps.
    waiting = "for i in $(seq 100); do ps -o args | grep -q '^sleep 86400' && exit 0; sleep 0.05; done; exit 1"
    assert attempt(container, "sh", "-c", waiting)[0] == 0

    control(container, "stop", timeout=600)

    assert container.inspect().exit_code == 0


def test_the_first_process_of_ours_reaps_what_others_leave(start_container: StartContainer) -> None:
    container = start_container()

    inside(container, "for i in 1 2 3; do (sleep 0 & ) ; done")
    waiting = "for i in $(seq 100); do ps -o stat | grep -q Z || exit 0; sleep 0.05; done; ps -o stat,comm; exit 1"

    assert attempt(container, "sh", "-c", waiting)[0] == 0


def test_two_containers_of_one_name_cannot_be_made(
    start_container: StartContainer, podman: PodmanService, busybox_image: str
) -> None:
    container = start_container()

    with pytest.raises(FileExistsError, match=container.name):
        podman.create(ContainerSpec(busybox_image, name=container.name))


# -- images -------------------------------------------------------------------------------------------
def test_an_image_is_there_or_not(podman: PodmanService, busybox_image: str) -> None:
    assert podman.image_exists(busybox_image)
    assert not podman.image_exists("localhost/none:1")


@pytest.fixture
def registry() -> Iterator[str]:
    """The address of a registry that answers every request for an image with the status that the image is named for."""

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = int(self.path.split("/")[2]) if self.path.count("/") > 2 else 200
            code = {401: "UNAUTHORIZED", 403: "DENIED", 404: "MANIFEST_UNKNOWN"}.get(status, "UNKNOWN")
            body = json.dumps({"errors": [{"code": code, "message": "said by the registry"}]}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.extended
def test_a_pull_that_fails_says_whether_registry_access_or_image_is_missing(
    podman: PodmanService, registry: str, workdir: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{unused.getsockname()[1]}/x:1"  # nobody listens there
        expected = {
            f"{registry}/404/x:1": (errno.ENOENT, "no such image"),
            f"{registry}/401/x:1": (errno.EACCES, "podman login"),
            f"{registry}/403/x:1": (errno.EACCES, "podman login"),
            f"{registry}/500/x:1": (errno.EIO, "cannot be pulled.*500"),
            nobody: (errno.EHOSTUNREACH, "registry cannot be reached.*refused"),
            "registry.invalid/x:1": (errno.EHOSTUNREACH, "registry cannot be reached"),
            "no-such-name": (errno.ENOENT, "no such image"),
            "NO NAME": (errno.EINVAL, "not the name of an image"),
        }
        with (
            running_service(workdir / "podman", http_registry=registry) as url,
            closing(PodmanService(url)) as service,
        ):
            for reference, (code, words) in expected.items():
                with pytest.raises(OSError, match=words) as caught:
                    service.pull(reference)
                assert (caught.value.errno, caught.value.filename) == (code, reference)
    with (
        closing(PodmanService(f"unix://{workdir}/none.sock")) as gone,
        pytest.raises(OSError, match="start one: podman system service"),
    ):
        gone.pull("localhost/x:1")


# -- another machine, by ssh --------------------------------------------------------------------------
FAKE_SSH = """#!/bin/sh
# As ssh -N -L NEAR:FAR does, without another machine.
echo "$@" >> "$0.log"
while [ "$1" != -L ]; do shift; done
exec python3 "$0.py" "${2%%:*}" "${2#*:}"
"""
FORWARD = """
import socket, sys, threading
near, far = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX)
listener.bind(near)
listener.listen()
def pump(a, b):
    while data := a.recv(65536):
        b.sendall(data)
    b.shutdown(socket.SHUT_WR)
while True:
    client = listener.accept()[0]
    server = socket.socket(socket.AF_UNIX)
    server.connect(far)
    for pair in ((client, server), (server, client)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


@pytest.fixture
def fake_ssh(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = workdir / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(FAKE_SSH)
    program.with_name("ssh.py").write_text(FORWARD)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def test_a_service_of_another_machine_is_reached_through_one_ssh(
    podman: PodmanService, start_container: StartContainer, fake_ssh: Path
) -> None:
    container = start_container()

    with closing(PodmanService(f"ssh://me@there:2222{podman.address.path}")) as remote:
        assert not remote.is_local
        assert remote.inspect(container.name).id == container.id
        with remote.connect() as raw:
            raw.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            assert raw.recv(15).startswith(b"HTTP/1.0 200")

    calls = fake_ssh.with_name("ssh.log").read_text().splitlines()
    assert len(calls) == 1
    assert "StrictHostKeyChecking=no" not in calls[0]
    assert calls[0].endswith("-- me@there")


@pytest.mark.extended
@pytest.mark.fuse
def test_a_container_of_another_machine_is_mounted_by_a_helper_inside(
    mount_container: MountContainer,
    start_container: StartContainer,
    python_image: str,
    podman: PodmanService,
    fake_ssh: Path,
) -> None:
    container = start_container(python_image)

    workspace = mount_container(container, podman_url=f"ssh://me@there{podman.address.path}")

    Path(workspace.path, "f").write_text("from here")
    assert inside(container, "cat /workspace/f") == b"from here"
    assert (workspace.status().transport, workspace.status().container) == ("agent", "running")
    with pytest.raises(OSError, match="rootfs"):
        open_container(container.name, podman_url=f"ssh://me@there{podman.address.path}", transport="rootfs")


def test_an_ssh_that_does_not_get_there_is_an_error_in_its_own_words(fake_ssh: Path) -> None:
    fake_ssh.write_text("#!/bin/sh\necho 'me@there: Permission denied (publickey).' >&2\nexit 255\n")

    with pytest.raises(ConnectionRefusedError, match="publickey"):
        PodmanService("ssh://me@there/run/podman.sock").inspect("x")


@pytest.mark.extended
def test_a_container_starts_with_limits_that_podman_may_set(workdir: Path) -> None:
    archive = workdir / "busybox.tar"
    write_busybox_image(archive)
    try:
        with (
            running_service(workdir / "podman", default_ulimits=True) as url,
            contextlib.closing(PodmanService(url)) as podman,
        ):
            import_image(url, archive, BUSYBOX)
            container = podman.create(ContainerSpec(BUSYBOX, name="limited"))
            try:
                container.start()
                limits = [int(word) for word in inside(container, "ulimit -Hn").split()]
            finally:
                container.remove()
            assert podman.labelled({}) == []  # the one that was made first, with other limits, is gone
    except NoPodmanError as error:
        pytest.skip(f"no Podman service can be run here: {error}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard == resource.RLIM_INFINITY or 0 < limits[0] <= hard


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
