"""Trees that show a part of another tree: without the paths that a rule hides, or only what differs from a base."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator

from protocol.diff.tree_diff import ComparesContent, changes
from protocol.errors import os_error
from protocol.tree import CHUNK_BYTES, Chunk, Tree, TreeEntry, unfiltered

__all__ = ["FilteredTree", "Hides", "changed_tree"]

Hides = Callable[[bytes, bool], bool]
"""Called with (path, whether it is a directory) where nothing above the path is hidden: whether the path is."""


class FilteredTree:
    """`tree` without the paths that `hides` hides and everything below them; hidden directories are not walked."""

    def __init__(self, tree: Tree, hides: Hides) -> None:
        self._tree = tree
        self._hides = hides

    @property
    def unfiltered(self) -> Tree:
        """See `protocol.tree.Filtered`."""
        return self._tree

    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`, as for all that follow."""
        entry = self._tree.entry(path)
        ends = [at for at in range(len(path)) if path[at : at + 1] == b"/"]
        if path and (any(self._hides(path[:end], True) for end in ends) or self._hides(path, entry.is_dir)):
            raise os_error(errno.ENOENT, path.decode("utf-8", "backslashreplace"))
        return entry

    def _shown_below(self, directory: bytes) -> list[TreeEntry]:
        prefix = directory + b"/" if directory else b""
        entries = (self._tree.entry(prefix + name) for name in self._tree.children(directory))
        return [entry for entry in entries if not self._hides(entry.path, entry.is_dir)]

    def children(self, path: bytes) -> list[bytes]:
        self.entry(path)
        return [entry.name for entry in self._shown_below(path)]

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        todo = [self.entry(path)]
        while todo:
            entry = todo.pop()
            yield entry
            if entry.is_dir:
                todo += reversed(self._shown_below(entry.path))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        self.entry(path)
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        self.entry(path)
        return self._tree.chunks(path, size)

    def touched(self, other: Tree) -> Collection[bytes] | None:
        """See `protocol.tree.Tree`; both trees must have the same rule."""
        return self._tree.touched(unfiltered(other))

    def same_content(self, path: bytes, other: Tree, other_path: bytes | None = None) -> bool | None:
        """See `protocol.diff.tree_diff.ComparesContent`."""
        if not isinstance(self._tree, ComparesContent):
            return None
        return self._tree.same_content(path, unfiltered(other), other_path)


def changed_tree(base: Tree, tree: Tree, keep_going: Callable[[], None] = lambda: None) -> Tree:
    """The entries of `tree` that differ from `base`, and the directories above them; removals are not shown."""
    shown = {b""}
    for change in changes(base, tree, keep_going=keep_going):
        path = change.path if change.new is not None else b""
        while path not in shown:
            shown.add(path)
            path = path.rpartition(b"/")[0]
    return _ChangedTree(tree, lambda path, _is_directory: path not in shown)


class _ChangedTree(FilteredTree):
    def touched(self, other: Tree) -> None:
        """Unknown: the rule depends on the base, so another tree hides other paths."""
