"""Advice for a Podman service: it fits the address that was used, and where that came from."""

from __future__ import annotations

import errno
import socket

import pytest

from protocol.backends.container.podman import advice
from protocol.backends.container.podman.address import parse_address
from protocol.backends.container.podman.errors import ContainerNotFoundError, connect_error

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
    assert advice.start(parse_address(url), {}, uid) == expected


def test_podman_gets_the_url_unless_it_uses_that_service_itself() -> None:
    custom = parse_address("unix:///tmp/my.sock")
    assert advice.podman(parse_address(OF_ROOT), {}, 0) == "podman"
    assert advice.podman(custom, {}, 0) == "podman --url unix:///tmp/my.sock"
    assert advice.podman(custom, {"CONTAINER_HOST": custom.url}, 0) == "podman"
    assert advice.podman(parse_address(OF_ROOT), {"CONTAINER_HOST": custom.url}, 0) == f"podman --url {OF_ROOT}"
    assert advice.podman(custom, {"CONTAINER_HOST": "nonsense"}, 0) == "podman --url unix:///tmp/my.sock"


def test_the_way_to_ones_own_service_is_named_if_another_one_was_used() -> None:
    custom = parse_address("unix:///tmp/my.sock")
    assert advice.other_service(parse_address(OF_USER), {}, 1000) == ""
    assert advice.other_service(custom, {}, 1000) == "leave out --podman-url"
    assert advice.other_service(custom, {"CONTAINER_HOST": custom.url}, 1000) == "unset CONTAINER_HOST"
    assert advice.other_service(custom, {"CONTAINER_HOST": OF_ROOT}, 1000) == "leave out --podman-url"


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
