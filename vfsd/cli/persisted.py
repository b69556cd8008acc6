"""`vfsd persisted`: list, check and drop the journals of workspaces that were mounted with --persist."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, Final

import click

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.lower import AbsentLower
from protocol.journal.directory import JournalFiles, drop_journal, has_journal, is_locked, read_journal
from protocol.journal.records import JournalDamagedError
from protocol.store.format.layout import Layout, default_directory
from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, Group, did_you_mean
from vfsd.cli.common.output import counted
from vfsd.cli.common.values import NAME
from vfsd.client.requests import RemoteCall
from vfsd.machine.directories import disk_bytes, journal_directory, journal_names, journals_directory
from vfsd.machine.runtime import read_records
from vfsd.operations.workspace import CompactResult
from vfsd.wire.messages import wire_path

Callback = Callable[..., None]
_EXAMPLES: Final = """
vfsd persisted list
vfsd persisted check demo
vfsd persisted drop demo
"""
_DIRECTORY: Final = "The journal in this directory, which the mount named with --journal-dir."
_USED: Final = "in use"
_KEPT: Final = "kept"
_DAMAGED: Final = "damaged"


@click.group("persisted", cls=Group, acts_on_workspace=False, examples=_EXAMPLES)
def persisted_command() -> None:
    """Manage the journals of workspaces that were mounted with --persist.

    A journal has the content, the snapshots and the undo history of a workspace; `vfsd mount DIR --persist --name NAME`
    continues it.  Journals are in $XDG_STATE_HOME/vfsd/journals, else ~/.local/state/vfsd/journals (for root
    /var/lib/vfsd/journals), or where --journal-dir puts them.
    """


def _of_journal(command: Callback) -> Callback:
    """Add the options that name a journal."""
    command = click.argument("name", metavar="[NAME]", type=NAME, required=False)(command)
    return click.option("--journal-dir", metavar="DIRECTORY", type=click.Path(), help=_DIRECTORY)(command)


class _JournalCommand(Command):
    """A command without -w."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params = [param for param in self.params if param.name != "workspace"]


persisted_command.command_class = _JournalCommand


@click.command(
    "compact",
    cls=Command,
    interrupted="interrupted: a compaction that has begun goes on in the daemon, and loses nothing",
    examples="""
    vfsd compact
    vfsd compact -w demo --json
    """,
)
@click.pass_obj
def compact_command(app: App) -> None:
    """Replace the journal of a workspace by an image of its state.

    It then takes less space on disk.  The workspace is served meanwhile.  It happens by itself when the journal exceeds
    64 MB and twice the size of the last image.  While the image is written, the disk holds it and the old journal.
    """
    app.emit(app.call(RemoteCall("compact"), label="compacting"), _show_compacted)


def _show_compacted(answer: CompactResult) -> None:
    before, after = output.human_size(answer.before_bytes), output.human_size(answer.after_bytes)
    output.say(f"the journal took {before} and takes {after} now")


# -- list -----------------------------------------------------------------------------------------
_COLUMNS: Final = output.columns("NAME STATE SIZE:size DIRECTORY:path KIND")


@persisted_command.command(
    "list",
    examples="""
    vfsd persisted list
    vfsd persisted list --json
    """,
)
@click.pass_obj
def list_command(app: App) -> None:
    """List what workspaces take on disk: the journals, and the store of snapshots.

    The state of a journal is "in use" by a running daemon, or "kept".  Only `vfsd persisted check` reads a journal.
    Journals that --journal-dir put elsewhere are listed while their workspace runs.  The line of the store has the
    kind "store".  Lines on standard error say how to free the space.
    """
    places = {name: journal_directory(name) for name in journal_names()}
    places |= {record.name: record.journal for record in read_records() if record.journal is not None}
    rows = [_row(name, place) for name, place in sorted(places.items()) if has_journal(place)]
    store = default_directory()
    found = {"directory": wire_path(os.fsencode(store)), "size_bytes": disk_bytes(store)}
    stores = [found] if Layout(store).exists() else []
    app.emit({"journals": rows, "stores": stores}, lambda _: _show_list(rows, stores))


def _row(name: str, directory: str) -> dict[str, Any]:
    return {
        "name": name,
        "state": _USED if is_locked(directory) else _KEPT,
        "size_bytes": disk_bytes(directory),
        "directory": wire_path(os.fsencode(directory)),
    }


def _show_list(rows: list[dict[str, Any]], stores: list[dict[str, Any]]) -> None:
    cells = [[*(row[key] for key in ("name", "state", "size_bytes", "directory")), "journal"] for row in rows]
    cells += [[None, None, store["size_bytes"], store["directory"], "store"] for store in stores]
    output.table(
        _COLUMNS, cells, empty=f"there is no journal in {journals_directory()}; `vfsd mount --persist` keeps one"
    )
    if any(row["state"] == _USED for row in rows):
        output.note("`vfsd unmount --discard NAME` ends a workspace and its journal; `vfsd compact` makes one smaller")
    if any(row["state"] == _KEPT for row in rows):
        output.note("`vfsd persisted drop NAME` removes the journal of a workspace that is not mounted")
    if stores:
        output.note("`vfsd prune --gc --keep-last N`, or `vfsd store drop` and `vfsd store gc`, make the store smaller")


