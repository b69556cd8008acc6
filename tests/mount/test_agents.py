"""The hooks of each agent: its payloads, as the programs sent them, become states that rewind and revert return to."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

from vfsd.cli import agent_hook
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace
from vfsd.machine.agent_points import AGENTS, session_above
from vfsd.machine.selection import socket_dir

pytestmark = [pytest.mark.workspaces(engines=["native"]), pytest.mark.parametrize("name", AGENTS)]

SESSION = "01a222ab-7534-7c52-8545-5d573c7594a2"
# What each agent adds to every payload: Claude Code 2, Codex 0.171, Gemini CLI 0.61, and the plugin in OpenCode 1.18.
COMMON: dict[str, dict[str, Any]] = {
    "claude": {"session_id": SESSION, "transcript_path": "/t.jsonl", "permission_mode": "default"},
    "codex": {"session_id": SESSION, "transcript_path": None, "model": "gpt", "permission_mode": "bypassPermissions"},
    "gemini": {"session_id": SESSION, "transcript_path": "/t.jsonl", "timestamp": "2026-11-28T14:57:40.962Z"},
    "opencode": {"sessionID": SESSION},
}
PROMPT_ID = {"claude": "prompt_id", "codex": "turn_id", "opencode": "messageID"}
TOOL = {"claude": "Bash", "codex": "Bash", "gemini": "run_shell_command", "opencode": "bash"}


def payload(name: str, kind: str, prompt: int, call: int, command: str) -> dict[str, Any]:
    event = next(event for event, each in AGENTS[name]["events"].items() if each == kind)
    members = {"hook_event_name": event, **COMMON[name]}
    if name in PROMPT_ID:
        members[PROMPT_ID[name]] = f"turn-{prompt}"
    if kind == "prompt":
        return {**members, "prompt": f"text of {prompt}"}
    if kind == "stop":
        return members
    tool, arguments = ("tool", "args") if name == "opencode" else ("tool_name", "tool_input")
    members = {**members, tool: TOOL[name], arguments: {"command": command}}
    if name == "opencode":
        members["callID"] = f"call_{call}"
    elif name != "gemini":
        members["tool_use_id"] = f"call_{call}"
    return members


class Agent:
    """A shell that is the agent: its hooks know it as the process that makes the changes."""

    def __init__(self, name: str, workspace: Workspace) -> None:
        self.name = name
        self.path = workspace.path
        self.prompts = self.calls = 0
        self.shell = subprocess.Popen(["sh"], cwd=self.path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, kind: str, command: str = "") -> None:
        event = {**payload(self.name, kind, self.prompts, self.calls, command), "cwd": self.path}
        agent_hook.handle(self.name, json.loads(json.dumps(event)), {}, self.shell.pid)

    def prompt(self) -> None:
        self.prompts += 1
        self.tell("prompt")

    def call(self, command: str) -> None:
        self.calls += 1
        self.tell("call", command)
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(f"{command}; echo done\n")
        self.shell.stdin.flush()
        assert self.shell.stdout.readline() == "done\n"
        self.tell("tool", command)


@pytest.fixture
def agent(name: str, workspace: Workspace) -> Iterator[Agent]:
    agent = Agent(name, workspace)
    yield agent
    agent.shell.communicate()


@pytest.fixture
def vfsd(workspace: Workspace) -> Callable[..., str]:
    def run(*words: str) -> str:
        result = click.testing.CliRunner().invoke(cli, [*words, "-w", workspace.name])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    return run


def test_prompts_and_calls_are_kept_and_can_be_returned_to(agent: Agent, root: Path, vfsd: Callable[..., str]) -> None:
    agent.prompt()
    agent.call("echo 1 >> log")
    agent.call("echo 1 >> log")  # the same call again is another one
    agent.tell("stop")
    agent.prompt()
    agent.call("echo 2 >> log; touch other")
    points = json.loads(vfsd("rewind", "--list", "--json"))["points"]
    assert {(each["agent"], each["session"]) for each in points} == {(agent.name, SESSION)}
    assert [(each["kind"], each["prompt_number"], each["text"]) for each in points] == [
        ("prompt", 1, "text of 1"),
        ("tool", 1, f"{TOOL[agent.name]}: echo 1 >> log"),
        ("tool", 1, f"{TOOL[agent.name]}: echo 1 >> log"),
        ("stop", 1, ""),
        ("prompt", 2, "text of 2"),
        ("tool", 2, f"{TOOL[agent.name]}: echo 2 >> log; touch other"),
    ]
    assert [each["prompt"] for each in points if each["kind"] == "prompt"] == (
        [None, None] if agent.name == "gemini" else ["turn-1", "turn-2"]
    )
    calls = [each["tool_use_id"] for each in points if each["kind"] == "tool"]
    assert len({*calls}) == 3
    assert agent.name == "gemini" or calls == ["call_1", "call_2", "call_3"]
    for to, log in ((calls[0], "1\n"), ("2", "1\n1\n"), (calls[2], "1\n1\n2\n")):
        vfsd("rewind", "--to", to)
        assert (root / "log").read_text() == log
    vfsd("rewind")
    assert not (root / "other").exists()
    vfsd("restore", "--undo")
    assert (root / "other").exists()


def test_one_call_and_one_session_are_undone_and_the_rest_stays(
    agent: Agent, workspace: Workspace, root: Path, vfsd: Callable[..., str]
) -> None:
    agent.prompt()
    agent.call("touch first")
    (root / "mine").touch()
    agent.call("touch second")
    labels = {change.path: change.label for change in workspace.log()}
    calls = [each["tool_use_id"] for each in json.loads(vfsd("rewind", "--list", "--json"))["points"]][1:]
    assert labels == {
        "first": f"{agent.name} {calls[0]}: {TOOL[agent.name]}: touch first",
        "second": f"{agent.name} {calls[1]}: {TOOL[agent.name]}: touch second",
        "mine": None,
    }
    vfsd("revert", "--tool-call", calls[0])
    assert sorted(path.name for path in root.iterdir()) == ["mine", "second"]
    vfsd("revert", "--session", SESSION)
    assert [path.name for path in root.iterdir()] == ["mine"]


def test_a_command_of_the_agent_knows_its_session_and_the_notes_of_calls_go_with_the_calls(agent: Agent) -> None:
    agent.call("true")
    assert session_above(agent.shell.pid, socket_dir()) == SESSION
    notes = Path(socket_dir()) / "agents"
    assert [each.name for each in notes.iterdir() if each.name.startswith(f"{agent.shell.pid}.")] == []
