"""Entry: one change of the workspace, and its record on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from protocol.diff.tree_diff import PathScope
from vfsd.daemon.audit.processes import Process
from vfsd.operations.workspace import LogEntry, ProcessRecord
from vfsd.wire.messages import wire_path

OBJECT_BYTES: Final = 640  # of an `Entry` with its numbers and without its texts, and its places in the log
_TEXT_BYTES: Final = 64  # of a string, without its characters
PATHS_LISTED: Final = 100  # of one entry for many changes at once, such as a restore
# Changes of a directory that are changes of everything below it, too.
_OF_WHOLE_DIRECTORIES: Final = frozenset({"rename", "exchange", "restore", "import", "merge", "adopt", "fs.rm"})


class Entry(msgspec.Struct, eq=False, gc=False):
    """One change, or consecutive writes to one file by one program.

    `number` counts the changes in the order in which they were made.  `paths`: of one entry for many changes, the first
    PATHS_LISTED of their paths; `count` counts all.  `attempt` is what was denied, `other` the new name of a rename or
    the older name of a link, `written_bytes` the size of all `writes`.

    `size_bytes` is the memory that it takes, without that of its process; see `measured`.

    A struct takes a tenth of the time of a class, and the garbage collector need not examine it: nothing that an entry
    refers to refers to entries.
    """

    number: int
    time_ns: int
    until_ns: int
    change: str
    process: Process
    thread: int
    path: bytes | None
    label: str | None
    size_bytes: int
    inode: int = 0
    links: int = 1
    written_bytes: int = 0
    writes: int = 0
    attempt: str | None = None
    other: bytes | None = None
    paths: Sequence[bytes] = ()
    count: int = 1

    def measured(self) -> int:
        """Return what `size_bytes` has to be, which no attribute changes any more once the entry is in the log."""
        texts = [text for text in (self.path, self.other) if text is not None]
        size = size_of(self.label) + sum(map(len, texts))
        return size + sum(map(len, self.paths)) + _TEXT_BYTES * len(self.paths)

    def is_within(self, scope: PathScope) -> bool:
        """Whether the change concerns one of the paths of `scope`, or something below one.

        The removal of a directory by a restore, or its new name, concerns the paths below it.
        """
        if self.count > len(self.paths) > 0:
            return True  # not all of its paths are known
        is_named = scope.meets if self.change in _OF_WHOLE_DIRECTORIES else scope.covers
        return any(one is not None and is_named(one) for one in self.paths or (self.path, self.other)) or scope.covers(
            b""
        )

    def is_by(self, who: str) -> bool:
        """Whether its process, or an ancestor, has the process id or the program's name `who`."""
        return any(_is_called(process, who) for process in (self.process, *self.process.ancestors()))

    def record(self) -> LogEntry:
        process = self.process
        ancestors = [_record(above) for above in process.ancestors()]
        return LogEntry(
            number=self.number,
            time=time_text(self.time_ns),
            change=self.change,
            path=None if self.path is None else wire_path(self.path),
            pid=process.pid,
            until=time_text(self.until_ns) if self.until_ns != self.time_ns else None,
            to=wire_path(self.other) if self.other is not None and self.change in _TWO_NAMES else None,
            of=wire_path(self.other) if self.other is not None and self.change == "link" else None,
            links=self.links,
            inode=self.inode if self.path is None else None,
            bytes=self.written_bytes if self.writes else None,
            writes=self.writes or None,
            attempt=self.attempt,
            paths=[wire_path(path) for path in self.paths],
            count=self.count,
            process=_record(process) if process.pid else None,
            thread=self.thread if self.thread not in {0, process.pid} else None,
            ancestors=ancestors,
            container=process.container,
            label=self.label,
        )


def size_of(label: str | None) -> int:
    """Return the size of an entry with this label and without paths."""
    return OBJECT_BYTES if label is None else OBJECT_BYTES + 4 * len(label)


_TWO_NAMES: Final = frozenset({"rename", "exchange"})


def _is_called(process: Process, who: str) -> bool:
    if who.isdigit():
        return process.pid == int(who)
    name = who.encode("utf-8", "surrogateescape")
    return process.name == name[:15] or any(word.rpartition(b"/")[2] == name for word in process.words[:1])


def _record(process: Process) -> ProcessRecord:
    return ProcessRecord(
        pid=process.pid,
        name=wire_path(process.name),
        command=list(map(wire_path, process.words)),
        truncated=process.is_cut,
        uid=process.uid,
    )


def time_text(time_ns: int) -> str:
    """Format a time in nanoseconds since the epoch for the wire (ISO 8601, UTC), with microseconds."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="microseconds")
