"""The output of commands: tables, JSON, progress and errors, for people on a terminal and for programs in a pipe.

On a terminal tables have headings and colours and sizes are rounded.  In a pipe each row is one line of
tab-separated fields without a heading, with sizes in bytes and times in ISO 8601, for `cut` and `awk`.
rich is imported only to write to a terminal, because importing it takes longer than most commands.
"""

from __future__ import annotations

import binascii
import codecs
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from vfsd.machine.text import counted as counted  # noqa: PLC0414 (here and below: commands use them as part of this module)
from vfsd.machine.text import human_size as human_size  # noqa: PLC0414
from vfsd.machine.text import show_path as show_path  # noqa: PLC0414

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    from vfsd.machine.text import Cell, Kind
    from vfsd.wire.messages import ProgressReport


_WIDEST_TABLE: Final = 100_000  # columns


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    kind: Kind = "text"


def columns(text: str) -> tuple[Column, ...]:
    """Make columns from headings with an optional kind: "NAME FILES:count"."""
    return tuple(Column(*word.split(":")) for word in text.split())  # type: ignore[arg-type]


# -- values ---------------------------------------------------------------------------------------
def on_terminal(*, err: bool = False) -> bool:
    """Return whether standard output (or standard error) is a terminal."""
    return (sys.stderr if err else sys.stdout).isatty()


def silence_s() -> float:
    """Return after how many seconds a command that waits for another machine says so: a person waits at a terminal."""
    return 1.5 if on_terminal(err=True) else 10.0


def has_colours() -> bool:
    """Return whether a terminal supports colours, and NO_COLOR (https://no-color.org) does not forbid them."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in {"", "dumb"}


def show_time(iso: str) -> str:
    """Format an ISO 8601 time in the local time zone."""
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _plain(cell: Cell, kind: Kind) -> str:
    if cell is None:
        return "-"
    return show_path(cell) if kind in {"text", "path"} and isinstance(cell, str) else str(cell)


def _pretty(cell: Cell, kind: Kind) -> str:
    if cell is None:
        return "-"
    if kind == "size":
        return human_size(int(cell))
    if kind == "count":
        return f"{cell:,}"
    if kind in {"time", "minute"}:
        return show_time(str(cell))[: len("2026-01-02 03:04") if kind == "minute" else None]
    return _plain(cell, kind)


# -- standard output ------------------------------------------------------------------------------
def say(text: str) -> None:
    """Print a line on standard output.  Colours are removed unless it is a terminal."""
    click.echo(text)


def write_bytes(data: bytes) -> None:
    """Write bytes to standard output."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def print_json(value: Any) -> None:
    """Print a JSON document: in one line in a pipe, indented on a terminal."""
    import msgspec  # noqa: PLC0415 start-up: `vfsd --help` needs none

    encoded = msgspec.json.encode(value)
    if on_terminal():
        encoded = msgspec.json.format(encoded, indent=2)
    click.echo(encoded.decode())


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, empty: str) -> None:
    """Print rows under headings on a terminal, or the note `empty`; in a pipe one tab-separated line each."""
    if not on_terminal():
        for row in rows:
            click.echo("\t".join(_plain(cell, column.kind) for cell, column in zip(row, columns, strict=True)))
        return
    if not rows:
        note(empty)
        return
    from rich.table import Table  # noqa: PLC0415 start-up, see the module's docstring
    from rich.text import Text  # noqa: PLC0415 start-up

    drawn = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.kind in {"size", "count"} else "left"
        drawn.add_column(column.heading, justify=justify, no_wrap=True)
    for row in rows:
        # Text, so that brackets in a name are not interpreted as markup.
        drawn.add_row(*(Text(_pretty(cell, column.kind)) for cell, column in zip(row, columns, strict=True)))
    # As wide as its content: the terminal wraps long lines, and no name or path is truncated.
    console = _console()
    measured = console.measure(drawn, options=console.options.update(width=_WIDEST_TABLE))
    console.width = max(console.width, measured.maximum)
    console.print(drawn)


