"""Parameters and results of tools that are also messages of the control socket.

A module of its own, because every command of the command line imports the messages, and `protocol.tools` imports the
search engine: that would double a command's start-up time.  On the socket paths are wire paths (`vfsd.wire.messages`);
the daemon decodes them before it runs the tool.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

DEFAULT_PATHS: Final = 100
DEFAULT_MATCHES: Final = 200

# "" is the root, as on the wire: the filesystem refuses it with a better message than a length check.
_Path = Annotated[str, Meta(description="Relative to the root of the workspace.")]
_Everything = Annotated[
    bool,
    Meta(description="Also look in hidden directories, node_modules, __pycache__ and vendor, and at binary files."),
]


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the parameters of tools; values are checked when they are decoded."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the results of tools."""


class EditFileParams(Params, frozen=True, kw_only=True):
    """A replacement of text in the file at `path`."""

    old_text: Annotated[str, Meta(description="The exact text to replace, with its white space. Must be unique.")]
    new_text: Annotated[str, Meta(description="The text to put in its place.")]
    replace_all: Annotated[bool, Meta(description="Replace every occurrence.")] = False
    path: _Path


class EditFileResult(Result, frozen=True):
    path: str
    replacements: int
    bytes_written: int


class RmParams(Params, frozen=True):
    path: _Path
    recursive: Annotated[bool, Meta(description="Delete a directory with all that is in it.")] = False


class RmResult(Result, frozen=True):
    """`deleted` counts the deleted entries."""

    path: str
    deleted: int


class GlobParams(Params, frozen=True):
    pattern: Annotated[
        str,
        Meta(description="*.py matches names at any depth, src/*.py in src only, src/**/*.py below it; {a,b} either."),
    ]
    path: Annotated[str, Meta(description="Search below this directory; relative to the root of the workspace.")] = "."
    limit: Annotated[int, Meta(ge=1, description="At most this many paths.")] = DEFAULT_PATHS
    everything: _Everything = False


class UnreadablePath(Result, frozen=True):
    """A file that could not be read, or a directory that could not be listed."""

    path: str
    reason: str


class GlobResult(Result, frozen=True):
    """The matching files, sorted by path; `truncated` if there are more.

    `unreadable` are the first 1,000 of the `unreadable_count` directories that could not be searched.
    """

    paths: list[str]
    truncated: bool = False
    unreadable: tuple[UnreadablePath, ...] = ()
    unreadable_count: int = 0


class GrepParams(Params, frozen=True):
    pattern: Annotated[str, Meta(description="A regular expression (no look-around, no back-references).")]
    path: Annotated[str, Meta(description="Search below this directory, or in this file.")] = "."
    glob: Annotated[str | None, Meta(description="Only files whose path matches, as in the glob tool.")] = None
    limit: Annotated[int, Meta(ge=1, description="At most this many lines.")] = DEFAULT_MATCHES
    ignore_case: Annotated[bool, Meta(description="Upper and lower case are the same.")] = False
    everything: _Everything = False


class GrepHit(Result, frozen=True):
    """A matching line (the first is 1) and its first match.

    `line` is only the part around the match if the line is long; `match_start` and `match_end` are positions in `line`.
    """

    path: str
    line_number: int
    line: str
    match_start: int
    match_end: int


class GrepResult(Result, frozen=True):
    """`unreadable` are the first 1,000 of the `unreadable_count` files and directories that could not be searched."""

    matches: list[GrepHit]
    truncated: bool = False
    unreadable: tuple[UnreadablePath, ...] = ()
    unreadable_count: int = 0
