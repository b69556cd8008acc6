"""What a call that was cancelled has done: the words for the command line's Ctrl-C and for the async client.

The daemon answers a request to cancel with a state (`vfsd.wire.messages.CancelState`).  A call that has begun to change
something completes; every other call stops and has changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:  # start-up: `vfsd --help` imports this module, and needs no msgspec
    from vfsd.wire.messages import CancelState

ANSWER_S: Final = 3.0  # how long a client waits for the outcome of a call that it cancelled
Outcome: TypeAlias = Literal["stopped", "completed", "continues", "unknown"]


@dataclass(frozen=True, slots=True)
class Words:
    """The words for a call: its name, and the effect if it was stopped or completed."""

    what: str
    stopped: str
    complete: str


_UNDO: Final = "; `vfsd restore --undo` takes it back"
# Calls that change something.  Other calls are cancelled without effect when their client ends.
WORDS: Final = {
    "snapshot": Words("the snapshot", "no snapshot was taken", "the snapshot was taken; `vfsd drop` removes it"),
    "drop": Words("the removal", "the snapshot is still there", "the snapshot was dropped"),
    "restore": Words("the restore", "nothing was changed", f"the restore is complete{_UNDO}"),
    "import": Words("the import", "nothing was changed", f"the import is complete{_UNDO}"),
    "export": Words("the export", "no file was written", "the archive is complete"),
    "merge": Words("the merge", "nothing was changed", f"the merge is complete{_UNDO}"),
    "adopt": Words("the adoption", "nothing was changed", f"the adoption is complete{_UNDO}"),
    "apply": Words("the apply", "nothing was written", "the apply is complete"),
    "fork": Words("the fork", "no fork was made", "the fork is mounted; `vfsd unmount` removes it"),
    "upgrade": Words("the upgrade", "the old daemon serves on", "the new daemon serves"),
    "unmount": Words("the unmount", "the workspace is still mounted", "the workspace was unmounted"),
}
COMMAND_WORDS: Final = Words("the command", "it was killed with all of its processes", "the command has run")


def words_of(method: str) -> Words | None:
    """Return the words for `method`; None if closing its connection is enough to cancel it."""
    return COMMAND_WORDS if method == "fs.exec" else WORDS.get(method)


def left_sentence(words: Words, state: CancelState | None) -> str:
    """Describe the outcome of a call whose client leaves after the answer `state` to its request to cancel."""
    if state == "stopping":
        return f"the daemon was asked to stop {words.what}: {words.stopped}, unless it was complete before"
    if state == "finishing":
        return f"the daemon completes {words.what} in the background; then {words.complete}"
    return f"the daemon did not answer: {words.what} may or may not be completed; see `vfsd status` and `vfsd diff`"


@dataclass(frozen=True, slots=True)
class CancelledCall:
    """A call of the async client that was cancelled.

    `outcome` is "stopped" (nothing was changed; a command was killed), "completed" (it was too late), "continues" (the
    daemon completes it) or "unknown" (the daemon did not answer within ANSWER_S, or is gone).  `str()` is a sentence.
    """

    method: str
    outcome: Outcome
    sentence: str

    def __str__(self) -> str:
        return self.sentence

    @classmethod
    def stopped(cls, method: str, words: Words) -> CancelledCall:
        """Return the description of a call that the daemon stopped."""
        return cls(method, "stopped", f"{words.what} was stopped: {words.stopped}")

    @classmethod
    def completed(cls, method: str, words: Words) -> CancelledCall:
        """Return the description of a call that was completed."""
        return cls(method, "completed", f"it was too late to stop {words.what}: {words.complete}")

    @classmethod
    def left(cls, method: str, words: Words, state: CancelState | None) -> CancelledCall:
        """Return the description of a call whose answer the client did not wait for."""
        outcome: Outcome = "continues" if state == "finishing" else "unknown"
        return cls(method, outcome, left_sentence(words, state))
