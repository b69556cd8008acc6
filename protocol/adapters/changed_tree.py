"""changed_tree: of a state only what differs from another, and the directories that it is in."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from protocol.diff.tree_diff import changes
from protocol.errors import os_error
from protocol.tree import CHUNK_BYTES, Tree, TreeEntry

__all__ = ["changed_tree"]


def changed_tree(base: Tree, tree: Tree) -> Tree:
    """`tree` without what is the same in `base`.  What was removed from `base` it cannot say."""
    shown = {b""}
    for change in changes(base, tree):
        if change.new is None:
            continue
        path = change.path
        while path not in shown:
            shown.add(path)
            path = path.rpartition(b"/")[0]
    return _ChangedTree(tree, shown)


class _ChangedTree:
    """`tree`, of which only the paths `shown` are there."""

    def __init__(self, tree: Tree, shown: set[bytes]) -> None:
        self._tree = tree
        self._shown = shown

    def _check(self, path: bytes) -> None:
        if path not in self._shown:
            raise os_error(2, path.decode("utf-8", "backslashreplace"))

    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`, as for all that follow."""
        self._check(path)
        return self._tree.entry(path)

    def children(self, path: bytes) -> list[bytes]:
        self._check(path)
        prefix = path + b"/" if path else b""
        return [name for name in self._tree.children(path) if prefix + name in self._shown]

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        todo = [path]
        while todo:
            entry = self.entry(todo.pop())
            yield entry
            if entry.is_dir:
                prefix = entry.path + b"/" if entry.path else b""
                todo += [prefix + name for name in reversed(self.children(entry.path))]

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        self._check(path)
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        self._check(path)
        return self._tree.chunks(path, size)

    def touched(self, other: Tree) -> Collection[bytes] | None:
        del other
        return None
