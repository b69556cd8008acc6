"""Start a daemon in a new interpreter."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator

import vfsd
from protocol.linux import credentials
from vfsd.machine import interpreter
from vfsd.wire.handshake import encode_options
from vfsd.wire.options import MountOptions


def start_interpreter(
    module: str, options: MountOptions, report_fd: int, log_fd: int, why: str, *, without: Collection[str] = ()
) -> subprocess.Popen[bytes]:
    """Start `module`, which reads `options` and reports on `report_fd`.  `why` is what `vfsd status` says about it.

    It does not have the environment variables `without`.
    """
    with _pipe_holding(encode_options(options)) as options_fd:
        # -P: do not import from the current directory, "/".
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(options_fd), str(report_fd), why],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(options_fd, report_fd),
            cwd="/",  # a daemon in another directory would keep its file system busy
            start_new_session=True,  # not ended by Ctrl-C or by a closing terminal
            env={name: value for name, value in daemon_environment().items() if name not in without},
        )


def daemon_environment() -> dict[str, str]:
    """Return this process's environment with absolute import paths, so that the daemon imports the same vfsd."""
    environment = interpreter.environment(credentials.environment())
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
