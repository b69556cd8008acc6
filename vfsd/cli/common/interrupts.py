"""Ctrl-C and SIGTERM while the daemon works: stop it if nothing was changed yet, and say what became of the work.

The first signal asks the daemon to stop the call and waits for its answer, which is definite: the call was stopped and
has changed nothing, or it had begun to change something and is completed.  The second signal leaves at once; the daemon
then does in the background what it has answered to the first.
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

__all__ = ["AFTER_SIGNAL", "Interrupted", "Signalled", "completed", "interruptible"]

AFTER_SIGNAL: Final = 128  # a shell's exit status of a command that signal N ended is so much more than N
_ANSWER_S: Final = 3.0  # for the daemon to say whether it stops


@dataclass(frozen=True, slots=True)
class _Words:
    """How the end of a call is described: what it is, and what it means that it was stopped or completed."""

    what: str
    stopped: str
    complete: str


_UNDO: Final = "; `vfsd restore --undo` takes it back"
# Calls that change something.  All others end with their client, and nothing has happened.
_WORDS: Final = {
    "snapshot": _Words("the snapshot", "no snapshot was taken", "the snapshot was taken; `vfsd drop` removes it"),
    "drop": _Words("the removal", "the snapshot is still there", "the snapshot was dropped"),
    "restore": _Words("the restore", "nothing was changed", f"the restore is complete{_UNDO}"),
    "import": _Words("the import", "nothing was changed", f"the import is complete{_UNDO}"),
    "export": _Words("the export", "no file was written", "the archive is complete"),
    "apply": _Words("the apply", "nothing was written", "the apply is complete"),
    "unmount": _Words("the unmount", "the workspace is still mounted", "the workspace was unmounted"),
}


class Interrupted(KeyboardInterrupt):
    """A call was ended by a signal; `str()` is what became of it.  `errno` is ECANCELED where it was stopped."""

    def __init__(self, message: str, number: int, errno: int) -> None:
        super().__init__(message)
        self.number = number
        self.errno = errno


@dataclass(slots=True)
class Signalled:
    """The signal that came while a call was running, and what the call was."""

    method: str
    number: int | None = None
    is_completed: bool = False


def completed(signalled: Signalled) -> str:
    """What to say of a call that was completed though a signal came."""
    return f"it was too late to stop: {_WORDS[signalled.method].complete}"


@contextmanager
def interruptible(client: ControlClient, method: str) -> Iterator[Signalled]:
    """Handle signals as described above, while the block calls `method`.  Interrupted.

    A daemon that does not answer the request to stop is left after some seconds.
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
            if client.cancel_state is None:  # a daemon that hangs
                raise Interrupted(_left(words, None), signalled.number or signal.SIGINT, errno.EINTR)
            return
        first = signalled.number is None
        signalled.number = number
        if not first:
            raise Interrupted(_left(words, client.cancel_state), number, errno.EINTR)
        client.cancel()
        signal.setitimer(signal.ITIMER_REAL, _ANSWER_S)

    def tell(state: CancelState) -> None:
        if state == "finishing":
            output.note(f"{words.what} has begun and is completed first; Ctrl-C again leaves that to the daemon")

    client.on_cancel_state = tell
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as nohup(1), and shells for what they run in the background
                signal.signal(number, handle)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _left(words: _Words, state: CancelState | None) -> str:
    """What becomes of a call whose client leaves after the daemon's answer `state` to the request to stop it."""
    if state == "stopping":
        return f"the daemon was asked to stop {words.what}: {words.stopped}, unless it was complete before"
    if state == "finishing":
        return f"the daemon completes {words.what} in the background; then {words.complete}"
    return f"left without the daemon's answer: {words.what} may be completed or not; see `vfsd status`, `vfsd diff`"
