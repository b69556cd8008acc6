"""`vfsd store` and `vfsd persisted`: the snapshots and the journals that are kept on disk or in an object store."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.journal.directory import JournalFiles, has_journal, is_locked, read_journal
from protocol.journal.records import JournalDamagedError
from protocol.store import Store, default_directory
from protocol.store.format.layout import Layout
from protocol.store.object_store import RemoteStore
from protocol.store.upkeep import GONE, CheckReport, Damage, GarbageReport
from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, Group, did_you_mean
from vfsd.cli.common.object_stores import bytes_progress, check_no_options, is_url, open_remote, selecting, store_option
from vfsd.cli.common.output import counted
from vfsd.cli.common.values import NAME, Seconds, in_home
from vfsd.client.requests import workspace_key
from vfsd.machine.directories import (
    bases_of_journals,
    disk_bytes,
    is_frozen,
    journal_backend,
    journal_directory,
    journal_names,
    journals_directory,
)
from vfsd.machine.runtime import read_records
from vfsd.wire.messages import from_wire_path, wire_path

if TYPE_CHECKING:
    from protocol.backends.memory import MemoryVolume
    from protocol.store.object_store.upkeep import CollectionReport

AnyStore = Store | RemoteStore
_NAMES_SHOWN: Final = 5
_FORM: Final = "; WORKSPACE is host:DIR, or another name that `vfsd store list` prints"


@contextlib.contextmanager
def opened(store: str | None, store_options: Sequence[str]) -> Iterator[AnyStore]:
    """Open the store of --store, a directory or a URL; None: the default one.  UsageError, OSError."""
    if store is not None and is_url(store):
        with open_remote(store, store_options) as remote:
            yield remote
        return
    check_no_options(store_options)
    with Store(default_directory() if store is None else store) as local:
        # The first snapshot creates the default store.
        if store is not None and not local.layout.exists():
            raise FileNotFoundError(errno.ENOENT, f"no snapshot store at {store}")
        yield local


class _DiskCommand(Command):
    """A command on what is kept on disk, whatever runs: it does not take -w."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params = [param for param in self.params if param.name != "workspace"]


class _StoreCommand(_DiskCommand):
    """A command on a store, on disk or in an object store, which it opens for its function."""

    def __init__(self, *args: Any, callback: Callable[..., None], **kwargs: Any) -> None:
        def run(*, store: str | None, store_options: tuple[str, ...], **settings: Any) -> None:
            with opened(store, store_options) as found:
                callback(click.get_current_context().obj, found, **settings)

        super().__init__(*args, callback=run, **kwargs)
        how = "Use the store in this directory, or the object store at this URL, instead of the default one."
        self.params.insert(-1, click.Option(["--store"], metavar="DIR|URL", type=click.Path(file_okay=False), help=how))
        self.params.insert(-1, store_option())


_EXAMPLES: Final = """
vfsd store list
vfsd store check
vfsd store gc
vfsd store list --store s3://bucket/team/job-7
"""


@click.group("store", cls=Group, acts_on_workspace=False, examples=_EXAMPLES)
def store_command() -> None:
    """Manage the snapshots that are kept on disk or in an object store.

    Snapshots of host directories and containers are kept in one store for all workspaces of a user:
    $VFSD_STORE_DIR, else $XDG_STATE_HOME/vfsd/store, else ~/.local/state/vfsd/store.  The store contains each file
    content once, for all snapshots and workspaces.  It survives the mounts: a directory that is mounted again has its
    snapshots.  With --store URL the commands act on an object store that `vfsd push` made.
    """


store_command.command_class = _StoreCommand


# -- list -----------------------------------------------------------------------------------------
_COLUMNS: Final = output.columns("WORKSPACE NAME TIME:time FILES:count SIZE:size KIND TAG")
_GROUP_COLUMNS: Final = {
    "name": output.Column("NAME"),
    "created_at": output.Column("TIME", "minute"),
    "files": output.Column("FILES", "count"),
    "size_bytes": output.Column("SIZE", "size"),
    "kind": output.Column("KIND"),
    "tag": output.Column("TAG"),
}


