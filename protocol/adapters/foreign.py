"""Any `Filesystem` as a tree, and as the place for a tree: for those that have no archives of their own.

Only what the contract has: files and directories.  A tree with symlinks or special files is refused
before anything changes; modes and times are not kept.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Collection, Iterator

from protocol.archive import open_archive, write_archive
from protocol.errors import ArchiveError
from protocol.filesystem import Filesystem
from protocol.paths import decode
from protocol.tree import CHUNK_BYTES, Tree, TreeEntry

__all__ = ["FilesystemTree", "put_archive_into"]


class FilesystemTree:
    """The live files of a `Filesystem` as a `protocol.tree.Tree`.  Symlinks in it are seen as what they lead to."""

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem

    def entry(self, path: bytes) -> TreeEntry:
        seen = self._filesystem.stat(decode(path))
        if not (seen.is_file or seen.is_directory):
            raise OSError(errno.EINVAL, "neither a file nor a directory", seen.path)
        kind, permissions = (stat.S_IFDIR, 0o755) if seen.is_directory else (stat.S_IFREG, 0o644)
        mtime_ns = round(seen.modified_at.timestamp() * 1e6) * 1000 if seen.modified_at else 0
        size = 0 if seen.is_directory else seen.size_bytes
        return TreeEntry(path, kind | (stat.S_IMODE(seen.mode) or permissions), size, mtime_ns)

    def children(self, path: bytes) -> list[bytes]:
        return sorted(os.fsencode(entry.name) for entry in self._filesystem.list(decode(path)))

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        waiting = [path]
        while waiting:
            at = waiting.pop()
            entry = self.entry(at)
            yield entry
            if entry.is_dir:
                waiting.extend(at + b"/" + name if at else name for name in reversed(self.children(at)))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        with self._filesystem.open_read(decode(path)) as reader:
            reader.seek(offset)
            return reader.read(size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        with self._filesystem.open_read(decode(path)) as reader:
            yield from reader.chunks(size)

    def touched(self, other: Tree) -> Collection[bytes] | None:  # noqa: ARG002 -- the contract's
        return None


def put_archive_into(filesystem: Filesystem, path: str | os.PathLike[str]) -> None:
    """Make the state of `filesystem` that of the archive at `path`: all of it, or the state before is put back."""
    with open_archive(path) as tree, tempfile.TemporaryFile(prefix="vfsd-before-") as before:
        for entry in tree.walk():
            if not (entry.is_dir or entry.is_file):
                raise ArchiveError("this filesystem cannot have symlinks and special files", decode(entry.path))
        write_archive(FilesystemTree(filesystem), before, level=0)
        try:
            _converge(filesystem, tree)
        except BaseException:
            before.seek(0)
            with open_archive(before) as old:
                _converge(filesystem, old)
            raise


def _converge(filesystem: Filesystem, tree: Tree) -> None:
    live = FilesystemTree(filesystem)
    for entry in tree.walk():
        path = decode(entry.path)
        if entry.is_dir:
            if filesystem.exists(path) and not filesystem.is_dir(path):
                filesystem.delete(path)
            filesystem.mkdir(path)
            prefix = entry.path + b"/" if entry.path else b""
            for name in set(live.children(entry.path)).difference(tree.children(entry.path)):
                filesystem.delete(decode(prefix + name), recursive=True)
            continue
        if filesystem.is_dir(path):
            filesystem.delete(path, recursive=True)
        if not _is_equal(live, tree, entry):
            with filesystem.open_write(path) as writer:
                writer.write_all(tree.chunks(entry.path))


def _is_equal(live: FilesystemTree, tree: Tree, entry: TreeEntry) -> bool:
    try:
        if live.entry(entry.path).size != entry.size:
            return False
    except FileNotFoundError:
        return False
    pairs = zip(live.chunks(entry.path), tree.chunks(entry.path, CHUNK_BYTES), strict=False)
    return all(ours == theirs for ours, theirs in pairs)
