"""Commands in a workspace: `WorkspaceExecutor` for `protocol.tools`, and `ExecCall` with live input and output.

    context = ToolContext(workspace.filesystem, executor=workspace.executor)
    TOOLS["shell"].call({"command": "make test"}, context)

So the tools `shell` and `python` run where `vfsd exec` does: in the sandbox, in the container, or on this host.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from protocol.execution.executor import DEFAULT_OUTPUT_BYTES, DEFAULT_TIMEOUT_S, ExecResult, check_words
from vfsd.client.connection import ControlClient, connected, vanished
from vfsd.client.requests import RemoteCall
from vfsd.operations.fs import (
    OUTPUT,
    STARTED,
    ExecEnded,
    ExecInputParams,
    ExecMoreParams,
    ExecOutput,
    ExecParams,
    ExecResizeParams,
    ExecSignalParams,
    ExecStarted,
    FsExecParams,
    FsExecResult,
    TerminalSize,
    cost,
)
from vfsd.wire.messages import RECEIVE_BYTES, ControlError, Exchange, LineBuffer, Request, wire_path


class WorkspaceExecutor:
    """Implements `protocol.execution.executor.Executor`; may be used from any thread.

    Errors besides the contract's: OSError (EOPNOTSUPP) if the workspace was mounted without a way to run commands,
    ConnectionError if its daemon is gone.
    """

    def __init__(self, socket_path: str, instance: str = "") -> None:
        self._socket_path = socket_path
        self._instance = instance

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        output_limit_bytes: int = DEFAULT_OUTPUT_BYTES,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `Executor`.  `stdin` and `argv` together are limited to 512 KiB."""
        with ControlClient(self._socket_path, instance=self._instance) as client:
            return client.run(exec_call(argv, cwd, env, timeout_s, output_limit_bytes, stdin))


def caller_environment() -> dict[str, str]:
    """Return the environment of this process, as commands on this host get it; encoded like paths."""
    return {wire_path(name): wire_path(value) for name, value in os.environb.items()}


def current_umask() -> int:
    """Return the umask of this thread, without changing it for the others as umask(2) would."""
    with open("/proc/thread-self/status", encoding="utf-8", errors="replace") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def exec_call(
    argv: Sequence[str],
    cwd: str,
    env: Mapping[str, str] | None,
    timeout_s: float,
    output_limit_bytes: int,
    stdin: bytes,
) -> RemoteCall[ExecResult]:
    """Build the request of `Executor.run`."""
    check_words(argv, stdin)
    params = FsExecParams(
        argv=[wire_path(os.fsencode(word)) for word in argv],
        cwd=wire_path(os.fsencode(cwd)),
        env=dict(env or {}),
        environment=caller_environment(),
        timeout_s=timeout_s,
        output_limit_bytes=output_limit_bytes,
        stdin=stdin,
        stream=True,  # an answer of 32 MiB in one piece would stop every other thread while it is decoded
    )
    pieces: list[bytes] = []
    return RemoteCall("fs.exec", params, lambda done: _result(done, pieces), on_output=pieces.append)


def _result(done: FsExecResult, pieces: list[bytes]) -> ExecResult:
    """Convert the answer, with the output that preceded it.  A piece is of one stream only."""
    stdout, stderr = done.stdout, done.stderr
    if not isinstance(done.streamed_stdout_bytes, msgspec.UnsetType):
        left, count = done.streamed_stdout_bytes, 0
        while left > 0:
            left -= len(pieces[count])
            count += 1
        stdout, stderr = b"".join(pieces[:count]), b"".join(pieces[count:])
    return ExecResult(done.exit_status, stdout, stderr, done.timed_out, done.truncated)


# -- a command with live input and output ----------------------------------------------------------
_EXEC_ID: Final = 1


class _Notification(msgspec.Struct):
    method: str | None = None
    params: msgspec.Raw = msgspec.Raw(b"{}")


_notifications = msgspec.json.Decoder(_Notification)


