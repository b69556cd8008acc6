"""The merged contents of the files, symlinks and devices that both sides have.

Texts that both sides changed are collected first and merged together, because git is slow to start.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from protocol.diff.patch import BINARY_PROBE_BYTES
from protocol.errors import shown
from protocol.merge.outcome import ConflictReason
from protocol.merge.sides import Sides, Trees, type_of
from protocol.merge.text import TextCase, TextMerge, TextResult
from protocol.tree import Tree, TreeEntry
from protocol.values import Value

# Larger files are not merged by lines: git holds all versions of a file in memory.
TEXT_LIMIT_BYTES: Final = 8 * 1024 * 1024  # of one version
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
        """Merge the texts that both sides changed."""
        if self._cases:
            self._results = text_merge(self._cases, self._trees.keep_going)

    def of(self, path: bytes) -> MergedContent:
        """The content at a path that was added."""
        if path in self._decided:
            return self._decided[path]
        result = self._results[self._case_of[path]]
        if result.is_clean:
            return self._merged(path, result.content or b"")
        reason: ConflictReason = "content" if self._sides[path][0] else "created"
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


def _is_binary(tree: Tree, entry: TreeEntry) -> bool:
    """Whether git takes the file for binary."""
    return b"\0" in tree.read(entry.path, 0, min(entry.size, BINARY_PROBE_BYTES))


def _text(tree: Tree, entry: TreeEntry) -> bytes:
    """The content of a file.  EIO if its size is not that of its entry any more."""
    content = tree.read(entry.path, 0, entry.size + 1)
    if len(content) != entry.size:
        raise OSError(errno.EIO, "the file changed while it was merged; merge again", shown(entry.path))
    return content
