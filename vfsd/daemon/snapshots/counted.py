"""CountedTree: a tree that tells how much of it was read, so that what is made of it can show progress."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final

from protocol.tree import CHUNK_BYTES, Tree, TreeEntry

__all__ = ["CountedTree"]


# An entry without content is work too: it counts as much as its header in a tar archive.
_ENTRY_BYTES: Final = 512
_TELL_EVERY_BYTES: Final = 256 * 1024


class CountedTree:
    """`tree`, which is to be walked and read once, in chunks; `told` is called with (bytes done, bytes in all).

    `entries` are in it.
    """

    def __init__(self, tree: Tree, told: Callable[[int, int], None]) -> None:
        self._tree = tree
        self._told = told
        self._done = self._last_told = 0
        self.entries = 0
        size = 0
        for entry in tree.walk():
            self.entries += 1
            size += entry.size if entry.is_file else 0
        self._total = size + _ENTRY_BYTES * self.entries

    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`, as for all that follow."""
        return self._tree.entry(path)

    def children(self, path: bytes) -> list[bytes]:
        return self._tree.children(path)

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        for entry in self._tree.walk(path):
            self._add(_ENTRY_BYTES)
            yield entry

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        for chunk in self._tree.chunks(path, size):
            self._add(len(chunk))
            yield chunk

    def _add(self, size: int) -> None:
        self._done += size
        if self._done - self._last_told >= _TELL_EVERY_BYTES:
            self._last_told = self._done
            self._told(min(self._done, self._total), self._total)

    def touched(self, other: Tree) -> Collection[bytes] | None:
        return self._tree.touched(other)
