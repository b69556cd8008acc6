"""`vfsd upgrade` of forks, and of workspaces with running forks: lineage, bases and the common limit are kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import Fork, check_invariants, forking, mounted, put, text
from tests.mount.programs import failed, succeeded, vfsd
from tests.support.unmounting import unmount_when_idle
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace

MIB = 1 << 20


def options(workdir: Path, kind: str) -> dict[str, Any]:
    below = workdir / "below"
    (below / "tree").mkdir(parents=True)
    (below / "tree" / "file").write_text("of the lower layer\n")
    found: dict[str, dict[str, Any]] = {
        "memory": {},
        "persist": {"persist": True, "journal_dir": workdir / "journal"},
        "overlay": {"backend": f"overlay:{below}"},
        "host": {"backend": f"host:{below}", "store": workdir / "store"},
    }
    return found[kind]


@pytest.fixture(params=["memory", "overlay", "persist", "host"])
def source(workdir: Path, request: pytest.FixtureRequest) -> Iterator[Workspace]:
    given = options(workdir, request.param)
    with mounted(workdir / "source", name=f"{workdir.name}-source", **given) as workspace:
        (Path(workspace.path) / "tree").mkdir(exist_ok=True)
        put(workspace, "tree/file", "first\n")
        yield workspace


def bases(workspace: Workspace) -> list[str]:
    return [info.name for info in workspace.snapshots() if info.name.startswith("fork-")]


@pytest.mark.extended
def test_a_source_and_its_forks_are_upgraded_and_merged(source: Workspace, fork: Fork) -> None:
    first, second = fork("first"), fork("second")
    put(first, "of-first", "before\n")
    put(second, "of-second", "before\n")
    put(source, "of-source", "before\n")
    before = first.status()
    for workspace in (source, first):
        pid = workspace.pid
        workspace.upgrade()
        assert workspace.pid != pid
    after = first.status()
    assert (after.forked_from, after.base) == (source.name, before.base)
    put(first, "of-first", "after\n")
    third = fork("third", of=first)
    put(third, "of-third", "of a fork of the upgraded fork\n")
    first.merge(third)
    merged = source.merge(first)
    assert text(source, "of-first") == "after\n"
    assert text(source, "of-third") == "of a fork of the upgraded fork\n"
    assert text(source, "of-source") == "before\n"
    assert not merged.conflicts
    source.merge(second)
    assert text(source, "of-second") == "before\n"
    put(first, "tree/file", "changed again\n")
    source.upgrade()
    source.merge(first)  # only what is new
    assert text(source) == "changed again\n"
    succeeded(vfsd("restore", "--undo", "-w", source.name))
    assert text(source) == "first\n"
    check_invariants(source)


@pytest.mark.extended
@pytest.mark.parametrize("source", ["memory", "host"], indirect=True)
def test_the_base_is_dropped_when_the_last_fork_has_ended(source: Workspace, fork: Fork) -> None:
    first, second = fork("first"), fork("second")
    first.upgrade()
    source.upgrade()
    unmount_when_idle(second)
    put(first, "of-first", "x")
    source.merge(first)
    unmount_when_idle(first)
    wait_until(lambda: not bases(source), "the bases to be dropped")


@pytest.mark.extended
@pytest.mark.parametrize("source", ["overlay"], indirect=True)
def test_a_fork_of_a_running_source_is_not_the_only_place_of_its_content(source: Workspace, fork: Fork) -> None:
    """So its unmount asks no question, before and after the upgrades."""
    copy = fork("first")
    source.upgrade()
    copy.upgrade()
    succeeded(vfsd("unmount", copy.name))


# -- the common limit ------------------------------------------------------------------------------
def fill(workspace: Workspace, name: str, mib: int) -> int:
    """Write up to `mib` MiB; return how many were written before ENOSPC."""
    with (Path(workspace.path) / name).open("wb", buffering=0) as file:
        for number in range(mib):
            try:
                assert file.write(os.urandom(MIB)) == MIB
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return number
    return mib


@pytest.mark.extended
def test_the_limit_of_the_family_holds_after_upgrades(workdir: Path) -> None:
    with (
        mounted(workdir / "source", name=f"{workdir.name}-source", max_memory=200 * MIB) as source,
        forking(workdir, source) as fork,
    ):
        assert fill(source, "content", 40) == 40
        first, second = fork("first"), fork("second")
        first.upgrade()  # shares nothing any more: the family takes 80 MiB
        source.upgrade()  # 120 MiB
        assert fill(second, "more", 40) == 40
        done = fill(first, "more", 100)
        assert done < 60, "the four copies and the new content fit into 200 MiB"
        assert fill(source, "more", 100) < 60
        reason = failed(vfsd("upgrade", second.name))
        assert "shares no memory with forks" in reason
        assert "of --max-memory" in reason
        (Path(first.path) / "more").unlink()
        (Path(source.path) / "more").unlink()
        (Path(second.path) / "more").unlink()
        unmount_when_idle(first)
        second.upgrade()
        assert fill(second, "again", 50) == 50
