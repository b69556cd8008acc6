"""Forks of a `--persist` workspace: merging goes on after its daemon was killed, or it was mounted again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import backend_over, check_invariants
from tests.mount.programs import failed, succeeded, vfsd, wait_ended
from tests.mount.test_persist import Persistent
from tests.support.unmounting import unmount_when_idle
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace

Fork = Callable[..., Workspace]


class Source(Persistent):
    """A workspace with a journal that is mounted again and again."""

    def __init__(self, workdir: Path, backend: str) -> None:
        super().__init__(workdir)
        self.backend = backend

    @property
    def live(self) -> Workspace:
        assert self.running is not None
        return self.running

    def mount(self, **options: Any) -> Workspace:
        return super().mount(**{"backend": self.backend, "engine": "native", **options})

    def again(self, *, is_killed: bool = True) -> Workspace:
        """End the daemon, and mount the workspace again."""
        if is_killed:
            self.kill()
        else:
            unmount_when_idle(self.live)
        return self.mount()


@pytest.fixture(params=["memory", pytest.param("overlay", marks=pytest.mark.long)])
def source(request: pytest.FixtureRequest, workdir: Path) -> Iterator[Source]:
    below = workdir / "below"
    below.mkdir()
    source = Source(workdir, backend_over(request.param, below))
    if request.param == "overlay":
        fill(below)
    source.mount()
    if request.param == "memory":
        fill(source.path)
    (source.path / "own").write_text("own\n")
    yield source
    if source.running is not None and os.path.ismount(source.path):
        check_invariants(source.running)
    source.end()


def fill(place: Path) -> None:
    (place / "tree").mkdir()
    (place / "tree" / "file").write_text("first\n")
    (place / "lines").write_text("".join(f"{number}\n" for number in range(40)))
    (place / "doomed").write_text("doomed\n")


@pytest.fixture
def fork(workdir: Path, source: Source) -> Iterator[Fork]:
    made: list[Workspace] = []

    def make(name: str = "copy", of: Workspace | None = None, **options: Any) -> Workspace:
        made.append((of or source.live).fork(workdir / name, name=f"{workdir.name}-{name}", **options))
        return made[-1]

    yield make
    for workspace in reversed(made):
        if os.path.ismount(workspace.path):
            check_invariants(workspace)
            vfsd("unmount", workspace.name, "--discard")


def put(workspace: Workspace, path: str, content: str) -> None:
    Path(workspace.path, path).write_text(content)


def text(workspace: Workspace, path: str) -> str | None:
    place = Path(workspace.path, path)
    return place.read_text() if place.exists() else None


def names(workspace: Workspace) -> list[str]:
    return [info.name for info in workspace.snapshots()]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("source", "is_killed"), [("memory", True), ("memory", False), ("overlay", True)], indirect=["source"]
)
def test_a_fork_is_merged_after_its_source_was_mounted_again(source: Source, fork: Fork, is_killed: bool) -> None:
    copy = fork()
    put(copy, "tree/file", "of the fork\n")
    put(source.live, "lines", "of the source\n")
    os.unlink(source.path / "doomed")
    target = source.again(is_killed=is_killed)
    put(copy, "new", "new\n")
    assert "tree/file" in {each.path for each in target.diff(against=copy).changes}
    done = target.merge(copy)
    assert (done.applied, done.base, sorted(each.path for each in done.changes)) == (
        True, "fork-1", ["new", "tree/file"]
    )  # fmt: skip
    assert (text(target, "tree/file"), text(target, "lines"), text(target, "new")) == (
        "of the fork\n", "of the source\n", "new\n"
    )  # fmt: skip
    assert text(target, "doomed") is None
    target.undo()
    assert (text(target, "tree/file"), text(target, "lines"), text(target, "new")) == (
        "first\n", "of the source\n", None
    )  # fmt: skip


def test_what_was_merged_is_not_offered_again_after_a_restart_unless_it_was_undone(source: Source, fork: Fork) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    put(copy, "tree/file", "changed\n")
    target = source.live
    target.merge(copy)
    target = source.again()
    os.unlink(source.path / "new")
    put(target, "tree/file", "of the target\n")
    put(copy, "later", "later\n")
    done = target.merge(copy)
    assert (done.base, [each.path for each in done.changes]) == ("merged-1", ["later"])
    assert (text(target, "new"), text(target, "tree/file")) == (None, "of the target\n")
    target.undo()
    target = source.again()
    assert [each.path for each in target.merge(copy).changes] == ["later"]
    target.undo()
    target.undo()
    target = source.again()
    assert {each.path for each in target.merge(copy).changes} == {"new", "tree/file", "later"}


def test_a_restart_after_an_undo_does_not_lose_the_changes_of_the_fork(source: Source, fork: Fork) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    source.live.merge(copy)
    source.live.undo()
    target = source.again()
    assert [each.path for each in target.merge(copy).changes] == ["new"]
    target.undo()
    target.redo()
    assert text(target, "new") == "new\n"
    target = source.again()
    assert target.merge(copy).counts.total == 0


def test_merges_go_both_ways_and_between_forks_after_a_compaction_and_a_restart(source: Source, fork: Fork) -> None:
    one, two = fork("one"), fork("two")
    put(one, "one", "one\n")
    put(two, "two", "two\n")
    source.live.merge(one)
    succeeded(vfsd("compact", "-w", source.name))
    target = source.again()
    put(target, "own", "of the source\n")
    assert {each.path for each in one.merge(target).changes} == {"own"}
    assert {each.path for each in two.merge(one).changes} == {"one", "own"}
    target = source.again()
    assert {each.path for each in target.merge(two).changes} == {"two"}
    assert [text(target, name) for name in ("one", "two", "own")] == ["one\n", "two\n", "of the source\n"]
    third = fork("three")
    put(third, "three", "three\n")
    assert {each.path for each in source.again().merge(third).changes} == {"three"}


def test_adopt_knows_after_a_restart_what_would_be_lost(source: Source, fork: Fork) -> None:
    copy = fork()
    put(copy, "tree/file", "of the fork\n")
    target = source.again()
    assert target.adopt(copy).applied
    assert text(target, "tree/file") == "of the fork\n"
    put(target, "later", "later\n")
    refused = target.adopt(copy)
    assert (refused.applied, list(refused.conflicts)) == (False, ["later"])


def test_a_base_is_kept_over_restarts_as_long_as_a_fork_lives(source: Source, fork: Fork) -> None:
    first, second = fork("first"), fork("second")
    grandchild = fork("grandchild", of=second)
    target = source.again()
    assert names(target) == ["fork-1", "fork-2"]
    assert "--force" in failed(vfsd("drop", "fork-1", "-w", target.name))
    succeeded(vfsd("unmount", first.name))  # it is as it was forked, and its source runs
    wait_until(lambda: names(target) == ["fork-2"], "the base of the first fork was dropped")
    os.kill(second.pid, signal.SIGKILL)
    put(grandchild, "new", "new\n")
    target = source.again()
    assert [each.path for each in target.merge(grandchild).changes] == ["new"]
    assert "fork-2" in names(target)
    succeeded(vfsd("unmount", grandchild.name))  # everything of it was merged
    wait_until(lambda: "fork-2" not in names(target), "the base of the second fork was dropped")
    succeeded(vfsd("unmount", second.name))


def test_the_bases_of_forks_that_ended_meanwhile_are_dropped_by_the_mount(source: Source, fork: Fork) -> None:
    copy = fork()
    source.live.snapshot("mine")
    source.kill()
    succeeded(vfsd("unmount", copy.name, "--discard"))
    target = source.mount()
    wait_until(lambda: names(target) == ["mine"], "the base was dropped")


def test_a_copy_of_the_journal_under_another_name_is_another_workspace(
    source: Source, fork: Fork, workdir: Path
) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    source.kill()
    shutil.copytree(source.journal, workdir / "copied")
    target = source.mount()
    place = workdir / "place"
    place.mkdir()
    options: dict[str, Any] = {
        "name": f"{workdir.name}-other",
        "persist": True,
        "keeper": False,
        "backend": source.backend,
    }
    with Workspace.mount(place, **options, journal_dir=workdir / "copied") as other:
        with pytest.raises(OSError, match="no state in common"):
            other.merge(copy)
        with pytest.raises(OSError, match="no state in common"):
            target.merge(other)
    assert target.merge(copy).applied


@pytest.mark.parametrize("source", ["memory"], indirect=True)
def test_a_fork_is_merged_after_a_keeper_has_replaced_the_daemon(source: Source, fork: Fork) -> None:
    unmount_when_idle(source.live)
    target = source.mount(keeper=True)
    copy = fork()
    put(copy, "new", "new\n")
    pid = target.status().pid
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    assert target.merge(copy).applied
    assert target.status().pid != pid
    assert text(target, "new") == "new\n"
