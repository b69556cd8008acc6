"""Walk the files of a tree that a pattern can match, in the order of their paths; `glob_paths` returns these paths."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, TypeAlias

from protocol.errors import os_error
from protocol.paths import decode
from protocol.search.patterns import GlobPattern, PatternState
from protocol.tree import TYPE_MASK, Tree, TreeEntry

CancelCheck: TypeAlias = Callable[[], None]
BINARY_SNIFF_BYTES: Final = 8 * 1024  # a NUL in this many bytes at a file's start makes it binary (as for git and grep)
UNREADABLE_NAMED: Final = 1_000  # unreadable files and directories that are named; all are counted


def never_cancelled() -> None:
    """The default of `keep_going`: never cancel."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that could not be read, or a directory that could not be listed, and why."""

    path: bytes
    reason: str


@dataclass(slots=True)
class UnreadablePaths:
    """The first UNREADABLE_NAMED paths that a search could not read or list, and the number of all."""

    named: list[Unreadable] = field(default_factory=list)
    count: int = 0

    def add(self, path: bytes, error: OSError) -> None:
        self.count += 1
        if len(self.named) < UNREADABLE_NAMED:
            self.named.append(Unreadable(path, error.strerror or str(error)))


@dataclass(frozen=True, slots=True)
class SkipRules:
    """Paths that a search omits although they match.

    A directory that the pattern names literally ("vendor/*.go", ".github/**") and the start directory are not omitted.
    `binary_files` is for glob: grep can show no line of a binary file anyway.  `suffixes`: ends of names of files.
    """

    hidden_directories: bool = True
    directories: frozenset[bytes] = frozenset({b"node_modules", b"__pycache__", b"vendor"})
    binary_files: bool = True
    suffixes: tuple[bytes, ...] = ()

    def skips_directory(self, name: bytes) -> bool:
        return name in self.directories or (self.hidden_directories and name.startswith(b"."))


USUAL_SKIPS: Final = SkipRules()
SKIP_NOTHING: Final = SkipRules(hidden_directories=False, directories=frozenset(), binary_files=False)


_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ESTALE})


def is_gone(error: OSError) -> bool:
    """Whether the error only says that an entry of a live directory is gone: no reason to end the search."""
    return error.errno in _GONE


_UNREADABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG})


def is_unreadable(error: OSError) -> bool:
    """Whether the entry exists and cannot be read: it is named, and the search continues."""
    return error.errno in _UNREADABLE


def is_binary(start: bytes) -> bool:
    """Whether a file with this content, or start of at least BINARY_SNIFF_BYTES, counts as binary."""
    return start.find(b"\0", 0, BINARY_SNIFF_BYTES) >= 0


_by_path = itemgetter(0)


def matching_files(
    tree: Tree,
    path: bytes,
    state: PatternState | None,
    skip: SkipRules,
    keep_going: CancelCheck,
    unreadable: UnreadablePaths,
) -> Iterator[TreeEntry]:
    """Yield the regular files below directory `path` that `state` can match, sorted by path as bytes.

    Lists only directories that can contain one.  Symlinks are not followed.  Directories that
    cannot be listed are added to `unreadable`.
    """
    # A directory sorts as its name with a slash, so that a depth-first walk has the order of whole paths.
    stack: list[tuple[bytes, TreeEntry, PatternState | None]] = []
    if state is not None:
        stack.append((path + b"/" if path else b"", tree.entry(path), state))
    while stack:
        _, entry, state = stack.pop()
        keep_going()
        if state is None:
            yield entry
            continue
        files, directories = _below(tree, entry.path, state, skip, unreadable)
        if directories:
            stack.extend(sorted([*files, *directories], key=_by_path, reverse=True))
            continue
        for _, file, _ in files:
            keep_going()
            yield file


def _below(
    tree: Tree, path: bytes, state: PatternState, skip: SkipRules, unreadable: UnreadablePaths
) -> tuple[list[tuple[bytes, TreeEntry, None]], list[tuple[bytes, TreeEntry, PatternState]]]:
    """The matching files of a directory, sorted, and the directories below which files can match."""
    files: list[tuple[bytes, TreeEntry, None]] = []
    directories: list[tuple[bytes, TreeEntry, PatternState]] = []
    accepts = state.accepts
    try:
        for entry in tree.entries(path) if state.names is None else _named(tree, path, state.names):
            kind = entry.mode & TYPE_MASK  # inlined, because this runs for every file
            if kind == stat.S_IFREG:
                if accepts(entry.name) and not entry.name.endswith(skip.suffixes):
                    files.append((entry.path, entry, None))
            elif kind == stat.S_IFDIR:
                name = entry.name
                inner = state.enter(name)
                if inner is not None and (not skip.skips_directory(name) or state.names_directory(name)):
                    directories.append((entry.path + b"/", entry, inner))
    except OSError as error:
        if is_unreadable(error):
            unreadable.add(path, error)
        elif not is_gone(error):
            raise
    return files, directories


def _named(tree: Tree, path: bytes, names: Collection[bytes]) -> Iterator[TreeEntry]:
    """Yield the entries of a directory that have one of `names`."""
    for name in sorted(names):
        try:
            yield tree.entry(path + b"/" + name if path else name)
        except OSError as error:
            if not is_gone(error):
                raise


# -- glob ------------------------------------------------------------------------------------------
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
    if not tree.entry(path).is_dir:
        raise os_error(errno.ENOTDIR, decode(path))
    found: list[bytes] = []
    unreadable = UnreadablePaths()
    truncated = False
    for file in matching_files(tree, path, compiled.start(path), skip, keep_going, unreadable):
        if skip.binary_files and _starts_binary(tree, file):
            continue
        if len(found) == limit:
            truncated = True
            break
        found.append(file.path)
    return GlobResult(tuple(found), truncated, unreadable)


def _starts_binary(tree: Tree, file: TreeEntry) -> bool:
    try:
        return is_binary(tree.read(file.path, 0, BINARY_SNIFF_BYTES))
    except OSError as error:
        if is_gone(error):
            return False  # its name has matched already
        raise
