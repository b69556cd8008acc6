"""FilesystemTree: any `Filesystem` as a tree; and `put_archive_into`, for a filesystem without archives of its own.

Covers what the contract has: files and directories.  Modes and times are not restored.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from protocol.adapters.path_filesystem.archives import put_archive
from protocol.diff.plan import execute, plan
from protocol.errors import ArchiveError
from protocol.filesystem import Filesystem
from protocol.paths import decode, encode
from protocol.tree import CHUNK_BYTES, LookupTree, Tree, TreeEntry, filled

__all__ = ["FilesystemTree", "put_archive_into"]


class FilesystemTree(LookupTree):
    """The live files of a `Filesystem` as a `protocol.tree.Tree`; a walk sees changes made meanwhile.

    A symlink appears as the file or directory that it leads to, and anything else raises EINVAL: an archive must not
    omit entries silently.  With `for_search`, symlinks below the top are omitted, and special files appear as fifos,
    which a search passes over.
    """

    def __init__(self, filesystem: Filesystem, *, for_search: bool = False) -> None:
        self._filesystem = filesystem
        self._for_search = for_search

    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`, as for all that follow."""
        found = self._filesystem.stat(decode(path))
        if not (found.is_file or found.is_directory or self._for_search):
            raise OSError(errno.EINVAL, "neither a file nor a directory", found.path)
        kind = stat.S_IFDIR if found.is_directory else stat.S_IFREG if found.is_file else stat.S_IFIFO
        permissions = stat.S_IMODE(found.mode) or (0o755 if found.is_directory else 0o644)
        mtime_ns = round(found.modified_at.timestamp() * 1e6) * 1000 if found.modified_at else 0
        return TreeEntry(path, kind | permissions, 0 if found.is_directory else found.size_bytes, mtime_ns)

    def children(self, path: bytes) -> list[bytes]:
        entries = self._filesystem.list(decode(path))
        return sorted(encode(entry.name) for entry in entries if not (self._for_search and entry.is_symlink))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        with self._filesystem.open_read(decode(path)) as reader:
            reader.seek(offset)
            return reader.read(size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        with self._filesystem.open_read(decode(path)) as reader:
            yield from reader.chunks(size)


def put_archive_into(filesystem: Filesystem, path: str | os.PathLike[str]) -> None:
    """Replace the state of `filesystem` by the archive at `path`.  If that fails, the state before is put back.

    ArchiveError, before anything changes, for an archive with symlinks or special files.
    """
    put_archive(FilesystemTree(filesystem), path, lambda tree: _make_equal(filesystem, tree), _check_types)


def _check_types(tree: Tree) -> None:
    for entry in tree.walk():
        if not (entry.is_dir or entry.is_file):
            raise ArchiveError("this filesystem cannot have symlinks and special files", decode(entry.path))


def _make_equal(filesystem: Filesystem, tree: Tree) -> None:
    # Directories are removed whole: with a step for each entry, removals would follow symlinks to directories.
    steps = plan(FilesystemTree(filesystem), tree, whole_directories=True, links=False)
    execute(steps, _FilesystemTarget(filesystem, tree))


class _FilesystemTarget:
    """Implements `protocol.diff.plan.Target`."""

    def __init__(self, filesystem: Filesystem, tree: Tree) -> None:
        self._filesystem = filesystem
        self._tree = tree

    def remove(self, old: TreeEntry) -> None:
        self._filesystem.delete(decode(old.path), recursive=old.is_dir)

    def make_directory(self, new: TreeEntry, old: TreeEntry | None) -> None:
        if old is not None:
            self.remove(old)
        self._filesystem.mkdir(decode(new.path))

    def put(self, new: TreeEntry, old: TreeEntry | None) -> None:
        if old is not None and old.is_dir:
            self.remove(old)
        with self._filesystem.open_write(decode(new.path)) as writer:
            writer.write_all(filled(self._tree.chunks(new.path)))

    def write(self, new: TreeEntry, old: TreeEntry) -> None:
        self.put(new, old)

    def link(self, new: TreeEntry, other: bytes, old: TreeEntry | None) -> None:  # noqa: ARG002 -- the contract's
        raise AssertionError("planned without links")

    def set_metadata(self, new: TreeEntry) -> None:
        """A `Filesystem` has no call for this."""
