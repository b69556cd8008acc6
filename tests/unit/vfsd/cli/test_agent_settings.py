"""vfsd.cli.agent_settings and `vfsd hooks install|remove|status`: nothing else in a settings file changes."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from vfsd.cli import agent_settings
from vfsd.cli.agent_settings import content_of, hook_commands, installed, with_hooks, without_hooks
from vfsd.cli.main import cli
from vfsd.machine.agent_points import AGENTS

each_agent = pytest.mark.parametrize("agent", AGENTS)
each_agent_with_json = pytest.mark.parametrize("agent", ["claude", "codex", "gemini"])
OURS = hook_commands("claude")["Stop"]
OLDER = "/old/bin/python -I -S /old/vfsd/cli/claude_hook.py || true"
EVENTS = sorted({event for agent in AGENTS.values() for event in agent["events"]})
_HOOK = st.fixed_dictionaries(
    {"type": st.just("command"), "command": st.sampled_from(["make lint", OURS, OLDER, "notify-send done"])},
    optional={"timeout": st.integers(1, 9), "comment": st.text(max_size=5)},
)
_GROUP = st.fixed_dictionaries({"hooks": st.lists(_HOOK, max_size=3)}, optional={"matcher": st.sampled_from("*ab")})
_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.text(max_size=5),
        "hooks": st.dictionaries(st.sampled_from(EVENTS), st.lists(_GROUP, max_size=3), max_size=4),
        "permissions": st.dictionaries(st.text(max_size=3), st.lists(st.integers())),
    },
)


def others(content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (event, hook)
        for event, groups in content.get("hooks", {}).items()
        for group in groups
        for hook in group["hooks"]
        if "/vfsd/cli/" not in hook["command"]
    ]


@each_agent_with_json
@given(_SETTINGS, st.sampled_from([None, 0, 1, "\t"]), st.sampled_from(["", " ", "\n"]))
def test_install_and_remove_change_only_our_hooks(
    agent: str, content: dict[str, Any], indent: int | str | None, end: str
) -> None:
    text = json.dumps(content, indent=indent) + end
    with_ours = with_hooks(agent, text)
    assert sorted(installed(agent, with_ours)) == sorted(hook_commands(agent).items())
    assert with_hooks(agent, with_ours) == with_ours
    removed = without_hooks(agent, with_ours)
    assert removed is not None
    assert installed(agent, removed) == []
    contents = [json.loads(each) for each in (with_ours, removed)]
    assert others(content) == others(contents[0]) == others(contents[1])
    for changed in contents:
        rest = [(key, value) for key, value in changed.items() if key != "hooks"]
        assert rest == [(key, value) for key, value in content.items() if key != "hooks"]
    assert without_hooks(agent, removed) == removed


_MARK = "/* a comment */"


@given(_SETTINGS, st.data())
def test_comments_stay(content: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(content, indent=2).replace("*/", "")
    content = json.loads(text)
    places = [found.end() for found in re.finditer(r"[\[{,]\s*?(?=\n)|(?<=[\]}])(?=\n)", text)]
    chosen = data.draw(st.sets(st.sampled_from(places))) if places else set()
    for place in sorted(chosen, reverse=True):
        text = (
            text[:place]
            + data.draw(st.sampled_from([f" {_MARK}", f" // {_MARK}", f" /* 1\n2 */ {_MARK}"]))
            + text[place:]
        )
    if installed("gemini", text):  # a comment beside a hook of ours may go with it
        return
    with_ours = with_hooks("gemini", text)
    removed = without_hooks("gemini", with_ours)
    assert removed is not None
    for name, value in content.items():
        assert name == "hooks" or content_of("gemini", removed)[name] == value
    assert others(content_of("gemini", removed)) == others(content)
    assert text.count(_MARK) == with_ours.count(_MARK) == removed.count(_MARK)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for agent in AGENTS.values():
        monkeypatch.setenv(agent["user_file"][0], str(tmp_path / "user"))
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["hooks", *words])


@each_agent
def test_install_status_and_remove(project: Path, agent: str) -> None:
    file = project / AGENTS[agent]["project_file"]
    dry = run("install", agent, "--dry-run")
    assert re.search(r"^\+.*agent_hook", dry.stdout, re.MULTILINE)
    assert not file.exists()
    assert "not installed" in run("status", agent).stdout
    first = run("install", agent)
    assert first.stdout == f"installed the hooks in {file}\n"
    assert f"this directory is in no workspace: `vfsd run -- {agent}`" in first.stderr
    assert ("trusted them" in first.stderr) == (agent == "codex")
    before = file.stat()
    assert run("install", agent).stdout == f"the hooks are installed already in {file}\n"
    assert file.stat().st_ino == before.st_ino
    states = json.loads(run("status", agent, "--json").stdout)["hooks"]
    assert [(each["scope"], each["state"]) for each in states] == [("project", "installed"), ("user", "missing")]
    assert states[0]["events"] == sorted(AGENTS[agent]["events"])
    file.write_text(file.read_text().replace("agent_hook.py", "agent_hook.py other"))
    assert "of another version" in run("status", agent).stdout
    assert run("install", agent).stdout == f"installed the hooks in {file}\n"
    assert run("remove", agent).stdout == f"removed the hooks from {file}\n"
    assert agent == "opencode" or json.loads(file.read_text()) == {}
    assert file.exists() == (agent != "opencode")
    assert run("remove", agent).stdout == f"there are no hooks of vfsd in {file}\n"


@pytest.mark.parametrize(
    ("agent", "file"),
    [
        ("claude", "settings.json"),
        ("codex", "hooks.json"),
        ("gemini", ".gemini/settings.json"),
        ("opencode", "opencode/plugins/vfsd.js"),
    ],
)
def test_user_settings_are_where_the_agent_looks_for_them(project: Path, agent: str, file: str) -> None:
    assert run("install", agent, "--user").exit_code == 0
    assert "agent_hook.py" in (project / "user" / file).read_text()
    assert run("install", agent, "--user", "--project").exit_code == 2
    for words in (["install", "other"], ["install"]):
        result = run(*words)
        assert result.exit_code == 2
        assert "codex" in result.stderr
        assert "\\x" not in result.stderr


def test_a_setting_that_turns_hooks_off_is_named(project: Path) -> None:
    for agent, text in (("claude", '{"disableAllHooks": true}'), ("gemini", '{"hooksConfig": {"enabled": false}}')):
        file = project / AGENTS[agent]["project_file"]
        file.parent.mkdir()
        file.write_text(text)
        assert "turns hooks off" in run("status", agent).stdout


def test_a_plugin_of_the_user_is_not_touched(project: Path) -> None:
    file = project / AGENTS["opencode"]["project_file"]
    file.parent.mkdir(parents=True)
    file.write_text("export const Mine = async () => ({})\n")
    for words in (["install", "opencode"], ["remove", "opencode"], ["status", "opencode"]):
        result = run(*words)
        assert result.exit_code == 1
        assert result.stderr.startswith("vfsd: error: cannot read the settings: vfsd did not write this file")
    assert file.read_text() == "export const Mine = async () => ({})\n"


def test_the_file_keeps_its_mode_its_symlink_and_its_style(project: Path) -> None:
    (project / ".claude").mkdir()
    target, link = project / "dotfiles.json", project / ".claude" / "settings.local.json"
    text = '{\n\t"model": "é",\n\t"env": {}\n}'
    target.write_text(text)
    target.chmod(0o640)
    link.symlink_to(target)
    assert run("install", "claude").exit_code == 0
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert target.read_text().startswith('{\n\t"model": "é",\n\t"env": {},\n\t"hooks": {\n\t\t"')
    assert run("remove", "claude").exit_code == 0
    assert target.read_text() == text
    assert sorted(os.listdir(project / ".claude")) == ["settings.local.json"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "// a comment\n{}",
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"hooks": []}',
        '{"hooks": {"Stop": {}}}',
        '{"hooks": {"Stop": [{"hooks": "x"}]}}',
        "[" * 100_000,
    ],
)
def test_a_file_that_could_not_be_written_back_is_not_touched(project: Path, text: str) -> None:
    (project / ".claude").mkdir()
    file = project / ".claude" / "settings.local.json"
    file.write_text(text)
    for words in (["install", "claude"], ["remove", "claude"], ["status", "claude"]):
        result = run(*words)
        assert result.exit_code == 1
        assert result.stderr.startswith("vfsd: error: cannot read the settings: ")
        assert result.stderr.count("\n") == 1
        assert "codec" not in result.stderr
        assert "recursion" not in result.stderr
    assert file.read_text() == text


def test_a_directory_or_a_fifo_is_not_touched(project: Path) -> None:
    (project / ".claude").mkdir()
    os.mkfifo(project / ".claude" / "settings.local.json")
    assert "not a regular file" in run("install", "claude").stderr
    os.unlink(project / ".claude" / "settings.local.json")
    (project / ".claude" / "settings.local.json").mkdir()
    assert "not a regular file" in run("install", "claude").stderr


@each_agent
def test_the_users_settings_need_no_current_directory(
    project: Path, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "gone").mkdir()
    monkeypatch.chdir(project / "gone")
    (project / "gone").rmdir()
    assert run("install", agent, "--user").exit_code == 0


def test_a_full_disk_changes_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (project / ".claude").mkdir()
    file = project / ".claude" / "settings.local.json"
    file.write_text("{}")
    monkeypatch.setattr(os, "fsync", full)
    result = run("install", "claude")
    assert result.exit_code == 1
    assert result.stderr == f"vfsd: error: No space left on device; nothing was changed: {file}\n"
    assert os.listdir(file.parent) == [file.name]
    assert file.read_text() == "{}"


def test_a_file_that_another_program_changed_meanwhile_is_not_replaced(project: Path) -> None:
    file = project / "settings.json"
    file.write_text("{}")
    settings = agent_settings.load("claude", str(file))
    file.write_text('{"model": "x"}')
    with pytest.raises(BlockingIOError, match="another program changed the file"):
        agent_settings.save(settings, with_hooks("claude", None))
    assert file.read_text() == '{"model": "x"}'
    assert os.listdir(project) == ["settings.json"]
