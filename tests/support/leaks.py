"""What a test left behind: mounts, processes, daemons.  Found through /proc, and cleaned up.

A process belongs to this test session when it is a child of ours, or when its environment carries the
session's tag: a daemon that cut its ties to its parent still inherits that.  So sessions may run side by side.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from tests.support import zygote
from vfsd.machine import mountinfo

__all__ = ["TAG", "Leaks", "Mount", "mounts", "open_files", "processes"]

TAG = "VFSD_TEST_SESSION"
# How long a process that is already on its way out may take: a daemon after its unmount, a git gc.
GRACE_S = float(os.environ.get("VFSD_TEST_GRACE_S", "60"))
# Started once by the standard library and kept for the interpreter's life.
KEPT_PROCESSES = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo (proc_pid_mountinfo(5))."""

    mountpoint: str
    fs_type: str
    source: str

    def __str__(self) -> str:
        return f"mount {self.mountpoint} (type {self.fs_type}, source {self.source})"


def mounts() -> set[Mount]:
    """All mounts in our namespace."""
    return set(_parsed(_read("/proc/self/mountinfo")))


@functools.lru_cache(maxsize=4)  # between most tests nothing is mounted
def _parsed(content: bytes) -> frozenset[Mount]:
    found = mountinfo.parse_mountinfo(content)
    return frozenset(Mount(each.mountpoint, each.filesystem, each.source) for each in found)


def open_files() -> dict[int, str]:
    """What this process has open, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def processes() -> set[int]:
    """All process ids."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _read(path: str) -> bytes:
    # A process may be gone by now, or another user's: then it is not ours.
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _fields(pid: int) -> list[bytes]:
    # After the command's name, which may contain anything: state, parent, ... (proc_pid_stat(5)).
    return _read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()


def _is_alive(pid: int) -> bool:
    fields = _fields(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def _describe(pid: int) -> str:
    command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return f"process {pid} ({command[:200] or 'no command line'})"


class Leaks:
    """What has come up since `Leaks()` was made, and has not gone.

    `tag` is the session's value of TAG, `roots` are the directories below which no mount may stay.
    """

    def __init__(self, tag: str, roots: Iterable[str]) -> None:
        self._tag = f"{TAG}={tag}".encode()
        self._roots = tuple(os.path.realpath(root) for root in roots)
        self._mounts = mounts()
        self._processes = processes()

    def mounts(self) -> list[Mount]:
        """New mounts below the roots, deepest first."""
        new = [mount for mount in mounts() - self._mounts if self._is_below(mount.mountpoint)]
        return sorted(new, key=lambda mount: -len(mount.mountpoint))

    def _is_below(self, path: str) -> bool:
        return any(path == root or path.startswith(root + "/") for root in self._roots)

    def processes(self) -> list[int]:
        """New living processes of this session."""
        return sorted(pid for pid in processes() - self._processes if self._is_ours(pid) and _is_alive(pid))

    def _is_ours(self, pid: int) -> bool:
        if pid in (os.getpid(), zygote.pid):
            return False
        if any(name in _read(f"/proc/{pid}/cmdline") for name in KEPT_PROCESSES):
            return False
        if self._tag in _read(f"/proc/{pid}/environ").split(b"\0"):
            return True
        fields = _fields(pid)
        return len(fields) > 1 and int(fields[1]) == os.getpid()

    def settle(self) -> list[str]:
        """Wait a little for what is already ending; clean up the rest, and say what it was."""
        if not self.processes() and not self.mounts():
            return []
        _wait_gone(self.processes(), GRACE_S)
        leftover_mounts, leftover_processes = self.mounts(), self.processes()
        found = [str(mount) for mount in leftover_mounts] + [_describe(pid) for pid in leftover_processes]
        # Mounts first: a daemon that loses its mount ends by itself, and a process stuck in it is let go.
        for mount in leftover_mounts:
            _unmount(mount.mountpoint)
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
            _wait_gone(self.processes(), GRACE_S)
        # A daemon that died of SIGKILL, or was late, may leave a mount that nobody serves.
        for mount in self.mounts():
            _unmount(mount.mountpoint)
        return found


def _unmount(mountpoint: str) -> None:
    command = ["umount", "-l", mountpoint] if os.geteuid() == 0 else ["fusermount3", "-uz", mountpoint]
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)


def _wait_gone(pids: list[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue  # gone already
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(descriptor)
