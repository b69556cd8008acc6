"""Start a daemon in a new interpreter; the kind of a process, by which a mount finds the fork server to ask instead.

A mount and its fork server talk on a Unix socket (SOCK_SEQPACKET).  The server forks at once, and the new process:

1. receives three descriptors from the mount: a JSON file of START's fields, the pipe of the report, and the log;
2. sends its pidfd;
3. starts the daemon when the mount sends GO.  Without that it ends, so a mount that has stopped waiting gets no second
   daemon.

When the process ends, the server sends its exit status as a decimal number, negative for a signal, as `subprocess`
does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from typing import Final, TypedDict

import vfsd
from protocol.linux import credentials
from vfsd.machine import interpreter
from vfsd.wire.options import MountOptions, encode_options

DESCRIPTORS: Final = 3  # that a fork server's new process receives
GO: Final = b"go"
PACKET_BYTES: Final = 16
# The dynamic linker, the C library and the interpreter read these before the first line of a program.
_INTERPRETER_VARIABLES: Final = (
    "HOME", "PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "COVERAGE", "COV_", "VFSD_COMPILED",
)  # fmt: skip
# Of /proc/PID/status.  "Cap" and "Seccomp" begin the names of several lines.
_INHERITED: Final = (
    "Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "Cap", "Cpus_allowed", "SigBlk", "SigIgn",
)  # fmt: skip


class ForkedStart(TypedDict):
    """The fields of the JSON file of a start.  `options`: the result of `handshake.encode_options`."""

    options: str
    environment: dict[str, str]


def process_kind(environment: Mapping[str, str]) -> str:
    """Return a name for what a process inherits that the calling thread starts with `environment`: 16 hex digits.

    It stands for all that the kernel and the interpreter hand on, except variables that only programs read.  So a
    process that was started by one of the same kind can fork a daemon for this thread's mount.

    Source: proc_pid_status(5), namespaces(7), cgroups(7), getrlimit(2), sched(7).
    """
    own = "/proc/thread-self/"
    status = _text(own + "status").splitlines()
    root = os.stat("/")
    parts = (
        *(_text(own + name) for name in ("cgroup", "limits", "oom_score_adj", "attr/current")),
        *(os.readlink(f"{own}ns/{name}") for name in sorted(os.listdir(own + "ns"))),
        *(line for line in status if line.startswith(_INHERITED)),
        f"{root.st_dev}:{root.st_ino} {os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)}",
        f"{vfsd.__version__} {vfsd.__file__} {sys.executable} {sys.prefix} {sys.version}",
        *(f"{name}={value}" for name, value in sorted(interpreter_variables(environment).items())),
    )
    return importlib.util.source_hash("\0".join(parts).encode("utf-8", "surrogateescape")).hex()


def interpreter_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter reads as it starts."""
    return {name: value for name, value in environment.items() if name.startswith(_INTERPRETER_VARIABLES)}


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:  # no security module is loaded, for example
        return ""


def start_interpreter(
    module: str, options: MountOptions, report_fd: int, log_fd: int, why: str, *, without: Collection[str] = ()
) -> subprocess.Popen[bytes]:
    """Start `module`, which reads `options` and reports on `report_fd`.  `why` is what `vfsd status` says about it.

    It does not have the environment variables `without`.
    """
    with _pipe_holding(encode_options(options)) as options_fd:
        # -P: do not import from the current directory, "/".
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(options_fd), str(report_fd), why],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(options_fd, report_fd),
            cwd="/",  # a daemon in another directory would keep its file system busy
            start_new_session=True,  # not ended by Ctrl-C or by a closing terminal
            env={name: value for name, value in daemon_environment().items() if name not in without},
        )


def daemon_environment() -> dict[str, str]:
    """Return this process's environment with absolute import paths, so that the daemon imports the same vfsd."""
    environment = interpreter.environment(credentials.environment())
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
