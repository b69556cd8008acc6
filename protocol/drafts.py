"""The drafts of the filesystem specification: their names, signatures and return types, over any `Filesystem`.

    files = DraftFilesystem(InMemoryFilesystem())  # or Workspace.filesystem, HostFilesystem, ...
    files.write("src/main.py", "print('hello')\\n")  # 15
    snapshots = FilesystemSnapshotManager(files)
    snapshots.snapshot("before")
    files.delete("src")  # 1
    snapshots.rollback("before")  # 1

The drafts are two: one with `read_file`, `write_file`, `list_dir` and results in objects, and one with `read`, `write`,
`list` and archives.  docs/python.md has a table of their names.

Threading: that of the filesystem below.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, Literal, Self, TypeAlias, TypeVar, get_args

from protocol.archive.manifest import read_manifest
from protocol.errors import SnapshotNotFoundError
from protocol.filesystem import Filesystem
from protocol.paths import encoded
from protocol.snapshot_manager import SnapshotManager, export_state, import_state
from protocol.streams import ByteWriter, ClosingStream, TextReader
from protocol.tools import Tool, ToolContext
from protocol.tools.base import DirectoryCreated, FileDeleted, FileEvent, FileWritten, Subscriber, deliver, printable
from protocol.types import FilesystemSnapshot as Taken
from protocol.types import GrepMatch, ReadResult, WriteMode

FilePath: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")
_EVERYTHING: Final = sys.maxsize


class SecurityError(PermissionError, ValueError):
    """A path leads out of the root."""


# -- results ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FileEntry:
    """A file or directory.  `size_bytes` is None for a directory, and for a symlink that leads nowhere."""

    path: str
    kind: Literal["file", "directory"]
    size_bytes: int | None = None
    _files: Filesystem | None = field(default=None, repr=False, compare=False)

    @property
    def content_hash(self) -> str | None:
        """The SHA-256 of the file's present content, in hexadecimal; None for a directory.  Reads the file."""
        if self._files is None or self.kind == "directory":
            return None
        digest = hashlib.sha256()
        with self._files.open_read(self.path) as reader:
            for chunk in reader:
                digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A written file; `created`: it did not exist before."""

    path: str
    bytes_written: int
    created: bool


class _Matches(tuple[T, ...]):
    """The matches of a search; `matches` is the tuple itself."""

    pattern: str

    def __new__(cls, pattern: str, matches: Iterable[T]) -> Self:
        made = super().__new__(cls, matches)
        made.pattern = pattern
        return made

    @property
    def matches(self) -> tuple[T, ...]:
        return tuple(self)


class GlobResult(_Matches[FileEntry]):
    """The files that match `pattern`, by path."""


class GrepResult(_Matches[GrepMatch]):
    """The lines that match `pattern`, by path and number."""


@dataclass(frozen=True, slots=True)
class FilesystemSnapshotRef:
    """An archive of a filesystem; `total_bytes` is the size of its files' content."""

    archive_path: str | None = None
    file_count: int = 0
    total_bytes: int = 0


class TextWriter(ClosingStream):
    """Writes text as UTF-8 with `writer`, which it closes.  A context manager: an error discards what was written."""

    encoding: Final = "utf-8"

    def __init__(self, writer: ByteWriter) -> None:
        super().__init__(writer.path)
        self._writer = writer

    def write(self, text: str) -> int:
        """Write text; return the number of characters.  ValueError if it is closed, or UTF-8 cannot encode `text`."""
        self._check_open()
        self._writer.write(encoded(text))
        return len(text)

    def write_all(self, texts: Iterable[str]) -> int:
        """Write each text; return the number of characters."""
        return sum(map(self.write, texts))

    def close(self) -> None:
        self._closed = True
        self._writer.close()

    def __exit__(self, *details: Any) -> None:
        self._closed = True
        self._writer.__exit__(*details)


