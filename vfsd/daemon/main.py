"""A daemon as a process: `python -m vfsd.daemon.main OPTIONS_FD REPORT_FD`, as `vfsd.client.launch` starts it.

Reads the options from one inherited descriptor, runs the daemon, and reports on the other that the mount answers, or
why it does not.  Both are pipes, so the options are not in the process list, and the starter reads EOF if the daemon
dies.  If the starter dies first, the second pipe reports an error: the start is cancelled and undone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from vfsd.machine import logs
from vfsd.wire.handshake import Failed, Ready, decode_options, encode_report
from vfsd.wire.options import MountOptions

__all__ = ["RunDaemon", "foreground", "main", "run"]

_logger = logging.getLogger(__name__)


class RunDaemon(Protocol):
    """`vfsd.daemon.daemon.run_daemon`, or a test's own."""

    def __call__(self, options: MountOptions, *, ready: Callable[[Ready], None]) -> Awaitable[None]: ...


def run(
    options: MountOptions, ready: Callable[[Ready], None], run_daemon: RunDaemon, *, report_fd: int | None = None
) -> None:
    """Run the daemon in this process until it is unmounted.  OSError or ValueError if it cannot start.

    `report_fd` is the pipe to the starter.  If the starter closes its end, by dying, before `ready` is called, the
    start is cancelled and undone: BrokenPipeError.
    """
    logs.configure(options.log.log_level, options.log.log_format)

    async def body() -> None:
        if report_fd is None:
            await run_daemon(options, ready=ready)
            return
        start = _Start(report_fd)
        try:
            async with trio.open_nursery() as nursery:
                start.scope = nursery.cancel_scope
                nursery.start_soon(start.watch)
                await run_daemon(options, ready=start.ended(ready))
                nursery.cancel_scope.cancel()
        except* Exception as group:  # noqa: BLE001 (raised again)
            raise _first(group) from None
        if start.starter_is_gone:
            raise BrokenPipeError(errno.EPIPE, "the process that started this daemon has ended: nothing is mounted")

    trio.run(body)


def foreground(options: MountOptions, *, ready: Callable[[Ready], None] | None = None) -> None:
    """Run the daemon in this process until it is unmounted; it logs to standard error.

    `ready` is called when the mount answers.  OSError or ValueError if the daemon cannot start.
    """
    from vfsd.daemon.daemon import run_daemon  # noqa: PLC0415 (a test runs this module without an engine)

    run(options, ready or (lambda _: None), run_daemon)


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group, which is the one that the starter reports."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class _Start:
    """A start while its starter waits for the report.  `scope` is cancelled if the starter ends."""

    def __init__(self, report_fd: int) -> None:
        self._pipe = os.dup(report_fd)  # the original is closed after the report
        os.set_inheritable(self._pipe, False)
        self._is_over = False
        self.scope = trio.CancelScope()
        self.starter_is_gone = False

    def ended(self, ready: Callable[[Ready], None]) -> Callable[[Ready], None]:
        """Wrap `ready`: after it the starter may end."""

        def call(report: Ready) -> None:
            self._is_over = True
            ready(report)

        return call

    async def watch(self) -> None:
        """Cancel the start when the other end of the pipe is closed."""
        # Abandoned if cancelled: it returns when the starter has read the report and closed its end.
        await trio.to_thread.run_sync(_wait_for_closed_reader, self._pipe, abandon_on_cancel=True)
        if not self._is_over:
            _logger.warning("the process that started this daemon has ended: the start is undone")
            self.starter_is_gone = True
            self.scope.cancel()


def _wait_for_closed_reader(pipe: int) -> None:
    """Return when the pipe whose writing end is `pipe` has no reader; closes `pipe`."""
    poll = select.poll()
    poll.register(pipe, 0)  # poll(2) always reports POLLERR
    try:
        poll.poll()
    finally:
        os.close(pipe)


def main(arguments: list[str], run_daemon: RunDaemon) -> int:
    """The exit status: 0 after a clean unmount, 1 when the start or the daemon failed."""
    options_fd, report_fd = (int(argument) for argument in arguments)
    os.set_inheritable(report_fd, False)  # a child that inherits it would hide this process's end from the starter
    with open(options_fd, "rb") as file:
        options = decode_options(file.read())
    report = _Report(report_fd)
    try:
        run(options, report.send, run_daemon, report_fd=report_fd)
    except Exception as error:  # noqa: BLE001 (reported, and logged with its traceback)
        logs.log_failure(_logger, "run" if report.sent else "start", error)
        if not report.sent:
            with contextlib.suppress(BrokenPipeError):
                report.send(Failed.of(error))
        return 1
    return 0


class _Report:
    """The one line to the starter.  BrokenPipeError if the starter is gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.sent = False

    def send(self, report: Ready | Failed) -> None:
        if self.sent:
            raise RuntimeError("the report was sent already")
        self.sent = True
        try:
            os.write(self._descriptor, encode_report(report))
        finally:
            os.close(self._descriptor)


if __name__ == "__main__":
    from vfsd.daemon.daemon import run_daemon

    sys.exit(main(sys.argv[1:], run_daemon))