# -- check ----------------------------------------------------------------------------------------
@persisted_command.command(
    "check",
    examples="""
    vfsd persisted check demo
    vfsd persisted check --journal-dir /srv/journals/demo
    """,
)
@_of_journal
@click.pass_obj
def check_command(app: App, name: str | None, journal_dir: str | None) -> None:
    """Read a whole journal, verify its checksums, and rebuild the state in memory.

    Changes nothing.  The journal must not be in use.  The exit status is 1 if it is damaged.  Then restore the
    directory from a backup, or drop the journal with `vfsd persisted drop`.
    """
    directory = _directory(name, journal_dir)
    try:
        files = read_journal(directory)
        volume = _rebuilt(files)
    except JournalDamagedError as error:
        place = os.path.basename(error.filename or directory)
        advice = "restore the directory from a backup, or remove it with `vfsd persisted drop`"
        raise OSError(
            errno.EBADMSG, f"{place}: {(error.strerror or '').partition(': see')[0]}; {advice}", directory
        ) from None
    report, usage = files.report(), volume.usage()
    facts = {
        "directory": wire_path(os.fsencode(directory)),
        "workspace": report.identity.get("workspace"),
        "backend": report.identity.get("backend"),
        "clean": report.is_clean,
        "cut_bytes": report.cut_bytes,
        "size_bytes": report.size_bytes,
        "files": usage.files,
        "content_bytes": usage.size_bytes,
        "snapshots": len(volume.snapshots()),
    }
    app.emit(facts, lambda _: _show_check(facts))


def _rebuilt(files: JournalFiles) -> MemoryVolume:
    volume = OverlayVolume(AbsentLower()) if files.identity.get("backend") == "overlay" else MemoryVolume()
    try:
        volume.replay(files.batches())
        volume.check_invariants()
    except (KeyError, AssertionError) as error:
        raise JournalDamagedError(files.directory, f"it does not describe a state ({error!r})") from error
    return volume


def _show_check(facts: dict[str, Any]) -> None:
    content = f"{counted(facts['files'], 'file')} ({output.human_size(facts['content_bytes'])})"
    if facts["backend"] == "overlay":
        content += " that the workspace changed"
    # Without the mark of a clean end, nothing shows whether records at the end are missing.
    verdict = "the journal is complete" if facts["clean"] else "no damage found"
    output.say(f"{verdict}: {content}, {counted(facts['snapshots'], 'snapshot')}")
    if not facts["clean"]:
        output.note("its last daemon did not end cleanly; what is in the journal was verified")
    if facts["cut_bytes"]:
        output.note(f"an interrupted write of {facts['cut_bytes']} bytes at the end does not count")


# -- drop -----------------------------------------------------------------------------------------
@persisted_command.command(
    "drop",
    examples="""
    vfsd persisted drop demo
    vfsd persisted drop --journal-dir /srv/journals/demo
    """,
)
@_of_journal
@click.pass_obj
def drop_command(app: App, name: str | None, journal_dir: str | None) -> None:
    """Remove a journal, with the content and the snapshots in it.  Asks on a terminal.

    A journal that a daemon uses is not removed, and neither is any other file in its directory.
    """
    directory = _directory(name, journal_dir)
    may_ask = not app.json and output.on_terminal(err=True)
    if may_ask and not is_locked(directory):
        size = output.human_size(sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory)))
        app.interrupted = "interrupted: nothing was removed"
        if not output.confirm(f"{directory} has a journal of {size}.  Remove it, with the content of the workspace?"):
            raise OSError(errno.ECANCELED, "nothing was removed")
    drop_journal(directory)
    app.emit({"dropped": wire_path(os.fsencode(directory))}, lambda _: output.say(f"removed the journal {directory}"))


def _directory(name: str | None, journal_dir: str | None) -> str:
    """Return the directory of the journal that the arguments name.  FileNotFoundError if it has none."""
    if (name is None) == (journal_dir is None):
        raise click.UsageError("give the NAME of a workspace, or --journal-dir")
    directory = journal_directory(name) if name is not None else os.path.abspath(journal_dir or "")
    if not has_journal(directory):
        close = did_you_mean(name, journal_names()) if name is not None else None
        advice = close or " (`vfsd persisted list` shows all but those that --journal-dir put elsewhere)"
        raise FileNotFoundError(errno.ENOENT, f"there is no journal{advice}", directory)
    return directory
