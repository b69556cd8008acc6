"""`vfsd unmount`: asks, saves or refuses where changes would be lost."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from dataclasses import dataclass
from typing import Any, Final

import click
from msgspec import to_builtins

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, describe, error_record
from vfsd.cli.common.changes import count_words
from vfsd.cli.common.names import complete_workspace
from vfsd.cli.common.output import counted
from vfsd.cli.common.values import refuse_other_archives
from vfsd.client.daemon_exit import daemon_end
from vfsd.client.requests import RemoteCall, Requests
from vfsd.machine.mounts import clear_dead_mount, is_dead, mount_at
from vfsd.machine.runtime import WorkspaceRecord, read_records, remove_record
from vfsd.wire import messages
from vfsd.wire.backend_spec import BackendSpec
from vfsd.wire.messages import wire_path
from vfsd.wire.sockets import remove_dead_socket

__all__ = ["unmount_command"]

_EXPORTS: Final = 5  # of a workspace that programs change meanwhile


class _UnsavedError(OSError):
    """Changes would be lost (ENOTEMPTY).  `facts` go into the error's JSON."""

    def __init__(self, reason: str, found: messages.UnsavedResult) -> None:
        super().__init__(errno.ENOTEMPTY, reason)
        facts: dict[str, Any] = to_builtins(found)
        self.facts = {"unsaved": {key: facts[key] for key in _FACTS}}


_FACTS: Final = ("files", "size_bytes", "changes", "truncated", "snapshots", "saved_at")


@dataclass(frozen=True, slots=True)
class _How:
    """The options of one `vfsd unmount`."""

    lazy: bool
    discard: bool
    export: str | None  # absolute
    force: bool
    may_ask: bool


@click.command(
    "unmount",
    cls=Command,
    examples="""
    vfsd unmount                           # the one that the current directory is in, or the only one
    vfsd unmount demo --export demo.zip    # save it first
    vfsd unmount demo --discard            # in a script: whatever it holds
    vfsd unmount --all --lazy
    """,
)
@click.argument("workspace_argument", metavar="[WORKSPACE]", required=False, shell_complete=complete_workspace)
@click.option("--export", "file", metavar="FILE.zip", type=click.Path(), help="Export it first; only then unmount.")
@click.option("-f", "--force", is_flag=True, help="With --export, replace a file that is there.")
@click.option("--discard", is_flag=True, help="Do not ask: changes that were not saved are lost.")
@click.option("--lazy", is_flag=True, help="Detach it also when programs have files open in it.")
@click.option("--all", "every", is_flag=True, help="Every workspace of this user.")
@click.pass_obj
def unmount_command(
    app: App, workspace_argument: str | None, file: str | None, *, force: bool, discard: bool, lazy: bool, every: bool
) -> None:
    """Unmount a workspace; asks before unsaved changes are lost.

    Changes of a memory workspace are lost unless they were exported, and those of an overlay unless they were applied
    or exported.  If there are any, a terminal is asked; without one the command fails, unless --discard or --export is
    given.  An export that succeeds is enough, also if it was made before: but snapshots are not in it.

    WORKSPACE is a name, or a path in it.  A workspace that programs are using is not unmounted; the error names
    them.  One whose daemon is dead is cleared away.
    """
    if every and (workspace_argument or app.workspace):
        raise click.UsageError("--all leaves no choice: give it or a workspace, not both")
    how = _how(app, file, force=force, discard=discard, lazy=lazy, every=every)
    app.workspace = workspace_argument or app.workspace
    records = read_records() if every else [app.record()]
    done, failed = [], None
    os.chdir("/")  # the workspaces are chosen; this process shall not be what keeps one busy
    for record in records:
        try:
            answer = _unmount(app, record, how)
        except OSError as error:
            if not every:
                raise
            failed = error
            output.report(f"{record.name}: {describe(error)}")
            continue
        done.append({"name": record.name, **to_builtins(answer)})
        if not app.json:
            _say_unmounted(record, answer, how)
    if app.json:
        output.print_json({"unmounted": done, **({"error": error_record(failed)} if failed else {})})
    if failed:
        click.get_current_context().exit(1)


def _how(app: App, file: str | None, *, force: bool, discard: bool, lazy: bool, every: bool) -> _How:
    """The options, checked.  UsageError."""
    if file is None:
        if force:
            raise click.UsageError("--force goes with --export: it replaces a file that is there")
    elif every:
        raise click.UsageError("--export writes one workspace: give its name instead of --all")
    elif discard:
        raise click.UsageError("--export saves the changes and --discard drops them: give one of both")
    else:
        refuse_other_archives(file)
        file = os.path.abspath(file)
    may_ask = not app.json and sys.stdin.isatty() and output.on_terminal(err=True)
    return _How(lazy, discard, file, force, may_ask)


def _unmount(app: App, record: WorkspaceRecord, how: _How) -> messages.UnmountResult:
    """Ask the daemon; where it is dead, take away what it left."""
    if how.export is not None:
        return _export_and_unmount(app, record, how, how.export)
    if not record.alive:
        return _clear_away(record)
    params = messages.UnmountParams(lazy=how.lazy, discard=how.discard)
    while True:
        try:
            return _call(app, record, params)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        found: messages.UnsavedResult = app.call(RemoteCall("unsaved"), record)
        if found.unsaved:
            if not how.may_ask:
                raise _UnsavedError(f"{_holds(record, found)}; {_advice(record)}", found)
            _ask(app, record, found)
        params.token = found.token


