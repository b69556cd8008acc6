"""Patch: changes as a unified diff in git's extended format, for `patch -p1` and `git apply`.

Applied to the old tree it makes the new tree's text files and symlinks, byte for byte, with their executable
bits: no newline at the end, CRLF, empty files, any name (quoted as git does).  What a patch cannot carry is named
in a line of its own, which both tools skip:

- binary files (as for git: a NUL in the first 8,000 bytes) and files over `TEXT_LIMIT_BYTES` or `TEXT_LIMIT_LINES`;
- fifos, sockets and devices, and directories that are empty on the side where they exist;
- files of which others changed what an overlay was made over (ESTALE).

Left out without a word: owner, mtime, xattrs, permissions but the owner's execute bit (git knows no others), and
metadata of directories.

Limits of the tools themselves: `git apply` refuses paths with a component `.git`; GNU patch (2.7.6) cannot make a
file or symlink of a directory, or the other way round, in one run; both remove directories that became empty.

Source: git's Documentation/diff-generate-patch.txt and quote.c; GNU diffutils manual, "Detailed Unified".
"""

from __future__ import annotations

import errno
import hashlib
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from protocol.diff import Change
from protocol.line_diff import Edit, edits
from protocol.tree import Tree, TreeEntry

__all__ = ["TEXT_LIMIT_BYTES", "TEXT_LIMIT_LINES", "LineStat", "line_stat", "write_patch"]

TEXT_LIMIT_BYTES: Final = 32 * 1024 * 1024  # both sides of a file are held in memory
TEXT_LIMIT_LINES: Final = 1_000_000  # a line costs some 50 bytes beside its content
BINARY_PROBE_BYTES: Final = 8000  # FIRST_FEW_BYTES, git's xdiff-interface.c
CONTEXT_LINES: Final = 3
NO_OBJECT: Final = b"0" * 40
NO_NEWLINE: Final = b"\n\\ No newline at end of file\n"

Write = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class LineStat:
    """Lines added and removed by one change; both 0 when `binary` (or too large, or without content)."""

    added: int
    removed: int
    binary: bool = False


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a change as a patch has it.  `mode` is git's: 100644, 100755 or 120000 (octal)."""

    mode: int
    text: bytes


@dataclass(frozen=True, slots=True)
class _Uncarried:
    """A side that a patch cannot have, and the line that says so, where %(old)s, %(new)s and %(here)s are names."""

    note: bytes
    binary: bool = False


def line_stat(old: Tree, new: Tree, change: Change) -> LineStat:
    """How many lines `change` adds and removes, with a symlink's target as one line.  Reads both contents."""
    if change.kind == "metadata":
        return LineStat(0, 0)
    sides = _side(old, change.old), _side(new, change.new)
    if any(isinstance(side, _Uncarried) and side.binary for side in sides):
        return LineStat(0, 0, binary=True)
    left, right = (_lines(side.text) if isinstance(side, _Side) else [] for side in sides)
    found = list(edits(left, right))
    return LineStat(sum(e.new_end - e.new_start for e in found), sum(e.old_end - e.old_start for e in found))


def write_patch(old: Tree, new: Tree, changed: Iterable[Change], out: Callable[[bytes], object] | BinaryIO) -> None:
    """Write `changed`, which `protocol.diff.changes` gave for these trees, as a patch to `out`.

    One change is in memory at a time.  Nothing is written for changes that a patch leaves out.
    """
    write: Write = out if callable(out) else out.write
    for change in changed:
        _write_change(old, new, change, write)


def _write_change(old: Tree, new: Tree, change: Change, write: Write) -> None:
    if change.kind == "metadata":
        _write_mode(change, write)
        return
    left, right = _side(old, change.old), _side(new, change.new)
    names = _names(change)
    for side, here in ((left, names[b"old"]), (right, names[b"new"])):
        if isinstance(side, _Uncarried) and side.note:
            # The empty line keeps git from taking the note for the end of a section without hunks.
            write(b"\n" + side.note % {**names, b"here": here} + b"\n")
            if side.binary:
                return
    before = left if isinstance(left, _Side) else None
    after = right if isinstance(right, _Side) else None
    if before and after and change.kind == "type":
        # As git does: no tool edits a file into a symlink.
        _write_section(change.path, before, None, write)
        before = None
    _write_section(change.path, before, after, write)


def _write_mode(change: Change, write: Write) -> None:
    if change.old and change.new and change.old.is_file:
        old_mode, new_mode = _git_mode(change.old), _git_mode(change.new)
        if old_mode != new_mode:
            write(_git_line(change.path) + b"old mode %o\nnew mode %o\n" % (old_mode, new_mode))


# --- what a patch has of an entry ---------------------------------------------------------------------------


def _git_mode(entry: TreeEntry) -> int:
    if entry.is_symlink:
        return stat.S_IFLNK
    return stat.S_IFREG | (0o755 if entry.mode & stat.S_IXUSR else 0o644)


def _side(tree: Tree, entry: TreeEntry | None) -> _Side | _Uncarried | None:
    if entry is None:
        return None
    if entry.is_symlink:
        return _Side(_git_mode(entry), entry.target)
    if entry.is_dir:
        return _Uncarried(b"" if tree.children(entry.path) else b"# Not in this patch: the empty directory %(here)s")
    if not entry.is_file:
        return _Uncarried(b"# Not in this patch: the special file %(here)s")
    return _file_side(tree, entry)


def _file_side(tree: Tree, entry: TreeEntry) -> _Side | _Uncarried:
    try:
        return _readable_side(tree, entry)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        # What there was is lost: others wrote over it.  The other files are of use all the same.
        return _Uncarried(b"# Not in this patch: %(here)s, which others changed below the overlay", binary=True)


