"""Parameters and results of tools that are messages of the control socket as well.

A module of its own, because every command of the command line imports the messages, and `protocol.tools` imports the
search engine: that would double a command's start-up time.  On the socket paths are wire paths (`vfsd.wire.messages`);
the daemon decodes them before it runs the tool.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.types import WriteMode

__all__ = ["Edit", "EditFileParams", "EditFileResult", "Params", "Result", "RmParams", "RmResult", "WriteFileResult"]

# "" is the root, as on the wire: the filesystem refuses it with a better message than a length check.
_Path = Annotated[str, Meta(description="Relative to the root of the workspace.")]


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the parameters of tools; values are checked when they are decoded."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the results of tools."""


class WriteFileResult(Result, frozen=True):
    path: str
    bytes_written: int
    mode: WriteMode


class Edit(Params, frozen=True):
    """A replacement of text; what `vfsd fs edit` reads."""

    old_text: Annotated[str, Meta(description="The exact text to replace, with its white space. Must be unique.")]
    new_text: Annotated[str, Meta(description="The text to put in its place.")]
    replace_all: Annotated[bool, Meta(description="Replace every occurrence.")] = False


class EditFileParams(Edit, frozen=True, kw_only=True):
    """An `Edit` of the file at `path`."""

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
