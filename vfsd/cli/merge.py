"""`vfsd merge` and `vfsd adopt`: take over the changes of a fork."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.changes import show_changes, show_expired, show_repositories
from vfsd.cli.common.names import complete_path_of_fork, complete_workspace
from vfsd.cli.common.values import touch_option
from vfsd.cli.common.wording import count_words, outcome_lines
from vfsd.operations.merge import ConflictRecord, Conflicts, MergeResult

if TYPE_CHECKING:
    from vfsd.client.requests import RemoteCall

_CONFLICTS_SHOWN: Final = 20


@click.command(
    "merge",
    cls=Command,
    examples="""
    vfsd merge agents-1 -w work            # take over what agents-1 has changed
    vfsd merge agents-2 -w work --dry-run  # show what it would change, and the conflicts
    vfsd merge agents-2 -w work --conflicts markers
    vfsd merge agents-3 -w work src docs   # only these paths
    vfsd restore --undo -w work            # take the last merge back
    """,
)
@click.argument("fork", metavar="FORK", shell_complete=complete_workspace)
@click.argument("paths", metavar="[PATH]...", nargs=-1, shell_complete=complete_path_of_fork)
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be changed, and change nothing.")
@click.option(
    "--conflicts",
    type=click.Choice(["fail", "ours", "theirs", "markers"]),
    default="fail",
    show_default=True,
    help="What to do with paths that both changed in different ways.",
)
@touch_option
@click.pass_obj
def merge_command(
    app: App, fork: str, paths: tuple[str, ...], dry_run: bool, conflicts: Conflicts, touch: bool
) -> None:
    """Take over what a fork has changed.

    FORK is the name of a running workspace, or a path in it: a fork of this workspace, its source, or another fork of
    the same source.  The changes are those since FORK was merged last, or since the fork.  What this workspace has
    changed itself stays: text that both have changed is merged by lines, as git does.

    A conflict is a path that both have changed in ways that do not go together.  --conflicts says what happens then:

    \b
    fail     nothing is changed; the conflicts are listed (exit status 1)
    ours     keep the version of this workspace
    theirs   take the version of FORK
    markers  write both versions into text files, between <<<<<<< and >>>>>>>; where that
             is not possible, keep this workspace's version and put FORK's next to it

    A merge is one step: programs see all of it or nothing, open files stay usable, and `vfsd restore --undo` takes it
    back.  A git repository that only one side has changed is taken whole.  If both have, this workspace keeps its own,
    gets the branches of FORK as refs/vfsd/FORK/*, and the command prints how to merge them with git.

    FORK does not change, and can go on and be merged again: the next merge offers what it has changed since.  A merge
    that is limited to PATHs changes nothing else, also no other name (hard link) of a file there, and is not
    remembered: the next merge without PATHs compares everything again.

    Files get the times that they have in FORK.  The command counts those that are older than what they replaced, which
    a build may not notice; --touch gives all files whose content it changes the present time.
    """
    app.paths = paths
    request = app.requests.merge(fork, paths, conflicts=conflicts, dry_run=dry_run, touch=touch)
    _run(app, request, "merged", dry_run=dry_run, advice=_MERGE_ADVICE, has_markers=conflicts == "markers")


@click.command(
    "adopt",
    cls=Command,
    examples="""
    vfsd adopt agents-3 -w work            # work becomes equal to agents-3
    vfsd adopt agents-3 -w work --force    # even if work has changes of its own
    vfsd restore --undo -w work            # take it back
    """,
)
@click.argument("fork", metavar="FORK", shell_complete=complete_workspace)
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be changed, and change nothing.")
@click.option("-f", "--force", is_flag=True, help="Replace changes that only this workspace has.")
@touch_option
@click.pass_obj
def adopt_command(app: App, fork: str, dry_run: bool, force: bool, touch: bool) -> None:
    """Make the workspace equal to a fork.

    Use it to keep the best of several forks.  FORK is the name of a running workspace, or a path in it.  If this
    workspace has changed since the fork, or since FORK was merged, and FORK does not have these changes, nothing is
    changed and the paths are listed (exit status 1): `vfsd merge` keeps both, --force replaces them.

    It is one step, as a merge is, and `vfsd restore --undo` takes it back.  Times are those of FORK; --touch is as for
    `vfsd merge`.
    """
    request = app.requests.adopt(fork, force=force, dry_run=dry_run, touch=touch)
    _run(app, request, "adopted", dry_run=dry_run, advice=_ADOPT_ADVICE)


_MERGE_ADVICE: Final = "choose with --conflicts ours, theirs or markers, or change one side and merge again"
_ADOPT_ADVICE: Final = "`vfsd merge` keeps the changes of both, --force replaces those of this workspace"


def _run(
    app: App,
    request: RemoteCall[Any],
    verb: Literal["merged", "adopted"],
    *,
    dry_run: bool,
    advice: str,
    has_markers: bool = False,
) -> None:
    def show(answer: MergeResult) -> None:
        if dry_run:
            show_changes(answer.changes)
        for conflict in answer.conflicts[:_CONFLICTS_SHOWN]:
            output.note(_described(conflict, is_applied=answer.applied, has_markers=has_markers))
        if len(answer.conflicts) > _CONFLICTS_SHOWN:
            output.note(f"and {len(answer.conflicts) - _CONFLICTS_SHOWN:,} more conflicts, which --json lists")
        if answer.applied and answer.safety_snapshot is None:
            if not answer.repositories:
                output.say(f"nothing to do: {answer.fork} has no changes that are not here")
        elif answer.applied:
            for line in outcome_lines(f"{verb} {answer.fork}", answer.counts, answer.safety_snapshot, answer.older):
                output.say(line)
        elif dry_run and output.on_terminal(err=True):
            output.note(f"would change: {count_words(answer.counts)}")
        if _is_refused(answer, dry_run=dry_run):
            found = output.counted(len(answer.conflicts), "conflict")
            output.report(f"{found} with {answer.fork}; nothing was changed: {advice}")
        show_repositories(answer.repositories)
        show_expired(answer.expired)

    answer = app.call(request, label="merging")
    app.emit(answer, show)
    if _is_refused(answer, dry_run=dry_run):
        click.get_current_context().exit(1)


def _described(conflict: ConflictRecord, *, is_applied: bool, has_markers: bool) -> str:
    path = output.show_path(conflict.path)
    if is_applied and conflict.reason == "lost":  # by `vfsd adopt --force`
        return f"replaced {path}, which was changed here"
    text = f"conflict in {path} ({conflict.reason}): {conflict.detail}"
    if is_applied and conflict.kept_as:
        return f"{text}; theirs is {output.show_path(conflict.kept_as)}"
    return f"{text}; the file has markers" if is_applied and has_markers and conflict.reason == "content" else text


def _is_refused(answer: MergeResult, *, dry_run: bool) -> bool:
    return bool(answer.conflicts) and not answer.applied and not dry_run
