"""Forks of host directories on real mounts: overlays over a snapshot in the store, which go back into the directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from protocol.store import Store
from tests.mount.conftest import Fork, mounted, put, text
from tests.mount.programs import git
from tests.support.unmounting import unmount_when_idle
from tests.support.waiting import wait_until
from vfsd import Workspace
from vfsd.cli.main import cli


@pytest.fixture
def directory(workdir: Path) -> Path:
    place = workdir / "directory"
    (place / "tree").mkdir(parents=True)
    (place / "tree" / "file").write_text("first\n")
    (place / "lines").write_text("".join(f"{number}\n" for number in range(40)))
    (place / "doomed").write_text("doomed\n")
    os.link(place / "lines", place / "linked")
    os.symlink("lines", place / "symlink")
    return place


@pytest.fixture
def source(directory: Path, workdir: Path, store: Path) -> Iterator[Workspace]:
    with mounted(workdir / "source", backend=f"host:{directory}", name="source", store=store) as workspace:
        yield workspace


def names(store: Path, directory: Path) -> set[str]:
    with Store(store) as opened:
        return {info.name for info in opened.snapshots(f"host:{directory}")}


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, list(words))


def listing(place: Path) -> dict[str, tuple[Any, ...]]:
    """Type, mode, times, links and content of everything below a directory."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(place.rglob("*")):
        seen = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        times = () if path.is_dir() else (seen.st_mtime_ns,)
        found[str(path.relative_to(place))] = (seen.st_mode, seen.st_nlink * (not path.is_dir()), *times, content)
    return found


def test_a_fork_is_a_copy_that_nothing_changes_but_its_own_programs(source: Workspace, fork: Fork) -> None:
    copy = fork("copy")
    assert listing(Path(copy.path)) == listing(Path(source.path))
    put(copy, "tree/file", "of the fork\n")
    put(source, "lines", "of the source\n")
    assert (text(source), text(copy, "lines")[:2]) == ("first\n", "0\n")
    status = copy.status()
    assert (status.forked_from, status.base) == ("source", "fork-1")
    listed = json.loads(run("list", "--json").stdout)["workspaces"]
    assert {each["name"]: each["forked_from"] for each in listed} == {"source": None, "copy": "source"}


def test_a_fork_of_an_attached_directory_has_a_base_that_cannot_change(
    directory: Path, workdir: Path, store: Path
) -> None:
    shutil.copytree(directory, workdir / "twin", symlinks=True)
    with Workspace.attach_directory(directory, name="attached", store=store) as project:
        with project.fork(workdir / "agent", name="agent") as agent:
            (directory / "tree" / "file").write_text("edited meanwhile\n")
            (directory / "lines").write_text("meanwhile\n" + (directory / "lines").read_text())
            (directory / "doomed").unlink()
            shown = {path: text(agent, path) for path in ("tree/file", "lines", "doomed")}
            assert shown == {path: (workdir / "twin" / path).read_text() for path in shown}
            put(agent, "lines", text(agent, "lines") + "of the agent\n")
            assert project.merge(agent.name).counts.total
            assert (directory / "tree" / "file").read_text() == "edited meanwhile\n"
            merged = "meanwhile\n" + (workdir / "twin" / "lines").read_text() + "of the agent\n"
            assert (directory / "lines").read_text() == merged
            put(agent, "tree/file", "of the agent\n")
            assert list(project.merge(agent.name).conflicts) == ["tree/file"]
            assert (directory / "tree" / "file").read_text() == "edited meanwhile\n"
        project.undo()
        assert (directory / "lines").read_text() == "meanwhile\n" + (workdir / "twin" / "lines").read_text()
    assert not [name for name in names(store, directory) if name.startswith("fork-")]


def test_a_snapshot_can_be_forked_and_is_not_dropped_with_the_fork(
    source: Workspace, fork: Fork, store: Path, directory: Path
) -> None:
    source.snapshot("named")
    put(source, "tree/file", "later\n")
    copy = fork("copy", snapshot="named")
    assert text(copy) == "first\n"
    with pytest.raises(FileNotFoundError):
        fork("other", snapshot="missing")
    unmount_when_idle(copy)
    assert names(store, directory) == {"named"}


