"""`vfsd export` and `vfsd import`."""

from __future__ import annotations

import errno
from typing import Any

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.changes import show_outcome, show_problems
from vfsd.cli.common.names import complete_snapshot
from vfsd.cli.common.values import exclude_option, include_option, refuse_other_archives
from vfsd.operations.snapshots import ExportResult, ImportResult


@click.command(
    "export",
    cls=Command,
    examples="""
    vfsd export ~/backup.zip
    vfsd export ~/turn-3.zip --snapshot turn-3
    vfsd export ~/sources.zip --exclude .git --exclude node_modules/
    unzip -l ~/backup.zip                  # any tool that reads ZIP does
    """,
)
@click.argument("file", metavar="FILE.zip", type=click.Path())
@click.option("--snapshot", metavar="NAME", help="Export this snapshot.", shell_complete=complete_snapshot)
@click.option("-f", "--force", is_flag=True, help="Replace an existing file.")
@click.option("--changes-only", is_flag=True, help="Export only what differs from the directory below an overlay.")
@include_option
@exclude_option
@click.pass_obj
def export_command(app: App, /, file: str, force: bool, **settings: Any) -> None:
    """Write the workspace, or a snapshot, as a ZIP archive.

    The archive is written under a temporary name and renamed when it is complete.  It contains the state at the start;
    programs can change the workspace meanwhile.

    FILE.zip must be outside a memory, overlay or image workspace, because an unmount would delete it.  It may be
    inside a host:DIR or container:NAME workspace.

    A path that is too long for a ZIP file (65,535 bytes) is left out and named, and the exit status is 1.
    """
    refuse_other_archives(file)
    request = app.requests.export(file, overwrite=force, **settings)
    try:
        answer = app.call(request, label="exporting")
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "the file exists; --force replaces it", file) from None
    app.emit(answer, _show_export)
    verb = "is" if len(answer.skipped) == 1 else "are"
    if not app.json:
        output.note_hidden(answer.hidden)
    show_problems(answer.skipped, f"{verb} missing from the archive or incomplete in it")


def _show_export(answer: ExportResult) -> None:
    files, content = output.counted(answer.files, "file"), output.human_size(answer.total_bytes)
    archive = output.human_size(answer.archive_bytes)
    output.say(f"exported {files} ({content}) to {output.show_path(answer.path)} ({archive})")


@click.command(
    "import",
    cls=Command,
    examples="""
    vfsd import backup.zip
    vfsd restore --undo                    # take it back
    """,
)
@click.argument("file", metavar="FILE.zip", type=click.Path())
@click.pass_obj
def import_command(app: App, file: str) -> None:
    """Add the content of a ZIP archive to the workspace.

    Files of the same path are replaced, other files stay.  (`vfsd restore FILE.zip` makes the workspace equal to the
    archive.)  The import is all or nothing: a damaged or hostile archive is refused before anything changes.  The state
    before is kept as a safety snapshot, which `vfsd restore --undo` restores.
    """
    answer = app.call(app.requests.import_archive(file), label="importing")
    app.emit(answer, _show_import)
    show_problems(answer.problems, "could not be imported")


def _show_import(answer: ImportResult) -> None:
    path, size = output.show_path(answer.path), output.human_size(answer.total_bytes)
    show_outcome(f"imported {output.counted(answer.files, 'file')} ({size}) from {path}", answer)
