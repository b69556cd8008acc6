"""`vfsd unmount`: asks, exports or refuses if changes would be lost."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import Any, Final

import click
from msgspec import structs, to_builtins

from protocol.journal.directory import has_journal
from protocol.types import ChangeCounts
from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, describe
from vfsd.cli.common.output import counted
from vfsd.cli.common.values import complete_workspace, refuse_other_archives
from vfsd.client.arguments import running_workspace
from vfsd.client.connection import daemon_end
from vfsd.client.requests import RemoteCall, Requests
from vfsd.machine.directories import drop_command
from vfsd.machine.mountinfo import mount_at, unmounting_command
from vfsd.machine.mounts import clear_dead_mount, is_dead, is_held
from vfsd.machine.runtime import WorkspaceRecord, is_own_place, read_record, remove_place, remove_record
from vfsd.machine.text import count_words
from vfsd.operations.snapshots import ExportResult
from vfsd.operations.workspace import UnmountParams, UnmountResult, UnsavedResult
from vfsd.wire.messages import wire_path
from vfsd.wire.options import BackendSpec
from vfsd.wire.sockets import remove_dead_socket

_EXPORTS: Final = 5  # attempts, if programs change the workspace during the export
_SUCCESSOR_TIMEOUT_S: Final = 10.0
_SUCCESSOR_POLL_S: Final = 0.05
_DEATHS: Final = 5  # of daemons during one unmount that drops a journal


class _UnsavedError(OSError):
    """Changes would be lost (ENOTEMPTY).  The error's JSON contains `facts`."""

    def __init__(self, reason: str, found: UnsavedResult) -> None:
        super().__init__(errno.ENOTEMPTY, reason)
        facts: dict[str, Any] = to_builtins(found)
        self.facts = {"unsaved": {key: facts[key] for key in _FACTS}}


_FACTS: Final = ("files", "size_bytes", "changes", "truncated", "snapshots", "saved_at")


@click.command(
    "unmount",
    cls=Command,
    examples="""
    vfsd unmount ~/work
    vfsd unmount demo --export demo.zip    # save it first
    vfsd unmount demo --discard            # without a question
    vfsd unmount --all --lazy
    """,
)
@click.argument("workspace_argument", metavar="[WORKSPACE]", required=False, shell_complete=complete_workspace)
@click.option("--export", "file", metavar="FILE.zip", type=click.Path(), help="Export it first, then unmount it.")
@click.option("-f", "--force", is_flag=True, help="With --export: replace an existing file.")
@click.option("--discard", is_flag=True, help="Discard unsaved changes without asking.")
@click.option("--lazy", is_flag=True, help="Detach it even if programs have files open in it.")
@click.option("--all", "every", is_flag=True, help="Unmount every workspace of this user.")
@click.pass_obj
def unmount_command(
    app: App, workspace_argument: str | None, file: str | None, *, force: bool, discard: bool, lazy: bool, every: bool
) -> None:
    """Unmount a workspace; asks before unsaved changes are lost.

    An unmount discards changes of a memory workspace that were not exported, and changes of an overlay that were
    neither applied nor exported.  If there are any, the command asks on a terminal; without one it fails, unless
    --discard or --export is given.  An earlier export of the same state is sufficient; it does not contain snapshots.
    It also asks if the container of image:REF, which ends with it, has files that neither the newest snapshot has nor
    the newest one that you took.  Of an attached directory (`vfsd attach`) only the daemon ends.

    WORKSPACE is a name, or a path in the workspace.  A workspace that programs use is not unmounted; the error names
    them.  The mount of a dead daemon is removed.  A workspace with a journal (--persist, and those of `vfsd run`) loses
    nothing and does not ask: its journal stays on disk, and a mount with --persist continues it.  With --discard the
    journal is removed, too.  So is that of `vfsd run` if all changes were applied.
    """
    if file is not None:
        file = _checked(file, every=every, discard=discard)
    elif force:
        raise click.UsageError("--force goes with --export: it replaces an existing file")
    records = app.chosen(workspace_argument, every=every)
    os.chdir("/")  # the workspaces are selected; this process must not keep one of them busy

    def end(record: WorkspaceRecord) -> UnmountResult:
        if file is not None:
            return _export_and_unmount(app, record, file, overwrite=force, lazy=lazy)
        return _unmount(app, record, UnmountParams(lazy=lazy, discard=discard), drop=discard)

    def say(record: WorkspaceRecord, answer: UnmountResult) -> None:
        _say_unmounted(record, answer, exported=file is not None, discarded=discard)

    app.act_on_each(records, end, say, every=every, done="unmounted")


