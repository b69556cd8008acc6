"""What the systemd units run at the start, run as systemd would: what is in memory outlives a restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.service_manager import Unit
from vfsd.client.workspace import Workspace

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNITS = {"system": SYSTEMD / "vfsd@.service", "user": SYSTEMD / "user" / "vfsd@.service"}


class Service(Unit):
    """One instance of a unit, under a manager that stores no descriptors."""

    def __init__(self, unit: Path, place: Path, options: str = "") -> None:
        super().__init__(unit, place, (sys.executable, "-m", "vfsd.cli.main"), options)

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Started, and ready as Type=notify has it; at the end stopped by SIGTERM, or already dead."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            address = str(self.state.parent / "notify")
            notified.bind(address)
            notified.settimeout(60)
            environment = {**self.variables, "NOTIFY_SOCKET": address}
            command = self.command("ExecStart")
            with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as main:
                while b"READY=1" not in notified.recv(4096):
                    pass
                yield main
                main.send_signal(signal.SIGTERM)
                main.communicate(timeout=60)
            os.unlink(address)

    @property
    def journal(self) -> Path:
        return self.state / "vfsd" / "journals" / self.name


@pytest.mark.extended
@pytest.mark.parametrize(
    ("unit", "options"),
    [("system", "--max-bytes 64MiB"), ("user", "--backend memory"), ("user", "--fsync always --backend=memory")],
)
def test_content_and_snapshots_in_memory_outlive_stops_and_crashes(unit: str, workdir: Path, options: str) -> None:
    service = Service(UNITS[unit], workdir, options)
    for number in range(3):
        with service.running() as main:
            before = (service.mountpoint / "a").read_text() if number else None
            assert before == (str(number - 1) if number else None)
            assert len(Workspace.attach(service.name).snapshots()) == number
            (service.mountpoint / "a").write_text(str(number))
            Workspace.attach(service.name).snapshot(f"s{number}")
            if number == 1:
                os.killpg(main.pid, signal.SIGKILL)  # the keeper and the daemon
                main.wait(60)


@pytest.mark.extended
@pytest.mark.parametrize("option", ["--backend overlay:{}", "--max-memory 1GiB --backend=overlay:{}"])
def test_the_changes_of_an_overlay_outlive_a_restart(option: str, workdir: Path) -> None:
    (workdir / "below").mkdir()
    (workdir / "below" / "removed").touch()
    service = Service(UNITS["system"], workdir, option.format(workdir / "below"))
    with service.running():
        (service.mountpoint / "a").write_text("x")
        (service.mountpoint / "removed").unlink()
    with service.running():
        assert os.listdir(service.mountpoint) == ["a"]
    assert os.listdir(workdir / "below") == ["removed"]


@pytest.mark.parametrize("option", ["--backend host:{}", "--backend=host:{}"])
def test_a_backend_that_keeps_its_content_itself_has_no_journal(option: str, workdir: Path) -> None:
    (workdir / "memory").mkdir()
    service = Service(UNITS["system"], workdir, option.format(workdir / "memory"))
    with service.running():
        (service.mountpoint / "a").write_text("x")
    assert os.listdir(workdir / "memory") == ["a"]
    assert not service.journal.exists()


def test_an_archive_is_read_until_there_is_a_journal(workdir: Path) -> None:
    archive = workdir / "a.zip"
    (workdir / "other").mkdir()
    with Workspace.mount(workdir / "other", name=f"{workdir.name}-other") as other:
        (workdir / "other" / "a").write_text("archived")
        other.export(archive)
    service = Service(UNITS["system"], workdir, f"--from {archive}")
    for content in ("archived", "changed"):
        with service.running():
            assert (service.mountpoint / "a").read_text() == content
            (service.mountpoint / "a").write_text("changed")
    assert service.journal.is_dir()
