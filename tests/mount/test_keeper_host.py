"""The keeper of `host:` workspaces: the files are where they were, and the next daemon finds them again."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.files_in_use import in_use, make_files
from tests.mount.kept_workspaces import (
    CHANGES,
    KeptHost,
    change_at_random,
    check_dead_without_keeper,
    check_executed_once,
    end_kept,
    facts,
    kill_replacements,
)
from tests.mount.programs import succeeded, vfsd
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace

kept = fixture_of(KeptHost, end_kept)


def test_open_files_mappings_directories_and_locks_continue(kept: KeptHost) -> None:
    below, root = kept.below, kept.path
    make_files(below)
    kept.mount()
    with in_use(root) as used:
        for name in used.seen:
            if name != "below":
                (root / "dir" / name).unlink()
        kept.kill()
        (root / "dir").rename(root / "moved")
        kept.kill()
        used.check(root, "moved")
    assert (below / "moved" / "below" / "new").exists()
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
def test_a_random_writer_sees_what_its_twin_sees(kept: KeptHost, workdir: Path, runs_long: bool) -> None:
    workspace = kept.mount()
    twin = workdir / "twin"
    twin.mkdir()
    deadline = time.monotonic() + (600 if runs_long else 3)
    with kept.being_killed(1):
        change_at_random([kept.path, twin], 1, lambda: time.monotonic() > deadline and kept.kills > 4)
    assert facts(kept.path) == facts(twin) == facts(kept.below)
    check_invariants(workspace)


@pytest.mark.extended
@pytest.mark.parametrize("change", [change for change in CHANGES if change != "temporary file"])
def test_a_request_is_executed_once_at_whichever_step_the_daemon_dies(kept: KeptHost, change: str) -> None:
    check_executed_once(kept, change)
    assert facts(kept.path) == facts(kept.below)


def test_a_file_that_cannot_be_found_again_is_stale(kept: KeptHost) -> None:
    (kept.below / "nameless").write_bytes(b"x")
    (kept.below / "removed").write_bytes(b"x")
    kept.mount()
    with (kept.path / "nameless").open("rb") as nameless, (kept.path / "removed").open("rb") as removed:
        (kept.path / "nameless").unlink()
        kept.kill()
        (kept.below / "removed").unlink()
        for file in (nameless, removed):
            with pytest.raises(OSError, match="Stale") as raised:
                os.pread(file.fileno(), 1, 0)
            assert raised.value.errno == errno.ESTALE
    assert os.listdir(kept.path) == []


@pytest.mark.extended
def test_deaths_in_a_row_are_survived(kept: KeptHost) -> None:
    kept.mount()
    for number in range(500):
        (kept.path / f"f{number}").write_bytes(b"x")
    with (kept.path / "f7").open("rb") as file:
        kill_replacements(kept, 4)
        assert file.read() == b"x"
    assert len(os.listdir(kept.path)) == 500
    assert "keeper\tpid" in succeeded(vfsd("status", "-w", kept.name))


def test_the_directory_that_was_mounted_is_served_wherever_it_is(kept: KeptHost) -> None:
    (kept.below / "file").write_text("content")
    kept.mount()
    record = kept.record
    assert record.keeper is not None
    os.kill(record.keeper, signal.SIGSTOP)
    os.kill(record.pid, signal.SIGKILL)
    away = kept.below.with_name("away")
    kept.below.rename(away)
    kept.below.mkdir()
    os.kill(record.keeper, signal.SIGCONT)
    assert (kept.path / "file").read_text() == "content"
    wait_until(lambda: kept.record.pid != record.pid, "a replacement")
    kept.kill()
    (kept.path / "new").touch()
    assert sorted(os.listdir(away)) == ["file", "new"]
    assert os.listdir(kept.below) == []
    check_invariants(Workspace.attach(kept.name))


def test_no_keeper_leaves_a_dead_mount(kept: KeptHost) -> None:
    check_dead_without_keeper(kept)
