"""`vfsd upgrade`: replace the daemon of a workspace, or of each one, by the installed version."""

from __future__ import annotations

import os
from typing import Any

import click
from msgspec import to_builtins

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, describe, error_record
from vfsd.cli.common.names import complete_workspace
from vfsd.cli.common.output import counted
from vfsd.client.log import after_lost_upgrade
from vfsd.client.requests import RemoteCall, upgrade_params
from vfsd.machine.runtime import WorkspaceRecord, read_records
from vfsd.operations.workspace import UpgradeResult
from vfsd.wire.messages import wire_path


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
    if every and (workspace_argument or app.workspace):
        raise click.UsageError("give --all or a workspace, not both")
    app.choose(workspace_argument)
    records = [record for record in read_records() if record.alive] if every else [app.record()]
    entries: list[dict[str, Any]] = []
    failed: OSError | None = None
    for record in records:
        try:
            call: RemoteCall[UpgradeResult] = RemoteCall("upgrade", upgrade_params(record.pid))
            answer = _upgrade(app, call, record)
        except OSError as error:
            if not every:
                raise
            failed = failed or error
            output.report(f"{record.name}: {describe(error)}")
            entries.append({**_place(record), "error": error_record(error)})
            continue
        entries.append({**_place(record), **to_builtins(answer)})
        upgraded = len([entry for entry in entries if "error" not in entry])
        app.done = counted(upgraded, "workspace was", "workspaces were") + " upgraded"
        if not app.json:
            with app.writing():
                _say_upgraded(answer)
    if app.json:
        with app.writing():
            output.print_json({"upgraded": entries, **({"error": error_record(failed)} if failed else {})})
    elif not records:
        output.say("no workspace is running")
    if failed:
        click.get_current_context().exit(1)


def _upgrade(app: App, call: RemoteCall[UpgradeResult], record: WorkspaceRecord) -> UpgradeResult:
    try:
        answer: UpgradeResult = app.call(call, record, label="upgrading")
    except ConnectionResetError:
        return after_lost_upgrade(record.name, record.mountpoint, record.pid)
    return answer


def _place(record: WorkspaceRecord) -> dict[str, Any]:
    return {"name": record.name, "mountpoint": wire_path(os.fsencode(record.mountpoint))}


def _say_upgraded(answer: UpgradeResult) -> None:
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
