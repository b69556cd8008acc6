"""The tree that tools search: the context's tree, or any Filesystem as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.adapters.filesystem_tree import FilesystemTree
from protocol.adapters.path_filesystem.resolve import resolve
from protocol.adapters.path_filesystem.tree_files import TreeFiles
from protocol.paths import decode, encode, located, normalise
from protocol.tools.base import ToolContext
from protocol.tree import Tree

__all__ = ["Shown", "below"]


Shown = Callable[[bytes], str]  # maps a found path back to the beginning that the caller wrote


@contextmanager
def below(path: str, context: ToolContext) -> Iterator[tuple[Tree, bytes, Shown]]:
    """Open a tree to search below `path`.  Yields the tree, the path in it, and the mapping for results."""
    asked = real = encode(normalise(path))

    def shown(found: bytes) -> str:
        rest = found[len(real) :].lstrip(b"/")
        return decode(asked + b"/" + rest if asked and rest else asked or rest)

    if context.tree is None:
        yield FilesystemTree(context.filesystem, for_search=True), asked, shown
        return
    with context.tree() as tree:
        # Trees do not follow symlinks, so `real` may differ from `asked`.
        with located(path), resolve(TreeFiles(tree, root=context.filesystem.root), asked) as place:
            real = b"/".join(place.names)
        yield tree, real, shown
