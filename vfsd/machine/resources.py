"""The memory that the daemon may use, and what idle CPUs of this machine do.

Half of that memory is the default of `--max-memory`; the other half is for the interpreter, for pending requests and
for other programs.  The daemon may use the machine's memory, or less if its cgroup or a parent of that has a smaller
limit.

Waking an idle CPU of a virtual machine takes 30 to 80 us if the guest has halted it, because the hypervisor has to run
the CPU again.  While `/dev/cpu_dma_latency` is open and holds the value 0, idle CPUs poll instead of halting (Linux,
Documentation/power/pm_qos_interface.rst).

Sources: memory.max, memory.current and memory.stat of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst),
memory.limit_in_bytes and memory.usage_in_bytes of v1; cgroups(7) for /proc/self/cgroup; proc(5) for /proc/meminfo;
Documentation/virt/guest-halt-polling.rst, drivers/cpuidle/cpuidle-haltpoll.c, kernel/power/qos.c.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

from protocol.values import Value
from vfsd.wire.options import LEAST_MEMORY_BYTES

CPU_LATENCY_DEVICE: Final = "/dev/cpu_dma_latency"
# Lets members of the group use the device; udev applies it at the next boot or after `udevadm trigger`.
UDEV_RULE: Final = 'KERNEL=="cpu_dma_latency", GROUP="vfsd", MODE="0660"'

_SHARE: Final = 2
_CGROUPS: Final = "/sys/fs/cgroup"
_OOM_SCORE: Final = "/proc/self/oom_score_adj"
_V1_UNLIMITED: Final = 1 << 60  # v1 reports the largest number of pages if there is no limit
# Signed 32-bit numbers: a latency in microseconds, and PM_QOS_DEFAULT_VALUE.
_AWAKE: Final = (0).to_bytes(4, sys.byteorder)
_NO_LIMIT: Final = (-1).to_bytes(4, sys.byteorder, signed=True)


# -- memory -----------------------------------------------------------------------------------------
def default_max_memory(max_bytes: int | None = None) -> int:
    """Return half of the memory that this process may use, in bytes, or `max_bytes` if the user asked for more."""
    return max(available_memory() // _SHARE, max_bytes or 0, LEAST_MEMORY_BYTES)


def available_memory(root: str = "/") -> int:
    """Return the memory in bytes that this process may use: the machine's, or less if a cgroup limits it.

    `root`: the directory that contains /proc and /sys, for tests.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for _, _, limit in _limits(root))])


def free_memory(root: str = "/") -> int | None:
    """Return the memory in bytes that this process may still take; None if the kernel does not tell.

    File pages that the kernel can drop count as free.  `root`: as for `available_memory`.
    """
    machine = _lines(os.path.join(root, "proc/meminfo"))
    found = [int(line.split()[1]) * 1024 for line in machine if line.startswith("MemAvailable:")]
    for directory, version, limit in _limits(root):
        used = _number(os.path.join(directory, version.usage))
        if used is not None:
            statistics = dict(line.split(" ", 1) for line in _lines(os.path.join(directory, "memory.stat")))
            droppable = sum(int(statistics.get(name, "0")) for name in version.droppable)
            found.append(max(0, limit - max(0, used - droppable)))
    return min(found, default=None)


class KilledFirst:
    """Has the kernel end this process before any other one when memory runs out, until `end`."""

    def __init__(self) -> None:
        self._before = "".join(_lines(_OOM_SCORE)).strip()
        self._set("1000")

    def end(self) -> None:
        """Have the kernel choose as before."""
        self._set(self._before)

    def _set(self, value: str) -> None:
        with contextlib.suppress(OSError), open(_OOM_SCORE, "w", encoding="ascii") as file:
            file.write(value)


class _Version(NamedTuple):
    """The names of a version of cgroups: of two files, and of the lines of memory.stat that count file pages."""

    limit: str
    usage: str
    droppable: tuple[str, ...]


_V1: Final = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2: Final = _Version("memory.max", "memory.current", ("inactive_file", "active_file"))