@store_command.command(
    "list",
    examples="""
    vfsd store list
    vfsd store list | cut -f1 | sort | uniq -c   # how many each workspace has
    vfsd store list --json
    """,
)
def list_command(app: App, store: AnyStore) -> None:
    """List the snapshots of all workspaces, mounted or not.

    A workspace is named by its backend and path, such as "host:/srv/project".  SIZE is the size of the files.  The
    store needs less, because it keeps shared content once.  The first snapshot creates the default store; until then
    the list is empty.  A directory named with --store must be a store.
    """
    rows = [
        {
            "workspace": wire_path(os.fsencode(workspace)),
            "name": info.name,
            "created_at": datetime.fromtimestamp(info.created_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
            "files": info.files,
            "size_bytes": info.size_bytes,
            "kind": info.kind,
            "tag": info.tag,
        }
        for workspace, infos in store.workspaces().items()
        for info in infos
    ]
    damaged = [wire_path(os.fsencode(path)) for path in store.damaged_snapshots()]
    place = wire_path(os.fsencode(store.directory))
    app.emit({"store": place, "snapshots": rows, "damaged": damaged}, lambda answer: _show_list(answer, store))


def note_damaged(damaged: Sequence[str], store: AnyStore) -> None:
    """Print how many snapshots a list lacks because they cannot be read."""
    if damaged:
        advice = f"`vfsd store check{selecting(store)}` names them"
        output.note(f"not in this list: {counted(len(damaged), 'damaged snapshot')}; {advice}")


def _show_list(answer: dict[str, Any], store: AnyStore) -> None:
    rows = answer["snapshots"]
    note_damaged(answer["damaged"], store)
    empty = f"no snapshots in {output.show_path(answer['store'])}"
    if output.on_terminal() and rows:
        _show_by_workspace(rows)
    else:
        output.table(_COLUMNS, [tuple(row.values()) for row in rows], empty=empty)


def _show_by_workspace(rows: list[dict[str, Any]]) -> None:
    """Print a table for each workspace, narrow enough for half of a terminal."""
    for index, (workspace, found) in enumerate(itertools.groupby(rows, key=lambda row: row["workspace"])):
        if index:
            output.say("")
        output.say(click.style(output.show_path(workspace), bold=True))
        group = [{**row, "kind": None if row["kind"] == "user" else row["kind"]} for row in found]
        names = [name for name in _GROUP_COLUMNS if name not in ("kind", "tag") or any(row[name] for row in group)]
        shown = [tuple(row[name] or "" if name in ("kind", "tag") else row[name] for name in names) for row in group]
        output.table([_GROUP_COLUMNS[name] for name in names], shown, empty="")


# -- check ----------------------------------------------------------------------------------------
@store_command.command(
    "check",
    interrupted="interrupted: the store was not checked to its end, and nothing in it was changed",
    examples="""
    vfsd store check
    vfsd store check && vfsd store gc
    vfsd store check --json
    """,
)
def check_command(app: App, store: AnyStore) -> None:
    """Read the whole store and name what is damaged.

    The command compares every content with its digest, and follows every snapshot to its last file.  It names each
    damage with the snapshots and paths that need it, and exits with status 1.  Snapshots and restores can run
    meanwhile.  `vfsd store gc --repair` removes what is damaged; the next snapshot of a directory stores again what
    still exists there.  A snapshot that needs other content stays incomplete; `vfsd store drop WORKSPACE NAME` drops
    it.
    """
    with bytes_progress("checking") as progress:
        report = store.check(progress)
    app.emit(_check_record(report), lambda _: _show_check(report, store))
    if not report.ok:
        click.get_current_context().exit(1)


def _check_record(report: CheckReport) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "snapshots": report.snapshots,
        "contents": report.contents,
        "size_bytes": report.size_bytes,
        "damages": [_damage_record(damage) for damage in report.damages],
        "interrupted": [wire_path(os.fsencode(workspace)) for workspace in report.interrupted],
        "leftover_bytes": report.leftover_bytes,
    }


def _damage_record(damage: Damage) -> dict[str, Any]:
    return {
        "what": damage.what,
        "snapshots": [{"workspace": wire_path(os.fsencode(key)), "name": name} for key, name in damage.snapshots],
        "paths": [wire_path(path) for path in damage.paths],
        "without_inodes": [wire_path(path) for path in damage.without_inodes],
    }


