"""Undo and redo on real mounts: the issue's examples, what is lost (nothing), and programs that write meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mount.conftest import BACKENDS
from tests.mount.programs import failed, succeeded, vfsd
from vfsd.client.connection import ControlClient
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import socket_path
from vfsd.operations.fs import FsWriteParams
from vfsd.operations.snapshots import DropParams

pytestmark = pytest.mark.workspaces(backends=BACKENDS)

MountIt = Callable[..., Workspace]


def state(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.iterdir() if path.is_file()}


def safeties(workspace: Workspace) -> dict[str, int | None]:
    return {info.name: info.step for info in workspace.snapshots(changes=False) if info.kind == "safety"}


@pytest.mark.both_engines
def test_undo_goes_back_step_by_step_and_redo_forward(workspace: Workspace, root: Path) -> None:
    file = root / "file"
    file.write_text("r1")
    workspace.snapshot("r1")
    file.write_text("r2")
    workspace.snapshot("r2")
    file.write_text("work")
    first, second = workspace.restore("r1"), workspace.restore("r2")
    assert (first.safety_snapshot, second.safety_snapshot) == ("safety-1", "safety-2")

    undone = workspace.undo()
    assert (undone.step, undone.source, undone.undo_steps, undone.redo_steps) == ("restore r2", "safety-2", 1, 1)
    assert file.read_text() == "r1"
    assert workspace.undo().step == "restore r1"
    assert file.read_text() == "work"
    with pytest.raises(FileNotFoundError, match="nothing"):
        workspace.undo()
    assert workspace.redo().step == "restore r1"
    assert file.read_text() == "r1"
    assert workspace.redo(dry_run=True).counts.modified == 1
    assert file.read_text() == "r1"
    assert workspace.redo().step == "restore r2"
    assert file.read_text() == "r2"
    with pytest.raises(FileNotFoundError, match="nothing to redo"):
        workspace.redo()
    # Going back and forth keeps one snapshot for each state, and no more.
    assert safeties(workspace) == {"safety-1": -2, "safety-2": -1, "safety-3": 0}
    assert workspace.undo(dry_run=True).counts.modified == 1


def test_what_is_written_between_the_steps_is_saved_and_comes_back(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("r1")
    workspace.snapshot("r1")
    (root / "file").write_text("work")
    workspace.restore("r1")
    (root / "after1").write_text("after r1")
    (root / "file").write_text("r2")
    workspace.snapshot("r2")
    (root / "more").write_text("more")
    workspace.restore("r2")
    (root / "after2").write_text("after r2")
    tip = state(root)

    workspace.undo()
    assert state(root) == {"file": "r2", "after1": "after r1", "more": "more"}
    (root / "here").write_text("after the undo")
    workspace.undo()
    assert state(root) == {"file": "work"}
    workspace.redo()
    assert state(root) == {"file": "r2", "after1": "after r1", "more": "more", "here": "after the undo"}
    workspace.redo()
    assert state(root) == tip
    # A step after an undo ends what redo could do; the state that it led to stays a snapshot.
    workspace.undo()
    workspace.undo()
    (root / "file").write_text("another way")
    workspace.restore("r1")
    with pytest.raises(FileNotFoundError, match="nothing to redo"):
        workspace.redo()
    [left] = [info for info in workspace.snapshots() if info.tag == "after restore r2"]
    assert left.step is None
    workspace.restore(left.name)
    assert state(root) == tip


def test_restores_that_change_nothing_leave_no_trace(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("s")
    workspace.snapshot("s")
    (root / "file").write_text("hours of work")
    assert workspace.restore("s").safety_snapshot == "safety-1"
    for _ in range(3):
        (root / "came and went").touch()  # moves the directory's time, and nothing else
        (root / "came and went").unlink()
        again = workspace.restore("s")
        assert (again.safety_snapshot, again.counts.total, again.changes) == (None, 0, ())
    told = vfsd("restore", "s", "-w", workspace.name)
    assert succeeded(told) == "nothing to restore: everything is as in s\n"
    answer = json.loads(succeeded(vfsd("restore", "s", "--json", "-w", workspace.name)))
    assert (answer["safety_snapshot"], answer["counts"]) == (None, {"added": 0, "modified": 0, "removed": 0})
    assert safeties(workspace) == {"safety-1": -1}
    # Times, modes and attributes of files are changes.
    for change in (
        lambda: os.utime(root / "file", ns=(1, 1)),
        lambda: (root / "file").chmod(0o601),
        lambda: os.setxattr(root / "file", "user.x", b"1"),
    ):
        change()
        assert workspace.restore("s").counts.modified == 1
    for _ in range(4):
        workspace.undo()
    assert (root / "file").read_text() == "hours of work"


def test_imports_and_archives_are_steps_too(workspace: Workspace, root: Path, workdir: Path) -> None:
    (root / "file").write_text("exported")
    workspace.export(workdir / "a.zip")
    assert workspace.import_archive(workdir / "a.zip").safety_snapshot is None
    (root / "file").write_text("changed")
    (root / "new").write_text("new")
    assert workspace.import_archive(workdir / "a.zip").counts.modified == 1
    assert workspace.restore(workdir / "a.zip").counts.removed == 1
    assert workspace.restore(workdir / "a.zip").safety_snapshot is None
    assert workspace.undo().step == "restore a.zip"
    assert state(root) == {"file": "exported", "new": "new"}
    assert workspace.undo().step == "import a.zip"
    assert state(root) == {"file": "changed", "new": "new"}
    workspace.redo()
    workspace.redo()
    assert state(root) == {"file": "exported"}


def test_the_command_line_says_which_way_one_can_go(workspace: Workspace, root: Path) -> None:
    picked = ("-w", workspace.name)
    (root / "file").write_text("one")
    workspace.snapshot("one")
    (root / "file").write_text("two")
    succeeded(vfsd("restore", "one", *picked))
    assert succeeded(vfsd("restore", "--undo", "-n", *picked)) == "M file\n"
    assert succeeded(vfsd("restore", "--undo", *picked)) == (
        "undid restore one: 1 modified\nthe state left is safety-2; `vfsd restore --redo` goes forward\n"
    )
    assert "nothing to undo" in failed(vfsd("restore", "--undo", *picked))
    rows = [line.split("\t") for line in succeeded(vfsd("snapshots", *picked)).splitlines()]
    assert [(row[0], *row[5:]) for row in rows] == [
        ("one", "user", "-", "-"),
        ("safety-1", "safety", "before restore one", "here"),
        ("safety-2", "safety", "after restore one", "redo 1"),
    ]
    assert succeeded(vfsd("restore", "--redo", *picked)) == (
        "redid restore one: 1 modified\nthe state left is safety-1; `vfsd restore --undo` goes back\n"
    )
    assert "nothing to redo" in failed(vfsd("restore", "--redo", *picked))
    # Paths of the state before: a step of its own.
    (root / "new").write_text("new")
    succeeded(vfsd("restore", "--undo", root / "file", *picked))
    assert state(root) == {"file": "two", "new": "new"}
    workspace.undo()
    assert state(root) == {"file": "one", "new": "new"}


def test_an_apply_and_a_discard_are_steps(mount: MountIt, workdir: Path) -> None:
    below = workdir / "below"
    below.mkdir()
    (below / "file").write_text("below")
    workspace = mount(backend=f"overlay:{below}")
    root = Path(workspace.path)
    assert workspace.apply().safety_snapshot is None  # nothing to apply
    (root / "file").write_text("applied")
    (root / "new").write_text("applied")
    assert workspace.apply(dry_run=True).safety_snapshot is None
    assert workspace.apply().safety_snapshot == "safety-1"
    (root / "file").write_text("since")
    assert workspace.discard().counts.modified == 1
    assert workspace.discard().safety_snapshot is None
    assert state(root) == {"file": "applied", "new": "applied"}
    assert workspace.undo().step == "discard"
    assert state(root) == {"file": "since", "new": "applied"}
    assert "undid apply: 1 modified\nwhat was applied stays in the directory below\n" in succeeded(
        vfsd("restore", "--undo", "-w", workspace.name)
    )
    assert state(root) == state(below) == {"file": "applied", "new": "applied"}
    workspace.redo()
    workspace.redo()
    assert state(root) == {"file": "applied", "new": "applied"}
    with pytest.raises(FileNotFoundError):
        workspace.redo()


def test_a_dropped_safety_snapshot_leaves_the_history(workspace: Workspace, root: Path) -> None:
    for number in range(3):
        (root / "file").write_text(str(number))
        workspace.snapshot(f"s{number}")
    for number in range(3):
        workspace.restore(f"s{number}")  # the last one is a step too, since s1 was restored before it
    workspace.drop("safety-2")
    assert workspace.undo().source == "safety-3"
    assert (root / "file").read_text() == "1"
    assert workspace.undo().source == "safety-1"
    assert (root / "file").read_text() == "2"
    with pytest.raises(FileNotFoundError):
        workspace.undo()


def test_drop_takes_all_or_none_and_says_which_steps_are_gone(workspace: Workspace, root: Path) -> None:
    for number in range(3):
        (root / "file").write_text(str(number))
        workspace.snapshot(f"s{number}")
    for number in range(3):
        workspace.restore(f"s{number}")
    with (
        ControlClient(socket_path(workspace.name)) as client,
        pytest.raises(FileNotFoundError, match="no such snapshot"),
    ):
        client.call("drop", DropParams("s0", ["safety-2", "nope"]))
    assert "nothing was dropped" in failed(vfsd("drop", "-w", workspace.name, "s0", "nope", "s0"))
    names = [info.name for info in workspace.snapshots()]
    assert names == ["s0", "s1", "s2", "safety-1", "safety-2", "safety-3"]
    done = vfsd("drop", "-w", workspace.name, "s0", "safety-2", "s0")
    succeeded(done)
    assert done.stderr == "vfsd: `vfsd restore --undo` would have gone to safety-2 in 2 steps; 2 undo steps left\n"
    workspace.undo()
    answer = json.loads(succeeded(vfsd("drop", "-w", workspace.name, "safety-1", "--json")))
    assert answer == {
        "dropped": ["safety-1"],
        "steps": [{"name": "safety-1", "step": -1}],
        "undo_steps": 0,
        "redo_steps": 1,
    }


# -- next to programs that write ------------------------------------------------------------------------
_WRITER = """
import itertools, os, sys, time
place = sys.argv[1]
print(flush=True)
for number in itertools.count():
    path = f"{place}/f{number % 20}"
    try:
        if number % 3 == 2:
            os.unlink(path)
        else:
            with open(path, "w") as file:
                file.write(str(number) * 100)
        if number % 7 == 6:
            os.rename(f"{place}/f{(number + 1) % 20}", f"{place}/f{(number + 5) % 20}")
    except FileNotFoundError:
        pass
    time.sleep(0.001)  # else three of these take the CPUs from the daemon that is tested
