"""The fork server: a process that has a daemon's modules loaded, and forks one for each mount that connects.

Serves mounts of the kind of the process that started it (`vfsd.machine.daemon_start`, which has the messages), so a
forked process needs nothing of the mount but its environment and its log.  The server only accepts, forks and reaps;
the new process talks with the mount.

The server ends after ten minutes without a mount, when its socket is removed or replaced, and at the first mount after
the installed files, its cgroup or its limits changed.  Its daemons do not notice.

Threading: one thread and no event loop, so that fork(2) is safe.  No call waits for a client.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from typing import Final

from protocol import compiled
from vfsd.daemon.daemon import run_daemon
from vfsd.daemon.starting import serve_kept
from vfsd.machine.daemon_start import DESCRIPTORS, GO, PACKET_BYTES, ForkedStart
from vfsd.wire.options import decode_options
from vfsd.wire.sockets import peer_credentials, receive_descriptors

_IDLE_S: Final = 600.0
_SOCKET_CHECK_S: Final = 5.0  # how soon the server ends after its socket was removed
_MOUNT_TIMEOUT_S: Final = 30.0  # the mount answers at once, or has ended
_PACKAGES: Final = ("protocol", "vfsd")


# -- the server -------------------------------------------------------------------------------------
def serve(path: str, is_current: Callable[[], bool]) -> socket.socket | None:
    """Serve at the Unix socket `path` until the server should end: None.  In a forked process, return its connection.

    `is_current`: whether a forked process is still as one that the mount would start.  OSError, which ends the server
    too, if the system refuses one more process or descriptor.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a server that was killed: only one has the lock
    children = _Children()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as removal:
        listener.bind(path)
        identity = _identity(path)
        removal.callback(lambda: os.unlink(path) if _identity(path) == identity else None)
        os.chmod(path, 0o600)
        listener.listen(128)
        listener.setblocking(False)
        children.poll.register(listener, select.POLLIN)
        end = time.monotonic() + _IDLE_S
        while _identity(path) == identity and (remaining_s := end - time.monotonic()) > 0:
            for descriptor, _ in children.poll.poll(min(remaining_s, _SOCKET_CHECK_S) * 1000):
                if children.attend(descriptor) or (connection := _accept(listener)) is None:
                    continue
                if not is_current():
                    connection.close()
                    return None
                end = time.monotonic() + _IDLE_S
                pid = os.fork()
                if pid == 0:
                    removal.pop_all()
                    children.close()
                    return connection
                children.add(pid, connection)
    return None


class _Children:
    """The forked processes, and the connections of their mounts.  `poll` has the descriptors of both."""

    def __init__(self) -> None:
        self.poll = select.poll()
        self._processes: dict[int, tuple[int, socket.socket]] = {}  # process id and connection, by pidfd
        self._connections: dict[int, socket.socket] = {}  # to mounts that have not hung up

    def add(self, pid: int, connection: socket.socket) -> None:
        pidfd = os.pidfd_open(pid)
        self._processes[pidfd] = pid, connection
        self._connections[connection.fileno()] = connection
        self.poll.register(pidfd, select.POLLIN)
        self.poll.register(connection, 0)  # the new process reads it; poll(2) reports that the mount hung up

    def attend(self, descriptor: int) -> bool:
        """Reap the process that ended, or close the connection that the mount closed; return whether it was one."""
        if descriptor in self._processes:
            pid, connection = self._processes.pop(descriptor)
            self.poll.unregister(descriptor)
            os.close(descriptor)
            exit_status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):  # the mount has hung up
                connection.send(b"%d" % exit_status, socket.MSG_DONTWAIT)
            return True
        if descriptor in self._connections:
            self.poll.unregister(descriptor)
            self._connections.pop(descriptor).close()
            return True
        return False

    def close(self) -> None:
        """In a new process: close what belongs to the others."""
        for pidfd in self._processes:
            os.close(pidfd)
        for connection in self._connections.values():
            connection.close()


def _accept(listener: socket.socket) -> socket.socket | None:
    """Return the connection of a process of this user."""
    with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
        connection, _ = listener.accept()
        if peer_credentials(connection).uid == os.geteuid():
            return connection
        connection.close()
    return None


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# -- a forked process -------------------------------------------------------------------------------
def run(connection: socket.socket) -> int:
    """Become the daemon that the mount at the other end asks for; return its exit status."""
    with connection:
        connection.settimeout(_MOUNT_TIMEOUT_S)
        starter = peer_credentials(connection).pid
        try:
            _, descriptors = receive_descriptors(connection, PACKET_BYTES, DESCRIPTORS)
            start_fd, report_fd, log_fd = descriptors
            with open(start_fd, "rb") as file:
                file.seek(0)
                start: ForkedStart = json.load(file)
            _take_over(start, log_fd)
            pidfd = os.pidfd_open(os.getpid())
            socket.send_fds(connection, [b"forked"], [pidfd])
            os.close(pidfd)
            if connection.recv(PACKET_BYTES) != GO:
                return 1
        except (OSError, ValueError):  # the mount has stopped waiting, or is none
            return 1
    serve_daemon = functools.partial(run_daemon, started_by="the fork server", starter=starter)
    return serve_kept(decode_options(start["options"].encode()), report_fd, serve_daemon)


def _take_over(start: ForkedStart, log_fd: int) -> None:
    os.setsid()
    for standard in (1, 2):
        os.dup2(log_fd, standard)
    os.close(log_fd)
    os.environ.clear()
    os.environ.update(start["environment"])
    time.tzset()
    tempfile.tempdir = None
    sys.argv[1:] = []


# -- the installation -------------------------------------------------------------------------------
class LoadedFiles:
    """The files of the loaded modules, the interpreter and the directories of installed packages.

    `started_ns`: when the imports began.  A file that is as new may have changed after it was read.
    """

    def __init__(self, started_ns: int) -> None:
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in _PACKAGES]
        files = {path for module in modules if (path := getattr(module, "__file__", None))}
        installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        files.update(compiled.sources())
        paths = files | {path for path in installed if os.path.isdir(path)} | {os.path.realpath(sys.executable)}
        self._stats = {path: _stat(path) for path in paths}
        self._are_older = all(stat is not None and stat[0] < started_ns for stat in self._stats.values())

    def changed(self) -> bool:
        """Whether a file changed, or may have changed, since it was imported."""
        return not self._are_older or any(_stat(path) != stat for path, stat in self._stats.items())


def _stat(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