def _checked(file: str, *, every: bool, discard: bool) -> str:
    """Return the archive to write, absolute.  UsageError if an option excludes --export."""
    if every:
        raise click.UsageError("--export writes one workspace: give its name instead of --all")
    if discard:
        raise click.UsageError("--export saves the changes and --discard drops them: give only one")
    refuse_other_archives(file)
    return os.path.abspath(file)


def _unmount(app: App, record: WorkspaceRecord, params: UnmountParams, *, drop: bool) -> UnmountResult:
    """Unmount through the daemon; if it is dead, and nothing restarts it, remove what it left.

    `drop`: remove the journal, too.
    """
    record = _with_successor(record)
    if drop and record.journal is not None:
        return unmount_and_drop(app, record, params)
    if not record.alive:
        if record.is_kept:
            record.check_alive()  # raises: the mount waits for the next daemon
        return clear_away(record)
    if record.journal is not None and is_own_place(record.mountpoint):
        try:
            return unmount_and_drop(app, record, params)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # it has changes: the journal keeps them
                raise
    while True:
        try:
            return unmount_running(app, record, params)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        found: UnsavedResult = app.call(RemoteCall("unsaved"), record, label="comparing")
        if found.unsaved:
            _agree(app, record, found)
        params.token = found.token


def _with_successor(record: WorkspaceRecord) -> WorkspaceRecord:
    """Return the newest record.  Wait for the daemon that a keeper had begun to start before it was killed itself.

    That daemon goes on without the keeper: it holds the mount, so it would serve it after an unmount.  OSError (EBUSY)
    if it does not come up.
    """
    deadline = time.monotonic() + _SUCCESSOR_TIMEOUT_S
    while not (record.alive or record.is_kept) and _is_held_for(record):
        if time.monotonic() > deadline:
            detach = unmounting_command(record.mountpoint, lazy=True)
            what = f"the daemon of {record.name} is dead, but another process holds its mount"
            raise OSError(
                errno.EBUSY,
                f"{what}, and may be about to serve it: repeat the command, or detach the mount with `{detach}`",
            )
        time.sleep(_SUCCESSOR_POLL_S)
        newest = read_record(record.name)
        if newest is not None and newest.mountpoint == record.mountpoint:
            record = newest
    return record


def _is_held_for(record: WorkspaceRecord) -> bool:
    """Whether the mount of this workspace is there, and a process has its descriptor."""
    mount = mount_at(record.mountpoint)
    return mount is not None and mount.workspace == record.name and is_held(record.mountpoint)


def _export_and_unmount(app: App, record: WorkspaceRecord, file: str, *, overwrite: bool, lazy: bool) -> UnmountResult:
    """Export to `file` (absolute) until the archive contains the live state, then unmount."""
    path = wire_path(os.fsencode(file))
    place = os.path.realpath(record.mountpoint)
    if os.path.commonpath((os.path.realpath(file), place)) == place:
        reason = f"the unmount would delete an archive inside {record.name}: give a file outside {record.mountpoint}"
        raise OSError(errno.EINVAL, reason, file)
    request = Requests(record.mountpoint).export(file, overwrite=overwrite)
    for _ in range(_EXPORTS):
        try:
            answer: ExportResult = app.call(request, record, label="exporting")
        except FileExistsError:
            reason = f"the file exists; --force replaces it; {record.name} is still mounted"
            raise FileExistsError(errno.EEXIST, reason, file) from None
        except OSError as error:
            raise _still_mounted(record, error, "not exported") from None
        if answer.skipped or (answer.hidden and _is_image(record)):
            raise _incomplete(record, path, answer)
        if not app.json:
            output.note(f"exported {counted(answer.files, 'file')} to {output.show_path(path)}")
        try:
            # The daemon does not know which files of a container an archive has.
            unmounted = unmount_running(app, record, UnmountParams(lazy=lazy, discard=_is_image(record)))
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise _still_mounted(record, error, f"exported to {output.show_path(path)}") from None
            if answer.hidden:
                raise _incomplete(record, path, answer) from None
        else:
            if not app.json:
                output.note_hidden(answer.hidden)
            return unmounted
        request.params.overwrite = True  # the file is the previous export
    reason = f"{record.name} changed during each of {_EXPORTS} exports: stop its writers; it is still mounted"
    raise OSError(errno.EAGAIN, f"{reason}, and {output.show_path(path)} contains an older state")


