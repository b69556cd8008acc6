"""The mount's side of the fork server: ask it for a daemon, and start the server after the first mount.

A server that is missing, busy, stopped or different costs a mount at most about a second: `start` returns the reason,
and the daemon is started directly.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Final

from protocol.linux.regular_file import open_regular
from vfsd.machine import memory_limits
from vfsd.machine.daemon_start import daemon_environment
from vfsd.machine.process_properties import (
    RESOURCES,
    current_umask,
    interpreter_key,
    is_in_private_mounts,
    process_properties,
)
from vfsd.machine.runtime import ensure_socket_dir
from vfsd.wire import fork_messages
from vfsd.wire.fork_messages import Accepted, Ended, Forked, Go, Hello, Message, Refused, Start
from vfsd.wire.handshake import encode_options
from vfsd.wire.options import MountOptions
from vfsd.wire.sockets import peer_credentials

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
            for _ in range(2):  # an unread Go resets the connection; the next call returns the message
                with contextlib.suppress(OSError, ValueError):  # the server died: the status stays unknown
                    message, _descriptors = _receive(self._connection)
                    if isinstance(message, Ended):
                        self._status = message.status
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
    value = environ.get(fork_messages.SWITCH) or "on"
    if value not in ("on", "off"):
        raise OSError(errno.EINVAL, f"${fork_messages.SWITCH} is {value!r}: set it to on or off")
    return value == "on"


def start(options: MountOptions, report_fd: int, log_fd: int) -> ForkedProcess | str:
    """Have the fork server start a daemon, or return why it cannot."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        process = _request(connection, options, report_fd, log_fd)
    except TimeoutError:
        process = "the fork server does not answer"
    except (FileNotFoundError, ConnectionRefusedError):
        process = "no fork server is running"
    except (OSError, ValueError) as error:
        process = f"the fork server cannot be used: {error}"
    except BaseException:
        connection.close()
        raise
    if isinstance(process, str):
        connection.close()
    return process


def _request(connection: socket.socket, options: MountOptions, report_fd: int, log_fd: int) -> ForkedProcess | str:
    environment = daemon_environment()
    properties = process_properties(environment)
    connection.connect(socket_path(properties))
    if peer_credentials(connection).uid != os.geteuid():
        return "the fork server belongs to another user"
    connection.send(fork_messages.encode(Hello(properties)))
    answer, _ = _receive(connection)
    if isinstance(answer, Refused):
        return answer.reason
    if not isinstance(answer, Accepted):
        return "the fork server ended"
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [report_fd, log_fd]))]
    connection.sendmsg([fork_messages.encode(_start_message(options, environment))], rights)
    answer, descriptors = _receive(connection)
    if isinstance(answer, Refused):
        return answer.reason
    if not isinstance(answer, Forked) or len(descriptors) != 1:
        return "the fork server ended"
    process = ForkedProcess(descriptors[0], connection)
    try:
        connection.send(fork_messages.encode(Go()))
    except OSError:
        process.release()
        return "the forked process ended"
    return process


def socket_path(properties: Mapping[str, str]) -> str:
    """Return the path of the socket of the fork server for processes with these properties."""
    return os.path.join(ensure_socket_dir(), fork_messages.SOCKET_PREFIX + interpreter_key(properties))


def _start_message(options: MountOptions, environment: dict[str, str]) -> Start:
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        oom_score_adj = int(file.read())
    return Start(
        options=encode_options(options).decode(),
        environment=environment,
        umask=current_umask(),
        soft_limits={each: resource.getrlimit(each)[0] for each in RESOURCES},
        cpus=sorted(os.sched_getaffinity(0)),
        blocked_signals=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        oom_score_adj=oom_score_adj,
    )


def _receive(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """Return one message and its descriptors; None if the other end closed the connection."""
    size = socket.CMSG_SPACE(array.array("i").itemsize)
    data, ancillary, _, _ = connection.recvmsg(fork_messages.MAX_BYTES, size, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return (fork_messages.decode(data) if data else None), list(descriptors)


# -- the server's start -----------------------------------------------------------------------------
def ensure_server() -> None:
    """Start a fork server in the background, unless one runs or this process should not start one.

    A server does not outlive the mounts of a private mount namespace, and does not use the memory of a small cgroup.
    Errors are ignored: the next mount starts its daemon directly.
    """
    with contextlib.suppress(OSError):
        if is_in_private_mounts() or memory_limits.available_memory() < _MEMORY_MIN_BYTES:
            return
        environment = daemon_environment()
        path = socket_path(process_properties(environment))
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
                env=environment,
            )
        finally:
            os.close(lock_fd)  # the server holds the lock
        threading.Thread(target=server.wait, name="vfsd-fork-server", daemon=True).start()


def _lock(path: str) -> int:
    """Lock the fork server's socket at `path`; return the lock's descriptor.  BlockingIOError if a server runs."""
    lock_fd = open_regular(path + fork_messages.LOCK_SUFFIX, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _known_sockets(directory: str) -> set[str]:
    """Return the paths of the sockets for which there is a lock.  A server has its lock before its socket."""
    prefix, suffix = fork_messages.SOCKET_PREFIX, fork_messages.LOCK_SUFFIX
    names = (name for name in os.listdir(directory) if name.startswith(prefix) and name.endswith(suffix))
    return {os.path.join(directory, name.removesuffix(suffix)) for name in names}


def _is_served(path: str) -> bool:
    """Whether a server has this socket, or is being started for it.  Removes what an ended server left."""
    try:
        lock_fd = _lock(path)
    except BlockingIOError:
        return True
    for left in (path, path + fork_messages.LOCK_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)  # a server that is started meanwhile ends when a third one replaces its socket
    os.close(lock_fd)
    return False
