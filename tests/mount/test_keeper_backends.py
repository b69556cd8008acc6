"""What a keeper does is the same on each backend; then what is special to `host:` and to overlays."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.files_in_use import in_use, make_files
from tests.mount.kept_workspaces import (
    CHANGES,
    Kept,
    KeptCommand,
    KeptHost,
    KeptOverlay,
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

KINDS = {"memory": Kept, "host": KeptHost, "overlay": KeptOverlay, "exec": KeptCommand}


def make(workdir: Path, kind: str) -> Kept:
    return KINDS[kind](workdir)


def on(kinds: dict[str, bool]) -> Any:
    """A fixture of a workspace of each kind; those that are not True run in the extended suite only."""
    marks = {True: (), False: (pytest.mark.extended,)}
    params = [pytest.param({"kind": kind}, id=kind, marks=marks[is_short]) for kind, is_short in kinds.items()]
    return fixture_of(make, end_kept, params=params)


kept = on({"memory": False, "host": True, "overlay": False, "exec": True})
written = on({"memory": True, "host": False, "overlay": True, "exec": False})
any_kept = on(dict.fromkeys(KINDS, False))
unkept = on({"memory": True, "host": True})
host = on({"host": True})
overlay = on({"overlay": True})


# -- each backend --------------------------------------------------------------------------------------
def test_open_files_mappings_directories_and_locks_continue(kept: Kept) -> None:
    root, below = kept.path, kept.below
    if below is None:
        kept.mount()
    make_files(below or root)
    for name in ("nameless", "late", "quiet", "removed"):
        ((below or root) / name).write_bytes(b"of the lower layer")
    if below is not None:
        kept.mount()
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(in_use(root))
        nameless, late, quiet, removed = (
            stack.enter_context((root / name).open("r+b", buffering=0))
            for name in ("nameless", "late", "quiet", "removed")
        )
        assert removed.read() == b"of the lower layer"
        used.program("fcntl.lockf(held, fcntl.LOCK_EX, 10)")
        for name in used.seen:
            if name != "below":
                (root / "dir" / name).unlink()
        is_host = isinstance(kept, KeptHost)  # which has no content of what has no name
        if not is_host:
            (root / "nameless").unlink()
            temporary = os.open(root, os.O_TMPFILE | os.O_RDWR)
            os.write(temporary, b"temporary")
        kept.kill()
        if not is_host:
            (root / "late").unlink()  # the new daemon of an overlay has never seen the file
        if isinstance(kept, KeptCommand):
            (kept.below / "removed").unlink()  # by another program
        (root / "dir").rename(root / "moved")
        kept.kill()
        with pytest.raises(BlockingIOError):
            fcntl.lockf(used.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        used.check(root, "moved")
        for file, start in ((nameless, b"NA"), (quiet, b"QU"), (late, b"LA")):
            assert file.write(start) == 2
            assert os.pread(file.fileno(), 100, 0) == start + b" the lower layer"
        assert os.pread(removed.fileno(), 100, 0) == b"of the lower layer"
        if not is_host:
            assert os.pread(temporary, 9, 0) == b"temporary"
            os.close(temporary)
    assert below is None or isinstance(kept, KeptOverlay) or (below / "moved" / "below" / "new").exists()
    check_invariants(Workspace.attach(kept.name))


def fill(below: Path, files: int = 40) -> None:
    for number in range(files):
        directory = below / f"d{number % 3}"
        directory.mkdir(exist_ok=True)
        (directory / f"n{number % 12}").write_bytes(b"below %d" % number * 300)
    (below / "n1").write_bytes(b"x" * 300_000)
    os.link(below / "n1", below / "n2")


def twin_of(below: Path | None, twin: Path) -> Path:
    """A copy of the directory that a workspace shows, or an empty directory."""
    if below is None:
        twin.mkdir()
    else:
        fill(below)
        shutil.copytree(below, twin, copy_function=shutil.copy2)
        (twin / "n2").unlink()
        os.link(twin / "n1", twin / "n2")
    return twin


def test_a_random_writer_sees_what_its_twin_sees(written: Kept, workdir: Path, runs_long: bool) -> None:
    kept = written
    twin = twin_of(kept.below, workdir / "twin")
    workspace = kept.mount()
    deadline = time.monotonic() + (600 if runs_long else 3)
    with kept.being_killed(1):
        change_at_random([kept.path, twin], 1, lambda: time.monotonic() > deadline and kept.kills > 4)
    assert facts(kept.path) == facts(twin)
    if isinstance(kept, KeptHost | KeptCommand):
        assert facts(kept.below) == facts(twin)
    check_invariants(workspace)


@pytest.mark.parametrize(
    ("any_kept", "change"),
    [
        pytest.param({"kind": kind}, change, id=f"{kind}, {change}", marks=pytest.mark.extended)
        for kind in KINDS
        for change in CHANGES
        if (kind, change) != ("host", "temporary file")  # what has no name is lost there
    ],
    indirect=["any_kept"],
)
def test_a_request_is_executed_once_at_whichever_step_the_daemon_dies(any_kept: Kept, change: str) -> None:
    check_executed_once(any_kept, change)
    if isinstance(any_kept, KeptHost | KeptCommand):
        assert facts(any_kept.path) == facts(any_kept.below)


def test_a_replacement_may_be_killed_four_times_in_a_row(any_kept: Kept) -> None:
    kept = any_kept
    workspace = kept.mount()
    for number in range(2000):
        (kept.path / f"f{number}").write_bytes(b"x" * 100)
    with (kept.path / "f7").open("rb") as file:
        kill_replacements(kept, 4)
        assert file.read() == b"x" * 100
    assert len(os.listdir(kept.path)) == 2000
    assert "keeper\tpid" in succeeded(vfsd("status", "-w", kept.name))
    check_invariants(workspace)


def test_no_keeper_leaves_a_dead_mount(unkept: Kept) -> None:
    check_dead_without_keeper(unkept)
    unkept.mount()


# -- a host directory ----------------------------------------------------------------------------------
def test_a_file_that_cannot_be_found_again_is_stale(host: KeptHost) -> None:
    (host.below / "nameless").write_bytes(b"x")
    (host.below / "removed").write_bytes(b"x")
    host.mount()
    with (host.path / "nameless").open("rb") as nameless, (host.path / "removed").open("rb") as removed:
        (host.path / "nameless").unlink()
        host.kill()
        (host.below / "removed").unlink()
        for file in (nameless, removed):
            with pytest.raises(OSError, match="Stale") as raised:
                os.pread(file.fileno(), 1, 0)
            assert raised.value.errno == errno.ESTALE
    assert os.listdir(host.path) == []


def test_the_directory_that_was_mounted_is_served_wherever_it_is(host: KeptHost) -> None:
    (host.below / "file").write_text("content")
    host.mount()
    record = host.record
    assert record.keeper is not None
    os.kill(record.keeper, signal.SIGSTOP)
    os.kill(record.pid, signal.SIGKILL)
    away = host.below.with_name("away")
    host.below.rename(away)
    host.below.mkdir()
    os.kill(record.keeper, signal.SIGCONT)
    assert (host.path / "file").read_text() == "content"
    wait_until(lambda: host.record.pid != record.pid, "a replacement")
    host.kill()
    (host.path / "new").touch()
    assert sorted(os.listdir(away)) == ["file", "new"]
    assert os.listdir(host.below) == []
    check_invariants(Workspace.attach(host.name))


# -- overlays ------------------------------------------------------------------------------------------
def numbers(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.lstat().st_ino for path in root.rglob("*")}


def test_inode_numbers_stay(overlay: KeptOverlay) -> None:
    fill(overlay.below)
    overlay.mount()
    before = numbers(overlay.path)
    overlay.kill()
    (overlay.path / "d0" / "n0").write_bytes(b"changed")
    overlay.kill()
    assert numbers(overlay.path) == before
    check_invariants(Workspace.attach(overlay.name))


@pytest.mark.extended
@pytest.mark.slow
def test_an_interrupted_listing_of_a_directory_that_changes_is_complete(overlay: KeptOverlay, runs_long: bool) -> None:
    for number in range(4000):
        (overlay.below / f"a-longer-name-{number}").touch()
    overlay.mount()
    with os.scandir(overlay.path) as listing:
        seen = [next(listing).name for _ in range(10)]
        for name in seen:
            (overlay.path / name).unlink()
        overlay.kill()
        seen += [entry.name for entry in listing]
    assert len(seen) == len(set(seen)) == 4000
    with overlay.being_killed(5, times=None if runs_long else 8):
        for name in os.listdir(overlay.path):
            (overlay.path / name).unlink()
    assert not os.listdir(overlay.path)


def test_a_file_that_changes_below_while_no_daemon_runs_is_noticed(overlay: KeptOverlay) -> None:
    (overlay.below / "changes").write_bytes(b"1" * 8192)
    (overlay.below / "vanishes").write_bytes(b"2" * 8192)
    overlay.mount()
    with (overlay.path / "changes").open("rb", buffering=0) as file, (overlay.path / "vanishes").open("rb") as other:
        assert os.pread(file.fileno(), 4096, 0) == b"1" * 4096
        os.stat(other.fileno())
        kill_replacements(overlay, 1)
        (overlay.below / "changes").write_bytes(b"3" * 8192)
        (overlay.below / "vanishes").unlink()

        def is_new() -> bool:
            try:
                return (overlay.path / "changes").read_bytes() == b"3" * 8192
            except OSError as error:  # the read that finds the change
                return error.errno != errno.ESTALE

        wait_until(is_new, "the new content")
        assert os.fstat(other.fileno()).st_size == 8192
        with pytest.raises(OSError, match="Stale") as raised:
            os.pread(other.fileno(), 4096, 0)
        assert raised.value.errno == errno.ESTALE


def mount_source(workdir: Path, below: Path) -> None:
    mountpoint = workdir / "source"
    mountpoint.mkdir()
    succeeded(vfsd("mount", mountpoint, "--backend", f"host:{below}", "--name", f"{workdir.name}-source"))


def archive(workdir: Path, below: Path) -> str:
    mount_source(workdir, below)
    succeeded(vfsd("export", workdir / "below.zip", "-w", f"{workdir.name}-source"))
    succeeded(vfsd("unmount", f"{workdir.name}-source"))
    return f"overlay:{workdir / 'below.zip'}"


def stored(workdir: Path, below: Path) -> str:
    mount_source(workdir, below)
    succeeded(vfsd("snapshot", "base", "-w", f"{workdir.name}-source"))
    succeeded(vfsd("unmount", f"{workdir.name}-source"))
    return f"overlay:snapshot:base@{below}"


@pytest.mark.extended
@pytest.mark.parametrize("make", [archive, stored])
def test_an_overlay_over_an_archive_or_a_stored_snapshot_continues(
    overlay: KeptOverlay, workdir: Path, make: Callable[[Path, Path], str]
) -> None:
    fill(overlay.below)
    overlay.backend = make(workdir, overlay.below)
    overlay.mount()
    expected = facts(overlay.path)
    before = numbers(overlay.path)
    with (overlay.path / "d1" / "n1").open("rb", buffering=0) as file:
        overlay.kill()
        (overlay.path / "d1" / "n1").unlink()
        assert file.read(6) == b"below "
        assert numbers(overlay.path) == {name: at for name, at in before.items() if name != "d1/n1"}
        del expected["d1/n1"]
    assert facts(overlay.path) == expected
    check_invariants(Workspace.attach(overlay.name))


@pytest.mark.extended
@pytest.mark.parametrize("is_taken", [False, True], ids=["dropped", "another of that name"])
def test_a_snapshot_that_is_dropped_while_no_daemon_runs_stays_below(overlay: KeptOverlay, is_taken: bool) -> None:
    (overlay.below / "file").write_bytes(b"below")
    source = overlay.path.with_name("source")
    source.mkdir()
    with Workspace.mount(source, name=f"{overlay.name}-source", backend=f"host:{overlay.below}") as of_host:
        of_host.snapshot("base")
        overlay.backend = f"overlay:snapshot:base@{overlay.below}"
        overlay.mount()
        (overlay.path / "mine").write_bytes(b"mine")
        record = overlay.record
        assert record.keeper is not None
        os.kill(record.keeper, signal.SIGSTOP)
        os.kill(record.pid, signal.SIGKILL)
        (overlay.below / "file").write_bytes(b"other")
        succeeded(vfsd("store", "drop", "--force", f"host:{overlay.below}", "base"))
        if is_taken:
            of_host.snapshot("base")
        succeeded(vfsd("store", "gc"))
        os.kill(record.keeper, signal.SIGCONT)
        wait_until(lambda: overlay.record.pid != record.pid, "a replacement")
        assert (overlay.path / "file").read_bytes() == b"below"
        assert (overlay.path / "mine").read_bytes() == b"mine"
        check_invariants(Workspace.attach(overlay.name))
