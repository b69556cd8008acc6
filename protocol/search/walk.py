"""The files of a tree that a pattern asks for, in the order of their paths; what is left out on the way.

A tree is asked by path.  One that can hand out its own nodes spares a search two path look-ups for each
file, which is most of the time that a search over small files takes: such a tree is a `NodeTree`.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Protocol, cast, runtime_checkable

from protocol.search.patterns import PatternState
from protocol.tree import Tree, TreeEntry

__all__ = [
    "BINARY_SNIFF_BYTES",
    "SKIP_NOTHING",
    "USUAL_SKIPS",
    "CancelCheck",
    "NodeTree",
    "OnUnreadable",
    "SkipRules",
    "WalkEntry",
    "is_binary",
    "is_gone",
    "is_unreadable",
    "matching_files",
    "never_cancelled",
    "nodes_of",
    "unnamed",
]

CancelCheck = Callable[[], None]
OnUnreadable = Callable[[bytes, OSError], None]
"""Is told the path of what could not be read or listed, and why."""
BINARY_SNIFF_BYTES: Final = 8 * 1024  # a NUL in so many bytes at a file's start makes it binary (git and grep: alike)


def never_cancelled() -> None:
    """The `keep_going` of a search that nobody cancels."""


def unnamed(_path: bytes, _error: OSError) -> None:
    """The `on_unreadable` of a search that does not name what it cannot read."""


@dataclass(frozen=True, slots=True)
class SkipRules:
    """What a search leaves out though it matches.

    A directory that the pattern spells out ("vendor/*.go", ".github/**") and the one where the search
    starts are not left out.  `binary_files` is for glob: grep can show no line of a binary file anyway.
    """

    hidden_directories: bool = True
    directories: frozenset[bytes] = frozenset({b"node_modules", b"__pycache__", b"vendor"})
    binary_files: bool = True

    def skips_directory(self, name: bytes) -> bool:
        return name in self.directories or (self.hidden_directories and name.startswith(b"."))


USUAL_SKIPS: Final = SkipRules()
SKIP_NOTHING: Final = SkipRules(hidden_directories=False, directories=frozenset(), binary_files=False)


class WalkEntry(Protocol):
    """A file or directory, as its tree knows it."""

    @property
    def mode(self) -> int: ...

    @property
    def size(self) -> int: ...


@runtime_checkable
class NodeTree(Protocol):
    """What a tree may offer beside `Tree`, to be searched faster.  `Any`: each tree has nodes of its own."""

    def node(self, path: bytes) -> Any:
        """The node at `path` (no symlink is followed).  FileNotFoundError, NotADirectoryError."""
        ...

    def child_nodes(self, node: Any, names: Collection[bytes] | None = None) -> Iterable[tuple[bytes, Any]]:
        """The entries of directory `node`, in any order; with `names` only those, as far as there are any."""
        ...

    def read_node(self, node: Any, offset: int, size: int) -> bytes:
        """As `Tree.read`."""
        ...


class _PathNodes:
    """Any tree as a `NodeTree`, whose nodes are its entries."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def node(self, path: bytes) -> TreeEntry:
        return self._tree.entry(path)

    def child_nodes(self, node: TreeEntry, names: Collection[bytes] | None = None) -> Iterator[tuple[bytes, TreeEntry]]:
        prefix = node.path + b"/" if node.path else b""
        for name in self._tree.children(node.path) if names is None else names:
            try:
                yield name, self._tree.entry(prefix + name)
            except OSError as error:
                if not is_gone(error):
                    raise

    def read_node(self, node: TreeEntry, offset: int, size: int) -> bytes:
        return self._tree.read(node.path, offset, size)


def nodes_of(tree: Tree) -> NodeTree:
    """`tree` itself where it is a `NodeTree`."""
    # Not isinstance with one call: a Tree that is a NodeTree too has no type that says so.
    return cast("NodeTree", tree) if isinstance(tree, NodeTree) else _PathNodes(tree)


_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ESTALE})


def is_gone(error: OSError) -> bool:
    """Whether a tree of a live directory has only lost, or never shown us, what was asked for: no reason to end."""
    return error.errno in _GONE


_UNREADABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG})


def is_unreadable(error: OSError) -> bool:
    """Whether what was asked for is there and cannot be read, which is to be named and no reason to end."""
    return error.errno in _UNREADABLE


def is_binary(start: bytes) -> bool:
    """Whether a file with this content, or start of at least BINARY_SNIFF_BYTES, counts as binary."""
    return start.find(b"\0", 0, BINARY_SNIFF_BYTES) >= 0


_S_IFMT: Final = 0o170000  # sys/stat.h
_by_path = itemgetter(0)


def matching_files(
    nodes: NodeTree,
    path: bytes,
    place: PatternState | None,
    skip: SkipRules,
    keep_going: CancelCheck,
    on_unreadable: OnUnreadable = unnamed,
) -> Iterator[tuple[bytes, WalkEntry]]:
    """(path, node) of the regular files below directory `path` that `place` asks for, sorted by path as bytes.

    Only directories that can hold one are looked at.  Symlinks are not followed.  `on_unreadable` is told of
    directories that cannot be listed.
    """
    # A directory sorts as its name with a slash: then a walk in depth goes by the order of whole paths.
    stack: list[tuple[bytes, WalkEntry, PatternState | None]] = []
    if place is not None:
        stack.append((path + b"/" if path else b"", nodes.node(path), place))
    while stack:
        at, node, place = stack.pop()
        keep_going()
        if place is None:
            yield at, node
            continue
        files, directories = _children(nodes, node, at, place, skip, on_unreadable)
        if directories:
            stack.extend(sorted([*files, *directories], key=_by_path, reverse=True))
            continue
        for file, child, _ in sorted(files, key=_by_path):
            keep_going()
            yield file, child


def _children(
    nodes: NodeTree, node: WalkEntry, prefix: bytes, place: PatternState, skip: SkipRules, on_unreadable: OnUnreadable
) -> tuple[list[tuple[bytes, WalkEntry, None]], list[tuple[bytes, WalkEntry, PatternState]]]:
    """The files of a directory that match, and the directories below which one may."""
    files: list[tuple[bytes, WalkEntry, None]] = []
    directories: list[tuple[bytes, WalkEntry, PatternState]] = []
    accepts = place.accepts
    try:
        for name, child in nodes.child_nodes(node, place.names):
            kind = child.mode & _S_IFMT  # not by a call: this is done for every file
            if kind == stat.S_IFREG:
                if accepts(name):
                    files.append((prefix + name, child, None))
            elif kind == stat.S_IFDIR:
                inner = place.enter(name)
                if inner is not None and (not skip.skips_directory(name) or place.asks_for(name)):
                    directories.append((prefix + name + b"/", child, inner))
    except OSError as error:
        if is_unreadable(error):
            on_unreadable(prefix.rstrip(b"/"), error)
        elif not is_gone(error):
            raise
    return files, directories