def _show_check(report: CheckReport, store: AnyStore) -> None:
    size = output.human_size(report.size_bytes)
    found = f"{counted(report.snapshots, 'snapshot')}, {counted(report.contents, 'content')}"
    output.say(f"{found}, {size}: {'all whole' if report.ok else 'DAMAGED'}")
    for damage in report.damages:
        output.report(damage.what)
        for workspace, name in damage.snapshots:
            of = f" of {wire_path(os.fsencode(workspace))}" if workspace else ""
            output.note(f"  needed by snapshot {name}{of}")
        for path in damage.paths:
            output.note(f"  lost: {output.show_path(wire_path(path)) or '.'}")
        for path in damage.without_inodes:
            output.note(f"  lost: only the inode numbers and ctimes below {output.show_path(wire_path(path)) or '.'}")
    if any(damage.without_inodes for damage in report.damages):
        output.note("where only these are lost, the contents are whole; after a mount, git reads such files again")
    if report.damages:
        is_repaired = all(damage.what == GONE for damage in report.damages)
        given = selecting(store)
        again = "a repeated `vfsd push`" if isinstance(store, RemoteStore) else "the next snapshot"
        output.note(
            ("" if is_repaired else f"`vfsd store gc --repair{given}` removes what is damaged; ")
            + f"{again} stores again what still exists; `vfsd store drop WORKSPACE NAME{given}` drops a snapshot that"
            " cannot be whole again"
        )
    for workspace in report.interrupted:
        shown = wire_path(os.fsencode(workspace))
        output.note(f"a restore of {shown} was interrupted: mount it, and `vfsd status` says how to finish or undo it")
    if report.leftover_bytes:
        size = output.human_size(report.leftover_bytes)
        output.note(f"{size} are left over from interrupted work; `vfsd store gc{selecting(store)}` frees them")


# -- gc -------------------------------------------------------------------------------------------
wait_option: Final = functools.partial(
    click.option, "--wait", metavar="SECONDS", type=Seconds(min=0), default=60.0, show_default=True
)


@store_command.command(
    "gc",
    interrupted="interrupted: every snapshot is whole; `vfsd store gc` frees what is left to free",
    examples="""
    vfsd store gc
    vfsd store gc --wait 600               # wait for long snapshots to end
    vfsd store gc --repair                 # remove what `vfsd store check` found damaged
    """,
)
@wait_option(help="How long to wait for snapshots, restores and readers to end.")
@click.option("--repair", is_flag=True, help="Also remove what is damaged.  Snapshots that need it lose these paths.")
def gc_command(app: App, store: AnyStore, *, wait: float, repair: bool) -> None:
    """Free the disk space that no snapshot needs any more.

    `vfsd store gc` frees the disk space of dropped snapshots, and so does a mounted workspace after every 16 drops.
    It first drops the bases of frozen overlays whose daemons were killed.
    The command runs alone: it waits for snapshots and restores to end, and new ones wait for it.  If it is killed, the
    store stays consistent.

    --repair first removes damaged contents and prints their number.  Snapshots that need them stay, without these
    paths, until a new snapshot stores the same content again.  `vfsd store check` names them until then, or until
    `vfsd store drop WORKSPACE NAME` drops them.

    In an object store the command frees space in two steps, so that pushes can run meanwhile.  It condemns packs that
    are not needed, and a later run deletes them, at least 24 hours after they were condemned.  A pack that is younger
    than that is not condemned.  There, a repeated `vfsd push` stores damaged contents again.
    """
    if isinstance(store, Store):
        from vfsd.daemon.snapshots.bases import drop_unused_frozen  # noqa: PLC0415

        drop_unused_frozen(store, wait_s=wait)
    report, show = collected(store, wait, repair=repair)
    app.emit(report, lambda _: show())


def collected(
    store: AnyStore, wait_s: float, *, repair: bool = False
) -> tuple[GarbageReport | CollectionReport, Callable[[], None]]:
    """Collect the garbage of a store with a progress bar; return the report, and the function that prints it."""
    with bytes_progress("collecting") as progress:
        if isinstance(store, RemoteStore):
            remote = store.collect_garbage(progress, repair=repair)
            return remote, functools.partial(_show_collection, remote, store)
        local = store.collect_garbage(progress, wait_s=wait_s, repair=repair)
        return local, functools.partial(_show_gc, local)


