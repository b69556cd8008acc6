"""Read an archive as a tree: `open_archive`, which checks all of it first."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from typing import BinaryIO, Final, TypeAlias

from protocol.archive.check import Contents, read_contents
from protocol.archive.content import ContentReader, decompressed
from protocol.archive.limits import ArchiveLimits
from protocol.archive.members import Member
from protocol.errors import ArchiveError, os_error, shown
from protocol.tree import CHUNK_BYTES, ByteProgress, Chunk, Tree, TreeEntry, no_progress, sparse

# Local headers and small entries are adjacent: one read(2) gets many.
_BUFFER_BYTES: Final = 128 * 1024
Source: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | BinaryIO


@contextmanager
def open_archive(
    source: Source,
    *,
    limits: ArchiveLimits | None = None,
    progress: ByteProgress = no_progress,
    check_content: bool = True,
    reserve: Callable[[int], None] = lambda _: None,
) -> Iterator[ArchiveTree]:
    """Open the archive at a path or in a seekable file as a tree, for the length of the context.

    Everything is checked before the context is entered, each entry's content by decompressing it once.  Without
    `check_content` the content of a file is checked when it is read; then `chunks` may raise ArchiveError.  That is
    for callers that read everything into a place that they can discard.  `reserve` is called with each number of bytes
    that reading the manifest takes, before it takes them, and may raise; the bytes are free again when the context is
    entered.  `progress` is called during the check.  ArchiveError names the refused entry; OSError if the archive
    cannot be read.  A file object that was passed in stays open.
    """
    limits = limits or ArchiveLimits()
    if isinstance(source, str | bytes | os.PathLike):
        with _open_regular(source) as file:
            try:
                contents = read_contents(file, limits, progress, check_content=check_content, reserve=reserve)
            except ArchiveError as error:
                # An error without an entry names the archive.
                raise ArchiveError(str(error.strerror), error.entry or os.fsdecode(source)) from None
            yield ArchiveTree(file, contents)
    elif not source.seekable():
        raise ArchiveError("an archive can only be read from a seekable file")
    else:
        contents = read_contents(source, limits, progress, check_content=check_content, reserve=reserve)
        yield ArchiveTree(source, contents)


def _open_regular(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> BinaryIO:
    # Without O_NONBLOCK, opening a fifo would wait for a writer.
    file = open(path, "rb", buffering=_BUFFER_BYTES, opener=_open_at_once)  # noqa: SIM115 -- the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ArchiveError("an archive must be a regular file", os.fsdecode(path))
    return file


def _open_at_once(name: str | bytes, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


class ArchiveTree:
    """The tree of an archive, made by `open_archive`; for one thread at a time.

    Inode numbers only identify hard links.
    """

    def __init__(self, file: BinaryIO, contents: Contents) -> None:
        self._file = file
        self._reader = ContentReader(file)
        self._entries = contents.entries
        self._members = contents.members
        self._children: dict[bytes, list[bytes]] = {path: [] for path, entry in self._entries.items() if entry.is_dir}
        for path in self._entries:
            if path:
                cut = path.rfind(b"/")
                self._children[path[:cut] if cut >= 0 else b""].append(path[cut + 1 :])
        for names in self._children.values():
            names.sort()
        self.file_count = contents.manifest.file_count
        self.total_bytes = contents.manifest.total_bytes
        self.created_at = _utc(contents.manifest.created_at)

    def entry(self, path: bytes) -> TreeEntry:
        """The entry at `path`.  FileNotFoundError, NotADirectoryError."""
        entry = self._entries.get(path)
        if entry is not None:
            return entry
        parent = path.rpartition(b"/")[0]
        while parent not in self._entries:
            parent = parent.rpartition(b"/")[0]
        raise os_error(errno.ENOENT if self._entries[parent].is_dir else errno.ENOTDIR, shown(path))

    def children(self, path: bytes) -> list[bytes]:
        """The names in directory `path`, sorted.  FileNotFoundError, NotADirectoryError."""
        if not self.entry(path).is_dir:
            raise os_error(errno.ENOTDIR, shown(path))
        return list(self._children[path])

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        """Yield `path` and everything below it, parents first, siblings sorted."""
        self.entry(path)
        # A stack instead of recursion: paths may be 2,048 deep.
        waiting = [path]
        while waiting:
            path = waiting.pop()
            yield self._entries[path]
            names = self._children.get(path)
            if names:
                prefix = path + b"/" if path else b""
                waiting.extend(prefix + name for name in reversed(names))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """Read up to `size` bytes of a file; fewer only at its end.  IsADirectoryError; EINVAL for a special file.

        Fast for reads that go forward; a read further back decompresses from the start.
        """
        return self._reader.read(self._file_member(path), offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Yield the content of a regular file in chunks of at most `size` bytes, and holes; errors as for `read`."""
        return chain.from_iterable(map(sparse, decompressed(self._file, self._file_member(path), size)))

    def touched(self, other: Tree) -> Collection[bytes] | None:  # noqa: ARG002 -- the contract's
        """Unknown without a walk."""
        return None

    def _file_member(self, path: bytes) -> Member:
        entry = self.entry(path)
        if not entry.is_file:
            raise os_error(errno.EISDIR if entry.is_dir else errno.EINVAL, shown(path))
        return self._members[path]


def _utc(created_at: str) -> datetime:
    created = datetime.fromisoformat(created_at)
    return created.replace(tzinfo=UTC) if created.tzinfo is None else created
