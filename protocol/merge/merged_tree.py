"""A merged tree: `ours` with some paths replaced, as a read-only tree; and the merged contents.

Nothing is copied: what the merge did not change is read from `ours`, and what it took is read from `theirs`.

Inode numbers: what was in `ours` keeps its number.  Other entries get numbers from 2**64 on, which no kernel uses, so
that a number of the other workspace is never mistaken for one of `ours`.

`Contents` decides the contents of the files, symlinks and devices that both sides have.  Texts that both sides changed
are collected first and merged together, because git is slow to start.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from protocol.diff.patch import BINARY_PROBE_BYTES
from protocol.diff.tree_diff import comparer, directories_above, entry_or_none
from protocol.errors import os_error, shown
from protocol.merge.git import TextCase, TextMerge, TextResult, merge_attributes
from protocol.merge.sides import ConflictReason, Sides, Trees, type_of
from protocol.tree import CHUNK_BYTES, Chunk, LookupTree, Tree, TreeEntry, names_in
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
            return names_in(node.tree, node.source)
        names = [] if node is not None and node.below == "nodes" else names_in(self._ours, path)
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


# -- contents --------------------------------------------------------------------------------------
# Larger files are not merged by lines: git holds all versions of a file in memory.
TEXT_LIMIT_BYTES: Final = 8 * 1024 * 1024  # of one version
_ATTRIBUTES_LIMIT_BYTES: Final = 1 << 20  # of a .gitattributes file; larger ones do not count
_ATTRIBUTES_PATH_BYTES: Final = 2048  # git reads none at a longer path than PATH_MAX, here below a private directory
_EXTENSION: Final = re.compile(rb"\.[A-Za-z0-9]{1,16}\Z")
_NOT_MERGED: Final = frozenset({b"unset", b"binary"})  # values of the attribute `merge`, of files that are not text
_KEPT_WHOLE: Final = TextResult(None, is_clean=False, problem="changed on both sides; not a text (.gitattributes)")
# The merged contents are held in memory until they are imported.
ALL_TEXTS_LIMIT_BYTES: Final = 128 * 1024 * 1024  # of both sides of all texts of one merge

# "same": both sides have it, because neither or both changed it.  "merged": `data` has it.
Source: TypeAlias = Literal["same", "ours", "theirs", "merged", "conflict"]


class MergedContent(Value):
    """Where the content of a path comes from.

    `data` is the merged text; of a conflict, with markers, or None if it cannot have any.
    """

    source: Source
    data: bytes | None = None
    reason: ConflictReason = "content"
    detail: str = ""


class Contents:
    """Decides contents: `add` all paths, then `merge_texts`, then `of`."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._decided: dict[bytes, MergedContent] = {}
        self._cases: list[TextCase] = []
        self._case_of: dict[bytes, int] = {}  # path -> index in `_cases`
        self._same_files: dict[tuple[int, int, int], int] = {}  # inode numbers of hard links -> index in `_cases`
        self._sides: dict[bytes, tuple[bool, TreeEntry, TreeEntry]] = {}  # whether there is a base; ours, theirs
        self._text_bytes = 0
        self._results: Sequence[TextResult] = ()

    def add(self, sides: Sides) -> None:
        """Compare the versions of a path that both sides have, with one type, which is not that of directories."""
        trees, path = self._trees, sides.path
        ours, theirs = sides.ours, sides.theirs
        assert ours is not None
        assert theirs is not None
        base = sides.base if sides.base is not None and type_of(sides.base) == type_of(ours) else None
        is_content_of_base = sides.is_content_of_base
        if is_content_of_base is None:
            is_content_of_base = base is not None and trees.is_same_content(trees.base, base, trees.theirs, theirs)
        if base is not None and is_content_of_base:
            is_same = trees.is_same_content(trees.base, base, trees.ours, ours)
            self._decided[path] = MergedContent("same" if is_same else "ours")
        elif base is not None and trees.is_same_content(trees.base, base, trees.ours, ours):
            self._decided[path] = MergedContent("theirs")
        elif trees.is_same_content(trees.ours, ours, trees.theirs, theirs):
            self._decided[path] = MergedContent("same")
        else:
            self._add_conflict(path, base, ours, theirs)

    def merge_texts(self, text_merge: TextMerge) -> None:
        """Merge the texts that both sides changed, as the .gitattributes of ours say."""
        if not self._cases:
            return
        paths: dict[int, bytes] = {}
        for path, number in self._case_of.items():
            paths.setdefault(number, path)
        ordered = [paths[number] for number in range(len(self._cases))]
        rules = merge_attributes(ordered, self._attribute_files(ordered), self._trees.keep_going)
        asked = [number for number, rule in enumerate(rules) if rule not in _NOT_MERGED]
        cases = [
            msgspec.structs.replace(
                self._cases[number], is_union=rules[number] == b"union", extension=_extension(ordered[number])
            )
            for number in asked
        ]
        results = text_merge(cases, self._trees.keep_going) if cases else ()
        done = dict(zip(asked, results, strict=True))
        self._results = [done.get(number, _KEPT_WHOLE) for number in range(len(self._cases))]

    def _attribute_files(self, paths: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the content of the .gitattributes files of ours that concern the paths, by their paths."""
        found = {}
        for path in (joined(directory, b".gitattributes") for directory in directories_above(paths)):
            entry = entry_or_none(self._trees.ours, path)
            is_read = entry is not None and entry.is_file and len(path) < _ATTRIBUTES_PATH_BYTES
            if is_read and entry is not None and entry.size <= _ATTRIBUTES_LIMIT_BYTES:
                found[path] = self._trees.ours.read(path, 0, entry.size)
        return found

    def of(self, path: bytes) -> MergedContent:
        """The content at a path that was added."""
        if path in self._decided:
            return self._decided[path]
        result = self._results[self._case_of[path]]
        if result.is_clean:
            return self._merged(path, result.content or b"")
        reason: ConflictReason = "created"
        if self._sides[path][0]:
            reason = "binary" if result is _KEPT_WHOLE else "content"
        detail = "both sides changed the same lines" if reason == "content" else "created on both sides"
        return MergedContent("conflict", result.content, reason, result.problem or detail)

    def _merged(self, path: bytes, content: bytes) -> MergedContent:
        """The merged text, which one side may have already: if its changes include those of the other side."""
        _, ours, theirs = self._sides[path]
        if len(content) == ours.size and content == _text(self._trees.ours, ours):
            return MergedContent("ours")
        if len(content) == theirs.size and content == _text(self._trees.theirs, theirs):
            return MergedContent("theirs")
        return MergedContent("merged", content)

    def _add_conflict(self, path: bytes, base: TreeEntry | None, ours: TreeEntry, theirs: TreeEntry) -> None:
        conflict = self._conflict_without_lines(base, ours, theirs)
        if conflict is not None:
            self._decided[path] = conflict
            return
        self._sides[path] = (base is not None, ours, theirs)
        key = (base.inode if base is not None else 0, ours.inode, theirs.inode)
        is_linked = ours.nlink > 1 and theirs.nlink > 1 and base is not None and all(key)
        case = self._same_files.get(key) if is_linked else None
        if case is None:
            case = len(self._cases)
            self._cases.append(self._case(base, ours, theirs))
            self._text_bytes += ours.size + theirs.size
            self._same_files[key] = case
        self._case_of[path] = case

    def _conflict_without_lines(
        self, base: TreeEntry | None, ours: TreeEntry, theirs: TreeEntry
    ) -> MergedContent | None:
        """The conflict of contents that cannot be merged by lines; None if they can."""
        both = "created on both sides" if base is None else "changed on both sides"
        if not ours.is_file:
            reason: ConflictReason = "created" if base is None else "symlink" if ours.is_symlink else "device"
            return MergedContent("conflict", None, reason, both)
        versions = [(self._trees.ours, ours), (self._trees.theirs, theirs)]
        if base is not None:
            versions.append((self._trees.base, base))
        if any(entry.size > TEXT_LIMIT_BYTES for _, entry in versions):
            detail = f"{both}; over {TEXT_LIMIT_BYTES:,} bytes, so not merged by lines"
            return MergedContent("conflict", None, "created" if base is None else "large", detail)
        if any(_is_binary(tree, entry) for tree, entry in versions):
            return MergedContent("conflict", None, "created" if base is None else "binary", f"{both}; not a text")
        if self._text_bytes + ours.size + theirs.size > ALL_TEXTS_LIMIT_BYTES:
            detail = f"{both}; texts over {ALL_TEXTS_LIMIT_BYTES:,} bytes in one merge are not merged by lines"
            return MergedContent("conflict", None, "created" if base is None else "large", detail)
        return None

    def _case(self, base: TreeEntry | None, ours: TreeEntry, theirs: TreeEntry) -> TextCase:
        trees = self._trees
        return TextCase(
            None if base is None else lambda: _text(trees.base, base),
            lambda: _text(trees.ours, ours),
            lambda: _text(trees.theirs, theirs),
            (base.size if base is not None else 0) + ours.size + theirs.size,
        )


def _extension(path: bytes) -> bytes:
    """Return the extension of a file's name with its dot; b"" if it has characters that an argument might not have."""
    found = _EXTENSION.search(path)
    return b"" if found is None else found.group()


def _is_binary(tree: Tree, entry: TreeEntry) -> bool:
    """Whether git takes the file for binary."""
    return b"\0" in tree.read(entry.path, 0, min(entry.size, BINARY_PROBE_BYTES))


def _text(tree: Tree, entry: TreeEntry) -> bytes:
    """The content of a file.  EIO if its size is not that of its entry any more."""
    content = tree.read(entry.path, 0, entry.size + 1)
    if len(content) != entry.size:
        raise OSError(errno.EIO, "the file changed while it was merged; merge again", shown(entry.path))
    return content
