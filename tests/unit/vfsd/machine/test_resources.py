"""What a machine's idle CPUs do, read from files of made-up machines; the kernel's device, where it can be opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vfsd.machine.resources import CpuLatency, IdleCpus, idle_cpus

GUEST = "processor : 0\nflags : fpu hypervisor sse\n"


def machine(root: Path, cpuinfo: str = GUEST, **files: str) -> str:
    contents = {
        "proc/cpuinfo": cpuinfo,
        "proc/cmdline": files.get("cmdline", "quiet"),
        "sys/devices/system/cpu/cpuidle/current_driver": files.get("driver", "haltpoll") + "\n",
        "sys/module/haltpoll/parameters/guest_halt_poll_ns": files.get("polls", "0") + "\n",
    }
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return str(root)


def test_a_guest_whose_idle_cpus_halt_gains(tmp_path: Path) -> None:
    found = idle_cpus(machine(tmp_path))
    assert found == IdleCpus(is_guest=True, driver="haltpoll", polls_ns=0)
    assert found.why_awake is None
    assert found.describe() == "virtual machine, idle driver haltpoll, guest_halt_poll_ns 0"


def test_a_guest_without_an_idle_driver_gains(tmp_path: Path) -> None:
    found = idle_cpus(machine(tmp_path, driver="acpi_idle", polls="200000"))
    assert found.polls_ns is None, "the parameter of a driver that is not in use"
    assert found.why_awake is None


@pytest.mark.parametrize(
    ("cpuinfo", "files", "why"),
    [
        ("flags : fpu sse\n", {}, "not a virtual machine"),
        (GUEST, {"polls": "200000"}, "poll for 200 us"),
        (GUEST, {"cmdline": "root=/dev/vda idle=poll"}, "idle=poll"),
    ],
    ids=["bare metal", "polling guest", "idle=poll"],
)
def test_others_do_not(tmp_path: Path, cpuinfo: str, files: dict[str, str], why: str) -> None:
    found = idle_cpus(machine(tmp_path, cpuinfo, **files))
    assert found.why_awake is not None
    assert why in found.why_awake


def test_a_machine_that_says_nothing_is_no_guest(tmp_path: Path) -> None:
    assert idle_cpus(str(tmp_path)) == IdleCpus(is_guest=False, driver="none")


def test_the_device_gets_zero_and_then_no_limit_and_is_not_inherited(tmp_path: Path) -> None:
    path = tmp_path / "cpu_dma_latency"
    path.touch()
    latency = CpuLatency(str(path))
    latency.keep_awake(True)
    latency.keep_awake(False)
    assert path.read_bytes() == bytes(4) + b"\xff" * 4
    assert not os.get_inheritable(latency._descriptor)
    latency.close()
    latency.close()
