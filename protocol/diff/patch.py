"""Patch: changes as a unified diff in git's extended format, for `git apply` and, without binary files, `patch -p1`.

Applied to the old tree it makes the new tree's files and symlinks, byte for byte, with their executable bits: binary
files ("GIT binary patch" hunks, which can be reversed), no newline at the end, CRLF, empty files, any name (quoted as
git does).  What a patch cannot carry is reported as `Uncarried`, and named in a comment line, which both tools skip:

- fifos, sockets and devices; files over `BINARY_LIMIT_BYTES`; files that cannot be read;
- paths that git rejects (`is_refused_by_git`), unless requested;
- entries that would replace one of these, or lie below it;
- directories that are empty on the side where they exist;
- which names are names of one file (hard links): the content of each name is carried.

Not carried and not reported, because git does not record them: owner, mtime, xattrs, permissions except the owner's
execute bit, and metadata of directories.

Limits of the tools themselves: `git apply` refuses patches over 1,023 MiB; GNU patch (2.7.6) skips binary hunks and
exits with status 1, and cannot make a file or symlink of a directory, or the reverse, in one run; both remove
directories that become empty.

Source: git's Documentation/diff-generate-patch.txt, apply.c, quote.c and read-cache.c (verify_path); GNU diffutils
manual, "Detailed Unified".

Lines are compared at a bounded cost.  `difflib` alone is quadratic to cubic: 50,000 lines with every second one changed
take it over a minute.  So lines that occur once in both texts are matched first, in order (patience diff, Bram Cohen),
and `difflib` compares only the lines between them.  A region that would still cost too much is reported as replaced
completely: a correct diff, but not the shortest.  Why no library: `patiencediff` has the same worst case and is GPL;
`pygit2` is bounded, but brings 13 MB of libgit2 for one function.

A binary hunk has the content after the change and then the content before it, deflated, in base 85, so `git apply -R`
works too.  git's other form, a delta against the old content, is not written: it would need both contents in memory.
Source: git's apply.c (parse_binary, parse_binary_hunk), diff.c (emit_binary_diff_body) and base85.c.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import re
import stat
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import BinaryIO, Final, NamedTuple

from protocol.diff.tree_diff import Change, entry_or_none, is_below
from protocol.tree import Tree, TreeEntry, filled, names_in, unfiltered

TEXT_LIMIT_BYTES: Final = 32 * 1024 * 1024  # both sides of a text file are held in memory; over it, as binary
TEXT_LIMIT_LINES: Final = 1_000_000  # a line costs some 50 bytes in addition to its content
BINARY_LIMIT_BYTES: Final = 256 * 1024 * 1024  # of one side: `git apply` holds patch and file in memory
GIT_APPLY_LIMIT_BYTES: Final = 1023 * 1024 * 1024  # of a whole patch; MAX_APPLY_SIZE, git's apply.c
BINARY_PROBE_BYTES: Final = 8000  # FIRST_FEW_BYTES, git's xdiff-interface.c
CONTEXT_LINES: Final = 3
_NAME_BYTES_MAX: Final = 255  # NAME_MAX
_LINKS_MAX: Final = 40  # MAXSYMLINKS, path_resolution(7)
NO_OBJECT: Final = b"0" * 40
NO_NEWLINE: Final = b"\n\\ No newline at end of file\n"

Write = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class LineStat:
    """Lines added and removed by one change; both 0 when `binary` (or too large, or without content).

    `unreadable`: why a content could not be read, so that its lines are not known.
    """

    added: int
    removed: int
    binary: bool = False
    unreadable: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Uncarried:
    """A change that a patch does not have, and why.

    `is_usual`: git itself never records it (an empty directory, what is in `.git`), so nobody expects it in a patch.
    """

    path: bytes
    reason: str
    is_usual: bool = False


# --- the sides of a change ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Content:
    """A file or symlink on one side of a change.  `mode` is git's: 100644, 100755 or 120000 (octal).

    `text` is None for a content that is streamed as a binary hunk.
    """

    tree: Tree
    entry: TreeEntry
    mode: int
    text: bytes | None

    @property
    def size(self) -> int:
        return self.entry.size if self.text is None else len(self.text)

    def chunks(self) -> Iterator[bytes]:
        if self.text is not None:
            yield self.text
        elif self.entry.is_symlink:
            yield self.entry.target
        else:
            yield from _all_of(self.tree, self.entry)


@dataclass(frozen=True, slots=True)
class _Refused:
    """A side that a patch cannot represent.  `is_unreadable`: reading it failed."""

    reason: str
    is_unreadable: bool = False


@dataclass(frozen=True, slots=True)
class _Directory:
    is_empty: bool


_Side = _Content | _Refused | _Directory | None


def _side(tree: Tree, entry: TreeEntry | None) -> _Side:
    if entry is None:
        return None
    if entry.is_symlink:
        return _Content(tree, entry, stat.S_IFLNK, entry.target)
    if entry.is_dir:
        return _Directory(is_empty=not names_in(unfiltered(tree), entry.path))
    if not entry.is_file:
        return _Refused("a special file")
    if entry.size > BINARY_LIMIT_BYTES:
        return _Refused(f"larger than {BINARY_LIMIT_BYTES:,} bytes")
    try:
        return _Content(tree, entry, _git_mode(entry), _text(tree, entry))
    except OSError as error:
        if error.errno == errno.ESTALE:
            # Another program overwrote the old content.  The rest of the patch is still useful.
            return _Refused("another program changed it below the overlay", is_unreadable=True)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EIO):
            return _Refused(f"it cannot be read: {error.strerror}", is_unreadable=True)
        raise


def _text(tree: Tree, entry: TreeEntry) -> bytes | None:
    """The content if it is text and small enough to be compared by lines."""
    if entry.size > TEXT_LIMIT_BYTES:
        tree.read(entry.path, 0, 1)  # so that an error is raised now, not in the middle of a hunk
        return None
    if b"\0" in tree.read(entry.path, 0, min(BINARY_PROBE_BYTES, entry.size)):
        return None
    text = b"".join(_all_of(tree, entry))
    return text if text.count(b"\n") <= TEXT_LIMIT_LINES else None


def _all_of(tree: Tree, entry: TreeEntry) -> Iterator[bytes]:
    """The content of a file.  EIO if its length is not that of its entry, with which a hunk begins."""
    done = 0
    for chunk in filled(tree.chunks(entry.path)):
        done += len(chunk)
        yield chunk
    if done != entry.size:
        raise OSError(errno.EIO, "the file changed while the patch was made", entry.path)


def _git_mode(entry: TreeEntry) -> int:
    return stat.S_IFREG | (0o755 if entry.mode & stat.S_IXUSR else 0o644)


def _lines(text: bytes) -> list[bytes]:
    """The lines with their ends, cut at LF only: `splitlines` would also cut at a CR."""
    lines = text.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def line_stat(old: Tree, new: Tree, change: Change) -> LineStat:
    """How many lines `change` adds and removes, with a symlink's target as one line.  Reads both contents."""
    if change.kind == "metadata":
        return LineStat(0, 0)
    texts: list[bytes] = []
    for tree, entry in ((old, change.old), (new, change.new)):
        side = _side(tree, entry)
        if isinstance(side, _Content) and side.text is not None:
            texts.append(side.text)
        elif entry is not None and entry.is_file:
            unreadable = side.reason if isinstance(side, _Refused) and side.is_unreadable else ""
            return LineStat(0, 0, binary=True, unreadable=unreadable)
        else:
            texts.append(b"")
    found = list(edits(*map(_lines, texts)))
    return LineStat(sum(e.new_end - e.new_start for e in found), sum(e.old_end - e.old_start for e in found))