def fields(pairs: Sequence[tuple[Column, Cell]]) -> None:
    """Print names and values, one pair a line: aligned on a terminal, separated by a tab in a pipe."""
    if on_terminal():
        width = max(len(column.heading) for column, _ in pairs)
        for column, cell in pairs:
            say(f"{click.style(column.heading.ljust(width), bold=True)}  {_pretty(cell, column.kind)}")
    else:
        for column, cell in pairs:
            say(f"{column.heading}\t{_plain(cell, column.kind)}")


# -- standard error -------------------------------------------------------------------------------
def note(message: str) -> None:
    """Print a remark on standard error."""
    click.echo(f"vfsd: {show_path(message)}", err=True)


def note_hidden(count: int) -> None:
    """Say how many names something lacks because the policy of the workspace hides them."""
    if count:
        note(f"{counted(count, 'hidden name')} left out: the policy of the workspace hides them")


def report(message: str) -> None:
    """Print the one line that says why a command failed."""
    line = " ".join(message.split("\n"))
    prefix = "vfsd: error:"
    if has_colours():
        prefix = click.style(prefix, fg="red", bold=True)  # click removes the style if standard error is not a terminal
    click.echo(f"{prefix} {show_path(line)}", err=True)


def can_ask() -> bool:
    """Return whether a person can read a question and answer it."""
    return sys.stdin.isatty() and on_terminal(err=True)


def confirm(question: str) -> bool:
    """Ask a question on the terminal.  The end of the input means no.  Raises KeyboardInterrupt for Ctrl-C."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as abort:  # click raises it for both
        click.echo(err=True)
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        return False


@contextmanager
def progress(label: str | None) -> Iterator[Callable[[ProgressReport], None] | None]:
    """Yield an `on_progress` callback that draws a progress bar; None without a label or a terminal."""
    if label is None or not on_terminal(err=True):
        yield None
        return
    bar = _Bar(label)
    try:
        yield bar.update
    finally:
        bar.stop()


class _Bar:
    """A progress bar that appears with the first report, so that a short operation does not flash one."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._drawn: RichProgress | None = None

    def update(self, step: ProgressReport) -> None:
        if self._drawn is None:
            self._start()
        assert self._drawn is not None
        shown = human_size(step.done) if step.unit == "bytes" else counted(step.done, "file")
        self._drawn.update(self._task, completed=step.done, total=step.total or None, shown=shown)
        speed = self._drawn.tasks[0].speed  # None before the second report
        if speed is not None:
            rate = human_size(int(speed)) if step.unit == "bytes" else f"{speed:,.0f} files"
            self._drawn.update(self._task, rate=f"{rate}/s")

    def stop(self) -> None:
        if self._drawn is not None:
            self._drawn.stop()

    def _start(self) -> None:
        from rich import progress as rich  # noqa: PLC0415 start-up, see the module's docstring

        text = rich.TextColumn("{task.description}")
        shown, rate = rich.TextColumn("{task.fields[shown]}"), rich.TextColumn("{task.fields[rate]}")
        columns = (text, rich.BarColumn(), shown, rate, rich.TimeRemainingColumn())
        self._drawn = rich.Progress(*columns, console=_console(err=True), transient=True)
        self._drawn.start()
        self._task = self._drawn.add_task(self._label, total=None, shown="", rate="")


def _console(*, err: bool = False) -> Console:
    from rich.console import Console  # noqa: PLC0415 start-up

    return Console(stderr=err, highlight=False)


# -- bytes in JSON ----------------------------------------------------------------------------------
def text_or_base64(content: bytes, *, truncated: bool) -> str:
    """Represent a command's output in JSON: as text or, if it is not UTF-8, as "base64:..."."""
    try:
        # If the output was truncated, it may end in the middle of a character.
        return codecs.getincrementaldecoder("utf-8")().decode(content, final=not truncated)
    except UnicodeDecodeError:
        return base64_text(content)


def base64_text(content: bytes) -> str:
    """Represent bytes in JSON."""
    return "base64:" + binascii.b2a_base64(content, newline=False).decode()
