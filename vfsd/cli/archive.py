"""`vfsd export` and `vfsd import`."""

from __future__ import annotations

import errno

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.changes import count_words, show_problems, show_safety
from vfsd.cli.common.names import complete_snapshot
from vfsd.cli.common.patterns import exclude_option, include_option
from vfsd.cli.common.values import refuse_other_archives
from vfsd.wire import messages

__all__ = ["export_command", "import_command"]


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
@click.option("--snapshot", metavar="NAME", help="Of this state, not the live one.", shell_complete=complete_snapshot)
@click.option("-f", "--force", is_flag=True, help="Replace a file that is there.")
@click.option("--changes-only", is_flag=True, help="Of an overlay, only what differs from the directory below.")
@include_option
@exclude_option
@click.pass_obj
def export_command(
    app: App,
    file: str,
    snapshot: str | None,
    force: bool,
    changes_only: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> None:
    """Write the workspace, or a snapshot, as a ZIP archive.

    The archive is written beside its place and then put there: it is whole or absent.  The mount stays
    live meanwhile; what is exported is the state at the start.

    FILE.zip is outside of the workspace, where the backend is memory, overlay or image: an unmount deletes what is in
    the mount.  Of host:DIR and container:NAME it may be inside.

    A path that is too long for a ZIP (65,535 bytes) is left out and named, and the exit status is 1.
    """
    refuse_other_archives(file)
    request = app.requests.export(
        file, snapshot=snapshot, overwrite=force, changes_only=changes_only, include=include, exclude=exclude
    )
    try:
        answer = app.call(request, label="exporting")
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "there is a file already, which --force replaces", file) from None
    app.emit(answer, _show_export)
    show_problems(answer.skipped, "paths are not in the archive, or not all of what they are")


def _show_export(answer: messages.ExportResult) -> None:
    files, content = output.counted(answer.files, "file"), output.human_size(answer.total_bytes)
    archive = output.human_size(answer.archive_bytes)
    output.say(f"exported {files} ({content}) to {output.show_path(answer.path)} ({archive})")


@click.command(
    "import",
    cls=Command,
    examples="""
    vfsd import backup.zip
    vfsd restore --undo                    # as it was before
    """,
)
@click.argument("file", metavar="FILE.zip", type=click.Path())
@click.pass_obj
def import_command(app: App, file: str) -> None:
    """Lay the content of a ZIP archive over the workspace.

    Files of the same path are replaced, others stay (`vfsd restore FILE.zip` makes the workspace equal to the
    archive).  It is all or nothing: an archive that is damaged or hostile is refused before anything changes.
    The state before is kept as a safety snapshot.
    """
    answer = app.call(app.requests.import_archive(file), label="importing")
    app.emit(answer, _show_import)
    show_problems(answer.problems)


def _show_import(answer: messages.ImportResult) -> None:
    path, size = output.show_path(answer.path), output.human_size(answer.total_bytes)
    output.say(f"imported {output.counted(answer.files, 'file')} ({size}) from {path}: {count_words(answer.counts)}")
    show_safety(answer.safety_snapshot, answer.expired)
