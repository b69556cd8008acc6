"""Print changes, as a letter and a path or as `git diff --stat` does, and problems and dropped snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import click

from protocol.errors import shortened
from protocol.types import ChangeCounts
from vfsd.cli.common import output
from vfsd.cli.common.output import counted
from vfsd.cli.common.wording import LETTERS, change_line, outcome_lines, with_slash
from vfsd.machine.text import link_note
from vfsd.operations.declaration import ChangeRecord, ExpiredRecord, RepositoryRecord
from vfsd.operations.snapshots import ImportResult, ProblemRecord, RestoreResult

_COLOURS: Final = {"added": "green", "modified": "yellow", "removed": "red", "type": "magenta", "metadata": "cyan"}
_GRAPH_COLUMNS: Final = 40
_REASONS: Final = {"unneeded": "no undo or redo leads to it any more", "memory": "memory was needed"}
_PROBLEMS_SHOWN: Final = 20


def show_changes(changes: Iterable[ChangeRecord]) -> None:
    """Print one line for each change: "A path"."""
    for change in changes:
        letter = click.style(LETTERS[change.change], fg=_COLOURS[change.change])
        output.say(f"{letter} {_path(change)}{_link_note(change)}")


def plain_change(change: ChangeRecord) -> str:
    """Format a change for a pipe."""
    return f"{change_line(change.change, _path(change))}{_link_note(change)}"


def _link_note(change: ChangeRecord) -> str:
    return link_note(change.linked_to, change.unlinked_from)


def note_problems(problems: Sequence[ProblemRecord]) -> bool:
    """Print the first problems on standard error; return whether there are more."""
    for problem in problems[:_PROBLEMS_SHOWN]:
        output.note(f"{shortened(problem.path)}: {problem.reason}")
    return len(problems) > _PROBLEMS_SHOWN


def show_problems(problems: Sequence[ProblemRecord], verb: str = "could not be restored") -> None:
    """Print problems on standard error; if there are any, the command exits with status 1."""
    if problems:
        more = " (the first of them are above; --json lists all)" if note_problems(problems) else ""
        output.report(f"{counted(len(problems), 'path')} {verb}{more}")
        click.get_current_context().exit(1)


def show_repositories(records: Sequence[RepositoryRecord]) -> None:
    """Say what became of git repositories that both sides changed, and print the commands that take commits over."""
    for record in records:
        output.note(f"{output.show_path(record.path)}: {record.detail}")
        for command in record.commands:
            output.say(f"  {command}")


def show_outcome(what: str, answer: RestoreResult | ImportResult) -> None:
    """Print the counts of a change, the safety snapshot with the state before it, and the snapshots that were dropped.

    `what` says what was done, such as "restored turn-3".
    """
    for line in outcome_lines(what, answer.counts, answer.safety_snapshot, getattr(answer, "older", 0)):
        output.say(line)
    show_expired(answer.expired)


def show_expired(expired: Sequence[ExpiredRecord], show: Callable[[str], None] = output.say) -> None:
    """Name the snapshots that the daemon dropped, one line each."""
    for record in expired:
        show(f"dropped {record.name}, taken {_age(record.created_at)} ago: {_REASONS[record.reason]}")


def _age(created_at: str) -> str:
    seconds = max(0, int((datetime.now(UTC) - datetime.fromisoformat(created_at)).total_seconds()))
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            return counted(seconds // length, unit)
    return "less than a minute"


def show_stat(changes: Iterable[ChangeRecord], counts: ChangeCounts) -> None:
    """Print a line for each change, as `git diff --stat` does, and a line of totals.  Iterates twice."""
    width = most = added = removed = 0
    for change in changes:
        width = max(width, len(_path(change)))
        most = max(most, _lines(change))
        added += change.lines_added or 0
        removed += change.lines_removed or 0
    figures = max(len(str(most)), len("Bin"))
    for change in changes:
        output.say(f" {_path(change).ljust(width)} | {_stat_of(change, figures, most)}".rstrip())
    words = [f" {counted(counts.added + counts.modified + counts.removed, 'path')} changed"]
    words += [f"{counted(added, 'insertion')}(+)"] if added else []
    words += [f"{counted(removed, 'deletion')}(-)"] if removed else []
    output.say(", ".join(words))


def _path(change: ChangeRecord) -> str:
    """Format the path; a directory has a slash at its end."""
    return with_slash(output.show_path(change.path), change.type)


def _lines(change: ChangeRecord) -> int:
    return (change.lines_added or 0) + (change.lines_removed or 0)


def _stat_of(change: ChangeRecord, figures: int, most: int) -> str:
    if change.binary:
        return f"{'Bin'.rjust(figures)} {change.old_size or 0} -> {change.new_size or 0} bytes"
    if not _lines(change):
        return f"{'0'.rjust(figures)} {change.change} {change.type}{_link_note(change)}"
    graph = click.style("+" * _scaled(change.lines_added, most), fg="green")
    graph += click.style("-" * _scaled(change.lines_removed, most), fg="red")
    return f"{str(_lines(change)).rjust(figures)} {graph}"


def _scaled(lines: int | None, most: int) -> int:
    """Scale `lines` to columns, `most` being _GRAPH_COLUMNS wide.  A change is at least one column wide."""
    if not lines or most <= _GRAPH_COLUMNS:
        return lines or 0
    return max(1, lines * _GRAPH_COLUMNS // most)
