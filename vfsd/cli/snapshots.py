"""`vfsd snapshot`, `snapshots`, `drop` and `restore`."""

from __future__ import annotations

import errno
import functools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, did_you_mean
from vfsd.cli.common.changes import count_words, show_changes, show_expired, show_problems, show_safety
from vfsd.cli.common.names import complete_restore, complete_snapshot
from vfsd.cli.common.output import counted
from vfsd.cli.common.streamed import ChangeSpool, call_with_changes
from vfsd.cli.common.values import in_home
from vfsd.wire import messages
from vfsd.wire.messages import from_wire_path

__all__ = ["drop_command", "restore_command", "snapshot_command", "snapshots_command"]


@click.command(
    "snapshot",
    cls=Command,
    examples="""
    vfsd snapshot                          # names itself: snap-1, snap-2, ...
    vfsd snapshot before-refactor
    vfsd snapshot turn-7 --tag "user asked for tests"
    """,
)
@click.argument("name", required=False)
@click.option("--tag", metavar="TEXT", help="A remark to keep with it; `vfsd snapshots` shows it.")
@click.pass_obj
def snapshot_command(app: App, name: str | None, tag: str | None) -> None:
    """Take a snapshot of the workspace as it is now.

    It takes the same moment, and next to no memory, whatever a workspace in memory holds.  Of a host directory it is
    kept on disk, outlives the daemon, and reads only files that changed.  A name in use is refused.
    """
    record = app.call(app.requests.snapshot(name, tag=tag), label="taking a snapshot")
    app.emit(record, _say_snapshot)
    if not app.json:
        show_expired(record.expired, output.note)
    for paths, what in ((record.unreadable, "could not be read, and is not in it"), (record.unstable, _UNSTABLE)):
        if paths and not app.json:
            more = f", and {len(paths) - 1:,} more" if len(paths) > 1 else ""
            output.note(f"{paths[0]}{more}: {what}")


_UNSTABLE = "was being changed, and may be in it as it never was"


def _say_snapshot(record: messages.SnapshotRecord) -> None:
    """The name alone in a pipe, so that `name=$(vfsd snapshot)` is it."""
    if not output.on_terminal():
        output.say(record.name)
        return
    size = output.human_size(record.size_bytes)
    output.say(f"snapshot {click.style(record.name, bold=True)}: {counted(record.files, 'file')}, {size}")


_COLUMNS = (
    output.Column("NAME"),
    output.Column("TIME", "time"),
    output.Column("FILES", "count"),
    output.Column("SIZE", "size"),
    output.Column("CHANGED"),
    output.Column("KIND"),
    output.Column("TAG"),
    output.Column("STEP"),
)


@click.command(
    "snapshots",
    cls=Command,
    examples="""
    vfsd snapshots
    vfsd snapshots | cut -f1               # the names alone
    vfsd snapshots --json
    """,
)
@click.option("--no-changes", is_flag=True, help="Do not count what changed between them; faster for thousands.")
@click.pass_obj
def snapshots_command(app: App, no_changes: bool) -> None:
    """List the snapshots, oldest first.

    Columns in a pipe, separated by tabs: name, time, files, bytes, what changed since the one before
    (+added ~modified -removed), kind ("safety" snapshots were taken by vfsd before a restore or import), tag, step.

    The step says how `vfsd restore --undo` and `--redo` get to a safety snapshot: "undo 2" is the state that two undos
    go back to, "here" the one that the last of them went to.  50 steps are kept.  A safety snapshot without a step is
    kept too, to be restored by its name, until there are 20 newer ones of its kind or it is 30 days old.
    """
    app.emit(app.call(app.requests.snapshots(changes=not no_changes)), _show_snapshots)


def _show_snapshots(answer: messages.SnapshotsResult) -> None:
    rows = [
        (s.name, s.created_at, s.files, s.size_bytes, _signed(s.changes), s.kind, s.tag, _step(s.step))
        for s in answer.snapshots
    ]
    output.table(_COLUMNS, rows, empty="no snapshots yet; `vfsd snapshot` takes one")


def _step(step: int | None) -> str | None:
    if step is None:
        return None
    return f"{'undo' if step < 0 else 'redo'} {abs(step)}" if step else "here"


def _signed(counts: messages.ChangeCounts | None) -> str | None:
    return None if counts is None else f"+{counts.added} ~{counts.modified} -{counts.removed}"


