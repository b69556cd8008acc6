"""The declaration of an operation, and the types that several operations share.

Paths in parameters and results are wire paths (`vfsd.wire.messages`).
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

CacheChoice = Literal["writethrough", "writeback"]
UNCHANGED: Final = "nothing was changed"
UNDO_HINT: Final = "; `vfsd restore --undo` takes it back"


class Operation(msgspec.Struct, frozen=True):
    """An operation, which is a method of the control socket: its name, parameters and result.

    `noun`, `stopped` and `done` are words for people: the name of a call, the effect of a call that was stopped, and
    the effect of a completed one.  `stopped` is empty if closing its connection is enough to cancel a call; `done` is
    empty if a call changes nothing that a user asked for.

    `reads`: a call leaves the workspace as it is.  `audited`: it changes files, so the log names its client.
    `runs_command`: a call ends with the command that it runs.  `is_followed`: the client makes the call again when its
    connection ends.  `waits`: calls are made one at a time.  `is_of_daemon`: the daemon answers itself, without the
    modules that work on content.  `answered_within_s`: a daemon that takes longer hangs.
    """

    name: str
    params: type[msgspec.Struct]
    result: type[Any]
    noun: str = ""
    stopped: str = ""
    done: str = ""
    reads: bool = False
    audited: bool = False
    runs_command: bool = False
    is_followed: bool = False
    waits: bool = False
    is_of_daemon: bool = False
    answered_within_s: float | None = None

    def left(self, state: str | None) -> str:
        """Describe the outcome of a call whose client leaves after the answer `state` to its request to cancel.

        A call that has begun to change something completes; every other call stops and has changed nothing.
        """
        if state == "stopping":
            return f"the daemon was asked to stop {self.noun}: {self.stopped}, unless it was complete before"
        if state == "finishing":
            return f"the daemon completes {self.noun} in the background; then {self.done}"
        return f"the daemon did not answer: {self.noun} may or may not be completed; see `vfsd status` and `vfsd diff`"


class Params(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
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
    """One path that differs.  Fields that do not apply are missing.

    `change`: "type" means that the path now has another type, and "metadata" that only mode, owner, time, extended
    attributes or hard links changed.  `lines_added` and `lines_removed` are set in mode "stat" for text files.

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
