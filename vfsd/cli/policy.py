"""`vfsd policy`: which files no program may change or see."""

from __future__ import annotations

from typing import Final

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.operations.workspace import PolicyResult

_COLUMNS: Final = output.columns("RULE PATTERN:path")
_SHOWN: Final = 3


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
    app.emit(app.call(app.requests.policy(protect=protect, hide=hide)), _show)


def _show(answer: PolicyResult) -> None:
    rows = [["protect", each] for each in answer.protect] + [["hide", each] for each in answer.hide]
    output.table(_COLUMNS, rows, empty="no policy: programs may change and see everything that their user may")
    if answer.open_files:
        shown = ", ".join(map(output.show_path, answer.open_files[:_SHOWN]))
        more = ", ..." if len(answer.open_files) > _SHOWN else ""
        output.note(
            f"programs still have protected files open for writing: {shown}{more}.  Their writes fail; what they change"
            " through a mapping is visible for up to a second"
        )
