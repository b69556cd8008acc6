"""The tools on single files and directories: ls, read_file, write_file, edit_file, rm.

`below` opens the tree that a tool searches: the tree of its context, or any Filesystem as one.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Annotated, Final, Literal

from msgspec import Meta

from protocol.adapters.path_files import search_start
from protocol.adapters.trees import FilesystemTree, TreeFiles
from protocol.filesystem import Filesystem
from protocol.paths import decode, encode, normalise
from protocol.tool_messages import (
    EditFileParams,
    EditFileResult,
    Params,
    Result,
    RmParams,
    RmResult,
)
from protocol.tools.base import DirectoryCreated, FileDeleted, FileEdited, FileWritten, Tool, ToolContext
from protocol.tools.edits import edit_file
from protocol.tree import Tree, TreeEntry
from protocol.types import DEFAULT_READ_LINES, FileStat, ReadResult, WriteMode, WriteResult, utc_time

_SHOWN_LINE_CHARACTERS: Final = 2_000  # of one line, for a model
DEFAULT_ENTRIES: Final = 1_000

Path = Annotated[str, Meta(min_length=1, description="Relative to the root of the workspace.")]
EntryType = Literal["file", "directory", "symlink", "other"]


# -- ls -------------------------------------------------------------------------------------------
class LsParams(Params, frozen=True):
    path: Annotated[str, Meta(description="The directory to list; the root if left out.")] = "."
    limit: Annotated[int, Meta(ge=1, le=100_000, description="At most this many entries.")] = DEFAULT_ENTRIES


class Entry(Result, frozen=True):
    """A directory entry.  A symlink has the type of its target; "symlink" means that it leads nowhere."""

    path: str
    type: EntryType
    size_bytes: int
    mode: int  # the permission bits
    modified_at: datetime | None = None
    is_symlink: bool = False


class LsResult(Result, frozen=True):
    path: str
    entries: list[Entry]
    truncated: bool = False


def entry_of(found: FileStat) -> Entry:
    """The entry for the result of a stat."""
    return Entry(
        path=found.path,
        type="file" if found.is_file else "directory" if found.is_directory else "other",
        size_bytes=found.size_bytes,
        mode=stat.S_IMODE(found.mode),
        modified_at=found.modified_at,
        is_symlink=found.is_symlink,
    )


def _ls(params: LsParams, context: ToolContext) -> LsResult:
    entries = entries_of(params.path, context)
    first = list(islice(entries, params.limit))
    return LsResult(path=normalise(params.path), entries=first, truncated=next(entries, None) is not None)


def entries_of(path: str, context: ToolContext, *, after: bytes = b"") -> Iterator[Entry]:
    """Yield the entries of a directory whose names follow `after`, sorted by the bytes of their names.

    One stat at a time; calls `context.keep_going` for each entry.
    """
    return _entries(path, context, after) if context.tree is None else _tree_entries(path, context, after)


def _entries(directory: str, context: ToolContext, after: bytes) -> Iterator[Entry]:
    for one in context.filesystem.list(directory):
        context.keep_going()
        if encode(one.path).rpartition(b"/")[2] <= after:
            continue
        yield _entry(one.path, context, is_symlink=one.is_symlink)


def _tree_entries(asked: str, context: ToolContext, after: bytes) -> Iterator[Entry]:
    """`_entries` on the context's tree: one lookup for each entry, where a path needs one for each of its parts."""
    with below(asked, context) as (tree, directory, shown):
        for found in tree.entries(directory):
            context.keep_going()
            if found.name <= after:
                continue
            path = shown(found.path)
            yield _entry(path, context, is_symlink=True) if found.is_symlink else _tree_entry(path, found)


def _tree_entry(path: str, found: TreeEntry) -> Entry:
    return Entry(
        path=path,
        type="file" if found.is_file else "directory" if found.is_dir else "other",
        size_bytes=found.size,
        mode=stat.S_IMODE(found.mode),
        modified_at=utc_time(found.mtime_ns),
    )


def _entry(path: str, context: ToolContext, *, is_symlink: bool) -> Entry:
    try:
        return entry_of(context.filesystem.stat(path))
    except OSError:  # a symlink that leads nowhere or out of the workspace, or an entry removed meanwhile
        kind: EntryType = "symlink" if is_symlink else "other"
        return Entry(path=path, type=kind, size_bytes=0, mode=0, is_symlink=is_symlink)


def _render_ls(result: LsResult) -> str:
    lines = [_entry_line(entry) for entry in result.entries]
    if not lines:
        return f"{result.path} is empty"
    if result.truncated:
        lines.append(f"(the first {len(lines)} entries; ask for more with a larger limit)")
    return "\n".join(lines)


def _entry_line(entry: Entry) -> str:
    name = entry.path + ("/" if entry.type == "directory" else "*" if entry.mode & 0o111 else "")
    if entry.is_symlink:
        name += " (symlink)" if entry.type != "symlink" else " (broken symlink)"
    return name if entry.type == "directory" else f"{name}  {entry.size_bytes} bytes"


LS: Final = Tool(
    name="ls",
    description="List a directory: names, types, sizes. Directories end in '/', executable files in '*'.",
    params=LsParams,
    result=LsResult,
    run=_ls,
    rendering=_render_ls,
)


# -- read_file ------------------------------------------------------------------------------------
class ReadFileParams(Params, frozen=True):
    path: Path
    offset: Annotated[int, Meta(ge=0, description="Lines to skip: with 100, the first line is line 101.")] = 0
    limit: Annotated[int, Meta(ge=1, description="At most this many lines.")] = DEFAULT_READ_LINES


def _read_file(params: ReadFileParams, context: ToolContext) -> ReadResult:
    return context.filesystem.read(params.path, offset=params.offset, limit=params.limit)


