"""What results say about idle CPUs, and the modes of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench._machine import AS_IT_IS, AWAKE, Modes, idle_parameters


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_driver_governor_and_halt_polling_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", "flags\t\t: fpu hypervisor\n")
    write(tmp_path / "sys/devices/system/cpu/cpuidle/current_driver", "haltpoll\n")
    write(tmp_path / "sys/devices/system/cpu/cpuidle/current_governor", "menu\n")
    write(tmp_path / "sys/module/haltpoll/parameters/guest_halt_poll_ns", "200000\n")
    assert idle_parameters(str(tmp_path)) == {
        "guest": "yes",
        "driver": "haltpoll",
        "governor": "menu",
        "guest_halt_poll_ns": "200000",
    }


def test_a_machine_without_cpuidle_has_none(tmp_path: Path) -> None:
    assert idle_parameters(str(tmp_path)) == {"guest": "no", "driver": "none", "governor": "none"}


def test_the_device_holds_zero_while_the_cpus_are_kept_awake(tmp_path: Path) -> None:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    with Modes("both", str(device)) as modes:
        assert modes.names == (AS_IT_IS, AWAKE)
        modes.switch(AWAKE)
        modes.switch(AWAKE)
        modes.switch(AS_IT_IS)
        modes.switch(AWAKE)
    written = device.read_bytes()  # one 32-bit number for each change
    assert [int.from_bytes(written[at : at + 4], sys.byteorder, signed=True) for at in (0, 4, 8)] == [0, -1, 0]
    assert len(written) == 12


def test_without_the_device_both_modes_become_one_with_the_reason(tmp_path: Path) -> None:
    missing = str(tmp_path / "cpu_dma_latency")
    with Modes("both", missing) as modes:
        assert modes.names == (AS_IT_IS,)
        assert "cpu_dma_latency cannot be opened (No such file or directory)" in modes.gap
        modes.switch(AS_IT_IS)
    with pytest.raises(OSError, match="cannot be opened"):
        Modes("yes", missing)
    assert Modes("no", missing).gap == ""
