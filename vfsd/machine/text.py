"""Sizes, counts and paths as people read them, on a terminal and on a web page."""

from __future__ import annotations

import re
from typing import Final

# C0, DEL, C1, and what changes the direction of text (Unicode Standard Annex 9): a file name must not move the cursor,
# split a line of a script's input, or make another name or the rest of the line look like something else.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def show_path(path: str) -> str:
    """Escape the control characters of a wire path as `\\xNN`.  The result is a wire path of the same file."""

    def escape(match: re.Match[str]) -> str:
        return "".join(f"\\x{byte:02x}" for byte in match[0].encode())

    return _CONTROL.sub(escape, path)


def link_note(linked_to: str | None, unlinked_from: str | None) -> str:
    """Say after a path of which file it became a name, or else of which it is no longer a name; "" if neither."""
    if linked_to is not None:
        return f" (hard link to {show_path(linked_to)})"
    return "" if unlinked_from is None else f" (no longer a hard link to {show_path(unlinked_from)})"


def human_size(size_bytes: int) -> str:
    """Format a size: 512 B, 1.5 KiB, 20 MiB, ..."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):  # noqa: B007 the unit is used below
        size /= 1024
        if size < 1023.95:
            break
    return f"{size:.1f} {unit}" if size < 100 else f"{size:.0f} {unit}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Format a count: "1 file", "2 files", "1,000 files".  `plural` is for nouns with an irregular plural."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def older_note(older: int, advice: str) -> str:
    """Say how many files, one at least, an operation made older than what they replaced, and what to do then."""
    files, they = (f"{older:,} files are", "they") if older > 1 else ("1 file is", "it")
    return f"{files} older than what {they} replaced; build tools may not notice: {advice}"