def _readable_side(tree: Tree, entry: TreeEntry) -> _Side | _Uncarried:
    if b"\0" in tree.read(entry.path, 0, min(BINARY_PROBE_BYTES, entry.size)):
        return _Uncarried(b"Binary files %(old)s and %(new)s differ", binary=True)
    if entry.size > TEXT_LIMIT_BYTES:
        note = b"Files %%(old)s and %%(new)s differ (not compared: over %d bytes)" % TEXT_LIMIT_BYTES
        return _Uncarried(note, binary=True)
    text = b"".join(tree.chunks(entry.path))
    if text.count(b"\n") > TEXT_LIMIT_LINES:
        note = b"Files %%(old)s and %%(new)s differ (not compared: over %d lines)" % TEXT_LIMIT_LINES
        return _Uncarried(note, binary=True)
    return _Side(_git_mode(entry), text)


def _lines(text: bytes) -> list[bytes]:
    """The lines with their ends, cut at LF only: `splitlines` would also cut at a CR."""
    lines = text.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


# --- names --------------------------------------------------------------------------------------------------

_ESCAPES: Final = {ord(k): b"\\" + v for k, v in zip('\a\b\t\n\v\f\r"\\', b'a b t n v f r " \\'.split(), strict=True)}


def _quoted(path: bytes) -> bytes:
    r"""`path` as git writes it in a patch: as it is, or "C style" with \t, \n, \", \\ and \ooo.

    Unlike git this also quotes for a space, which GNU patch takes for the name's end in a section without hunks.
    """
    if re.fullmatch(rb"[!#-\[\]-~]+", path):
        return path
    return b'"%s"' % b"".join(
        _ESCAPES.get(byte) or (b"%c" % byte if 0x20 <= byte < 0x7F else b"\\%03o" % byte) for byte in path
    )


def _names(change: Change) -> dict[bytes, bytes]:
    return {
        b"old": _quoted(b"a/" + change.path) if change.old else b"/dev/null",
        b"new": _quoted(b"b/" + change.path) if change.new else b"/dev/null",
    }


def _git_line(path: bytes) -> bytes:
    return b"diff --git %s %s\n" % (_quoted(b"a/" + path), _quoted(b"b/" + path))


# --- sections and hunks -------------------------------------------------------------------------------------


def _write_section(path: bytes, old: _Side | None, new: _Side | None, write: Write) -> None:
    """One file of the patch; a side that is None does not exist."""
    if old is None and new is None:
        return
    write(_git_line(path))
    if old is None and new is not None:
        write(b"new file mode %o\n" % new.mode)
    elif new is None and old is not None:
        write(b"deleted file mode %o\n" % old.mode)
    elif old and new and old.mode != new.mode:
        write(b"old mode %o\nnew mode %o\n" % (old.mode, new.mode))
    # GNU patch takes from this line that a symlink is edited, and that an empty file comes or goes.
    write(b"index %s..%s" % (_object_name(old), _object_name(new)))
    write(b" %o\n" % new.mode if old and new and old.mode == new.mode else b"\n")

    left, right = _lines(old.text if old else b""), _lines(new.text if new else b"")
    heading = b"--- %s\n+++ %s\n" % (
        _quoted(b"a/" + path) if old else b"/dev/null",
        _quoted(b"b/" + path) if new else b"/dev/null",
    )
    for hunk in _hunks(edits(left, right)):
        write(heading)
        heading = b""
        _write_hunk(left, right, hunk, write)


def _object_name(side: _Side | None) -> bytes:
    """The name of git's blob object, as `git hash-object` prints it."""
    if side is None:
        return NO_OBJECT
    blob = hashlib.sha1(b"blob %d\0" % len(side.text), usedforsecurity=False)
    blob.update(side.text)
    return blob.hexdigest().encode()


def _hunks(found: Iterable[Edit]) -> Iterator[list[Edit]]:
    """Edits whose context would touch or overlap, together."""
    hunk: list[Edit] = []
    for edit in found:
        if hunk and edit.old_start - hunk[-1].old_end > 2 * CONTEXT_LINES:
            yield hunk
            hunk = []
        hunk.append(edit)
    if hunk:
        yield hunk


def _write_hunk(old: Sequence[bytes], new: Sequence[bytes], hunk: Sequence[Edit], write: Write) -> None:
    first, last = hunk[0], hunk[-1]
    lead = min(CONTEXT_LINES, first.old_start)
    trail = min(CONTEXT_LINES, len(old) - last.old_end)
    old_range = _range(first.old_start - lead, last.old_end + trail)
    new_range = _range(first.new_start - lead, last.new_end + trail)
    write(b"@@ -%s +%s @@\n" % (old_range, new_range))
    place = first.old_start - lead
    for edit in hunk:
        _write_lines(b" ", old[place : edit.old_start], write)
        _write_lines(b"-", old[edit.old_start : edit.old_end], write)
        _write_lines(b"+", new[edit.new_start : edit.new_end], write)
        place = edit.old_end
    _write_lines(b" ", old[place : last.old_end + trail], write)


def _range(start: int, end: int) -> bytes:
    """Lines count from 1, a length of 1 goes without saying; an empty range stands after the line it names."""
    if end - start == 1:
        return b"%d" % end
    return b"%d,%d" % (start + 1 if end > start else start, end - start)


def _write_lines(mark: bytes, lines: Sequence[bytes], write: Write) -> None:
    if lines:
        end = b"" if lines[-1].endswith(b"\n") else NO_NEWLINE
        write(b"".join(mark + line for line in lines) + end)