# --- which changes a patch carries ----------------------------------------------------------------------------

# verify_path of git's read-cache.c, with core.protectNTFS as it is by default: ".git" and what other systems take for
# it; of a symlink's path also ".gitmodules".
_DOT_GIT: Final = re.compile(rb"(?is)(?:.*\\)?(?:\.git|git~1)[. ]*(?:[:\\].*)?")
_DOT_GITMODULES: Final = re.compile(rb"(?is)(?:.*\\)?(?:\.gitmodules|gitmod~[1-4]|gi7eba~[1-9])[. ]*(?:[:\\].*)?")


def is_refused_by_git(path: bytes, *, is_symlink: bool = False) -> bool:
    """Whether `git apply` refuses a patch of `path` ("invalid path")."""
    if is_symlink and any(_DOT_GITMODULES.fullmatch(name) for name in path.split(b"/")):
        return True
    return _refused_part(path) is not None


def _refused_part(path: bytes) -> bytes | None:
    """`path` up to its first component that git refuses; None if git refuses none."""
    at = 0
    for name in path.split(b"/"):
        at += len(name) + 1
        if (b"git" in name or b"GIT" in name.upper()) and _DOT_GIT.fullmatch(name):
            return path[: at - 1]
    return None


def write_patch(
    old: Tree,
    new: Tree,
    changed: Iterable[Change],
    out: Callable[[bytes], object] | BinaryIO,
    *,
    include_git: bool = False,
    on_uncarried: Callable[[Uncarried], object] = lambda _: None,
) -> None:
    """Write `changed`, which `protocol.diff.tree_diff.changes` gave for these trees, as a patch to `out`.

    One text file, or 64 KiB of a binary one, is in memory at a time.  `on_uncarried` is called for each change that
    the patch lacks, when its turn comes.  `include_git` writes changes of paths that git refuses, as in `.git`, too:
    for `patch -p1` and `git apply --unsafe-paths`.
    """
    writer = _Writer(old, new, out if callable(out) else out.write, on_uncarried, include_git=include_git)
    for change in changed:
        writer.add(change)


