"""The blocking client of the control socket, used by the command line and by `Workspace`.

Does not import trio or anyio, which would slow down the start of every command.  `async_connection` is the client for
asyncio and trio.

`daemon_end` waits until a daemon has exited, because it answers "unmount" before its name and mountpoint are free.
"""

from __future__ import annotations

import contextlib
import errno as errno_numbers
import functools
import json
import os
import select
import socket
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec

from vfsd.client.quick_call import BegunCall
from vfsd.wire.messages import ATTEMPTS, RECEIVE_BYTES, CancelState, ClosingError, Exchange, LineBuffer, ProgressReport
from vfsd.wire.messages import ControlError as ControlError  # noqa: PLC0414 docs/python.md names it here
from vfsd.wire.sockets import connect, is_closed_by_peer

if TYPE_CHECKING:
    from vfsd.client.requests import RemoteCall

T = TypeVar("T")


def _no_daemon(socket_path: str, error: OSError) -> OSError:
    """Return the exception for a failed connection to `socket_path`."""
    if error.errno in (errno_numbers.ENOENT, errno_numbers.ECONNREFUSED):
        return ConnectionRefusedError(f"no daemon answers at {socket_path}: it is not running")
    if error.errno in (errno_numbers.EACCES, errno_numbers.EPERM):
        return PermissionError(f"this user may not use the control socket {socket_path}")
    return ConnectionError(f"cannot connect to {socket_path}: {error.strerror or error}")


def connected(socket_path: str, timeout_s: float | None = None, *, instance: str = "") -> socket.socket:
    """Connect to a daemon.  ConnectionError or PermissionError.

    Without `timeout_s`, wait for the replacement of a daemon that died, if a keeper starts one.  With `timeout_s` 0,
    BlockingIOError if the daemon's backlog is full.  NotMountedError if the socket is of another workspace than
    `instance` by now; "" is any.
    """
    sock = _connected(socket_path, timeout_s)
    if instance:
        from vfsd.machine.runtime import check_instance  # noqa: PLC0415 (start-up: commands look the workspace up anew)

        try:
            check_instance(socket_path, instance)
        except BaseException:
            sock.close()
            raise
    return sock


def _connected(socket_path: str, timeout_s: float | None) -> socket.socket:
    try:
        return connect(socket_path, timeout_s)
    except OSError as error:
        if timeout_s == 0 and isinstance(error, BlockingIOError):
            raise
        if timeout_s is None and isinstance(error, ConnectionRefusedError):
            from vfsd.machine.runtime import is_restarted  # noqa: PLC0415 (start-up: only errors need it)

            if is_restarted(socket_path):
                return connect(socket_path, timeout_s)
        raise _no_daemon(socket_path, error) from error


def vanished(socket_path: str, method: str) -> ConnectionError:
    """Return the exception for a connection that ended before the answer."""
    return ConnectionResetError(f"the daemon at {socket_path} went away before it answered {method!r}")


def timed_out(socket_path: str, method: str, timeout_s: float | None) -> TimeoutError:
    """Return the exception for a silence of `timeout_s`."""
    return TimeoutError(f"no answer to {method!r} from {socket_path} for {timeout_s or 0:g} s")


