"""What decides how fast idle CPUs wake up here, and keeping them awake for a whole measurement.

On a virtual machine most of a FUSE request can be two wake-ups of halted CPUs.  So each result says what idle CPUs do,
and `bench.table` measures all file systems twice: with the machine as it is, and with the CPUs kept awake.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Final

from vfsd.machine.resources import CPU_LATENCY_DEVICE, CpuLatency, idle_cpus

AS_IT_IS: Final = "as it is"
AWAKE: Final = "awake"
CHOICES: Final = {"no": (AS_IT_IS,), "yes": (AWAKE,), "both": (AS_IT_IS, AWAKE)}
# CPUs wake up fast for about 50 ms after they were kept awake.
_REST_S: Final = 0.1


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def idle_parameters(root: str = "/") -> dict[str, str]:
    """Return what idle CPUs do: driver, governor, and the parameters of haltpoll by their names.

    Reads the /proc and /sys below `root`.  What this machine does not have is "none", or missing for a parameter.
    """
    cpuidle = Path(root, "sys/devices/system/cpu/cpuidle")
    found = {
        "guest": "yes" if idle_cpus(root).is_guest else "no",
        "driver": _read(cpuidle / "current_driver") or "none",
        "governor": _read(cpuidle / "current_governor") or _read(cpuidle / "current_governor_ro") or "none",
    }
    parameters = Path(root, "sys/module/haltpoll/parameters")
    if parameters.is_dir():
        found |= {path.name: _read(path) for path in sorted(parameters.iterdir())}
    if idle_cpus(root).always_polls:
        found["idle"] = "poll"
    return found


def describe() -> str:
    """Return one line about this machine's CPUs and what they do when idle."""
    idle = idle_parameters()
    kind = "virtual machine" if idle.pop("guest") == "yes" else "no virtual machine"
    return f"{kind}, {os.cpu_count()} CPUs, idle: " + ", ".join(f"{name} {value}" for name, value in idle.items())


def machine() -> dict[str, object]:
    """Return what a result says about the machine that it was measured on."""
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "idle": idle_parameters(),
    }


class Modes:
    """The modes of one run, and switching between them.

    `names` has the modes that are measured.  `gap` says why one of them is missing, else it is empty.
    """

    def __init__(self, choice: str, device: str = CPU_LATENCY_DEVICE) -> None:
        """Choose "both", "yes" (awake only) or "no".  OSError: "yes", and the device cannot be opened."""
        self.names: tuple[str, ...] = CHOICES[choice]
        self.gap = ""
        self._latency: CpuLatency | None = None
        self._is_awake = False
        if AWAKE not in self.names:
            return
        try:
            self._latency = CpuLatency(device)
        except OSError as error:
            self.gap = (
                f"{device} cannot be opened ({error.strerror}), so idle CPUs cannot be kept awake. "
                "Run as root on a kernel that has the device, or pass --awake no"
            )
            if choice == "yes":
                raise OSError(self.gap) from None
            self.names = (AS_IT_IS,)

    def __enter__(self) -> Modes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._latency is not None:
            self._latency.close()

    def switch(self, mode: str) -> None:
        """Keep idle CPUs awake from now on if `mode` is AWAKE.  When they may halt again, wait until they do."""
        if self._latency is None or self._is_awake == (mode == AWAKE):
            return
        self._is_awake = mode == AWAKE
        self._latency.keep_awake(self._is_awake)
        self.rest()

    def rest(self) -> None:
        """Wait until idle CPUs halt as usual after something kept them awake, unless this mode keeps them awake."""
        if not self._is_awake:
            time.sleep(_REST_S)
