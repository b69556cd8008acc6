"""Forks that commit with git: merges keep repositories whole, and the printed commands take over the commits."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.mount.conftest import Fork, check_invariants, complaints, forking, mounted, put
from tests.mount.programs import git
from tests.support.unmounting import unmount_when_idle
from vfsd import Workspace
from vfsd.cli.main import cli
from vfsd.client.results import Repository


def repository(place: Path) -> None:
    place.mkdir()
    git(place, "init", "-q", "-b", "main")
    (place / "lines").write_text("".join(f"{number}\n" for number in range(20)))
    commit(place, "base")


def commit(place: Path, name: str) -> str:
    (place / name).write_text(name)
    git(place, "add", "-A")
    git(place, "commit", "-qm", name)
    return git(place, "rev-parse", "HEAD").strip()


def changed_line(place: Path, number: int) -> str:
    path = place / "lines"
    path.write_text(path.read_text().replace(f"\n{number}\n", f"\nchanged {number}\n"))
    git(place, "commit", "-qam", f"line {number}")
    return git(place, "rev-parse", "HEAD").strip()


def run(found: Repository) -> None:
    """Run the commands that an answer has, as a shell does."""
    assert found.commands
    subprocess.run(["sh", "-ec", "\n".join(found.commands)], check=True, capture_output=True)


def check(place: Path, *commits: str) -> None:
    """The work tree is clean, the repository whole, and each of the commits is in the history of HEAD."""
    assert git(place, "status", "--porcelain") == ""
    git(place, "fsck", "--strict")
    for each in commits:
        git(place, "merge-base", "--is-ancestor", each, "HEAD")


@pytest.fixture(params=["memory", *(pytest.param(each, marks=pytest.mark.extended) for each in ("overlay", "host"))])
def target(request: pytest.FixtureRequest, workdir: Path) -> Iterator[Workspace]:
    with mounted(workdir / "target", backend=request.param, engine="native", name="target") as workspace:
        yield workspace
        check_invariants(workspace)


@pytest.fixture
def fork(workdir: Path, target: Workspace) -> Iterator[Fork]:
    with forking(workdir, target) as fork:
        yield fork


def test_the_commands_take_over_the_commits_of_two_forks(target: Workspace, fork: Fork) -> None:
    ours = Path(target.path, "r")
    repository(ours)
    one, two = fork("one"), fork("two")
    first = changed_line(Path(one.path, "r"), 3)
    second = changed_line(Path(two.path, "r"), 16)
    git(Path(two.path, "r"), "gc", "-q")
    own = changed_line(ours, 10)
    put(target, "r/staged", "staged")
    git(ours, "add", "staged")
    before = git(ours, "status", "--porcelain=2", "--branch")

    dry = target.merge(one, dry_run=True)
    assert list(dry.repositories) == ["r/.git"]
    assert dry.repositories["r/.git"].commands == ()
    merged = target.merge(one)
    target.undo()
    assert git(ours, "status", "--porcelain=2", "--branch") == before
    assert git(ours, "for-each-ref", "refs/vfsd") == ""
    for each in (one, two):
        merged = target.merge(each)
        assert not merged.conflicts
        assert merged.repositories["r/.git"].refs == f"refs/vfsd/{each.name}"
        run(merged.repositories["r/.git"])
        check(ours, own)

    check(ours, first, second, own)
    assert "changed 3\n" in (ours / "lines").read_text()
    assert "changed 16\n" in git(ours, "show", "HEAD:lines")
    assert git(ours, "show", "HEAD:staged") == "staged"
    assert target.merge(two).repositories == {}


def test_a_repository_that_only_the_fork_changed_is_taken_whole(target: Workspace, fork: Fork) -> None:
    ours = Path(target.path, "r")
    repository(ours)
    copy = fork()
    new = commit(Path(copy.path, "r"), "new")
    os.utime(ours / "base", (1, 1))
    git(ours, "status")  # writes the index anew

    merged = target.merge(copy)

    assert not merged.conflicts
    assert not merged.repositories
    check(ours, new)
    os.utime(Path(copy.path, "r/base"), (2, 2))
    git(Path(copy.path, "r"), "status")
    own = commit(ours, "own")
    assert not target.merge(copy).repositories
    check(ours, own)


@pytest.mark.extended
def test_adopt_names_a_repository_that_would_be_lost_and_not_its_files(target: Workspace, fork: Fork) -> None:
    ours = Path(target.path, "r")
    repository(ours)
    copy = fork()
    new = commit(Path(copy.path, "r"), "new")
    git(ours, "gc", "-q")
    commit(ours, "own")

    refused = target.adopt(copy)

    assert list(refused.conflicts) == ["r/.git", "r/own"]
    assert target.adopt(copy, force=True).applied
    check(ours, new)
    target.undo()
    git(ours, "reset", "-q", "--hard", "HEAD")
    check(ours)


@pytest.mark.extended
def test_branches_that_cannot_be_fetched_are_offered_again(target: Workspace, fork: Fork) -> None:
    ours = Path(target.path, "r")
    repository(ours)
    copy = fork()
    new = commit(Path(copy.path, "r"), "new")
    own = commit(ours, "own")
    (ours / ".git/refs/vfsd").symlink_to("heads")

    failed = target.merge(copy).repositories["r/.git"]

    assert "could not be fetched: refs/vfsd is a symlink" in failed.detail
    assert failed.refs == ""
    refused = CliRunner().invoke(cli, ["unmount", copy.name])
    assert "--discard" in refused.stderr
    (ours / ".git/refs/vfsd").unlink()
    (ours / "new").unlink()
    found = target.merge(copy)
    assert not (ours / "new").exists()  # that change was merged
    run(found.repositories["r/.git"])
    check(ours, own, new)


@pytest.mark.extended
def test_the_answer_says_which_branches_are_there_and_that_markers_come_first(target: Workspace, fork: Fork) -> None:
    ours = Path(target.path, "r")
    repository(ours)
    repository(ours / "inner")
    copy = fork()
    theirs = Path(copy.path, "r")
    new = changed_line(theirs, 3)
    (theirs / ".git/refs/heads/broken").write_text("x\n")
    (theirs / "inner/.git").rename(theirs / "moved")
    (theirs / "inner/.git").write_text("gitdir: ../moved\n")
    own = changed_line(ours, 4)
    commit(ours / "inner", "own")

    found = target.merge(copy, conflicts="markers").repositories

    assert found["r/inner/.git"].refs == ""
    assert "no branches were fetched, because" in found["r/inner/.git"].detail
    assert "refs/vfsd/" in found["r/.git"].detail
    assert "without refs/heads/broken, which git cannot read there" in found["r/.git"].detail
    assert "once the conflicts are resolved:" in found["r/.git"].detail
    with pytest.raises(subprocess.CalledProcessError):
        run(found["r/.git"])
    assert git(ours, "rev-parse", "HEAD").strip() == own
    assert "<<<<<<<" in (ours / "lines").read_text()
    (ours / "lines").write_text("resolved\n")
    run(found["r/.git"])
    git(ours, "merge-base", "--is-ancestor", new, "HEAD")
    assert target.merge(copy).repositories == {}


@pytest.fixture
def overlay(workdir: Path) -> Iterator[tuple[Path, Workspace]]:
    """A directory with a repository `r`, and an overlay of it in which an agent has committed."""
    below = workdir / "below"
    below.mkdir()
    repository(below / "r")
    with Workspace.mount(workdir / "over", backend=f"overlay:{below}", engine="native", name="over") as workspace:
        yield below / "r", workspace
        check_invariants(workspace)
        unmount_when_idle(workspace)
    assert all("changed a file below" in line for line in complaints("over"))


@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["loose", "packed"])
def test_an_apply_leaves_a_repository_that_has_moved_on_below(overlay: tuple[Path, Workspace], is_packed: bool) -> None:
    below, workspace = overlay
    first = changed_line(Path(workspace.path, "r"), 3)
    own = commit(below, "own")
    if is_packed:
        git(below, "gc", "-q")
    before = git(below, "for-each-ref"), git(below, "ls-files", "--stage")

    assert list(workspace.apply(dry_run=True).repositories) == ["r/.git"]
    applied = workspace.apply(force=is_packed)

    assert applied.conflicts == {}
    assert {change.path for change in applied.changes} == {"r/lines"}
    assert git(below, "ls-files", "--stage") == before[1]
    assert git(below, "for-each-ref", "refs/heads") == before[0]
    assert applied.repositories["r/.git"].refs == "refs/vfsd/over", applied.repositories
    assert CliRunner().invoke(cli, ["unmount", "over"]).exit_code == 1
    run(applied.repositories["r/.git"])
    check(below, first, own)


def test_git_status_below_does_not_keep_an_apply_from_a_repository(overlay: tuple[Path, Workspace]) -> None:
    below, workspace = overlay
    new = commit(Path(workspace.path, "r"), "new")
    os.utime(below / "base", (1, 1))
    git(below, "status")
    (below / "other").write_text("staged\n")
    git(below, "add", "other")
    assert list(workspace.apply(dry_run=True).repositories) == ["r/.git"]
    git(below, "rm", "-q", "--cached", "other")
    (below / "other").unlink()

    applied = workspace.apply()

    assert (applied.conflicts, applied.repositories) == ({}, {})
    check(below, new)


@pytest.mark.extended
def test_the_commands_work_in_linked_work_trees_and_submodules(target: Workspace, fork: Fork) -> None:
    ours = Path(target.path)
    repository(ours / "main")
    git(ours / "main", "worktree", "add", "-q", "-b", "side", "../tree")
    (ours / "tree/.git").write_text("gitdir: ../main/.git/worktrees/tree\n")
    repository(ours / "library")
    repository(ours / "super")
    git(ours / "super", "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", "../library", "sub/lib")
    commit(ours / "super", "with the submodule")
    forks = [fork("one"), fork("two")]
    places = ["main", "tree", "super/sub/lib", "super"]
    commits: dict[str, list[str]] = {place: [] for place in places}
    for number, each in enumerate([target, *forks]):
        for place in places:
            commits[place].append(changed_line(Path(each.path, place), 3 + 7 * number))
    git(ours / "main", "gc", "-q")
    git(Path(forks[0].path, "super"), "gc", "-q")
    git(Path(forks[1].path, "super/sub/lib"), "gc", "-q")
    for place in places[:3]:
        put(target, f"{place}/staged", "staged")
        git(ours / place, "add", "staged")

    for each in forks:
        merged = target.merge(each)
        assert not merged.conflicts
        assert set(merged.repositories) == {"main/.git", "super/.git"}
        for found in merged.repositories.values():
            run(found)
        for place in places:
            check(ours / place)

    for place in places:
        check(ours / place, *commits[place])
        assert git(ours / place, "show", "HEAD:lines").count("changed") == 3
