"""vfsd.cli.claude_settings and `vfsd hooks install|remove|status`: nothing else in a settings file changes."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from vfsd.cli import claude_settings
from vfsd.cli.claude_settings import EVENTS, hook_commands, installed_commands, with_hooks, without_hooks
from vfsd.cli.main import cli

COMMANDS = hook_commands()
OURS = COMMANDS["Stop"]
OLDER = "/old/bin/python -I -S /old/vfsd/cli/claude_hook.py || true"
_HOOK = st.fixed_dictionaries(
    {"type": st.just("command"), "command": st.sampled_from(["make lint", OURS, OLDER, "notify-send done"])},
    optional={"timeout": st.integers(1, 9), "comment": st.text(max_size=5)},
)
_GROUP = st.fixed_dictionaries({"hooks": st.lists(_HOOK, max_size=3)}, optional={"matcher": st.sampled_from("*ab")})
_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.text(max_size=5),
        "hooks": st.dictionaries(st.sampled_from([*EVENTS, "PreToolUse"]), st.lists(_GROUP, max_size=3), max_size=4),
        "permissions": st.dictionaries(st.text(max_size=3), st.lists(st.integers())),
    },
)


def others(content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(event, hook) for event, hook in claude_settings._hooks(content) if not claude_settings._is_ours(hook)]


@given(_SETTINGS)
def test_install_and_remove_change_only_our_hooks(content: dict[str, Any]) -> None:
    installed = with_hooks(content, COMMANDS)
    assert sorted(installed_commands(installed)) == sorted(COMMANDS.items())
    assert with_hooks(installed, COMMANDS) == installed
    removed = without_hooks(installed)
    assert installed_commands(removed) == []
    assert others(content) == others(installed) == others(removed)
    for changed in (installed, removed):
        rest = [(key, value) for key, value in changed.items() if key != "hooks"]
        assert rest == [(key, value) for key, value in content.items() if key != "hooks"]
    assert without_hooks(removed) == removed


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "user"))
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["hooks", *words])


def test_install_status_and_remove(project: Path) -> None:
    file = project / ".claude" / "settings.local.json"
    dry = run("install", "claude", "--dry-run")
    assert "+        " in dry.stdout
    assert not file.exists()
    assert "not installed" in run("status", "claude").stdout
    assert run("install", "claude").stdout == f"installed the hooks in {file}\n"
    before = file.stat()
    assert run("install", "claude").stdout == f"the hooks are installed already in {file}\n"
    assert file.stat().st_ino == before.st_ino
    states = json.loads(run("status", "claude", "--json").stdout)["hooks"]
    assert [(each["scope"], each["state"]) for each in states] == [("project", "installed"), ("user", "missing")]
    assert run("remove", "claude").stdout == f"removed the hooks from {file}\n"
    assert json.loads(file.read_text()) == {}
    assert run("remove", "claude").stdout == f"there are no hooks of vfsd in {file}\n"


def test_user_settings_are_where_claude_code_looks_for_them(project: Path) -> None:
    assert run("install", "claude", "--user").exit_code == 0
    assert installed_commands(json.loads((project / "user" / "settings.json").read_text()))
    assert run("install", "claude", "--user", "--project").exit_code == 2
    assert run("install", "codex").exit_code == 2


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
    assert run("install", "claude").exit_code == 1


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
    settings = claude_settings.load(str(file))
    file.write_text('{"model": "x"}')
    with pytest.raises(BlockingIOError, match="another program changed the file"):
        claude_settings.save(settings, with_hooks({}, COMMANDS))
    assert file.read_text() == '{"model": "x"}'
    assert os.listdir(project) == ["settings.json"]
