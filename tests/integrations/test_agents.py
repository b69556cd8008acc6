"""Codex, Gemini CLI and OpenCode themselves, against a scripted model: each state that is kept is returned to."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.model import Block, Request, ScriptedModel, results, text, tool_use
from tests.integrations.test_claude_code import command, vfsd
from tests.support.tree_hash import tree_hash
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_records

CALLS = 7
PROGRAMS = {"codex": "codex", "gemini": "gemini", "opencode": "opencode"}
SHELLS = {"codex": ("exec_command", "cmd"), "gemini": ("run_shell_command", "command"), "opencode": ("bash", "command")}

CODEX = """
model = "gpt-5-codex"
model_provider = "scripted"
[model_providers.scripted]
name = "scripted"
base_url = "{url}/v1"
env_key = "SCRIPTED_KEY"
wire_api = "responses"
[projects."{project}"]
trust_level = "trusted"
[analytics]
enabled = false
"""
GEMINI = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"enableAutoUpdate": False},
}


def opencode(url: str) -> dict[str, object]:
    options = {"baseURL": f"{url}/v1", "apiKey": "a-key"}
    scripted = {"npm": "@ai-sdk/anthropic", "name": "scripted", "options": options, "models": {"m": {"name": "m"}}}
    return {"provider": {"scripted": scripted}, "autoupdate": False, "share": "disabled"}


def arranged(agent: str, url: str, project: str) -> tuple[list[str], dict[str, str]]:
    """Write the agent's own settings; return its command and what its environment has besides."""
    home = Path(os.environ["HOME"])
    if agent == "codex":
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(CODEX.format(url=url, project=project))
        words = ["exec", "--skip-git-repo-check", "-s", "danger-full-access", "--dangerously-bypass-hook-trust"]
        return words, {"CODEX_HOME": str(home / ".codex"), "SCRIPTED_KEY": "a-key"}
    if agent == "gemini":
        (home / ".gemini").mkdir()
        (home / ".gemini" / "settings.json").write_text(json.dumps(GEMINI))
        key = {"GEMINI_API_KEY": "a-key", "GOOGLE_GEMINI_BASE_URL": url, "GEMINI_CLI_TRUST_WORKSPACE": "true"}
        return ["-m", "gemini-2.5-pro", "--yolo", "-p"], {"GEMINI_CLI_HOME": str(home), **key}
    quiet = ("DISABLE_MODELS_FETCH", "DISABLE_AUTOUPDATE", "DISABLE_DEFAULT_PLUGINS", "DISABLE_LSP_DOWNLOAD")
    settings = {f"OPENCODE_{name}": "1" for name in quiet} | {"OPENCODE_CONFIG_CONTENT": json.dumps(opencode(url))}
    places = {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CONFIG", "DATA", "STATE", "CACHE")}
    return ["run", "-m", "scripted/m"], {**settings, **places, "npm_config_offline": "true"}


@pytest.fixture(params=PROGRAMS)
def agent(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def program(agent: str) -> str:
    found = shutil.which(PROGRAMS[agent], path=os.environ.get("VFSD_AGENTS"))
    if found is None:
        pytest.skip(f"{agent} is missing: make test-integrations installs it")
    return found


def run_agent(agent: str, program: str, model: ScriptedModel, directory: str, *before: str) -> None:
    words, more = arranged(agent, model.url, directory)
    done = subprocess.run(
        [*before, program, *words, "make some changes"],
        cwd=directory,
        env={**os.environ, **more, "PWD": directory},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def shell_call(agent: str, number: int, run: str) -> Block:
    tool, argument = SHELLS[agent]
    rest = {"description": "a step"} if agent == "opencode" else {}
    return tool_use(f"call_{number}", tool, **{argument: run}, **rest)


def test_the_states_after_each_call_are_kept_and_returned_to(
    agent: str, program: str, model: ScriptedModel, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(workspace.path)
    with monkeypatch.context() as inside:
        inside.chdir(root)
        vfsd("hooks", "install", agent)
    hashes: list[str] = []

    def script(request: Request) -> list[Block]:
        done = results(request)
        hashes[len(done) :] = [tree_hash(root)]  # the agent waits for this answer
        if len(done) == CALLS:
            return [text("done")]
        run = command(len(done)).replace("rm -rf", "rm -r")  # Codex refuses the former
        return [shell_call(agent, len(done), run)]

    model.script = script
    run_agent(agent, program, model, workspace.path)
    assert len(hashes) == CALLS + 1
    points = json.loads(vfsd("rewind", "--list", "--json", "-w", workspace.name))["points"]
    assert [each["kind"] for each in points] == ["prompt", *["tool"] * CALLS, "stop"]
    assert {each["agent"] for each in points} == {agent}
    assert len({each["session"] for each in points}) == 1
    assert "make some changes" in points[0]["text"]
    calls = [each["tool_use_id"] for each in points if each["kind"] == "tool"]
    assert agent == "gemini" or calls == [f"call_{number}" for number in range(CALLS)]
    labels = [change.label for change in workspace.log() if change.path.startswith(("d", "log"))]
    assert labels
    assert all(label and label.startswith(f"{agent} call_") for label in labels)
    for to, expected in [*zip(calls, hashes[1:], strict=True), ("1", hashes[0])][::-1]:
        vfsd("rewind", "-w", workspace.name, "--to", to)
        assert tree_hash(root) == expected, to


@pytest.mark.parametrize("how", ["run", "attach"])
def test_a_run_and_an_attached_directory_are_rewound_by_a_command_of_the_agent(
    agent: str, program: str, model: ScriptedModel, workdir: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "store"))
    project = workdir / "project"
    project.mkdir()
    rewind = shlex.join([sys.executable, "-m", "vfsd.cli.main", "rewind"])
    with monkeypatch.context() as inside:
        inside.chdir(project)
        vfsd("hooks", "install", agent)
        if how == "attach":
            vfsd("attach", ".")
    runs = ["touch made", f"{rewind} && ls > seen"]

    def script(request: Request) -> list[Block]:
        done = len(results(request))
        return [shell_call(agent, done, runs[done])] if done < len(runs) else [text("done")]

    model.script = script
    before = [sys.executable, "-m", "vfsd.cli.main", "run", "--keep", "--"] if how == "run" else []
    run_agent(agent, program, model, str(project), *before)
    (record,) = read_records()
    try:
        place = Path(record.mountpoint) if how == "run" else project
        assert (place / "seen").read_text() == "seen\n"
        assert (project / "seen").exists() == (how == "attach")
    finally:
        vfsd("unmount", record.name, *(["--discard"] if how == "run" else []))


_STEPS = """
import { Vfsd } from "./.opencode/plugins/vfsd.js"
import { writeFileSync } from "node:fs"
const log = []
const hooks = await Vfsd({ directory: process.cwd(), client: { app: { log: async (entry) => log.push(entry) } } })
const message = { id: "msg_1" }
await hooks["chat.message"]({ sessionID: "ses_1" }, { message, parts: [{ type: "text", text: "work" }] })
for (const number of [1, 2]) {
  const call = { tool: "write", sessionID: "ses_1", callID: `call_${number}` }
  await hooks["tool.execute.before"](call, { args: { filePath: `f${number}` } })
  writeFileSync(`f${number}`, "")
}
await hooks.event({ event: { type: "session.idle", properties: { sessionID: "ses_1" } } })
if (log.length) throw new Error(JSON.stringify(log))
"""


def test_opencode_keeps_the_state_after_a_call_if_it_is_not_told_of_the_end(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.path)
    vfsd("hooks", "install", "opencode")
    subprocess.run(["node", "--input-type=module", "-e", _STEPS], check=True, stdin=subprocess.DEVNULL)
    points = json.loads(vfsd("rewind", "--list", "--json"))["points"]
    assert [(each["kind"], each["tool_use_id"]) for each in points] == [
        ("prompt", None),
        ("tool", "call_1"),
        ("tool", "call_2"),
        ("stop", None),
    ]
    vfsd("rewind", "--to", "call_1")
    assert [path.name for path in Path(workspace.path).glob("f*")] == ["f1"]
