"""Tunnel: a local socket for a Podman service on another machine, forwarded by the user's own ssh.

Podman's client can forward too, but it makes ssh accept any host key (StrictHostKeyChecking=no), and starts an ssh for
each client.  This ssh never asks on a terminal: keys come from the agent or from ssh_config(5).
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from typing import Final

from protocol.backends.container.podman.address import ServiceAddress

_CONNECT_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05  # ssh does not report when it has created the socket
_OPTIONS: Final = ("BatchMode=yes", "ExitOnForwardFailure=yes", "ServerAliveInterval=15", "ServerAliveCountMax=3")


class Tunnel:
    """An ssh process that forwards the socket at `path` to the service at `address`.  OSError if it fails."""

    def __init__(self, address: ServiceAddress) -> None:
        self._directory = tempfile.mkdtemp(prefix="vfsd-podman-")
        self.path: Final = os.path.join(self._directory, "podman.sock")
        options = [word for option in _OPTIONS for word in ("-o", option)]
        port = ["-p", str(address.port)] if address.port else []
        command = ["ssh", "-N", "-T", *options, *port, "-L", f"{self.path}:{address.path}", "--", address.host]
        try:
            self._ssh = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except OSError:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        try:
            self._wait_for_socket(address)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._ssh.poll() is None

    def close(self) -> None:
        """End ssh and the connections through it."""
        self._ssh.terminate()
        try:
            self._ssh.wait(5)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        if self._ssh.stderr is not None:
            self._ssh.stderr.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _wait_for_socket(self, address: ServiceAddress) -> None:
        deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while not self._answers():
            if not self.alive:
                raise OSError(errno.ECONNREFUSED, f"ssh: {self._last_words()}", address.url)
            if time.monotonic() > deadline_s:
                raise OSError(errno.ETIMEDOUT, "ssh does not connect in time", address.url)
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return not probe.connect_ex(self.path)

    def _last_words(self) -> str:
        assert self._ssh.stderr is not None
        poll = select.poll()
        poll.register(self._ssh.stderr, select.POLLIN)
        lines = self._ssh.stderr.read().decode("utf-8", "replace").splitlines() if poll.poll(1000) else []
        return lines[-1] if lines else f"ended with status {self._ssh.returncode}"