@click.command(
    "drop",
    cls=Command,
    examples="""
    vfsd drop before-refactor
    vfsd drop turn-1 turn-2
    """,
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_snapshot)
@click.pass_obj
def drop_command(app: App, names: tuple[str, ...]) -> None:
    """Delete a snapshot.

    The live state and the other snapshots stay as they are.  Either all of the named snapshots are dropped or, where
    one does not exist, none.  A safety snapshot that `vfsd restore --undo` or `--redo` leads to is a step less, which
    the answer names.  What only a dropped snapshot had of a host directory is freed after some more drops, or at once
    by `vfsd store gc`.
    """
    try:
        answer = app.call(app.requests.drop(*names))
    except FileNotFoundError as error:
        raise _none_was_dropped(error, names) from None
    app.emit(answer, _show_dropped)


def _none_was_dropped(error: FileNotFoundError, names: Sequence[str]) -> OSError:
    """`error`, of a drop of several snapshots with the remark that none of them was dropped."""
    from vfsd.client.connection import ControlError, control_error  # noqa: PLC0415 start-up: an error has time

    if len(set(names)) == 1 or not isinstance(error, ControlError):
        return error
    message = f"{str(error).removesuffix('?')}; nothing was dropped"
    return control_error(error.code, message, error.errno, error.filename)


def _show_dropped(answer: messages.DropResult) -> None:
    if output.on_terminal():
        for name in answer.dropped:
            output.say(f"dropped {name}")
    for each in answer.steps:
        way, left = ("undo", answer.undo_steps) if each.step < 0 else ("redo", answer.redo_steps)
        output.note(
            f"{each.name} was the state that `vfsd restore --{way}` went to in {counted(abs(each.step), 'step')}; "
            f"{counted(left, f'{way} step')} left"
        )


@click.command(
    "restore",
    cls=Command,
    examples="""
    vfsd restore before-refactor           # everything
    vfsd restore before-refactor src a.txt # these paths only
    vfsd restore before-refactor --dry-run # say what it would change
    vfsd restore backup.zip                # from an archive
    vfsd restore before --of host:~/project  # another directory's snapshot, into this workspace
    vfsd restore --undo                    # back to before the last restore; again: before the one before
    vfsd restore --redo                    # forward again
    """,
)
@click.argument("arguments", metavar="NAME|ARCHIVE.zip [PATH]...", nargs=-1, shell_complete=complete_restore)
@click.option("-n", "--dry-run", is_flag=True, help="Print what would change, and change nothing.")
@click.option(
    "--undo", is_flag=True, help="Go one restore, import, apply or discard back.  With PATHs, restore only those."
)
@click.option("--redo", is_flag=True, help="Go forward again, one step that was undone.")
@click.option("--of", metavar="host:DIR", help="The snapshot is that directory's, whatever this workspace is.")
@click.option("--store", metavar="DIRECTORY", type=click.Path(), help="With --of: where that snapshot is kept.")
@click.pass_obj
def restore_command(
    app: App, arguments: tuple[str, ...], dry_run: bool, undo: bool, redo: bool, of: str | None, store: str | None
) -> None:
    """Put the workspace, or some paths, back to a snapshot or archive.

    Files made since are gone, files that are the same are not touched, programs that have files open go on.
    The state before is kept as a safety snapshot: `vfsd restore --undo` brings it back.  A restore that would change
    nothing keeps none.

    --undo goes one step back each time (a step is a restore, import, apply or discard), --redo forward again, up to 50
    steps.  Both keep the state that they leave: what was written after a restore is gone after its --undo, and back
    after the --redo.  A new restore, import, apply or discard ends what --redo could do; the states stay listed in
    `vfsd snapshots` and can be restored by name.

    The first argument is an archive if it contains "/" or ends in .zip, and is a file; else a snapshot.

    PATHs are relative to the current directory when that is in the workspace, else to the
    workspace's root; or absolute.  Put `--` before one that begins with "-".

    --dry-run prints a letter and a path for each change: A it would add, M modify, D remove, T replace
    by another type, m metadata only.
    """
    _check_source(arguments, undo=undo, redo=redo, of=of, store=store)
    requests = app.requests
    if undo:
        request = requests.undo(arguments, dry_run=dry_run)
    elif redo:
        request = requests.redo(dry_run=dry_run)
    else:
        name, *paths = arguments
        source = Path(name) if of is None and _is_archive(name) else name
        request = requests.restore(source, paths, of=of and in_home(of), store=store, dry_run=dry_run)
    try:
        if dry_run:
            call_with_changes(app, request, "comparing", _show_dry_run)
            return
        answer = app.call(request, label="restoring")
    except FileNotFoundError as error:
        raise _explained(error, request.params, arguments, store) from None
    if answer.step is not None:
        app.emit(answer, functools.partial(_show_step, "undid" if undo else "redid"))
    else:
        app.emit(answer, _show_restore)
    show_problems(answer.problems)


