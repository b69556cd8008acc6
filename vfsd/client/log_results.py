"""The results of `Workspace.log` and `Workspace.follow`: frozen values, and how they are made from the wire's records.

Paths are `str` from `os.fsdecode`, relative to the workspace's root, and so are the words of command lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

import msgspec

from vfsd.operations.log import LogEntry, Overflow, ProcessRecord
from vfsd.wire.exchange import LineBuffer
from vfsd.wire.messages import from_wire_path


@dataclass(frozen=True, slots=True)
class LoggedProcess:
    """A process.  `command` is () if its command line could not be read; `truncated` says that its end is missing."""

    pid: int
    name: str
    command: tuple[str, ...]
    truncated: bool
    uid: int | None


@dataclass(frozen=True, slots=True)
class LoggedChange:
    """One change, or consecutive writes to one file by one process.

    `number` counts the changes of the workspace in the order in which they were made.  `change` is the kind, such as
    "create", "write" (of `bytes_written` bytes from `time` to `until`), "rename" (`to` is the new name), "link" (`of`
    is an older name), or the call that did not go through the mount, such as "restore".  "denied" is a change that the
    policy refused: `attempt` says which.

    `path`: None for a file without a name, and for `count` changes at once; `paths` then has the first 100.  `links`:
    how many names the file has; `path` is one of them.  `process`: None if it is not known: the kernel wrote pages
    back, or the process is in another pid namespace.  `ancestors`: its parent, the parent of that, and so on.
    `container`: the first 12 digits of its container's id.  `label`: what it belongs to, such as a tool call.
    """

    number: int
    time: datetime
    until: datetime
    change: str
    path: str | None
    to: str | None
    of: str | None
    links: int
    bytes_written: int | None
    paths: tuple[str, ...]
    count: int
    process: LoggedProcess | None
    ancestors: tuple[LoggedProcess, ...]
    container: str | None
    label: str | None
    attempt: str | None = None


@dataclass(frozen=True, slots=True)
class Missed:
    """In place of changes that this program read too slowly: how many are missing here.

    0: the daemon died and was replaced, and changes of its last seconds may be missing.
    """

    count: int


_entries = msgspec.json.Decoder(LogEntry)


def logged_changes(lines: bytes) -> list[LoggedChange]:
    """Decode the output of the method `log`."""
    return [_change(entry) for entry in _entries.decode_lines(lines)]


class WatchedLines:
    """Splits the output of the method `watch` into its lines, without the empty one at the beginning."""

    def __init__(self) -> None:
        self._buffer = LineBuffer()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete with `piece`."""
        self._buffer.feed(piece)
        while (line := self._buffer.next_line()) is not None:
            if line:
                yield line


def watched_changes(pieces: Iterable[bytes], lines: WatchedLines | None = None) -> Iterator[LoggedChange | Missed]:
    """Decode the output of the method `watch`.  `lines` has the beginning of the first line, if it was received."""
    lines = lines or WatchedLines()
    for piece in pieces:
        for line in lines.feed(piece):
            record = decode_watched(line)
            yield Missed(record.missing) if isinstance(record, Overflow) else _change(record)


def decode_watched(line: bytes) -> LogEntry | Overflow:
    """Decode a line of the output of `watch`."""
    # Not as a union, which would need a tag in each entry.
    if line.startswith(b'{"missing":'):
        return msgspec.json.decode(line, type=Overflow)
    return _entries.decode(line)


def _change(entry: LogEntry) -> LoggedChange:
    time = datetime.fromisoformat(entry.time)
    return LoggedChange(
        number=entry.number,
        time=time,
        until=time if entry.until is None else datetime.fromisoformat(entry.until),
        change=entry.change,
        path=_path(entry.path),
        to=_path(entry.to),
        of=_path(entry.of),
        links=entry.links,
        bytes_written=entry.bytes,
        paths=tuple(map(_text, entry.paths)),
        count=entry.count,
        process=None if entry.process is None else _process(entry.process),
        ancestors=tuple(map(_process, entry.ancestors)),
        container=entry.container,
        label=entry.label,
        attempt=entry.attempt,
    )


def _text(wire: str) -> str:
    return os.fsdecode(from_wire_path(wire))


def _path(wire: str | None) -> str | None:
    return None if wire is None else _text(wire)


def _process(record: ProcessRecord) -> LoggedProcess:
    command = tuple(map(_text, record.command))
    return LoggedProcess(record.pid, _text(record.name), command, record.truncated, record.uid)
