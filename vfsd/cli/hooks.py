"""`vfsd hooks` and `vfsd rewind`: snapshots from the hooks of agents, and the return to one of them."""

from __future__ import annotations

import difflib
import errno
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import click

from vfsd.cli import agent_settings
from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, Group, did_you_mean
from vfsd.cli.common.changes import show_dry_run, show_outcome, show_problems
from vfsd.cli.common.values import touch_option
from vfsd.machine.agent_points import AGENTS, AgentPoint, parse_tag, session_above
from vfsd.machine.mounts import why_no_mount
from vfsd.machine.runtime import read_records
from vfsd.machine.selection import WORKSPACE_VARIABLE, containing, socket_dir
from vfsd.machine.text import nothing_to_restore, signed_counts
from vfsd.operations.snapshots import RestoreResult, SnapshotRecord, SnapshotsResult
from vfsd.wire.messages import wire_path

_EXAMPLES: Final = """
vfsd hooks install claude              # Claude Code, for the project in this directory
vfsd hooks install codex               # also: gemini, opencode
vfsd hooks install claude --user       # for all projects of this user
vfsd hooks install gemini --dry-run
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

    `vfsd hooks install` adds hooks to the settings of Claude Code, Codex, Gemini CLI or OpenCode.  They keep the state
    of the workspace after each tool call and at each prompt, and do nothing outside of a workspace.  `vfsd rewind`
    returns to any of these states.  Sub-agents of Claude Code that ask for a worktree get a fork of the workspace.

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


_agent = click.argument("agent", type=click.Choice(list(AGENTS)), metavar="|".join(AGENTS))
_project = click.option("--project", is_flag=True, help="In the project's settings in this directory; the default.")
_user = click.option("--user", is_flag=True, help="In the user's settings, for all projects.")
_dry_run = click.option("-n", "--dry-run", is_flag=True, help="Show what would change, and change nothing.")


def _path(agent: str, *, project: bool, user: bool) -> str:
    if project and user:
        raise click.UsageError("--project and --user exclude each other: give one")
    return agent_settings.user_path(agent) if user else agent_settings.project_path(agent, os.getcwd())


@hooks_command.command(
    "install",
    examples="""
    vfsd hooks install claude
    vfsd hooks install opencode
    vfsd hooks install codex --user --dry-run
    """,
)
@_agent
@_project
@_user
@_dry_run
@click.pass_obj
def install_command(app: App, agent: str, project: bool, user: bool, dry_run: bool) -> None:
    """Add vfsd's hooks to an agent's settings.

    The hooks of this version of vfsd replace those of another one.  Everything else in the file stays as it is.  An
    agent that is running uses the hooks when it is started again.

    By default the file is in the current directory: .claude/settings.local.json, .codex/hooks.json,
    .gemini/settings.json or .opencode/plugins/vfsd.js.  Do not commit the hooks, because their command contains a path
    of this machine: use --user if the file is committed.
    """
    words = ("installed the hooks in", "the hooks are installed already in")
    path = _path(agent, project=project, user=user)
    _change(app, agent, path, agent_settings.with_hooks, dry_run=dry_run, words=words)
    if app.json or dry_run:
        return
    if AGENTS[agent]["advice"]:
        output.note(AGENTS[agent]["advice"])
    if os.environ.get(WORKSPACE_VARIABLE) or (not user and containing(os.getcwd(), read_records()) is not None):
        return
    reason = why_no_mount()
    if reason is not None:
        output.note(f"nothing can be mounted here ({reason}): `vfsd attach .` keeps the states without a mount")
    elif not user:
        output.note(f"this directory is in no workspace: `vfsd run -- {agent}` gives {AGENTS[agent]['title']} one")


@hooks_command.command(
    "remove",
    examples="""
    vfsd hooks remove claude
    vfsd hooks remove codex --user
    """,
)
@_agent
@_project
@_user
@_dry_run
@click.pass_obj
def remove_command(app: App, agent: str, project: bool, user: bool, dry_run: bool) -> None:
    """Take vfsd's hooks out of an agent's settings, and nothing else."""
    words = ("removed the hooks from", "there are no hooks of vfsd in")
    path = _path(agent, project=project, user=user)
    _change(app, agent, path, agent_settings.without_hooks, dry_run=dry_run, words=words)


def _change(
    app: App,
    agent: str,
    path: str,
    change: Callable[[str, str | None], str | None],
    *,
    dry_run: bool,
    words: tuple[str, str],
) -> None:
    settings = agent_settings.load(agent, path)
    changed = change(agent, settings.text)
    differs = changed != settings.text
    if differs and not dry_run:
        agent_settings.save(settings, changed)
        app.done = f"{words[0]} {settings.path}"

    def show(_: object) -> None:
        place = output.show_path(_shown(path))
        if differs and dry_run:
            _show_difference(settings.text or "", changed or "", place)
        else:
            output.say(f"{words[0] if differs else words[1]} {place}")

    content = changed if agent_settings.is_plugin(agent) else agent_settings.content_of(agent, changed)
    app.emit({"path": _shown(path), "changed": differs, "dry_run": dry_run, "settings": content}, show)


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
def status_command(app: App, agent: str) -> None:
    """Show where vfsd's hooks are installed, and whether they can run."""
    documents = []
    for scope, path in (
        ("project", agent_settings.project_path(agent, os.getcwd())),
        ("user", agent_settings.user_path(agent)),
    ):
        text = agent_settings.load(agent, path).text
        found = agent_settings.installed(agent, text)
        is_current = agent_settings.with_hooks(agent, text) == text
        documents.append(
            {
                "scope": scope,
                "path": _shown(path),
                "state": "installed" if is_current else "outdated" if found else "missing",
                "disabled": agent_settings.is_off(agent, text),
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
        disabled = "; a setting turns hooks off, so no hook runs" if each["disabled"] else ""
        output.say(f"{each['scope']}\t{_STATES[each['state']]}{disabled}\t{output.show_path(each['path'])}")


# -- vfsd rewind ------------------------------------------------------------------------------------
class _Moment(NamedTuple):
    """A snapshot of an agent's hooks.  `prompt_number` counts the prompts of its session from 1; 0 before the first."""

    snapshot: SnapshotRecord
    point: AgentPoint
    prompt_number: int


@click.command(
    "rewind",
    cls=Command,
    examples="""
    vfsd rewind                            # to the state at the last prompt
    vfsd rewind --list
    vfsd rewind --to 3                     # to the state at the third prompt
    vfsd rewind --to toolu_01A09q90qw90    # to the state after this tool call
    vfsd rewind --dry-run --to 3
    """,
)
@click.option(
    "--to",
    "to",
    metavar="PROMPT|TOOL_USE_ID",
    help="The number of a prompt in this session, or the id of any prompt, for the state when it was submitted; or the"
    " id of a tool call, for the state after it.",
)
@click.option("--list", "list_them", is_flag=True, help="List the states, oldest first.")
@click.option("-n", "--dry-run", is_flag=True, help="Show the changes without making them.")
@touch_option
@click.pass_obj
def rewind_command(app: App, to: str | None, list_them: bool, dry_run: bool, touch: bool) -> None:
    """Return to a state that the hooks of an agent kept.

    `vfsd hooks install` installs the hooks. Without --to the workspace returns to the state at the last prompt of the
    session that runs this command, else of the session that was active last. A rewind undoes everything since then,
    whatever made the change: the agent's tools and commands, you, or another session. If other sessions have worked
    since, the command names them first. The conversation of the agent does not change.

    The state before the rewind is kept as a safety snapshot, and `vfsd restore --undo` brings it back.  The states
    after the one that was restored stay, too, so a rewind can be followed by one forward.

    Files get their recorded times.  The command counts those that are older than what they replaced, which a build may
    not notice; --touch gives all files whose content it changes the present time.
    """
    if list_them and (to is not None or dry_run):
        raise click.UsageError("--list stands alone")
    app.record(reads=list_them or dry_run)
    answer: SnapshotsResult = app.call(app.requests.snapshots(changes=list_them))
    moments = _moments(answer.snapshots)
    if list_them:
        app.emit({"points": [_document(moment) for moment in moments]}, lambda _: _show_list(moments))
        return
    moment = _chosen(moments, to)
    _name_others(moments, moment, dry_run=dry_run)
    request = app.requests.restore(moment.snapshot.name, dry_run=dry_run, touch=touch)
    words = _describe(moment)
    if dry_run:
        show_dry_run(app, request, lambda _: f"rewind to {words}")
        return
    restored: RestoreResult = app.call(request, label="restoring")
    shown = output.show_path(words)
    app.emit(restored, lambda _: show_outcome(f"rewound to {shown}", restored, nothing_to_restore(shown)))
    show_problems(restored.problems)


def _moments(snapshots: Sequence[SnapshotRecord]) -> list[_Moment]:
    found = []
    numbers: Counter[str] = Counter()
    for snapshot in snapshots:
        point = parse_tag(snapshot.tag) if snapshot.kind != "safety" else None
        if point is not None:
            numbers[point.session] += point.kind == "prompt"
            found.append(_Moment(snapshot, point, numbers[point.session]))
    return found


def _asking_session(moments: Sequence[_Moment]) -> str:
    """Return the session of the agent that runs this command; else the one with the newest state."""
    return session_above(os.getppid(), socket_dir()) or moments[-1].point.session


def _name_others(moments: Sequence[_Moment], chosen: _Moment, *, dry_run: bool) -> None:
    """Name the other sessions whose calls the rewind undoes."""
    later = moments[moments.index(chosen) + 1 :]
    others = [each for each in later if each.point.session != chosen.point.session and each.point.kind == "tool"]
    for session, calls in Counter(each.point.session for each in others).items():
        newest = next(each.point.text for each in reversed(others) if each.point.session == session)
        verb = "would also undo" if dry_run else "this also undoes"
        work = f"{output.counted(calls, 'tool call')} of session {session or 'without an id'}"
        output.note(f"{verb} {work}, the newest one is {output.show_path(newest)!r}")
    if others and chosen.point.session:
        words = shlex.join(["vfsd", "revert", "--session", chosen.point.session, f"{chosen.snapshot.name}.."])
        output.note(f"`{words}` undoes only the calls of session {chosen.point.session}, and keeps the work of others")


def _chosen(moments: Sequence[_Moment], to: str | None) -> _Moment:
    """Return the moment that `to` means, or the last prompt.  FileNotFoundError, with advice."""
    if not moments:
        hooks = f"`vfsd hooks install {'|'.join(AGENTS)}` installs hooks that keep states"
        advice = f"{hooks}, `vfsd restore` takes any snapshot"
        raise FileNotFoundError(errno.ENOENT, f"no hook of an agent has kept a state of this workspace; {advice}")
    session = _asking_session(moments)
    prompts = [each for each in moments if each.point.kind == "prompt" and each.point.session == session]
    if to is None:
        if not prompts:
            reason = "the hooks kept no prompt of this session: choose one with --to; `vfsd rewind --list` lists them"
            raise FileNotFoundError(errno.ENOENT, reason)
        return prompts[-1]
    for moment in reversed(moments):  # the newest, if an id occurs twice
        names = {moment.snapshot.name, moment.point.tool_use_id}
        if moment.point.kind == "prompt":
            names.add(moment.point.prompt)
            if moment.point.session == session:
                names.add(str(moment.prompt_number))
        if to in names:
            return moment
    if to.isdecimal():
        reason = f"there is no prompt {to}: the hooks kept {output.counted(len(prompts), 'prompt')} of this session"
        raise FileNotFoundError(errno.ENOENT, f"{reason}; `vfsd rewind --list` lists the states")
    ids = [moment.point.tool_use_id or moment.point.prompt for moment in moments]
    advice = did_you_mean(to, dict.fromkeys(filter(None, ids))) or "; `vfsd rewind --list` lists them"
    raise FileNotFoundError(errno.ENOENT, f"no prompt and no tool call has the id {to!r}{advice}")


def _describe(moment: _Moment) -> str:
    point = moment.point
    if point.kind == "prompt":
        return f"prompt {moment.prompt_number} ({point.text})"
    if point.kind == "tool":
        return f"the state after {point.tool_use_id or moment.snapshot.name} ({point.text})"
    return f"the end of the turn after prompt {moment.prompt_number}"


# -- the list -------------------------------------------------------------------------------------
_POINT_COLUMNS: Final = output.columns("PROMPT:count TIME:time ID CHANGED WHAT SESSION")


def _show_list(moments: Sequence[_Moment]) -> None:
    rows = [
        (
            moment.prompt_number or None,
            moment.snapshot.created_at,
            moment.point.tool_use_id or (moment.point.prompt if moment.point.kind == "prompt" else "") or None,
            signed_counts(moment.snapshot.changes),
            f"{moment.point.kind} {moment.point.text}".rstrip(),
            moment.point.session or None,
        )
        for moment in moments
    ]
    advice = f"no states yet; `vfsd hooks install {'|'.join(AGENTS)}` installs hooks that keep them"
    output.table(_POINT_COLUMNS, rows, empty=advice)


def _document(moment: _Moment) -> dict[str, object]:
    point = moment.point
    return {
        "agent": point.agent,
        "kind": point.kind,
        "prompt_number": moment.prompt_number,
        "session": point.session or None,
        "prompt": point.prompt or None,
        "tool_use_id": point.tool_use_id or None,
        "text": point.text,
        "snapshot": moment.snapshot.name,
        "created_at": moment.snapshot.created_at,
        "changes": moment.snapshot.changes,
    }
