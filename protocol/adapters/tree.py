"""PathFilesTree: the live files of a `PathFiles` as a read-only tree.

A walk sees changes made meanwhile.  Each call looks its path up from the root, without following any symlink, and holds
at most two nodes.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import NamedTuple

from protocol.adapters.path_filesystem.files import OpenFile, PathFiles, Status, held
from protocol.adapters.path_filesystem.resolve import enter
from protocol.errors import os_error
from protocol.paths import decode, located
from protocol.tree import CHUNK_BYTES, Chunk, LookupTree, TreeEntry, sparse

__all__ = ["PathFilesTree"]


class _Found(NamedTuple):
    """A file found by a search, with the attributes that the search needs."""

    path: bytes
    mode: int
    size: int


class PathFilesTree(LookupTree):
    """Implements `protocol.tree.Tree`.  `with_xattrs=False` omits xattrs from entries, for a search."""

    def __init__(self, store: PathFiles, *, with_xattrs: bool = True) -> None:
        self._store = store
        self._with_xattrs = with_xattrs

    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`, as for all that follow."""
        with held(self._store, self._node(path)) as node, located(decode(path)):
            return self._entry(path, node, self._store.status(node))

    def children(self, path: bytes) -> list[bytes]:
        return sorted(name for name, _ in self._names(path))

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        waiting = [path]
        while waiting:
            at = waiting.pop()
            try:
                entry = self.entry(at)
                names = self.children(at) if entry.is_dir else []
            except (FileNotFoundError, NotADirectoryError):
                if at == path:
                    raise
                continue  # removed since its directory was read
            yield entry
            waiting.extend(at + b"/" + name if at else name for name in reversed(names))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        with located(decode(path)), closing(self._open(path)) as file:
            return file.read(offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        offset = 0
        with located(decode(path)), closing(self._open(path)) as file:
            while chunk := file.read(offset, size):
                yield from sparse(chunk)
                offset += len(chunk)

    # -- `protocol.search.NodeTree`: one status for each entry, and no path looked up for it -------
    def node(self, path: bytes) -> _Found:
        entry = self.entry(path)
        return _Found(path, entry.mode, entry.size)

    def child_nodes(self, node: _Found, names: Collection[bytes] | None = None) -> list[tuple[bytes, _Found]]:
        prefix = node.path + b"/" if node.path else b""
        found: list[tuple[bytes, _Found]] = []
        with held(self._store, self._node(node.path)) as directory:
            for name in [name for name, _ in self._store.names(directory)] if names is None else names:
                try:
                    seen = self._store.status_of(directory, name)
                except FileNotFoundError:
                    continue  # removed since the directory was read, or a name that a pattern guessed
                found.append((name, _Found(prefix + name, seen.mode, seen.size)))
        return found

    def read_node(self, node: _Found, offset: int, size: int) -> bytes:
        return self.read(node.path, offset, size)

    def _node(self, path: bytes) -> int:
        with located(decode(path)):
            return enter(self._store, path.split(b"/") if path else ())

    def _open(self, path: bytes) -> OpenFile:
        node = self._node(path)
        try:
            _check_regular(self._store.status(node).mode)
            return self._store.open(node, "read")
        except BaseException:
            self._store.release(node)
            raise

    def _names(self, path: bytes) -> list[tuple[bytes, int]]:
        with held(self._store, self._node(path)) as node, located(decode(path)):
            return self._store.names(node)

    def _entry(self, path: bytes, node: int, seen: Status) -> TreeEntry:
        return TreeEntry(
            path=path,
            mode=seen.mode,
            size=0 if stat.S_ISDIR(seen.mode) else seen.size,
            mtime_ns=seen.mtime_ns,
            uid=seen.uid,
            gid=seen.gid,
            nlink=seen.nlink,
            inode=seen.inode,
            rdev=seen.rdev,
            target=self._store.readlink(node) if stat.S_ISLNK(seen.mode) else b"",
            xattrs=self._store.xattrs(node) if self._with_xattrs else {},
        )


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise os_error(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL)
