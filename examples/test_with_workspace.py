"""The pytest plugin: `pip install vfsd`, then `pytest examples/test_with_workspace.py`.  No import is needed."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfsd import Workspace
    from vfsd.integrations.pytest_plugin import WorkspaceFactory


def build(directory: str) -> None:
    """The program under test: it writes into the directory that it is started in."""
    subprocess.run(["sh", "-c", "mkdir out && echo built >out/app"], cwd=directory, check=True)


def test_a_build_adds_files_and_changes_none(workspace: Workspace) -> None:
    workspace.filesystem.write("app.c", "int main(void) { return 0; }\n")
    workspace.snapshot("before")
    build(workspace.path)
    assert [(change.path, change.change) for change in workspace.diff("before").changes] == [
        ("out", "added"),
        ("out/app", "added"),
    ]


def test_the_next_test_starts_with_an_empty_workspace(workspace: Workspace) -> None:
    assert not workspace.diff()
    assert not workspace.filesystem.exists("out")


def test_two_workspaces_at_once(workspace: Workspace, workspace_factory: WorkspaceFactory) -> None:
    other = workspace_factory(max_bytes=1_000_000)
    build(other.path)
    assert not workspace.filesystem.exists("out")
