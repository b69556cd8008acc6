"""The values that a `Filesystem` gives back.

Paths are `str`, relative to the root, without a leading slash; "." is the root.  A name that is not UTF-8
is written with surrogate escapes (PEP 383) and may be given back as it came.  Sizes are in bytes, times
are UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias

__all__ = [
    "DEFAULT_READ_LINES",
    "READ_ENTIRE_FILE",
    "FileEntry",
    "FileStat",
    "FilesystemSnapshot",
    "GlobMatch",
    "GrepMatch",
    "ReadBytesResult",
    "ReadResult",
    "WriteMode",
    "WriteResult",
]

DEFAULT_READ_LINES: Final = 2_000  # what `read` gives when it is not told a limit
READ_ENTIRE_FILE: Final = -1  # as the limit of `read`: all lines

WriteMode: TypeAlias = Literal["create", "overwrite", "append"]


@dataclass(frozen=True, slots=True)
class FileStat:
    """What there is at a path.  Symlinks are followed; `is_symlink` says that the path itself is one.

    `mode` has the type and the permission bits.  `size_bytes` of a directory is 0.  What is neither a file
    nor a directory is a fifo, socket or device.  A time that the backend does not know is None.
    """

    path: str
    is_file: bool
    is_directory: bool
    size_bytes: int
    created_at: datetime | None = None
    modified_at: datetime | None = None
    mode: int = 0
    is_symlink: bool = False


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a directory.  A symlink counts as what it leads to; one that leads nowhere is neither."""

    name: str
    path: str
    is_file: bool
    is_directory: bool
    is_symlink: bool = False


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A page of a text file: `limit` lines from line `offset` (the first is 0), unaltered.

    Only "\\n" ends a line.  `truncated`: there are lines after the page.  `offset` past the end is moved to
    the end, and `limit` is the count of lines that are there.
    """

    content: str
    path: str
    total_lines: int
    offset: int
    limit: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class ReadBytesResult:
    """A page of a file: `limit` bytes from byte `offset`; `size_bytes` is the whole file's size."""

    content: bytes
    path: str
    size_bytes: int
    offset: int
    limit: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What was written, and how."""

    path: str
    bytes_written: int
    mode: WriteMode


@dataclass(frozen=True, slots=True)
class GlobMatch:
    """A file whose path matches."""

    path: str
    is_file: bool = True


@dataclass(frozen=True, slots=True)
class GrepMatch:
    """The first match of a line.

    `line_number` counts from 1; `line_content` is without its "\\n"; `match_start` and `match_end` count
    its characters from 0.
    """

    path: str
    line_number: int
    line_content: str
    match_start: int
    match_end: int


@dataclass(frozen=True, slots=True)
class FilesystemSnapshot:
    """A state that can be restored.

    `commit_ref` is what the backend needs to find it again: a name in the backend, or the path of an archive.
    """

    snapshot_id: str
    created_at: datetime
    commit_ref: str
    root_path: str
    tag: str | None = None
