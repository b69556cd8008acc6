"""`vfsd push` and `vfsd pull`, `export` and `import`: snapshots to and from object stores and archives.

A push: the daemon puts the state into the store on disk.  This process uploads it: `obstore` has threads, and daemons
fork.  While the daemon saves, a thread imports what the upload needs, and sends the first requests.
"""

from __future__ import annotations

import errno
import shlex
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.changes import show_outcome, show_problems
from vfsd.cli.common.object_stores import RemoteCommand, bytes_progress, is_url, open_remote, option_values
from vfsd.cli.common.values import complete_snapshot, exclude_option, include_option, refuse_other_archives
from vfsd.operations.snapshots import ExportResult, ImportResult, SaveResult

if TYPE_CHECKING:
    from protocol.store import Store
    from protocol.store.object_store import RemoteSnapshot, RemoteStore
    from protocol.store.object_store.transfer import PushStart

_URLS: Final = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIR"

# The contents of dropped states stay for the next push, which saves only what changed.
_COLLECT_AFTER: Final = 16


def _check_url(url: str) -> None:
    if not is_url(url):
        raise click.UsageError(f"{url} is not a URL: write {_URLS}")


@click.command(
    "push",
    cls=RemoteCommand,
    interrupted="interrupted: no snapshot was published; the same command continues with what is missing",
    examples="""
    vfsd push s3://bucket/team/job-7                     # the present state
    vfsd push s3://bucket/team/job-7 --snapshot turn-3   # prints the name under which it is stored
    vfsd push s3://bucket/x --store-option endpoint=http://localhost:9000 --store-option allow_http=true
    """,
)
@click.argument("destination")
@click.option("--snapshot", metavar="NAME", help="Push this snapshot.", shell_complete=complete_snapshot)
@click.option("--as", "name", metavar="NAME", help="The name in the object store; else that of the snapshot.")
@click.option(
    "--replace",
    is_flag=True,
    help="Replace another snapshot of this name.",
)
@click.pass_obj
def push_command(
    app: App, destination: str, snapshot: str | None, name: str | None, replace: bool, store_options: tuple[str, ...]
) -> None:
    """Upload the present state, or a snapshot, to an object store.

    DESTINATION is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIR; the first push makes a
    store there.  Only contents that the store lacks are uploaded.  A push that is interrupted uploads the rest when it
    is repeated.  Several machines can push to one store at once.

    Without --snapshot and --as the name is push-, the date and the time.  A name that exists with another state is
    refused without --replace.  The credentials come from the environment, as for the tools of each cloud.

    It needs the extra `remote`: without its package the command prints what installs it.
    """
    _check_url(destination)
    option_values(store_options)  # before the daemon saves
    target = name or snapshot or time.strftime("push-%Y%m%d-%H%M%S", time.gmtime())
    with _opening(destination, store_options) as opening:
        saved: SaveResult = app.call(app.requests.save(snapshot), label="saving")
        # Start-up: see the module's docstring.
        from protocol.store import Store  # noqa: PLC0415

        with Store(saved.directory) as local, ExitStack() as stack:
            if saved.is_temporary:
                stack.callback(_drop_temporary, local, saved)
            remote, start = opening.result()

            def published() -> None:
                app.interrupted = f"interrupted: {target} is in the store; the same command makes sure it is complete"

            with bytes_progress("pushing") as progress:
                report = remote.push(
                    local, saved.workspace, saved.name, name=target, replace=replace, progress=progress, start=start,
                    leased=stack.close, published=published,
                )  # fmt: skip
            if saved.is_temporary and local.layout.dropped_packs() >= _COLLECT_AFTER:
                with suppress(OSError):  # the store may be in use: a later push collects
                    local.collect_garbage(wait_s=0)
    app.emit(
        {"store": destination, **asdict(report), "hidden": saved.hidden}, lambda _: _show_push(destination, report)
    )
    if not app.json:
        output.note_hidden(saved.hidden)


@contextmanager
def _opening(destination: str, options: tuple[str, ...]) -> Iterator[Future[tuple[RemoteStore, PushStart]]]:
    """Open the store and begin the first requests of a push, in a thread; close the store at the end."""

    def begin() -> tuple[RemoteStore, PushStart]:
        remote = open_remote(destination, options, makes_directory=True)
        return remote, remote.start_push()

    with ThreadPoolExecutor(1, "vfsd-opening") as pool:
        opening = pool.submit(begin)
        try:
            yield opening
        finally:
            if opening.exception() is None:
                opening.result()[0].close()


