"""`vfsd exec`: run a command in a workspace, with live output, input, a terminal, signals and its exit status.

One loop watches the connection, standard input, standard output and error (while they are writable) and signals.  So a
pager that is not read blocks the command, but neither Ctrl-C nor the daemon.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import stat
import sys
import termios
import tty
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any, Final

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import (
    FAILED,
    NOT_EXECUTABLE,
    NOT_FOUND,
    TIMED_OUT,
    App,
    Command,
    describe,
    error_record,
    handlers,
    report,
    wakeup_socket,
)
from vfsd.cli.common.values import SIZE, Seconds, environment, is_text
from vfsd.client.arguments import current_directory, wire_paths
from vfsd.client.executor import ExecCall, caller_environment
from vfsd.operations.fs import ExecEnded, ExecOutput, ExecParams, TerminalSize
from vfsd.wire.messages import wire_path

_COLLECTED_BYTES: Final = 256 * 1024  # of each stream, in a JSON document; the default of `vfsd fs exec`


@click.command(
    "exec",
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    examples="""
    vfsd exec -- make test                       # its output, its exit status
    vfsd exec -it -- bash                        # a shell
    vfsd exec -i -- python3 - < check.py         # -i: pass standard input on
    vfsd exec --cwd src --env CI=1 --timeout 600 -- npm test
    """,
)
@click.argument("argv", metavar="[--] COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input to the command.")
@click.option("-t", "--tty", is_flag=True, help="Provide a terminal, for shells, editors and progress bars.")
@click.option(
    "--cwd",
    metavar="PATH",
    default=".",
    help="Run it in this directory; by default the current one, if in the workspace.",
)
@click.option(
    "-e",
    "--env",
    "env",
    multiple=True,
    metavar="NAME[=VALUE]",
    callback=environment(inherit=True),
    help="Set a variable; without a value, pass yours.",
)
@click.option("-u", "--user", metavar="USER[:GROUP]", help="Run it as this user of the container.")
@click.option("--timeout", type=Seconds(min=0, min_open=True), metavar="SECONDS", help="Kill it after that time.")
@click.option("--output-limit", type=SIZE, metavar="SIZE", help="Discard the output of each stream beyond SIZE.")
@click.pass_obj
def exec_command(
    app: App,
    /,
    argv: tuple[str, ...],
    interactive: bool,
    tty: bool,
    cwd: str,
    env: dict[str, str],
    user: str | None,
    timeout: float | None,
    output_limit: int | None,
) -> None:
    """Run a command in the workspace.

    In a container workspace (container:NAME, image:REF) the command runs in that container; in a workspace mounted with
    --sandbox image:REF, in the sandbox; in one mounted with --on-host, on this host, with the rights of the user who
    mounted it.  In all of them it sees the workspace's live files.

    The command does not run in a shell unless you name one: vfsd exec -- sh -c 'make && ./run'.

    Ctrl-C, SIGTERM and similar signals go to the command.  When it ends, or `vfsd exec` is killed, all processes that
    it started are killed.

    The exit status is the command's own, 128 + N if signal N killed it, 124 if it timed out, 125 if vfsd failed, 126 if
    the command cannot be executed, and 127 if it was not found.

    With --json the document contains the first 256 KiB, or --output-limit, of each stream.
    """
    if app.json and tty:
        raise click.UsageError("--json prints the output when the command has ended: it excludes -t")
    try:
        record = app.record()
        record.check_alive()
        params = ExecParams(
            argv=[wire_path(os.fsencode(word)) for word in argv],
            cwd="".join(wire_paths([cwd], record.mountpoint, current_directory())),
            env=({"TERM": term} if tty and (term := os.environ.get("TERM")) and is_text(term) else {}) | env,
            environment=caller_environment(),
            user=user,
            input=interactive,
            timeout_s=timeout,
            output_limit_bytes=_COLLECTED_BYTES if app.json and output_limit is None else output_limit,
        )
        if app.json:
            ended, collected = run_collected(record.socket, params)
            app.done = "the command has run"
            with app.writing():
                output.print_json(_document(ended, collected))
            raise SystemExit(_status(ended))
        ended = run_attached(record.socket, params, terminal=tty)
    except BrokenPipeError:
        # Nothing reads the output any more, and the command was killed: the status that a shell reports for SIGPIPE.
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        report(describe(error), error_record(error), as_json=app.json)
        raise SystemExit(_status_of_failure(error, argv[0])) from None
    _say(ended, timeout)
    raise SystemExit(_status(ended))


def _status_of_failure(error: OSError, program: str) -> int:
    if error.filename == program and isinstance(error, FileNotFoundError):
        return NOT_FOUND
    if error.filename == program and isinstance(error, PermissionError):
        return NOT_EXECUTABLE
    return FAILED


def _status(ended: ExecEnded) -> int:
    if ended.timed_out:
        return TIMED_OUT
    return ended.exit_status if ended.exit_status >= 0 else 128 - ended.exit_status


def _document(ended: ExecEnded, collected: Mapping[str, bytes]) -> dict[str, Any]:
    streams = {name: output.text_or_base64(data, truncated=ended.truncated) for name, data in collected.items()}
    return {
        "exit_status": ended.exit_status,
        **streams,
        "timed_out": ended.timed_out,
        "truncated": ended.truncated,
        "snapshot": ended.snapshot,
        "snapshot_error": ended.snapshot_error,
    }


def _say(ended: ExecEnded, timeout_s: Any) -> None:
    if ended.timed_out:
        output.note(f"the command was killed after {timeout_s:g} s (--timeout)")
    if ended.truncated:
        output.note("the output exceeded --output-limit; the rest was discarded")
    if ended.snapshot_error is not None:
        output.note(f"the command ran, but the snapshot after it failed: {ended.snapshot_error}")
    # Only on a terminal: a program that reads standard error expects only the command's output.
    if ended.snapshot is not None and sys.stderr.isatty():
        output.note(f"snapshot {ended.snapshot}")


# -- standard streams -------------------------------------------------------------------------------
_PIECE_BYTES: Final = 64 * 1024
_STREAMS: Final = {"stdout": 1, "stderr": 2}
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# A command may ignore the first two signals; the third one ends `vfsd exec`.
_MAX_END_SIGNALS: Final = 3


def run_attached(socket_path: str, params: ExecParams, *, terminal: bool) -> ExecEnded:
    """Run a command in the daemon at `socket_path`; return when it has ended and all its output is written.

    BrokenPipeError if the output is not read any more.  OSError as `ExecCall.receive`.  SystemExit after the third
    signal.
    """
    if terminal:
        params.terminal = _size()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_signals(with_size=terminal))
        call = ExecCall(socket_path, params)
        stack.callback(call.close)
        if terminal and params.input:
            stack.enter_context(_raw())
        return _Loop(call, signals).run()


def run_collected(socket_path: str, params: ExecParams) -> tuple[ExecEnded, dict[str, bytes]]:
    """Run a command in the daemon; return how it ended, and its output.  It may read this process's standard input."""
    collected = {name: bytearray() for name in _STREAMS}
    with contextlib.closing(ExecCall(socket_path, params)) as call:
        ended = _Loop(call, None, collected).run()
    return ended, {name: bytes(data) for name, data in collected.items()}


