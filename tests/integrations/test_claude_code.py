"""Claude Code itself, against a scripted model: what its hooks keep, and that `vfsd rewind` returns to each state."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import pytest

from tests.integrations.model import Block, Request, ScriptedModel, results, text, tool_use
from tests.support.tree_hash import tree_hash
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_records

CALLS = 200


def command(number: int) -> str:
    """What Bash runs in call `number`: files that git ignores, links, modes, renames, removals; some calls fail."""
    variants = (
        f"mkdir -p d{number % 7} && echo {number} > d{number % 7}/f{number}",
        f"echo {number} >> log",
        f"mkdir -p ignored && head -c {number * 97} /dev/urandom > ignored/blob",
        f"ln -sf d{number % 7} link{number % 3}; chmod {600 + number % 8:o} log",
        f"mv d{number % 7} moved{number} 2>/dev/null; touch moved{number}",
        f"rm -rf d{(number + 3) % 7} moved{number - 3}; false",
        "git init -q . ; echo ignored > .gitignore; git add -A; git -c user.name=a -c user.email=a@b commit -qm x",
    )
    return variants[number % len(variants)]


def claude_code(claude: str, directory: str, prompt: str, *words: str, **environment: str) -> dict[str, Any]:
    """Run Claude Code to its end; return the result that it prints."""
    done = subprocess.run(
        [claude, "-p", prompt, "--output-format", "json", "--allowedTools", "Bash,Read,Write,Task,Agent", *words],
        cwd=directory,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def vfsd(*words: str) -> str:
    result = click.testing.CliRunner().invoke(cli, list(words))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_200_calls_of_bash_and_a_rewind_to_each(
    claude: str, model: ScriptedModel, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(workspace.path)
    with monkeypatch.context() as inside:
        inside.chdir(root)
        vfsd("hooks", "install", "claude")
    hashes: dict[str, str] = {}

    def script(request: Request) -> list[Block]:
        # The agent waits for this answer, so the state is that after its last call.
        done = results(request)
        state = done[-1] if done else "prompt"
        hashes[state] = tree_hash(root)
        if len(done) == CALLS:
            return [text("done")]
        return [tool_use(f"toolu_{len(done)}", "Bash", command=command(len(done)), description="a step")]

    model.script = script
    result = claude_code(claude, workspace.path, "make some changes")
    assert result["is_error"] is False
    assert len(hashes) == CALLS + 1
    assert len(set(hashes.values())) > CALLS // 2
    points = json.loads(vfsd("rewind", "--list", "--json", "-w", workspace.name))["points"]
    assert [point["tool_use_id"] for point in points if point["kind"] == "tool"] == [f"toolu_{n}" for n in range(CALLS)]
    assert {point["session"] for point in points} == {result["session_id"]}
    assert len({point["prompt"] for point in points}) == 1
    for state, expected in reversed(hashes.items()):
        vfsd("rewind", "-w", workspace.name, "--to", "1" if state == "prompt" else state)
        assert tree_hash(root) == expected, state


def first_text(request: Request) -> str:
    return json.dumps(request["messages"][0]["content"])


def test_a_sub_agent_works_in_a_fork_of_its_own(
    claude: str, model: ScriptedModel, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(workspace.path)
    (root / "file").write_text("one\n")
    with monkeypatch.context() as inside:
        inside.chdir(root)
        vfsd("hooks", "install", "claude")
    places: list[str] = []

    def script(request: Request) -> list[Block]:
        done = results(request)
        if "SUBTASK" in first_text(request):
            if done:
                return [text("the sub-agent is done")]
            return [tool_use("toolu_sub", "Bash", command="pwd > place; echo two > file; cat place")]
        if not done:
            tools = {tool["name"] for tool in request["tools"]}
            name = "Agent" if "Agent" in tools else "Task"
            arguments = {"description": "a subtask", "prompt": "SUBTASK", "subagent_type": "general-purpose"}
            return [tool_use("toolu_main", name, isolation="worktree", run_in_background=False, **arguments)]
        places.append(json.dumps(request["messages"]))
        return [text("done")]

    model.script = script
    result = claude_code(claude, workspace.path, "delegate")
    assert result["is_error"] is False
    assert (root / "file").read_text() == "one\n"
    (copy,) = [record for record in read_records() if record.name != workspace.name]
    try:
        assert (Path(copy.mountpoint) / "place").read_text() == f"{copy.mountpoint}\n"
        assert copy.mountpoint in places[0]  # the main agent learns where it is
        fork = Workspace.attach(copy.name)
        kept = [snapshot.name for snapshot in fork.snapshots()]
        base = str(fork.status().base)
        assert kept[kept.index(base) :][:2] == [base, "toolu_sub"]  # before: those of the main agent
        vfsd("merge", copy.name, "-w", workspace.name)
        assert (root / "file").read_text() == "two\n"
        vfsd("unmount", copy.name)  # everything was merged
    finally:
        if os.path.ismount(copy.mountpoint):
            vfsd("unmount", copy.name, "--discard")


def test_two_prompts_of_one_session_and_a_run_on_an_overlay(
    claude: str, model: ScriptedModel, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = workdir / "project"
    project.mkdir()
    with monkeypatch.context() as inside:
        inside.chdir(project)
        vfsd("hooks", "install", "claude")
    before = tree_hash(project)

    def script(request: Request) -> list[Block]:
        done = results(request)
        prompts = sum("PROMPT" in json.dumps(each) for each in request["messages"] if each["role"] == "user")
        if len(done) == prompts:
            return [text("done")]
        return [tool_use(f"toolu_{len(done)}", "Bash", command=f"echo {len(done)} >> log; pwd")]

    model.script = script
    words = ["--output-format", "json", "--allowedTools", "Bash"]
    run = f"{shlex.quote(claude)} -p PROMPT1 {' '.join(words)} && {shlex.quote(claude)} -c -p PROMPT2 {' '.join(words)}"
    done = subprocess.run(
        [sys.executable, "-m", "vfsd.cli.main", "run", "--keep", "--", "sh", "-c", run],
        cwd=project,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    (record,) = read_records()
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert tree_hash(project) == before
        assert (Path(record.mountpoint) / "log").read_text() == "0\n1\n"
        points = json.loads(vfsd("rewind", "--list", "--json", "-w", record.name))["points"]
        kinds = [(point["kind"], point["prompt_number"], point["tool_use_id"]) for point in points]
        first = [("prompt", 1, None), ("tool", 1, "toolu_0"), ("stop", 1, None)]
        assert kinds == [*first, ("prompt", 2, None), ("tool", 2, "toolu_1"), ("stop", 2, None)]
        assert len({point["prompt"] for point in points}) == 2
        vfsd("rewind", "-w", record.name)
        assert (Path(record.mountpoint) / "log").read_text() == "0\n"
    finally:
        vfsd("unmount", record.name, "--discard")
