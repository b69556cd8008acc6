"""A fork server of a test module's own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import zygote
from tests.support.waiting import wait_until
from vfsd.client.launch import ensure_server, socket_path
from vfsd.machine.daemon_start import daemon_environment


@contextlib.contextmanager
def running_fork_server(directory: Path) -> Iterator[int]:
    """Run a fork server with the runtime directory `directory`; yield its process id.  End it afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VFSD_RUNTIME_DIR", str(directory))
        patch.setenv("VFSD_FORK_SERVER", "on")
        patch.setattr("vfsd.client.launch.is_in_private_mounts", lambda: False)  # CI may run in a container
        patch.setattr("vfsd.client.launch._ANSWER_TIMEOUT_S", 60.0)  # the machine may be loaded
        with zygote.starting_interpreters():
            ensure_server()
        path = Path(socket_path(daemon_environment()))
        wait_until(lambda: _answers(path), "a fork server listens")
        pid = _server_pid(path)
        pidfd = os.pidfd_open(pid)
        try:
            yield pid
        finally:
            for number in (signal.SIGCONT, signal.SIGTERM):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
            os.close(pidfd)


def _answers(path: Path) -> bool:
    try:
        return _server_pid(path) > 0
    except OSError:
        return False


def _server_pid(path: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            connection.recv(1)  # until the server has accepted this, and not only the kernel
        return int(struct.unpack("=iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
