"""`vfsd prune`: remove snapshots by a policy."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from protocol.store.object_store import RemoteStore
from protocol.store.retention import Candidate, Period, Policy, judge
from protocol.volume_extensions import SnapshotInfo
from vfsd.cli.common import output
from vfsd.cli.common.app import App
from vfsd.cli.common.object_stores import RemoteCommand, selecting
from vfsd.cli.common.output import counted
from vfsd.cli.store import AnyStore, collected, known_key, note_damaged, opened, wait_option
from vfsd.client.requests import workspace_key
from vfsd.daemon.snapshots.base import is_merge_base, is_staged
from vfsd.machine.directories import bases_of_journals
from vfsd.operations.snapshots import SnapshotRecord, SnapshotsResult
from vfsd.wire.messages import from_wire_path, wire_path
from vfsd.wire.options import BackendSpec

_SAFETY: Final = "safety snapshot"
_REPLACED: Final = "replaced meanwhile"
_COLUMNS: Final = output.columns("WORKSPACE ACTION NAME TIME:time TAG REASONS")
_NARROW: Final = output.columns("ACTION NAME TIME:minute TAG REASONS")


if TYPE_CHECKING:
    from protocol.store.store import Choose

    _Parameter = click.ParamType[Period]
else:  # generic only in newer versions of click than the oldest supported one
    _Parameter = click.ParamType


class _PeriodType(_Parameter):
    name = "period"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Period:
        try:
            return value if isinstance(value, Period) else Period.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _policy_options(function: Callable[..., None]) -> Callable[..., None]:
    spans = {"hourly": "hours", "daily": "days", "weekly": "weeks", "monthly": "months", "yearly": "years"}
    options = [
        click.option("--keep-last", metavar="N", type=click.IntRange(min=1), help="Keep the last N snapshots."),
        *(
            click.option(
                f"--keep-{name}",
                metavar="N",
                type=click.IntRange(min=1),
                help=f"Keep the newest snapshot of each of the last N {spans[name]} that have any.",
            )
            for name in spans
        ),
        click.option("--keep-within", metavar="PERIOD", type=_PeriodType(), help="Keep all of that period: 1y5m7d2h."),
        *(
            click.option(
                f"--keep-within-{name}",
                metavar="PERIOD",
                type=_PeriodType(),
                help=f"Keep the newest of each {spans[name][:-1]} of that period.",
            )
            for name in spans
        ),
        click.option(
            "--keep-tag",
            metavar="PATTERN",
            multiple=True,
            help="Keep those whose tag matches (*, ? and [...]); may be repeated.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command(
    "prune",
    cls=RemoteCommand,
    interrupted="interrupted: some of the snapshots may be removed; the same command removes the others",
    examples="""
    vfsd prune --keep-last 10 --keep-daily 7 --dry-run         # show what would be kept, and why
    vfsd prune --keep-last 10 --keep-daily 7
    vfsd prune --keep-within 14d --keep-tag 'release*' host:~/project
    vfsd prune --keep-last 20 -w scratch                       # a workspace in memory
    vfsd prune --keep-daily 30 --store s3://bucket/team/job-7
    """,
)
@_policy_options
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be kept and removed, and remove nothing.")
@click.option("--gc", "collect", is_flag=True, help="Then free the disk space, as `vfsd store gc` does.")
@click.option(
    "--store",
    metavar="DIR|URL",
    type=click.Path(file_okay=False),
    help="Use the store in this directory, or the object store at this URL, instead of the default one.",
)
@wait_option(help="How long to wait for snapshots, restores and readers of the store on disk to end.")
@click.argument("keys", metavar="[host:DIR]...", nargs=-1)
@click.pass_obj
def prune_command(
    app: App,
    /,
    *,
    keys: tuple[str, ...],
    keep_tag: tuple[str, ...],
    dry_run: bool,
    collect: bool,
    store: str | None,
    store_options: tuple[str, ...],
    wait: float,
    **rules: Any,
) -> None:
    """Remove the snapshots that no rule keeps.

    Without -w the command works on the store, wherever you run it: on all its workspaces, mounted or not, or on those
    that are named as `vfsd store list` prints them.  With -w it works on the snapshots in the memory of a running
    workspace.  It applies the rules to each workspace by itself, prints which snapshots it keeps and why, and removes
    the others.  At least one --keep option is needed.  Run it with --dry-run first.

    The rules are those of `restic forget`.  A snapshot is kept if any rule keeps it.  "The newest snapshot of each of
    the last 7 days" counts only days that have snapshots, in the time zone of this machine.  Periods count back from
    the newest snapshot of the workspace, not from now.

    Never removed: safety snapshots (`vfsd restore --undo` needs them), snapshots that are mounted or the base of a
    running fork or of a later merge, snapshots that an interrupted restore needs, and those below a workspace that
    `vfsd persisted list` shows.  The rules do not count safety snapshots.

    Only names are removed.  `vfsd store gc` frees the disk space, and --gc does both.

    With --store URL the command works on an object store that `vfsd push` made.  Other machines can push to it
    meanwhile: what they push stays.  Nothing there says that another machine uses a snapshot, so keep those that are
    used.
    """
    policy = Policy(**{name.removeprefix("keep_"): rule for name, rule in rules.items() if rule}, tags=keep_tag)
    if policy.is_empty:
        raise click.UsageError("this would remove every snapshot: add a rule, such as --keep-last 10")
    if app.workspace is not None:
        if keys or store is not None or collect:
            raise click.UsageError("-w goes with neither host:DIR nor --store nor --gc")
        _prune_running(app, policy, dry_run=dry_run)
        return
    run = _Run(policy, dry_run=dry_run)
    with opened(store, store_options) as found:
        _prune_store(app, found, run, keys, wait_s=wait, collect=collect)


# -- a store --------------------------------------------------------------------------------------
class _Run:
    """A prune of a store.  `workspaces` is what the answer says of each workspace that was judged."""

    def __init__(self, policy: Policy, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.workspaces: list[dict[str, Any]] = []
        self._policy = policy
        self._now_ns = time.time_ns()

    def choosing(self, keys: Sequence[str], store: AnyStore) -> Choose:
        """Return the function that chooses what to remove of the workspaces `keys`; none: of all."""
        chosen = {known_key(key, store) for key in keys}

        def choose(key: str, infos: Sequence[SnapshotInfo], needed: Mapping[str, str]) -> Iterable[str]:
            if chosen and key not in chosen:
                return ()
            # `vfsd export` and `import` have temporary snapshots.
            shown = [info for info in infos if not is_staged(info.name)]
            needed = {**{info.name: info.tag or "" for info in infos if is_merge_base(info)}, **needed}
            workspace = _judged(wire_path(os.fsencode(key)), self._policy, shown, needed, self._now_ns)
            self.workspaces.append(workspace)
            return () if self.dry_run else [each["name"] for each in workspace["remove"]]

        return choose

    def keep_replaced(self, names: Collection[str]) -> None:
        """Say that the snapshots `names` were not removed, because another process has replaced them."""
        for workspace in self.workspaces:
            kept = [{**each, "reasons": [_REPLACED]} for each in workspace["remove"] if each["name"] in names]
            workspace["remove"] = [each for each in workspace["remove"] if each["name"] not in names]
            workspace["keep"] = sorted(workspace["keep"] + kept, key=lambda each: each["created_at"], reverse=True)

    def answer(self, store: AnyStore, freed: object) -> dict[str, Any]:
        """Return the answer."""
        place = wire_path(os.fsencode(store.directory))
        damaged = [wire_path(os.fsencode(path)) for path in store.damaged_snapshots()]
        return {
            "store": place, "dry_run": self.dry_run, "workspaces": self.workspaces, "damaged": damaged, "freed": freed,
        }  # fmt: skip


def _prune_store(app: App, store: AnyStore, run: _Run, keys: Sequence[str], *, wait_s: float, collect: bool) -> None:
    choose = run.choosing(keys, store)
    if isinstance(store, RemoteStore):
        run.keep_replaced(store.prune(choose))
    else:
        store.prune(choose, wait_s=wait_s, journals=bases_of_journals)
    freed, show_freed = collected(store, wait_s) if collect and not run.dry_run else (None, None)
    app.emit(run.answer(store, freed), lambda answer: _show_store(answer, store, show_freed))


# -- a running workspace --------------------------------------------------------------------------
def _prune_running(app: App, policy: Policy, *, dry_run: bool) -> None:
    record = app.record(reads=dry_run)
    spec = BackendSpec.split(record.backend)
    if spec.kind not in ("memory", "overlay"):
        key = os.fsdecode(from_wire_path(workspace_key(record.backend)))
        advice = f"name it as `vfsd store list` does, without -w: vfsd prune ... {key}"
        raise OSError(errno.EOPNOTSUPP, f"the snapshots of {record.name} are in the store: {advice}")
    listed: SnapshotsResult = app.call(app.requests.snapshots(changes=False))
    infos = [_info(each, serial) for serial, each in enumerate(listed.snapshots)]
    needed = {each.name: each.needed for each in listed.snapshots if each.needed}
    workspace = _judged(record.name, policy, infos, needed, time.time_ns())
    if workspace["remove"] and not dry_run:
        app.call(app.requests.drop_unneeded({each["name"]: each["created_at"] for each in workspace["remove"]}))
    answer = {"store": None, "dry_run": dry_run, "workspaces": [workspace], "damaged": [], "freed": None}
    app.emit(answer, lambda answer: _show(answer, "no snapshots"))


def _info(record: SnapshotRecord, serial: int) -> SnapshotInfo:
    created_us = round(datetime.fromisoformat(record.created_at).timestamp() * 1e6)
    return SnapshotInfo(
        record.name, serial, created_us * 1000, record.files, record.directories, record.size_bytes, record.tag,
        record.kind,
    )  # fmt: skip


# -- both -----------------------------------------------------------------------------------------
def _judged(
    workspace: str, policy: Policy, infos: Sequence[SnapshotInfo], needed: Mapping[str, str], now_ns: int
) -> dict[str, Any]:
    """Return what the answer says of one workspace: what is kept, with the reasons, and what is removed."""
    # Newest first: `judge` keeps this order for snapshots with the same time.
    judged = judge(
        policy,
        [Candidate(info.name, info.created_ns, info.tag) for info in reversed(infos) if info.kind != "safety"],
        now_ns,
    )
    reasons = {verdict.name: verdict.reasons for verdict in judged}
    keep, remove = [], []
    for info in reversed(infos):
        why = [_SAFETY] if info.kind == "safety" else list(reasons[info.name])
        if info.name in needed:
            why.append(needed[info.name])
        created_at = datetime.fromtimestamp(info.created_ns / 1e9, UTC).isoformat(timespec="milliseconds")
        shown = {"name": info.name, "created_at": created_at, "kind": info.kind, "tag": info.tag}
        if why:
            keep.append({**shown, "reasons": why})
        else:
            remove.append(shown)
    return {"workspace": workspace, "keep": keep, "remove": remove}


def _show_store(answer: dict[str, Any], store: AnyStore, show_freed: Callable[[], None] | None) -> None:
    note_damaged(answer["damaged"], store)
    where = f" in {output.show_path(answer['store'])}" if selecting(store) else " in the store"
    hint = "" if isinstance(store, RemoteStore) else " (-w NAME prunes those in the memory of a workspace)"
    advice = "" if show_freed else f"; `vfsd store gc{selecting(store)}` frees their disk space"
    _show(answer, f"no snapshots{where}{hint}", advice)
    if show_freed:
        show_freed()


def _show(answer: dict[str, Any], empty: str, advice: str = "") -> None:
    """Print what was kept and removed.  `advice` follows the number of removed snapshots."""
    workspaces, dry_run = answer["workspaces"], answer["dry_run"]
    verb = "would remove" if dry_run else "removed"
    on_terminal = output.on_terminal()
    rows = []
    for workspace in workspaces:
        name = output.show_path(workspace["workspace"])
        group = [("keep", each) for each in workspace["keep"]]
        group += [("remove" if dry_run else "removed", each) for each in workspace["remove"]]
        shown = [
            (action, each["name"], each["created_at"], each["tag"], ", ".join(each.get("reasons", ())))
            for action, each in group
        ]
        if on_terminal and shown:
            output.say(click.style(name, bold=True))
            output.table(_NARROW, [tuple(cell or "" for cell in row) for row in shown], empty="")
            output.say("")
        rows += [(workspace["workspace"], *row) for row in shown]
    if not rows:
        output.note(f"{empty}; nothing was removed")
        return
    if not on_terminal:
        output.table(_COLUMNS, rows, empty="")
    removed = sum(len(workspace["remove"]) for workspace in workspaces)
    kept = sum(len(workspace["keep"]) for workspace in workspaces)
    tail = advice if removed and not dry_run else ""
    output.note(f"{verb} {counted(removed, 'snapshot')}, {'would keep' if dry_run else 'kept'} {kept:,}{tail}")
