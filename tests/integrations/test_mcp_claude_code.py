"""Claude Code itself as the client of `vfsd mcp`, against a scripted model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.integrations.model import Block, Request, ScriptedModel, results, text, tool_use
from tests.integrations.test_claude_code import claude_code
from vfsd.client.workspace import Workspace

WAITS = 60  # of a second


def answer_to(request: Request, identifier: str) -> str:
    """The text that the model gets as the result of a call."""
    for each in request["messages"]:
        for block in each["content"] if isinstance(each["content"], list) else ():
            if block["type"] == "tool_result" and block["tool_use_id"] == identifier:
                return json.dumps(block["content"])
    raise AssertionError(identifier)


def test_claude_code_calls_the_tools(claude: str, model: ScriptedModel, workspace: Workspace, workdir: Path) -> None:
    command = [sys.executable, "-m", "vfsd.cli.main", "mcp", "-w", workspace.name]
    config = workdir / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"vfsd": {"command": command[0], "args": command[1:]}}}))
    calls: list[tuple[str, dict[str, Any]]] = [
        ("write_file", {"path": "a.txt", "content": "one\n"}),
        ("snapshot", {"name": "before"}),
        ("edit_file", {"path": "a.txt", "old_text": "one", "new_text": "two"}),
        ("diff", {"patch": True}),
        ("restore", {"snapshot": "before"}),
        ("read_file", {"path": "missing"}),
    ]
    answers: list[str] = []

    def script(request: Request) -> list[Block]:
        offered = {tool["name"] for tool in request["tools"]}
        done = [identifier for identifier in results(request) if identifier != "toolu_wait"]
        if f"mcp__vfsd__{calls[0][0]}" not in offered:  # Claude Code does not wait for its servers
            assert results(request).count("toolu_wait") < WAITS, sorted(offered)
            return [tool_use("toolu_wait", "Bash", command="sleep 1", description="wait")]
        if done:
            answers.append(answer_to(request, done[-1]))
        if len(done) == len(calls):
            return [text("done")]
        name, arguments = calls[len(done)]
        return [{**tool_use(f"toolu_{len(done)}", f"mcp__vfsd__{name}"), "input": arguments}]

    model.script = script
    (workdir / "elsewhere").mkdir()
    words = ["--mcp-config", str(config), "--allowedTools", "mcp__vfsd"]
    result = claude_code(claude, str(workdir / "elsewhere"), "change a file", *words, ENABLE_TOOL_SEARCH="false")
    assert result["is_error"] is False
    written, _, _, patch, restored, failed = answers
    assert "Wrote a.txt (4 bytes)" in written
    assert "+two" in patch
    assert "undo brings it back" in restored
    assert "No such file or directory: missing" in failed
    assert Path(workspace.path, "a.txt").read_text() == "one\n"
