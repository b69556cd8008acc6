"""MergedTree: `ours` with some paths replaced, as a read-only tree.

Nothing is copied: what the merge did not change is read from `ours`, and what it took is read from `theirs`.

Inode numbers: what was in `ours` keeps its number.  Other entries get numbers from 2**64 on, which no kernel uses, so
that a number of another process is never mistaken for one of `ours`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Literal

import msgspec

from protocol.diff.tree_diff import comparer
from protocol.errors import os_error
from protocol.tree import CHUNK_BYTES, Chunk, LookupTree, Tree, TreeEntry
from protocol.values import Value

_UNCHANGED: Final = object()


class Node(Value):
    """One path of a merged tree that is not as in `ours`.

    The content of a file is `data`, or else that of `source` in `tree`.  `below` says what is in a directory: what
    `ours` has there ("ours"), what other nodes say ("nodes"), or what `tree` has below `source` ("tree"); in the first
    case other nodes may replace parts of it.
    """

    entry: TreeEntry
    tree: Tree
    source: bytes
    data: bytes | None = None
    below: Literal["ours", "nodes", "tree"] = "nodes"


def foreign(inode: int, space: int = 0) -> int:
    """The number in a merged tree of an inode of another tree; 0, which means unknown, stays 0."""
    return inode + ((space + 1) << 64) if inode else 0


def joined(directory: bytes, name: bytes) -> bytes:
    """The path of `name` in `directory`."""
    return directory + b"/" + name if directory else name


class MergedTree(LookupTree):
    """See the module's docstring.  `nodes` are the paths that are not as in `ours`; None: the path is removed.

    Every directory above a node is a directory in `ours` or a node.
    """

    def __init__(self, ours: Tree, nodes: Mapping[bytes, Node | None]) -> None:
        self._ours = ours
        self._nodes = nodes
        self._names: dict[bytes, dict[bytes, bool]] = {}  # directory -> name -> whether it exists
        self._spaces: dict[bytes, int] = {}  # a path with below="tree" -> the space of its inode numbers
        for path, node in nodes.items():
            above, _, name = path.rpartition(b"/")
            if path:
                self._names.setdefault(above, {})[name] = node is not None
            if node is not None and node.below == "tree":
                self._spaces[path] = len(self._spaces) + 1

    def _found(self, path: bytes) -> Node | None:
        """The node of `path`; None if it is as in `ours`.  FileNotFoundError, NotADirectoryError."""
        at = path
        while True:
            node = self._nodes.get(at, _UNCHANGED)
            if node is None:
                raise _not_found(path)
            if isinstance(node, Node):
                if at == path:
                    return node
                return self._below(node, at, path)
            if not at:
                return None
            at = at.rpartition(b"/")[0]

    def _below(self, node: Node, at: bytes, path: bytes) -> Node | None:
        """The node of `path`, which has none of its own and is below the node at `at`."""
        if not node.entry.is_dir:
            raise os_error(errno.ENOTDIR, os.fsdecode(path))
        if node.below == "ours":
            return None
        if node.below == "nodes":
            raise _not_found(path)
        source = joined(node.source, path[len(at) + 1 :] if at else path)
        entry = node.tree.entry(source)
        inode = foreign(entry.inode, self._spaces[at])
        return Node(msgspec.structs.replace(entry, path=path, inode=inode), node.tree, source, None, "tree")

    # -- protocol.tree.Tree ------------------------------------------------------------------
    def entry(self, path: bytes) -> TreeEntry:
        node = self._found(path)
        return self._ours.entry(path) if node is None else node.entry

    def children(self, path: bytes) -> list[bytes]:
        node = self._found(path)
        if node is not None and not node.entry.is_dir:
            raise os_error(errno.ENOTDIR, os.fsdecode(path))
        if node is not None and node.below == "tree":
            return node.tree.children(node.source)
        names = [] if node is not None and node.below == "nodes" else self._ours.children(path)
        changed = self._names.get(path)
        if not changed:
            return names
        kept = [name for name in names if name not in changed]
        return sorted([*kept, *(name for name, exists in changed.items() if exists)])

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        node = self._found(path)
        if node is None:
            return self._ours.read(path, offset, size)
        if node.data is not None:
            return node.data[offset : offset + size]
        return node.tree.read(node.source, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        node = self._found(path)
        if node is None:
            return self._ours.chunks(path, size)
        if node.data is not None:
            data = node.data
            return (data[start : start + size] for start in range(0, len(data), size))
        return node.tree.chunks(node.source, size)

    def touched(self, other: Tree) -> Collection[bytes] | None:
        if other is self._ours:
            return list(self._nodes)
        touched = self._ours.touched(other)
        return None if touched is None else {*touched, *self._nodes}

    # -- protocol.diff.tree_diff.ComparesContent ---------------------------------------------------
    def same_content(self, path: bytes, other: Tree) -> bool | None:
        node = self._found(path)
        tree = self._ours if node is None else node.tree
        if node is not None and (node.data is not None or node.source != path):
            return None
        if tree is other:
            return True
        comparing = comparer(tree)
        return None if comparing is None else comparing.same_content(path, other)


def _not_found(path: bytes) -> OSError:
    return os_error(errno.ENOENT, os.fsdecode(path))