# -- the filesystem --------------------------------------------------------------------------------
class DraftFilesystem:
    """The drafts' methods over `filesystem`.

    A path is relative to the root, or absolute and below `root`.  A path that leads out by ".." raises SecurityError,
    which is a ValueError and a PermissionError; a path that leads out by a symlink raises PermissionError.  Other
    errors are those of `Filesystem`.  `publish` is called with the changes of each call, as it is for tools.
    """

    def __init__(self, filesystem: Filesystem, publish: Subscriber = lambda _event: None) -> None:
        self.filesystem: Final = filesystem
        self._publish_to: Final = publish

    @property
    def root(self) -> str:
        """The location of the root: a directory of the host, or "/"."""
        return self.filesystem.root

    def _path(self, path: str) -> str:
        root, relative = os.path.normpath(self.root), path or "."
        if path.startswith("/"):
            relative = f"./{path}" if root == "/" else os.path.relpath(path, root)
        normal = os.path.normpath(relative)
        if normal == ".." or normal.startswith("../"):
            raise SecurityError(f"path leads out of the root: {path!r}")
        return normal

    def _publish(self, event: FileEvent) -> None:
        deliver(event, self._publish_to)

    # -- reading -----------------------------------------------------------------------------
    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadResult:
        """Read lines of a file.  UnicodeDecodeError, a ValueError, if it is not UTF-8."""
        try:
            return self.filesystem.read(self._path(path), offset=offset, limit=limit)
        except ValueError as error:
            if isinstance(error.__cause__, UnicodeDecodeError):
                raise error.__cause__ from None
            raise

    read_file = read

    def exists(self, path: str) -> bool:
        """Return whether `path` exists."""
        return self.filesystem.exists(self._path(path))

    def is_file(self, path: str) -> bool:
        """Return whether `path` is a regular file."""
        return self.filesystem.is_file(self._path(path))

    def is_dir(self, path: str) -> bool:
        """Return whether `path` is a directory."""
        return self.filesystem.is_dir(self._path(path))

    def open_text(self, path: str) -> TextReader:
        """Open a text file for reading, as UTF-8."""
        return self.filesystem.open_text(self._path(path))

    def list(self, path: str = "") -> tuple[FileEntry, ...]:
        """Return the entries of a directory, sorted by name."""
        return tuple(self._entry(each.path, each.is_directory) for each in self.filesystem.list(self._path(path)))

    list_dir = list  # noqa: A003

    def _entry(self, path: str, is_directory: bool) -> FileEntry:
        if is_directory:
            return FileEntry(path, "directory")
        size_bytes = None
        with contextlib.suppress(OSError):  # it leads nowhere, or is gone meanwhile
            size_bytes = self.filesystem.stat(path).size_bytes
        return FileEntry(path, "file", size_bytes, self.filesystem)

    def glob(self, pattern: str, *, path: str | None = None) -> GlobResult:
        """Find files below `path`.  A "*" of the pattern also matches slashes; it is relative to `path`."""
        base = self._path(path or "")
        found = self.filesystem.glob("**", path=base)
        start = 0 if base == "." else len(base) + 1
        names = (each.path for each in found if fnmatchcase(each.path[start:], pattern))
        return GlobResult(pattern, (self._entry(name, is_directory=False) for name in names))

    def grep(
        self,
        pattern: str,
        *,
        path: str | None = None,
        file_glob: str | None = None,
        glob_filter: str | None = None,
        max_matches: int | None = None,
    ) -> GrepResult:
        """Find lines by a regular expression, in files whose whole path matches `file_glob` and `glob_filter`.

        A "*" in these patterns also matches slashes.  Returns at most `max_matches` lines (None: all).
        """
        found = self.filesystem.grep(pattern, path=self._path(path or ""), max_matches=_EVERYTHING)
        globs = [each for each in (file_glob, glob_filter) if each is not None]
        matches = (match for match in found if all(fnmatchcase(match.path, each) for each in globs))
        return GrepResult(pattern, islice(matches, max_matches))

    # -- changing ----------------------------------------------------------------------------
    def write(self, path: str, content: str, *, mode: WriteMode = "overwrite") -> int:
        """Write a file; return the number of bytes.  FileExistsError if `mode` is "create" and the file exists."""
        return self._write(path, content, mode).bytes_written

    def write_file(self, path: str, content: str, *, create_only: bool = False) -> WriteResult:
        """Write a file.  FileExistsError if `create_only` and the file exists."""
        return self._write(path, content, "create" if create_only else "overwrite")

    def _write(self, path: str, content: str, mode: WriteMode) -> WriteResult:
        if mode not in get_args(WriteMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(WriteMode))}, not {mode!r}")
        relative, created = self._path(path), True
        try:
            done = self.filesystem.write(relative, content, mode="create")
        except FileExistsError:
            if mode == "create":
                raise
            done, created = self.filesystem.write(relative, content, mode=mode), False
        self._publish(FileWritten(done.path, done.bytes_written))
        return WriteResult(done.path, done.bytes_written, created)

    def open_text_writer(self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True) -> TextWriter:
        """Open a text file for writing.  Modes and errors as for `Filesystem.open_write`."""
        return TextWriter(self.filesystem.open_write(self._path(path), mode=mode, create_parents=create_parents))

    def delete(self, path: str, *, recursive: bool = True) -> int:
        """Delete a file or directory; return the number of files deleted, or of entries in a directory; 0 if missing.

        IsADirectoryError for a directory with entries, unless `recursive`.
        """
        relative, is_directory = self._path(path), False
        try:
            with contextlib.suppress(FileNotFoundError):  # a symlink that leads nowhere can be deleted
                found = self.filesystem.stat(relative)
                is_directory = found.is_directory and not found.is_symlink
            entries = self.filesystem.delete(relative, recursive=recursive)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        self._publish(FileDeleted(relative, entries))
        return entries - is_directory

    def mkdir(self, path: str, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a directory.  FileExistsError, FileNotFoundError."""
        relative = self._path(path)
        self.filesystem.mkdir(relative, parents=parents, exist_ok=exist_ok)
        self._publish(DirectoryCreated(relative))

    # -- archives ----------------------------------------------------------------------------
    def export_archive(self, path: FilePath) -> int:
        """Write the state as an archive at `path` of the host; return the number of files.

        Makes missing directories, and replaces an existing file, both only if the archive can be written.
        """
        return self.snapshot(path).file_count

    def import_archive(self, path: FilePath) -> int:
        """Make the state equal to an archive, completely or not at all; return the number of files.  ArchiveError."""
        count = read_manifest(path).file_count
        import_state(self.filesystem, path)
        return count

    def snapshot(self, path: FilePath) -> FilesystemSnapshotRef:
        """Write the state as `export_archive` does, and describe the archive."""
        directory, name = os.path.split(os.path.abspath(path))
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".vfsd-") as unfinished:
            made = os.path.join(unfinished, name)
            export_state(self.filesystem, made)
            manifest = read_manifest(made)
            os.replace(made, path)
        return FilesystemSnapshotRef(os.fspath(path), manifest.file_count, manifest.total_bytes)

    def restore(self, path: FilePath) -> None:
        """Make the state equal to an archive, completely or not at all.  ArchiveError; FileNotFoundError."""
        import_state(self.filesystem, path)


# -- snapshots -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One archive.  `file_count` counts its regular files; `total_bytes` is the size of the archive in bytes."""

    snapshot_id: str
    archive_path: Path
    file_count: int
    total_bytes: int
    created_at: datetime


class FilesystemSnapshotManager:
    """Snapshots of `filesystem` as `<id>.fs.zip` in `snapshot_dir`, which is made with mode 0700 if it is missing.

    `snapshot_dir` is None for "wink-fs-snapshots" in the directory for temporary files, which must belong to the user
    (PermissionError).  It must be outside the filesystem (ValueError).  Other programs' snapshots in the directory are
    found as well.  ArchiveError if the archive of a snapshot is damaged: it names the archive.
    """

    def __init__(self, filesystem: Filesystem | DraftFilesystem, snapshot_dir: FilePath | None = None) -> None:
        self.filesystem: Any = filesystem
        kept = filesystem.filesystem if isinstance(filesystem, DraftFilesystem) else filesystem
        self._manager: Final = SnapshotManager(kept, default_directory() if snapshot_dir is None else snapshot_dir)

    def snapshot(self, snapshot_id: str) -> SnapshotInfo:
        """Write the present state to an archive.  SnapshotExistsError; ValueError for an id that is not a file name."""
        return self._info(self._manager.snapshot(snapshot_id))

    def rollback(self, snapshot_id: str) -> int:
        """Make the files equal to a snapshot, and return how many files it has.  KeyError if there is none."""
        found = self.get(snapshot_id)
        if found is None:
            raise KeyError(f"no such snapshot: {snapshot_id!r}")
        return self.restore(found.archive_path)

    def restore(self, archive_path: FilePath) -> int:
        """Make the files equal to an archive, such as that of another session, and return how many files it has.

        ArchiveError if the archive is refused; nothing has changed then.  FileNotFoundError.
        """
        count = read_manifest(archive_path).file_count
        self._manager.restore(archive_path)
        return count

    def get(self, snapshot_id: str) -> SnapshotInfo | None:
        """Return a snapshot, or None if there is none with this id."""
        try:
            return self._info(self._manager.get(snapshot_id))
        except (SnapshotNotFoundError, ValueError):
            return None

    def list_snapshots(self) -> tuple[SnapshotInfo, ...]:
        """Return all snapshots, oldest first."""
        return tuple(map(self._info, self._manager.list_snapshots()))

    def delete(self, snapshot_id: str) -> bool:
        """Delete a snapshot and its archive.  False if there is none with this id."""
        try:
            self._manager.delete(snapshot_id)
        except (SnapshotNotFoundError, ValueError):
            return False
        return True

    def _info(self, taken: Taken) -> SnapshotInfo:
        path = Path(taken.commit_ref)
        count = read_manifest(path).file_count
        return SnapshotInfo(str(taken.snapshot_id), path, count, path.stat().st_size, taken.created_at)


FilesystemSnapshot = FilesystemSnapshotManager  # its name in one of the drafts


def default_directory() -> str:
    """Return the default directory for snapshots, made if it is missing.

    PermissionError if it belongs to another user, who could replace the archives.
    """
    directory = os.path.join(tempfile.gettempdir(), "wink-fs-snapshots")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to another user: pass a snapshot_dir")
    return directory


# -- tools -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ToolResult(Generic[T]):
    """The result of a tool.  A failed call has no value, and its `message` says why."""

    message: str
    value: T | None
    success: bool = True


def call_tool(
    tool: Tool[Any, T], arguments: Mapping[str, Any] | str | bytes, context: ToolContext | None = None
) -> ToolResult[T]:
    """Call `tool`; an OSError or ValueError becomes a result without success."""
    if context is None:
        return ToolResult("No filesystem available", None, success=False)
    try:
        value = tool.call(arguments, context)
    except (OSError, ValueError) as error:
        return ToolResult(printable(str(error)), None, success=False)
    return ToolResult(tool.render(value), value)
