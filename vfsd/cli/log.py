"""`vfsd log`: who changed what, and when."""

from __future__ import annotations

import itertools
import sys
from contextlib import closing
from datetime import datetime
from typing import Any, Final

import click
import msgspec

from vfsd.cli.common import output
from vfsd.cli.common.app import INTERRUPTED, App, Command
from vfsd.cli.common.interrupts import waking
from vfsd.cli.common.names import complete_path, complete_snapshot, with_similar_snapshots
from vfsd.cli.common.streamed import PatientOutput
from vfsd.cli.common.times import ACCEPTED, parse_time
from vfsd.client.connection import ControlClient
from vfsd.client.log import next_daemon
from vfsd.operations.log import LogEntry, LogResult, Overflow, ProcessRecord, WatchParams, nameless
from vfsd.wire.messages import ControlError, control_error

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
    from vfsd.operations.log import LogParams  # noqa: PLC0415

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
    try:
        while True:
            try:
                _print_changes(app, record.socket, WatchParams(**selected))
            except FileNotFoundError as error:
                if isinstance(error, ControlError):  # the daemon answers that there is no such snapshot
                    raise _with_times(with_similar_snapshots(record, error), selected["since"]) from None
                found = next_daemon(record.name, record.mountpoint, record.pid)  # its socket is gone
            except (ConnectionResetError, ConnectionRefusedError):
                found = next_daemon(record.name, record.mountpoint, record.pid)
            if found is None:
                output.note(f"workspace {record.name} was unmounted")
                return
            record = found
            output.note(f"the daemon of {record.name} died; changes of its last seconds may be missing here")
            selected |= {"since": None, "since_ns": 0}  # all that the log of the next daemon has
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None  # the usual end


def _print_changes(app: App, socket: str, params: WatchParams) -> None:
    """Print changes until the daemon ends: ConnectionResetError."""
    from vfsd.client.log import WatchedLines, decode_watched  # noqa: PLC0415 start-up
    from vfsd.client.requests import RemoteCall  # noqa: PLC0415

    client = ControlClient(socket)
    with waking(client), closing(client.stream(RemoteCall("watch", params))) as pieces:
        lines = WatchedLines()
        for line in itertools.chain.from_iterable(map(lines.feed, pieces)):
            if app.json:
                output.write_bytes(line + b"\n")
            else:
                _say(decode_watched(line))
                sys.stdout.flush()


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
