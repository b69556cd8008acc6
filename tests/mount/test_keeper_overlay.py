"""The keeper of overlays: what the kernel knows of the lower layer is found again by the next daemon."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.kept_workspaces import (
    KeptOverlay,
    change_at_random,
    check_executed_once,
    end_kept,
    facts,
    kill_replacements,
)
from tests.mount.programs import Program, succeeded, vfsd
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace

kept = fixture_of(KeptOverlay, end_kept)


def fill(below: Path, files: int = 40) -> None:
    for number in range(files):
        directory = below / f"d{number % 3}"
        directory.mkdir(exist_ok=True)
        (directory / f"n{number % 12}").write_bytes(b"below %d" % number * 300)
    (below / "n1").write_bytes(b"x" * 300_000)
    os.link(below / "n1", below / "n2")


def numbers(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.lstat().st_ino for path in root.rglob("*")}


@pytest.mark.extended
def test_open_files_mappings_directories_and_locks_continue(kept: KeptOverlay) -> None:
    below, root = kept.below, kept.path
    (below / "dir" / "below").mkdir(parents=True)
    for number in range(1500):
        (below / "dir" / f"f{number}").touch()
    (below / "file").write_bytes(b"a" * 300_000)
    (below / "gone").write_bytes(b"of the lower layer")
    (below / "quiet").write_bytes(b"only open")
    kept.mount()
    with (
        Program() as program,
        (root / "gone").open("r+b", buffering=0) as gone,
        (root / "quiet").open("r+b", buffering=0) as quiet,
        (root / "file").open("r+b") as file,
    ):
        program(f"os.chdir({str(root / 'dir' / 'below')!r})")
        program(f"held = open({str(root / 'file')!r}, 'r+b')")
        program("fcntl.flock(held, fcntl.LOCK_EX)")
        listing = os.scandir(root / "dir")
        seen = [next(listing).name for _ in range(100)]
        with mmap.mmap(file.fileno(), 0) as mapping:
            mapping[0:1] = b"b"
            kept.kill()
            (root / "gone").unlink()  # the new daemon has never seen the file
            (root / "quiet").unlink()
            kept.kill()
            mapping[200_000:200_001] = b"c"
            mapping.flush()
            data = (root / "file").read_bytes()
            assert (data[0:2], data[199_999:200_002]) == (b"ba", b"aca")
        assert program("os.getcwd()") == str(root / "dir" / "below")
        program("open('new', 'w').close()")
        assert os.pread(gone.fileno(), 100, 0) == b"of the lower layer"
        quiet.write(b"ONLY")
        assert os.pread(quiet.fileno(), 100, 0) == b"ONLY open"
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen += [entry.name for entry in listing]
        assert len(seen) == len(set(seen)) == 1501
    check_invariants(Workspace.attach(kept.name))


def test_inode_numbers_stay(kept: KeptOverlay) -> None:
    fill(kept.below)
    kept.mount()
    before = numbers(kept.path)
    kept.kill()
    (kept.path / "d0" / "n0").write_bytes(b"changed")
    kept.kill()
    assert numbers(kept.path) == before
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
@pytest.mark.slow
def test_an_interrupted_listing_of_a_directory_that_changes_is_complete(kept: KeptOverlay, runs_long: bool) -> None:
    for number in range(4000):
        (kept.below / f"a-longer-name-{number}").touch()
    kept.mount()
    with os.scandir(kept.path) as listing:
        seen = [next(listing).name for _ in range(10)]
        for name in seen:
            (kept.path / name).unlink()
        kept.kill()
        seen += [entry.name for entry in listing]
    assert len(seen) == len(set(seen)) == 4000
    with kept.being_killed(5, times=None if runs_long else 8):
        for name in os.listdir(kept.path):
            (kept.path / name).unlink()
    assert not os.listdir(kept.path)


def test_a_random_writer_sees_what_its_twin_sees(kept: KeptOverlay, workdir: Path, runs_long: bool) -> None:
    fill(kept.below)
    twin = workdir / "twin"
    shutil.copytree(kept.below, twin, copy_function=shutil.copy2)
    (twin / "n2").unlink()
    os.link(twin / "n1", twin / "n2")
    workspace = kept.mount()
    deadline = time.monotonic() + (600 if runs_long else 3)
    with kept.being_killed(1):
        change_at_random([kept.path, twin], 1, lambda: time.monotonic() > deadline and kept.kills > 4)
    assert facts(kept.path) == facts(twin)
    check_invariants(workspace)


@pytest.mark.extended
@pytest.mark.parametrize("change", ["exclusive create", "unlink", "rename", "append", "fallocate", "copy", "link"])
def test_a_request_is_executed_once_at_whichever_step_the_daemon_dies(kept: KeptOverlay, change: str) -> None:
    check_executed_once(kept, change)


def test_a_file_that_changes_below_while_no_daemon_runs_is_noticed(kept: KeptOverlay) -> None:
    (kept.below / "changes").write_bytes(b"1" * 8192)
    (kept.below / "vanishes").write_bytes(b"2" * 8192)
    kept.mount()
    with (kept.path / "changes").open("rb", buffering=0) as file, (kept.path / "vanishes").open("rb") as other:
        assert os.pread(file.fileno(), 4096, 0) == b"1" * 4096
        os.stat(other.fileno())
        kill_replacements(kept, 1)
        (kept.below / "changes").write_bytes(b"3" * 8192)
        (kept.below / "vanishes").unlink()

        def is_new() -> bool:
            try:
                return (kept.path / "changes").read_bytes() == b"3" * 8192
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
    kept: KeptOverlay, workdir: Path, make: Callable[[Path, Path], str]
) -> None:
    fill(kept.below)
    kept.backend = make(workdir, kept.below)
    kept.mount()
    expected = facts(kept.path)
    before = numbers(kept.path)
    with (kept.path / "d1" / "n1").open("rb", buffering=0) as file:
        kept.kill()
        (kept.path / "d1" / "n1").unlink()
        assert file.read(6) == b"below "
        assert numbers(kept.path) == {name: at for name, at in before.items() if name != "d1/n1"}
        del expected["d1/n1"]
    assert facts(kept.path) == expected
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
@pytest.mark.parametrize("is_taken", [False, True], ids=["dropped", "another of that name"])
def test_a_snapshot_that_is_dropped_while_no_daemon_runs_stays_below(kept: KeptOverlay, is_taken: bool) -> None:
    (kept.below / "file").write_bytes(b"below")
    source = kept.path.with_name("source")
    source.mkdir()
    with Workspace.mount(source, name=f"{kept.name}-source", backend=f"host:{kept.below}") as of_host:
        of_host.snapshot("base")
        kept.backend = f"overlay:snapshot:base@{kept.below}"
        kept.mount()
        (kept.path / "mine").write_bytes(b"mine")
        record = kept.record
        assert record.keeper is not None
        os.kill(record.keeper, signal.SIGSTOP)
        os.kill(record.pid, signal.SIGKILL)
        (kept.below / "file").write_bytes(b"other")
        succeeded(vfsd("store", "drop", "--force", f"host:{kept.below}", "base"))
        if is_taken:
            of_host.snapshot("base")
        succeeded(vfsd("store", "gc"))
        os.kill(record.keeper, signal.SIGCONT)
        wait_until(lambda: kept.record.pid != record.pid, "a replacement")
        assert (kept.path / "file").read_bytes() == b"below"
        assert (kept.path / "mine").read_bytes() == b"mine"
        check_invariants(Workspace.attach(kept.name))
