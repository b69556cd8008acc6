"""Run a daemon for the process that starts it, and report to that process on a pipe that the mount answers, or why not.

If the starter dies first, the pipe reports an error: the start is cancelled and undone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import select
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from protocol.linux import credentials
from vfsd.daemon.keeper import keeping
from vfsd.daemon.keeper.keeping import Kept
from vfsd.machine import logs, runtime
from vfsd.wire.options import Failed, MountOptions, Ready, decode_options, encode_report

_logger = logging.getLogger(__name__)
_REASON_MAX: Final = 2000  # characters
_MAKING: Final = frozenset({"image"})  # kinds of backends whose opening makes what outlives the process


RunDaemon = Callable[..., Awaitable[None]]  # `vfsd.daemon.daemon.run_daemon`, or a test's own


def run(
    options: MountOptions,
    ready: Callable[[Ready], None],
    run_daemon: RunDaemon,
    starter: _Starter | None = None,
    *,
    continues: bool = True,
) -> None:
    """Run the daemon in this process until it is unmounted.  OSError or ValueError if it cannot start.

    If `starter` ends before it has the report, the start is cancelled and undone: BrokenPipeError.  A signal to end
    that comes during the start ends the process at once; but if the start makes something that has to be removed, such
    as a container, it is undone first.  `continues`: the daemon goes on with a mount that exists.
    """
    logs.configure(options.log.log_level, options.log.log_format)
    is_undone = not continues and options.workspace.backend.kind in _MAKING
    signals: list[int] = []

    async def body() -> None:
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                if starter is not None:
                    nursery.start_soon(starter.watch, nursery.cancel_scope)
                if is_undone:
                    await nursery.start(_undo_on_signal, nursery.cancel_scope, signals)
                await run_daemon(options, ready=ready)
                nursery.cancel_scope.cancel()
        except* Exception as group:  # noqa: BLE001 (raised below: Python 3.11.2 puts what is raised here into a group)
            failure = _first(group)
        if failure is not None:
            raise failure from None
        if starter is not None and starter.is_gone and not signals:
            raise BrokenPipeError(errno.EPIPE, "the process that started this daemon has ended: nothing is mounted")

    trio.run(body)
    if signals:
        signal.raise_signal(signals[0])  # the handlers are those from before again


async def _undo_on_signal(
    start: trio.CancelScope, signals: list[int], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Cancel `start` on a signal to end, and note it.  The daemon has a handler of its own while it is mounted."""
    with trio.open_signal_receiver(*keeping.TO_END) as received:
        task_status.started()
        async for number in received:
            _logger.warning("%s: the start is undone", signal.Signals(number).name, extra={"operation": "signal"})
            signals.append(number)
            start.cancel()


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group, which is the one that the starter reports."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class _Starter:
    """The process that started this one.  It reads one report from the pipe `report_fd`.

    `is_gone`: it ended before it had the report.
    """

    def __init__(self, report_fd: int) -> None:
        os.set_inheritable(report_fd, False)  # a child that inherits it would hide this process's end from the starter
        self._report_fd = report_fd
        self._watched_fd = os.dup(report_fd)  # `report` closes the original
        self.has_report = False
        self.is_gone = False

    def report(self, report: Ready | Failed) -> None:
        """Send the one report.  BrokenPipeError if the starter is gone."""
        if self.has_report:
            raise RuntimeError("the report was sent already")
        self.has_report = True
        try:
            os.write(self._report_fd, encode_report(report))
        finally:
            os.close(self._report_fd)

    async def watch(self, start: trio.CancelScope) -> None:
        """Cancel `start` if the starter ends before it has the report."""
        # Abandoned if cancelled: it returns when the starter has read the report and closed its end.
        await trio.to_thread.run_sync(_wait_for_closed_reader, self._watched_fd, abandon_on_cancel=True)
        if not self.has_report:
            _logger.warning("the process that started this daemon has ended: the start is undone")
            self.is_gone = True
            start.cancel()


def _wait_for_closed_reader(pipe: int) -> None:
    """Return when the pipe whose writing end is `pipe` has no reader; closes `pipe`."""
    poll = select.poll()
    poll.register(pipe, 0)  # poll(2) always reports POLLERR
    try:
        poll.poll()
    finally:
        os.close(pipe)


def serve_kept(options: MountOptions, report_fd: int, run_daemon: RunDaemon) -> int:
    """Do as `serve_starter`; with options that want a keeper, become it and run the daemon in a child process."""
    credentials.hide()
    if not keeping.is_wanted(options):
        return serve_starter(options, report_fd, run_daemon)

    def start(kept: Kept) -> int:
        return serve_starter(options, report_fd, functools.partial(run_daemon, kept=kept))

    return keeping.Keeper(options).run(start, restart_kept(options, run_daemon), functools.partial(os.close, report_fd))


def restart_kept(options: MountOptions, run_daemon: RunDaemon) -> keeping.Serve:
    """Return the function that runs a replacement of a daemon that died, and returns its exit status."""

    def restart(kept: Kept) -> int:
        try:
            now = decode_options(kept.resume.options.encode())
            run(now, lambda _: None, functools.partial(run_daemon, kept=kept))
        except Exception as error:  # noqa: BLE001 (logged with its traceback)
            logs.log_failure(_logger, "restart", error)
            note_failed_restart(options, error)
            return 1
        return 0

    return restart


def note_failed_restart(options: MountOptions, error: BaseException, then: str = "") -> None:
    """Have the record of the workspace say why this daemon could not continue its mount, and what comes `then`."""
    failed = Failed.of(error)
    where = "" if failed.path is None else f": {failed.path}"
    with contextlib.suppress(OSError):  # a full disk: the log says it
        reason = logs.escape(f"{failed.message}{where}")[:_REASON_MAX]
        runtime.note_failure(options.workspace.name, f"the next one could not start: {reason}{then}")


def serve_starter(options: MountOptions, report_fd: int, run_daemon: RunDaemon) -> int:
    """Run the daemon, and report to its starter on `report_fd`.  Return the exit status, as `main`."""
    starter = _Starter(report_fd)
    try:
        run(options, starter.report, run_daemon, starter, continues=False)
    except Exception as error:  # noqa: BLE001 (reported, and logged with its traceback)
        logs.log_failure(_logger, "run" if starter.has_report else "start", error)
        if not starter.has_report:
            with contextlib.suppress(BrokenPipeError):
                starter.report(Failed.of(error))
        return 1
    return 0
