"""The mount's side of the fork server: ask it for a daemon, and start the server after the first mount.

A fork server serves the mounts of one kind (`vfsd.machine.daemon_start.process_kind`), which is in the name of its
socket.  A server that is missing, busy or stopped costs a mount at most about a second: `start` returns the reason, and
the daemon is started directly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Final

from protocol.linux.regular_file import open_regular
from vfsd.machine.daemon_start import (
    GO,
    PACKET_BYTES,
    ForkedStart,
    daemon_environment,
    interpreter_variables,
    process_kind,
)
from vfsd.machine.resources import available_memory
from vfsd.machine.runtime import ensure_socket_dir
from vfsd.wire.handshake import encode_options
from vfsd.wire.options import MountOptions
from vfsd.wire.sockets import peer_credentials, receive_descriptors

_SWITCH: Final = "VFSD_FORK_SERVER"
_SOCKET_PREFIX: Final = ".fork-server-"  # before the kind
_LOCK_SUFFIX: Final = ".lock"  # after the name of the socket
_ANSWER_TIMEOUT_S: Final = 1.0
_MODULE: Final = "vfsd.daemon.keeper"
# A server in a small cgroup would use memory that the workspaces need.
_MEMORY_MIN_BYTES: Final = 1 << 30
_ADDRESS_BYTES_MAX: Final = 107  # the address of a Unix socket (unix(7))
_SERVERS_MAX: Final = 4  # in one runtime directory; each keeps about 40 MB for ten minutes


class ForkedProcess:
    """A daemon that the fork server forked."""

    def __init__(self, pidfd: int, connection: socket.socket) -> None:
        self._pidfd = pidfd
        self._connection = connection
        self._status: int | None = None

    @property
    def status(self) -> int | None:
        return self._status

    def wait_ended(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            return False
        if self._status is None:
            for _ in range(2):  # an unread GO resets the connection; the next call returns the message
                with contextlib.suppress(OSError, ValueError):  # the server died: the status stays unknown
                    self._status = int(self._connection.recv(PACKET_BYTES))
                    break
        return True

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def release(self) -> None:
        os.close(self._pidfd)
        self._connection.close()


def is_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether $VFSD_FORK_SERVER is "on" (the default) or "off".  OSError for other values."""
    value = environ.get(_SWITCH) or "on"
    if value not in ("on", "off"):
        raise OSError(errno.EINVAL, f"${_SWITCH} is {value!r}: set it to on or off")
    return value == "on"


def socket_path(environment: Mapping[str, str]) -> str:
    """Return the path of the socket of the fork server for processes that the calling thread starts."""
    return os.path.join(ensure_socket_dir(), _SOCKET_PREFIX + process_kind(environment))


def start(options: MountOptions, report_fd: int, log_fd: int) -> ForkedProcess | str:
    """Have the fork server start a daemon, or return why it cannot."""
    environment = daemon_environment()
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect(socket_path(environment))
            if peer_credentials(connection).uid != os.geteuid():
                return "the fork server belongs to another user"
            with open(os.memfd_create("vfsd-start"), "w+", encoding="ascii") as file:
                # JSON of the standard library keeps the lone surrogates that represent bytes that are not UTF-8.
                json.dump(ForkedStart(options=encode_options(options).decode(), environment=environment), file)
                file.flush()
                socket.send_fds(connection, [b"start"], [file.fileno(), report_fd, log_fd])
            _, descriptors = receive_descriptors(connection, PACKET_BYTES, 1)
            if not descriptors:
                return "the fork server ended"
            stack.callback(os.close, descriptors[0])
            connection.send(GO)
        except TimeoutError:
            return "the fork server does not answer"
        except (FileNotFoundError, ConnectionRefusedError):
            return "no fork server is running"
        except ConnectionError:
            return "the fork server ended"
        except OSError as error:
            return f"the fork server cannot be used: {error}"
        stack.pop_all()
        return ForkedProcess(descriptors[0], connection)


# -- the server's start -----------------------------------------------------------------------------
def ensure_server() -> None:
    """Start a fork server in the background, unless one runs or this process should not start one.

    A server does not outlive the mounts of a private mount namespace, and does not use the memory of a small cgroup.
    Errors are ignored: the next mount starts its daemon directly.
    """
    with contextlib.suppress(OSError):
        if is_in_private_mounts() or available_memory() < _MEMORY_MIN_BYTES:
            return
        environment = daemon_environment()
        path = socket_path(environment)
        if len(os.fsencode(path)) > _ADDRESS_BYTES_MAX:
            return
        lock_fd = _lock(path)
        try:
            if sum(map(_is_served, _known_sockets(os.path.dirname(path)) - {path})) >= _SERVERS_MAX:
                return
            server = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(lock_fd), path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lock_fd,),
                cwd="/",
                start_new_session=True,
                env=interpreter_variables(environment),  # the others, such as credentials, are of this mount only
            )
        finally:
            os.close(lock_fd)  # the server holds the lock
        threading.Thread(target=server.wait, name="vfsd-fork-server", daemon=True).start()


def is_in_private_mounts() -> bool:
    """Return whether this process is in a mount namespace that is not that of process 1.

    A process that stays in such a namespace keeps the mounts in it alive.
    """
    try:
        return os.readlink("/proc/1/ns/mnt") != os.readlink("/proc/thread-self/ns/mnt")
    except OSError:
        # Only a privileged process may read the link of process 1.  Others need a user namespace for one of their own.
        with open("/proc/thread-self/uid_map", encoding="ascii") as file:
            return file.read().split() != ["0", "0", "4294967295"]


def _lock(path: str) -> int:
    """Lock the fork server's socket at `path`; return the lock's descriptor.  BlockingIOError if a server runs."""
    lock_fd = open_regular(path + _LOCK_SUFFIX, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _known_sockets(directory: str) -> set[str]:
    """Return the paths of the sockets for which there is a lock.  A server has its lock before its socket."""
    names = (name for name in os.listdir(directory) if name.startswith(_SOCKET_PREFIX) and name.endswith(_LOCK_SUFFIX))
    return {os.path.join(directory, name.removesuffix(_LOCK_SUFFIX)) for name in names}


def _is_served(path: str) -> bool:
    """Whether a server has this socket, or is being started for it.  Removes what an ended server left."""
    try:
        lock_fd = _lock(path)
    except BlockingIOError:
        return True
    for left in (path, path + _LOCK_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)  # a server that is started meanwhile ends when a third one replaces its socket
    os.close(lock_fd)
    return False
