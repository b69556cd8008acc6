"""`vfsd list`, `status`, `policy`, `compact` and `upgrade`: the running workspaces."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Final

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.values import complete_workspace
from vfsd.client.requests import RemoteCall, upgrade_params
from vfsd.machine.runtime import WorkspaceRecord, read_records
from vfsd.machine.text import status_rows
from vfsd.operations.workspace import CompactResult, PolicyResult, StatusResult, UpgradeResult
from vfsd.wire.messages import wire_path

_COLUMNS = output.columns("NAME MOUNTPOINT:path BACKEND STATE PID STARTED:time FORK-OF")


@click.command(
    "list",
    cls=Command,
    examples="""
    vfsd list
    vfsd list | cut -f2                    # only the mountpoints
    vfsd list --json
    """,
)
@click.pass_obj
def list_command(app: App) -> None:
    """List the running workspaces.

    In a pipe the columns are separated by tabs: name, mountpoint, backend, state, process id, start time,
    the workspace that it is a fork of.
    The state is "alive", or "dead" if the daemon is gone: `vfsd unmount` removes a dead workspace, and `vfsd mount` at
    the same path replaces it.  A line on standard error says if the daemon is being restarted, and why it was not
    restarted so far, if that is known.
    """
    records = [app.record()] if app.workspace else read_records()
    app.emit({"workspaces": [_as_json(record) for record in records]}, lambda _: _show_list(records))


def _as_json(record: WorkspaceRecord) -> dict[str, str | int | None]:
    return {
        "name": record.name,
        "mountpoint": wire_path(os.fsencode(record.mountpoint)),
        "backend": wire_path(os.fsencode(record.backend)),
        "state": record.state,
        "pid": record.pid,
        "started_at": record.started_at,
        "version": record.version,
        "socket": wire_path(os.fsencode(record.socket)),
        "forked_from": record.forked_from,
        "failure": None if record.alive else record.failure,
    }


def _show_list(records: Sequence[WorkspaceRecord]) -> None:
    keys = ("name", "mountpoint", "backend", "state", "pid", "started_at", "forked_from")
    rows = [[_as_json(record)[key] for key in keys] for record in records]
    output.table(_COLUMNS, rows, empty="no workspace is running; `vfsd mount DIR` starts one")
    for record in records:
        if record.alive:
            continue
        if record.is_kept:
            who = f"its keeper (process {record.keeper})"
            failed = "" if record.failure is None else f"; the last start failed: {record.failure}"
            output.note(
                f"the daemon of {record.name} died, and {who} is to start another one; programs wait for that{failed}"
            )
        elif record.failure is not None:
            output.note(f"{record.name} is dead: {record.failure}")


@click.command(
    "status",
    cls=Command,
    examples="""
    vfsd status
    vfsd status demo
    vfsd status --json
    """,
)
@click.argument("workspace_argument", metavar="[WORKSPACE]", required=False, shell_complete=complete_workspace)
@click.pass_obj
def status_command(app: App, workspace_argument: str | None) -> None:
    """Show the settings, contents and limits of a workspace.

    In a pipe each line is a name and a value, separated by a tab.
    """
    app.choose(workspace_argument)
    app.emit(app.call(app.requests.status()), _show_status)


def _show_status(status: StatusResult) -> None:
    output.fields([(output.Column(heading, kind), cell) for heading, kind, cell in status_rows(status)])


@click.command(
    "compact",
    cls=Command,
    interrupted="interrupted: a compaction that has begun goes on in the daemon, and loses nothing",
    examples="""
    vfsd compact
    vfsd compact -w demo --json
    """,
)
@click.pass_obj
def compact_command(app: App) -> None:
    """Replace the journal of a workspace by an image of its state.

    It then takes less space on disk.  The workspace is served meanwhile.  It happens by itself when the journal exceeds
    64 MB and twice the size of the last image.  While the image is written, the disk holds it and the old journal.
    """
    app.emit(app.call(RemoteCall("compact"), label="compacting"), _show_compacted)


def _show_compacted(answer: CompactResult) -> None:
    before, after = output.human_size(answer.before_bytes), output.human_size(answer.after_bytes)
    output.say(f"the journal took {before} and takes {after} now")


_POLICY_COLUMNS: Final = output.columns("RULE PATTERN:path")
_FILES_SHOWN: Final = 3


@click.command(
    "policy",
    cls=Command,
    examples="""
    vfsd policy
    vfsd policy --protect 'tests/' --protect package-lock.json
    vfsd policy -w demo --hide .env
    vfsd policy --json
    """,
)
@click.option(
    "--protect", multiple=True, metavar="PATTERN", help="From now on, let no program change files that match."
)
@click.option("--hide", multiple=True, metavar="PATTERN", help="From now on, hide files that match from every program.")
@click.pass_obj
def policy_command(app: App, protect: tuple[str, ...], hide: tuple[str, ...]) -> None:
    """Show which files no program may change or see, and add to them.

    Patterns have the syntax of .gitignore, and may be repeated.  Root is held by them, too.  A policy can only be
    tightened, and only if the workspace was mounted with --protect or --hide: a program that may call this command
    must not be able to loosen it.

    In a pipe each line is a rule, protect or hide, and a pattern, separated by a tab.
    """
    app.emit(app.call(app.requests.policy(protect=protect, hide=hide)), _show_policy)


def _show_policy(answer: PolicyResult) -> None:
    rows = [["protect", each] for each in answer.protect] + [["hide", each] for each in answer.hide]
    output.table(_POLICY_COLUMNS, rows, empty="no policy: programs may change and see everything that their user may")
    if answer.open_files:
        shown = ", ".join(map(output.show_path, answer.open_files[:_FILES_SHOWN]))
        more = ", ..." if len(answer.open_files) > _FILES_SHOWN else ""
        output.note(
            f"programs still have protected files open for writing: {shown}{more}.  Their writes fail; what they change"
            " through a mapping is visible for up to a second"
        )


# -- upgrade ----------------------------------------------------------------------------------------
@click.command(
    "upgrade",
    cls=Command,
    interrupted="interrupted: the workspace is served by its old daemon, unless the new one had taken over",
    examples="""
    vfsd upgrade                 # the workspace of the current directory
    vfsd upgrade demo
    vfsd upgrade --all --json
    """,
)
@click.argument("workspace_argument", metavar="[WORKSPACE]", required=False, shell_complete=complete_workspace)
@click.option("--all", "every", is_flag=True, help="Upgrade every running workspace of this user, one by one.")
@click.pass_obj
def upgrade_command(app: App, workspace_argument: str | None, *, every: bool) -> None:
    """Replace the daemon of a workspace by the installed version.

    Programs may use the workspace meanwhile: they wait for a moment, and keep their open files, mappings, locks and
    current directories; what they use below .snapshots they have to open again.  The installed version is that of the
    `vfsd` that runs this command; it may also be the same or an older one, if it understands the running daemon.

    If the new daemon does not come up, the old one serves on, and the command says why.  Running commands of
    `vfsd exec` prevent an upgrade; other calls are waited for.  Forks and their sources are upgraded one by one; an
    upgraded one shares no memory with the others any more.
    """
    records = [record for record in app.chosen(workspace_argument, every=every) if record.alive or not every]
    app.act_on_each(records, functools.partial(_upgrade, app), _say_upgraded, every=every, done="upgraded")
    if not (records or app.json):
        output.say("no workspace is running")


def _upgrade(app: App, record: WorkspaceRecord) -> UpgradeResult:
    call: RemoteCall[UpgradeResult] = RemoteCall("upgrade", upgrade_params(record.pid))
    try:
        answer: UpgradeResult = app.call(call, record, label="upgrading")
    except ConnectionResetError:
        from vfsd.client.log import after_lost_upgrade  # noqa: PLC0415 start-up: a lost connection has time

        return after_lost_upgrade(record.name, record.mountpoint, record.pid)
    return answer


def _say_upgraded(_record: WorkspaceRecord, answer: UpgradeResult) -> None:
    if answer.meanwhile:
        daemon = f"process {answer.pid}, of version {answer.to_version}"
        output.say(f"{answer.name} was upgraded meanwhile: {daemon}, serves it")
        return
    change = f"restarted {answer.name} with the same version, {answer.to_version}"
    if answer.from_version != answer.to_version:
        change = f"upgraded {answer.name} from version {answer.from_version} to {answer.to_version}"
    if answer.old_died:
        output.say(f"{change}: the old daemon died meanwhile, and process {answer.pid} serves with everything")
        return
    output.say(f"{change}: programs waited for {answer.pause_ms:.0f} ms")