"""


@contextmanager
def writers(place: Path, count: int = 3) -> Iterator[None]:
    """Run programs that write, rename and remove the same files of `place`, a thousand times a second."""
    running = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", _WRITER, place], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for each in running:
            assert each.stdout is not None
            each.stdout.readline()
        yield
        assert all(each.poll() is None for each in running)
    finally:
        for each in running:
            each.kill()
            each.communicate()


@pytest.mark.extended
@pytest.mark.both_engines
@pytest.mark.slow
def test_restores_next_to_programs_that_write_succeed(
    workspace: Workspace, root: Path, workdir: Path, runs_long: bool
) -> None:
    kept = root / "kept"
    for directory in ("busy", "kept"):
        (root / directory).mkdir()
        for number in range(20):
            (root / directory / f"f{number}").write_text("old")
    workspace.snapshot("one")
    workspace.export(workdir / "one.zip")
    in_memory = workspace.status().backend != f"host:{workdir}/below"
    with writers(root / "busy"):
        for number in range(12 if runs_long else 3):
            (kept / "f1").write_text(f"new {number}")
            (kept / "f2").unlink()
            (kept / "since").touch()
            restored = workspace.restore("one", ["kept"])
            # Of this restore alone, whatever the programs did.
            assert restored.counts.total == 3
            assert {change.path for change in restored.changes} == {"kept/f1", "kept/f2", "kept/since"}
            assert restored.safety_snapshot is not None
            assert state(kept) == {f"f{number}": "old" for number in range(20)}
            for change in (
                lambda: workspace.restore("one"),
                workspace.undo,
                workspace.redo,
                lambda: workspace.import_archive(workdir / "one.zip"),
            ):
                done = change()
                assert not in_memory or not done.problems
    assert set(state(kept)) == {f"f{number}" for number in range(20)}
    # Nothing was torn: each step can still be taken back.
    while any(info.step is not None and info.step < 0 for info in workspace.snapshots(changes=False)):
        workspace.undo()


@pytest.mark.slow
def test_file_tools_next_to_programs_that_write_succeed(workspace: Workspace, root: Path, runs_long: bool) -> None:
    busy = root / "busy"
    busy.mkdir()
    with writers(busy), ControlClient(socket_path(workspace.name)) as client:
        for number in range(300 if runs_long else 50):
            name = f"busy/f{number % 20}"
            written = client.call("fs.write", FsWriteParams(path=name, content=b"x" * 100))
            assert (written.path, written.bytes_written) == (name, 100)


@pytest.mark.extended
def test_restores_at_once_come_one_after_the_other(workspace: Workspace, root: Path) -> None:
    for number in range(3):
        (root / "file").write_text(str(number))
        workspace.snapshot(f"s{number}")
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "vfsd.cli.main", "restore", f"s{number % 3}", "-w", workspace.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number in range(6)
    ]
    said = [command.communicate()[0] for command in commands]
    assert [command.returncode for command in commands] == [0] * len(commands), said
    steps = [info for info in workspace.snapshots() if info.step is not None]
    states = [(root / "file").read_text()]
    for _ in steps:
        workspace.undo()
        states.append((root / "file").read_text())
    assert all(a != b for a, b in itertools.pairwise(states))  # each was a step that changed something
    assert states[-1] == "2"
    for expected in reversed(states[:-1]):
        workspace.redo()
        assert (root / "file").read_text() == expected
