"""Verbs that work alike on every backend and engine, as one check for each."""

from __future__ import annotations

import os
from pathlib import Path

from vfsd.client.workspace import Workspace

LINES = "".join(f"{number}\n" for number in range(10))


def check_a_range_is_reverted(workspace: Workspace) -> None:
    """A revert of a range keeps what came later, names what conflicts, and is one step."""
    root = Path(workspace.path)
    (root / "text").write_text(LINES)
    (root / "doomed").write_text("x")
    os.link(root / "doomed", root / "linked")
    workspace.snapshot("before")
    (root / "text").write_text(LINES.replace("3", "three"))
    (root / "doomed").unlink()
    (root / "made").touch()
    workspace.snapshot("after")
    (root / "text").write_text(LINES.replace("3", "three").replace("8", "eight"))
    (root / "later").touch()
    shown = workspace.revert("before", "after", dry_run=True)
    assert (shown.applied, (root / "made").exists()) == (False, True)
    assert workspace.revert("before", "after").counts == shown.counts
    assert (root / "text").read_text() == LINES.replace("8", "eight")
    assert (root / "doomed").stat().st_ino == (root / "linked").stat().st_ino
    assert sorted(os.listdir(root)) == ["doomed", "later", "linked", "text"]
    workspace.undo()
    assert sorted(os.listdir(root)) == ["later", "linked", "made", "text"]
    (root / "text").write_text(LINES.replace("3", "drei"))
    refused = workspace.revert("before", "after")
    assert (refused.applied, list(refused.conflicts)) == (False, ["text"])
    assert (root / "made").exists()


def check_conflicts_of_forks(workspace: Workspace, place: Path) -> None:
    """`conflicts` says of the workspace and two forks below `place` which merges would conflict."""
    (Path(workspace.path) / "text").write_text(LINES)
    names = (workspace.name, f"{workspace.name}-f1", f"{workspace.name}-f2")
    with workspace.fork(place / "f1", name=names[1]), workspace.fork(place / "f2", name=names[2]):
        (Path(workspace.path) / "text").write_text(LINES.replace("0", "zero"))
        for fork in ("f1", "f2"):
            (place / fork / "text").write_text(LINES.replace("9", fork))
        found = {(pair.a, pair.b): pair for pair in workspace.conflicts().pairs}
    assert {two: (pair.shared, list(pair.conflicts), pair.problem) for two, pair in found.items()} == {
        (names[0], names[1]): (1, [], None),
        (names[0], names[2]): (1, [], None),
        (names[1], names[2]): (1, ["text"], None),
    }
