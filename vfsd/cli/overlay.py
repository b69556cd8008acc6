"""`vfsd apply` and `vfsd discard`: write the changes of an overlay to the directory below it, or discard them."""

from __future__ import annotations

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.changes import show_changes, show_expired, show_outcome, show_problems, show_repositories
from vfsd.cli.common.names import complete_path
from vfsd.cli.common.streamed import ChangeSpool, call_with_changes
from vfsd.cli.common.values import touch_option
from vfsd.cli.common.wording import outcome_lines
from vfsd.operations.snapshots import ApplyResult, RestoreResult


@click.command(
    "apply",
    cls=Command,
    examples="""
    vfsd apply --dry-run                   # show what it would write
    vfsd apply
    vfsd apply src docs/index.md           # only these paths
    """,
)
@click.argument("paths", metavar="[PATH]...", nargs=-1, shell_complete=complete_path)
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@click.option("-f", "--force", is_flag=True, help="Overwrite what other programs changed there since.")
@touch_option
@click.pass_obj
def apply_command(app: App, paths: tuple[str, ...], dry_run: bool, force: bool, touch: bool) -> None:
    """Write the changes of an overlay to the directory below it.

    If other programs have changed one of the paths there, or a directory that would be removed has entries that are
    hidden or new, nothing is written: the command names the paths and exits with status 1.  --force writes all the
    same, makes directories anew that other programs removed, and keeps a directory with such entries.  It leaves out
    files of which the workspace has only parts, if the others are lost below, and exits with status 1.

    Each file is replaced atomically.  If the apply is killed before it begins to write, the directory does not change.
    If it is killed later, the next apply, or the next mount of the directory, completes it and reports that.

    A git repository that was changed there, too, is not written, also with --force: it gets the branches of the
    workspace as refs/vfsd/WORKSPACE/*, and the command prints how to merge them with git.

    A file keeps the time at which the workspace changed it, so a build that ran in the directory since then does not
    notice it: --touch gives all files whose content is written the present time, there and in the workspace.

    `vfsd restore --undo` goes back to the state that was applied.  It does not change the directory.
    """

    def show(answer: ApplyResult, changes: ChangeSpool) -> None:
        place = output.show_path(answer.directory)
        if answer.recovered:
            output.note(answer.recovered)
        if dry_run:
            show_changes(changes)
        for conflict in answer.conflicts:
            output.note(f"{output.show_path(conflict.path)} {conflict.reason}")
        if dry_run:
            show_repositories(answer.repositories)
        if answer.applied:
            for line in outcome_lines(f"applied to {place}", answer.counts, None, answer.older):
                output.say(line)
            show_repositories(answer.repositories)
            show_expired(answer.expired)
        elif answer.conflicts and not force:
            conflicts = output.counted(len(answer.conflicts), "conflict", "conflicts")
            output.report(
                f"{conflicts} in {place}; nothing was written: `vfsd apply --force` overwrites changed files and keeps"
                " directories that cannot be removed, `vfsd discard PATH` drops the change of the workspace"
            )

    app.paths = paths
    answer = call_with_changes(
        app, app.requests.apply(paths, dry_run=dry_run, force=force, touch=touch), "applying", show
    )
    show_problems(answer.problems, "could not be written")
    if answer.conflicts and not (answer.applied or force):
        click.get_current_context().exit(1)


@click.command(
    "discard",
    cls=Command,
    examples="""
    vfsd discard --dry-run
    vfsd discard src/main.c                # only this path
    vfsd discard && vfsd restore --undo    # take it back
    """,
)
@click.argument("paths", metavar="[PATH]...", nargs=-1, shell_complete=complete_path)
@click.option("-n", "--dry-run", is_flag=True, help="Show the changes without making them.")
@touch_option
@click.pass_obj
def discard_command(app: App, paths: tuple[str, ...], dry_run: bool, touch: bool) -> None:
    """Discard the changes of an overlay, and show the directory below it again.

    The state before is kept as a safety snapshot, which `vfsd restore --undo` restores.  Files get the times that they
    have in the directory.  With --touch, those whose content changes show the present time, so that a build notices
    them; they are still unchanged for `vfsd diff` and `vfsd apply`.
    """
    app.paths = paths
    request = app.requests.discard(paths, dry_run=dry_run, touch=touch)
    if dry_run:
        call_with_changes(app, request, "comparing", lambda _, changes: show_changes(changes))
    else:
        app.emit(app.call(request, label="discarding"), _show_discarded)


def _show_discarded(answer: RestoreResult) -> None:
    if answer.safety_snapshot is None:
        output.say("nothing to discard")
        show_expired(answer.expired)
    else:
        show_outcome("discarded", answer)
