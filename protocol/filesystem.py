"""Filesystem: the agent's view of a backend (paths, text, bytes, streams, search).

Paths are relative to the root: "/x" means "x", and ".." cannot leave the root.  Symlinks are followed within the root;
one that leads outside raises PermissionError.  Errors are the built-in exceptions; each `OSError` has `errno` and
`filename`.  Every method that takes a path also raises ValueError if the path has a NUL or a name of more than 255
bytes, NotADirectoryError if it leads below a file, and PermissionError if access is denied.  Calls that change anything
raise PermissionError (EROFS) on a read-only filesystem.

Text is UTF-8: `read` refuses a file that is not, unless its encoding is named, and `write` refuses text that UTF-8
cannot encode (lone surrogates).  Nothing is replaced or guessed.

Threading: one thread at a time, unless an implementation says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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

if TYPE_CHECKING:
    from protocol.volume import Volume
    from protocol.volume_extensions import CacheInvalidation


@runtime_checkable
class Filesystem(Protocol):
    """Files by path, for agents.  See the module's docstring for paths and errors."""

    @property
    def root(self) -> str:
        """The location of the root, for display: a directory of the host, or "/"."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether every changing call fails."""
        ...

    # -- reading -----------------------------------------------------------------------------
    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        """Read a page of a text file: `limit` lines (None: 2,000; READ_ENTIRE_FILE: all) from line `offset` (from 0).

        Only "\\n" ends a line, and the text is unaltered.  FileNotFoundError, IsADirectoryError.  ValueError for
        negative numbers, for a page over the limit of 32 MiB, and if any part of the file cannot be decoded
        (`read_bytes` reads such a file).
        """
        ...

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        """Read a page of a file: `limit` bytes (None: all) from byte `offset`.

        FileNotFoundError, IsADirectoryError.  ValueError for negative numbers and over the limit of 32 MiB.
        """
        ...

    def exists(self, path: str) -> bool:
        """Return whether `path` exists.  A broken symlink does not."""
        ...

    def is_file(self, path: str) -> bool:
        """Return whether `path` is a regular file."""
        ...

    def is_dir(self, path: str) -> bool:
        """Return whether `path` is a directory."""
        ...

    def stat(self, path: str) -> FileStat:
        """Return the attributes of the file at `path`.  FileNotFoundError."""
        ...

    def list(self, path: str = ".") -> Sequence[FileEntry]:
        """Return the entries of a directory, sorted by name.  FileNotFoundError, NotADirectoryError."""
        ...

    # -- searching ---------------------------------------------------------------------------
    def glob(self, pattern: str, *, path: str = ".") -> Sequence[GlobMatch]:
        """Return the files below `path` that match, sorted by path; the pattern is relative to `path`.

        A pattern without "/" matches names at any depth; "*" matches within a part, "**" across any number of parts,
        and braces expand.  FileNotFoundError, NotADirectoryError.
        """
        ...

    def grep(
        self, pattern: str, *, path: str = ".", glob: str | None = None, max_matches: int | None = None
    ) -> Sequence[GrepMatch]:
        """Return the first match of each line that the regular expression matches, by path and line number.

        `path` is a directory or a file; `glob` selects files as the method `glob` does; the result has at most
        `max_matches` (None: 1,000).  Binary and undecodable files are skipped.  FileNotFoundError.  ValueError for an
        invalid expression and a negative number.
        """
        ...

    # -- changing ----------------------------------------------------------------------------
    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write text as UTF-8.  See `write_bytes`; ValueError also for text that UTF-8 cannot encode."""
        ...

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write a file.  `mode`: "create" (must not exist), "overwrite" or "append" (both may create it).

        Overwriting is atomic: a reader sees the old file or the new one.  The new file has the old one's mode, and its
        owner if that is allowed; other hard links keep the old content.  FileExistsError ("create"), IsADirectoryError;
        FileNotFoundError if the parent is missing and `create_parents` is false.  ValueError for the root, over the
        limit of 32 MiB, for another mode, and for a new path that is too deep (16) or has too long a part (80).
        """
        ...

    def delete(self, path: str, *, recursive: bool = False) -> int:
        """Delete a file, a symlink (not its target) or a directory; return the number of entries deleted.

        FileNotFoundError.  IsADirectoryError "Directory not empty" without `recursive`.  ValueError for the root.
        """
        ...

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory.

        FileExistsError if the path exists and is not a directory, or `exist_ok` is false; FileNotFoundError if the
        parent is missing and `parents` is false.  ValueError as for `write_bytes`.
        """
        ...

    # -- streams -----------------------------------------------------------------------------
    def open_read(self, path: str) -> ByteReader:
        """Open a file for reading.  FileNotFoundError, IsADirectoryError."""
        ...

    def open_write(self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True) -> ByteWriter:
        """Open a file of any size for writing.  Modes and errors as for `write_bytes`."""
        ...

    def open_text(self, path: str, *, encoding: str = "utf-8") -> TextReader:
        """Open a text file for reading.  FileNotFoundError, IsADirectoryError; ValueError for an unknown encoding.

        Reading raises UnicodeDecodeError with the position in the file.
        """
        ...


@runtime_checkable
class ComparingFilesystem(Filesystem, Protocol):
    """A `Filesystem` that replaces a file only if nobody else has changed it."""

    def replace_bytes(self, path: str, old: bytes, new: bytes) -> WriteResult | None:
        """Replace the content of the existing file `path` by `new`, as `write_bytes` does, if it is still `old`.

        Return None, and change nothing, if it is not.  Other calls of this method and of `write_bytes`, in any process
        of the machine, come before or after.  A program that writes the file by other means in the very moment of the
        replacement is not noticed.
        """
        ...


@runtime_checkable
class SnapshotableFilesystem(Filesystem, Protocol):
    """A filesystem whose state can be kept, restored, exported and imported."""

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Keep the present state.  An OSError means that no snapshot was made."""
        ...

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Make the state equal to `snapshot`, completely or not at all.

        SnapshotNotFoundError if this filesystem does not have the snapshot (for example, if another filesystem does).
        """
        ...

    def export_archive(self, path: str | os.PathLike[str]) -> None:
        """Write the state as a ZIP archive at `path` on the host, completely or not at all.

        An existing file is not changed: FileExistsError.
        """
        ...

    def import_archive(self, path: str | os.PathLike[str]) -> None:
        """Make the state equal to the archive at `path` on the host, completely or not at all.

        Entries that the archive lacks are removed.  ArchiveError if the archive is refused; FileNotFoundError.
        """
        ...


class MountableFilesystem(Filesystem, Protocol):
    """A filesystem over a volume, which a mount serves instead of calling the methods above.  Optional.

    Modes, owners, times, symlinks, hard links and extended attributes then work in the mount.  A mount finds the method
    in the object's class, so an object that forwards calls to another one is served through its own methods.  So is a
    subclass that sets `serving_volume = None`, for example because it overrides methods to record changes.
    """

    def serving_volume(
        self, lock: AbstractContextManager[Any], invalidate: Callable[[CacheInvalidation], None]
    ) -> AbstractContextManager[Volume]:
        """Lend the volume to a thread that serves it to the kernel, until the block ends.

        That thread holds `lock` while it answers requests.  Each call of this object takes `lock` to read or change the
        volume, and then, without the lock, calls `invalidate` with what a restore or import changed.  At the end the
        lookups of the kernel are forgotten.  OSError (EBUSY) if the volume is lent already.
        """
        ...
