"""What the systemd units run at start and stop, run as systemd would: a workspace in memory outlives a restart."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNITS = {"system": SYSTEMD / "vfsd@.service", "user": SYSTEMD / "user" / "vfsd@.service"}


class Service:
    """One instance of a unit, with the variables that systemd would set."""

    def __init__(self, unit: Path, place: Path, options: str = "") -> None:
        self.name = place.name
        self.mountpoint = place / "m"
        self.state = place / "state"
        self._text = unit.read_text().replace("\\\n", " ")
        program = place / "vfsd"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m vfsd.cli.main "$@"\n')
        program.chmod(0o755)
        for directory in (self.mountpoint, self.state):
            directory.mkdir()
        self.variables = {
            **os.environ,
            "VFSD": str(program),
            "VFSD_MOUNTPOINT": str(self.mountpoint),
            "VFSD_OPTIONS": options,
            "STATE_DIRECTORY": str(self.state),
        }

    def command(self, setting: str) -> list[str]:
        """The words of Exec...=, as systemd.service(5) makes them: "$$" is "$", %i the instance's name."""
        (line,) = re.findall(rf"^{setting}=(.*)$", self._text, re.MULTILINE)
        return [word.replace("%i", self.name).replace("$$", "$") for word in shlex.split(line)]

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Started, and ready as Type=notify has it; at the end stopped by SIGTERM, or already dead."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            address = str(self.state.parent / "notify")
            notified.bind(address)
            notified.settimeout(60)
            environment = {**self.variables, "NOTIFY_SOCKET": address}
            with subprocess.Popen(self.command("ExecStart"), env=environment, stderr=subprocess.PIPE) as main:
                assert b"READY=1" in notified.recv(4096)
                yield main
                main.send_signal(signal.SIGTERM)
                main.communicate(timeout=60)
            os.unlink(address)

    def stop(self, main: subprocess.Popen[bytes]) -> subprocess.CompletedProcess[str]:
        """ExecStop=; systemd sets $MAINPID while the main process runs."""
        pid = {"MAINPID": str(main.pid)} if main.poll() is None else {}
        command = self.command("ExecStop")
        environment = {**self.variables, **pid}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def saved(self, name: str) -> bytes:
        with zipfile.ZipFile(self.state / name) as archive:
            return archive.read("files/a")


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest) -> Path:
    return UNITS[request.param]


def test_a_workspace_in_memory_outlives_restarts_and_the_archive_before_is_kept(unit: Path, workdir: Path) -> None:
    service = Service(unit, workdir, "--max-bytes 64MiB")
    for number in range(3):
        with service.running() as main:
            before = [(service.mountpoint / "a").read_text()] if number else sorted(os.listdir(service.mountpoint))
            assert before == ([str(number - 1)] if number else [])
            (service.mountpoint / "a").write_text(str(number))
            done = service.stop(main)
            assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(service.state)) == [f"{service.name}.previous.zip", f"{service.name}.zip"]
    assert service.saved(f"{service.name}.zip") == b"2"
    assert service.saved(f"{service.name}.previous.zip") == b"1"


def test_an_export_that_fails_is_seen_and_keeps_the_old_archive(unit: Path, workdir: Path) -> None:
    service = Service(unit, workdir)
    archive = service.state / f"{service.name}.zip"
    with service.running() as main:
        (service.mountpoint / "a").write_text("old")
        assert service.stop(main).returncode == 0
        (service.mountpoint / "a").write_text("new")
        # In place of a full disk: a directory of that name, which cannot be replaced.
        (service.state / f"{service.name}.new.zip").mkdir()
        done = service.stop(main)
        assert done.returncode != 0
        assert done.stderr != ""
        assert service.saved(archive.name) == b"old"
        (service.state / f"{service.name}.new.zip").rmdir()
        # A daemon that does not answer.
        service.variables["VFSD"] = "/bin/false"
        assert service.stop(main).returncode != 0
        assert service.saved(archive.name) == b"old"


def test_after_a_crash_it_starts_from_the_last_archive_and_the_loss_is_told(workdir: Path) -> None:
    service = Service(UNITS["system"], workdir)
    with service.running() as main:
        (service.mountpoint / "a").write_text("saved")
        assert service.stop(main).returncode == 0
        (service.mountpoint / "a").write_text("lost")
        main.kill()
        main.wait(60)
        done = service.stop(main)
        assert done.returncode == 0
        assert "is lost" in done.stderr
    with service.running():
        assert (service.mountpoint / "a").read_text() == "saved"


@pytest.mark.parametrize("backend", ["--backend host:{}", "--backend=overlay:{}"])
def test_a_workspace_with_another_backend_is_not_exported(backend: str, workdir: Path) -> None:
    (workdir / "below").mkdir()
    service = Service(UNITS["system"], workdir, backend.format(workdir / "below"))
    (service.state / f"{service.name}.zip").write_text("of another time: not to be read")
    with service.running() as main:
        (service.mountpoint / "a").write_text("x")
        assert service.stop(main).returncode == 0
    assert os.listdir(service.state) == [f"{service.name}.zip"]


def test_memory_may_be_named(workdir: Path) -> None:
    service = Service(UNITS["system"], workdir, "--backend memory")
    with service.running() as main:
        (service.mountpoint / "a").write_text("x")
        assert service.stop(main).returncode == 0
    with service.running():
        assert (service.mountpoint / "a").read_text() == "x"
