"""Handle Ctrl-C and SIGTERM while the daemon works: cancel the call if possible, and report the outcome.

The first signal asks the daemon to cancel the call and waits for its definite answer: either the call was cancelled and
has changed nothing, or it has begun to change something and completes.  The second signal exits at once; the daemon
then continues in the background as it answered to the first.
"""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vfsd.cli.common import output

if TYPE_CHECKING:
    from vfsd.client.connection import ControlClient
    from vfsd.wire.messages import CancelState

AFTER_SIGNAL: Final = 128  # the exit status that a shell reports for signal N is 128 + N
_ANSWER_S: Final = 3.0  # how long the daemon may take to answer


@dataclass(frozen=True, slots=True)
class _Words:
    """The words for a call: its name, and the effect if it was stopped or completed."""

    what: str
    stopped: str
    complete: str


_UNDO: Final = "; `vfsd restore --undo` takes it back"
# Calls that change something.  Other calls are cancelled without effect when their client ends.
_WORDS: Final = {
    "snapshot": _Words("the snapshot", "no snapshot was taken", "the snapshot was taken; `vfsd drop` removes it"),
    "drop": _Words("the removal", "the snapshot is still there", "the snapshot was dropped"),
    "restore": _Words("the restore", "nothing was changed", f"the restore is complete{_UNDO}"),
    "import": _Words("the import", "nothing was changed", f"the import is complete{_UNDO}"),
    "export": _Words("the export", "no file was written", "the archive is complete"),
    "apply": _Words("the apply", "nothing was written", "the apply is complete"),
    "unmount": _Words("the unmount", "the workspace is still mounted", "the workspace was unmounted"),
}

# The effects of calls that a signal ends at once.
_UNINTERRUPTED: Final = {
    "fs.write": "the file was written",
    "fs.edit": "the file was edited",
    "fs.rm": "the path was deleted",
    "fs.exec": "the command has run",
}


class Interrupted(KeyboardInterrupt):
    """A signal ended a call; `str()` is the outcome.  `errno` is ECANCELED if the call was stopped."""

    def __init__(self, message: str, number: int, errno: int) -> None:
        super().__init__(message)
        self.number = number
        self.errno = errno


@dataclass(slots=True)
class Signalled:
    """A running call, and the signal that arrived meanwhile."""

    method: str
    number: int | None = None
    is_completed: bool = False


def completed(signalled: Signalled) -> str:
    """Describe a call that was completed despite a signal."""
    return f"it was too late to stop: {_WORDS[signalled.method].complete}"


def effect(method: str) -> str | None:
    """Describe the effect of a call of `method` that was completed; None if it changes nothing."""
    return _WORDS[method].complete if method in _WORDS else _UNINTERRUPTED.get(method)


@contextmanager
def interruptible(client: ControlClient, method: str) -> Iterator[Signalled]:
    """Handle signals as described above while the block calls `method`.  Raises Interrupted.

    If the daemon does not answer the request to stop within some seconds, the command ends.
    """
    signalled = Signalled(method)
    if method not in _WORDS or threading.current_thread() is not threading.main_thread():
        yield signalled
        return
    with _handling(client, signalled):
        try:
            yield signalled
            signalled.is_completed = signalled.number is not None
        except OSError as error:
            if signalled.number is None or error.errno != errno.ECANCELED:
                raise
            raise Interrupted(f"stopped: {_WORDS[method].stopped}", signalled.number, errno.ECANCELED) from None


@contextmanager
def _handling(client: ControlClient, signalled: Signalled) -> Iterator[None]:
    words = _WORDS[signalled.method]

    def handle(number: int, _frame: Any) -> None:
        if number == signal.SIGALRM:
            if client.cancel_state is None:  # the daemon hangs
                raise Interrupted(_left(words, None), signalled.number or signal.SIGINT, errno.EINTR)
            return
        first = signalled.number is None
        signalled.number = number
        if not first:
            raise Interrupted(_left(words, client.cancel_state), number, errno.EINTR)
        client.cancel()
        signal.setitimer(signal.ITIMER_REAL, _ANSWER_S)

    def report(state: CancelState) -> None:
        if state == "finishing":
            output.note(
                f"{words.what} has begun and will be completed; press Ctrl-C again to let it complete in the background"
            )

    client.on_cancel_state = report
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup(1), and shells for background commands, ignore it
                signal.signal(number, handle)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _left(words: _Words, state: CancelState | None) -> str:
    """Describe the outcome of a call whose client exits after the daemon's answer `state` to the request to stop it."""
    if state == "stopping":
        return f"the daemon was asked to stop {words.what}: {words.stopped}, unless it was complete before"
    if state == "finishing":
        return f"the daemon completes {words.what} in the background; then {words.complete}"
    return f"the daemon did not answer: {words.what} may or may not be completed; see `vfsd status` and `vfsd diff`"