class _Writer:
    """Writes one patch."""

    def __init__(
        self, old: Tree, new: Tree, write: Write, on_uncarried: Callable[[Uncarried], object], *, include_git: bool
    ) -> None:
        self._old = old
        self._new = new
        self._write = write
        self._on_uncarried = on_uncarried
        self._include_git = include_git
        # Changes come depth first, so one path of each is enough.
        self._refused: bytes | None = None  # reported already, so changes below it are not reported
        self._kept: bytes | None = None  # not a directory in the old tree, and the patch cannot remove it
        self._emptied: bytes | None = None  # reported as a directory that is empty now

    def add(self, change: Change) -> None:
        if self._is_refused(change):
            return
        if change.has_other_links:
            other, word = (change.linked, "a") if change.linked is not None else (change.unlinked, "no longer a")
            self._report(change.path, f"{word} hard link to {_quoted(other or b'').decode()}", is_usual=True)
        if change.kind == "metadata":
            self._write_mode(change)
            return
        left, right = _side(self._old, change.old), _side(self._new, change.new)
        reason = self._why_not(change, left, right)
        if reason is not None:
            if isinstance(right, _Directory):
                self._kept = change.path
            self._report(change.path, reason)
            return
        if _is_empty_directory(right) or (left and not right and _is_empty_directory(left)):
            self._report(change.path, "an empty directory", is_usual=True)
        before = left if isinstance(left, _Content) else None
        after = right if isinstance(right, _Content) else None
        if before and after and change.kind == "type":
            # As git does: no tool turns a file into a symlink.
            _write_section(change.path, before, None, self._write)
            before = None
        _write_section(change.path, before, after, self._write)
        if before and not right:
            self._report_emptied(change.path)

    def _is_refused(self, change: Change) -> bool:
        """Whether git does not take the change's path; the first of those below one directory is reported."""
        if self._include_git:
            return False
        if self._refused is not None and is_below(change.path, self._refused):
            return True
        refused = _refused_part(change.path)
        if refused is not None:
            self._refused = refused
            if refused.rpartition(b"/")[2] == b".git":
                self._report(refused, "--include-git includes it; `git apply` rejects it", is_usual=True)
            else:
                self._report(refused, "git rejects this name")
            return True
        return False

    def _why_not(self, change: Change, left: _Side, right: _Side) -> str | None:
        """Why the patch cannot carry the change; None if it can, or if there is nothing to carry."""
        if self._kept is not None and is_below(change.path, self._kept):
            return None if isinstance(right, _Directory) else "it replaces an entry that this patch cannot remove"
        for side in (left, right):
            if isinstance(side, _Refused):
                return side.reason
        if not self._include_git and any(
            entry and entry.is_symlink and is_refused_by_git(change.path, is_symlink=True)
            for entry in (change.old, change.new)
        ):
            return "git rejects a symlink of this name"
        if isinstance(left, _Directory) and isinstance(right, _Content) and self._keeps_something(change.path):
            return "it replaces a directory that this patch cannot remove completely"
        is_filled = isinstance(right, _Directory) and not right.is_empty
        # git looks up the new files through the link, which it has not removed yet.
        if is_filled and change.old and _cannot_be_followed(unfiltered(self._old), change.old):
            return "git cannot replace a symlink that cannot be followed with a directory"
        return None

    def _keeps_something(self, directory: bytes) -> bool:
        """Whether anything in `directory` of the old tree stays after the patch has removed what it can."""
        tree = unfiltered(self._old)
        for entry in tree.walk(directory):
            if entry.path == directory:
                continue
            if tree is not self._old and entry_or_none(self._old, entry.path) is None:
                return True
            if not self._include_git and is_refused_by_git(entry.path, is_symlink=entry.is_symlink):
                return True
            side = _side(self._old, entry)
            if isinstance(side, _Refused) or _is_empty_directory(side):
                return True
        return False

    def _report_emptied(self, removed: bytes) -> None:
        """Report a directory of the new tree that both tools remove with its last file."""
        tree = unfiltered(self._new)
        above = removed.rpartition(b"/")[0]
        while above and entry_or_none(tree, above) is None:
            above = above.rpartition(b"/")[0]
        if above and above != self._emptied and tree.entry(above).is_dir and not names_in(tree, above):
            self._emptied = above
            self._report(above, "a directory that is empty now", is_usual=True)

    def _report(self, path: bytes, reason: str, *, is_usual: bool = False) -> None:
        # The empty line keeps git from taking the comment for the end of a section without hunks.
        self._write(b"\n# Not in this patch: %s (%s)\n" % (_quoted(path), reason.encode()))
        self._on_uncarried(Uncarried(path, reason, is_usual))

    def _write_mode(self, change: Change) -> None:
        if change.old and change.new and change.old.is_file:
            old_mode, new_mode = _git_mode(change.old), _git_mode(change.new)
            if old_mode != new_mode:
                self._write(_git_line(change.path) + b"old mode %o\nnew mode %o\n" % (old_mode, new_mode))