def _show_collection(report: CollectionReport, store: RemoteStore) -> None:
    """Print what a collection of an object store freed and condemned."""
    if report.damaged_contents:
        output.say(f"removed {counted(report.damaged_contents, 'damaged content')}")
    freed, kept = output.human_size(max(0, report.freed_bytes)), output.human_size(report.kept_bytes)
    output.say(f"freed {freed} ({counted(report.freed_packs, 'pack')}); {kept} are kept")
    if report.condemned_packs:
        condemned = f"{output.human_size(report.condemned_bytes)} ({counted(report.condemned_packs, 'pack')})"
        hours = report.grace_s / 3600
        command = f"vfsd store gc{selecting(store)}"
        output.note(f"{condemned} are condemned: `{command}` deletes them if it runs {hours:g} hours later")


def _show_gc(report: GarbageReport) -> None:
    """Print what a collection freed."""
    if report.damaged_contents:
        removed = counted(report.damaged_contents, "damaged content")
        output.say(f"removed {removed} ({output.human_size(report.damaged_bytes)})")
    freed, kept = output.human_size(max(0, report.freed_bytes)), output.human_size(report.kept_bytes)
    output.say(f"freed {freed} ({counted(report.freed_contents, 'content')}); {kept} are kept")


# -- drop -----------------------------------------------------------------------------------------
@store_command.command(
    "drop",
    examples="""
    vfsd store drop host:/srv/old snap-1 snap-2
    vfsd store drop host:/srv/old --all
    """,
)
@click.option("--all", "drop_all", is_flag=True, help="Drop all snapshots of the workspace.")
@click.option("-f", "--force", is_flag=True, help="Drop also snapshots that running forks need to be merged.")
@click.argument("key", metavar="WORKSPACE")
@click.argument("names", metavar="[NAME]...", nargs=-1)
def drop_command(app: App, store: AnyStore, *, key: str, names: tuple[str, ...], drop_all: bool, force: bool) -> None:
    """Delete some snapshots of a workspace, mounted or not, or (--all) all of them.

    WORKSPACE is host:DIR, or another name that `vfsd store list` prints.  Without names and --all the command asks on
    a terminal.  Either all of the named snapshots are dropped or, if one does not exist, none.  `vfsd store gc` frees
    the disk space of dropped snapshots, and so does a mounted workspace after every 16 drops.
    """
    if names and drop_all:
        raise click.UsageError("--all drops every snapshot: give it, or names")
    key = known_key(key, store)
    dropped: list[str] = []
    app.interrupted = "interrupted: nothing was dropped"
    chosen = _to_drop(store, key, names, drop_all=drop_all, may_ask=not app.json)
    if not force and isinstance(store, Store):
        _check_not_forked(store, key, chosen)
        _check_no_journal(store, key, chosen)
    for name in chosen:
        store.drop(key, name)
        dropped.append(name)
        app.interrupted = f"interrupted: {counted(len(dropped), 'snapshot was', 'snapshots were')} dropped"
    snapshots = counted(len(dropped), "snapshot")
    app.emit({"dropped": dropped}, lambda _: output.say(f"dropped {snapshots} of {key}: {_some(dropped)}"))


def known_key(argument: str, store: AnyStore) -> str:
    """Return the key of the workspace that `argument` names: a key of the store, or host:DIR as for --backend.

    FileNotFoundError if it has no snapshots.
    """
    workspaces = store.workspaces()
    key = argument if argument in workspaces else os.fsdecode(from_wire_path(workspace_key(in_home(argument))))
    if key not in workspaces:
        close = did_you_mean(key, workspaces) or _FORM
        raise FileNotFoundError(errno.ENOENT, f"the store has no snapshots of this workspace: {key}{close}")
    return key


