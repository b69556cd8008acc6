"""glob_paths: the files whose paths match a pattern (see `patterns`)."""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass

from protocol.errors import os_error
from protocol.paths import decode
from protocol.search.patterns import GlobPattern
from protocol.search.walk import (
    BINARY_SNIFF_BYTES,
    SKIP_NOTHING,
    CancelCheck,
    NodeTree,
    SkipRules,
    UnreadablePaths,
    WalkEntry,
    is_binary,
    is_gone,
    matching_files,
    never_cancelled,
    nodes_of,
)
from protocol.tree import Tree

__all__ = ["GlobResult", "glob_paths"]


@dataclass(frozen=True, slots=True)
class GlobResult:
    """Paths from the tree's root, sorted as bytes.  `truncated`: there are more, all later in that order."""

    paths: tuple[bytes, ...]
    truncated: bool
    unreadable: UnreadablePaths


def glob_paths(
    tree: Tree,
    pattern: str,
    *,
    path: bytes = b"",
    limit: int | None = None,
    skip: SkipRules = SKIP_NOTHING,
    keep_going: CancelCheck = never_cancelled,
) -> GlobResult:
    """Find the regular files below directory `path` that match `pattern`, at most `limit`.

    Symlinks are neither followed nor found.  `keep_going` is called for every directory and file.
    ValueError for an invalid pattern; FileNotFoundError, NotADirectoryError for `path`.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit must not be negative: {limit}")
    compiled = GlobPattern(pattern)
    nodes = nodes_of(tree)
    if not stat.S_ISDIR(nodes.node(path).mode):
        raise os_error(errno.ENOTDIR, decode(path))
    found: list[bytes] = []
    unreadable = UnreadablePaths()
    truncated = False
    for file, node in matching_files(nodes, path, compiled.start(path), skip, keep_going, unreadable):
        if skip.binary_files and _starts_binary(nodes, node):
            continue
        if len(found) == limit:
            truncated = True
            break
        found.append(file)
    return GlobResult(tuple(found), truncated, unreadable)


def _starts_binary(nodes: NodeTree, node: WalkEntry) -> bool:
    try:
        return is_binary(nodes.read_node(node, 0, BINARY_SNIFF_BYTES))
    except OSError as error:
        if is_gone(error):
            return False  # its name has matched already
        raise
