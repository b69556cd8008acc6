"""The process that writes an image of the journal counts for `--max-memory`, and never costs a program a change."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import check_invariants
from tests.mount.programs import VFSD, failed, log_of, succeeded, vfsd
from tests.support.processes import children
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.daemon.forks.family import slack_bytes

MIB = 1 << 20
LIMIT = 100 * MIB


@pytest.fixture
def workspace(workdir: Path) -> Iterator[Workspace]:
    root = workdir / "mount"
    with Workspace.mount(root, persist=True, journal_dir=workdir / "journal", max_memory=LIMIT, keeper=False) as made:
        yield made
        check_invariants(made)


def private_bytes(*pids: int) -> int:
    """Return the sum of the proportional set sizes of anonymous memory."""
    found = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
    return found


class StoppedCompaction:
    """`vfsd compact`, stopped while another process writes the image."""

    def __init__(self, workspace: Workspace) -> None:
        while True:
            self.command = subprocess.Popen(
                [*VFSD, "compact", "-w", workspace.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            wait_until(lambda: bool(children(workspace.pid)) or self.command.poll() is not None, "a writer")
            for writer in children(workspace.pid):
                self.writer = writer
                try:
                    os.kill(writer, signal.SIGSTOP)
                except ProcessLookupError:
                    break
                return
            self.command.communicate()  # it was too fast


def rewrite(root: Path, count: int) -> None:
    for number in range(count):
        with open(root / f"f{number}", "wb") as file:
            file.write(os.urandom(MIB))


@pytest.mark.extended
def test_a_change_that_needs_the_memory_ends_the_compaction(workspace: Workspace) -> None:
    root = Path(workspace.path)
    rewrite(root, 60)
    compaction = StoppedCompaction(workspace)
    peak, is_over = 0, threading.Event()

    def observe() -> None:
        nonlocal peak
        while not is_over.wait(0.01):
            peak = max(peak, private_bytes(workspace.pid, compaction.writer))

    observer = threading.Thread(target=observe)
    observer.start()
    rewrite(root, 60)
    is_over.set()
    observer.join()
    _, error = compaction.command.communicate()
    assert compaction.command.returncode == 1
    assert "needed the memory (--max-memory)" in error
    assert peak <= LIMIT + slack_bytes(2)
    succeeded(vfsd("compact", "-w", workspace.name))
    rewrite(root, 60)


@pytest.mark.extended
def test_a_compaction_without_room_is_refused_before_it_begins(workspace: Workspace) -> None:
    root = Path(workspace.path)
    with pytest.raises(OSError, match="No space left"):
        rewrite(root, 110)
    before = sorted(os.listdir(root))
    message = failed(vfsd("compact", "-w", workspace.name))
    assert "MiB of --max-memory: the journal stays as it is; remove files" in message
    assert sorted(os.listdir(root)) == before
    for name in before[:60]:
        (root / name).unlink()
    succeeded(vfsd("compact", "-w", workspace.name))


@pytest.mark.extended
@pytest.mark.slow
def test_a_compaction_that_begins_by_itself_and_has_no_room_is_logged(workspace: Workspace) -> None:
    root = Path(workspace.path)
    with pytest.raises(OSError, match="No space left"):
        rewrite(root, 110)
    while "of --max-memory: the journal stays as it is" not in log_of(workspace.name):
        rewrite(root, 20)