def _render_read(result: ReadResult) -> str:
    if not result.total_lines:
        return f"{result.path} is empty"
    if not result.content:
        return f"{result.path} has {result.total_lines} lines; there is nothing after line {result.offset}"
    # Only "\n" ends a line in the line counts; str.splitlines splits at ten other characters too.
    lines = result.content.removesuffix("\n").split("\n")
    shown = [f"{number:6}\t{_shortened(line)}" for number, line in enumerate(lines, result.offset + 1)]
    if result.truncated:
        last = result.offset + len(lines)
        shown.append(f"(lines {result.offset + 1} to {last} of {result.total_lines}; read on with offset={last})")
    return "\n".join(shown)


def _shortened(line: str) -> str:
    line = line.removesuffix("\r")
    if len(line) <= _SHOWN_LINE_CHARACTERS:
        return line
    return f"{line[:_SHOWN_LINE_CHARACTERS]}... ({len(line) - _SHOWN_LINE_CHARACTERS} more characters)"


READ_FILE: Final = Tool(
    name="read_file",
    description=(
        "Read a text file, with line numbers. Long files come in pages of lines: offset skips lines, limit says how "
        "many. Line numbers and the tab after them are not part of the file."
    ),
    params=ReadFileParams,
    result=ReadResult,
    run=_read_file,
    rendering=_render_read,
)


# -- write_file -----------------------------------------------------------------------------------
class WriteFileParams(Params, frozen=True):
    path: Path
    content: Annotated[str, Meta(description="The text to write, whole.")]
    mode: Annotated[
        WriteMode, Meta(description="create: refuse if it exists. overwrite: replace. append: add at the end.")
    ] = "overwrite"
    create_parents: Annotated[bool, Meta(description="Make directories that are missing.")] = True


def _write_file(params: WriteFileParams, context: ToolContext) -> WriteResult:
    content = params.content.encode()
    return write_bytes(params.path, content, context, mode=params.mode, create_parents=params.create_parents)


def write_bytes(
    path: str, content: bytes, context: ToolContext, *, mode: WriteMode, create_parents: bool
) -> WriteResult:
    """`write_file` for any content."""
    filesystem = context.filesystem
    missing = list(_missing_parents(filesystem, path)) if create_parents else []
    written = filesystem.write_bytes(path, content, mode=mode, create_parents=create_parents)
    for directory in missing:
        context.published(DirectoryCreated(directory))
    context.published(FileWritten(written.path, written.bytes_written))
    return written


def _missing_parents(filesystem: Filesystem, path: str) -> Iterator[str]:
    """Yield the missing directories above `path`, the highest first."""
    parts = normalise(path).split("/")[:-1]
    for end in range(1, len(parts) + 1):
        directory = "/".join(parts[:end])
        try:
            if not filesystem.exists(directory):
                yield directory
        except OSError:
            return  # below a file: the write reports it


def _render_write(result: WriteResult) -> str:
    done = {"create": "Created", "overwrite": "Wrote", "append": "Appended to"}[result.mode]
    return f"{done} {result.path} ({result.bytes_written} bytes)"


WRITE_FILE: Final = Tool(
    name="write_file",
    description="Write a text file. Replaces what is there, unless mode says otherwise; keeps its permissions.",
    params=WriteFileParams,
    result=WriteResult,
    run=_write_file,
    rendering=_render_write,
)


# -- edit_file ------------------------------------------------------------------------------------
def _edit_file(params: EditFileParams, context: ToolContext) -> EditFileResult:
    edited = edit_file(
        context.filesystem, params.path, params.old_text, params.new_text, replace_all=params.replace_all
    )
    context.published(FileEdited(edited.path, edited.replacements, edited.bytes_written))
    return EditFileResult(path=edited.path, replacements=edited.replacements, bytes_written=edited.bytes_written)


def _render_edit(result: EditFileResult) -> str:
    places = "1 place" if result.replacements == 1 else f"{result.replacements} places"
    return f"Edited {result.path} in {places} ({result.bytes_written} bytes now)"


EDIT_FILE: Final = Tool(
    name="edit_file",
    description=(
        "Replace text in a file. old_text must match the file exactly and be found once; with replace_all every "
        "occurrence is replaced. Read the file first; leave out the line numbers that read_file shows."
    ),
    params=EditFileParams,
    result=EditFileResult,
    run=_edit_file,
    rendering=_render_edit,
)


# -- rm -------------------------------------------------------------------------------------------
def _rm(params: RmParams, context: ToolContext) -> RmResult:
    path = normalise(params.path)
    deleted = context.filesystem.delete(path, recursive=params.recursive)
    context.published(FileDeleted(path, deleted))
    return RmResult(path=path, deleted=deleted)


def _render_rm(result: RmResult) -> str:
    return f"Deleted {result.path}" + ("" if result.deleted == 1 else f" ({result.deleted} entries)")


RM: Final = Tool(
    name="rm",
    description="Delete a file, a symlink, or an empty directory; with recursive a directory and all in it.",
    params=RmParams,
    result=RmResult,
    run=_rm,
    rendering=_render_rm,
)


# -- the tree of a search --------------------------------------------------------------------------
Shown = Callable[[bytes], str]  # maps a found path back to the beginning that the caller wrote


@contextmanager
def below(path: str, context: ToolContext) -> Iterator[tuple[Tree, bytes, Shown]]:
    """Open a tree to search below `path`.  Yields the tree, the path in it, and the mapping for results."""
    if context.tree is None:
        yield FilesystemTree(context.filesystem, for_search=True), encode(normalise(path)), decode
        return
    with context.tree() as tree:
        start, shown = search_start(TreeFiles(tree, root=context.filesystem.root), path)
        yield tree, start, shown
