"""Filesystem: the agent's view of a backend (paths, text, bytes, streams, search).

Paths are relative to the root: "/x" means "x", and ".." cannot leave the root.  Symlinks are followed as
long as they stay below the root; one that leads out is a PermissionError.  Errors are the built-in
exceptions, each `OSError` with `errno` and `filename` set.  Every method that takes a path also raises
ValueError where it has a NUL, NotADirectoryError where it leads below a file, and PermissionError where
access is denied.  Calls that change anything raise PermissionError (EROFS) on a read-only filesystem.

Threading: a filesystem is for one thread at a time, unless it says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from protocol.streams import ByteReader, ByteWriter, TextReader
from protocol.types import (
    FileEntry,
    FileStat,
    FilesystemSnapshot,
    GlobMatch,
    GrepMatch,
    ReadBytesResult,
    ReadResult,
    WriteMode,
    WriteResult,
)

__all__ = ["Filesystem", "SnapshotableFilesystem"]


@runtime_checkable
class Filesystem(Protocol):
    """What agents call.  See the module's docstring for paths and errors."""

    @property
    def root(self) -> str:
        """Where the root is, for people: a directory of the host, or "/"."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether every changing call is refused."""
        ...

    # -- reading -----------------------------------------------------------------------------
    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        """A page of a text file: `limit` lines (None: 2,000; READ_ENTIRE_FILE: all) from line `offset`, from 0.

        Only "\\n" ends a line, and nothing is altered.  FileNotFoundError, IsADirectoryError.  ValueError for
        negative numbers, for a page over the limit of 32 MiB, and for content that cannot be decoded,
        wherever in the file (`read_bytes` reads it).
        """
        ...

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        """A page of a file: `limit` bytes (None: all) from byte `offset`.

        FileNotFoundError, IsADirectoryError.  ValueError for negative numbers and over the limit of 32 MiB.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether there is anything at `path`.  A symlink that leads nowhere does not exist."""
        ...

    def is_file(self, path: str) -> bool:
        """Whether there is a regular file at `path`."""
        ...

    def is_dir(self, path: str) -> bool:
        """Whether there is a directory at `path`."""
        ...

    def stat(self, path: str) -> FileStat:
        """What there is at `path`.  FileNotFoundError."""
        ...

    def list(self, path: str = ".") -> Sequence[FileEntry]:
        """The entries of a directory, sorted by name.  FileNotFoundError, NotADirectoryError."""
        ...

    # -- searching ---------------------------------------------------------------------------
    def glob(self, pattern: str, *, path: str = ".") -> Sequence[GlobMatch]:
        """The files below `path` that match, sorted by path; the pattern is relative to `path`.

        A pattern without "/" matches names at any depth; "*" stays in a part, "**" crosses any number of
        them, braces expand.  FileNotFoundError, NotADirectoryError.
        """
        ...

    def grep(
        self, pattern: str, *, path: str = ".", glob: str | None = None, max_matches: int | None = None
    ) -> Sequence[GrepMatch]:
        """The first match of each line that the regular expression matches, by path and line number.

        `path` is a directory or a file; `glob` chooses files as `glob` does; at most `max_matches` (None:
        1,000).  Binary and undecodable files are skipped.  FileNotFoundError.  ValueError for an invalid
        expression and a negative number.
        """
        ...

    # -- changing ----------------------------------------------------------------------------
    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write text, as UTF-8.  See `write_bytes`; ValueError also for what UTF-8 cannot say."""
        ...

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write a file: "create" it, "overwrite" it (or create it), or "append" to it (or create it).

        Overwriting is atomic: a reader sees the old file or the new.  The new one has the old one's mode, and its
        owner where that is allowed; other hard links of the old one stay what they were.
        FileExistsError ("create"), IsADirectoryError; FileNotFoundError where the parent is missing and
        `create_parents` false.  ValueError at the root, over the limit of 32 MiB, for another mode, and for
        a new path that is too deep (16) or has too long a part (80).
        """
        ...

    def delete(self, path: str, *, recursive: bool = False) -> int:
        """Delete a file, a symlink (not what it leads to), or a directory; the count of entries deleted.

        FileNotFoundError.  IsADirectoryError "Directory not empty" without `recursive`.  ValueError at the root.
        """
        ...

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory.

        FileExistsError where there is something else, or a directory and not `exist_ok`;
        FileNotFoundError where the parent is missing and `parents` false.  ValueError as `write_bytes`.
        """
        ...

    # -- streams -----------------------------------------------------------------------------
    def open_read(self, path: str) -> ByteReader:
        """Open a file for reading.  FileNotFoundError, IsADirectoryError."""
        ...

    def open_write(self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True) -> ByteWriter:
        """Open a file for writing, of any size.  Modes and errors as `write_bytes`."""
        ...

    def open_text(self, path: str, *, encoding: str = "utf-8") -> TextReader:
        """Open a text file for reading.  FileNotFoundError, IsADirectoryError; ValueError for an unknown encoding.

        Its reads raise UnicodeDecodeError, with the position in the file.
        """
        ...


@runtime_checkable
class SnapshotableFilesystem(Filesystem, Protocol):
    """A filesystem whose state can be kept, restored, and moved to another."""

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Keep the state as it is now.  An OSError means that nothing was kept."""
        ...

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Make the state as it was at `snapshot`: all of it, or nothing changes.

        SnapshotNotFoundError where this filesystem has no such snapshot (another one's, say).
        """
        ...

    def export_archive(self, path: str | os.PathLike[str]) -> None:
        """Write the state as a ZIP archive at `path`, on the host: the whole archive, or nothing.

        An existing file is left alone: FileExistsError.
        """
        ...

    def import_archive(self, path: str | os.PathLike[str]) -> None:
        """Make the state that of the archive at `path`, on the host: all of it, or nothing changes.

        What the archive lacks is removed.  ArchiveError where it is refused; FileNotFoundError.
        """
        ...
