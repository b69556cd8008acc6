"""A campaign: the daemon is killed again and again with a request in flight, and no program on the mount notices.

The programs (`surviving_programs`) check what they read.  At the end their trees equal those that the same rounds leave
on a tmpfs.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import backend_over, check_invariants
from tests.mount.programs import VFSD, vfsd, wait_ended
from tests.mount.surviving_programs import PROGRAMS, run_program, tree_facts
from tests.support.processes import children
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.machine.mountinfo import mount_at
from vfsd.machine.runtime import WorkspaceRecord, read_record

_SHORT_CHANGES, _LONG_CHANGES = 8, 1000  # changes of the daemon's pid
_IN_A_ROW = 4  # replacements that are killed before they have recovered
_BETWEEN_SERIES = 4  # kills
_BETWEEN_COMPACTIONS = 20  # kills
_PAUSE_MAX_S = 0.2


class Killer:
    """Kills the daemons of a workspace, and counts the changes of pid that it observes.

    `connections` is a directory where fusectl is mounted, or None: then the moments are only random.
    """

    def __init__(self, name: str, connections: Path | None) -> None:
        self._name = name
        self._choice = random.Random(6)
        keeper = self._record.keeper
        assert keeper is not None
        self._keeper = keeper
        self._mountpoint = self._record.mountpoint
        mount = mount_at(self._mountpoint)
        assert mount is not None
        self._waiting = None if connections is None else connections / str(os.minor(mount.device)) / "waiting"
        self.changes = 0
        self._kills = 0
        self._compactions: list[subprocess.Popen[bytes]] = []
        self._killed = 0

    @property
    def _record(self) -> WorkspaceRecord:
        record = read_record(self._name)
        assert record is not None
        return record

    def kill(self) -> None:
        """Kill the daemon while a request is in flight, after a pause; return when a replacement has recovered."""
        for _ in range(2):  # once the second is answered, the keeper knows of the first
            os.statvfs(self._mountpoint)
        self._kills += 1
        if self._kills % _BETWEEN_COMPACTIONS == 0:
            self._compact()
        time.sleep(self._choice.random() * _PAUSE_MAX_S)
        record = self._record
        if self._waiting is not None:
            waiting = self._waiting
            wait_until(lambda: int(waiting.read_text()) > 0, "a request in flight")
        self._kill(record.pid)
        if self._choice.randrange(_BETWEEN_SERIES) == 0:
            for _ in range(self._choice.randint(1, _IN_A_ROW)):
                wait_until(lambda: bool(self._replacement()), "a replacement")
                self._kill(self._replacement())
        wait_until(lambda: self._record.pid == self._replacement(), "a replacement that has recovered", 120)

    def _compact(self) -> None:
        """Begin a compaction; half of them are complete before the kill."""
        compacting = subprocess.Popen([*VFSD, "compact", "-w", self._name], stdout=subprocess.DEVNULL)
        if self._choice.randrange(2):
            assert compacting.wait() == 0
        self._compactions.append(compacting)

    def wait_compactions(self) -> None:
        """Wait until the commands end. Some fail because their daemon was killed."""
        for each in self._compactions:
            each.wait()

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.changes += 1
        self._killed = pid

    def _replacement(self) -> int:
        """Return the daemon that is not the killed one, recovered or not; 0 before there is one."""
        return next((child for child in children(self._keeper) if child != self._killed), 0)


@pytest.fixture(params=["memory", "overlay"])
def workspace(request: pytest.FixtureRequest, workdir: Path) -> Iterator[Workspace]:
    backend = backend_over(request.param, workdir / "below")
    options: dict[str, Any] = {"persist": True, "journal_dir": workdir / "journal"}
    made = Workspace.mount(workdir / "mount", backend, name=f"{workdir.name}-kept", **options)
    record = read_record(made.name)
    assert record is not None
    yield made
    vfsd("unmount", made.name, "--discard")
    assert record.keeper is not None
    wait_ended(record.keeper)


@pytest.fixture
def connections(workdir: Path) -> Iterator[Path | None]:
    """A directory with the kernel's counts of requests in flight; None if this user may not mount it."""
    path = workdir / "connections"
    path.mkdir()
    if os.geteuid():
        yield None
        return
    subprocess.run(["mount", "-t", "fusectl", "none", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.extended
def test_programs_do_not_notice_that_the_daemon_is_killed(
    workspace: Workspace, connections: Path | None, workdir: Path
) -> None:
    run_campaign(workspace, connections, workdir, _SHORT_CHANGES)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_programs_do_not_notice_a_thousand_changes_of_pid(
    workspace: Workspace, connections: Path | None, workdir: Path
) -> None:
    run_campaign(workspace, connections, workdir, _LONG_CHANGES)


def run_campaign(workspace: Workspace, connections: Path | None, workdir: Path, changes: int) -> None:
    over = workdir / "over"
    root = Path(workspace.path)
    command = [sys.executable, "-m", "tests.mount.surviving_programs"]
    programs = {
        name: subprocess.Popen(
            [*command, name, root / name, "--until", over], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in PROGRAMS
    }
    killer = Killer(workspace.name, connections)
    try:
        while killer.changes < changes:
            killer.kill()
            print(killer.changes, "changes of pid", flush=True)
            for name, program in programs.items():
                if program.poll() is not None:
                    pytest.fail(f"{name} failed after {killer.changes} changes:\n{program.communicate()[1]}")
    finally:
        over.touch()
        killer.wait_compactions()
        ended = {name: program.communicate() for name, program in programs.items()}
    for name, (rounds, errors) in ended.items():
        assert programs[name].returncode == 0, f"{name}:\n{errors}"
        with tempfile.TemporaryDirectory(dir="/dev/shm") as twin:
            run_program(name, Path(twin, name), lambda done, rounds=rounds: done == int(rounds))
            assert tree_facts(root / name) == tree_facts(Path(twin, name)), name
    check_invariants(Workspace.attach(workspace.name))
