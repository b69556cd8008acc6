"""The mount's side of the fork server, without a server."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from vfsd.client import fork_server
from vfsd.machine.daemon_start import daemon_environment
from vfsd.machine.process_properties import difference, process_properties
from vfsd.wire import fork_messages
from vfsd.wire.fork_messages import Ended, Forked, Hello, Start
from vfsd.wire.options import MountOptions

OPTIONS = MountOptions.of("/mnt/x", "x")


@pytest.fixture
def socket_path(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(workdir))
    (workdir / "vfsd").mkdir(mode=0o700)
    return Path(fork_server.socket_path(process_properties(daemon_environment())))


def test_the_variable_is_on_or_off() -> None:
    assert fork_server.is_on({})
    assert fork_server.is_on({"VFSD_FORK_SERVER": "on"})
    assert not fork_server.is_on({"VFSD_FORK_SERVER": "off"})
    with pytest.raises(OSError, match="on or off") as raised:
        fork_server.is_on({"VFSD_FORK_SERVER": "no"})
    assert raised.value.errno == errno.EINVAL


def test_without_a_server_the_daemon_is_started_directly(socket_path: Path) -> None:
    assert fork_server.start(OPTIONS, 1, 2) == "no fork server is running"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(socket_path))  # of a server that was killed
        assert fork_server.start(OPTIONS, 1, 2) == "no fork server is running"


def test_a_server_that_does_not_answer_is_not_waited_for(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_ANSWER_TIMEOUT_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        assert fork_server.start(OPTIONS, 1, 2) == "the fork server does not answer"


def test_messages_keep_their_values() -> None:
    start = Start(
        options="{}",
        environment={"A": os.fsdecode(b"\xff")},
        umask=0o22,
        soft_limits={7: 1024},
        cpus=[0, 1],
        blocked_signals=[],
        oom_score_adj=-5,
    )
    for message in (start, Forked(12), Ended(-9), Hello({"cgroup": "/x"})):
        assert fork_messages.decode(fork_messages.encode(message)) == message


def test_a_message_that_is_too_long_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="too long"):
        fork_messages.encode(Hello({"cgroup": "x" * fork_messages.MAX_BYTES}))


def test_properties_differ_by_the_interpreters_variables_only() -> None:
    ours = process_properties({"PYTHONPATH": "/a", "HOME": "/root"})
    assert difference(ours, process_properties({"PYTHONPATH": "/a", "HOME": "/other"})) is None
    other = process_properties({"PYTHONPATH": "/b", "HOME": "/root"})
    assert difference(ours, other) == "environment of the interpreter"
    assert difference(ours, {**ours, "new": ""}) == "new"
