"""`vfsd snapshot`, `snapshots`, `drop`, `restore` and `diff`."""

from __future__ import annotations

import errno
import functools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from protocol.types import ChangeCounts
from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, did_you_mean
from vfsd.cli.common.changes import (
    ChangeSpool,
    PatchColours,
    PatientOutput,
    call_with_changes,
    note_problems,
    paged,
    plain_change,
    show_changes,
    show_dry_run,
    show_expired,
    show_outcome,
    show_problems,
    show_stat,
    write_changes,
)
from vfsd.cli.common.output import counted
from vfsd.cli.common.values import (
    LISTED,
    complete_of,
    complete_path,
    complete_restore,
    complete_snapshot,
    complete_workspace,
    exclude_option,
    in_home,
    include_option,
    touch_option,
)
from vfsd.client.requests import RemoteCall
from vfsd.machine.text import nothing_to_restore, signed_counts, step_lines, step_words
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.snapshots import (
    DiffResult,
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

    Files created since the snapshot are removed, files that do not differ are not touched, and programs with open files
    continue. The state before the restore is kept as a safety snapshot, which `vfsd restore --undo` restores. A restore
    that changes nothing takes no safety snapshot.

    --undo goes back one step each time, and --redo goes forward again, up to 50 steps.  A step is a restore, import,
    merge, adoption, apply or discard.  Both keep the state that they leave: changes made after a restore disappear with
    its --undo and return with the --redo.  After a new step nothing can be redone; the states are still listed in
    `vfsd snapshots` and can be restored by name.

    The first argument is an archive if it is a file and contains "/" or ends in .zip; else it is a snapshot.

    PATHs are relative to the current directory if that is in the workspace, else to the workspace's root; or absolute.
    Put `--` before a path that begins with "-".

    --dry-run prints a letter and a path for each change: A added, M modified, D removed, T another type, m metadata
    only.

    Files get the times that they have in the snapshot, so build outputs that are restored with their sources stay newer
    than these. A build may not notice a restored source that is older than the output of another version: the command
    counts such files, and --touch gives all files whose content it changes the present time.
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
            show_dry_run(app, request, lambda answer: f"restore {answer.source}")
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


def _show_restore(answer: RestoreResult) -> None:
    source = output.show_path(answer.source)
    show_outcome(f"restored {source}", answer, nothing_to_restore(source))


def _show_step(verb: str, answer: RestoreResult) -> None:
    """Print what an undo or a redo did, and whether more steps can be undone or redone."""
    for line in step_lines(verb, output.show_path(answer.step or ""), answer):
        output.say(line)
    show_expired(answer.expired)


# -- vfsd diff --------------------------------------------------------------------------------------
_NAMED: Final = 20  # paths missing from a patch that standard error names


_AFTER_DASHES: Final = f"{__name__}.after_dashes"  # whether `--` was among the arguments


def _complete_state(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer snapshots, or paths after `--`."""
    return (complete_path if ctx.meta[_AFTER_DASHES] else complete_snapshot)(ctx, param, incomplete)


class _DiffCommand(Command):
    """Takes the words after `--` as paths.  click itself drops the `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        paths: list[str] = []
        after_dashes = "--" in args
        if after_dashes:
            mark = args.index("--")
            args, paths = args[:mark], args[mark + 1 :]
        ctx.obj = ctx.ensure_object(App)
        rest = super().parse_args(ctx, args)
        ctx.params["paths"] = tuple(paths)
        ctx.meta[_AFTER_DASHES] = after_dashes
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if ctx.meta[_AFTER_DASHES]:
            return complete_path(ctx, self.params[0], incomplete)
        return super().shell_complete(ctx, incomplete)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PATH...]"]


@click.command(
    "diff",
    cls=_DiffCommand,
    examples="""
    vfsd diff                              # since the newest snapshot
    vfsd diff turn-3                       # since turn-3
    vfsd diff .. --summary                 # of an overlay: all changes since the directory below
    vfsd diff turn-3 turn-4 --stat
    vfsd diff turn-3 --patch -- src/main.c # of one file
    vfsd diff turn-3 --patch | git -C copy apply
    vfsd diff --exclude '*.log' --exclude build/
    vfsd diff --against agents-1 --stat    # how a fork differs from this workspace
    """,
)
@click.argument("a", required=False, shell_complete=_complete_state)
@click.argument("b", required=False, shell_complete=_complete_state)
@click.option("--stat", is_flag=True, help="Print the lines added and removed in each file, as git does.")
@click.option("-p", "--patch", is_flag=True, help="Print a patch for `git apply`, binary files included.")
@click.option("--names", is_flag=True, help="Print only the paths.")
@click.option("--summary", is_flag=True, help="As --stat; .git, ignored and new directories are one line each.")
@click.option(
    "--against", metavar="FORK", shell_complete=complete_workspace, help="Show how a fork differs from this workspace."
)
@include_option
@exclude_option
@click.option("--include-git", is_flag=True, help="With --patch: include .git, which `git apply` rejects.")
@click.pass_obj
def diff_command(
    app: App,
    a: str | None,
    b: str | None,
    stat: bool,
    patch: bool,
    names: bool,
    summary: bool,
    against: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    include_git: bool,
    paths: tuple[str, ...],
) -> None:
    """Show what changed between two snapshots, or since one.

    A defaults to the newest snapshot (in an overlay without snapshots, to the directory below it), B to the live state.
    A..B is the same as A B. In an overlay, .. alone shows all changes from the directory below to now, and ..B those up
    to B. Each line is a letter and a path: A added, M modified, D removed, T another type (a file became a symlink, for
    example), m metadata only (mode, owner, time, extended attributes, hard links). If a path became a hard link of
    another one, or stopped being one, the other path follows: "m b (hard link to a)".

    With --against, the changes lead from this workspace to FORK, which is the name of a running workspace or a path in
    it: a fork of this workspace, its source, or another fork of the same source.

    --summary begins with the files that a person may have to read. After them, there is one line each for `.git`, for
    directories that are new, removed or ignored by git, and for new files that git ignores.

    PATHs, after `--`, limit the output to these paths and what is below them.  They are relative to the current
    directory if that is in the workspace, else to the workspace's root; or absolute.
    The output writes a byte that is not UTF-8, and a control character, as \\xNN, and doubles a backslash.
    On a terminal it has colours, and goes through $VFSD_PAGER, else $PAGER, else `less`; NO_COLOR=1 and VFSD_PAGER=cat
    switch that off.

    `git apply` of a patch turns state A into state B; standard error names the command.  Comment lines in the patch,
    and standard error, name the changes that are missing from it: special files, files over 256 MiB and names that git
    rejects (exit status 1); empty directories, hard links and the content of .git, which git ignores (exit status 0).
    A patch never contains owners, times, extended attributes, or mode bits other than the owner's execute bit.
    """
    given = {"stat": stat, "patch": patch, "names": names, "summary": summary}
    modes = [mode for mode, is_given in given.items() if is_given]
    if len(modes) > 1:
        raise click.UsageError(f"{' and '.join(f'--{mode}' for mode in modes)} exclude each other: give one")
    mode = modes[0] if modes else None
    if include_git and mode != "patch":
        raise click.UsageError("--include-git goes with --patch")
    if against is not None and a is not None:
        raise click.UsageError("--against compares the present states: it takes no snapshots; put paths after --")
    if a is not None and b is None and ".." in a and "/" not in a:
        a, _, b = a.partition("..")  # "" is the directory below
        b = b or None
    app.paths = paths
    selected: Any = {"include": include, "exclude": exclude, "against": against}
    request: RemoteCall[Any]
    if mode == "patch":
        request = app.requests.patch(a, b, paths, include_git=include_git, **selected)
    else:
        request = app.requests.diff(a, b, paths, **selected)
    try:
        _answer(app, request, mode)
    except FileNotFoundError as error:
        mistaken = next((word for word in (a, b) if word is not None and error.filename == word), None)
        if mistaken is None or not is_unknown_snapshot(error):
            raise
        raise _perhaps_a_path(app, error, mistaken) from None


def _perhaps_a_path(app: App, error: FileNotFoundError, word: str) -> FileNotFoundError:
    """Return the error for the unknown snapshot `word`, which may be the path of a file, even of one that is gone."""
    from vfsd.wire.messages import ControlError, control_error  # noqa: PLC0415 start-up: an error has time

    if "/" in word or os.path.lexists(word) or os.path.lexists(os.path.join(app.record().mountpoint, word)):
        after = f"paths follow `--`: `vfsd diff -- {shlex.quote(word)}`"
        return FileNotFoundError(errno.ENOENT, f"this is a path, not a snapshot; {after}", word)
    if not isinstance(error, ControlError) or not str(error).endswith(LISTED):
        return error
    better = control_error(error.code, f"{error}, and paths follow `--`", error.errno, word, error.subject)
    return better if isinstance(better, FileNotFoundError) else error


def _answer(app: App, request: RemoteCall[Any], mode: str | None) -> None:
    if mode == "patch":
        _patch(app, request)
        return
    if mode in {"stat", "summary"}:
        request.params.mode = "stat"
    if mode == "summary":
        _summarize(app, request)
        return
    if not (app.json or mode == "stat" or output.on_terminal()):
        answer = write_changes(app, request, _name if mode == "names" else plain_change)
    else:
        show = {"stat": _show_stat, "names": _show_names}.get(mode or "", _show)
        answer = call_with_changes(app, request, "comparing", show)
    note_problems(answer.problems)


def _show(_answer: DiffResult, changes: ChangeSpool) -> None:
    with paged():
        show_changes(changes)


def _name(change: ChangeRecord) -> str:
    return output.show_path(change.path)


def _show_names(_answer: DiffResult, changes: ChangeSpool) -> None:
    with paged():
        for change in changes:
            output.say(_name(change))


def _show_stat(answer: DiffResult, changes: ChangeSpool) -> None:
    if answer.counts != ChangeCounts():
        with paged():
            show_stat(changes, answer.counts.total)


def _summarize(app: App, request: RemoteCall[Any]) -> None:
    # Start-up: few commands need it.
    from vfsd.cli.common.summary import rules_for, summarize  # noqa: PLC0415

    rules = rules_for(app.record())

    def show(answer: DiffResult, changes: ChangeSpool) -> None:
        summary = summarize(changes, rules)
        if app.json:
            states = {"a": answer.a, "b": answer.b, "counts": answer.counts}
            output.print_json({**states, "files": summary.files, "groups": summary.groups})
        elif answer.counts != ChangeCounts():
            with paged():
                summary.show()
        note_problems(summary.of_files(answer.problems))

    call_with_changes(app, request, "comparing", show, shows_json=True)


def _patch(app: App, request: RemoteCall[Any]) -> None:
    """Print the patch as it arrives, so that its size is not limited by memory; in JSON, print it at once."""
    if app.json:
        pieces: list[bytes] = []
        answer = app.call(request, on_output=pieces.append)
        output.print_json(_patch_document(answer, b"".join(pieces)))
    else:
        coloured = output.on_terminal() and output.has_colours()
        with paged(), PatientOutput() as out:
            answer = app.call(request, on_output=PatchColours(out.write).feed if coloured else out.write)
        _note_what_is_missing(answer)
    if answer.problems:
        click.get_current_context().exit(1)


def _patch_document(answer: DiffResult, whole: bytes) -> dict[str, Any]:
    try:
        content: dict[str, str | bytes] = {"patch": whole.decode()}
    except UnicodeDecodeError:
        content = {"patch_base64": whole}
    names = ("a", "b", "counts", "problems", "omitted", "truncated")
    return {**{name: getattr(answer, name) for name in names}, **content}


def _command_for(a: str) -> str:
    """Return the command that applies a patch to state `a`; that of an overlay's directory knows its repository.

    In a directory below the top of a repository, `git apply` takes the paths of the patch from the top, and skips them.
    """
    directory = os.fsdecode(from_wire_path(a.removeprefix("overlay:")))
    if not a.startswith("overlay:/") or not os.path.isdir(directory):
        return "`git apply` at the top of a copy (in a subdirectory of a larger repository: `--directory=SUBDIRECTORY`)"
    top = directory = os.path.realpath(directory)
    while not os.path.lexists(os.path.join(top, ".git")) and top != "/":
        top = os.path.dirname(top)
    if top == "/":
        return f"`{shlex.join(['git', '-C', directory, 'apply'])}`"
    inside = [] if top == directory else [f"--directory={os.path.relpath(directory, top)}"]
    return f"`{shlex.join(['git', '-C', top, 'apply', *inside])}`"


def _note_what_is_missing(answer: DiffResult) -> None:
    from protocol.diff.patch import GIT_APPLY_LIMIT_BYTES  # noqa: PLC0415 start-up: few commands print a patch

    named = [*answer.omitted, *answer.problems]
    for each in named[:_NAMED]:
        output.note(f"not in this patch: {each.path} ({each.reason})")
    if len(named) > _NAMED or answer.truncated:
        output.note("not in this patch: more paths, named in its comments")
    if answer.patch_bytes > GIT_APPLY_LIMIT_BYTES:
        size, limit = output.human_size(answer.patch_bytes), output.human_size(GIT_APPLY_LIMIT_BYTES)
        output.note(f"the patch has {size}, but `git apply` takes at most {limit}: split it with PATHs")
    if answer.patch_bytes:
        only = "; `patch` does not: it would write through links, or reject directories" if answer.git_only else ""
        output.note(f"{_command_for(answer.a)} applies it{only}")
    if answer.problems:
        lacking = output.counted(len(answer.problems), "change")
        output.report(f"the patch lacks {lacking}; `vfsd export` contains everything")
