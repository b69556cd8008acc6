"""Handle Ctrl-C, SIGTERM and SIGHUP while the daemon works: cancel the call if possible, and report the outcome.

The first signal asks the daemon to cancel the call and waits for its definite answer: either the call was cancelled and
has changed nothing, or it has begun to change something and completes.  The second signal exits at once; the daemon
then continues in the background as it answered to the first.  The command exits by itself, too, if the call has not
stopped after some seconds: what it waits for may hang, such as the other end of an `exec:` workspace.
"""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vfsd.cli.common import output
from vfsd.client.cancelling import ANSWER_S, left_sentence

if TYPE_CHECKING:
    from vfsd.client.connection import ControlClient
    from vfsd.operations.declaration import Operation
    from vfsd.wire.messages import CancelState

_STOP_S: Final = 7.0  # how long a call may take to stop, after ANSWER_S
STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AFTER_SIGNAL: Final = 128  # the exit status that a shell reports for signal N is 128 + N


class Interrupted(KeyboardInterrupt):
    """A signal ended a call; `str()` is the outcome.  `errno` is ECANCELED if the call was stopped."""

    def __init__(self, message: str, number: int, errno: int) -> None:
        super().__init__(message)
        self.number = number
        self.errno = errno


@dataclass(slots=True)
class Signalled:
    """A running call, and the signal that arrived meanwhile."""

    operation: Operation
    number: int | None = None
    is_completed: bool = False
    is_slow: bool = False  # ANSWER_S have passed since the signal


def completed(signalled: Signalled) -> str:
    """Describe a call that was completed despite a signal."""
    return f"it was too late to stop: {signalled.operation.done}"


@contextmanager
def interruptible(client: ControlClient, operation: Operation) -> Iterator[Signalled]:
    """Handle signals as described above while the block calls `operation`.  Raises Interrupted.

    If the daemon does not answer the request to stop within some seconds, the command ends.
    """
    signalled = Signalled(operation)
    if threading.current_thread() is not threading.main_thread():
        yield signalled
        return
    is_stoppable = operation.stopped and not operation.runs_command
    with waking(client), _handling(client, signalled) if is_stoppable else nullcontext():
        try:
            yield signalled
            signalled.is_completed = signalled.number is not None
        except OSError as error:
            if signalled.number is None or error.errno != errno.ECANCELED:
                raise
            raise Interrupted(f"stopped: {operation.stopped}", signalled.number, errno.ECANCELED) from None


@contextmanager
def raising() -> Iterator[None]:
    """Raise Interrupted if SIGTERM or SIGHUP arrives in the block, between two calls, as for Ctrl-C.  Main thread."""

    def handle(number: int, _frame: Any) -> None:
        raise Interrupted("interrupted", number, errno.EINTR)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def waking(client: ControlClient) -> Iterator[None]:
    """Have `client` stop waiting when a signal arrives, at whatever moment.  Main thread."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        client.wakeup = ours
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            client.wakeup = None


@contextmanager
def _handling(client: ControlClient, signalled: Signalled) -> Iterator[None]:
    operation = signalled.operation

    def handle(number: int, _frame: Any) -> None:
        if number == signal.SIGALRM:
            state = client.cancel_state
            if state is None or (state == "stopping" and signalled.is_slow):  # something hangs
                raise Interrupted(left_sentence(operation, state), signalled.number or signal.SIGINT, errno.EINTR)
            if state == "stopping":
                signalled.is_slow = True
                output.note(f"waiting for the daemon to stop {operation.noun}; press Ctrl-C again to leave at once")
                signal.setitimer(signal.ITIMER_REAL, _STOP_S)
            return
        first = signalled.number is None
        signalled.number = number
        if not first:
            raise Interrupted(left_sentence(operation, client.cancel_state), number, errno.EINTR)
        client.cancel()
        signal.setitimer(signal.ITIMER_REAL, ANSWER_S)

    def report(state: CancelState) -> None:
        if state == "finishing":
            begun = f"{operation.noun} has begun and will be completed"
            output.note(f"{begun}; press Ctrl-C again to let it complete in the background")

    client.on_cancel_state = report
    before = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGALRM)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup(1), and shells for background commands, ignore it
                signal.signal(number, handle)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
