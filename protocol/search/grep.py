"""grep_tree: the lines of a tree's files that match a regular expression (see `expression`)."""

from __future__ import annotations

import codecs
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from protocol.errors import os_error
from protocol.paths import decode
from protocol.search.expression import Expression, Hit
from protocol.search.patterns import ALL_FILES, GlobPattern
from protocol.search.walk import (
    SKIP_NOTHING,
    CancelCheck,
    SkipRules,
    UnreadablePaths,
    is_binary,
    is_gone,
    is_unreadable,
    matching_files,
    never_cancelled,
)
from protocol.tree import Tree, TreeEntry
from protocol.types import GrepMatch

BLOCK_BYTES: Final = 1 << 20  # of a file in memory at a time; at least this much of a line is searched
_MAX_UTF8_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class GrepResult:
    """Matches, ordered by path (as bytes) and line.

    `truncated`: there are more.
    """

    matches: tuple[GrepMatch, ...]
    truncated: bool
    unreadable: UnreadablePaths


def grep_tree(
    tree: Tree,
    pattern: str,
    *,
    path: bytes = b"",
    glob: str | None = None,
    max_matches: int = 1_000,
    max_line_characters: int = 1_000,
    skip: SkipRules = SKIP_NOTHING,
    ignore_case: bool = False,
    keep_going: CancelCheck = never_cancelled,
) -> GrepResult:
    """Find the first match of each matching line in the regular files below directory `path`, or in the file `path`.

    `glob` selects files, as in `glob_paths`.  A line longer than `max_line_characters` is cut to that length: its
    start, or a part around a match that lies further on; match_start and match_end count within the part.  Memory is
    a few MiB for files of any size: in a file over BLOCK_BYTES only the first BLOCK_BYTES of a line are searched, and
    a match may be cut there.

    Skipped: files with a NUL in their first 8 KiB, and files that are not UTF-8 (of a file over
    BLOCK_BYTES, as far as it was read before there were enough matches).

    Named in `unreadable`: files and directories that exist and cannot be read (EACCES, EPERM, EIO, ESTALE,
    ENAMETOOLONG). Entries that disappear meanwhile are ignored.  If `path` itself can no longer be read, the search
    ends with that error: the backend is gone.

    `keep_going` is called for every directory, file and block.  ValueError for an invalid expression or glob;
    FileNotFoundError, NotADirectoryError for `path`.
    """
    if max_matches < 0 or max_line_characters < 1:
        raise ValueError("max_matches must not be negative, and max_line_characters not below 1")
    search = _Search(Expression(pattern, ignore_case=ignore_case), max_matches, max_line_characters)
    compiled = GlobPattern(glob) if glob is not None else ALL_FILES
    for file in _files(tree, path, compiled, skip, keep_going, search.unreadable):
        try:
            search.run(tree, file, keep_going)
        except OSError as error:
            if is_unreadable(error):
                tree.entry(path)
                search.unreadable.add(file.path, error)
            elif not is_gone(error):
                raise
        if search.is_truncated:
            break
    return GrepResult(tuple(search.matches), search.is_truncated, search.unreadable)


def _files(
    tree: Tree,
    path: bytes,
    pattern: GlobPattern,
    skip: SkipRules,
    keep_going: CancelCheck,
    unreadable: UnreadablePaths,
) -> Iterator[TreeEntry]:
    entry = tree.entry(path)
    if entry.is_dir:
        yield from matching_files(tree, path, pattern.start(path), skip, keep_going, unreadable)
    elif not entry.is_file:
        raise os_error(errno.ENOTDIR, decode(path))
    else:
        above, _, name = path.rpartition(b"/")
        state = pattern.start(above)
        if state is not None and state.accepts(name):
            keep_going()
            yield entry


