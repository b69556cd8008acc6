"""A process that the fork server forked: become the daemon that the mount asked for.

The process takes over what a directly started daemon inherits from the mount: environment, umask, limits, CPUs, signal
mask and log.  It starts the daemon when the mount confirms that it still waits.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from typing import Final

from vfsd.daemon.daemon import run_daemon
from vfsd.daemon.keeper.server import ForkedStart
from vfsd.daemon.starting import serve_kept
from vfsd.wire import fork_messages
from vfsd.wire.fork_messages import Forked, Go, Refused, Start
from vfsd.wire.handshake import decode_options
from vfsd.wire.sockets import peer_credentials

_run_daemon = functools.partial(run_daemon, started_by="the fork server")
_GO_TIMEOUT_S: Final = 30.0  # the mount answers at once, or has ended


def run(forked: ForkedStart) -> int:
    """Run the daemon in this process; return its exit status."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(forked.connection)
        connection.settimeout(_GO_TIMEOUT_S)
        starter = peer_credentials(connection).pid
        try:
            _take_over(forked)
        except (OSError, ValueError) as error:
            connection.send(fork_messages.encode(Refused(f"a forked process cannot take over the mount's: {error}")))
            return 1
        pidfd = os.pidfd_open(os.getpid())
        try:
            packet = fork_messages.encode(Forked(os.getpid()))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))]
            connection.sendmsg([packet], rights)
            answer = connection.recv(fork_messages.MAX_BYTES)
            if not answer or not isinstance(fork_messages.decode(answer), Go):
                return 1
        except (OSError, ValueError):
            return 1
        finally:
            os.close(pidfd)
    return serve_kept(
        decode_options(forked.start.options.encode()), forked.report_fd, functools.partial(_run_daemon, starter=starter)
    )


def _take_over(forked: ForkedStart) -> None:
    start = forked.start
    os.setsid()
    os.chdir("/")
    _replace_descriptors(forked)
    _replace_environment(start)
    os.umask(start.umask)
    for number, soft in start.soft_limits.items():
        _, hard = resource.getrlimit(number)
        resource.setrlimit(number, (soft, hard))
    os.sched_setaffinity(0, start.cpus)
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(start.oom_score_adj))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores these two
        if signal.getsignal(number) == signal.SIG_IGN:  # by the process that started the server, such as nohup(1)
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked_signals)


def _replace_descriptors(forked: ForkedStart) -> None:
    """Make the log standard output and standard error, and close what belongs to the server."""
    for standard in (1, 2):
        os.dup2(forked.log_fd, standard)
    kept = sorted({forked.connection.fileno(), forked.report_fd})
    first = 3
    for descriptor in kept:
        if first < descriptor:
            os.closerange(first, descriptor)
        first = descriptor + 1
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    if first <= highest:
        os.closerange(first, highest + 1)


def _replace_environment(start: Start) -> None:
    os.environ.clear()
    os.environ.update(start.environment)
    time.tzset()
    tempfile.tempdir = None
    sys.argv[1:] = []