def _to_drop(store: AnyStore, key: str, names: tuple[str, ...], *, drop_all: bool, may_ask: bool) -> list[str]:
    """Return the snapshots to drop, which exist.  EBUSY for a snapshot that an interrupted restore needs."""
    there = [info.name for info in store.snapshots(key)]
    if drop_all:
        return there
    if not names:
        what = f"all {counted(len(there), 'snapshot')} of {key} ({_some(there)})"
        if not (may_ask and output.can_ask()):
            raise click.UsageError(f"this would drop {what}: name some, or add --all")
        if not output.confirm(f"Drop {what}?"):
            raise OSError(errno.ECANCELED, "nothing was dropped")
        return there
    for name in names:
        if name not in there:
            close = did_you_mean(name, there) or "; nothing was dropped"
            raise FileNotFoundError(errno.ENOENT, f"{key} has no snapshot {name}{close}")
    half_done = None if isinstance(store, RemoteStore) else store.interrupted(key)
    if half_done is not None:
        for name in sorted(set(names).intersection([half_done.snapshot, half_done.safety or ""])):
            advice = "mount it, and `vfsd status` says how; or drop everything with --all"
            what = f"{name} is needed to finish or undo the restore of {key} that was interrupted"
            raise OSError(errno.EBUSY, f"{what}: {advice}")
    return list(dict.fromkeys(names))


def _check_not_forked(store: Store, key: str, names: list[str]) -> None:
    """Raise OSError (EBUSY) if a running fork was made from one of the snapshots `names`."""
    instance = store.layout.workspace_id(key)
    for record in read_records():
        for each in record.ancestors if record.alive else ():
            if each.instance == instance and each.left_at.name in names:
                what = f"{each.left_at.name} is the base of the running fork {record.name}, which could not be merged"
                raise OSError(errno.EBUSY, f"{what} without it: unmount the fork first, or add --force")


def _check_no_journal(store: Store, key: str, names: list[str]) -> None:
    """Raise OSError (EBUSY) if a journal of this user is over one of the snapshots `names`."""
    journaled = bases_of_journals()
    for name in names:
        reason = journaled.get(store.fingerprint(key, name))
        if reason is not None:
            what = f"{name} is {reason}, which could not be mounted without it"
            raise OSError(errno.EBUSY, f"{what}: `vfsd persisted drop` removes that first, or add --force")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown}, and {len(names) - _NAMES_SHOWN:,} more"


# -- journals: vfsd persisted -----------------------------------------------------------------------
Callback = Callable[..., None]
_JOURNAL_EXAMPLES: Final = """
vfsd persisted list
vfsd persisted check demo
vfsd persisted drop demo
"""
_DIRECTORY: Final = "The journal in this directory, which the mount named with --journal-dir."
_USED: Final = "in use"
_KEPT: Final = "kept"


@click.group("persisted", cls=Group, acts_on_workspace=False, examples=_JOURNAL_EXAMPLES)
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


persisted_command.command_class = _DiskCommand

_JOURNAL_COLUMNS: Final = output.columns("NAME STATE SIZE:size DIRECTORY:path KIND BACKEND")


@persisted_command.command(
    "list",
    examples="""
    vfsd persisted list
    vfsd persisted list --json
    """,
)
@click.pass_obj
def list_journals_command(app: App) -> None:
    """List what workspaces take on disk: the journals, and the store of snapshots.

    The state of a journal is "in use" by a running daemon, or "kept".  Only `vfsd persisted check` reads a journal.
    Journals that --journal-dir put elsewhere are listed while their workspace runs.  A frozen workspace also has a
    snapshot of its directory in the store.  The line of the store has the kind "store".  The last column is the backend
    with which a mount continues a journal.  Lines on standard error say how to free the space.
    """
    places = {name: journal_directory(name) for name in journal_names()}
    places |= {record.name: record.journal for record in read_records() if record.journal is not None}
    rows = [_row(name, place) for name, place in sorted(places.items()) if has_journal(place)]
    store = default_directory()
    found = {"directory": wire_path(os.fsencode(store)), "size_bytes": disk_bytes(store)}
    stores = [found] if Layout(store).exists() else []
    app.emit({"journals": rows, "stores": stores}, lambda _: _show_journals(rows, stores))


def _row(name: str, directory: str) -> dict[str, Any]:
    return {
        "name": name,
        "state": _USED if is_locked(directory) else _KEPT,
        "size_bytes": disk_bytes(directory),
        "directory": wire_path(os.fsencode(directory)),
        "backend": journal_backend(directory),
        "frozen": is_frozen(directory),
    }


