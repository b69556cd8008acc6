"""One `--max-memory` for a workspace and its forks, while they run: the worst contents, on real mounts."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mount.conftest import backend_over, check_invariants, complaints
from tests.support.unmounting import unmount_when_idle
from tests.support.waiting import wait_until
from vfsd import Workspace
from vfsd.daemon.forks.family import slack_bytes

MIB = 1 << 20
FILES, LIMIT, FORKS = 60, 130 * MIB, 3


@pytest.fixture(params=["memory", "overlay"])
def family(request: pytest.FixtureRequest, workdir: Path) -> Iterator[list[Workspace]]:
    """A source with FILES files of 1 MiB, and its forks; what still runs is checked and unmounted."""
    backend = backend_over(request.param, workdir / "below")
    made = [Workspace.mount(workdir / "source", backend=backend, name="source", engine="native", max_memory=LIMIT)]
    try:
        assert rewrite(made[0], create=True) == FILES
        made += [made[0].fork(workdir / f"fork-{number}", name=f"fork-{number}") for number in range(FORKS)]
        yield made
    finally:
        for workspace in reversed(made):
            if os.path.ismount(workspace.path) and os.path.exists(f"/proc/{workspace.pid}"):
                check_invariants(workspace)
                unmount_when_idle(workspace)
            else:
                subprocess.run([sys.executable, "-m", "vfsd.cli.main", "unmount", workspace.name], check=False)
        assert [line for workspace in made for line in complaints(workspace.name)] == []


def rewrite(workspace: Workspace, *, create: bool = False) -> int:
    """Overwrite all files in place; return how many were complete before the first ENOSPC."""
    for number in range(FILES):
        try:
            with open(Path(workspace.path, f"f{number}"), "wb" if create else "r+b", buffering=0) as file:
                data = os.urandom(MIB)
                while data:
                    data = data[file.write(data) :]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return number
    return FILES


def free_bytes(workspace: Workspace) -> int:
    """What df(1) shows as available."""
    found = os.statvfs(workspace.path)
    return found.f_bavail * found.f_frsize


def taken(workspaces: list[Workspace]) -> int:
    """Sum of the proportional set sizes of anonymous memory, in bytes."""
    found = 0
    for workspace in workspaces:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{workspace.pid}/smaps_rollup").read_text().splitlines()
            found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
    return found


@pytest.mark.extended
def test_forks_that_rewrite_everything_stay_within_the_limit(family: list[Workspace]) -> None:
    source, *forks = family
    peak = 0
    with ThreadPoolExecutor(FORKS) as threads:
        writing = [threads.submit(rewrite, fork) for fork in forks]
        while not all(each.done() for each in writing):
            peak = max(peak, taken(family))
    complete = [each.result() for each in writing]
    assert all(0 < count < FILES for count in complete), "each got room, and ENOSPC"
    assert max(peak, taken(family)) <= LIMIT + slack_bytes(len(family))
    assert rewrite(source) < FILES, "the source has no more room than its forks"
    for fork in forks:
        base = fork.status().base
        assert base in {each.name for each in fork.snapshots()}, "what cannot free memory is not dropped"
    # Nothing that frees memory is refused.
    Path(source.path, "f0").unlink()
    os.truncate(Path(forks[0].path, "f1"), 10)
    forks[1].restore(forks[1].status().base or "")
    forks[1].undo()
    shutil.rmtree(forks[2].path, ignore_errors=True)
    assert os.listdir(forks[2].path) == []
    assert taken(family) <= LIMIT + slack_bytes(len(family))


@pytest.mark.extended
@pytest.mark.parametrize("family", ["memory"], indirect=True)
@pytest.mark.parametrize("killed", [False, True], ids=["unmounted", "killed"])
def test_a_fork_that_ends_gives_its_memory_back(family: list[Workspace], killed: bool) -> None:
    source, first, second, _ = family
    assert min(free_bytes(each) for each in family) > 8 * MIB
    rewrite(first)
    assert rewrite(second) < FILES
    small = Path(second.path, "small")
    with pytest.raises(OSError, match="No space"):
        small.write_bytes(bytes(8 * MIB))
    assert max(free_bytes(source), free_bytes(second)) < 8 * MIB, "df shows space that no write gets"
    if killed:
        os.kill(first.pid, signal.SIGKILL)
    else:
        unmount_when_idle(first)

    def has_room() -> bool:
        with contextlib.suppress(OSError):
            return small.write_bytes(bytes(8 * MIB)) == 8 * MIB
        return False

    wait_until(has_room, "the memory of the fork that ended can be used")
    wait_until(lambda: free_bytes(source) > MIB, "df shows what the fork that ended has freed")


@pytest.mark.extended
@pytest.mark.parametrize("family", ["memory"], indirect=True)
def test_overwriting_without_a_snapshot_counts(family: list[Workspace]) -> None:
    """The blocks are changed in place, which the volume does not account for; the pages were shared before."""
    for fork in family[1:]:
        for info in fork.snapshots():
            fork.drop(info.name, force=True)
    complete = [rewrite(fork) for fork in family[1:]]
    assert complete[-1] < FILES
    assert taken(family) <= LIMIT + slack_bytes(len(family))


@pytest.mark.extended
@pytest.mark.parametrize("family", ["memory"], indirect=True)
def test_names_and_attributes_count(family: list[Workspace]) -> None:
    _, first, second, third = family
    rewrite(first)
    assert rewrite(second) < FILES

    def make_directories(top: str, name_bytes: int, attribute_bytes: int) -> None:
        for number in range(10_000):
            place = Path(top, f"{number:0{name_bytes}}")
            place.mkdir()
            if attribute_bytes:
                os.setxattr(place, "user.x", bytes(attribute_bytes))

    with pytest.raises(OSError, match="No space"):
        make_directories(second.path, 200, 0)
    with pytest.raises(OSError, match="No space"):
        make_directories(third.path, 8, 60_000)
    assert taken(family) <= LIMIT + slack_bytes(len(family))
