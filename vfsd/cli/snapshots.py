"""`vfsd snapshot`, `snapshots`, `drop` and `restore`."""

from __future__ import annotations

import errno
import functools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, did_you_mean
from vfsd.cli.common.changes import show_changes, show_expired, show_outcome, show_problems
from vfsd.cli.common.names import complete_of, complete_restore, complete_snapshot
from vfsd.cli.common.output import counted
from vfsd.cli.common.streamed import ChangeSpool, call_with_changes
from vfsd.cli.common.values import in_home, touch_option
from vfsd.cli.common.wording import count_words, nothing_to_restore, signed_counts, step_lines, step_words
from vfsd.operations.snapshots import (
    DropResult,
    FromOther,
    FromSnapshot,
    RestoreParams,
    RestoreResult,
    SnapshotRecord,
    SnapshotsResult,
    Undo,
)
from vfsd.wire.messages import from_wire_path, is_unknown_snapshot, wire_path
from vfsd.wire.options import BackendSpec


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
@click.option("--tag", metavar="TEXT", help="Keep this remark with it; `vfsd snapshots` shows it.")
@click.pass_obj
def snapshot_command(app: App, name: str | None, tag: str | None) -> None:
    """Take a snapshot of the workspace as it is now.

    A snapshot of a memory or overlay workspace takes constant time and almost no memory.  A snapshot of a host
    directory or a container is written to disk, survives the daemon, and reads only files that changed.  It fails if
    the name is in use.
    """
    record = app.call(app.requests.snapshot(name, tag=tag), label="taking a snapshot")
    app.emit(record, functools.partial(_say_snapshot, "changed file" if _is_overlay(app) else "file"))
    if not app.json:
        show_expired(record.expired, output.note)
    for paths, what in (
        (record.unreadable, "could not be read, and is not in the snapshot"),
        (record.unstable, "changed while it was read; the snapshot may mix old and new data"),
    ):
        if paths and not app.json:
            more = f", and {len(paths) - 1:,} more" if len(paths) > 1 else ""
            output.note(f"{paths[0]}{more}: {what}")


def _is_overlay(app: App) -> bool:
    """Whether a snapshot counts only what differs from the directory below."""
    return BackendSpec.split(app.record().backend).kind == "overlay"


def _say_snapshot(what: str, record: SnapshotRecord) -> None:
    """Print the snapshot; in a pipe only its name, for `name=$(vfsd snapshot)`."""
    if not output.on_terminal():
        output.say(record.name)
        return
    size = output.human_size(record.size_bytes)
    output.say(f"snapshot {click.style(record.name, bold=True)}: {counted(record.files, what)}, {size}")


_COLUMNS = output.columns("NAME TIME:time FILES:count SIZE:size CHANGED KIND TAG STEP")


@click.command(
    "snapshots",
    cls=Command,
    examples="""
    vfsd snapshots
    vfsd snapshots | cut -f1               # only the names
    vfsd snapshots --json
    """,
)
@click.option("--no-changes", is_flag=True, help="Do not count the changes between them; faster for thousands.")
@click.pass_obj
def snapshots_command(app: App, no_changes: bool) -> None:
    """List the snapshots, oldest first.

    In a pipe the columns are separated by tabs: name, time, files, bytes, changes since the previous snapshot
    (+added ~modified -removed), kind ("safety": taken by vfsd before a restore or import; "automatic": taken after a
    command, by the hooks of an agent, or as the base of a fork), tag, step.  Files and bytes of an overlay are those
    that differ from the directory below it.

    The step says how `vfsd restore --undo` and `--redo` reach a safety snapshot: two undos go back to "undo 2", and the
    last undo or redo went to "here".  50 steps are kept.  A safety snapshot without a step can be restored by its name
    until there are 20 newer ones or it is 30 days old.
    """
    app.emit(app.call(app.requests.snapshots(changes=not no_changes)), _show_snapshots)


def _show_snapshots(answer: SnapshotsResult) -> None:
    rows = [
        (s.name, s.created_at, s.files, s.size_bytes, signed_counts(s.changes), s.kind, s.tag, step_words(s.step))
        for s in answer.snapshots
    ]
    output.table(_COLUMNS, rows, empty="no snapshots yet; `vfsd snapshot` takes one")


