"""Imports into a `--persist` workspace whose daemon is killed: they happened, and can be undone, or did not happen."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from protocol.archive import write_archive
from protocol.backends.memory import MemoryVolume
from protocol.volume import ROOT_INODE, SUPERUSER
from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.programs import VFSD, succeeded, vfsd, wait_ended
from vfsd.client.workspace import Workspace

_DIRECTORIES = 20
_FILES = 100  # in each directory


@pytest.fixture
def archive(workdir: Path) -> Path:
    """An archive of many small files."""
    volume = MemoryVolume()
    for at in range(_DIRECTORIES):
        directory = volume.mkdir(ROOT_INODE, b"d%d" % at, 0o755, SUPERUSER).inode
        for each in range(_FILES):
            number = volume.mknod(directory, b"f%d" % each, 0o100644, 0, SUPERUSER).inode
            volume.write(number, 0, b"%d" % each * 50)
    path = workdir / "many.zip"
    with path.open("wb") as file, volume.tree() as tree:
        write_archive(tree, file)
    return path


class Killed:
    """A workspace whose daemon is killed during imports."""

    def __init__(self, workdir: Path) -> None:
        self.path = workdir / "mount"
        self.path.mkdir()
        self._name = f"{workdir.name}-killed"
        self._journal = workdir / "journal"

    def mount(self) -> Workspace:
        return Workspace.mount(self.path, name=self._name, persist=True, journal_dir=self._journal, keeper=False)

    def import_killed(self, workspace: Workspace, archive: Path, more: int) -> None:
        """Begin an import, and kill the daemon when its journal has `more` bytes more, or after the import."""
        pid = workspace.status().pid
        with (self._journal / "log-00000001").open("rb") as log:
            end = len(log.read().rstrip(b"\0")) + more
            command = [*VFSD, "import", str(archive), "-w", self._name]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
                # The space beyond the end of the log is zeros.
                while not os.pread(log.fileno(), 4096, end).strip(b"\0") and running.poll() is None:
                    time.sleep(0.001)
                os.kill(pid, signal.SIGKILL)
                wait_ended(pid)

    def end(self) -> None:
        vfsd("unmount", self._name, "--discard")


killed = fixture_of(Killed, Killed.end)


@pytest.mark.extended
def test_an_import_that_is_killed_happened_and_can_be_undone_or_did_not_happen(killed: Killed, archive: Path) -> None:
    everything = {"kept", *(f"d{at}" for at in range(_DIRECTORIES))}
    workspace = killed.mount()
    (killed.path / "kept").write_bytes(b"here")
    for more in (100, 300_000, 1 << 30):
        killed.import_killed(workspace, archive, more)
        workspace = killed.mount()
        check_invariants(workspace)
        found = set(os.listdir(killed.path))
        safety = [info.name for info in workspace.snapshots() if info.kind == "safety"]
        if found == {"kept"}:
            assert not safety, "a snapshot before an import that did not happen"
            continue
        assert found == everything
        assert sum(len(os.listdir(killed.path / f"d{at}")) for at in range(_DIRECTORIES)) == _DIRECTORIES * _FILES
        assert len(safety) == 1
        succeeded(vfsd("restore", "--undo", "-w", workspace.name))
        assert os.listdir(killed.path) == ["kept"]
        return
    pytest.fail("an import that was not killed is not there")
