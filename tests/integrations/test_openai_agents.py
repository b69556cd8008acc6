"""OpenAI Agents SDK: the editor of its apply_patch tool on a real mount."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("agents")

from agents import ApplyPatchEditor, ApplyPatchOperation

from vfsd.client.workspace import Workspace
from vfsd.integrations.openai_agents import VfsdEditor


def operation(kind: str, path: str, diff: str | None = None, move_to: str | None = None) -> ApplyPatchOperation:
    return ApplyPatchOperation(type=kind, path=path, diff=diff, move_to=move_to)


def test_files_are_created_updated_moved_and_deleted(workspace: Workspace) -> None:
    editor, root = VfsdEditor(workspace), Path(workspace.path)
    assert isinstance(editor, ApplyPatchEditor)
    assert editor.create_file(operation("create_file", "src/a.py", "+one\n+two\n")).status == "completed"
    os.chmod(root / "src/a.py", 0o755)
    before = workspace.snapshot()
    done = editor.update_file(operation("update_file", f"{root}/src/a.py", "@@\n one\n-two\n+three\n"))
    assert (done.status, done.output) == ("completed", "Updated src/a.py")
    assert (root / "src/a.py").read_text().splitlines() == ["one", "three"]
    assert (root / "src/a.py").stat().st_mode & 0o777 == 0o755
    editor.update_file(operation("update_file", "src/a.py", "@@\n-one\n+1\n", move_to="b.py"))
    assert (root / "b.py").read_text().splitlines() == ["1", "three"]
    assert editor.delete_file(operation("delete_file", "b.py")).status == "completed"
    assert not (root / "b.py").exists()
    workspace.restore(before.name)
    assert (root / "src/a.py").read_text().splitlines() == ["one", "two"]


def test_what_cannot_be_done_is_an_answer_and_changes_nothing(workspace: Workspace, tmp_path: Path) -> None:
    editor, root = VfsdEditor(workspace), Path(workspace.path)
    (tmp_path / "secret").write_text("secret\n")
    (root / "out").symlink_to(tmp_path)
    (root / "d").mkdir()
    (root / "d/f").write_bytes(b"\xff\n")
    (root / "f").write_text("x\n")
    failing = [
        editor.create_file(operation("create_file", "f", "+y\n")),
        editor.create_file(operation("create_file", "out/new", "+y\n")),
        editor.create_file(operation("create_file", f"{tmp_path}/new", "+y\n")),
        editor.create_file(operation("create_file", "../new", "+y\n")),
        editor.update_file(operation("update_file", "none", "@@\n-x\n+y\n")),
        editor.update_file(operation("update_file", "f", "@@\n-not there\n+y\n")),
        editor.update_file(operation("update_file", "d/f", "@@\n-x\n+y\n")),
        editor.update_file(operation("update_file", "f", "@@\n-x\n+y\n", move_to="d/f")),
        editor.delete_file(operation("delete_file", "out/secret")),
        editor.delete_file(operation("delete_file", "d")),
        editor.delete_file(operation("delete_file", ".")),
    ]
    assert [done.status for done in failing] == ["failed"] * len(failing)
    assert (root / "f").read_text() == "x\n"
    assert os.listdir(tmp_path) == ["secret"]


def test_the_example_runs(workdir: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "openai_agents_editor.py"
    done = subprocess.run([sys.executable, example, workdir / "ws"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "Updated notes.txt"
    assert done.stdout.rstrip().endswith("notes.txt: draft")
