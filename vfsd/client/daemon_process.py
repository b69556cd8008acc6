"""A daemon's process, from its start until its mount answers: started directly, or by the fork server."""

from __future__ import annotations

import subprocess
import threading
from typing import Protocol

from vfsd.machine.daemon_start import start_interpreter
from vfsd.wire.options import MountOptions


class DaemonProcess(Protocol):
    """A process that `launch` waits for.

    `status`: None while it runs and if its status is unknown; negative for a signal, as in `subprocess`.
    """

    @property
    def status(self) -> int | None: ...

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Wait until the process has ended; return whether it has."""

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""

    def release(self) -> None:
        """Stop watching the process: its mount answers, or it has ended."""


class DirectProcess:
    """A daemon that is a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._name = name

    @classmethod
    def start(cls, module: str, options: MountOptions, report_fd: int, log_fd: int, why: str) -> DirectProcess:
        """Start `module` in a new interpreter.  `why`: what kept the fork server from it, if anything."""
        process = start_interpreter(module, options, report_fd, log_fd, why)
        return cls(process, options.workspace.name)

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def wait_ended(self, timeout_s: float | None) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def release(self) -> None:
        """Reap the daemon if it ends before this process."""
        if self._process.returncode is None:
            threading.Thread(target=self._process.wait, name=f"vfsd-{self._name}", daemon=True).start()
