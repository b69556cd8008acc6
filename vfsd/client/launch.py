"""Start a daemon in the background, and return when its mount answers.

The daemon is a process in a session of its own, forked by the fork server or a new interpreter.  It shares no state,
threads or terminal with its starter.  It sends start-up errors to its starter over a pipe, and writes everything else
to its log.

A fork server serves the mounts of one kind (`vfsd.machine.daemon_start.process_kind`), which is in the name of its
socket.  It is started after the first mount.  A server that is missing, busy or stopped costs a mount at most about a
second: `start_by_server` returns the reason, and the daemon is started directly.
"""

from __future__ import annotations

import collections
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
import time
from collections.abc import Mapping
from typing import Final, Protocol

from protocol.linux.regular_file import open_regular
from vfsd.machine.daemon_start import (
    GO,
    PACKET_BYTES,
    ForkedStart,
    daemon_environment,
    interpreter_variables,
    process_kind,
    start_interpreter,
)
from vfsd.machine.logs import log_path, open_log, remove_old_logs
from vfsd.machine.mounts import clear_dead_mount
from vfsd.machine.resources import available_memory
from vfsd.machine.runtime import ensure_socket_dir
from vfsd.wire.options import Failed, MountOptions, Ready, decode_report, encode_options
from vfsd.wire.sockets import peer_credentials, receive_descriptors

# Generous: the start may read an archive of gigabytes.
START_TIMEOUT_S: Final = 300.0
# How long a daemon may take to unmount after SIGTERM, before SIGKILL.
STOP_TIMEOUT_S: Final = 5.0
# One that has a container to remove first waits for Podman.  A second Ctrl-C ends the wait.
_REMOVAL_TIMEOUT_S: Final = 60.0
LOG_LINES_QUOTED: Final = 10
# The log explains these: the daemon died or hangs, met an unexpected exception, or sent an invalid report.
_UNEXPECTED: Final = frozenset({errno.EIO, errno.ETIMEDOUT, errno.EPROTO})
_REPORT_MAX_BYTES: Final = 1024 * 1024
_DAEMON_MODULE: Final = "vfsd.daemon.main"


def launch(
    options: MountOptions,
    *,
    timeout_s: float = START_TIMEOUT_S,
    daemon_module: str = _DAEMON_MODULE,
    fork_server: bool = True,
) -> Ready:
    """Start a daemon in the background; return when its mount answers.

    With `fork_server` and unless $VFSD_FORK_SERVER is "off", the fork server starts it if one runs; otherwise a server
    is started after the mount answers.

    If the start fails, OSError (Python's subclass for the errno) with the daemon's message; TimeoutError after
    `timeout_s`.  If the reason is unexpected, the exception's notes quote the end of the log.  After any failure, and
    after KeyboardInterrupt, no daemon is left.
    """
    uses_server = is_fork_server_on() and fork_server and daemon_module == _DAEMON_MODULE
    log = log_path(options.workspace.name)
    with contextlib.ExitStack() as stack:
        log_fd, is_locked = open_log(log)
        stack.callback(os.close, log_fd)
        log_start = os.fstat(log_fd).st_size
        daemon, report_fd = _start(daemon_module, options, log_fd, uses_server=uses_server)
        stack.callback(daemon.release)
        stack.callback(os.close, report_fd)
        try:
            ready = _await_ready(report_fd, daemon, timeout_s)
        except BaseException as error:
            _stop(daemon, options)
            if isinstance(error, OSError) and error.errno in _UNEXPECTED:
                _quote_log(error, log, log_start)
            elif isinstance(error, OSError) and is_locked:
                _remove_idle_log(log, log_fd)
            raise
    remove_old_logs(os.path.dirname(log))
    if uses_server and isinstance(daemon, DirectProcess):
        ensure_server()
    return ready


# -- the process ------------------------------------------------------------------------------------
class DaemonProcess(Protocol):
    """A process that `launch` waits for.

    `status`: None while it runs and if its status is unknown; negative for a signal, as in `subprocess`.
    """

    @property
    def status(self) -> int | None: ...

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Wait until the process has ended; return whether it has."""

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""

    def release(self) -> None:
        """Stop watching the process: its mount answers, or it has ended."""


class DirectProcess:
    """A daemon that is a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._name = name

    @classmethod
    def start(cls, module: str, options: MountOptions, report_fd: int, log_fd: int, why: str) -> DirectProcess:
        """Start `module` in a new interpreter.  `why`: what kept the fork server from it, if anything."""
        process = start_interpreter(module, options, report_fd, log_fd, why)
        return cls(process, options.workspace.name)

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def wait_ended(self, timeout_s: float | None) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def release(self) -> None:
        """Reap the daemon if it ends before this process."""
        if self._process.returncode is None:
            threading.Thread(target=self._process.wait, name=f"vfsd-{self._name}", daemon=True).start()


