"""`vfsd hooks`: take snapshots from the hooks of agents."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from vfsd.cli import claude_settings
from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, Group
from vfsd.wire.messages import wire_path

_EXAMPLES: Final = """
vfsd hooks install claude              # Claude Code, for the project in this directory
vfsd hooks install claude --user       # for all projects of this user
vfsd hooks install claude --dry-run
vfsd hooks status claude
vfsd hooks remove claude
vfsd hooks                             # a command for the hooks of another agent
"""


class _HooksCommand(Command):
    """A command that needs no running workspace: its help leaves -w out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, acts_on_workspace=False, **kwargs)


@click.group("hooks", cls=Group, acts_on_workspace=False, invoke_without_command=True, examples=_EXAMPLES)
@click.pass_context
def hooks_command(ctx: click.Context) -> None:
    """Take a snapshot after each step of an agent.

    `vfsd hooks install claude` adds hooks to the settings of Claude Code.  They keep the state of the workspace after
    each tool call and at each prompt, and do nothing outside of a workspace.  `vfsd rewind` returns to any of
    these states.  Sub-agents that ask for a worktree get an overlay of the workspace.

    Without a subcommand this prints a command for the hooks of another agent.  It starts faster than `vfsd snapshot`
    and takes the same options.  It acts on $VFSD_WORKSPACE, else on the workspace that the current directory is in.
    Its exit status is 0, or 1 with one line on standard error; it is never 2, which hook runners treat as an error that
    blocks the agent.
    """
    if ctx.invoked_subcommand is None:
        client = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook_client.py")
        command = shlex.join([sys.executable, "-I", "-S", client, "snapshot"])
        ctx.ensure_object(App).emit({"snapshot": command}, lambda answer: output.say(answer["snapshot"]))


hooks_command.command_class = _HooksCommand


def _known(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if value != "claude":
        raise click.BadParameter(f"{value!r} is not an agent that vfsd knows; it is claude")
    return value


_agent = click.argument("agent", metavar="claude", callback=_known)
_project = click.option("--project", is_flag=True, help=f"In {claude_settings.PROJECT_FILE} here; the default.")
_user = click.option("--user", is_flag=True, help="In the user's settings, for all projects.")
_dry_run = click.option("-n", "--dry-run", is_flag=True, help="Show what would change, and change nothing.")


def _path(*, project: bool, user: bool) -> str:
    if project and user:
        raise click.UsageError("--project and --user exclude each other: give one")
    return claude_settings.user_path() if user else claude_settings.project_path(os.getcwd())


@hooks_command.command(
    "install",
    examples="""
    vfsd hooks install claude
    vfsd hooks install claude --user --dry-run
    """,
)
@_agent
@_project
@_user
@_dry_run
@click.pass_obj
def install_command(app: App, agent: str, project: bool, user: bool, dry_run: bool) -> None:  # noqa: ARG001
    """Add vfsd's hooks to an agent's settings.

    The hooks of this version of vfsd replace those of another one.  Everything else in the file stays as it is.  An
    agent that is running uses the hooks when it is started again.

    By default the file is .claude/settings.local.json in the current directory, which should not be committed: the
    hook's command contains a path of this machine.
    """
    commands = claude_settings.hook_commands()
    _change(
        app,
        _path(project=project, user=user),
        lambda content: claude_settings.with_hooks(content, commands),
        dry_run=dry_run,
        words=("installed the hooks in", "the hooks are installed already in"),
    )


@hooks_command.command(
    "remove",
    examples="""
    vfsd hooks remove claude
    vfsd hooks remove claude --user
    """,
)
@_agent
@_project
@_user
@_dry_run
@click.pass_obj
def remove_command(app: App, agent: str, project: bool, user: bool, dry_run: bool) -> None:  # noqa: ARG001
    """Take vfsd's hooks out of an agent's settings, and nothing else."""
    words = ("removed the hooks from", "there are no hooks of vfsd in")
    _change(app, _path(project=project, user=user), claude_settings.without_hooks, dry_run=dry_run, words=words)


def _change(
    app: App, path: str, change: Callable[[dict[str, Any]], dict[str, Any]], *, dry_run: bool, words: tuple[str, str]
) -> None:
    settings = claude_settings.load(path)
    changed = change(settings.content)
    differs = changed != settings.content
    if differs and not dry_run:
        claude_settings.save(settings, changed)
        app.done = f"{words[0]} {settings.path}"

    def show(_: object) -> None:
        place = output.show_path(_shown(path))
        if differs and dry_run:
            _show_difference(settings.text or "", claude_settings.rendered(settings, changed), place)
        else:
            output.say(f"{words[0] if differs else words[1]} {place}")

    app.emit({"path": _shown(path), "changed": differs, "dry_run": dry_run, "settings": changed}, show)


def _shown(path: str) -> str:
    return wire_path(os.fsencode(path))


def _show_difference(before: str, after: str, place: str) -> None:
    colours = {"+": "green", "-": "red"}
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), place, place, lineterm=""):
        output.say(click.style(output.show_path(line), fg=colours.get(line[:1])))


@hooks_command.command(
    "status",
    examples="""
    vfsd hooks status claude
    vfsd hooks status claude --json
    """,
)
@_agent
@click.pass_obj
def status_command(app: App, agent: str) -> None:  # noqa: ARG001
    """Show where vfsd's hooks are installed, and whether they can run."""
    commands = claude_settings.hook_commands()
    documents = []
    for scope, path in (
        ("project", claude_settings.project_path(os.getcwd())),
        ("user", claude_settings.user_path()),
    ):
        settings = claude_settings.load(path)
        found = claude_settings.installed_commands(settings.content)
        is_current = claude_settings.with_hooks(settings.content, commands) == settings.content
        documents.append(
            {
                "scope": scope,
                "path": _shown(path),
                "state": "installed" if is_current else "outdated" if found else "missing",
                "disabled": settings.content.get("disableAllHooks") is True,
                "events": sorted({event for event, _ in found}),
            }
        )
    app.emit({"hooks": documents}, _show_status)


_STATES: Final = {
    "installed": "installed",
    "outdated": "of another version or installation of vfsd: install them again",
    "missing": "not installed",
}


def _show_status(answer: dict[str, Any]) -> None:
    for each in answer["hooks"]:
        disabled = "; disableAllHooks is set, so no hook runs" if each["disabled"] else ""
        output.say(f"{each['scope']}\t{_STATES[each['state']]}{disabled}\t{output.show_path(each['path'])}")