def _cannot_be_followed(tree: Tree, symlink: TreeEntry) -> bool:
    """Whether a path through `symlink` fails with ELOOP or ENAMETOOLONG; False for a target outside the tree."""
    if not symlink.is_symlink or symlink.target.startswith(b"/"):
        return False
    at: list[bytes] = symlink.path.split(b"/")[:-1]
    names = symlink.target.split(b"/")[::-1]
    links = 0
    while names:
        name = names.pop()
        if len(name) > _NAME_BYTES_MAX:
            return True
        if name in (b"", b"."):
            continue
        if name == b"..":
            if not at:
                return False
            at.pop()
            continue
        at.append(name)
        path = b"/".join(at)
        entry = entry_or_none(tree, path)
        if entry is None:
            return False
        if entry.is_symlink:
            links += 1
            if links > _LINKS_MAX:
                return True
            if entry.target.startswith(b"/"):
                return False
            at.pop()
            names += entry.target.split(b"/")[::-1]
    return False


def _is_empty_directory(side: _Side) -> bool:
    return isinstance(side, _Directory) and side.is_empty


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


def _git_line(path: bytes) -> bytes:
    return b"diff --git %s %s\n" % (_quoted(b"a/" + path), _quoted(b"b/" + path))


# --- sections and hunks -------------------------------------------------------------------------------------


