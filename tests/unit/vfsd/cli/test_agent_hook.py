"""vfsd.cli.agent_hook: what a hook of an agent keeps, and that it never disturbs the agent."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_workspace import FakeDaemon
from vfsd.cli import agent_hook, hook_client
from vfsd.cli.agent_settings import hook_commands
from vfsd.client.quick_call import ask

COMMAND = hook_commands("claude")["PostToolUse"]
PROGRAM = shlex.split(COMMAND.removesuffix(" || true"))


@pytest.fixture
def daemon(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    monkeypatch.chdir("/")
    monkeypatch.delenv("CLAUDE_PROJECT_DIR", raising=False)
    with FakeDaemon("demo", str(place)) as fake:
        yield fake


def event(daemon: FakeDaemon, **members: Any) -> dict[str, Any]:
    common = {"session_id": "s", "prompt_id": "p", "cwd": daemon.mountpoint, "hook_event_name": "PostToolUse"}
    call = {"tool_name": "Bash", "tool_input": {"command": "make"}, "tool_use_id": "toolu_1"}
    return {**common, **call, **members}


def keep(members: dict[str, Any], environ: dict[str, str]) -> None:
    agent_hook.handle("claude", members, environ, 0)


def run(data: bytes, **environ: str) -> tuple[int, bytes, bytes]:
    done = subprocess.run(PROGRAM, input=data, capture_output=True, check=False, env={**os.environ, **environ})
    return done.returncode, done.stdout, done.stderr


def test_a_call_of_a_tool_and_a_prompt_are_kept_as_automatic_snapshots(daemon: FakeDaemon) -> None:
    assert run(json.dumps(event(daemon)).encode()) == (0, b"", b"")
    prompt = event(daemon, hook_event_name="UserPromptSubmit", prompt="do it")
    assert run(json.dumps(prompt).encode()) == (0, b"", b"")
    assert daemon.tags == {
        "toolu_1": "claude:tool session=s prompt=p id=toolu_1: Bash: make",
        "snap-2": "claude:prompt session=s prompt=p: do it",
    }
    assert [params.automatic for _, params in daemon.requests] == [True, True]


def test_an_id_that_occurs_twice_is_kept_twice(daemon: FakeDaemon) -> None:
    for _ in range(2):
        keep(event(daemon), {})
    assert list(daemon.snapshots) == ["toolu_1", "snap-2"]


@pytest.mark.parametrize(
    "change",
    [
        {"cwd": "/"},
        {"cwd": "relative"},
        {"cwd": 7},
        {"hook_event_name": "Notification"},
        {"hook_event_name": None},
    ],
)
def test_nothing_is_kept_outside_a_workspace_or_of_other_events(daemon: FakeDaemon, change: dict[str, Any]) -> None:
    keep(event(daemon, **change), {})
    assert daemon.snapshots == {}


def test_an_agent_that_changed_its_directory_still_works_in_its_project(daemon: FakeDaemon) -> None:
    keep(event(daemon, cwd="/"), {"CLAUDE_PROJECT_DIR": f"{daemon.mountpoint}/src"})
    assert list(daemon.snapshots) == ["toolu_1"]


def test_the_variable_selects_the_workspace(daemon: FakeDaemon) -> None:
    keep(event(daemon, cwd="/"), {"VFSD_WORKSPACE": "demo"})
    for name in ("PostToolUse", "PreToolUse"):
        missed = event(daemon, tool_use_id="toolu_2", hook_event_name=name)
        status, printed, remark = run(json.dumps(missed).encode(), VFSD_WORKSPACE="other")
        assert (status, printed) == (1, b"")
        assert b"$VFSD_WORKSPACE is 'other', which names no workspace" in remark
        assert remark.count(b"\n") == 1
    assert list(daemon.snapshots) == ["toolu_1"]


@pytest.mark.parametrize("program", ["claude", "other"])
def test_an_agent_does_not_wait_for_a_daemon_that_is_stopped(daemon: FakeDaemon, program: str) -> None:
    daemon.silent = True
    hook = PROGRAM if program == "claude" else [*PROGRAM[:-2], hook_client.__file__, "snapshot", "-w", "demo"]
    done = subprocess.run(hook, input=json.dumps(event(daemon)).encode(), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"vfsd: the daemon has not answered for a second: the state is kept later, or not at all\n"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000])
def test_input_that_is_no_object_is_one_line_and_status_1(daemon: FakeDaemon, data: bytes) -> None:
    status, printed, remark = run(data)
    assert (status, printed) == (1, b"")
    assert remark.startswith(b"vfsd: no snapshot was taken: ")
    assert remark.count(b"\n") == 1
    shell = subprocess.run(COMMAND, shell=True, input=data, capture_output=True, check=True)
    assert shell.stdout == b""


def test_a_hook_that_names_no_agent_is_one_line_and_status_1(daemon: FakeDaemon) -> None:
    done = subprocess.run(PROGRAM[:-1], input=json.dumps(event(daemon)).encode(), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert b"`vfsd hooks install` replaces it" in done.stderr


def test_members_of_a_wrong_type_and_bytes_that_are_not_utf8_are_no_error(daemon: FakeDaemon) -> None:
    odd = event(daemon, tool_name=[1], tool_input=3, session_id={}, prompt_id="a b")
    keep(odd, {})
    assert daemon.tags == {"toolu_1": "claude:tool id=toolu_1: "}
    data = json.dumps(event(daemon, tool_use_id="toolu_2", tool_input={"command": "?"})).encode().replace(b"?", b"\xff")
    assert run(data) == (0, b"", b"")
    assert daemon.tags["toolu_2"] == "claude:tool session=s prompt=p id=toolu_2: Bash: \N{REPLACEMENT CHARACTER}"


def test_a_large_input_is_read_to_its_end(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(json.dumps(event(daemon, tool_response="x" * 3_000_000)).encode()) == (0, b"", b"")
    assert list(daemon.snapshots) == ["toolu_1"]
    monkeypatch.setattr(agent_hook, "_INPUT_BYTES_MAX", 10)
    reader, writer = os.pipe()
    os.write(writer, b"x" * 100)
    os.close(writer)
    with pytest.raises(ValueError, match="more than"):
        agent_hook.read_event(reader)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_daemon_that_does_not_answer_or_is_gone_is_one_line(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_hook, "TIMEOUT_S", 0.05)
    daemon.silent = True
    with pytest.raises(ConnectionRefusedError, match="demo does not answer"):
        keep(event(daemon), {})
    os.unlink(daemon.socket)
    with pytest.raises(ConnectionRefusedError, match="demo does not answer"):
        keep(event(daemon), {})


def test_a_record_that_cannot_be_read_does_not_matter(daemon: FakeDaemon) -> None:
    Path(daemon.socket).with_name("aaa.json").write_text("{")
    keep(event(daemon), {})
    assert list(daemon.snapshots) == ["toolu_1"]
    Path(daemon.socket).with_name("aaa.json").unlink()


def test_an_error_of_the_daemon_has_its_errno_and_its_message(daemon: FakeDaemon) -> None:
    daemon.snapshots["a"] = {}
    with pytest.raises(FileExistsError, match="a"):
        ask(daemon.socket, "snapshot", {"name": "a", "tag": None}, 10)
    with pytest.raises(OSError, match="unknown"):
        ask(daemon.socket, "snapshot", {"unknown": 1}, 10)