def _show_journals(rows: list[dict[str, Any]], stores: list[dict[str, Any]]) -> None:
    keys = ("name", "state", "size_bytes", "directory")
    kinds = {False: "journal", True: "journal, frozen"}
    cells = [[*(row[key] for key in keys), kinds[row["frozen"]], row["backend"]] for row in rows]
    cells += [[None, None, store["size_bytes"], store["directory"], "store", None] for store in stores]
    output.table(
        _JOURNAL_COLUMNS,
        cells,
        empty=f"there is no journal in {journals_directory()}; `vfsd mount --persist` keeps one",
    )
    if any(row["state"] == _USED for row in rows):
        output.note("`vfsd unmount --discard NAME` ends a workspace and its journal; `vfsd compact` makes one smaller")
    if any(row["state"] == _KEPT for row in rows):
        output.note("`vfsd mount DIR --persist --name NAME --backend BACKEND` continues a journal that is kept")
        output.note("`vfsd persisted drop NAME` removes the journal of a workspace that is not mounted")
    if stores:
        output.note("`vfsd prune --gc --keep-last N`, or `vfsd store drop` and `vfsd store gc`, make the store smaller")


@persisted_command.command(
    "check",
    examples="""
    vfsd persisted check demo
    vfsd persisted check --journal-dir /srv/journals/demo
    """,
)
@_of_journal
@click.pass_obj
def check_journal_command(app: App, name: str | None, journal_dir: str | None) -> None:
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
    app.emit(facts, lambda _: _show_journal(facts))


def _rebuilt(files: JournalFiles) -> MemoryVolume:
    # Start-up: only a check rebuilds a state.
    from protocol.backends.memory import MemoryVolume  # noqa: PLC0415
    from protocol.backends.overlay.lower import AbsentLower  # noqa: PLC0415

    volume = OverlayVolume(AbsentLower()) if files.identity.get("backend") == "overlay" else MemoryVolume()
    try:
        volume.replay(files.batches())
        volume.check_invariants()
    except (KeyError, AssertionError) as error:
        raise JournalDamagedError(files.directory, f"it does not describe a state ({error!r})") from error
    return volume


def _show_journal(facts: dict[str, Any]) -> None:
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


@persisted_command.command(
    "drop",
    examples="""
    vfsd persisted drop demo
    vfsd persisted drop --journal-dir /srv/journals/demo
    """,
)
@_of_journal
@click.pass_obj
def drop_journal_command(app: App, name: str | None, journal_dir: str | None) -> None:
    """Remove a journal, with the content and the snapshots in it.  Asks on a terminal.

    For an overlay that was mounted with --frozen, the command also removes the snapshot of the directory.
    A journal that a daemon uses is not removed, and neither is any other file in its directory.
    """
    directory = _directory(name, journal_dir)
    may_ask = not app.json and output.on_terminal(err=True)
    if may_ask and not is_locked(directory):
        size = output.human_size(sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory)))
        app.interrupted = "interrupted: nothing was removed"
        if not output.confirm(f"{directory} has a journal of {size}.  Remove it, with the content of the workspace?"):
            raise OSError(errno.ECANCELED, "nothing was removed")
    # Start-up, here and below: the other commands do without the daemon's modules.
    from vfsd.daemon.snapshots.bases import drop_journal_and_base  # noqa: PLC0415

    drop_journal_and_base(directory)
    app.emit({"dropped": wire_path(os.fsencode(directory))}, lambda _: output.say(f"removed the journal {directory}"))


def _directory(name: str | None, journal_dir: str | None) -> str:
    """Return the directory of the journal that the arguments name.  FileNotFoundError if it has none."""
    if (name is None) == (journal_dir is None):
        raise click.UsageError("give the NAME of a workspace, or its journal with --journal-dir DIR")
    directory = journal_directory(name) if name is not None else os.path.abspath(journal_dir or "")
    if not has_journal(directory):
        close = did_you_mean(name, journal_names()) if name is not None else None
        advice = close or " (`vfsd persisted list` shows all but those that --journal-dir put elsewhere)"
        raise FileNotFoundError(errno.ENOENT, f"there is no journal{advice}", directory)
    return directory