def _limits(root: str) -> Iterator[tuple[str, _Version, int]]:
    """Yield the directories of this process's cgroups, and of their parents, that have a limit, with the limit."""
    top = os.path.join(root, _CGROUPS.lstrip("/"))
    memberships = (line.split(":", 2) for line in _lines(os.path.join(root, "proc/self/cgroup")))
    for _, controllers, path in (each for each in memberships if len(each) == 3):
        if controllers == "":
            yield from _upwards(top, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _upwards(os.path.join(top, "memory"), path, _V1)


def _upwards(top: str, path: str, version: _Version) -> Iterator[tuple[str, _Version, int]]:
    """Yield those from the cgroup `path` up to the top.

    In a cgroup namespace or a container the path may not exist; then only the limit at the top applies, which is the
    container's own.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    for end in range(len(parts), -1, -1):
        directory = os.path.join(top, *parts[:end])
        limit = _number(os.path.join(directory, version.limit))
        if limit is not None and limit < _V1_UNLIMITED:
            yield directory, version, limit


def _number(path: str) -> int | None:
    """Return the number in a file; None if there is none ("max")."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []


# -- idle CPUs --------------------------------------------------------------------------------------
class IdleCpus(Value):
    """How idle CPUs wait.  `driver`: the cpuidle driver, "none" without one.

    `polls_ns`: how long a guest's idle CPU polls before it halts; None if the driver does not say.
    """

    is_guest: bool
    driver: str
    polls_ns: int | None = None
    always_polls: bool = False  # the kernel was started with idle=poll

    @property
    def why_awake(self) -> str | None:
        """Why keeping the CPUs awake would gain nothing; None if idle CPUs of this machine halt and wake up slowly."""
        if not self.is_guest:
            return "this is not a virtual machine, so idle CPUs wake up fast"
        if self.always_polls:
            return "the kernel was started with idle=poll"
        if self.polls_ns:
            return f"idle CPUs poll for {self.polls_ns // 1000} us before they halt (guest_halt_poll_ns)"
        return None

    def describe(self) -> str:
        """Return one line for people."""
        machine = "virtual machine" if self.is_guest else "no virtual machine"
        polling = "" if self.polls_ns is None else f", guest_halt_poll_ns {self.polls_ns}"
        return f"{machine}, idle driver {self.driver}{polling}{', idle=poll' if self.always_polls else ''}"


def idle_cpus(root: str = "/") -> IdleCpus:
    """Read what this machine's idle CPUs do from the /proc and /sys below `root`; unreadable files count as absent."""
    driver = _read(root, "sys/devices/system/cpu/cpuidle/current_driver") or "none"
    polls = _read(root, "sys/module/haltpoll/parameters/guest_halt_poll_ns") if driver == "haltpoll" else ""
    return IdleCpus(
        _is_guest(root),
        driver,
        int(polls) if polls.isdigit() else None,
        "idle=poll" in _read(root, "proc/cmdline").split(),
    )


def _is_guest(root: str) -> bool:
    # x86 says so in the CPU's flags, Xen in sysfs, Arm in the device tree.
    flags = next((line for line in _read(root, "proc/cpuinfo").splitlines() if line.startswith("flags")), "")
    return "hypervisor" in flags.split() or any(
        os.path.exists(os.path.join(root, path)) for path in ("sys/hypervisor/type", "proc/device-tree/hypervisor")
    )


def _read(root: str, path: str) -> str:
    try:
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


class CpuLatency:
    """An open `/dev/cpu_dma_latency`, without a limit at first.

    Measured on a virtual machine: writing takes 7 us (awake) and 3 us (no limit), opening and closing the device 37 and
    10, so it stays open.  The kernel removes the limit when the process ends, however it ends.  The files
    `pm_qos_resume_latency_us` of single CPUs have the same effect, but cost 22 and 20 us and keep their value after
    SIGKILL.
    """

    def __init__(self, path: str = CPU_LATENCY_DEVICE) -> None:
        """Open the device.  OSError: it is missing, or the user may not."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def keep_awake(self, awake: bool) -> None:
        """Keep idle CPUs awake from now on, or let them halt.  OSError."""
        os.write(self._descriptor, _AWAKE if awake else _NO_LIMIT)

    def close(self) -> None:
        """Remove the limit.  Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
