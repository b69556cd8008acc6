"""PartialTree: the part of a tree that an import needs."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator

from protocol.diff.tree_diff import is_at_or_below
from protocol.errors import os_error
from protocol.tree import CHUNK_BYTES, Chunk, LookupTree, Tree, TreeEntry


class PartialTree(LookupTree):
    """What `tree` has at and below `paths`, and `directories` and the directories above, without the rest in them.

    Takes as long as `paths` are many, however many names the directories above have.
    """

    def __init__(self, tree: Tree, paths: Collection[bytes], directories: Collection[bytes]) -> None:
        self._tree = tree
        self._whole = frozenset(paths)
        self._names: dict[bytes, set[bytes]] = {b"": set()}  # of directories that are shown in part
        for path in (*paths, *directories):
            at = path
            while at:
                above, _, name = at.rpartition(b"/")
                names = self._names.setdefault(above, set())
                if name in names:
                    break  # so are the directories above
                names.add(name)
                at = above
        for path in directories:
            self._names.setdefault(path, set())

    def _is_whole(self, path: bytes) -> bool:
        return is_at_or_below(path, self._whole)

    def entry(self, path: bytes) -> TreeEntry:
        if path not in self._names and not self._is_whole(path):
            raise os_error(errno.ENOENT, os.fsdecode(path))
        return self._tree.entry(path)

    def children(self, path: bytes) -> list[bytes]:
        if self._is_whole(path):
            return self._tree.children(path)
        if path not in self._names:
            raise os_error(errno.ENOENT, os.fsdecode(path))
        existing = []
        for name in sorted(self._names[path]):
            try:
                self._tree.entry(path + b"/" + name if path else name)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it is to be removed
            existing.append(name)
        return existing

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        return self._tree.chunks(path, size)
