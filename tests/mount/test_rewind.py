"""`vfsd rewind`: back to what the hooks of an agent kept, and forward again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click.testing
import pytest

from tests.mount.conftest import MountIt
from vfsd.cli import agent_hook
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace
from vfsd.machine.selection import socket_dir

pytestmark = pytest.mark.workspaces(engines=["native"])


def vfsd(workspace: Workspace, *words: str) -> str:
    result = click.testing.CliRunner().invoke(cli, [*words, "-w", workspace.name])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def keep(workspace: Workspace, event: str, prompt_id: str, **members: object) -> None:
    common = {"session_id": "s", "prompt_id": prompt_id, "cwd": workspace.path, "hook_event_name": event}
    agent_hook.handle("claude", {**common, **members}, {}, 0)


def worked(workspace: Workspace) -> None:
    """Two prompts with two tool calls each; each call changes the file `log`."""
    root = Path(workspace.path)
    for prompt in ("p1", "p2"):
        keep(workspace, "UserPromptSubmit", prompt, prompt=f"text of {prompt}")
        for number in ("1", "2"):
            with (root / "log").open("a") as file:
                file.write(f"{prompt}.{number} ")
            (root / f"{prompt}{number}").touch()
            keep(workspace, "PostToolUse", prompt, tool_name="Bash", tool_use_id=f"toolu_{prompt}{number}")
        keep(workspace, "Stop", prompt)


def test_a_rewind_goes_to_any_prompt_and_any_call_and_can_be_undone(workspace: Workspace, root: Path) -> None:
    worked(workspace)
    for to, log in (
        ("toolu_p11", "p1.1 "),
        ("toolu_p22", "p1.1 p1.2 p2.1 p2.2 "),
        ("p2", "p1.1 p1.2 "),
        ("2", "p1.1 p1.2 "),
        ("toolu_p21", "p1.1 p1.2 p2.1 "),
    ):
        said = vfsd(workspace, "rewind", "--to", to)
        assert "rewound to" in said or "nothing to restore" in said
        assert (root / "log").read_text() == log
    (root / "mine").write_text("not kept by a hook")
    said = vfsd(workspace, "rewind")
    assert said.startswith("rewound to prompt 2 (text of p2): 1 modified, 2 removed\n")
    assert "`vfsd restore --undo` brings it back" in said
    assert not (root / "mine").exists()
    vfsd(workspace, "restore", "--undo")
    assert (root / "mine").read_text() == "not kept by a hook"
    assert (root / "log").read_text() == "p1.1 p1.2 p2.1 "
    vfsd(workspace, "rewind", "--to", "1")
    assert list(root.iterdir()) == []


def test_the_list_has_prompts_calls_and_ends(workspace: Workspace) -> None:
    workspace.snapshot("mine", tag="claude:tool is not a tag of a hook")
    worked(workspace)
    points = json.loads(vfsd(workspace, "rewind", "--list", "--json"))["points"]
    assert [(each["kind"], each["prompt_number"], each["tool_use_id"]) for each in points] == [
        ("prompt", 1, None),
        ("tool", 1, "toolu_p11"),
        ("tool", 1, "toolu_p12"),
        ("stop", 1, None),
        ("prompt", 2, None),
        ("tool", 2, "toolu_p21"),
        ("tool", 2, "toolu_p22"),
        ("stop", 2, None),
    ]
    rows = [line.split("\t") for line in vfsd(workspace, "rewind", "--list").splitlines()]
    assert rows[0][2:] == ["p1", "+0 ~0 -0", "prompt text of p1", "s"]
    assert rows[1][0::2] == ["1", "toolu_p11", "tool Bash"]
    kinds = {snapshot.name: snapshot.kind for snapshot in workspace.snapshots()}
    assert kinds["toolu_p11"] == "automatic"
    assert kinds["mine"] == "user"


def test_each_session_has_its_own_prompts_and_the_work_of_another_one_is_named(
    workspace: Workspace, root: Path
) -> None:
    worked(workspace)
    keep(workspace, "UserPromptSubmit", "q1", prompt="of the other", session_id="t")
    (root / "theirs").touch()
    keep(workspace, "PostToolUse", "q1", tool_name="Write", tool_use_id="toolu_q1", session_id="t")
    points = json.loads(vfsd(workspace, "rewind", "--list", "--json"))["points"]
    assert [(each["session"], each["prompt_number"]) for each in points if each["kind"] == "prompt"] == [
        ("s", 1),
        ("s", 2),
        ("t", 1),
    ]

    def rewind(*words: str) -> tuple[str, str]:
        result = click.testing.CliRunner().invoke(cli, ["rewind", *words, "-w", workspace.name])
        return result.stdout.partition(":")[0], result.stderr

    others = "1 tool call of session t, the newest one is 'Write'"
    # A user asks: the session that was active last is meant.
    assert "no prompt 2: the hooks kept 1 prompt of this session" in rewind("--dry-run", "--to", "2")[1]
    assert others in rewind("--dry-run", "--to", "p2")[1]
    assert rewind() == ("rewound to prompt 1 (of the other)", "")
    assert (root / "p22").exists()
    # A command of the agent of the first session asks.
    common = {"session_id": "s", "cwd": workspace.path, "hook_event_name": "PreToolUse", "tool_use_id": "toolu_p23"}
    agent_hook.handle("claude", {**common, "tool_name": "Bash"}, {}, os.getppid())
    words, remark = rewind()
    (Path(socket_dir()) / "agents" / str(os.getppid())).unlink()
    assert words == "rewound to prompt 2 (text of p2)"
    assert f"this also undoes {others}" in remark


def test_a_dry_run_changes_nothing(workspace: Workspace, root: Path) -> None:
    worked(workspace)
    assert vfsd(workspace, "rewind", "-n", "--to", "toolu_p12").splitlines() == ["M log", "D p21", "D p22"]
    assert (root / "p22").exists()


def test_a_host_directory_is_rewound_too(mount: MountIt, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "store"))
    (workdir / "below").mkdir()
    workspace = mount(backend=f"host:{workdir / 'below'}")
    worked(workspace)
    vfsd(workspace, "rewind", "--to", "toolu_p12")
    assert (workdir / "below" / "log").read_text() == "p1.1 p1.2 "


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["--to", "toolu_p13"], 1, "did you mean toolu_p"),
        (["--to", "99"], 1, "there is no prompt 99: the hooks kept 2 prompts"),
        (["--list", "--to", "1"], 2, "--list stands alone"),
        (["--to", ""], 2, "empty string"),
    ],
)
def test_an_unknown_state_is_one_line(workspace: Workspace, words: list[str], status: int, reason: str) -> None:
    worked(workspace)
    result = click.testing.CliRunner().invoke(cli, ["rewind", "-w", workspace.name, *words])
    assert result.exit_code == status
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_workspace_without_hooks_says_how_to_install_them(workspace: Workspace) -> None:
    workspace.snapshot("mine")
    result = click.testing.CliRunner().invoke(cli, ["rewind", "-w", workspace.name])
    assert result.exit_code == 1
    assert "vfsd hooks install claude" in result.stderr