def _export_and_unmount(app: App, record: WorkspaceRecord, how: _How, file: str) -> messages.UnmountResult:
    """Export until the archive has the live state, then unmount."""
    path = wire_path(os.fsencode(file))
    place = os.path.realpath(record.mountpoint)
    if os.path.commonpath((os.path.realpath(file), place)) == place:
        reason = f"an archive inside {record.name} goes with it: give --export a file outside of {record.mountpoint}"
        raise OSError(errno.EINVAL, reason, file)
    request = Requests(record.mountpoint).export(file, overwrite=how.force)
    for _ in range(_EXPORTS):
        try:
            answer: messages.ExportResult = app.call(request, record, label="exporting")
        except FileExistsError:
            reason = f"there is a file already, which --force replaces; {record.name} is still mounted"
            raise FileExistsError(errno.EEXIST, reason, file) from None
        except OSError as error:
            raise _still_mounted(record, error, "not exported") from None
        if answer.skipped:
            lacks = f"{output.show_path(path)} lacks {counted(len(answer.skipped), 'path')} that no archive can hold"
            advice = f"{record.name} is still mounted: `vfsd export` names them, `vfsd unmount --discard` drops them"
            raise OSError(errno.ENAMETOOLONG, f"{lacks}; {advice}")
        if not app.json:
            output.note(f"exported {counted(answer.files, 'file')} to {output.show_path(path)}")
        try:
            return _call(app, record, messages.UnmountParams(lazy=how.lazy))
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise _still_mounted(record, error, f"exported to {output.show_path(path)}") from None
        request.params.overwrite = True  # the file is the previous export
    reason = f"{record.name} changed during each of {_EXPORTS} exports: end what writes to it; it is still mounted"
    raise OSError(errno.EAGAIN, f"{reason}, and {output.show_path(path)} has an older state of it")


def _still_mounted(record: WorkspaceRecord, error: OSError, what: str) -> OSError:
    return OSError(error.errno, f"{describe(error)}; {record.name} was {what}, and is still mounted")


def _call(app: App, record: WorkspaceRecord, params: messages.UnmountParams) -> messages.UnmountResult:
    with daemon_end(record.pid) as wait_ended:
        try:
            result: messages.UnmountResult = app.call(RemoteCall("unmount", params), record)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            advice = "end it or leave the directory, or detach the workspace all the same: `vfsd unmount --lazy`"
            raise OSError(errno.EBUSY, f"{describe(error)}; {advice}") from None
        if not result.holders:  # else it serves them until they are done
            wait_ended()
    return result


def _clear_away(record: WorkspaceRecord) -> messages.UnmountResult:
    """Remove what a dead daemon left."""
    if mount_at(record.mountpoint) is not None and is_dead(record.mountpoint):
        clear_dead_mount(record.mountpoint)
    remove_record(record)
    with contextlib.suppress(FileExistsError):  # a new daemon of that name was faster
        remove_dead_socket(record.socket)
    output.note(f"the daemon of {record.name} was dead: {record.content_after_crash}, its mount is cleared away")
    return messages.UnmountResult(wire_path(os.fsencode(record.mountpoint)), lazy=True, holders=[])


# -- the question -----------------------------------------------------------------------------------
def _ask(app: App, record: WorkspaceRecord, found: messages.UnsavedResult) -> None:
    """Return if they may be lost.  OSError (ECANCELED): no; KeyboardInterrupt."""
    before, app.interrupted = app.interrupted, f"interrupted: {record.name} is still mounted"
    try:
        may_lose = click.confirm(f"{_holds(record, found)}.  Unmount it, and lose them?", err=True)
    except click.Abort as abort:  # click's for Ctrl-C and for the end of the input
        click.echo(err=True)
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        may_lose = False
    if not may_lose:
        raise OSError(
            errno.ECANCELED, f"{record.name} is still mounted; `vfsd unmount --export FILE.zip` saves it first"
        )
    app.interrupted = before


def _holds(record: WorkspaceRecord, found: messages.UnsavedResult) -> str:
    """What would be lost, in a sentence without its end."""
    what = "that were not applied" if BackendSpec.split(record.backend).kind == "overlay" else "that were not exported"
    since = f" since {output.show_time(found.saved_at)}" if found.saved_at else ""
    parts = []
    if found.files is not None:
        parts.append(f"{counted(found.files, 'file')} ({output.human_size(found.size_bytes or 0)})")
    if found.changes is not None:
        parts.append(("at least " if found.truncated else "") + count_words(found.changes))
    if found.snapshots:
        parts.append(counted(found.snapshots, "snapshot"))
    return f"{record.name} holds changes{since} {what}: {', '.join(parts)}"


def _advice(record: WorkspaceRecord) -> str:
    applies = "`vfsd apply` writes them, " if BackendSpec.split(record.backend).kind == "overlay" else ""
    return f"{applies}`vfsd unmount --export FILE.zip` saves them, `vfsd unmount --discard` drops them"


def _say_unmounted(record: WorkspaceRecord, answer: messages.UnmountResult, how: _How) -> None:
    output.say(f"unmounted {record.name} from {output.show_path(answer.mountpoint)}")
    if answer.snapshots and how.export is not None:
        output.note(f"{counted(answer.snapshots, 'snapshot')} went with it: an archive has the live state only")
    if answer.changed_late and not how.discard:
        output.note("a program changed it while it was unmounted; that change is lost")
    if answer.holders:
        output.note(f"it is still in use by {', '.join(answer.holders)}")
