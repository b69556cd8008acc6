"""The commands that list, read, search and change files: those of `vfsd fs`, with its answers."""

from __future__ import annotations

import errno
import json
import stat
import sys
from collections.abc import Callable
from typing import Any

from protocol.paths import DEFAULT_LIMITS, CallLimitError, encode, normalise
from protocol.portable.answers import base64_text, described
from protocol.portable.place import Place
from protocol.search import SKIP_NOTHING, USUAL_SKIPS, UnreadablePaths, glob_paths, grep_tree
from protocol.tools.edits import edit_file
from protocol.types import DEFAULT_READ_LINES, FileStat

_LINE_CHARACTERS = 1_000


def _entry(place: Place, path: str, found: FileStat) -> dict[str, Any]:
    kind = "file" if found.is_file else "directory" if found.is_directory else "other"
    shown = {"type": kind, "size_bytes": found.size_bytes, "mode": f"{stat.S_IMODE(found.mode):04o}"}
    if found.modified_at is not None:
        shown["modified_at"] = found.modified_at.isoformat()
    return {**place.shown(path), **shown, **({"is_symlink": True} if found.is_symlink else {})}


def _symlink(place: Place, path: str, size_bytes: int = 0, mode: int = 0) -> dict[str, Any]:
    shown = {"type": "symlink", "size_bytes": size_bytes, "mode": f"{mode:04o}", "is_symlink": True}
    return {**place.shown(path), **shown}


def list_directory(place: Place, path: str, limit: int) -> Any:
    """List a directory."""
    inside = place.path(path)
    listed = place.files.list(inside)
    entries = []
    for one in listed[:limit]:
        try:
            entries.append(_entry(place, one.path, place.files.stat(one.path)))
        except OSError:  # a symlink that leads nowhere or out of the directory, or an entry removed meanwhile
            other = {**place.shown(one.path), "type": "other", "size_bytes": 0, "mode": "0000"}
            entries.append(_symlink(place, one.path) if one.is_symlink else other)
    return {**place.shown(inside), "entries": entries, "truncated": len(listed) > limit}


def stat_path(place: Place, path: str) -> Any:
    """Describe one path, without following a symlink that leads nowhere."""
    inside = place.path(path)
    try:
        return _entry(place, inside, place.files.stat(inside))
    except FileNotFoundError:
        entry = place.tree().entry(encode(normalise(inside)))  # a dangling symlink exists
        if not entry.is_symlink:
            raise
        return _symlink(place, inside, entry.size, stat.S_IMODE(entry.mode))


def read_file(place: Place, path: str, offset: int, limit: int | None, as_bytes: bool) -> Any:
    """Read lines of a text, or bytes."""
    try:
        return _read_page(place, place.path(path), offset, limit, as_bytes)
    except CallLimitError:
        most = f"a read is limited to {DEFAULT_LIMITS.read_bytes} bytes"
        raise ValueError(f"{most}: use `--bytes --offset N --limit N`, or read the file in the mount") from None


def _read_page(place: Place, path: str, offset: int, limit: int | None, as_bytes: bool) -> Any:
    if not as_bytes:
        try:
            text = place.files.read(path, offset=offset, limit=DEFAULT_READ_LINES if limit is None else limit)
        except ValueError as error:
            if not isinstance(error.__cause__, UnicodeDecodeError):
                raise
            if offset or limit is not None:
                raise ValueError(f"{path} is not text, so it has no lines: read it as bytes") from None
        else:
            shown = {"content": text.content, "encoding": "utf-8", "offset": text.offset, "limit": text.limit}
            return {**place.shown(path), **shown, "total_lines": text.total_lines, "truncated": text.truncated}
    page = place.files.read_bytes(path, offset=offset, limit=limit)
    shown = {"content": base64_text(page.content), "encoding": "base64", "offset": page.offset, "limit": page.limit}
    return {**place.shown(path), **shown, "size_bytes": page.size_bytes, "truncated": page.truncated}


def _unreadable(place: Place, found: UnreadablePaths, name: Callable[[bytes], str]) -> dict[str, Any]:
    named = [{**place.shown(name(each.path)), "reason": each.reason} for each in found.named]
    return {"unreadable": named, "unreadable_count": found.count}


def find_files(place: Place, pattern: str, path: str, limit: int, everything: bool) -> Any:
    """Find files by name."""
    start, name = place.searched(place.path(path))
    skip = SKIP_NOTHING if everything else USUAL_SKIPS
    found = glob_paths(place.tree(), pattern, path=start, limit=limit, skip=skip)
    files = [place.shown(name(each)) for each in found.paths]
    return {"files": files, "truncated": found.truncated, **_unreadable(place, found.unreadable, name)}


def find_lines(
    place: Place, pattern: str, path: str, glob: str | None, ignore_case: bool, limit: int, everything: bool
) -> Any:
    """Find lines by a regular expression."""
    start, name = place.searched(place.path(path))
    found = grep_tree(
        place.tree(),
        pattern,
        path=start,
        glob=glob,
        max_matches=limit,
        max_line_characters=_LINE_CHARACTERS,
        skip=SKIP_NOTHING if everything else USUAL_SKIPS,
        ignore_case=ignore_case,
    )
    matches = [
        {
            **place.shown(name(encode(match.path))),
            "line_number": match.line_number,
            "line": match.line_content,
            "match_start": match.match_start,
            "match_end": match.match_end,
        }
        for match in found.matches
    ]
    return {"matches": matches, "truncated": found.truncated, **_unreadable(place, found.unreadable, name)}


def write_file(place: Place, path: str, mode: Any, no_parents: bool) -> Any:
    """Write standard input to a file."""
    inside = place.path(path)
    limit = DEFAULT_LIMITS.write_bytes
    content = sys.stdin.buffer.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"a write is limited to {limit} bytes: write the rest with --mode append, or in the mount")
    done = place.files.write_bytes(inside, content, mode=mode, create_parents=not no_parents)
    return {**place.shown(done.path), "bytes_written": done.bytes_written, "mode": done.mode}


def edit_text(place: Place, path: str) -> Any:
    """Replace text in a file, as standard input says."""
    try:
        edit = json.loads(sys.stdin.buffer.read())
        old, new, everywhere = edit.pop("old_text"), edit.pop("new_text"), edit.pop("replace_all", False)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"standard input is not an edit: {error!r}") from None
    if edit or not (isinstance(old, str) and isinstance(new, str) and isinstance(everywhere, bool)):
        raise ValueError("standard input is not an edit: it has other members, or members of other types")
    done = edit_file(place.files, place.path(path), old, new, replace_all=everywhere)
    return {**place.shown(done.path), "replacements": done.replacements, "bytes_written": done.bytes_written}


def remove(place: Place, path: str, recursive: bool) -> Any:
    """Delete a file, a symlink or a directory."""
    inside = place.path(path)
    try:
        return {**place.shown(inside), "deleted": place.files.delete(inside, recursive=recursive)}
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or recursive:
            raise
        raise OSError(errno.ENOTEMPTY, f"{described(error)}; `-r` deletes it with its content") from None
