"""The outcome of a call that was cancelled, in words: for the command line's Ctrl-C and for the async client.

The daemon answers a request to cancel with a state (`vfsd.wire.messages.CancelState`).  A call that has begun to change
something completes; every other call stops and has changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:  # start-up: `vfsd --help` imports this module, and needs no msgspec
    from vfsd.operations.declaration import Operation
    from vfsd.wire.messages import CancelState

ANSWER_S: Final = 3.0  # how long a client waits for the outcome of a call that it cancelled
Outcome: TypeAlias = Literal["stopped", "completed", "continues", "unknown"]


def left_sentence(operation: Operation, state: CancelState | None) -> str:
    """Describe the outcome of a call whose client leaves after the answer `state` to its request to cancel."""
    if state == "stopping":
        return f"the daemon was asked to stop {operation.noun}: {operation.stopped}, unless it was complete before"
    if state == "finishing":
        return f"the daemon completes {operation.noun} in the background; then {operation.done}"
    return f"the daemon did not answer: {operation.noun} may or may not be completed; see `vfsd status` and `vfsd diff`"


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
    def stopped(cls, operation: Operation) -> CancelledCall:
        """Return the description of a call that the daemon stopped."""
        return cls(operation.name, "stopped", f"{operation.noun} was stopped: {operation.stopped}")

    @classmethod
    def completed(cls, operation: Operation) -> CancelledCall:
        """Return the description of a call that was completed."""
        return cls(operation.name, "completed", f"it was too late to stop {operation.noun}: {operation.done}")

    @classmethod
    def left(cls, operation: Operation, state: CancelState | None) -> CancelledCall:
        """Return the description of a call whose answer the client did not wait for."""
        outcome: Outcome = "continues" if state == "finishing" else "unknown"
        return cls(operation.name, outcome, left_sentence(operation, state))