def _check_source(arguments: Sequence[str], *, undo: bool, redo: bool, of: str | None, store: str | None) -> None:
    """UsageError for options that say nothing, or too much, of what to restore."""
    if not (undo or redo or arguments):
        raise click.UsageError("name a snapshot or an archive, or say --undo or --redo")
    if redo and (undo or arguments):
        raise click.UsageError("--redo stands alone" if undo else "--redo takes no NAME and no PATHs")
    if of is None and store is not None:
        raise click.UsageError("--store goes with --of")
    if of is not None and (undo or redo):
        raise click.UsageError("--of takes the name of a snapshot")


def _explained(
    error: FileNotFoundError, params: messages.RestoreParams, arguments: Sequence[str], store: str | None
) -> FileNotFoundError:
    """`error` of a restore; with what to do next, where `arguments` show what was meant."""
    if params.undo and arguments:
        return _undo_takes_paths(error, arguments)
    name = params.name
    if name is None or "no such snapshot" not in str(error):
        return error
    if params.of is not None:
        return _not_of(error, name, params.of, store)
    if error.filename == name and _may_be_archive(name):
        return FileNotFoundError(errno.ENOENT, "neither a snapshot nor an archive", name)
    return error


def _undo_takes_paths(error: FileNotFoundError, arguments: Sequence[str]) -> FileNotFoundError:
    """`error`; where it is about an argument, with what --undo takes."""
    if error.filename is None:
        return error
    advice = f"no such path (--undo takes paths; to restore a snapshot: vfsd restore {shlex.join(arguments)})"
    return FileNotFoundError(errno.ENOENT, advice, error.filename)


def _not_of(error: FileNotFoundError, name: str, key: str, directory: str | None) -> FileNotFoundError:
    """`error` of `--of`; says whether the store has any snapshots of that workspace, and the names that are close."""
    from protocol.store import Store, default_directory  # noqa: PLC0415 start-up: an error has time

    try:
        with Store(directory or default_directory()) as store:
            key_there = os.fsdecode(from_wire_path(key))
            names = [info.name for info in store.snapshots(key_there)]
            near = did_you_mean(name, names) if names else did_you_mean(key_there, store.workspaces())
            place = store.directory
    except OSError:
        return error
    if not names:
        return FileNotFoundError(errno.ENOENT, f"the store at {place} has no snapshots of {key}{near}")
    return FileNotFoundError(errno.ENOENT, f"no such snapshot of {key}: {name}{near}")


def _may_be_archive(argument: str) -> bool:
    return "/" in argument or argument.endswith(".zip")


def _is_archive(argument: str) -> bool:
    """Only a name that cannot well be a snapshot's, and only if the file is there: a snapshot of that name wins."""
    return _may_be_archive(argument) and os.path.isfile(argument)


def _show_dry_run(answer: messages.RestoreResult, changes: ChangeSpool) -> None:
    show_changes(changes)
    if output.on_terminal(err=True):
        output.note(f"would restore {answer.source}: {count_words(answer.counts)}")


def _show_restore(answer: messages.RestoreResult) -> None:
    source = output.show_path(answer.source)
    if answer.safety_snapshot is None and not answer.problems:
        output.say(f"nothing to restore: everything is as in {source}")
        show_expired(answer.expired)
        return
    output.say(f"restored {source}: {count_words(answer.counts)}")
    show_safety(answer.safety_snapshot, answer.expired)


def _show_step(verb: str, answer: messages.RestoreResult) -> None:
    """What an undo or a redo did, and which way one can go on."""
    output.say(f"{verb} {output.show_path(answer.step or '')}: {count_words(answer.counts)}")
    if answer.step == "apply":
        output.say("what was applied stays in the directory below")
    ways = [
        f"`vfsd restore --{way}` goes {direction}" + (f" ({steps:,} steps)" if steps > 1 else "")
        for way, steps, direction in (("undo", answer.undo_steps, "back"), ("redo", answer.redo_steps, "forward"))
        if steps
    ]
    output.say("; ".join(filter(None, (f"the state left is {answer.safety_snapshot}", ", ".join(ways)))))
    show_expired(answer.expired)
