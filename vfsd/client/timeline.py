"""The timeline of a workspace: its states, each with the changes since the state before it.  No I/O.

for step in timeline(await workspace.snapshots()):
    if step.before is not None:
        found = await workspace.diff(step.before, step.name, complete=False)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Generic, TypeVar

import msgspec

from vfsd.client.requests import RemoteCall
from vfsd.client.results import ChangeKind, Snapshot
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.snapshots import DiffParams
from vfsd.operations.workspace import LogParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """A state of the workspace: `snapshot`, or the live state if that is None.

    `before` is the name of the snapshot that the state's changes are counted from; None for the first state.
    """

    snapshot: Snapshot | None
    before: str | None

    @property
    def name(self) -> str | None:
        """The name of the state, as `Workspace.diff` takes it: None is the live state."""
        return None if self.snapshot is None else self.snapshot.name


def timeline(snapshots: Sequence[Snapshot]) -> list[Step]:
    """Return the states, newest first; the first one is the live state.  `snapshots` are ordered oldest first."""
    states: list[Snapshot | None] = [*snapshots, None]
    befores = [None, *(snapshot.name for snapshot in snapshots)]
    return [Step(state, before) for state, before in zip(states, befores, strict=True)][::-1]


@dataclass(frozen=True, slots=True)
class Mark:
    """How a directory entry differs between two states.

    `change` is its own change, if there is one.  `below` is the number of changes below it.  `type` is its file type.
    """

    change: ChangeKind | None
    type: str
    below: int = 0


def marks(a: str | None, b: str | None, directory: str) -> RemoteCall[Mapping[str, Mark]]:
    """Build the request for the entries of `directory` that differ between the states `a` and `b`, by name.

    `a` and `b` are as for `Workspace.diff`; the directory and the names are wire paths.  All changes are counted, in
    memory proportional to the entries of the directory that differ.
    """
    collector = _Marks(directory)
    params = DiffParams(a=a, b=b, paths=[directory] if directory else [], stream=True)
    return RemoteCall("diff", params, lambda _: collector.found, on_output=collector.feed)


def authors(steps: Sequence[Step]) -> RemoteCall[Mapping[str | None, Counter[str]]]:
    """Build the request for who made the changes that led to each of `steps`, by the names of the steps.

    A counter has the numbers of the log's entries for each label or, without one, name of a program (wire paths).  The
    log is bounded, so the counts of older steps may be incomplete or missing.  Entries are assigned by their times, and
    a snapshot's time is in milliseconds.  OSError (EOPNOTSUPP) if the workspace keeps no log.
    """
    collector = _Authors(steps)
    return RemoteCall("log", LogParams(), lambda _: collector.found, on_output=collector.feed)


class _Lines(Generic[T]):
    """Decodes the lines of an output whose pieces may end within a line."""

    def __init__(self, kind: type[T]) -> None:
        self._decode: Final = msgspec.json.Decoder(kind).decode_lines
        self._rest = b""

    def feed(self, output: bytes) -> list[T]:
        """Return the lines that are complete with `output`."""
        lines, newline, self._rest = (self._rest + output).rpartition(b"\n")
        return self._decode(lines + newline) if lines else []


class _Marks:
    """Counts the changes in a stream of `ChangeRecord`s by the entry of a directory that they are at or below."""

    def __init__(self, directory: str) -> None:
        self.found: Final[dict[str, Mark]] = {}
        self._cut = len(directory) + 1 if directory else 0
        self._lines = _Lines(ChangeRecord)

    def feed(self, output: bytes) -> None:
        """Take the next piece of the output."""
        for record in self._lines.feed(output):
            name, slash, _ = record.path[self._cut :].partition("/")
            if not name:
                continue  # the directory itself
            mark = self.found.get(name)
            if not slash:
                self.found[name] = Mark(record.change, record.type, 0 if mark is None else mark.below)
            elif mark is None:
                self.found[name] = Mark(None, "directory", 1)
            else:
                self.found[name] = Mark(mark.change, mark.type, mark.below + 1)


class _Program(msgspec.Struct):
    name: str


class _Entry(msgspec.Struct):
    """The members of a `LogEntry` that are needed here."""

    time: str
    until: str | None = None
    process: _Program | None = None
    label: str | None = None


class _Authors:
    """Counts the entries of the log by the step that they belong to."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.found: Final[dict[str | None, Counter[str]]] = {step.name: Counter() for step in steps}
        taken = sorted((step.snapshot.created_at, step.name) for step in steps if step.snapshot is not None)
        self._times = [time for time, _ in taken]
        self._names: list[str | None] = [*(name for _, name in taken), None]
        self._lines = _Lines(_Entry)

    def feed(self, output: bytes) -> None:
        """Take the next piece of the output."""
        for name, author in self._told(output):
            if name in self.found:
                self.found[name][author] += 1

    def _told(self, output: bytes) -> Iterator[tuple[str | None, str]]:
        for entry in self._lines.feed(output):
            author = entry.label or (None if entry.process is None else entry.process.name)
            if author is not None:
                when = datetime.fromisoformat(entry.until or entry.time)
                yield self._names[bisect_left(self._times, when)], author