def _write_section(path: bytes, old: _Content | None, new: _Content | None, write: Write) -> None:
    """One file of the patch; a side that is None does not exist."""
    if old is None and new is None:
        return
    # Hashed before anything is written, so that a content that cannot be read raises here.
    names = _object_name(old), _object_name(new)
    write(_git_line(path))
    if old is None and new is not None:
        write(b"new file mode %o\n" % new.mode)
    elif new is None and old is not None:
        write(b"deleted file mode %o\n" % old.mode)
    elif old and new and old.mode != new.mode:
        write(b"old mode %o\nnew mode %o\n" % (old.mode, new.mode))
    # From this line GNU patch learns that a symlink is edited, or an empty file added or removed; git checks the
    # content before and after a binary hunk with it.
    write(b"index %s..%s" % names)
    write(b" %o\n" % new.mode if old and new and old.mode == new.mode else b"\n")
    if (old and old.text is None) or (new and new.text is None):
        write(b"GIT binary patch\n")
        for side in (new, old):
            write_literal(side.size if side else 0, side.chunks() if side else (), write)
        return
    left, right = _lines(old.text or b"" if old else b""), _lines(new.text or b"" if new else b"")
    heading = b"--- %s\n+++ %s\n" % (
        _quoted(b"a/" + path) if old else b"/dev/null",
        _quoted(b"b/" + path) if new else b"/dev/null",
    )
    for hunk in _hunks(edits(left, right)):
        write(heading)
        heading = b""
        _write_hunk(left, right, hunk, write)


def _object_name(side: _Content | None) -> bytes:
    return NO_OBJECT if side is None else blob_name(side.size, side.chunks()).encode()


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
    """A range of a hunk: lines count from 1, a length of 1 is omitted, and an empty range names the line before it."""
    if end - start == 1:
        return b"%d" % end
    return b"%d,%d" % (start + 1 if end > start else start, end - start)


def _write_lines(mark: bytes, lines: Sequence[bytes], write: Write) -> None:
    if lines:
        end = b"" if lines[-1].endswith(b"\n") else NO_NEWLINE
        write(b"".join(mark + line for line in lines) + end)


# -- lines -----------------------------------------------------------------------------------------
COST_LIMIT: Final = 200_000_000  # in the units of `_difflib_cost`; about two seconds at the very worst


