"""`vfsd timeline`: the snapshots in order, with what each changed and who did it."""

from __future__ import annotations

import contextlib
import errno
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from protocol.types import ChangeCounts
from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.output import counted, show_path
from vfsd.cli.common.paging import paged
from vfsd.cli.common.wording import signed_counts, step_words
from vfsd.client.results import Snapshot
from vfsd.client.timeline import authors, timeline
from vfsd.operations.log import LogResult
from vfsd.operations.snapshots import DiffResult
from vfsd.wire.options import BackendSpec

_STATES: Final = 30  # shown by default
_AUTHORS: Final = 4  # named for each state on a terminal
_ATTEMPTS: Final = 5  # to count the live changes while programs drop snapshots
_WIDEST: Final = 100  # columns of text, also on a wider terminal
_INDENT: Final = "  "
_COLUMNS: Final = output.columns("NAME TIME:time CHANGED AUTHORS KIND TAG STEP")


@dataclass(frozen=True, slots=True)
class _State:
    """A state of the timeline.  `snapshot` is None for the live state, `changes` if they were not counted."""

    snapshot: Snapshot | None
    changes: ChangeCounts | None
    authors: Sequence[tuple[str, int]] | None  # with their numbers of log entries, the largest first; None: no log

    def document(self) -> dict[str, Any]:
        taken = self.snapshot
        return {
            "name": None if taken is None else taken.name,
            "created_at": None if taken is None else taken.created_at.isoformat(),
            "kind": "live" if taken is None else taken.kind,
            "tag": None if taken is None else taken.tag,
            "step": None if taken is None else taken.step,
            "changes": self.changes,
            "authors": None
            if self.authors is None
            else [{"name": name, "entries": entries} for name, entries in self.authors],
        }


@click.command(
    "timeline",
    cls=Command,
    examples="""
    vfsd timeline
    vfsd timeline -n 5                     # the five newest states
    vfsd timeline --no-changes             # without the counts, at once
    vfsd timeline --json | jq '.states[-1].authors'
    """,
)
@click.option(
    "-n",
    "--number",
    metavar="N",
    type=click.IntRange(min=1),
    default=_STATES,
    show_default=True,
    help="Show the N newest states.",
)
@click.option("--no-changes", is_flag=True, help="Do not count the changes; faster in a large directory.")
@click.pass_obj
def timeline_command(app: App, number: int, no_changes: bool) -> None:
    """Show the snapshots, what each changed, and who did it.

    The newest state is the last one: the live state.  Each state has its changes since the state before it (+added
    ~modified -removed), and the programs that made them.  If a program belongs to a tool call or to a command of `vfsd
    exec`, that is shown instead.  The first snapshot is compared with an empty directory; in an overlay, with the
    directory below.

    The programs come from the log (see `vfsd log`), which holds the newest changes, about ten thousand of them.  A
    remark says from which time on it is complete.

    On a terminal the output goes through $VFSD_PAGER, else $PAGER, else `less`.  In a pipe the columns are separated by
    tabs: name ("-" for the live state), time, changes, programs, kind, tag, step.
    """
    snapshots, live = _changes(app, number - 1, is_counted=not no_changes)
    found, log = _authors(app, snapshots)
    states = [_state(each, each.changes, found) for each in snapshots] + [_state(None, live, found)]
    older, shown = len(states[:-number]), states[-number:]
    with app.writing():
        if app.json:
            documents = [state.document() for state in shown]
            since = None if log is None else log.since
            output.print_json({"states": documents, "older": older, "authors_since": since})
        elif output.on_terminal():
            _show(shown)
        else:
            output.table(_COLUMNS, [_row(state) for state in shown], empty="")
    if older and not app.json:
        output.note(f"{counted(older, 'older snapshot')} not shown; `vfsd timeline -n {len(states)}` shows all")
    if log is not None and log.dropped and not app.json:
        output.note(f"the log does not reach back to changes before {output.show_time(log.since)}")


