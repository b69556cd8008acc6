"""The Claude Agent SDK, against a scripted model: what `vfsd.integrations.claude_agent.hooks` keeps."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query

from tests.integrations.model import Block, Request, ScriptedModel, results, text, tool_use
from tests.support.tree_hash import tree_hash
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.workspace import Workspace
from vfsd.integrations import claude_agent

REPOSITORY = Path(__file__).parents[2]


async def run_agent(workspace: Workspace | AsyncWorkspace, prompt: str = "work") -> ResultMessage:
    options = ClaudeAgentOptions(cwd=workspace.path, hooks=claude_agent.hooks(workspace), allowed_tools=["Bash"])
    messages = [message async for message in query(prompt=prompt, options=options)]
    last = messages[-1]
    assert isinstance(last, ResultMessage)
    return last


@pytest.mark.parametrize("is_async", [False, True])
def test_each_call_is_a_snapshot_to_return_to(model: ScriptedModel, workspace: Workspace, is_async: bool) -> None:
    root = Path(workspace.path)
    hashes: dict[str, str] = {}

    def script(request: Request) -> list[Block]:
        done = results(request)
        hashes[done[-1] if done else "prompt"] = tree_hash(root)
        if len(done) == 10:
            return [text("done")]
        command = f"echo {len(done)} >> log; rm -f f{len(done) - 2}; touch f{len(done)}; test $((RANDOM % 2)) = 0"
        return [tool_use(f"toolu_{len(done)}", "Bash", command=command)]

    async def work() -> ResultMessage:
        if not is_async:
            return await run_agent(workspace)
        async with AsyncWorkspace.attach(workspace.name) as attached:
            return await run_agent(attached)

    model.script = script
    result = asyncio.run(work())
    assert not result.is_error
    taken = {snapshot.name: snapshot for snapshot in workspace.snapshots()}
    assert {snapshot.kind for snapshot in taken.values()} == {"automatic"}
    assert set(taken) >= {f"toolu_{number}" for number in range(10)}
    assert f"session={result.session_id}" in str(taken["toolu_3"].tag)
    for number in reversed(range(10)):
        workspace.restore(f"toolu_{number}")
        assert tree_hash(root) == hashes[f"toolu_{number}"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_daemon_that_does_not_answer_does_not_stop_the_agent(
    model: ScriptedModel,
    workspace: Workspace,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(claude_agent, "TIMEOUT_S", 0.2)
    daemon = workspace.status().pid

    async def work() -> object:
        attached = await AsyncWorkspace.attach(workspace.name) if is_async else workspace
        os.kill(daemon, signal.SIGSTOP)
        options = ClaudeAgentOptions(cwd="/", hooks=claude_agent.hooks(attached))
        return [message async for message in query(prompt="say something", options=options)][-1]

    try:
        with caplog.at_level(logging.WARNING, "vfsd.integrations"):
            result = asyncio.run(work())
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert isinstance(result, ResultMessage)
    assert not result.is_error
    assert "was taken: no answer within 0.2 s" in caplog.text


def test_the_example(model: ScriptedModel, workdir: Path) -> None:
    project = workdir / "project"
    project.mkdir()
    (project / "file").write_text("one\n")

    def script(request: Request) -> list[Block]:
        if results(request):
            return [text("I changed it.")]
        assert (project / "file").read_text() == "one\n"
        return [tool_use("toolu_1", "Bash", command="echo two > file")]

    model.script = script
    command = [sys.executable, REPOSITORY / "examples" / "claude_agent.py", project, "change it"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("I changed it.\n")
    assert "toolu_1 claude:tool session=" in printed
    assert printed.endswith(f"applied 1 changes to {project}\n")
    assert (project / "file").read_text() == "two\n"