class _Loop:
    """Passes input, signals and output on until the command ends.

    Without `signals` they have their usual effect; with `collected`, output is appended there instead of written.
    """

    def __init__(
        self, call: ExecCall, signals: socket.socket | None, collected: dict[str, bytearray] | None = None
    ) -> None:
        self._call = call
        self._signals = signals
        self._collected = collected
        self._end_signals = 0
        self._early: list[str] = []  # signals that arrived before the command had started
        self._waiting: dict[int, deque[bytes]] = {1: deque(), 2: deque()}
        self._written = {1: 0, 2: 0}  # written bytes of the first piece
        self._poll = selectors.PollSelector()  # takes regular files, unlike epoll

    def run(self) -> ExecEnded:
        with self._poll:
            self._poll.register(self._call, selectors.EVENT_READ)
            if self._signals is not None:
                self._poll.register(self._signals, selectors.EVENT_READ)
            while (ended := self._call.ended) is None or any(self._waiting.values()):
                self._watch()
                for key, _ in self._poll.select():
                    if key.fileobj is self._call:
                        self._take(self._call.receive())
                    elif self._signals is not None and key.fileobj is self._signals:
                        self._pass_on(self._signals.recv(_PIECE_BYTES))
                    elif key.fd == 0:
                        self._call.send_input(_read_input())
                    else:
                        self._write(key.fd)
            return ended

    def _watch(self) -> None:
        """Register the descriptors that can be used now, and unregister the others."""
        watched = self._poll.get_map()
        if self._call.ended is not None and self._call in watched:
            self._poll.unregister(self._call)
        wanted = {0: self._call.wants_input and self._call.ended is None}
        wanted |= {descriptor: bool(pieces) for descriptor, pieces in self._waiting.items()}
        for descriptor, is_wanted in wanted.items():
            if is_wanted and descriptor not in watched:
                self._poll.register(descriptor, selectors.EVENT_WRITE if descriptor else selectors.EVENT_READ)
            elif not is_wanted and descriptor in watched:
                self._poll.unregister(descriptor)

    def _take(self, outputs: list[ExecOutput]) -> None:
        for each in outputs:
            if self._collected is None:
                self._waiting[_STREAMS[each.stream]].append(each.data)
            else:
                self._collected[each.stream] += each.data
                self._call.done_with(each.data)
        if self._early and self._call.signal(self._early[0]):
            for name in self._early[1:]:
                self._call.signal(name)
            self._early = []

    def _write(self, descriptor: int) -> None:
        """Write without blocking (poll(2): a writable pipe accepts PIPE_BUF bytes)."""
        piece = self._waiting[descriptor][0]
        left = memoryview(piece)[self._written[descriptor] :]
        whole = stat.S_ISREG(os.fstat(descriptor).st_mode)
        try:
            self._written[descriptor] += os.write(descriptor, left if whole else left[: select.PIPE_BUF])
        except BrokenPipeError:
            raise
        except OSError as error:
            stream = "standard output" if descriptor == 1 else "standard error"
            outcome = "and the command was killed" if self._call.ended is None else "but the command has run"
            raise OSError(error.errno, f"cannot write to {stream}: {error.strerror}, {outcome}") from None
        if self._written[descriptor] == len(piece):
            self._waiting[descriptor].popleft()
            self._written[descriptor] = 0
            self._call.done_with(piece)

    def _pass_on(self, signals: bytes) -> None:
        for number in signals:
            if number == signal.SIGWINCH:
                self._call.resize(_size())
                continue
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._end_signals += 1
            if self._end_signals >= _MAX_END_SIGNALS:
                raise SystemExit(128 + number)
            name = signal.Signals(number).name.removeprefix("SIG")
            if not self._call.signal(name):
                self._early.append(name)


def _read_input() -> bytes:
    try:
        return os.read(0, _PIECE_BYTES)
    except OSError:
        return b""  # the terminal is gone, or belongs to another process group


# -- this process's terminal and signals ----------------------------------------------------------------
def _size() -> TerminalSize:
    """Return the size of the terminal, on whichever standard stream it is."""
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(descriptor)
            if columns and rows:
                return TerminalSize(rows, columns)
    return TerminalSize()


@contextlib.contextmanager
def _raw() -> Generator[None]:
    """Pass every key, Ctrl-C included, to the command's terminal.  No effect if standard input is not a terminal."""
    try:
        before = termios.tcgetattr(0)
    except termios.error:
        yield
        return
    try:
        tty.setraw(0)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals(*, with_size: bool) -> Generator[socket.socket]:
    """Yield a socket from which the number of each signal for the command can be read."""
    wanted = [*_PASSED_ON, *([signal.SIGWINCH] if with_size else [])]
    with wakeup_socket() as ours, handlers(dict.fromkeys(wanted, lambda *_: None)):
        yield ours
