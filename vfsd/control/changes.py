"""What differs between two trees, as the control socket says it.  Runs in a worker thread, on immutable trees."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from protocol.diff import Change, changes
from protocol.patch import line_stat
from protocol.tree import Tree, TreeEntry
from vfsd.control.messages import CHANGES_LISTED, ChangeCounts, ChangeRecord, wire_path

__all__ = ["Differences", "change_record", "differences"]

FileType = Literal["file", "directory", "symlink", "fifo", "socket", "device"]
_TYPES: dict[int, FileType] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


class Differences:
    """The records of some changes, at most CHANGES_LISTED of them, and the counts of all."""

    __slots__ = ("counts", "records", "truncated")

    def __init__(self) -> None:
        self.counts = ChangeCounts()
        self.records: list[ChangeRecord] = []
        self.truncated = False

    def add(self, change: Change, record: Callable[[Change], ChangeRecord]) -> None:
        """Count `change`, and keep its record if there is room."""
        if change.kind == "added":
            self.counts.added += 1
        elif change.kind == "removed":
            self.counts.removed += 1
        else:
            self.counts.modified += 1
        if len(self.records) < CHANGES_LISTED:
            self.records.append(record(change))
        else:
            self.truncated = True


def differences(
    old: Tree,
    new: Tree,
    paths: Sequence[bytes] = (),
    *,
    with_lines: bool = False,
    keep_going: Callable[[], None] = lambda: None,
) -> Differences:
    """From `old` to `new`, below `paths`.  `with_lines` counts the lines of text files.

    `keep_going` is called for every change, and raises when nobody waits for the answer any more.
    FileNotFoundError for a path in neither.
    """
    found = Differences()

    def record(change: Change) -> ChangeRecord:
        return _with_lines(change_record(change), old, new, change) if with_lines else change_record(change)

    for change in _watched(changes(old, new, paths=paths), keep_going):
        found.add(change, record)
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