class ExecCall:
    """A command that the daemon at `socket_path` runs, with its own connection; closing that ends the command.

    `ended` is set once the command has ended.
    """

    def __init__(self, socket_path: str, params: ExecParams, instance: str = "") -> None:
        self._path = socket_path
        self._exchange = Exchange(_EXEC_ID, "exec", params)
        self._input: Exchange | None = None  # input that the daemon has not taken yet
        self._last_id = _EXEC_ID
        self._takes_input = params.input
        self._window_bytes = params.window_bytes
        self._done_bytes = 0
        self._session: str | None = None
        self._lines = LineBuffer()
        self.ended: ExecEnded | None = None
        self._sock = connected(socket_path, instance=instance)
        self._send(self._exchange.request)

    def close(self) -> None:
        """Close the connection, which kills a running command."""
        self._sock.close()

    def fileno(self) -> int:
        return self._sock.fileno()

    # -- in -------------------------------------------------------------------------------------------
    def receive(self) -> list[ExecOutput]:
        """Return the output that has arrived.  Blocks until the daemon has sent something.

        ControlError if the call failed (FileNotFoundError for a missing program, and so on).  ConnectionError if the
        daemon closed the connection.
        """
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise vanished(self._path, "exec")
        self._lines.feed(data)
        found = []
        while (line := self._lines.next_line()) is not None and self.ended is None:
            output = self._take(line)
            if output is not None:
                found.append(output)
        return found

    def _take(self, line: bytes) -> ExecOutput | None:
        notification = _notifications.decode(line)
        if notification.method == OUTPUT:
            return msgspec.json.decode(notification.params, type=ExecOutput)
        if notification.method == STARTED:
            self._session = msgspec.json.decode(notification.params, type=ExecStarted).session
            return None
        self._exchange.take(line)
        if self._exchange.done:
            self.ended = self._exchange.result
        elif self._input is not None:
            self._take_answer(self._input, line)
        return None

    def _take_answer(self, exchange: Exchange, line: bytes) -> None:
        try:
            exchange.take(line)
        except ControlError:
            self._takes_input = False  # the command has closed its input or ended
        if exchange.done:
            self._input = None

    # -- out ------------------------------------------------------------------------------------------
    @property
    def is_started(self) -> bool:
        """Whether the daemon has reported that the command runs."""
        return self._session is not None

    @property
    def takes_input(self) -> bool:
        """Whether the command may read more input: it has not closed it, and `send_input` has not ended it."""
        return self._takes_input

    @property
    def wants_input(self) -> bool:
        """Whether `send_input` may be called: the command was started and has taken the previous input."""
        return self._takes_input and self._session is not None and self._input is None

    def send_input(self, data: bytes) -> None:
        """Send input; b"" ends it."""
        assert self.wants_input
        assert self._session is not None
        self._last_id += 1
        params = ExecInputParams(session=self._session, data=data, end=not data)
        self._input = Exchange(self._last_id, "exec.input", params)
        self._takes_input = bool(data)
        self._send(self._input.request)

    def done_with(self, output: bytes) -> None:
        """Acknowledge `output`, a whole piece as it arrived, so that the daemon may send more."""
        self._done_bytes += cost(output)
        # One message for several pieces, sent early enough that the command does not wait for it.
        if self._session is not None and self._done_bytes >= self._window_bytes // 4:
            self._notify("exec.more", ExecMoreParams(session=self._session, taken_bytes=self._done_bytes))
            self._done_bytes = 0

    def signal(self, name: str) -> bool:
        """Send a signal ("INT", ...) to the command; False if the command has not started yet."""
        if self._session is None:
            return False
        self._notify("exec.signal", ExecSignalParams(session=self._session, signal=name))
        return True

    def resize(self, size: TerminalSize) -> None:
        """Change the size of the command's terminal."""
        if self._session is not None:
            self._notify("exec.resize", ExecResizeParams(session=self._session, size=size))

    def _notify(self, method: str, params: msgspec.Struct) -> None:
        self._send(msgspec.json.encode(Request("2.0", method, msgspec.Raw(msgspec.json.encode(params)))) + b"\n")

    def _send(self, line: bytes) -> None:
        try:
            self._sock.sendall(line)
        except ConnectionError:
            pass  # `receive` will report why it was closed


# -- content that does not fit into a request ------------------------------------------------------
# Fits in a request (1 MiB) as base64, with room for the path.  Longer content is passed in a file.
INLINE_BYTES: Final = 512 * 1024


@contextmanager
def readable_by_daemon(socket_path: str | None) -> Iterator[Any]:
    """Yield an empty temporary file that the user of the daemon at `socket_path` can read, too.

    None stands for this process's user.
    """
    with tempfile.NamedTemporaryFile(prefix="vfsd-fs-") as file:
        owner = os.stat(socket_path).st_uid if socket_path is not None else 0
        if os.geteuid() == 0 and owner:
            os.fchown(file.fileno(), owner, -1)
        yield file
