"""Comparison: the lines of two states of a file side by side, made from a patch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

ROWS: Final = 4_000  # shown on a page
_LINE_CHARACTERS: Final = 2_000
_HUNK: Final = re.compile(rb"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")
Kind = Literal["same", "changed", "added", "removed", "gap"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line: its number and text in the old and in the new state; None where there is none.

    The row "gap" stands for lines that are the same and are left out.
    """

    kind: Kind
    old_number: int | None = None
    old: str | None = None
    new_number: int | None = None
    new: str | None = None


def side_by_side(patch: bytes) -> Iterator[Row]:
    """Yield the rows of the hunks in the patch of one file.  A binary patch has none."""
    old = new = 0
    removed: list[bytes] = []
    added: list[bytes] = []
    is_in_hunk = False
    for line in patch.split(b"\n"):
        hunk = _HUNK.match(line)
        if hunk is None and not is_in_hunk:
            continue  # the header
        if hunk is None and line[:1] == b"-":
            removed.append(line[1:])
            continue
        if hunk is None and line[:1] == b"+":
            added.append(line[1:])
            continue
        if hunk is None and line[:1] == b"\\":
            continue  # "\ No newline at end of file"
        yield from _changed(removed, added, old, new)
        old, new = old + len(removed), new + len(added)
        removed, added = [], []
        if hunk is not None:
            is_first = not old
            is_in_hunk = True
            old, new = int(hunk[1]), int(hunk[2])
            if not is_first or max(old, new) > 1:
                yield Row("gap")
        elif line[:1] == b" ":
            yield Row("same", old, _text(line[1:]), new, _text(line[1:]))
            old, new = old + 1, new + 1
        else:
            is_in_hunk = False
    yield from _changed(removed, added, old, new)


def _changed(removed: list[bytes], added: list[bytes], old: int, new: int) -> Iterator[Row]:
    for at, (before, after) in enumerate(zip_longest(removed, added)):
        if before is None:
            yield Row("added", None, None, new + at, _text(after))
        elif after is None:
            yield Row("removed", old + at, _text(before))
        else:
            yield Row("changed", old + at, _text(before), new + at, _text(after))


def _text(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return text if len(text) <= _LINE_CHARACTERS else text[:_LINE_CHARACTERS] + " ..."