class ControlClient:
    """Calls a daemon's methods, one at a time, over one connection that is opened on demand.  For one thread.

    `timeout_s` bounds each silence (no answer, no progress, no output), not the whole call.  `instance` is as for
    `connected`.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        timeout_s: float | None = None,
        begun: BegunCall | None = None,
        instance: str = "",
    ) -> None:
        """`begun` is a call that was already sent: the first `call`, which must be the same one, continues it."""
        self._path = socket_path
        self._instance = instance
        self._timeout_s = timeout_s
        self._sock: socket.socket | None = None
        self._begun = begun
        self._lines = LineBuffer()
        self._last_id = 0
        self._running: Exchange | None = None  # the last one
        self._is_sent = False  # all of its request
        self._is_cancel_wanted = False
        self.on_cancel_state: Callable[[CancelState], object] | None = None
        # Readable after a signal (signal.set_wakeup_fd): whatever waits for the daemon lets the signal's handler run.
        self.wakeup: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def call(
        self,
        method: str,
        params: msgspec.Struct | None = None,
        *,
        on_progress: Callable[[ProgressReport], object] | None = None,
        on_output: Callable[[bytes], object] | None = None,
    ) -> Any:
        """Call `method` and return the result struct that its operation declares.  `params` None means the defaults.

        ControlError for an error answer, ConnectionError if the daemon does not answer or goes away, TimeoutError after
        `timeout_s` of silence.  Any other exception (of a callback, or KeyboardInterrupt) closes the connection, so the
        daemon cancels the call; the next call opens another connection.
        """
        self._is_cancel_wanted = False
        for _ in range(ATTEMPTS):
            try:
                self._last_id += 1
                return self._call(Exchange(self._last_id, method, params, on_progress, on_output))
            except ClosingError:
                continue
        raise vanished(self._path, method)

    def run(self, call: RemoteCall[T]) -> T:
        """Send `call` and return its converted answer.  Errors as for `call`."""
        answer = self.call(call.method, call.params, on_progress=call.on_progress, on_output=call.on_output)
        return call.result(answer)

    def stream(self, call: RemoteCall[Any]) -> Generator[bytes]:
        """Send `call` and yield its output as it arrives, until it is answered.  Errors as for `call`.

        Closing the iterator closes the connection, so the daemon cancels the call.
        """
        pieces: list[bytes] = []
        self._last_id += 1
        exchange = Exchange(self._last_id, call.method, call.params, None, pieces.append)
        self._is_sent = False
        self._running = exchange
        try:
            sock = self._connected()
            self._send(sock, exchange)
            self._is_sent = True
            while not exchange.done:
                exchange.take(self._next_line(sock, exchange))
                yield from pieces
                pieces.clear()
        finally:
            self.close()

    def cancel(self) -> None:
        """Ask the daemon to stop the running call.

        The call then raises ControlError (ECANCELED) if it was stopped and has changed nothing; else it completes.  A
        signal handler may call this method, which does not wait.  `on_cancel_state` is called with the daemon's answer.
        """
        self._is_cancel_wanted = True
        self._send_cancel()

    def _send_cancel(self) -> None:
        exchange = self._running
        if self._sock is None or exchange is None or exchange.done or not self._is_sent:
            return
        with contextlib.suppress(OSError):
            self._sock.send(exchange.cancel_request, socket.MSG_DONTWAIT)

    @property
    def cancel_state(self) -> CancelState | None:
        """The daemon's answer to the last `cancel`; None if it has not answered yet."""
        return None if self._running is None else self._running.cancel_state

    def _call(self, exchange: Exchange) -> Any:
        self._is_sent = False
        self._running = exchange
        try:
            if self._begun is None:
                sock = self._connected()
                self._send(sock, exchange)
            else:
                sock = self._continued(self._begun, exchange)
            self._is_sent = True
            if self._is_cancel_wanted:  # `cancel` was called before the request was sent
                self._send_cancel()
            while not exchange.done:
                is_reported = exchange.cancel_state is not None
                exchange.take(self._next_line(sock, exchange))
                if exchange.cancel_state is not None and not is_reported and self.on_cancel_state is not None:
                    self.on_cancel_state(exchange.cancel_state)
        finally:
            # The connection can be reused after an error answer, too.
            if not exchange.done:
                self.close()
        return exchange.result

    def _continued(self, begun: BegunCall, exchange: Exchange) -> socket.socket:
        """Take over the connection of `begun`.  ConnectionError if it is another call: nothing is run twice."""
        self._begun = None
        if begun.socket_path != self._path or json.loads(begun.request) != json.loads(exchange.request):
            begun.close()
            raise vanished(begun.socket_path, exchange.method)
        self._sock = begun.sock
        self._sock.settimeout(self._timeout_s)
        self._lines = LineBuffer()
        self._lines.feed(begun.received)
        self._is_sent = True
        begun.release_signals()
        return self._sock

    def _connected(self) -> socket.socket:
        if self._sock is not None and is_closed_by_peer(self._sock):
            self.close()  # the daemon closes idle connections, and may have been restarted
        if self._sock is None:
            self._sock = connected(self._path, self._timeout_s, instance=self._instance)
            self._lines = LineBuffer()
        return self._sock

    def _send(self, sock: socket.socket, exchange: Exchange) -> None:
        try:
            sock.sendall(exchange.request)
        except TimeoutError:
            raise timed_out(self._path, exchange.method, self._timeout_s) from None
        except ConnectionError:
            pass  # refused: the daemon's message can still be read

    def _next_line(self, sock: socket.socket, exchange: Exchange) -> bytes:
        while (line := self._lines.next_line()) is None:
            if self.wakeup is not None:
                self._wait(sock, self.wakeup, exchange)
            try:
                data = sock.recv(RECEIVE_BYTES)
            except TimeoutError:
                raise timed_out(self._path, exchange.method, self._timeout_s) from None
            except ConnectionError:
                data = b""
            if not data:
                raise vanished(self._path, exchange.method)
            self._lines.feed(data)
        return line

    def _wait(self, sock: socket.socket, wakeup: socket.socket, exchange: Exchange) -> None:
        """Wait until `sock` is readable; the handlers of signals run meanwhile.

        A signal interrupts recv(2) only if it arrives during the call and in this thread.  If it arrives after Python
        has looked for signals and before the call, its handler would run only when the daemon has answered.
        """
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        timeout_ms = None if self._timeout_s is None else self._timeout_s * 1000
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(timeout_ms)}
            if not ready:
                raise timed_out(self._path, exchange.method, self._timeout_s)
            if wakeup.fileno() in ready:
                wakeup.recv(RECEIVE_BYTES)
            if sock.fileno() in ready:
                return


# After the unmount a daemon only removes some files.
END_TIMEOUT_S: Final = 10.0
# A daemon whose mount was detached while in use serves the programs that use it.  Some only look at every mount (df).
HELD_TIMEOUT_S: Final = 1.0


@contextlib.contextmanager
def daemon_end(pid: int) -> Iterator[Callable[..., None]]:
    """Watch process `pid`, and yield a function that waits until it has exited, for at most `timeout_s` (10) seconds.

    The process must be alive on entry: later its number may belong to another process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        # The process is gone, or the kernel or sandbox has no pidfd_open(2): do not wait.
        yield lambda _timeout_s=0: None
        return
    try:
        yield functools.partial(_wait_readable, descriptor)
    finally:
        os.close(descriptor)


def _wait_readable(descriptor: int, timeout_s: float = END_TIMEOUT_S) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)  # pidfd_open(2): readable once the process has terminated
    poll.poll(timeout_s * 1000)