def _incomplete(record: WorkspaceRecord, path: str, answer: ExportResult) -> OSError:
    """Return the error for an export without something that the unmount would drop."""
    mounted, drop = f"{record.name} is still mounted", f"`vfsd unmount {record.name} --discard` drops"
    if answer.skipped:
        lacks = f"{output.show_path(path)} lacks {counted(len(answer.skipped), 'path')} that a ZIP file cannot contain"
        advice = f"{mounted}: `vfsd export -w {record.name}` names them, {drop} them"
        return OSError(errno.ENAMETOOLONG, f"{lacks}; {advice}")
    lacks = f"{output.show_path(path)} lacks {counted(answer.hidden, 'name')} that the policy hides"
    return OSError(errno.EPERM, f"{lacks}; {mounted}: {drop} what it holds")


def _still_mounted(record: WorkspaceRecord, error: OSError, what: str) -> OSError:
    return OSError(error.errno, f"{describe(error)}; {record.name} was {what}, and is still mounted")


def unmount_running(app: App, record: WorkspaceRecord, params: UnmountParams) -> UnmountResult:
    """Unmount through the daemon, and wait for its end.  OSError: EBUSY, ENOTEMPTY for unsaved changes."""
    with daemon_end(record.pid) as wait_ended:
        try:
            result: UnmountResult = app.call(RemoteCall("unmount", params), record)
        except OSError as error:
            has_ended = isinstance(error, ConnectionError)
            if has_ended:
                wait_ended()
            is_gone = record.is_attached or mount_at(record.mountpoint) is None
            if (has_ended or error.errno == errno.EINVAL) and is_gone:
                # Another client has unmounted it.
                place = wire_path(os.fsencode(record.mountpoint))
                return UnmountResult(place, params.lazy, holders=[])
            if error.errno != errno.EBUSY:
                raise
            detach = f"vfsd unmount {record.name} --lazy"
            advice = f"end it or leave the directory, or detach the workspace with `{detach}`"
            raise OSError(errno.EBUSY, f"{describe(error)}; {advice}") from None
        if not result.holders:  # else the daemon serves them until they end
            wait_ended()
    remove_place(record.mountpoint)
    return result


def unmount_and_drop(app: App, record: WorkspaceRecord, params: UnmountParams) -> UnmountResult:
    """Unmount a workspace, and remove its journal, with `discard` also if its daemon dies meanwhile.

    Without `discard`, OSError (ENOTEMPTY) for unsaved changes.  Other errors as `unmount_running`.
    """
    params = structs.replace(params, drop_journal=True)
    for _ in range(_DEATHS):
        if not record.alive:
            if record.is_kept or not params.discard:
                record.check_alive()
            answer = clear_away(record, says=False)
            break
        try:
            answer = unmount_running(app, record, params)
            break
        except ConnectionError:
            record = running_workspace(record.name)  # waits for the daemon that a keeper starts
    else:
        record.check_alive()
        raise ConnectionAbortedError(errno.ECONNABORTED, f"the daemon of {record.name} died again and again: try again")
    if record.journal is not None and not answer.holders:
        if params.discard:
            _drop_rest(record.journal)
        elif has_journal(record.journal):  # of a daemon that died, maybe before it looked for unsaved changes
            return structs.replace(answer, journal=wire_path(os.fsencode(record.journal)))
    return answer


def _drop_rest(directory: str) -> None:
    """Remove what a daemon that died left of a journal that was dropped, as soon as no other daemon has it."""
    if not os.path.isdir(directory):
        return None
    # Start-up: only a daemon that died leaves a journal.
    from vfsd.daemon.snapshots.bases import drop_journal_and_base  # noqa: PLC0415

    deadline = time.monotonic() + _SUCCESSOR_TIMEOUT_S
    while True:
        try:
            return drop_journal_and_base(directory)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_SUCCESSOR_POLL_S)


def clear_away(record: WorkspaceRecord, *, says: bool = True) -> UnmountResult:
    """Remove the mount, the record and the socket of a dead daemon; `says` where its content is."""
    if mount_at(record.mountpoint) is not None and is_dead(record.mountpoint):
        clear_dead_mount(record.mountpoint)
    remove_place(record.mountpoint)
    remove_record(record)
    with contextlib.suppress(FileExistsError):  # a new daemon of that name has already started
        remove_dead_socket(record.socket)
    if says:
        removed = "" if record.is_attached else ", its mount was removed"
        output.note(f"the daemon of {record.name} was dead: {record.content_after_crash}{removed}")
    return UnmountResult(wire_path(os.fsencode(record.mountpoint)), lazy=True, holders=[])


