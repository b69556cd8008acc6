"""What this machine's idle CPUs do, and the kernel's interface to keep them awake.

Waking an idle CPU of a virtual machine takes 30 to 80 us if the guest has halted it, because the hypervisor has to run
the CPU again.  While `/dev/cpu_dma_latency` is open and holds the value 0, idle CPUs poll instead of halting (Linux,
Documentation/power/pm_qos_interface.rst).

Sources: Documentation/virt/guest-halt-polling.rst, drivers/cpuidle/cpuidle-haltpoll.c, kernel/power/qos.c.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from protocol.values import Value

CPU_LATENCY_DEVICE: Final = "/dev/cpu_dma_latency"
# Lets members of the group use the device; udev applies it at the next boot or after `udevadm trigger`.
UDEV_RULE: Final = 'KERNEL=="cpu_dma_latency", GROUP="vfsd", MODE="0660"'

# Signed 32-bit numbers: a latency in microseconds, and PM_QOS_DEFAULT_VALUE.
_AWAKE: Final = (0).to_bytes(4, sys.byteorder)
_NO_LIMIT: Final = (-1).to_bytes(4, sys.byteorder, signed=True)


class IdleCpus(Value):
    """What idle CPUs do.  `driver`: the cpuidle driver, "none" without one.

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
