"""Print changes, as a letter and a path or as `git diff --stat` does, and problems and dropped snapshots.

Long output goes through a pager on a terminal, and patches have colours there, as git does both.

The daemon drops a client that does not read what it streams for half a minute.  So everything is read at once, and kept
in a temporary file until standard output (`less`, for example) accepts it.
"""

from __future__ import annotations

import codecs
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, Any, Final, Self

import click
import msgspec

from protocol.errors import shortened
from vfsd.cli.common import output
from vfsd.cli.common.app import App
from vfsd.cli.common.output import counted
from vfsd.client.requests import RemoteCall
from vfsd.machine.text import LETTERS, change_line, count_words, link_note, outcome_lines, with_slash
from vfsd.operations.declaration import ChangeRecord, ExpiredRecord, RepositoryRecord
from vfsd.operations.snapshots import DiffResult, ImportResult, ProblemRecord, RestoreResult
from vfsd.wire.messages import LineBuffer

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


def show_outcome(what: str, answer: RestoreResult | ImportResult, nothing: str | None = None) -> None:
    """Print the counts of a change, the safety snapshot with the state before it, and the snapshots that were dropped.

    `what` says what was done, such as "restored turn-3"; `nothing`, that there was nothing to do.
    """
    lines = outcome_lines(what, answer.counts, answer.safety_snapshot, getattr(answer, "older", 0))
    if nothing is not None and answer.safety_snapshot is None and not answer.problems:
        lines = [nothing]
    for line in lines:
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


def show_stat(
    changes: Iterable[ChangeRecord], count: int, *, groups: Sequence[tuple[str, str]] = (), grouped: int = 0
) -> None:
    """Print a line for each change, as `git diff --stat` does, and a line of totals.  Iterates twice.

    `count`: how many changes there are.  `groups`: pairs of a path and a text, for lines that stand for `grouped` more.
    """
    width = max((len(path) for path, _ in groups), default=0)
    most = added = removed = 0
    for change in changes:
        width = max(width, len(_path(change)))
        most = max(most, _lines(change))
        added += change.lines_added or 0
        removed += change.lines_removed or 0
    figures = max(len(str(most)), len("Bin"))
    for change in changes:
        output.say(f" {_path(change).ljust(width)} | {_stat_of(change, figures, most)}".rstrip())
    for path, text in groups:
        output.say(f" {path.ljust(width)} | {text}")
    words = [f" {counted(count, 'path')} changed"]
    words += [f"{counted(added, 'insertion')}(+)"] if added else []
    words += [f"{counted(removed, 'deletion')}(-)"] if removed else []
    words += [f"and {grouped:,} more in {counted(len(groups), 'group')}"] if groups else []
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


# -- a pager, and colours of patches ----------------------------------------------------------------
# Leave at once if one screen holds it all, show colours, and keep the text on the screen: git's default.
_LESS: Final = "FRX"
_BOLD, _RED, _GREEN, _CYAN, _PLAIN = b"\x1b[1m", b"\x1b[31m", b"\x1b[32m", b"\x1b[36m", b"\x1b[m"
_HEADERS: Final = (
    b"diff ", b"index ", b"--- ", b"+++ ", b"old mode ", b"new mode ", b"new file ", b"deleted file ", b"# ",
)  # fmt: skip
_VARIABLES: Final = ("VFSD_PAGER", "PAGER")


def _pager() -> str | None:
    """Return the shell command of the user's pager; None if there is none, none is wanted, or it would only ask."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    given = next((os.environ[name] for name in _VARIABLES if name in os.environ), None)
    if given is None:
        return "less" if shutil.which("less") else None
    if given.strip() in {"", "cat"}:
        return None
    program = given.split()[0]
    if program.replace("_", "").isalnum() and shutil.which(program) is None:
        output.note(f"the pager {program} is not installed: $VFSD_PAGER or $PAGER names another")
        return None
    return given


@contextmanager
def paged() -> Iterator[None]:
    """Send what the block prints through a pager, if standard output is a terminal.

    The pager is $VFSD_PAGER, else $PAGER, else `less`; none if that is empty or `cat`.  The block prints with
    `output.say` and `output.write_bytes`; whether it prints for a terminal, it must ask before.  If the user leaves the
    pager, the block gets BrokenPipeError.
    """
    pager = _pager() if output.on_terminal() else None
    if pager is None:
        yield
        return
    sys.stdout.flush()
    environment = {"LESS": _LESS, **os.environ}
    process = subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, env=environment)  # noqa: S602 the user's own
    assert process.stdin is not None
    terminal = os.dup(1)
    os.dup2(process.stdin.fileno(), 1)
    process.stdin.close()
    click.get_current_context().color = output.has_colours()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        sys.stdout.flush()  # what is still buffered is not for the terminal
        raise
    finally:
        os.dup2(terminal, 1)  # which ends the pager's input
        os.close(terminal)
        _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait until the user leaves the pager.  Ctrl-C in it is for the pager."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


class PatchColours:
    """Colours a patch that arrives in pieces, and passes it on to `write` line by line."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._lines = LineBuffer()
        self._is_header = True  # between "diff --git" and the first hunk: "--- a/x" is no removed line there

    def feed(self, data: bytes) -> None:
        """Take the next piece of the patch."""
        self._lines.feed(data)
        coloured = []
        while (line := self._lines.next_line()) is not None:
            colour = self._colour(line)
            coloured.append(b"%b%b%b\n" % (colour, line, _PLAIN) if colour else line + b"\n")
        self._write(b"".join(coloured))

    def _colour(self, line: bytes) -> bytes:
        if line.startswith(b"diff --git "):
            self._is_header = True
        elif line.startswith(b"@@ "):
            self._is_header = False
            return _CYAN
        if self._is_header:
            return _BOLD if line.startswith(_HEADERS) else b""
        return {b"+": _GREEN, b"-": _RED}.get(line[:1], b"")


