"""The units: systemd accepts them, and nothing in them hides the mount or keeps it from being made."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vfsd.wire.options import NAME_PATTERN

SYSTEMD = Path(__file__).parents[3] / "systemd"
SYSTEM_UNIT = SYSTEMD / "vfsd@.service"
USER_UNIT = SYSTEMD / "user" / "vfsd@.service"
UNITS = pytest.mark.parametrize("unit", [SYSTEM_UNIT, USER_UNIT], ids=["system", "user"])

# systemd.exec(5): each of these gives the service a mount namespace, which no mount made in it ever leaves.
NAMESPACED = re.compile(
    r"Private(Tmp|Devices|Network|IPC|Users)|Protect(System|Home|Proc|Hostname|ControlGroups|Kernel\w+)|ProcSubset"
    r"|(ReadOnly|ReadWrite|Inaccessible|Exec|NoExec|Bind|BindReadOnly)Paths|Root(Directory|Image)|DynamicUser"
    r"|TemporaryFileSystem|(Mount|Extension)Images|MountFlags"
)
# systemd.exec(5), NoNewPrivileges=: each of these implies it in a manager without CAP_SYS_ADMIN.
DISARMS_SETUID = re.compile(
    r"SystemCall\w+|Restrict\w+|MemoryDenyWriteExecute|LockPersonality|ProtectClock|DynamicUser|PrivateDevices"
)


def settings(unit: Path) -> dict[str, str]:
    """The unit's settings by name; of a repeated one the last."""
    text = unit.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and line[0] not in "#["]
    return dict(line.split("=", 1) for line in lines)


def verify(unit: Path, directory: Path, drop_in: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What systemd-analyze says of `unit`."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (package systemd)")
    copy = directory / unit.name
    copy.write_text(unit.read_text())
    if drop_in is not None:
        place = directory / f"{unit.name}.d"
        place.mkdir()
        shutil.copy(drop_in, place)
    manager = ["--user"] if unit.parent.name == "user" else []
    return subprocess.run(
        ["systemd-analyze", *manager, "verify", "--man=no", str(copy)],
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(directory), "HOME": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )


@UNITS
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    done = verify(unit, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@UNITS
def test_systemd_would_have_said_something_of_a_mistake(unit: Path, tmp_path: Path) -> None:
    wrong = tmp_path / unit.parent.name / unit.name
    wrong.parent.mkdir()
    wrong.write_text(unit.read_text().replace("WatchdogSec=", "WatchDogSec="))
    assert "WatchDogSec" in verify(wrong, tmp_path).stderr


@UNITS
def test_the_unit_waits_for_the_mount_and_watches_the_daemon(unit: Path) -> None:
    said = settings(unit)
    assert said["Type"] == "notify"
    assert said["NotifyAccess"] == "main"
    assert said["WatchdogSec"] == "30s"
    assert said["Restart"] == "on-failure"
    assert said["KillSignal"] == "SIGTERM"
    assert 'exec "$$VFSD" mount --foreground --name %i ' in said["ExecStart"]
    assert "Environment=VFSD=/usr/bin/vfsd" in unit.read_text()


@UNITS
def test_the_unit_lives_on_when_its_daemon_is_killed(unit: Path) -> None:
    said = settings(unit)
    assert said["OOMPolicy"] == "continue"  # the keeper, the main process, starts another daemon
    assert said["KillMode"] == "mixed"  # the keeper passes a signal to end on


@UNITS
def test_no_setting_hides_the_mount(unit: Path) -> None:
    assert [name for name in settings(unit) if NAMESPACED.fullmatch(name)] == []
    assert settings(unit).get("PrivateMounts", "no") == "no"


def test_no_setting_keeps_a_user_from_mounting() -> None:
    said = settings(USER_UNIT)
    assert [name for name in said if DISARMS_SETUID.fullmatch(name)] == []
    assert said["NoNewPrivileges"] == "no"


def test_the_system_unit_may_mount_and_open_the_fuse_device() -> None:
    said = settings(SYSTEM_UNIT)
    assert "CAP_SYS_ADMIN" in said["CapabilityBoundingSet"].split()
    assert "@mount" in said["SystemCallFilter"].split()
    for device in ("/dev/fuse", "/dev/cpu_dma_latency"):
        assert f"\nDeviceAllow={device} rw\n" in SYSTEM_UNIT.read_text()


@UNITS
def test_one_instance_that_stops_does_not_take_the_sockets_of_the_others(unit: Path) -> None:
    assert settings(unit)["RuntimeDirectory"] == "vfsd"
    assert settings(unit)["RuntimeDirectoryPreserve"] == "yes"


@UNITS
def test_the_example_has_every_variable_that_the_unit_uses(unit: Path) -> None:
    example = dict(
        line.split("=", 1)
        for line in (SYSTEMD / "vfsd.conf.example").read_text().splitlines()
        if line and line[0] != "#"
    )
    used = set(re.findall(r"\$\$([A-Z_]+)", settings(unit)["ExecStart"]))
    assert used - {"VFSD"} == set(example)
    assert example["VFSD_MOUNTPOINT"].startswith("/")


def test_the_drop_in_for_a_podman_of_another_machine_lets_the_unit_reach_it(tmp_path: Path) -> None:
    drop_in = SYSTEMD / "podman-remote.conf"
    done = verify(SYSTEM_UNIT, tmp_path, drop_in)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"AF_INET", "AF_INET6"} <= set(settings(drop_in)["RestrictAddressFamilies"].split())
    assert settings(SYSTEM_UNIT)["RestrictAddressFamilies"] == "AF_UNIX"


@pytest.mark.parametrize("name", ["work", "a-b.c_d", "0"])
def test_a_workspace_name_is_an_instance_name_as_it_is(name: str) -> None:
    if shutil.which("systemd-escape") is None:
        pytest.skip("systemd-escape is not installed (package systemd)")
    assert NAME_PATTERN.fullmatch(name)
    command = ["systemd-escape", "--mangle", f"vfsd@{name}.service"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"vfsd@{name}.service"
