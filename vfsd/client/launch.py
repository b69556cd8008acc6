"""Start a daemon in the background, and return when its mount answers.

The daemon is a new interpreter in a session of its own, and shares no state, threads or terminal with its parent.  It
sends start-up errors to its parent over a pipe, and writes everything else to its log.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from typing import Final

import vfsd
from protocol.linux.regular_file import open_regular
from vfsd.machine import interpreter
from vfsd.machine.mounts import clear_dead_mount
from vfsd.machine.old_logs import remove_old_logs
from vfsd.machine.runtime import ensure_socket_dir
from vfsd.wire.handshake import Failed, Ready, decode_report, encode_options
from vfsd.wire.options import MountOptions

# Generous: the start may read an archive of gigabytes.
START_TIMEOUT_S: Final = 300.0
# How long a daemon may take to unmount after SIGTERM, before SIGKILL.
STOP_TIMEOUT_S: Final = 5.0
LOG_LINES_QUOTED: Final = 10
# The log explains these: the daemon died or hangs, met an unexpected exception, or sent an invalid report.
_UNEXPECTED: Final = frozenset({errno.EIO, errno.ETIMEDOUT, errno.EPROTO})
_REPORT_MAX_BYTES: Final = 1024 * 1024
_DAEMON_MODULE: Final = "vfsd.daemon.main"


def launch(options: MountOptions, *, timeout_s: float = START_TIMEOUT_S, daemon_module: str = _DAEMON_MODULE) -> Ready:
    """Start a daemon in the background; return when its mount answers.

    If the start fails, OSError (Python's subclass for the errno) with the daemon's message; TimeoutError after
    `timeout_s`.  If the reason is unexpected, the exception's notes quote the end of the log.  After any failure, and
    after KeyboardInterrupt, no daemon is left.
    """
    log = log_path(options.workspace.name)
    with contextlib.ExitStack() as stack:
        log_fd, is_locked = _open_log(log)
        stack.callback(os.close, log_fd)
        log_start = os.fstat(log_fd).st_size
        report_fd, child_report_fd = os.pipe()
        report = stack.enter_context(open(report_fd, "rb"))
        with _pipe_holding(encode_options(options)) as options_fd:
            try:
                daemon = _start(daemon_module, options_fd, child_report_fd, log_fd)
            finally:
                os.close(child_report_fd)  # only the daemon has the other end, so its death is an EOF
        try:
            ready = _await_ready(report.fileno(), daemon, timeout_s)
        except BaseException as error:
            _stop(daemon, options.workspace.mountpoint)
            if isinstance(error, OSError) and error.errno in _UNEXPECTED:
                _quote_log(error, log, log_start)
            elif isinstance(error, OSError) and is_locked:
                _remove_idle_log(log, log_fd)
            raise
    remove_old_logs(os.path.dirname(log))
    # Reap the daemon if it ends before this process.
    threading.Thread(target=daemon.wait, name=f"vfsd-{options.workspace.name}", daemon=True).start()
    return ready


def log_path(name: str) -> str:
    """Return the path of the log of workspace `name`.  The previous log has the suffix ".1"."""
    return os.path.join(ensure_socket_dir(), name + ".log")


# -- the process ------------------------------------------------------------------------------------
def _start(module: str, options_fd: int, report_fd: int, log_fd: int) -> subprocess.Popen[bytes]:
    # -P: do not import from the current directory, "/".
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(options_fd), str(report_fd)],
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=(options_fd, report_fd),
        cwd="/",  # a daemon in another directory would keep its file system busy
        start_new_session=True,  # not ended by Ctrl-C or by a closing terminal
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    """Return this process's environment with absolute import paths, so that the daemon imports the same vfsd."""
    environment = interpreter.environment(os.environ)
    entries = [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    package_root = os.path.dirname(os.path.dirname(os.path.abspath(vfsd.__file__)))
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if package_root not in installed and package_root not in entries:
        entries.append(package_root)
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


@contextlib.contextmanager
def _pipe_holding(data: bytes) -> Iterator[int]:
    """Yield the reading end of a pipe that contains `data`, for a child to inherit."""
    reader, writer = os.pipe()
    try:
        try:
            # Paths are at most a few PATH_MAX; a pipe holds 64 KiB (pipe(7)), so the write does not block.
            os.set_blocking(writer, False)
            os.write(writer, data)
        finally:
            os.close(writer)
        yield reader
    finally:
        os.close(reader)


def _await_ready(descriptor: int, daemon: subprocess.Popen[bytes], timeout_s: float) -> Ready:
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
        _await_end(daemon)
        raise report.error()
    return report


def _end_of(daemon: subprocess.Popen[bytes]) -> str:
    status = _await_end(daemon)
    if status is None:
        return "it still runs, but has closed its pipe"
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def _await_end(daemon: subprocess.Popen[bytes]) -> int | None:
    try:
        return daemon.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None


def _stop(daemon: subprocess.Popen[bytes], mountpoint: str) -> None:
    """End a daemon that failed to start: with SIGTERM, so that it unmounts, then with SIGKILL."""
    try:
        if daemon.poll() is None:
            daemon.terminate()
            _await_end(daemon)
    finally:  # also on a second Ctrl-C
        if daemon.returncode is None:
            daemon.kill()
            daemon.wait()
    # A daemon that is killed after it has mounted leaves a dead mount.  A live or foreign mount is not touched.
    with contextlib.suppress(OSError):
        clear_dead_mount(mountpoint)


# -- the log ----------------------------------------------------------------------------------------
def _open_log(path: str) -> tuple[int, bool]:
    """Open an empty log; return its descriptor and whether it is locked.  The previous log is kept as ".1".

    The daemon inherits the lock for its life, so a second start of the same name, which the daemon will refuse, does
    not move the log of a running workspace away.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    descriptor = open_regular(path, flags)
    if not _lock(descriptor):
        return descriptor, False
    if os.fstat(descriptor).st_nlink == 0:  # `remove_old_logs` removed it before it was locked
        os.close(descriptor)
        return _open_log(path)
    if os.fstat(descriptor).st_size == 0:
        return descriptor, True
    os.replace(path, path + ".1")
    os.close(descriptor)
    descriptor = open_regular(path, flags)
    return descriptor, _lock(descriptor)


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


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _quote_log(error: OSError, path: str, start: int) -> None:
    """Add the last lines of the log, from offset `start` on, to the notes of `error`."""
    with open(open_regular(path), "rb") as file:
        file.seek(start)
        lines = collections.deque((line.decode("utf-8", "replace").rstrip() for line in file), LOG_LINES_QUOTED)
    error.add_note(f"the log is {path}" + ("; it ends:" if lines else ", and empty"))
    for line in lines:
        error.add_note("  " + line)