@click.command(
    "drop",
    cls=Command,
    examples="""
    vfsd drop before-refactor
    vfsd drop turn-1 turn-2
    """,
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_snapshot)
@click.option("-f", "--force", is_flag=True, help="Drop also snapshots that running workspaces need to be merged.")
@click.pass_obj
def drop_command(app: App, names: tuple[str, ...], *, force: bool) -> None:
    """Delete snapshots.

    The live state and the other snapshots do not change.  Either all of the named snapshots are dropped or, if one
    does not exist, none.  Dropping a safety snapshot that `vfsd restore --undo` or `--redo` would go to removes that
    step; the command names it.  `vfsd store gc` frees the disk space of dropped snapshots, and so does a mounted
    workspace after every 16 drops.

    A snapshot that a running fork was made from is the base of merges with that fork, so it is not dropped.  --force
    drops it; then only `vfsd adopt --force` takes over what the fork has.
    """
    try:
        answer = app.call(app.requests.drop(*names, force=force))
    except FileNotFoundError as error:
        raise _none_was_dropped(error, names) from None
    app.emit(answer, _show_dropped)


def _none_was_dropped(error: FileNotFoundError, names: Sequence[str]) -> OSError:
    """Return `error`; if several snapshots were named, with the remark that none was dropped."""
    from vfsd.wire.messages import ControlError, control_error  # noqa: PLC0415 start-up: an error has time

    if len(set(names)) == 1 or not isinstance(error, ControlError):
        return error
    message = f"{str(error).removesuffix('?')}; nothing was dropped"
    return control_error(error.code, message, error.errno, error.filename)


def _show_dropped(answer: DropResult) -> None:
    if output.on_terminal():
        for name in answer.dropped:
            output.say(f"dropped {name}")
    for each in answer.steps:
        way, left = ("undo", answer.undo_steps) if each.step < 0 else ("redo", answer.redo_steps)
        output.note(
            f"`vfsd restore --{way}` would have gone to {each.name} in {counted(abs(each.step), 'step')}; "
            f"{counted(left, f'{way} step')} left"
        )


@click.command(
    "restore",
    cls=Command,
    examples="""
    vfsd restore before-refactor           # everything
    vfsd restore before-refactor src a.txt # only these paths
    vfsd restore before-refactor --dry-run # show what it would change
    vfsd restore backup.zip                # from an archive
    vfsd restore before --of host:~/project  # another directory's snapshot, into this workspace
    vfsd restore --undo                    # undo the last step; again: the one before it
    vfsd restore --redo                    # redo it
    """,
)
@click.argument("arguments", metavar="NAME|ARCHIVE.zip [PATH]...", nargs=-1, shell_complete=complete_restore)
@click.option("-n", "--dry-run", is_flag=True, help="Show the changes without making them.")
@click.option(
    "--undo",
    is_flag=True,
    help="Undo the last restore, import, merge, adoption, apply or discard.  With PATHs, only below these.",
)
@click.option("--redo", is_flag=True, help="Redo the last step that was undone.")
@click.option(
    "--of",
    metavar="host:DIR",
    shell_complete=complete_of,
    help="Restore a snapshot of that directory into this workspace.",
)
@click.option("--store", metavar="DIRECTORY", type=click.Path(), help="With --of: the store with that snapshot.")
@touch_option
@click.pass_obj
def restore_command(
    app: App,
    arguments: tuple[str, ...],
    dry_run: bool,
    undo: bool,
    redo: bool,
    of: str | None,
    store: str | None,
    touch: bool,
) -> None:
    """Restore the workspace, or some paths, from a snapshot or archive.

    Files created since the snapshot are removed, files that do not differ are not touched, and programs with open
    files continue.  The state before the restore is kept as a safety snapshot, which `vfsd restore --undo` restores.
    A restore that changes nothing keeps none.

    --undo goes back one step each time, and --redo goes forward again, up to 50 steps.  A step is a restore, import,
    merge, adoption, apply or discard.  Both keep the state that they leave: changes made after a restore disappear with
    its --undo and return with the --redo.  After a new step nothing can be redone; the states are still listed in
    `vfsd snapshots` and can be restored by name.

    The first argument is an archive if it is a file and contains "/" or ends in .zip; else it is a snapshot.

    PATHs are relative to the current directory if that is in the workspace, else to the workspace's root; or absolute.
    Put `--` before a path that begins with "-".

    --dry-run prints a letter and a path for each change: A added, M modified, D removed, T another type, m metadata
    only.

    Files get the times that the snapshot has, so objects that were built from them and come back, too, are newer than
    they.  A build may not notice a file that is now older than the object of another version: the command counts such
    files, and --touch gives all files whose content it changes the present time.
    """
    _check_source(arguments, undo=undo, redo=redo, of=of, store=store)
    app.paths = arguments if undo else arguments[1:]
    requests = app.requests
    if undo:
        request = requests.undo(arguments, dry_run=dry_run, touch=touch)
    elif redo:
        request = requests.redo(dry_run=dry_run, touch=touch)
    else:
        name, *paths = arguments
        source = Path(name) if of is None and _is_archive(name) else name
        request = requests.restore(source, paths, of=of and in_home(of), store=store, dry_run=dry_run, touch=touch)
    try:
        if dry_run:
            answer = call_with_changes(app, request, "comparing", _show_dry_run)
            show_problems(answer.problems, "cannot be restored")
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
    """Raise UsageError unless the arguments and options name exactly one source."""
    if not (undo or redo or arguments):
        raise click.UsageError("name a snapshot or an archive, or give --undo or --redo")
    if redo and (undo or arguments):
        raise click.UsageError("--redo stands alone" if undo else "--redo takes no NAME and no PATHs")
    if of is None and store is not None:
        raise click.UsageError("--store goes with --of")
    if of is not None and (undo or redo):
        raise click.UsageError("--of takes the name of a snapshot")