class Edit(NamedTuple):
    """`old[old_start:old_end]` is replaced by `new[new_start:new_end]`; one of them may be empty."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int


def edits(old: Sequence[bytes], new: Sequence[bytes], *, cost_limit: int = COST_LIMIT) -> Iterator[Edit]:
    """The edits that turn `old` into `new`, in order, with at least one equal line between two of them."""
    last: Edit | None = None
    for edit in _raw_edits(old, new, cost_limit):
        if last and (last.old_end, last.new_end) == (edit.old_start, edit.new_start):
            last = Edit(last.old_start, edit.old_end, last.new_start, edit.new_end)
            continue
        if last:
            yield last
        last = edit
    if last:
        yield last


def _raw_edits(old: Sequence[bytes], new: Sequence[bytes], budget: int) -> Iterator[Edit]:
    regions = [Edit(0, len(old), 0, len(new))]  # a stack, the next one last: recursion could get too deep
    while regions:
        region = _trimmed(old, new, regions.pop())
        a, b = old[region.old_start : region.old_end], new[region.new_start : region.new_end]
        if not a or not b:
            if a or b:
                yield region
            continue
        budget -= len(a) + len(b)
        if budget > 0 and (anchors := _anchors(a, b)):
            regions.extend(reversed(_split(region, anchors)))
            continue
        cost = _difflib_cost(a, b)
        if cost > budget:
            yield region
            continue
        budget -= cost
        for tag, a_start, a_end, b_start, b_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            if tag != "equal":
                i, j = region.old_start, region.new_start
                yield Edit(i + a_start, i + a_end, j + b_start, j + b_end)


def _trimmed(old: Sequence[bytes], new: Sequence[bytes], region: Edit) -> Edit:
    """`region` without the equal lines at its start and end."""
    i, i_end, j, j_end = region
    while i < i_end and j < j_end and old[i] == new[j]:
        i, j = i + 1, j + 1
    while i < i_end and j < j_end and old[i_end - 1] == new[j_end - 1]:
        i_end, j_end = i_end - 1, j_end - 1
    return Edit(i, i_end, j, j_end)


def _anchors(a: Sequence[bytes], b: Sequence[bytes]) -> list[tuple[int, int]]:
    """The most pairs (i, j), rising in both, of lines that occur once in `a` and once in `b`."""
    in_a, in_b = Counter(a), Counter(b)
    place_in_b = {line: j for j, line in enumerate(b) if in_b[line] == 1}
    pairs = [(i, place_in_b[line]) for i, line in enumerate(a) if in_a[line] == 1 and line in place_in_b]
    return _longest_rising(pairs)


def _longest_rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence of `pairs` whose second members rise (patience sorting)."""
    tops: list[int] = []  # the smallest last member of a rising sequence of each length
    top_at: list[int] = []  # and its index in `pairs`
    before: list[int] = []  # each pair's predecessor in the best sequence that ends with it
    for place, (_, j) in enumerate(pairs):
        pile = bisect_left(tops, j)
        before.append(top_at[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [j]
        top_at[pile : pile + 1] = [place]
    longest = []
    place = top_at[-1] if top_at else -1
    while place >= 0:
        longest.append(pairs[place])
        place = before[place]
    return longest[::-1]


def _split(region: Edit, anchors: Sequence[tuple[int, int]]) -> list[Edit]:
    """The regions between the anchors, which are relative to the region's start."""
    between = []
    i, j = region.old_start, region.new_start
    for a, b in anchors:
        end_i, end_j = region.old_start + a, region.new_start + b
        if i < end_i or j < end_j:
            between.append(Edit(i, end_i, j, end_j))
        i, j = end_i + 1, end_j + 1
    between.append(Edit(i, region.old_end, j, region.new_end))
    return between


def _difflib_cost(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """An upper bound of difflib's steps: each round tries all pairs of equal lines and matches at least one line."""
    in_a, in_b = Counter(a), Counter(b)
    return sum(times * in_b[line] for line, times in in_a.items()) * min(len(a), len(b))


# -- binary hunks ----------------------------------------------------------------------------------
LINE_BYTES: Final = 52  # max_bytes of git's diff.c: the most that a line carries
_BLOCK_BYTES: Final = LINE_BYTES * 4096  # encoded in one call, which is faster than line by line


def blob_name(size: int, chunks: Iterable[bytes]) -> str:
    """The name that git gives a blob with this content, as `git hash-object` prints it."""
    blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for chunk in chunks:
        blob.update(chunk)
    return blob.hexdigest()


def write_literal(size: int, chunks: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Write one direction of a binary hunk: `size` bytes of content, which `chunks` yields."""
    write(b"literal %d\n" % size)
    deflate = zlib.compressobj()
    pending = bytearray()
    for chunk in chunks:
        pending += deflate.compress(chunk)
        whole = len(pending) - len(pending) % _BLOCK_BYTES
        for start in range(0, whole, _BLOCK_BYTES):
            write(_encoded_lines(bytes(pending[start : start + _BLOCK_BYTES])))
        del pending[:whole]
    pending += deflate.flush()
    for start in range(0, len(pending), _BLOCK_BYTES):
        write(_encoded_lines(bytes(pending[start : start + _BLOCK_BYTES])))
    write(b"\n")


def _encoded_lines(data: bytes) -> bytes:
    """Lines of a length letter (A to Z for 1 to 26 bytes, a to z for 27 to 52) and base 85, 5 characters a word."""
    # The alphabet of `b85encode` is git's; `pad` fills the last 4 bytes, as git does.
    text = base64.b85encode(data, pad=True)
    columns = LINE_BYTES // 4 * 5
    lines = [b"z" + text[start : start + columns] for start in range(0, len(text), columns)]
    last = len(data) % LINE_BYTES
    if last:
        letter = b"%c" % (ord("A") + last - 1 if last <= 26 else ord("a") + last - 27)
        lines[-1] = letter + lines[-1][1:]
    return b"\n".join(lines) + b"\n"
