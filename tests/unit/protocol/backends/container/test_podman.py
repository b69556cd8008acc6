"""The client of Podman: advice for a service, its HTTP connection, leases of containers, and resource limits."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from protocol.backends.container.podman.address import other_service_advice, parse_address, podman_command, start_advice
from protocol.backends.container.podman.exec_stream import PodmanConnection
from protocol.backends.container.podman.ownership import Lease, is_held
from protocol.backends.container.podman.service import ContainerNotFoundError, connect_error
from protocol.backends.container.podman.spec import PODMAN_DEFAULT, own_hard_limits, permitted_ulimits

OF_USER = "unix:///run/user/1000/podman/podman.sock"
OF_ROOT = "unix:///run/podman/podman.sock"


@pytest.mark.parametrize(
    ("url", "uid", "expected"),
    [
        (OF_ROOT, 0, "systemctl enable --now podman.socket"),
        (OF_USER, 1000, "systemctl --user enable --now podman.socket"),
        (OF_ROOT, 1000, "as root: systemctl enable --now podman.socket"),
        (OF_USER, 0, "as the user with the id 1000: systemctl --user enable --now podman.socket"),
        ("unix:///tmp/my.sock", 0, "podman system service --time=0 unix:///tmp/my.sock"),
        ("unix:///tmp/my dir/sock", 0, "podman system service --time=0 unix://'/tmp/my dir/sock'"),
        ("tcp://host:8080", 0, "on host: podman system service --time=0 tcp://host:8080"),
        (f"ssh://me@there{OF_ROOT.removeprefix('unix://')}", 1000, "as root: systemctl enable --now podman.socket"),
        ("ssh://me@there/tmp/my.sock", 1000, "podman system service --time=0 unix:///tmp/my.sock"),
    ],
)
def test_a_service_is_started_by_what_makes_its_socket(url: str, uid: int, expected: str) -> None:
    assert start_advice(parse_address(url), {}, uid) == expected


def test_podman_gets_the_url_unless_it_uses_that_service_itself() -> None:
    custom = parse_address("unix:///tmp/my.sock")
    assert podman_command(parse_address(OF_ROOT), {}, 0) == "podman"
    assert podman_command(custom, {}, 0) == "podman --url unix:///tmp/my.sock"
    assert podman_command(custom, {"CONTAINER_HOST": custom.url}, 0) == "podman"
    assert podman_command(parse_address(OF_ROOT), {"CONTAINER_HOST": custom.url}, 0) == f"podman --url {OF_ROOT}"
    assert podman_command(custom, {"CONTAINER_HOST": "nonsense"}, 0) == "podman --url unix:///tmp/my.sock"


def test_the_way_to_ones_own_service_is_named_if_another_one_was_used() -> None:
    custom = parse_address("unix:///tmp/my.sock")
    assert other_service_advice(parse_address(OF_USER), {}, 1000) == ""
    assert other_service_advice(custom, {}, 1000) == "leave out --podman-url"
    assert other_service_advice(custom, {"CONTAINER_HOST": custom.url}, 1000) == "unset CONTAINER_HOST"
    assert other_service_advice(custom, {"CONTAINER_HOST": OF_ROOT}, 1000) == "leave out --podman-url"


def test_errors_of_a_custom_service_do_not_name_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_HOST", raising=False)
    custom = parse_address("unix:///tmp/my.sock")
    for code in (errno.ENOENT, errno.ECONNREFUSED, errno.EACCES):
        error = connect_error(OSError(code, "text"), custom)
        assert (error.errno, error.filename) == (code, custom.url)
        assert "systemctl" not in str(error)
        assert "leave out --podman-url to use your own" in str(error)
    assert "podman --url unix:///tmp/my.sock ps -a" in str(ContainerNotFoundError("c", custom))


def test_a_host_that_has_no_address_is_an_error_with_an_errno() -> None:
    error = connect_error(
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"), parse_address("tcp://nohost")
    )
    assert error.errno == errno.EHOSTUNREACH
    assert "check the name of the host" in str(error)


REMOVED = "retrieving exec session a1 from container b2: container b2 does not exist in database: no such container"


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (404, "no container with that name", errno.ENOENT),
        (500, REMOVED, errno.ENOENT),
        (409, "can only create exec sessions on running containers: container state improper", errno.ENOTCONN),
        (409, "the container is paused", errno.EBUSY),
        (500, "out of luck", errno.EIO),
    ],
)
def test_a_refusal_is_the_error_that_it_means(status: int, message: str, code: int) -> None:
    async def main() -> None:
        body = json.dumps({"message": message}).encode()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            theirs.sendall(b"HTTP/1.1 %d Refused\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
            connection = PodmanConnection(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), ours)
            with pytest.raises(OSError, match=message) as caught:
                await connection.request("GET", "/exec/a1/json")
            await connection.aclose()
        assert caught.value.errno == code

    trio.run(main)


@pytest.fixture
def lease() -> Iterator[Lease]:
    made = Lease.make()
    yield made
    made.close()


def test_a_lease_is_held_until_its_last_duplicate_is_closed(lease: Lease) -> None:
    name = lease.name
    other = Lease.of(lease.descriptor)
    assert other.name == name
    assert is_held(name)
    lease.close()
    assert is_held(name)
    other.close()
    assert not is_held(name)


def test_a_process_that_is_killed_gives_its_lease_up(lease: Lease) -> None:
    name = lease.name
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lease.descriptor])
    with holder:
        lease.close()
        assert is_held(name)
        holder.kill()
    assert not is_held(name)


def test_one_process_can_claim_a_lease_that_is_free(lease: Lease) -> None:
    assert Lease.claim(lease.name) is None
    name = lease.name
    lease.close()
    claimed = Lease.claim(name)
    assert claimed is not None
    assert Lease.claim(name) is None
    claimed.close()


def test_asking_does_not_take_a_lease_and_nobody_can_send_to_one(lease: Lease) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(f"\0vfsd-container-{lease.name}")
        with pytest.raises(BrokenPipeError):
            stranger.send(b"x")
    assert is_held(lease.name)
    assert os.get_inheritable(lease.descriptor) is False


def inspected(**limits: int) -> dict[str, Any]:
    return {
        "HostConfig": {
            "Ulimits": [{"Name": f"RLIMIT_{name.upper()}", "Soft": most, "Hard": most} for name, most in limits.items()]
        }
    }


def test_limits_that_can_be_set_are_left_alone() -> None:
    assert permitted_ulimits(inspected(nofile=1024, nproc=4096), {"nofile": 20000, "nproc": 4096}) == []
    assert permitted_ulimits(inspected(nofile=PODMAN_DEFAULT), {}) == []
    assert permitted_ulimits({"HostConfig": {"Ulimits": None}}, {"nofile": 1}) == []
    assert permitted_ulimits({}, {"nofile": 1}) == []


@pytest.mark.parametrize("default", [PODMAN_DEFAULT, -1])
def test_a_limit_above_the_hard_one_is_lowered_and_the_others_are_kept(default: int) -> None:
    assert permitted_ulimits(inspected(nofile=default, nproc=100, core=0), {"nofile": 20000, "nproc": 5000}) == [
        {"Name": "nofile", "Soft": 20000, "Hard": 20000},
        {"Name": "nproc", "Soft": 100, "Hard": 100},
        {"Name": "core", "Soft": 0, "Hard": 0},
    ]


def test_the_hard_limits_are_those_of_this_process() -> None:
    assert set(own_hard_limits()) <= {"nofile", "nproc"}
    assert all(limit > 0 for limit in own_hard_limits().values())
