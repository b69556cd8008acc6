"""PartedTree: a tree with some paths as they are in another tree; the base of a merge after merges of single paths.

Invariants, for `PartedTree(below, part, paths)`:

- at and below each of `paths` it is like `part`, also where `part` has nothing;
- the directories above a path that exists in `part` exist: as in `below` if that has a directory there, else as in
  `part`, with nothing in them but what leads to such a path;
- everywhere else it is like `below`.

A file with several names has the same content under all of them only if `paths` has all of its names or none, as the
merged paths of a merge do (`Merge.scopes`).  Inode numbers of both trees have to mean the same files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from protocol.diff.tree_diff import comparer, entry_or_none, is_at_or_below, is_same_inode
from protocol.tree import CHUNK_BYTES, Chunk, LookupTree, Tree, TreeEntry


class PartedTree(LookupTree):
    """See the module's docstring."""

    def __init__(self, below: Tree, part: Tree, paths: Collection[bytes]) -> None:
        self._below = below
        self._part = part
        self._paths = frozenset(paths)
        self._names: dict[bytes, set[bytes]] = {}  # directory above one of `paths` -> the names that lead there
        self._needed: set[bytes] = set()  # the directories above paths that exist in `part`
        for path in self._paths:
            exists = entry_or_none(part, path) is not None
            at = path
            while at:
                above, _, name = at.rpartition(b"/")
                self._names.setdefault(above, set()).add(name)
                if exists:
                    self._needed.add(above)
                at = above

    def has_part(self, path: bytes) -> bool:
        """Whether `path` is one of `paths`, or one of those of the tree below."""
        return path in self._paths or (isinstance(self._below, PartedTree) and self._below.has_part(path))

    def owner(self, path: bytes) -> Tree:
        """Return the tree that has the entry and the content of `path`, or that lacks it."""
        is_of_part = is_at_or_below(path, self._paths) or self._is_only_of_part(path)
        tree = self._part if is_of_part else self._below
        return tree.owner(path) if isinstance(tree, PartedTree) else tree

    def _is_only_of_part(self, path: bytes) -> bool:
        """Whether this is a directory above a path in `part`, where `below` has no directory."""
        if path not in self._needed:
            return False
        found = entry_or_none(self._below, path)
        return found is None or not found.is_dir

    # -- protocol.tree.Tree ------------------------------------------------------------------
    def entry(self, path: bytes) -> TreeEntry:
        return self.owner(path).entry(path)

    def children(self, path: bytes) -> list[bytes]:
        if is_at_or_below(path, self._paths):
            return self._part.children(path)
        names = [] if self._is_only_of_part(path) else self._below.children(path)
        leading = self._names.get(path)
        if leading is None:
            return names
        prefix = path + b"/" if path else b""
        existing = [name for name in leading if entry_or_none(self, prefix + name) is not None]
        return sorted([*(name for name in names if name not in leading), *existing])

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self.owner(path).read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        return self.owner(path).chunks(path, size)

    def touched(self, other: Tree) -> Collection[bytes] | None:
        below, part = self._below.touched(other), self._part.touched(other)
        if below is None or part is None:
            return None
        found = {*below, *part}
        # A tree names a directory that was replaced, and not what is in it.  Above `paths`, this tree can have the
        # directory of one tree with content of the other.
        for directory in self._names:
            if directory in found and not self._is_directory_of(other, directory):
                for tree in (self, other):
                    if entry_or_none(tree, directory) is not None:
                        found.update(entry.path for entry in tree.walk(directory))
        return found

    def _is_directory_of(self, other: Tree, path: bytes) -> bool:
        """Whether all trees have the same directory there."""
        entry = entry_or_none(other, path)
        return all(is_same_inode(entry_or_none(tree, path), entry) for tree in (self._below, self._part))

    # -- protocol.diff.tree_diff.ComparesContent ---------------------------------------------------
    def same_content(self, path: bytes, other: Tree, other_path: bytes | None = None) -> bool | None:
        tree = self.owner(path)
        comparing = comparer(tree)
        return None if comparing is None else comparing.same_content(path, other, other_path)
