"""sd_notify over real datagram sockets."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vfsd.daemon.keeper.sd_notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, str]]:
    """A socket bound as systemd would bind it, and its address as NOTIFY_SOCKET gives it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.settimeout(30)
        if request.param == "path":
            path: Path = request.getfixturevalue("tmp_path") / "n"
            receiver.bind(str(path))
            yield receiver, str(path)
        else:
            receiver.bind(f"\0vfsd-test-{os.getpid()}")
            yield receiver, f"@vfsd-test-{os.getpid()}"


def received(manager: tuple[socket.socket, str]) -> dict[str, str]:
    lines = manager[0].recv(4096).decode().split("\n")
    return dict(line.split("=", 1) for line in lines)


def test_a_service_says_what_it_does(manager: tuple[socket.socket, str]) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": manager[1]})
    assert notifier.ready("serving /mnt")
    assert received(manager) == {"READY": "1", "MAINPID": str(os.getpid()), "STATUS": "serving /mnt"}
    assert notifier.watchdog()
    assert received(manager) == {"WATCHDOG": "1"}
    assert notifier.stopping()
    assert received(manager) == {"STOPPING": "1"}
    assert notifier.stopping("unmounting")
    assert received(manager) == {"STOPPING": "1", "STATUS": "unmounting"}


def test_a_status_with_a_newline_cannot_forge_an_assignment(manager: tuple[socket.socket, str]) -> None:
    Notifier(manager[1]).ready("serving /a\nSTOPPING=1 \udcff")
    assert received(manager) == {"READY": "1", "MAINPID": str(os.getpid()), "STATUS": "serving /a STOPPING=1 \\udcff"}


def test_a_barrier_ends_when_the_manager_closes_its_descriptor(manager: tuple[socket.socket, str]) -> None:
    waiting = threading.Thread(target=Notifier(manager[1]).wait_processed)
    waiting.start()
    message, descriptors, _, _ = socket.recv_fds(manager[0], 4096, 4)
    assert message == b"BARRIER=1"
    assert waiting.is_alive()
    os.close(descriptors[0])
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_daemon_that_has_a_keeper_notifies_it_instead() -> None:
    sent: list[bytes] = []
    notifier = Notifier("/nowhere", keeper=lambda message: not sent.append(message))
    assert notifier.ready("serving /mnt")
    assert notifier.watchdog()
    assert sent == [f"READY=1\nMAINPID={os.getppid()}\nSTATUS=serving /mnt".encode(), b"WATCHDOG=1"]
    assert not Notifier(keeper=lambda _message: True).ready()  # not in a unit


def test_without_a_socket_nothing_is_sent() -> None:
    notifier = Notifier.from_environment({})
    assert not notifier.ready()
    assert not notifier.watchdog()


def test_a_socket_that_nobody_reads_neither_raises_nor_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not Notifier(str(tmp_path / "gone")).ready()
    assert "cannot notify systemd" in caplog.text
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "full"))
        notifier = Notifier(str(tmp_path / "full"))
        assert not all(notifier.watchdog() for _ in range(10_000))


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "77"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "78"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_interval(environ: dict[str, str], interval_s: float | None) -> None:
    assert Notifier.from_environment(environ, pid=77).watchdog_interval_s == interval_s