# -- the question -----------------------------------------------------------------------------------
def _agree(app: App, record: WorkspaceRecord, found: UnsavedResult) -> None:
    """Ask whether to lose what the daemon has found.

    _UnsavedError without a terminal; OSError (ECANCELED) or KeyboardInterrupt if the user does not agree.
    """
    holds = _holds(record, found)
    if app.json or not output.can_ask():
        raise _UnsavedError(f"{holds}; {_advice(record, found)}", found)
    before, app.interrupted = app.interrupted, f"interrupted: {record.name} is still mounted"
    if not output.confirm(f"{holds}.  Unmount it and lose them?"):
        raise OSError(
            errno.ECANCELED,
            f"{record.name} is still mounted; `vfsd unmount {record.name} --export FILE.zip` saves it first",
        )
    app.interrupted = before


def _holds(record: WorkspaceRecord, found: UnsavedResult) -> str:
    """Describe what would be lost, without a full stop."""
    if _is_image(record):
        what = "and there is no snapshot of its files"
        if found.problem is not None:
            what = f"whose files cannot be compared with a snapshot now ({found.problem})"
        elif found.changes is not None:
            what = f"which differs from the snapshot {found.since}: {_counted(found)}"
        return f"an unmount removes the container of {record.name}, {what}"
    if _only_snapshots(found):
        return f"{record.name} holds {counted(found.snapshots, 'snapshot')}, but no changes that were not applied"
    what = "that were not applied" if _applies(record) else "that were not exported"
    since = f" since {output.show_time(found.saved_at)}" if found.saved_at else ""
    parts = []
    if found.files is not None:
        parts.append(f"{counted(found.files, 'file')} ({output.human_size(found.size_bytes or 0)})")
    if found.changes is not None:
        parts.append(_counted(found))
    if found.snapshots:
        parts.append(counted(found.snapshots, "snapshot"))
    return f"{record.name} holds changes{since} {what}: {', '.join(parts)}"


def _counted(found: UnsavedResult) -> str:
    return ("at least " if found.truncated else "") + count_words(found.changes or ChangeCounts())


def _is_image(record: WorkspaceRecord) -> bool:
    """Whether the content is in a container that ends with the workspace."""
    return BackendSpec.split(record.backend).kind == "image"


def _only_snapshots(found: UnsavedResult) -> bool:
    """Whether an overlay has snapshots, but is as the directory below it."""
    return bool(found.snapshots) and found.changes == ChangeCounts()


def _applies(record: WorkspaceRecord) -> bool:
    """Whether the changes can be applied to a directory below."""
    return BackendSpec.split(record.backend).lower_layer == "directory"


def _source_runs(record: WorkspaceRecord) -> bool:
    """Whether this is a fork of a workspace that runs, so that its changes can be merged."""
    source = None if record.forked_from is None else read_record(record.forked_from)
    return source is not None and source.alive


def _advice(record: WorkspaceRecord, found: UnsavedResult) -> str:
    unmount = f"vfsd unmount {record.name}"
    if _is_image(record):
        removes = f"`{unmount} --discard` removes it with its files"
        saves = f"`vfsd snapshot -w {record.name}` keeps them, `{unmount} --export FILE.zip` saves them, "
        return removes if found.problem is not None else saves + removes
    if _only_snapshots(found):
        save = f"`vfsd export -w {record.name} --snapshot NAME FILE.zip` saves one"
        return f"{save}, `{unmount} --discard` drops them"
    if _source_runs(record):
        keeps = f"`vfsd merge {record.name} -w {record.forked_from}` takes them over, "
    else:
        keeps = f"`vfsd apply -w {record.name}` writes them, " if _applies(record) else ""
    return f"{keeps}`{unmount} --export FILE.zip` saves them, `{unmount} --discard` drops them"


def _say_unmounted(record: WorkspaceRecord, answer: UnmountResult, *, exported: bool, discarded: bool) -> None:
    done, rest = ("detached", ", which stays as it is") if record.is_attached else ("unmounted", "")
    output.say(f"{done} {record.name} from {output.show_path(answer.mountpoint)}{rest}")
    if answer.snapshots and exported:
        output.note(
            f"{counted(answer.snapshots, 'snapshot')} of it were discarded: an archive contains only the live state"
        )
    if answer.changed_late and not discarded:
        output.note("a program changed it during the unmount; that change is lost")
    if answer.journal is not None:
        mount = record.continuing(answer.journal)
        drop = drop_command(record.name, answer.journal)
        output.note(f"its content, snapshots and undo history are kept: `{mount}` continues it, `{drop}` removes it")
    if answer.left is not None:
        output.note(answer.left)
    if answer.holders:
        output.note(f"it is still in use by {', '.join(answer.holders)}")
