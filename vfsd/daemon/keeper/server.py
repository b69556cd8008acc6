"""The fork server's loop: fork a process for each daemon to start.

Threading: one thread and no event loop, so that fork(2) is safe.  No call waits for a client.

The server ends after ten minutes without a start, when the installation changes, and when its socket is replaced.  Its
daemons do not notice.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from vfsd.daemon.keeper.loaded_files import LoadedFiles
from vfsd.machine.process_properties import difference
from vfsd.wire import fork_messages
from vfsd.wire.fork_messages import Accepted, Ended, Hello, Refused, Start
from vfsd.wire.sockets import peer_credentials

IDLE_S: Final = 600.0
_SOCKET_CHECK_S: Final = 5.0  # how soon the server ends after its socket was removed
_CONNECTIONS_MAX: Final = 256  # that have not started a daemon yet


@dataclass(frozen=True, slots=True)
class ForkedStart:
    """What the new process has of its start: the connection to the mount, the message, and the descriptors."""

    connection: socket.socket
    start: Start
    report_fd: int
    log_fd: int


class ForkServer:
    """A server at the Unix socket `path`."""

    def __init__(self, path: str, properties: Callable[[], dict[str, str]], files: LoadedFiles) -> None:
        self._path = path
        self._properties = properties
        self._files = files
        self._poll = select.poll()
        self._connections: dict[int, socket.socket] = {}
        self._waiting: dict[int, int] = {}  # the descriptor of the mount's connection, by the child's pid
        self._is_ending = False

    def serve(self, idle_s: float = IDLE_S) -> ForkedStart | None:
        """Serve until the server should end: None.  In a forked process, return the daemon to start."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # of a server that was killed: only one has the lock
        with contextlib.ExitStack() as stack:
            wakeup, wakeup_writer = (stack.enter_context(end) for end in socket.socketpair())
            for end in (wakeup, wakeup_writer):
                end.setblocking(False)
            signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
            signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            identity = _identity(self._path)
            listener.listen(128)
            listener.setblocking(False)
            self._poll.register(listener, select.POLLIN)
            self._poll.register(wakeup, select.POLLIN)
            used_at = time.monotonic()
            while not self._is_ending and _identity(self._path) == identity:
                remaining_s = used_at + idle_s - time.monotonic()
                if remaining_s <= 0:
                    break
                for descriptor, _events in self._poll.poll(min(remaining_s, _SOCKET_CHECK_S) * 1000):
                    if descriptor == listener.fileno():
                        self._accept(listener)
                    elif descriptor == wakeup.fileno():
                        with contextlib.suppress(BlockingIOError):
                            while wakeup.recv(4096):
                                pass
                        self._reap()
                    elif (connection := self._connections.get(descriptor)) is not None:
                        used_at = time.monotonic()
                        forked = self._answer(connection)
                        if forked is not None:
                            signal.set_wakeup_fd(-1)
                            return forked
            if _identity(self._path) == identity:
                os.unlink(self._path)
            for connection in self._connections.values():
                connection.close()
        return None

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if peer_credentials(connection).uid != os.geteuid() or len(self._connections) >= _CONNECTIONS_MAX:
            connection.close()
            return
        connection.setblocking(False)
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _close(self, connection: socket.socket) -> None:
        self._poll.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()

    def _answer(self, connection: socket.socket) -> ForkedStart | None:
        """Answer one message; in a forked process, return the daemon to start."""
        if connection.fileno() in self._waiting.values():  # the new process reads it now; only its end is reported
            for pid in [pid for pid, each in self._waiting.items() if each == connection.fileno()]:
                del self._waiting[pid]
            self._close(connection)
            return None
        descriptors: list[int] = []
        forked: ForkedStart | None = None
        try:
            data, descriptors = _receive(connection)
            message = fork_messages.decode(data) if data else None
            if isinstance(message, Hello):
                connection.send(fork_messages.encode(self._decide(message)))
            elif isinstance(message, Start) and len(descriptors) == fork_messages.DESCRIPTORS:
                forked = self._fork(connection, message, descriptors)
            else:
                self._close(connection)
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._close(connection)
        finally:
            if forked is None:
                for descriptor in descriptors:
                    os.close(descriptor)
        return forked

    def _decide(self, hello: Hello) -> Accepted | Refused:
        if self._files.changed():
            self._is_ending = True
            return Refused("the installation changed since the fork server started")
        name = difference(self._properties(), hello.properties)
        return Accepted() if name is None else Refused(f"the {name} differs from that of the fork server")

    def _fork(self, connection: socket.socket, start: Start, descriptors: list[int]) -> ForkedStart | None:
        """Fork.  None in the server."""
        pid = os.fork()
        if pid == 0:
            for other in self._connections.values():
                if other is not connection:
                    other.close()
            report_fd, log_fd = descriptors
            return ForkedStart(connection, start, report_fd, log_fd)
        self._waiting[pid] = connection.fileno()
        # The new process reads the connection.  The server only learns that the mount closed it (POLLHUP).
        self._poll.modify(connection, 0)
        return None

    def _reap(self) -> None:
        """Reap the children that ended, and report their exit statuses."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            descriptor = self._waiting.pop(pid, None)
            if descriptor is not None:
                connection = self._connections[descriptor]
                with contextlib.suppress(OSError):
                    connection.send(fork_messages.encode(Ended(os.waitstatus_to_exitcode(status))))
                self._close(connection)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return one packet and its descriptors."""
    size = socket.CMSG_SPACE(fork_messages.DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, _, _ = connection.recvmsg(fork_messages.MAX_BYTES, size, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
