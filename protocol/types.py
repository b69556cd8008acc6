"""The values that a `Filesystem` returns, and the counts of a diff.

Paths are `str`, relative to the root, without a leading slash; "." is the root.  A name that is not UTF-8 has surrogate
escapes (PEP 383), and such a path is a valid argument.  Sizes are in bytes, times in UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias

from protocol.values import Value

DEFAULT_READ_LINES: Final = 2_000  # the default limit of `read`
READ_ENTIRE_FILE: Final = -1  # as the limit of `read`: all lines

WriteMode: TypeAlias = Literal["create", "overwrite", "append"]


class ChangeCounts(Value):
    """The numbers of paths that were added, modified (content, type or metadata) and removed; directories count."""

    added: int = 0
    modified: int = 0
    removed: int = 0

    @property
    def total(self) -> int:
        return self.added + self.modified + self.removed


class FileStat(Value):
    """The attributes of the file at a path.  Symlinks are followed; `is_symlink` says whether the path itself is one.

    `mode` has the type and permission bits.  `size_bytes` of a directory is 0.  An entry that is neither a file nor a
    directory is a fifo, socket or device.  A time that the backend does not have is None.
    """

    path: str
    is_file: bool
    is_directory: bool
    size_bytes: int
    created_at: datetime | None = None
    modified_at: datetime | None = None
    mode: int = 0
    is_symlink: bool = False


class FileEntry(Value):
    """One entry of a directory.  A symlink has the type of its target; a broken one is neither file nor directory."""

    name: str
    path: str
    is_file: bool
    is_directory: bool
    is_symlink: bool = False


class ReadResult(Value):
    """A page of a text file: `limit` lines from line `offset` (counted from 0), unaltered.

    Only "\\n" ends a line.  `truncated` says whether lines follow the page.  `offset` is at most the number of lines,
    and `limit` is the number of lines in the page.
    """

    content: str
    path: str
    total_lines: int
    offset: int
    limit: int
    truncated: bool


class ReadBytesResult(Value):
    """A page of a file: `limit` bytes from byte `offset`; `size_bytes` is the whole file's size."""

    content: bytes
    path: str
    size_bytes: int
    offset: int
    limit: int
    truncated: bool


class WriteResult(Value):
    """The result of a write."""

    path: str
    bytes_written: int
    mode: WriteMode


class GlobMatch(Value):
    """A file whose path matches."""

    path: str
    is_file: bool = True


class GrepMatch(Value):
    """The first match in a line.

    `line_number` counts from 1; `line_content` has no "\\n"; `match_start` and `match_end` are character offsets in it.
    """

    path: str
    line_number: int
    line_content: str
    match_start: int
    match_end: int


class FilesystemSnapshot(Value):
    """A state that can be restored.

    `commit_ref` identifies it for the backend: a name in the backend, or the path of an archive.
    """

    snapshot_id: str
    created_at: datetime
    commit_ref: str
    root_path: str
    tag: str | None = None


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def utc_time(ns: int) -> datetime | None:
    """Convert nanoseconds since 1970.  None for a year that `datetime` does not have."""
    try:
        return _EPOCH + timedelta(microseconds=ns // 1000)
    except OverflowError:
        return None
