"""A daemon's process, from its start until its mount answers: started directly, or by the fork server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from typing import Protocol

import vfsd
from vfsd.machine import interpreter
from vfsd.wire.handshake import encode_options
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
        with _pipe_holding(encode_options(options)) as options_fd:
            # -P: do not import from the current directory, "/".
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(options_fd), str(report_fd), why],
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(options_fd, report_fd),
                cwd="/",  # a daemon in another directory would keep its file system busy
                start_new_session=True,  # not ended by Ctrl-C or by a closing terminal
                env=daemon_environment(),
            )
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


def daemon_environment() -> dict[str, str]:
    """Return this process's environment with absolute import paths, so that the daemon imports the same vfsd."""
    environment = interpreter.environment(os.environ)
    entries = [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    package_root = os.path.dirname(os.path.dirname(os.path.abspath(vfsd.__file__)))
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if package_root not in installed and package_root not in entries:
        entries.append(package_root)
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


@contextlib.contextmanager
def _pipe_holding(data: bytes) -> Iterator[int]:
    """Yield the reading end of a pipe that contains `data`, for a child to inherit."""
    reader, writer = os.pipe()
    try:
        try:
            # Paths are at most a few PATH_MAX; a pipe holds 64 KiB (pipe(7)), so the write does not block.
            os.set_blocking(writer, False)
            os.write(writer, data)
        finally:
            os.close(writer)
        yield reader
    finally:
        os.close(reader)
