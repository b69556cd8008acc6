"""A daemon as a process: `python -m vfsd.daemon_process OPTIONS_FD REPORT_FD`, as `vfsd.launch` starts it.

Reads the options from one inherited descriptor, runs the daemon, and writes to the other that the mount answers,
or why it does not.  Both are pipes: nothing of the options is in the process list, and a starter sees EOF when
the daemon dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from vfsd import logs
from vfsd.options import MountOptions
from vfsd.ready import Failed, Ready, decode_options, encode_report

__all__ = ["RunDaemon", "main", "run"]

_logger = logging.getLogger(__name__)


class RunDaemon(Protocol):
    """`vfsd.daemon.run_daemon`, or a test's own."""

    def __call__(self, options: MountOptions, *, ready: Callable[[Ready], None]) -> Awaitable[None]: ...


def run(options: MountOptions, ready: Callable[[Ready], None], run_daemon: RunDaemon) -> None:
    """Run the daemon in this process until it is unmounted.  Raises what a failed start raises."""
    logs.configure(options.log_level, options.log_format)

    async def body() -> None:
        await run_daemon(options, ready=ready)

    trio.run(body)


def main(arguments: list[str], run_daemon: RunDaemon) -> int:
    """The exit status: 0 after a clean unmount, 1 when the start or the daemon failed."""
    options_fd, report_fd = (int(argument) for argument in arguments)
    os.set_inheritable(report_fd, False)  # a child that kept it would hide this process's death
    with open(options_fd, "rb") as file:
        options = decode_options(file.read())
    report = _Report(report_fd)
    try:
        run(options, report.send, run_daemon)
    except Exception as error:  # noqa: BLE001 (the last one to see it: told and logged, with its traceback)
        logs.log_failure(_logger, "run" if report.sent else "start", error)
        if not report.sent:
            with contextlib.suppress(BrokenPipeError):
                report.send(Failed.of(error))
        return 1
    return 0


class _Report:
    """The one line to the starter.  BrokenPipeError when it is gone: then no one asked for this daemon any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.sent = False

    def send(self, report: Ready | Failed) -> None:
        if self.sent:
            raise RuntimeError("the starter was told already")
        self.sent = True
        try:
            os.write(self._descriptor, encode_report(report))
        finally:
            os.close(self._descriptor)


if __name__ == "__main__":
    from vfsd.daemon import run_daemon

    sys.exit(main(sys.argv[1:], run_daemon))
