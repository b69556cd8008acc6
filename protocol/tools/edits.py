"""edit_file: replace text in a file, as the tool of that name does.

`protocol.portable` packs this module into a program for other machines, so it imports no messages.
"""

from __future__ import annotations

import errno
import json
import re
from typing import Any, NamedTuple

from protocol.filesystem import ComparingFilesystem, Filesystem

_ATTEMPTS = 100
_BARE_NEWLINE = re.compile(rb"(?<!\r)\n")


class Edited(NamedTuple):
    """The result of an edit."""

    path: str
    replacements: int
    bytes_written: int


def parsed_edit(text: bytes) -> dict[str, Any]:
    """Return the arguments of `edit_file` in a JSON object: old_text, new_text and replace_all.  ValueError."""
    try:
        edit = json.loads(text)
        found = {"old_text": edit.pop("old_text"), "new_text": edit.pop("new_text")}
        found["replace_all"] = edit.pop("replace_all", False)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"standard input is not an edit: {error!r}") from None
    if edit or [type(value) for value in found.values()] != [str, str, bool]:
        raise ValueError("standard input is not an edit: it has other members, or members of other types")
    return found


def edit_file(
    filesystem: Filesystem, path: str, old_text: str, new_text: str, *, replace_all: bool = False, first: bool = False
) -> Edited:
    """Replace `old_text`, which must occur exactly once; or every occurrence, or the `first`, of any number.

    An edit of the same file at the same time is kept, if `filesystem` can compare: this edit is then made again.
    ValueError, with advice, if it is not possible; the errors of `read_bytes` and `write_bytes`.
    """
    if not old_text:
        raise ValueError("old_text is empty: give the text to replace, or use write_file")
    for _ in range(_ATTEMPTS):
        try:
            content = filesystem.read_bytes(path).content
        except OSError as error:
            if error.errno != errno.ESTALE:  # replaced on another mount while it was being read
                raise
            continue
        edited, count = _edited(content, path, old_text, new_text, replace_all, first)
        if not isinstance(filesystem, ComparingFilesystem):
            written = filesystem.write_bytes(path, edited, mode="overwrite", create_parents=False)
            return Edited(written.path, count, written.bytes_written)
        try:
            replaced = filesystem.replace_bytes(path, content, edited)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            continue
        if replaced is not None:
            return Edited(replaced.path, count, replaced.bytes_written)
    raise OSError(errno.EBUSY, f"other programs changed it during each of {_ATTEMPTS} attempts: try again", path)


def _edited(
    content: bytes, path: str, old_text: str, new_text: str, replace_all: bool, first: bool
) -> tuple[bytes, int]:
    """Return the content after the edit, and the number of replacements."""
    _check_text(content, path)
    old, new = _as_in(content, old_text.encode(), new_text.encode())
    count = content.count(old)
    if not (replace_all or first):
        # Overlapping occurrences count: which of them is meant is just as unclear.
        count = max(count, _two_if_overlapping(content, old))
    if count == 0:
        raise ValueError(f"old_text was found 0 times in {path}: it must match exactly, white space too")
    if count > 1 and not (replace_all or first):
        raise ValueError(
            f"old_text was found {count} times in {path}: "
            "give more of the text around it so that it is unique, or set replace_all"
        )
    if old == new:
        raise ValueError("new_text is the same as old_text: there is nothing to change")
    return content.replace(old, new, 1 if first else -1), 1 if first else count


def _check_text(content: bytes, path: str) -> None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise ValueError(
            f"{path} is not UTF-8 text (byte 0x{byte:02x} at offset {error.start}), so its text cannot be edited"
        ) from None


def _as_in(content: bytes, old: bytes, new: bytes) -> tuple[bytes, bytes]:
    """`old` and `new` with the line ends of `content`, if all of its lines end in CRLF.

    A model sees lines without their ends, and always writes "\n".
    """
    ends = content.count(b"\n")
    if not ends or content.count(b"\r\n") != ends:
        return old, new
    return _BARE_NEWLINE.sub(b"\r\n", old), _BARE_NEWLINE.sub(b"\r\n", new)


def _two_if_overlapping(content: bytes, old: bytes) -> int:
    first = content.find(old)
    return 2 if first >= 0 and content.find(old, first + 1) >= 0 else 0