def _drop_temporary(local: Store, saved: SaveResult) -> None:
    """Drop a state that the daemon saved for this push.  Its content stays while the push has a lease on it."""
    with suppress(FileNotFoundError):
        local.drop(saved.workspace, saved.name)


def _show_push(destination: str, report: Any) -> None:
    size = output.human_size(report.size_bytes)
    files = f"{output.counted(report.files, 'file')}, {size}"
    uploaded = output.human_size(report.uploaded_bytes)
    if not report.is_new:
        there = f"{output.show_path(report.name)} is already in {destination} ({files})"
        lost = output.counted(report.uploaded_contents, "content")
        mended = f"; uploaded {uploaded} again: {lost} that a repair had removed" if report.uploaded_contents else ""
        output.say(there + mended)
        return
    output.say(f"pushed {output.show_path(report.name)} to {destination} ({files}); uploaded {uploaded}")


@click.command(
    "pull",
    cls=RemoteCommand,
    acts_on_workspace=False,
    interrupted="interrupted: no snapshot was added to the store on this machine",
    examples="""
    vfsd pull s3://bucket/team/job-7#turn-3
    vfsd mount ~/work --backend overlay:snapshot:turn-3  # a workspace that starts with this state
    vfsd pull s3://bucket/team/job-7                     # the newest snapshot
    """,
)
@click.argument("source", metavar="SOURCE[#NAME]")
@click.option("--as", "name", metavar="NAME", help="The name on this machine; else that in the object store.")
@click.option(
    "--store", metavar="DIR", type=click.Path(file_okay=False), help="Download to the store in this directory."
)
@click.pass_obj
def pull_command(app: App, source: str, name: str | None, store: str | None, store_options: tuple[str, ...]) -> None:
    """Download a snapshot from an object store to this machine.

    The snapshot is added to the snapshot store on disk.  SOURCE is the DESTINATION of `vfsd push`.  Without #NAME the
    newest snapshot is downloaded.  Only contents that the store on this machine lacks are downloaded, and each is
    compared with its digest.

    `vfsd mount MOUNTPOINT --backend overlay:snapshot:NAME` makes a workspace that starts with the snapshot; write
    overlay:snapshot:NAME@SOURCE if other workspaces have snapshots of the same name.  `vfsd restore NAME --of SOURCE`
    restores it in a running workspace.  `vfsd store list` shows it.

    It needs the extra `remote`: without its package the command prints what installs it.
    """
    url, _, wanted = source.partition("#")
    _check_url(url)
    url = url.rstrip("/")
    # Start-up: see the module's docstring.
    from protocol.store import Store  # noqa: PLC0415

    with open_remote(url, store_options) as remote, Store(store) as local:
        found = remote.get(wanted or None)
        is_new = _pulled(remote, local, found, url, name or found.name)
        directory = local.directory
    record = found.record
    answer = {
        "source": url, "name": name or found.name, "workspace": url, "store": directory, "files": record.files,
        "size_bytes": record.size_bytes, "is_new": is_new,
    }  # fmt: skip
    app.emit(answer, lambda found: _show_pull(found, store))


def _pulled(remote: RemoteStore, local: Store, found: RemoteSnapshot, url: str, name: str) -> bool:
    """Download a snapshot; return whether it was not there already.  FileExistsError."""
    try:
        with local.tree(url, name) as tree:
            if tree.root == found.record.root:
                return False
        what = f"{local.directory} has another snapshot {name} from {url}: choose a name with --as"
        raise FileExistsError(errno.EEXIST, what)
    except FileNotFoundError:
        pass
    with bytes_progress("pulling") as progress:
        remote.pull(local, found, workspace=url, name=name, progress=progress)
    return True


def _show_pull(answer: dict[str, Any], store: str | None) -> None:
    files = f"{output.counted(answer['files'], 'file')}, {output.human_size(answer['size_bytes'])}"
    name = output.show_path(answer["name"])
    output.say(f"pulled {name} ({files})" if answer["is_new"] else f"{name} is already here ({files})")
    given = [] if store is None else ["--store", answer["store"]]
    mount = shlex.join(["--backend", f"overlay:snapshot:{answer['name']}@{answer['source']}", *given])
    output.note(f"`vfsd mount MOUNTPOINT {mount}` makes a workspace that starts with it")
    restore = shlex.join([answer["name"], "--of", answer["source"], *given])
    output.note(f"`vfsd restore {restore}` restores it in a running workspace")


# -- archives ---------------------------------------------------------------------------------------
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