# -- what the daemon streams ------------------------------------------------------------------------
_MEMORY_BYTES: Final = 1024 * 1024  # a larger temporary file is on disk
_STEP_BYTES: Final = 4096  # PIPE_BUF: a writable pipe accepts as much without blocking
_COPY_BYTES: Final = 1024 * 1024
_OF_PATCHES: Final = ("omitted", "patch_bytes", "git_only")  # fields of a DiffResult that only a patch has
_records = msgspec.json.Decoder(ChangeRecord)


class PatientOutput:
    """Buffered standard output, written as fast as it is read.  The end of a `with` block waits until all is
    written."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 closed in __exit__
        self._written = self._end = 0
        self._poll = _output_poll()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if kind is None or not issubclass(kind, BrokenPipeError):
                self._pass_on(lambda: True)

    def write(self, data: bytes) -> None:
        """Append `data`, and write as much of the buffer as standard output accepts now."""
        self._file.seek(self._end)
        self._file.write(data)
        self._end += len(data)
        self._pass_on(self._is_ready)
        if self._written == self._end:
            self._file.seek(0)
            self._file.truncate()
            self._written = self._end = 0

    def _pass_on(self, is_ready: Callable[[], bool]) -> None:
        while self._written < self._end and is_ready():
            self._file.seek(self._written)
            piece = self._file.read(_STEP_BYTES)
            self._written += len(piece)
            output.write_bytes(piece)

    def _is_ready(self) -> bool:
        # A pipe without a reader is ready, too: writing to it raises BrokenPipeError.
        return self._poll is None or bool(self._poll.poll(0))


def _output_poll() -> select.poll | None:
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file, in a test
        return None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return poll


class ChangeSpool:
    """The changes that the daemon streamed, in the temporary `file`.  Can be iterated several times."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __iter__(self) -> Iterator[ChangeRecord]:
        self._file.seek(0)
        return map(_records.decode, self._file)

    def pieces(self) -> Iterator[bytes]:
        """Iterate over the stream in pieces."""
        self._file.seek(0)
        while piece := self._file.read(_COPY_BYTES):
            yield piece


def write_changes(app: App, request: RemoteCall[Any], line: Callable[[ChangeRecord], str]) -> Any:
    """Send `request` (a diff), print the `line` of each change as it arrives, and return the answer."""
    lines = LineBuffer()
    encoding = sys.stdout.encoding
    if codecs.lookup(encoding).name == "ascii":
        encoding = "utf-8"  # as click.echo does
    with PatientOutput() as out:

        def take(data: bytes) -> None:
            lines.feed(data)
            texts = []
            while (each := lines.next_line()) is not None:
                texts.append(line(_records.decode(each)) + "\n")
            out.write("".join(texts).encode(encoding, sys.stdout.errors or "strict"))

        return app.call(request, on_output=take)


def call_with_changes(
    app: App,
    request: RemoteCall[Any],
    label: str,
    show: Callable[[Any, ChangeSpool], None],
    *,
    shows_json: bool = False,
) -> Any:
    """Send `request`, print the answer and its changes with `show` or as JSON, and return the answer.

    `shows_json`: `show` prints JSON, too.
    """
    with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as file:
        request.params.stream = True
        answer = app.call(request, label=label, on_output=file.write)
        with app.writing():
            (_print_with_changes if app.json and not shows_json else show)(answer, ChangeSpool(file))
        return answer


def _print_with_changes(answer: Any, spool: ChangeSpool) -> None:
    """Print `answer` as JSON, with the streamed changes as its `changes`."""
    fields = msgspec.json.decode(msgspec.json.encode(answer), type=dict[str, msgspec.Raw])
    if isinstance(answer, DiffResult):
        for name in _OF_PATCHES:
            del fields[name]
    if output.on_terminal():
        # On a terminal the output is small enough for memory.
        output.print_json({**fields, "changes": list(spool)})
        return
    first = True
    for name, value in fields.items():
        output.write_bytes((b"{" if first else b",") + msgspec.json.encode(name) + b":")
        first = False
        if name == "changes":
            _write_array(spool)
        else:
            output.write_bytes(bytes(value))
    output.write_bytes(b"}\n")


def _write_array(spool: ChangeSpool) -> None:
    """Write lines of JSON as an array.  JSON values contain no newline, so each newline ends a value."""
    output.write_bytes(b"[")
    held = b""
    for piece in spool.pieces():
        output.write_bytes(held)
        held = piece.replace(b"\n", b",")
    output.write_bytes(held.removesuffix(b",") + b"]")


def show_dry_run(app: App, request: RemoteCall[Any], would: Callable[[RestoreResult], str] | None = None) -> None:
    """Send `request`, which changes nothing, and print what it would change; `would` says what it would do."""

    def show(answer: RestoreResult, changes: ChangeSpool) -> None:
        show_changes(changes)
        if would is not None and output.on_terminal(err=True):
            output.note(f"would {would(answer)}: {count_words(answer.counts)}")

    show_problems(call_with_changes(app, request, "comparing", show).problems, "cannot be restored")