@dataclass(slots=True)
class _Search:
    """A running grep."""

    expression: Expression
    max_matches: int
    max_line_characters: int
    matches: list[GrepMatch] = field(default_factory=list)
    is_truncated: bool = False
    unreadable: UnreadablePaths = field(default_factory=UnreadablePaths)

    def run(self, tree: Tree, file: TreeEntry, keep_going: CancelCheck) -> None:
        """Search one file."""
        if file.size > BLOCK_BYTES:
            self._stream(tree, file, keep_going)
            return
        text = tree.read(file.path, 0, file.size)
        if not is_binary(text) and _is_utf8(text) and self.expression.may_match(text):
            self._add(file.path, text, self.expression.hits(text), 1)

    def _stream(self, tree: Tree, file: TreeEntry, keep_going: CancelCheck) -> None:
        known = len(self.matches)
        try:
            for block in _blocks(tree, file, keep_going):
                if self.expression.may_match(block.text):
                    self._add(file.path, block.text, self.expression.hits(block.text, block.end), block.line_number)
                if self.is_truncated:
                    break
        except (UnicodeDecodeError, _BinaryError):
            del self.matches[known:]

    def _add(self, path: bytes, text: bytes, hits: Iterator[Hit], first_line: int) -> None:
        shown_path = decode(path)
        matches, max_matches, width = self.matches, self.max_matches, self.max_line_characters
        is_ascii = text.isascii()  # an ASCII line: bytes are characters
        characters = text.decode() if is_ascii else ""
        for newlines, line_start, line_end, hit_start, hit_end in hits:
            if len(matches) == max_matches:
                self.is_truncated = True
                return
            if is_ascii:
                line = characters[line_start:line_end]
                start, end = hit_start - line_start, hit_end - line_start
            else:
                line = text[line_start:line_end].decode()
                start = len(text[line_start:hit_start].decode())
                end = start + len(text[hit_start:hit_end].decode())
            if len(line) > width:
                line, start, end = _cut(line, start, end, width)
            matches.append(GrepMatch(shown_path, first_line + newlines, line, start, end))


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cut(line: str, start: int, end: int, width: int) -> tuple[str, int, int]:
    """Cut a line to `width` characters around its match; a longer match to its start."""
    if end <= width:
        return line[:width], start, end
    # A quarter of the width goes before the match: the text after it usually says more.
    before = width // 4
    if end - start <= width:
        before = min(before, width - (end - start))
    first = max(0, min(start - before, len(line) - width))
    return line[first : first + width], start - first, min(end - first, width)


# -- files too big to hold ---------------------------------------------------------------------------
class _BinaryError(Exception):
    """A NUL near the start."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive lines of a file; the first has `line_number`.  Only the text before `end` is searched."""

    text: bytes
    line_number: int
    end: int | None = None


def _blocks(tree: Tree, file: TreeEntry, keep_going: CancelCheck) -> Iterator[_Block]:
    """Yield a file in blocks of whole lines; of a line longer than a block, its start.

    Raises _BinaryError, and UnicodeDecodeError at the first bytes that are not UTF-8.
    """
    rest = b""
    line_number = 1
    is_inside_long_line = False
    for chunk in _text_chunks(tree, file, keep_going):
        text = chunk
        if is_inside_long_line:
            line_end = text.find(b"\n") + 1
            if not line_end:
                continue
            text = text[line_end:]
            is_inside_long_line = False
            line_number += 1
        text = rest + text
        end = text.rfind(b"\n") + 1
        if end:
            yield _Block(text[:end], line_number)
            line_number += text.count(b"\n")
        rest = text[end:]
        if len(rest) > BLOCK_BYTES + _MAX_UTF8_BYTES:
            yield _Block(rest, line_number, _character_boundary(rest, BLOCK_BYTES))
            rest = b""
            is_inside_long_line = True
    if rest:
        yield _Block(rest, line_number)


def _text_chunks(tree: Tree, file: TreeEntry, keep_going: CancelCheck) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for offset in range(0, file.size, BLOCK_BYTES):
        keep_going()
        chunk = tree.read(file.path, offset, BLOCK_BYTES)
        if offset == 0 and is_binary(chunk):
            raise _BinaryError
        decoder.decode(chunk)
        yield chunk
    decoder.decode(b"", final=True)


def _character_boundary(text: bytes, at: int) -> int:
    """The last offset, at most `at`, at which a character of valid UTF-8 starts."""
    while text[at] & 0b1100_0000 == 0b1000_0000:
        at -= 1
    return at