def _explained(
    error: FileNotFoundError, params: RestoreParams, arguments: Sequence[str], store: str | None
) -> FileNotFoundError:
    """Return `error` of a restore, with advice if the `arguments` show what was intended."""
    source = params.source
    if isinstance(source, Undo) and arguments:
        return _undo_takes_paths(error, arguments)
    if not isinstance(source, FromSnapshot | FromOther) or not is_unknown_snapshot(error):
        return error
    name = source.name
    if isinstance(source, FromOther):
        return _not_of(error, name, source.of, store)
    stored = _stored_elsewhere(name)
    if stored is not None:
        return FileNotFoundError(errno.ENOENT, f"no such snapshot of this workspace: {name}, but {stored}")
    if error.filename == name and _may_be_archive(name):
        return FileNotFoundError(errno.ENOENT, "neither a snapshot nor an archive", name)
    return error


def _undo_takes_paths(error: FileNotFoundError, arguments: Sequence[str]) -> FileNotFoundError:
    """Return `error`; if it is about an argument, with the advice that --undo takes paths."""
    if error.filename is None:
        return error
    advice = f"no such path (--undo takes paths; to restore a snapshot: vfsd restore {shlex.join(arguments)})"
    return FileNotFoundError(errno.ENOENT, advice, error.filename)


def _stored_elsewhere(name: str) -> str | None:
    """Say that the default store has a snapshot of this name of another workspace, and how to restore it."""
    from protocol.store import Store, default_directory  # noqa: PLC0415 start-up: an error has time

    try:
        with Store(default_directory()) as store:
            keys = [wire_path(os.fsencode(key)) for key in store.workspaces_with(name)]
    except OSError:
        return None
    if not keys:
        return None
    more = f" (and of {len(keys) - 1} more)" if len(keys) > 1 else ""
    return f"the store has one of {keys[0]}{more}: `vfsd restore {shlex.join([name, '--of', keys[0]])}`"


_FORM_OF: Final = "; --of takes host:DIR, or another name that `vfsd store list` prints"


def _not_of(error: FileNotFoundError, name: str, key: str, directory: str | None) -> FileNotFoundError:
    """Return the error of `--of`: whether the store has any snapshots of that workspace, and similar names."""
    from protocol.store import Store, default_directory  # noqa: PLC0415 start-up: an error has time

    try:
        with Store(directory or default_directory()) as store:
            key_there = os.fsdecode(from_wire_path(key))
            names = [info.name for info in store.snapshots(key_there)]
            near = did_you_mean(name, names) if names else did_you_mean(key_there, store.workspaces()) or _FORM_OF
            place = store.directory
    except OSError:
        return error
    if not names:
        return FileNotFoundError(errno.ENOENT, f"the store at {place} has no snapshots of {key}{near}")
    return FileNotFoundError(errno.ENOENT, f"no such snapshot of {key}: {name}{near}")


def _may_be_archive(argument: str) -> bool:
    return "/" in argument or argument.endswith(".zip")


def _is_archive(argument: str) -> bool:
    """Return whether `argument` is an archive.  Other existing files may have the name of a snapshot, which wins."""
    return _may_be_archive(argument) and os.path.isfile(argument)


def _show_dry_run(answer: RestoreResult, changes: ChangeSpool) -> None:
    show_changes(changes)
    if output.on_terminal(err=True):
        output.note(f"would restore {answer.source}: {count_words(answer.counts)}")


def _show_restore(answer: RestoreResult) -> None:
    source = output.show_path(answer.source)
    if answer.safety_snapshot is None and not answer.problems:
        output.say(nothing_to_restore(source))
        show_expired(answer.expired)
    else:
        show_outcome(f"restored {source}", answer)


def _show_step(verb: str, answer: RestoreResult) -> None:
    """Print what an undo or a redo did, and whether more steps can be undone or redone."""
    for line in step_lines(verb, output.show_path(answer.step or ""), answer):
        output.say(line)
    show_expired(answer.expired)