def _start(module: str, options: MountOptions, log_fd: int, *, uses_server: bool) -> tuple[DaemonProcess, int]:
    """Start a daemon; return it, and the descriptor of its report."""
    why = ""
    if uses_server:
        report_fd, child_report_fd = os.pipe()
        daemon: ForkedProcess | str = ""
        try:
            daemon = start_by_server(options, child_report_fd, log_fd)
        finally:
            os.close(child_report_fd)  # only the daemon has the other end, so its death is an EOF
            if isinstance(daemon, str):
                os.close(report_fd)
        if not isinstance(daemon, str):
            return daemon, report_fd
        why = daemon
    report_fd, child_report_fd = os.pipe()
    try:
        return DirectProcess.start(module, options, child_report_fd, log_fd, why), report_fd
    except BaseException:
        os.close(report_fd)
        raise
    finally:
        os.close(child_report_fd)


def _await_ready(descriptor: int, daemon: DaemonProcess, timeout_s: float) -> Ready:
    """Return the daemon's report that its mount answers.

    OSError with the daemon's message if it failed; EIO if it died; TimeoutError if it takes too long.
    """
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    received = b""
    while not received.endswith(b"\n"):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
            raise TimeoutError(errno.ETIMEDOUT, f"the daemon did not start within {timeout_s:g} s")
        piece = os.read(descriptor, _REPORT_MAX_BYTES)
        if not piece:
            raise OSError(errno.EIO, f"the daemon died while starting ({_end_of(daemon)})")
        received += piece
    try:
        report = decode_report(received)
    except ValueError as error:
        raise OSError(errno.EPROTO, f"cannot read the daemon's report: {error}") from None
    if isinstance(report, Failed):
        daemon.wait_ended(STOP_TIMEOUT_S)
        raise report.error()
    return report


def _end_of(daemon: DaemonProcess) -> str:
    if not daemon.wait_ended(STOP_TIMEOUT_S):
        return "it still runs, but has closed its pipe"
    if daemon.status is None:
        return "its exit status is unknown"
    return f"exit status {daemon.status}" if daemon.status >= 0 else f"killed by {signal.Signals(-daemon.status).name}"


def _stop(daemon: DaemonProcess, options: MountOptions) -> None:
    """End a daemon that failed to start: with SIGTERM, so that it unmounts, then with SIGKILL."""
    has_ended = False
    try:
        has_ended = daemon.wait_ended(0)
        if not has_ended:
            daemon.send_signal(signal.SIGTERM)
            removes = options.workspace.backend.kind == "image"
            has_ended = daemon.wait_ended(_REMOVAL_TIMEOUT_S if removes else STOP_TIMEOUT_S)
    finally:  # also on a second Ctrl-C
        if not has_ended:
            daemon.send_signal(signal.SIGKILL)
            daemon.wait_ended(None)
    # A daemon that is killed after it has mounted leaves a dead mount.  A live or foreign mount is not touched.
    with contextlib.suppress(OSError):
        clear_dead_mount(options.workspace.mountpoint)


# -- the log ----------------------------------------------------------------------------------------
def _remove_idle_log(path: str, descriptor: int) -> None:
    """Remove the log of a failed start if it contains only the line that was also reported, and restore the previous
    log."""
    with contextlib.suppress(OSError), open(open_regular(path), "rb") as file:
        if file.read().count(b"\n") > 1 or not os.path.samestat(os.fstat(descriptor), os.fstat(file.fileno())):
            return
        try:
            os.replace(path + ".1", path)
        except FileNotFoundError:
            os.unlink(path)


def _quote_log(error: OSError, path: str, start: int) -> None:
    """Add the last lines of the log, from offset `start` on, to the notes of `error`."""
    with open(open_regular(path), "rb") as file:
        file.seek(start)
        lines = collections.deque((line.decode("utf-8", "replace").rstrip() for line in file), LOG_LINES_QUOTED)
    error.add_note(f"the log is {path}" + ("; it ends:" if lines else ", and empty"))
    for line in lines:
        error.add_note("  " + line)


# -- the fork server -------------------------------------------------------------------------------
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


def is_fork_server_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether $VFSD_FORK_SERVER is "on" (the default) or "off".  OSError for other values."""
    value = environ.get(_SWITCH) or "on"
    if value not in ("on", "off"):
        raise OSError(errno.EINVAL, f"${_SWITCH} is {value!r}: set it to on or off")
    return value == "on"


def socket_path(environment: Mapping[str, str]) -> str:
    """Return the path of the socket of the fork server for processes that the calling thread starts."""
    return os.path.join(ensure_socket_dir(), _SOCKET_PREFIX + process_kind(environment))


def start_by_server(options: MountOptions, report_fd: int, log_fd: int) -> ForkedProcess | str:
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
