"""What differs between two trees, as the control socket says it.  Runs in a worker thread, on immutable trees."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from protocol.adapters.filtered import FilteredTree
from protocol.adapters.path_filter import PathFilter
from protocol.diff.patch import Uncarried, line_stat, write_patch
from protocol.diff.tree_diff import Change, changes
from protocol.tree import Tree, TreeEntry
from protocol.volume import SnapshotInfo
from vfsd.wire.messages import (
    CHANGES_LISTED,
    ChangeCounts,
    ChangeRecord,
    ExpiredRecord,
    InvalidParamsError,
    ProblemRecord,
    wire_path,
)

__all__ = [
    "Differences",
    "Pieces",
    "change_record",
    "created_at",
    "differences",
    "expired_records",
    "filtered",
    "path_filter",
    "time_text",
    "written_patch",
]

FileType = Literal["file", "directory", "symlink", "fifo", "socket", "device"]
_TYPES: dict[int, FileType] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
_PIECE_BYTES: Final = 64 * 1024


def path_filter(include: Sequence[str], exclude: Sequence[str]) -> PathFilter:
    """The rule of these patterns.  InvalidParamsError for one that is none."""
    try:
        return PathFilter(include, exclude)
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None


def filtered(tree: Tree, rule: PathFilter) -> Tree:
    """`tree` without what `rule` hides."""
    if not rule:
        return tree
    return FilteredTree(tree, lambda path, is_directory: rule.hides(path, is_directory=is_directory))


class Pieces:
    """Output on its way to a client, in pieces: each waits for the loop, which a message a line would make slow."""

    __slots__ = ("_pending", "_send", "sent_bytes")

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._pending = bytearray()
        self.sent_bytes = 0

    def write(self, data: bytes) -> None:
        self._pending += data
        if len(self._pending) >= _PIECE_BYTES:
            self.flush()

    def write_record(self, record: ChangeRecord) -> None:
        """Write `record` as a line of JSON."""
        self.write(msgspec.json.encode(record) + b"\n")

    def flush(self) -> None:
        self.sent_bytes += len(self._pending)
        if self._pending:
            self._send(bytes(self._pending))
            self._pending.clear()


class Differences:
    """The records of some changes, and the counts of all.

    Records go to `stream` where there is one; else `records` holds at most CHANGES_LISTED of them.
    """

    __slots__ = ("_stream", "counts", "omitted", "problems", "records", "truncated", "written_bytes")

    def __init__(self, stream: Pieces | None = None) -> None:
        self._stream = stream
        self.counts = ChangeCounts()
        self.records: list[ChangeRecord] = []
        self.truncated = False
        # Of a patch alone.
        self.problems: list[ProblemRecord] = []
        self.omitted: list[ProblemRecord] = []
        self.written_bytes = 0

    def count(self, change: Change) -> None:
        """Count `change`."""
        if change.kind == "added":
            self.counts.added += 1
        elif change.kind == "removed":
            self.counts.removed += 1
        else:
            self.counts.modified += 1

    def add(self, change: Change, record: Callable[[Change], ChangeRecord]) -> None:
        """Count `change`, and send its record, or keep it if there is room."""
        self.count(change)
        if self._stream is not None:
            self._stream.write_record(record(change))
        elif len(self.records) < CHANGES_LISTED:
            self.records.append(record(change))
        else:
            self.truncated = True

    def add_uncarried(self, uncarried: Uncarried) -> None:
        """Keep a change that a patch lacks, if there is room."""
        if len(self.problems) + len(self.omitted) >= CHANGES_LISTED:
            self.truncated = True
            return
        place = self.omitted if uncarried.is_usual else self.problems
        place.append(ProblemRecord(wire_path(uncarried.path), uncarried.reason))


def differences(
    old: Tree,
    new: Tree,
    paths: Sequence[bytes] = (),
    *,
    with_lines: bool = False,
    keep_going: Callable[[], None] = lambda: None,
    stream: Pieces | None = None,
) -> Differences:
    """From `old` to `new`, below `paths`.  `with_lines` counts the lines of text files.

    `keep_going` is called for every change, and raises when nobody waits for the answer any more.
    FileNotFoundError for a path in neither.
    """
    found = Differences(stream)

    def record(change: Change) -> ChangeRecord:
        return _with_lines(change_record(change), old, new, change) if with_lines else change_record(change)

    for change in _watched(changes(old, new, paths=paths), keep_going):
        found.add(change, record)
    if stream is not None:
        stream.flush()
    return found


def written_patch(
    old: Tree,
    new: Tree,
    paths: Sequence[bytes],
    out: Pieces,
    *,
    include_git: bool,
    keep_going: Callable[[], None],
) -> Differences:
    """Write the patch from `old` to `new`, below `paths`, to `out`; count its changes, and keep what it lacks."""
    found = Differences()

    def counted() -> Iterator[Change]:
        for change in _watched(changes(old, new, paths=paths), keep_going):
            if include_git or b".git" not in change.path.split(b"/"):
                found.count(change)
            yield change

    write_patch(old, new, counted(), out.write, include_git=include_git, on_uncarried=found.add_uncarried)
    out.flush()
    found.written_bytes = out.sent_bytes
    return found


def _watched(changed: Iterable[Change], keep_going: Callable[[], None]) -> Iterable[Change]:
    for change in changed:
        keep_going()
        yield change


def change_record(change: Change) -> ChangeRecord:
    """What is said of a change, its lines apart."""
    shown = change.new or change.old
    assert shown is not None
    return ChangeRecord(
        path=wire_path(change.path),
        change=change.kind,
        type=_TYPES.get(stat.S_IFMT(shown.mode), "device"),
        old_size=_size(change.old),
        new_size=_size(change.new),
    )


def _size(entry: TreeEntry | None) -> int | None:
    return None if entry is None or entry.is_dir else entry.size


def _with_lines(record: ChangeRecord, old: Tree, new: Tree, change: Change) -> ChangeRecord:
    lines = line_stat(old, new, change)
    record.lines_added, record.lines_removed, record.binary = lines.added, lines.removed, lines.binary
    return record


def created_at(info: SnapshotInfo) -> str:
    """When a snapshot was taken."""
    return time_text(info.created_ns)


def time_text(time_ns: int) -> str:
    """A time as the wire has it."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def expired_records(expired: Iterable[SnapshotInfo], pruned: Iterable[SnapshotInfo]) -> list[ExpiredRecord]:
    """What an answer says of the snapshots that were dropped: those not needed, and those for lack of memory."""
    return [
        *(ExpiredRecord(info.name, created_at(info)) for info in expired),
        *(ExpiredRecord(info.name, created_at(info), "memory") for info in pruned),
    ]
