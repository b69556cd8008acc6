"""The mount's side of the fork server, without a server."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vfsd.client import launch as launching
from vfsd.machine.daemon_start import daemon_environment, process_kind
from vfsd.wire.options import MountOptions

OPTIONS = MountOptions.of("/mnt/x", "x")


@pytest.fixture
def socket_path(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(workdir))
    (workdir / "vfsd").mkdir(mode=0o700)
    return Path(launching.socket_path(daemon_environment()))


def _set_mask(signals: set[signal.Signals]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def _set_handler(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGUSR2, handler)


def _set_soft_limit(soft: int) -> int:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return before


def test_the_variable_is_on_or_off() -> None:
    assert launching.is_fork_server_on({})
    assert launching.is_fork_server_on({"VFSD_FORK_SERVER": "on"})
    assert not launching.is_fork_server_on({"VFSD_FORK_SERVER": "off"})
    with pytest.raises(OSError, match="on or off") as raised:
        launching.is_fork_server_on({"VFSD_FORK_SERVER": "no"})
    assert raised.value.errno == errno.EINVAL


def test_without_a_server_the_daemon_is_started_directly(socket_path: Path) -> None:
    assert launching.start_by_server(OPTIONS, 1, 2) == "no fork server is running"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(socket_path))  # of a server that was killed
        assert launching.start_by_server(OPTIONS, 1, 2) == "no fork server is running"


def test_a_server_that_does_not_answer_is_not_waited_for(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_ANSWER_TIMEOUT_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        assert launching.start_by_server(OPTIONS, 1, 2) == "the fork server does not answer"


def test_a_kind_is_of_what_a_process_inherits() -> None:
    ours = process_kind({"PYTHONPATH": "/a", "EDITOR": "vi"})
    assert process_kind({"EDITOR": "ed", "PYTHONPATH": "/a"}) == ours
    assert process_kind({"PYTHONPATH": "/b", "EDITOR": "vi"}) != ours
    assert process_kind({"PYTHONPATH": "/a\udcff"}) != ours


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (lambda: os.umask(0o177), os.umask),
        (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}), _set_mask),
        (lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN), _set_handler),
        (lambda: _set_soft_limit(1000), _set_soft_limit),
    ],
    ids=["umask", "blocked signals", "ignored signals", "limits"],
)
def test_each_inherited_property_is_of_the_kind(change: Callable[[], Any], undo: Callable[[Any], object]) -> None:
    ours = process_kind({})
    before = change()
    try:
        assert process_kind({}) != ours
    finally:
        undo(before)
    assert process_kind({}) == ours
