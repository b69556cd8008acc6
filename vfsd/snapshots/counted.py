"""CountedTree: a tree that tells how much of its content was read, so that what is made of it can show progress."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from protocol.tree import CHUNK_BYTES, Tree, TreeEntry

__all__ = ["CountedTree"]


class CountedTree:
    """`tree`, all of whose files are to be read once in chunks; `told` is called with (bytes done, bytes in all)."""

    def __init__(self, tree: Tree, told: Callable[[int, int], None]) -> None:
        self._tree = tree
        self._told = told
        self._done = 0
        self._total = sum(entry.size for entry in tree.walk() if entry.is_file)

    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`, as for all that follow."""
        return self._tree.entry(path)

    def children(self, path: bytes) -> list[bytes]:
        return self._tree.children(path)

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        return self._tree.walk(path)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        for chunk in self._tree.chunks(path, size):
            self._done += len(chunk)
            self._told(self._done, self._total)
            yield chunk

    def touched(self, other: Tree) -> Collection[bytes] | None:
        return self._tree.touched(other)
