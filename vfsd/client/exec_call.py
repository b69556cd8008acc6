"""ExecCall: the client's side of one `exec`, for a loop that also watches a terminal and signals.

It does I/O only on its connection.  `receive` blocks until the daemon has sent something; sending blocks only briefly.
For one thread.
"""

from __future__ import annotations

from typing import Final

import msgspec

from vfsd.client.connection import connected, vanished
from vfsd.operations.exec import (
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
    TerminalSize,
    cost,
)
from vfsd.wire.exchange import RECEIVE_BYTES, ControlError, Exchange, LineBuffer
from vfsd.wire.messages import Request

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
