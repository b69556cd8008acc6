"""The hook that gives a sub-agent of Claude Code a copy of the workspace, or a worktree of git."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.programs import succeeded, vfsd
from vfsd.cli.agent_settings import hook_commands
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_records, socket_dir

pytestmark = pytest.mark.workspaces(engines=["native"])

PROGRAM = shlex.split(hook_commands("claude")["WorktreeCreate"])


@pytest.fixture
def places() -> Iterator[Path]:
    """Where vfsd makes mountpoints; they are unmounted when the test is over."""
    directory = Path(socket_dir()) / "places"
    yield directory
    for record in read_records():
        if Path(record.mountpoint).parent == directory:
            succeeded(vfsd("unmount", record.name, "--discard"))
    assert not directory.exists() or list(directory.iterdir()) == []


def hook(event: str, **members: object) -> subprocess.CompletedProcess[str]:
    data = json.dumps({"session_id": "s", "hook_event_name": event, **members})
    return subprocess.run(PROGRAM, input=data, capture_output=True, text=True, check=False, cwd="/")


def created(cwd: str, name: str) -> Path:
    done = hook("WorktreeCreate", cwd=cwd, name=name)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    return Path(done.stdout.rstrip("\n"))


@pytest.mark.extended
def test_a_sub_agent_gets_a_fork_of_the_workspace(workspace: Workspace, root: Path, places: Path) -> None:
    (root / "file").write_text("one\n")
    first, second = created(workspace.path, "fix the bug/1"), created(workspace.path, "fix the bug/1")
    assert first.parent == second.parent == places
    assert [Workspace.attach(each.name).status().forked_from for each in (first, second)] == [workspace.name] * 2
    (first / "file").write_text("two\n")
    assert [(each / "file").read_text() for each in (first, second, root)] == ["two\n", "one\n", "one\n"]

    assert hook("WorktreeRemove", worktree_path=str(second)).returncode == 0
    assert not second.exists()
    refused = hook("WorktreeRemove", worktree_path=str(first))
    assert refused.returncode == 1
    assert "holds changes" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert (first / "file").read_text() == "two\n"
    succeeded(vfsd("merge", first.name, "-w", workspace.name))
    assert (root / "file").read_text() == "two\n"


def test_a_fork_whose_source_has_ended_is_kept(workdir: Path, places: Path) -> None:
    with Workspace.mount(workdir / "source", name="source", engine="native") as source:
        Path(source.path, "file").write_text("one\n")
        copy = created(source.path, "agent")
    assert hook("WorktreeRemove", worktree_path=str(copy)).returncode == 1
    assert (copy / "file").read_text() == "one\n"


@pytest.mark.parametrize("engine", ["pyfuse3"], indirect=True)
def test_where_no_fork_can_be_made_it_is_an_overlay(workspace: Workspace, root: Path, places: Path) -> None:
    (root / "file").write_text("one\n")
    first, second = created(workspace.path, "fix the bug/1"), created(workspace.path, "fix the bug/1")
    assert first.parent == second.parent == places
    assert first != second
    (first / "file").write_text("two\n")
    assert [(each / "file").read_text() for each in (first, second, root)] == ["two\n", "one\n", "one\n"]

    assert hook("WorktreeRemove", worktree_path=str(second)).returncode == 0
    assert not second.exists()
    refused = hook("WorktreeRemove", worktree_path=str(first))
    assert refused.returncode == 1
    assert "that were not applied: 1 modified" in refused.stderr
    assert refused.stderr.count("\n") == 1
    succeeded(vfsd("apply", "-w", first.name))
    assert (root / "file").read_text() == "two\n"
    assert hook("WorktreeRemove", worktree_path=str(first)).returncode == 0
    assert not first.exists()


def test_the_calls_of_a_sub_agent_are_kept_in_its_copy(
    workspace: Workspace, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = created(workspace.path, "agent")
    monkeypatch.setenv("VFSD_WORKSPACE", workspace.name)
    keep = shlex.split(hook_commands("claude")["PostToolUse"].removesuffix(" || true"))
    for cwd, call in ((str(copy), "toolu_1"), (workspace.path, "toolu_2")):
        event = {"hook_event_name": "PostToolUse", "cwd": cwd, "tool_use_id": call, "session_id": "s"}
        subprocess.run(keep, input=json.dumps(event), text=True, check=True)
    fork = Workspace.attach(copy.name)
    assert [each.name for each in workspace.snapshots()] == [fork.status().base, "toolu_2"]
    assert [each.name for each in fork.snapshots()] == [fork.status().base, "toolu_1"]


def test_outside_a_workspace_it_is_a_worktree_of_git(workdir: Path, places: Path) -> None:
    project = workdir / "project"
    project.mkdir()
    refused = hook("WorktreeCreate", cwd=str(project), name="agent")
    assert refused.returncode == 1
    assert "neither a workspace nor a git repository" in refused.stderr
    subprocess.run(["git", "init", "-q", project], check=True)
    (project / "file").write_text("one\n")
    subprocess.run(["git", "-C", project, "add", "file"], check=True)
    subprocess.run(["git", "-C", project, "commit", "-qm", "x"], check=True)
    copy = created(str(project), "agent")
    assert copy == project / ".claude" / "worktrees" / "agent"
    assert (copy / "file").read_text() == "one\n"
    (copy / "file").write_text("two\n")
    assert hook("WorktreeRemove", worktree_path=str(copy)).returncode == 1
    subprocess.run(["git", "-C", copy, "commit", "-qam", "work of the sub-agent"], check=True)
    assert hook("WorktreeRemove", worktree_path=str(copy)).returncode == 0
    assert not copy.exists()
    assert (created(str(project), "agent") / "file").read_text() == "two\n", "its branch is not reset"


@pytest.mark.extended
@pytest.mark.parametrize("path", ["", "relative", "/", "/etc", "/nowhere/.claude/worktrees/x"])
def test_nothing_else_is_removed(workspace: Workspace, path: str) -> None:
    done = hook("WorktreeRemove", worktree_path=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert hook("WorktreeRemove", worktree_path=workspace.path).returncode == 1
    assert os.path.ismount(workspace.path)