def _changes(app: App, counted_snapshots: int, *, is_counted: bool) -> tuple[Sequence[Snapshot], ChangeCounts | None]:
    """Return the snapshots, oldest first, and the changes of the live state since the newest of them.

    The changes of the newest `counted_snapshots` are counted.
    The changes are None if they are not counted, if there is no state to compare the live state with, or if programs
    drop snapshots faster than they can be compared.
    """
    is_overlay = BackendSpec.split(app.record(reads=True).backend).kind == "overlay"
    listing = app.requests.snapshots(changes=is_counted)
    listing.params.newest = counted_snapshots
    for _ in range(_ATTEMPTS):
        snapshots: Sequence[Snapshot] = listing.result(app.call(listing))
        newest = snapshots[-1].name if snapshots else None
        if not is_counted or (newest is None and not is_overlay):
            break
        with contextlib.suppress(FileNotFoundError):  # the newest snapshot was dropped since it was listed
            found: DiffResult = app.call(app.requests.diff(newest, complete=False), label="comparing")
            return snapshots, found.counts
    return snapshots, None


def _authors(
    app: App, snapshots: Sequence[Snapshot]
) -> tuple[Mapping[str | None, Counter[str]] | None, LogResult | None]:
    """Return who made the changes that led to each state, by its name, and the log's answer; None without a log."""
    request = authors(timeline(snapshots))
    try:
        log: LogResult = app.call(request)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:  # mounted with --no-audit
            raise
        return None, None
    return request.result(log), log


def _state(
    snapshot: Snapshot | None, changes: ChangeCounts | None, found: Mapping[str | None, Counter[str]] | None
) -> _State:
    name = None if snapshot is None else snapshot.name
    return _State(snapshot, changes, None if found is None else found[name].most_common())


# -- text -------------------------------------------------------------------------------------------
def _row(state: _State) -> list[str | None]:
    taken = state.snapshot
    names = None if not state.authors else ", ".join(name for name, _ in state.authors)
    if taken is None:
        return [None, None, signed_counts(state.changes), names, "live", None, None]
    time = taken.created_at.isoformat()
    return [taken.name, time, signed_counts(state.changes), names, taken.kind, taken.tag, step_words(taken.step)]


def _show(states: Sequence[_State]) -> None:
    """Print the states for a terminal, each line in the terminal's width except for long words."""
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    with paged():
        for state in states:
            _show_state(state, width)


def _show_state(state: _State, width: int) -> None:
    taken = state.snapshot
    if taken is None:
        output.say(click.style("live state", fg="green", bold=True))
        facts = []
    else:
        marks = ", ".join(filter(None, (taken.kind if taken.kind != "user" else None, step_words(taken.step))))
        output.say(click.style(show_path(taken.name), fg="yellow", bold=True) + (f"  ({marks})" if marks else ""))
        facts = [output.show_time(taken.created_at.isoformat())]
    if state.changes is not None:
        facts.append(_coloured_counts(state.changes))
    if facts:
        output.say(_INDENT + "  ".join(facts))
    if state.authors:
        more = ", ..." if len(state.authors) > _AUTHORS else ""
        _say_wrapped("by " + ", ".join(show_path(name) for name, _ in state.authors[:_AUTHORS]) + more, width)
    if taken is not None and taken.tag:
        _say_wrapped(show_path(taken.tag), width)


def _coloured_counts(counts: ChangeCounts) -> str:
    """Format as `signed_counts` does, with the colours of `vfsd diff`; what is 0 has none."""
    parts = (("+", counts.added, "green"), ("~", counts.modified, "yellow"), ("-", counts.removed, "red"))
    return " ".join(click.style(f"{sign}{count}", fg=colour) if count else f"{sign}0" for sign, count, colour in parts)


def _say_wrapped(text: str, width: int) -> None:
    wrapper = textwrap.TextWrapper(
        width,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT * 2,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in wrapper.wrap(text):
        output.say(line)
