"""`vfsd revert`: what one range, call or session changed is undone, and everything later stays."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import click.testing
import pytest

from tests.mount.conftest import MountIt
from vfsd import AsyncWorkspace
from vfsd.cli import agent_hook
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace
from vfsd.integrations.mcp.session import Session
from vfsd.integrations.mcp.tools import SERVED_TOOLS

pytestmark = pytest.mark.workspaces(engines=["native"])
each_backend = pytest.mark.parametrize(
    "backend",
    ["memory", *(pytest.param(each, marks=pytest.mark.extended) for each in ("overlay", "host"))],
    indirect=True,
)
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "advice.mergeConflict=no")


def vfsd(workspace: Workspace, *words: str, status: int = 0) -> tuple[str, str]:
    result = click.testing.CliRunner().invoke(cli, [*words, "-w", workspace.name])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout, result.stderr


def files(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


# -- ranges ----------------------------------------------------------------------------------------
def edit(rng: random.Random, places: tuple[Path, ...]) -> None:
    """Make one random change of the text files in each place: edit, add or remove lines, make or remove a file."""
    existing = sorted(files(places[0]))
    name = rng.choice([*existing, f"new{rng.randrange(3)}"])
    lines = (places[0] / name).read_text().splitlines(keepends=True) if name in existing else []
    if not lines:
        lines = [f"{name} {number}\n" for number in range(rng.randrange(4, 12))]  # no renames for git
    elif rng.random() < 0.12:
        for place in places:
            (place / name).unlink()
        return
    else:
        at = rng.randrange(len(lines))
        lines[at : at + rng.randrange(2)] = [f"changed {rng.randrange(1000)}\n" for _ in range(rng.randrange(2))]
    for place in places:
        (place / name).write_text("".join(lines))


@each_backend
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_revert_of_a_range_does_what_git_revert_does(
    workspace: Workspace, root: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    twin = tmp_path / "twin"
    twin.mkdir()

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*GIT, "-C", str(twin), *words], capture_output=True, text=True, check=False)

    git("init", "-q")
    for at in range(7):
        for _ in range(rng.randrange(1, 4) if at else 5):
            edit(rng, (twin, root))
        git("add", "-A")
        assert git("commit", "-q", "--allow-empty", "-m", str(at)).returncode == 0
        workspace.snapshot(f"s{at}")
    assert files(root) == files(twin)
    outcomes = set()
    for at in range(1, 7):
        now = files(root)
        expected = git("revert", "--no-commit", f"HEAD~{6 - at}")
        reverted = workspace.revert(f"s{at - 1}", f"s{at}")
        outcomes.add(reverted.applied)
        if expected.returncode == 0:
            assert reverted.applied, reverted
            assert files(root) == files(twin)
            if reverted.safety_snapshot is not None:
                workspace.undo()
        else:
            in_conflict = git("diff", "--name-only", "--diff-filter=U").stdout.split()
            assert not reverted.applied
            assert sorted(reverted.conflicts) == in_conflict
        assert files(root) == now
        git("reset", "-q", "--hard")
        git("clean", "-qfd")
    assert outcomes


def test_a_revert_is_one_step_limited_to_paths_and_shown_first(workspace: Workspace, root: Path) -> None:
    (root / "a").write_text("1\n2\n3\n4\n5\n")
    (root / "d").mkdir()
    workspace.snapshot("before")
    (root / "a").write_text("one\n2\n3\n4\n5\n")
    (root / "d" / "new").write_text("new")
    workspace.snapshot("after")
    (root / "a").write_text("one\n2\n3\n4\nfive\n")
    (root / "later").write_text("later")
    shown = vfsd(workspace, "revert", "--dry-run", "before..after")[0]
    assert shown == "M a\nD d/new\n"
    said = vfsd(workspace, "revert", "d", "before..after")[0]
    assert said.startswith("reverted before..after: 1 removed\n")
    assert (root / "a").read_text() == "one\n2\n3\n4\nfive\n"
    answer = json.loads(vfsd(workspace, "revert", "before..after", "--json")[0])
    assert (answer["applied"], answer["ranges"]) == (True, [{"since": "before", "until": "after"}])
    assert (root / "a").read_text() == "1\n2\n3\n4\nfive\n"
    assert (root / "later").read_text() == "later"
    assert not list((root / "d").iterdir())
    assert vfsd(workspace, "revert", "before..after")[0].startswith("nothing to do: before..after has no changes")
    vfsd(workspace, "restore", "--undo")
    assert (root / "a").read_text() == "one\n2\n3\n4\nfive\n"
    vfsd(workspace, "restore", "--undo")
    assert (root / "d" / "new").read_text() == "new"
    vfsd(workspace, "revert", "before..")
    assert files(root) == {"a": b"1\n2\n3\n4\n5\n"}
    workspace.undo()
    log = [change.change for change in workspace.log()]
    assert log.count("revert") == 3


def test_conflicts_are_listed_and_resolved(workspace: Workspace, root: Path) -> None:
    (root / "text").write_text("old\n")
    workspace.snapshot("before")
    (root / "text").write_text("middle\n")
    workspace.snapshot("after")
    (root / "text").write_text("new\n")
    error = vfsd(workspace, "revert", "before..after", status=1)[1]
    assert "conflict in text (content)" in error
    assert "1 conflict with before..after; nothing was changed" in error
    assert (root / "text").read_text() == "new\n"
    for policy, content in (("ours", "new\n"), ("theirs", "old\n")):
        vfsd(workspace, "revert", "before..after", "--conflicts", policy)
        assert (root / "text").read_text() == content
        (root / "text").write_text("new\n")
    vfsd(workspace, "revert", "before..after", "--conflicts", "markers")
    assert "<<<<<<<" in (root / "text").read_text()
    assert "old\n" in (root / "text").read_text()


def test_a_model_reverts_by_the_tool_of_mcp(workspace: Workspace, root: Path) -> None:
    (root / "text").write_text("old\n")
    workspace.snapshot("before")
    (root / "text").write_text("middle\n")
    (root / "made").touch()
    workspace.snapshot("after")
    (root / "text").write_text("new\n")

    def call(**arguments: object) -> str:
        values = {"since": "before", "until": "after", **arguments}
        return anyio.run(SERVED_TOOLS["revert"].call, values, Session(workspace.name), lambda _: None)

    conflict = "(conflict: text: content, both sides changed the same lines)"
    assert call().splitlines() == ["Nothing was changed: 1 conflict", conflict]
    shown = call(paths=["made"], dry_run=True)
    assert shown == "Would have reverted before..after:\n1 removed\nD made"
    assert (root / "made").exists()
    done = call(conflicts="theirs").splitlines()
    assert done[:4] == ["Reverted before..after:", "1 modified, 1 removed", "D made", "M text"]
    assert done[4] == conflict
    assert done[-1].endswith("; undo brings it back.")
    assert files(root) == {"text": b"old\n"}
    assert call(paths=["text"]) == "Nothing to change: before..after has no changes that are still here"
    assert anyio.run(SERVED_TOOLS["restore"].call, {"undo": True}, Session(workspace.name), lambda _: None)
    assert files(root) == {"text": b"new\n", "made": b""}


def test_wrong_use_is_one_line_and_changes_nothing(workspace: Workspace, root: Path) -> None:
    (root / "f").write_text("1")
    workspace.snapshot("first")
    (root / "f").write_text("2")
    workspace.snapshot("second")
    now = files(root)
    for words, status, line in (
        (["second..first"], 1, "first was taken before second: name the older state first, first..second"),
        (["first..third"], 1, "no such snapshot"),
        (["--tool-call", "toolu_x"], 1, "no state after the tool call 'toolu_x' is kept"),
        (["--session", "x"], 1, "kept no state of session 'x'"),
        (["nowhere", "first..second"], 1, "nowhere"),
        (["/outside", "first..second"], 1, "/outside"),
        ([], 2, "name two states"),
        (["first"], 2, "name two states"),
        (["--tool-call", "x", "--session", "y"], 2, "exclude each other"),
    ):
        error = vfsd(workspace, "revert", *words, status=status)[1]
        assert line in error.splitlines()[-1], (words, error)
        assert status == 2 or len(error.splitlines()) == 1, error
    workspace.drop("first")
    assert "no such snapshot" in vfsd(workspace, "revert", "first..second", status=1)[1]
    assert files(root) == now


# -- calls and sessions ----------------------------------------------------------------------------
class Agent:
    """A shell that is an agent of a session, with its hooks."""

    def __init__(self, workspace: Workspace, session: str) -> None:
        self.workspace = workspace
        self.session = session
        self.calls = 0
        self._shell = subprocess.Popen(
            ["sh"], cwd=workspace.path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def _event(self, event: str) -> dict[str, object]:
        return {
            "hook_event_name": event,
            "session_id": self.session,
            "prompt_id": f"p-{self.session}",
            "prompt": "work",
            "cwd": self.workspace.path,
            "tool_name": "Bash",
            "tool_use_id": f"toolu_{self.session}{self.calls}",
        }

    def prompt(self) -> None:
        agent_hook.handle("claude", self._event("UserPromptSubmit"), {}, 0)

    def begin(self) -> None:
        self.calls += 1
        agent_hook.handle("claude", self._event("PreToolUse"), {}, self._shell.pid)

    def run(self, command: str) -> None:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{command}; echo done\n")
        assert self._shell.stdout.readline() == "done\n"

    def end(self) -> None:
        agent_hook.handle("claude", self._event("PostToolUse"), {}, 0)

    def call(self, command: str) -> None:
        self.begin()
        self.run(command)
        self.end()

    def close(self) -> None:
        self._shell.communicate()


@contextmanager
def agents(workspace: Workspace, *sessions: str) -> Iterator[list[Agent]]:
    found = [Agent(workspace, session) for session in sessions]
    try:
        yield found
    finally:
        for each in found:
            each.close()


@each_backend
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_session_is_undone_as_if_it_had_not_worked(workspace: Workspace, root: Path, seed: int) -> None:
    """Calls of three sessions overlap; the model is the commands of the others, run in another directory."""
    rng = random.Random(seed)
    done: list[tuple[str, str]] = []
    for name in ("a", "b", "c"):
        (root / f"{name}-old").write_text(f"old {name}\n")
    with agents(workspace, "a", "b", "c") as found:
        for each in found:
            each.prompt()
        running: set[str] = set()
        for number in range(30):
            agent = rng.choice(found)
            if agent.session not in running:
                agent.begin()
                running.add(agent.session)
            me = agent.session
            command = rng.choice(
                (
                    f"echo {number} >> {me}-log",
                    f"mkdir -p shared/deep; echo {number} > shared/deep/{me}{rng.randrange(3)}",
                    f"rm -f {me}-old shared/deep/{me}0",
                    f"mkdir -p {me}dir; echo {number} > {me}dir/f; mv {me}dir {me}dir{number}",
                    f"ln -f {me}-log {me}-link 2>/dev/null",
                )
            )
            agent.run(command)
            done.append((me, command))
            if rng.random() < 0.4:
                agent.end()
                running.remove(me)
            if rng.random() < 0.2:
                (root / "user").write_text(str(number))
                done.append(("user", f"printf {number} > user"))
        for each in found:
            if each.session in running:
                each.end()
    undone = rng.choice("abc")
    reverted = workspace.revert(session=undone)
    assert reverted.applied, reverted
    assert not reverted.warnings
    model = root.parent / "model"
    model.mkdir()
    for name in ("a", "b", "c"):
        (model / f"{name}-old").write_text(f"old {name}\n")
    for who, command in done:
        if who != undone:
            subprocess.run(["sh", "-c", command], cwd=model, check=False)
    assert files(root) == files(model)
    workspace.undo()
    assert workspace.revert(session=undone, dry_run=True).counts == reverted.counts


def test_one_call_is_undone_and_what_came_between_stays(workspace: Workspace, root: Path) -> None:
    (root / "text").write_text("1\n2\n3\n4\n5\n")
    with agents(workspace, "a", "b") as (one, other):
        one.prompt()
        one.call("sed -i s/1/one/ text; echo x > made")
        other.call("sed -i s/5/five/ text; echo y > other")
        (root / "user").write_text("user")
        one.call("sed -i s/3/three/ text")
    vfsd(workspace, "revert", "--tool-call", "toolu_a1")
    assert files(root) == {"text": b"1\n2\nthree\n4\nfive\n", "other": b"y\n", "user": b"user"}
    vfsd(workspace, "revert", "--session", "a")
    assert files(root) == {"text": b"1\n2\n3\n4\nfive\n", "other": b"y\n", "user": b"user"}
    workspace.undo()
    error = vfsd(workspace, "rewind", "--to", "toolu_a1", "--dry-run")[1]
    assert "would also undo 1 tool call of session b" in error
    words = next(line for line in error.splitlines() if "vfsd revert" in line).split("`")[1]
    assert shlex.split(words) == ["vfsd", "revert", "--session", "a", "toolu_a1.."]
    vfsd(workspace, *shlex.split(words)[1:])
    assert (root / "text").read_text() == "1\n2\n3\n4\nfive\n"


def test_a_path_that_others_changed_in_between_is_a_conflict(workspace: Workspace, root: Path) -> None:
    (root / "f").write_text("first\n")
    with agents(workspace, "a") as (agent,):
        agent.prompt()
        agent.begin()
        agent.run("echo agent >> f; echo only > mine")
        (root / "f").write_text("the user's\n")
        agent.end()
    reverted = workspace.revert(tool_call="toolu_a1")
    assert not reverted.applied
    assert {path: each.reason for path, each in reverted.conflicts.items()} == {"f": "shared"}
    assert workspace.revert(tool_call="toolu_a1", conflicts="ours").applied
    assert files(root) == {"f": b"the user's\n"}
    workspace.undo()
    assert workspace.revert(tool_call="toolu_a1", conflicts="theirs").applied
    assert files(root) == {"f": b"first\n"}


def test_without_a_log_the_states_decide(mount: MountIt) -> None:
    workspace = mount(audit=False)
    root = Path(workspace.path)
    with agents(workspace, "a", "b") as (one, other):
        one.prompt()
        one.call("echo 1 > one")
        other.call("echo 2 > two")
        one.call("echo 3 > three")
    reverted = workspace.revert(session="a")
    assert reverted.applied
    assert list(reverted.ranges) == [("toolu_b1", "toolu_a2"), (reverted.ranges[1][0], "toolu_a1")]
    assert len(reverted.warnings) == 1
    assert files(root) == {"two": b"2\n"}


def test_a_repository_that_was_changed_again_stays(workspace: Workspace, root: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run([*GIT, "-C", str(root), *words], check=True, capture_output=True)

    git("init", "-q")
    (root / "f").write_text("1\n")
    git("add", "-A")
    git("commit", "-qm", "1")
    workspace.snapshot("before")
    (root / "g").write_text("g\n")
    git("add", "-A")
    git("commit", "-qm", "2")
    workspace.snapshot("after")
    workspace.revert("before", "after")
    subprocess.run([*GIT, "-C", str(root), "fsck", "--strict"], check=True, capture_output=True)
    log = subprocess.run([*GIT, "-C", str(root), "log", "--format=%s"], check=True, capture_output=True, text=True)
    assert log.stdout == "1\n"
    workspace.undo()
    git("commit", "-q", "--allow-empty", "-m", "3")
    said, noted = vfsd(workspace, "revert", "before..after")
    assert ".git: changed again since then" in noted
    assert files(root) == {"f": b"1\n"}
    assert "reverted before..after" in said


def test_async_workspaces_and_protected_files(mount: MountIt, directory: Path) -> None:
    (directory / "kept").write_text("first")
    workspace = mount(backend="host", protect=["/kept"])
    root = Path(workspace.path)
    workspace.snapshot("before")
    (root / "f").write_text("1")
    (directory / "kept").write_text("below")
    workspace.snapshot("after")

    async def revert() -> None:
        async with AsyncWorkspace.attach(workspace.name) as same:
            for dry_run in (True, False):
                with pytest.raises(PermissionError):
                    await same.revert("before", "after", dry_run=dry_run)
            assert (await same.revert("before", "after", ["f"], dry_run=True)).counts.removed == 1
            assert (await same.revert("before", "after", ["f"])).applied

    anyio.run(revert)
    assert files(root) == {"kept": b"below"}