def test_the_base_of_a_fork_is_not_dropped_from_the_store(
    source: Workspace, fork: Fork, store: Path, directory: Path
) -> None:
    fork("copy")
    drop = ("store", "drop", "--store", str(store), f"host:{directory}")
    for arguments in ((*drop, "fork-1"), (*drop, "--all"), ("drop", "-w", "source", "fork-1")):
        refused = run(*arguments)
        assert refused.exit_code == 1, refused.output
        assert "copy" in refused.stderr
        assert "--force" in refused.stderr
    assert names(store, directory) == {"fork-1"}
    assert run(*drop, "fork-1", "--force").exit_code == 0


def test_the_base_is_dropped_with_the_last_fork_that_needs_it(
    source: Workspace, fork: Fork, store: Path, directory: Path
) -> None:
    first = fork("first")
    base = first.status().base
    assert base == "fork-1"
    second = fork("second", snapshot=base)
    third = fork("third", of=second)
    unmount_when_idle(first)
    os.kill(second.pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{second.pid}"), "the source reaped its fork")
    assert names(store, directory) == {base}
    assert text(third) == "first\n"
    unmount_when_idle(third)
    wait_until(lambda: names(store, directory) == set(), "the last fork dropped the base")
    subprocess.run([sys.executable, "-m", "vfsd.cli.main", "unmount", "second"], check=True, capture_output=True)


def test_a_fork_outlives_its_source_and_can_be_merged_when_that_is_mounted_again(
    workdir: Path, directory: Path, store: Path
) -> None:
    options: dict[str, Any] = {"backend": f"host:{directory}", "name": "source", "store": store}
    with mounted(workdir / "source", **options) as source:
        copy = source.fork(workdir / "copy", name="copy")
    with copy:
        put(copy, "new", "of the fork\n")
        with mounted(workdir / "source", **options) as source:
            assert source.merge(copy).applied
            os.unlink(directory / "new")
        with mounted(workdir / "source", **options) as source:
            put(copy, "tree/file", "later\n")
            assert source.merge(copy).applied
            assert (directory / "tree" / "file").read_text() == "later\n"
            assert not (directory / "new").exists(), "it was merged before, by another daemon"
        assert "fork-1" in names(store, directory)
    assert "fork-1" not in names(store, directory)


def test_what_a_killed_fork_left_in_the_store_goes_at_the_next_mount(
    workdir: Path, directory: Path, store: Path
) -> None:
    options: dict[str, Any] = {"backend": f"host:{directory}", "name": "source", "store": store}
    with mounted(workdir / "source", **options) as source:
        copy = source.fork(workdir / "copy", name="copy")
        assert copy.merge(source).applied
        assert names(store, directory) == {"fork-1", "merged-1"}
    os.kill(copy.pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{copy.pid}"), "the fork has ended")
    subprocess.run([sys.executable, "-m", "vfsd.cli.main", "unmount", "copy"], check=True, capture_output=True)
    assert names(store, directory) == {"fork-1", "merged-1"}
    with mounted(workdir / "source", **options):
        wait_until(lambda: names(store, directory) == set(), "the mount dropped them")


def test_a_merge_keeps_links_and_changes_of_directories(source: Workspace, fork: Fork, directory: Path) -> None:
    copy = fork("copy")
    for number in range(2):
        put(copy, f"new-{number}", f"{number}\n")
        os.link(Path(copy.path, f"new-{number}"), Path(copy.path, "tree", f"new-{number}"))
    os.link(Path(copy.path, "doomed"), Path(copy.path, "kept"))
    with open(Path(copy.path, "linked"), "a") as file:
        file.write("end\n")
    os.chmod(Path(copy.path, "tree"), 0o711)
    put(source, "tree/other", "stays\n")
    assert source.merge(copy).conflicts == {}
    for one, other in (("lines", "linked"), ("new-0", "tree/new-0"), ("new-1", "tree/new-1"), ("doomed", "kept")):
        assert os.path.samefile(directory / one, directory / other)
    assert (directory / "new-1").read_text() == "1\n"
    assert (directory / "lines").read_text().endswith("39\nend\n")
    assert (directory / "tree").stat().st_mode & 0o777 == 0o711
    assert (directory / "tree" / "other").read_text() == "stays\n"
    source.undo()
    assert (directory / "tree").stat().st_mode & 0o777 == 0o755
    assert not (directory / "kept").exists()


def test_changes_go_both_ways_and_between_forks(source: Workspace, fork: Fork, directory: Path) -> None:
    first, second = fork("first"), fork("second", snapshot="fork-1")
    put(source, "between", "between\n")
    third = fork("third")
    assert first.diff(against=third).counts.added == 1
    put(first, "first", "first\n")
    put(second, "second", "second\n")
    put(third, "third", "third\n")
    assert third.merge(first).conflicts == {}
    assert first.merge(third).conflicts == {}
    assert {"first", "third", "between"} <= set(os.listdir(first.path)) == set(os.listdir(third.path))
    (directory / "direct").write_text("written below the mount\n")
    assert first.merge(source).applied
    assert text(first, "direct") == "written below the mount\n"
    assert second.merge(first).applied
    assert sorted(os.listdir(second.path)) == sorted({*os.listdir(directory), "first", "second", "third"})
    grandchild = fork("grandchild", of=second)
    os.unlink(Path(grandchild.path, "first"))
    assert source.adopt(grandchild).applied
    assert listing(directory) == listing(Path(grandchild.path))


@pytest.mark.extended
@pytest.mark.slow
def test_a_killed_merge_is_finished_or_undone(workdir: Path, directory: Path, store: Path) -> None:
    """The daemon of the directory dies while it changes the files."""
    options: dict[str, Any] = {"backend": f"host:{directory}", "name": "source", "store": store, "keeper": False}
    before = listing(directory)
    with mounted(workdir / "source", **options) as source:
        copy = source.fork(workdir / "copy", name="copy")
    with copy:
        for number in range(3000):
            put(copy, f"new-{number}", f"{number}\n")
        wanted = listing(Path(copy.path))
        for step in ("undo", "finish"):
            workspace = Workspace.mount(workdir / "source", **options)
            with subprocess.Popen(
                [sys.executable, "-m", "vfsd.cli.main", "merge", "copy", "-w", "source"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            ) as merging:  # fmt: skip
                wait_until(lambda: sum(1 for _ in directory.iterdir()) > 100, "the merge has begun")
                os.kill(workspace.pid, signal.SIGKILL)
                merging.wait()
            subprocess.run(
                [sys.executable, "-m", "vfsd.cli.main", "unmount", "source"], check=True, capture_output=True
            )
            with contextlib.suppress(BaseException):
                workspace.unmount()
            assert 100 < sum(1 for _ in directory.iterdir()) < 3000
            with Workspace.mount(workdir / "source", **options) as source:
                interrupted = source.status().interrupted
                assert interrupted is not None
                assert "a merge of copy was interrupted" in interrupted
                if step == "undo":
                    source.undo()
                    assert listing(directory) == before
                else:
                    source.restore(interrupted.split("`vfsd restore ")[1].split("`")[0].split()[0])
                    assert listing(directory) == wanted
                    os.unlink(directory / "new-0")
                    assert source.merge(copy).applied
                    assert not (directory / "new-0").exists(), "the merge that was finished counts"


def test_a_command_at_the_other_end_can_be_forked(directory: Path, workdir: Path, store: Path) -> None:
    options: dict[str, Any] = {"backend": "exec:python3", "workdir": str(directory), "name": "source", "store": store}
    with mounted(workdir / "source", **options) as source, source.fork(workdir / "copy", name="copy") as copy:
        put(copy, "tree/file", "of the fork\n")
        assert source.merge(copy).applied
        assert (directory / "tree" / "file").read_text() == "of the fork\n"


def test_the_options_of_the_source_that_apply_are_those_of_the_fork(
    workdir: Path, directory: Path, store: Path
) -> None:
    options: dict[str, Any] = {"backend": f"host:{directory}", "name": "source", "store": store}
    with (
        mounted(workdir / "source", **options, exec_on_host=True, cache_timeout_s=3.0, engine="pyfuse3") as source,
        source.fork(workdir / "copy", name="copy") as copy,
    ):
        assert copy.status().engine == "pyfuse3"
        assert copy.executor.run(["cat", "tree/file"]).stdout == b"first\n"
        shutil.rmtree(Path(copy.path, "tree"))
        assert (directory / "tree").exists()


def test_an_index_of_git_is_valid_in_a_fork(directory: Path, fork: Fork) -> None:
    git(directory, "init", "-q")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "all")
    copy = fork("copy")
    assert git(copy.path, "diff-files", "--name-only") == ""
    put(copy, "doomed", "changed")
    assert git(copy.path, "status", "--porcelain") == " M doomed\n"
