"""The tree that tools search: the context's tree, or any Filesystem as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from protocol.adapters.filesystem_tree import FilesystemTree
from protocol.adapters.path_filesystem.resolve import resolve
from protocol.adapters.path_filesystem.tree_files import TreeFiles
from protocol.paths import decode, encode, located, normalise
from protocol.tools.base import ToolContext
from protocol.tree import Tree

__all__ = ["Shown", "below"]


class Shown:
    """Maps found paths back to the beginning that the caller wrote, if that led through a symlink."""

    def __init__(self, asked: bytes, real: bytes) -> None:
        self._asked = asked
        self._real = real

    def __call__(self, path: bytes) -> str:
        rest = path[len(self._real) :].lstrip(b"/")
        return decode(self._asked + b"/" + rest if self._asked and rest else self._asked or rest)


@contextmanager
def below(path: str, context: ToolContext) -> Iterator[tuple[Tree, bytes, Shown]]:
    """Open a tree to search below `path`.  Yields the tree, the path in it, and the mapping for results."""
    asked = encode(normalise(path))
    if context.tree is None:
        yield FilesystemTree(context.filesystem, for_search=True), asked, Shown(asked, asked)
        return
    with context.tree() as tree:
        # Trees do not follow symlinks.
        with located(path), resolve(TreeFiles(tree, root=context.filesystem.root), asked) as place:
            real = b"/".join(place.names)
        yield tree, real, Shown(asked, real)
