"""Types that the messages of several methods share."""

from __future__ import annotations

from typing import Literal

import msgspec


class Params(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of the parameters of a method.  A parameter with an unknown name is an error (INVALID_PARAMS)."""


class Empty(msgspec.Struct, forbid_unknown_fields=True):
    """A message without fields: no parameters, or a result without content."""


class Peer(msgspec.Struct, frozen=True):
    """Another running workspace of the same user: its name, and the absolute path of its control socket."""

    name: str
    socket: str


class RepositoryRecord(msgspec.Struct, omit_defaults=True):
    """A git repository that both sides have changed, and that stayed as it was in the target.

    `detail` is a line for people.  `refs`: what the names of the other side's branches begin with in the repository;
    empty if they are not there, which `detail` explains.  `commands`: for a shell; they take over the commits.
    """

    path: str
    detail: str
    refs: str = ""
    commands: list[str] = []


class ExpiredRecord(msgspec.Struct):
    """A snapshot that the daemon dropped by itself.

    "unneeded": a safety snapshot that no undo or redo leads to any more, because it was too old or one of too many.
    "memory": an automatic snapshot that was dropped since the last such report because --max-memory was reached.
    """

    name: str
    created_at: str
    reason: Literal["unneeded", "memory"] = "unneeded"


class ChangeRecord(msgspec.Struct, omit_defaults=True):
    """One path that differs.  `lines_added` and `lines_removed` are set in mode "stat" for text files.

    `linked_to`: the path became a name of the file that has this name, too (a hard link).  `unlinked_from`: it is no
    longer a name of the file that has, or had, this name.
    """

    path: str
    change: Literal["added", "modified", "removed", "type", "metadata"]
    type: Literal["file", "directory", "symlink", "fifo", "socket", "device"]
    old_size: int | None = None
    new_size: int | None = None
    lines_added: int | None = None
    lines_removed: int | None = None
    binary: bool = False
    linked_to: str | None = None
    unlinked_from: str | None = None
