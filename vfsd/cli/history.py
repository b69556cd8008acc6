"""`vfsd log` and `vfsd timeline`: which program changed what, and when; the snapshots, and who made their changes."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Any, Final

import click
import msgspec

from protocol.types import ChangeCounts
from vfsd.cli.common import output
from vfsd.cli.common.app import INTERRUPTED, App, Command, waking
from vfsd.cli.common.changes import PatientOutput, paged
from vfsd.cli.common.output import counted, show_path
from vfsd.cli.common.values import complete_path, complete_snapshot, with_similar_snapshots
from vfsd.client.connection import ControlClient
from vfsd.client.log import Following, followed
from vfsd.client.results import Snapshot
from vfsd.client.timeline import authors, timeline
from vfsd.machine.text import signed_counts, step_words
from vfsd.operations.snapshots import DiffResult
from vfsd.operations.workspace import LogEntry, LogResult, Overflow, ProcessRecord, WatchParams, nameless
from vfsd.wire.messages import ControlError, control_error
from vfsd.wire.options import BackendSpec

# -- points in time, as a user types them -----------------------------------------------------------
ACCEPTED: Final = "2h, '2 hours ago', today, yesterday, 10:30, 'yesterday 10:30', 2026-01-31 or 2026-01-31T10:30"

_SECONDS: Final = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
    **dict.fromkeys(("w", "week", "weeks"), 604_800),
}
_DAYS_AGO: Final = {"today": 0, "yesterday": 1}
# git's documentation writes 2.weeks.ago, which needs no quotes in a shell.
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?|an?\b)[\s.]*([a-z]+)[\s.,]*")
_CLOCK: Final = re.compile(r"(?:(today|yesterday)(?:\s+at)?\s+|at\s+)?(\d{1,2}):(\d\d)(?::(\d\d))?")


def parse_time(text: str, now: datetime) -> datetime | None:
    """Return the time that `text` means at `now`, which has a time zone; None if it is not a time.

    Days and times of day are local.  A time of day without a day is the last time that it was.  The words are those
    that `git log --since` takes, as far as ACCEPTED lists them.
    """
    words = " ".join(text.lower().split())
    try:
        return _age(words, now) or _day(words, now) or datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        return None


def _age(words: str, now: datetime) -> datetime | None:
    """Parse one or more amounts, such as `1h30m` or `2 hours ago`."""
    text = words.removesuffix("ago").rstrip(" .")
    seconds, at = 0.0, 0
    while at < len(text):
        amount = _AMOUNT.match(text, at)
        if amount is None or amount[2] not in _SECONDS:
            return None
        seconds += (1 if amount[1].startswith("a") else float(amount[1])) * _SECONDS[amount[2]]
        at = amount.end()
    return now - timedelta(seconds=seconds) if at else None


def _day(words: str, now: datetime) -> datetime | None:
    """Parse a named day, a time of day, or both."""
    if words == "now":
        return now
    if words in _DAYS_AGO:
        return _local(now, _DAYS_AGO[words], time())
    clock = _CLOCK.fullmatch(words)
    if clock is None:
        return None
    at = time(int(clock[2]), int(clock[3]), int(clock[4] or 0))
    found = _local(now, _DAYS_AGO.get(clock[1], 0), at)
    return _local(now, 1, at) if clock[1] is None and found > now else found


def _local(now: datetime, days_ago: int, at: time) -> datetime:
    return datetime.combine(now.date() - timedelta(days=days_ago), at).astimezone()


# -- vfsd log ---------------------------------------------------------------------------------------
_COMMAND_CHARACTERS: Final = 100  # of a command line that is shown
_COLUMNS: Final = output.columns("TIME:time PID CHANGE PATH:path SIZE:size COMMAND BELONGS-TO")
_entries: Final = msgspec.json.Decoder(LogEntry)


@click.command(
    "log",
    cls=Command,
    interrupted="stopped following the log",
    examples="""
    vfsd log                               # all changes that the log holds
    vfsd log src --since 10m               # below src, in the last ten minutes
    vfsd log --since before                # since the snapshot before
    vfsd log --since yesterday             # since midnight of the day before
    vfsd log --by npm                      # by npm and what it started
    vfsd log --follow --json | jq .path
    """,
)
@click.argument("paths", metavar="[PATH]...", nargs=-1, shell_complete=complete_path)
@click.option("-f", "--follow", is_flag=True, help="Go on, and print each change when it is made.")
@click.option(
    "--since",
    metavar="WHEN|SNAPSHOT",
    shell_complete=complete_snapshot,
    help=f"Only changes since then: a snapshot, or a time: {ACCEPTED}.",
)
@click.option("--by", metavar="PID|COMMAND", help="Only changes by this process or program, and by what it started.")
@click.pass_obj
def log_command(app: App, paths: tuple[str, ...], follow: bool, since: str | None, by: str | None) -> None:
    """Show which program changed what, and when.

    With PATHs, only changes of these paths, of what is below them, and removals and renames of whole directories above
    them.  Consecutive writes of a program to a file are one line, with the number of bytes.  The log holds the newest
    changes, about ten thousand of them; `vfsd mount --audit FILE.jsonl` keeps all.

    PID is 0 for pages that the kernel wrote back, and for programs that the daemon cannot see.  BELONGS-TO is the
    tool call, the command of `vfsd exec`, or the container that a program belongs to.

    In a pipe the columns are separated by tabs.  --json prints one document with all of them and the ancestors of each
    process; with --follow it prints one line for each change.
    """
    app.paths = paths
    selected = app.requests.selected_changes(paths, None, by)
    selected["since"], selected["since_ns"] = since, None if since is None else _since_ns(since)
    if follow:
        _follow(app, selected)
    else:
        _show(app, selected)


def _since_ns(text: str) -> int | None:
    """Parse a time; None if `text` is not a time, and so can only be a snapshot."""
    time = parse_time(text, datetime.now().astimezone())
    return None if time is None else int(time.timestamp() * 1e9)


def _with_times(error: FileNotFoundError, since: str | None) -> FileNotFoundError:
    """Return `error`; if it says that there is no snapshot `since`, with the times that --since takes."""
    if not isinstance(error, ControlError) or since is None or error.filename != since:
        return error
    better = control_error(error.code, f"{error}; times are written {ACCEPTED}", error.errno, since)
    return better if isinstance(better, FileNotFoundError) else error


def _show(app: App, selected: dict[str, Any]) -> None:
    from vfsd.client.requests import RemoteCall  # noqa: PLC0415 start-up: `vfsd log --help` needs none of it
    from vfsd.operations.workspace import LogParams  # noqa: PLC0415

    pieces: list[bytes] = []
    try:
        answer: LogResult = app.call(RemoteCall("log", LogParams(**selected)), on_output=pieces.append)
    except FileNotFoundError as error:
        raise _with_times(error, selected["since"]) from None
    lines = b"".join(pieces)
    limited = selected["paths"] or selected["by"] is not None or selected["since"] is not None
    empty = "no logged change matches" if limited else "no change is logged"
    with app.writing():
        if app.json:
            if limited and not lines:
                output.note(f"{empty}; the log has {output.counted(answer.logged, 'change')}")
            with PatientOutput() as out:
                out.write(b'{"entries":[' + b",".join(lines.splitlines()) + b'],"logged":%d' % answer.logged)
                out.write(b',"dropped":%d' % answer.dropped)
                out.write(b',"complete_since":' + msgspec.json.encode(answer.since))
                out.write(b',"file_missing":%d' % answer.file_missing)
                out.write(b',"file_problem":' + msgspec.json.encode(answer.file_problem) + b"}\n")
            return
        output.table(_COLUMNS, [_row(entry) for entry in _entries.decode_lines(lines)], empty=empty)
    if answer.dropped:
        reach = output.show_time(answer.since)
        output.note(f"{output.counted(answer.dropped, 'older change')} up to {reach} are not in the log any more")
    elif answer.begins_late:
        output.note(f"the log begins at {output.show_time(answer.since)}, when the daemon started")
    if answer.file_missing:
        lacks = f"the audit file lacks {output.counted(answer.file_missing, 'change')}"
        problem = answer.file_problem
        output.note(f"{lacks}; it is written again" if problem is None else f"{lacks}: {problem}")


def _follow(app: App, selected: dict[str, Any]) -> None:
    record = app.record(reads=True)
    record.check_alive()
    following = Following(record, WatchParams(**selected))
    try:
        records = followed(following, _opened)
        next(records)  # the watch has begun
        for each in records:
            if each is None:
                output.note(f"the daemon of {record.name} died; changes of its last seconds may be missing here")
            elif app.json:
                output.write_bytes(msgspec.json.encode(each) + b"\n")
            else:
                _say(each)
                sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None  # the usual end
    except FileNotFoundError as error:  # the daemon answers that there is no such snapshot
        raise _with_times(with_similar_snapshots(record, error), selected["since"]) from None
    except ConnectionError:
        if not following.is_unmounted:
            raise
        output.note(f"workspace {record.name} was unmounted")


@contextmanager
def _opened(following: Following) -> Iterator[Iterator[bytes]]:
    """Send the call of `following`; a signal ends the wait for its output."""
    client = ControlClient(following.socket)
    with waking(client), closing(client.stream(following.call)) as pieces:
        yield pieces


def _say(record: LogEntry | Overflow) -> None:
    if isinstance(record, Overflow):
        output.note(f"{output.counted(record.missing, 'change')} missing here: they came faster than they were read")
        return
    cells = [output.show_time(record.time) if output.on_terminal() else record.time, *_row(record)[1:]]
    separator = "  " if output.on_terminal() else "\t"
    output.say(separator.join("-" if cell is None else output.show_path(str(cell)) for cell in cells))


def _row(entry: LogEntry) -> list[str | int | None]:
    return [
        entry.time,
        entry.pid,
        entry.change if entry.attempt is None else f"denied {entry.attempt}",
        _place(entry),
        entry.bytes,
        "(the kernel, or another pid namespace)" if entry.process is None else _command(entry.process),
        entry.label or (entry.container and f"container {entry.container}"),
    ]


def _place(entry: LogEntry) -> str:
    if entry.count != 1 or entry.paths:
        shown = ", ".join(entry.paths[:3])
        return f"{output.counted(entry.count, 'path')}: {shown}{', ...' if entry.count > 3 else ''}"
    path = nameless(entry.attempt) if entry.path is None else entry.path or "."
    if entry.to is not None:
        return f"{path} -> {entry.to}"
    if entry.of is not None:
        return f"{path} = {entry.of}"
    return f"{path} (one of {entry.links} names)" if entry.links > 1 else path


def _command(process: ProcessRecord) -> str:
    """The command line in one line, shortened; the name in brackets, as ps(1) writes it, if it is not known."""
    text = " ".join(process.command) or f"[{process.name}]"
    shown = text[:_COMMAND_CHARACTERS]
    return shown + "..." if shown != text or process.truncated else shown


# -- vfsd timeline ----------------------------------------------------------------------------------
_STATES: Final = 30  # shown by default
_AUTHORS: Final = 4  # named for each state on a terminal
_ATTEMPTS: Final = 5  # to count the live changes while programs drop snapshots
_WIDEST: Final = 100  # columns of text, also on a wider terminal
_INDENT: Final = "  "
_TIMELINE_COLUMNS: Final = output.columns("NAME TIME:time CHANGED AUTHORS KIND TAG STEP")


@dataclass(frozen=True, slots=True)
class _State:
    """A state of the timeline.  `snapshot` is None for the live state.  `changes` is None if they were not counted."""

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
            _show_timeline(shown)
        else:
            output.table(_TIMELINE_COLUMNS, [_timeline_row(state) for state in shown], empty="")
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
def _timeline_row(state: _State) -> list[str | None]:
    taken = state.snapshot
    names = None if not state.authors else ", ".join(name for name, _ in state.authors)
    if taken is None:
        return [None, None, signed_counts(state.changes), names, "live", None, None]
    time = taken.created_at.isoformat()
    return [taken.name, time, signed_counts(state.changes), names, taken.kind, taken.tag, step_words(taken.step)]


def _show_timeline(states: Sequence[_State]) -> None:
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
