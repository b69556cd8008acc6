"""Run a command in the foreground, with a workspace among its mounts: `vfsd run`.

The command runs as a shell runs it: with this process's terminal, signals and job control.  It is in this process's
group, so the terminal's signals reach it directly, and this process only waits.  This process stops when the command
stops, so that the shell takes over after Ctrl-Z.  That includes full-screen programs, which read Ctrl-Z as a key and
stop themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Final

from protocol.linux import private_mount
from vfsd.cli.common.app import handlers

_WAITED_OUT: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_PASSED_ON: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_FAILURE_BYTES_MAX: Final = 4096


class NoPrivateMountError(OSError):
    """This user may not make private mounts; the command was not started."""


class NotStartedError(OSError):
    """The command could not be started."""


class Ended:
    """How a command ended: its status as a shell reports it, and the last signal that this process passed on.

    `failure`: how the command failed, as a clause; meaningless if it succeeded.
    """

    def __init__(self, status: int, passed_on: int | None) -> None:
        """`status`: negative for a signal that killed it."""
        self.status = status if status >= 0 else 128 - status
        self.passed_on = passed_on
        signal_name = _signal_name(-status if status < 0 else status - 128)  # a shell reports 128 + N
        self.failure = f"was killed by {signal_name}" if status < 0 else f"failed with status {status}"
        if status > 128 and signal_name is not None:
            self.failure += f" (as if killed by {signal_name})"


def _signal_name(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:  # no signal, or one of the real-time signals, which have no name
        return f"signal {number}" if signal.SIGRTMIN < number < signal.SIGRTMAX else None


def run_in_foreground(
    command: Sequence[str], source: str, target: str | None, environment: Mapping[str, str], *, output_fd: int = 1
) -> Ended:
    """Mount `source` over `target` for `command` alone, run it there, and return when it has ended.

    Without `target` it runs in `source`.  `target` may also be a plan of mounts: see `private_mount`.
    NoPrivateMountError, NotStartedError.
    """
    terminal = _Terminal()
    reader, writer = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, reader)
        passer = stack.enter_context(_signals())
        # -I -S: started faster, and independent of the directory.
        words = [sys.executable, "-I", "-S", private_mount.__file__, str(writer), source, target or "", *command]
        # The child takes a Ctrl-C when its interpreter has started, which would print a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            child = subprocess.Popen(words, env=environment, pass_fds=[writer], stdout=output_fd)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(writer)
        passer.child = child.pid
        failure = _read_failure(reader)
        status = _wait(child.pid, stops=terminal.exists)
        child.returncode = status
        terminal.take_back(is_killed=status < 0)
    if failure:
        _raise_failure(failure, command[0])
    return Ended(status, passer.passed_on)


def _read_failure(descriptor: int) -> str:
    data = b""
    while piece := os.read(descriptor, _FAILURE_BYTES_MAX):
        data += piece
    return data.decode()


def _raise_failure(failure: str, program: str) -> None:
    step, code, words = failure.split(" ", 2)
    reason = os.strerror(int(code))
    if step == "mount":
        raise NoPrivateMountError(int(code), f"cannot {words}: {reason}")
    raise NotStartedError(int(code), reason, program if step == "exec" else None)


def _wait(pid: int, *, stops: bool) -> int:
    """Wait for a child; return its exit status, or the negative number of the signal that killed it."""
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        if stops:  # without a terminal nobody would continue this process
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(pid, signal.SIGCONT)


# -- signals --------------------------------------------------------------------------------------
class _Passer:
    """Passes signals on to the child, as soon as there is one."""

    def __init__(self) -> None:
        self.child: int | None = None
        self.passed_on: int | None = None

    def pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.passed_on = number
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, number)


@contextlib.contextmanager
def _signals() -> Iterator[_Passer]:
    """Wait out the terminal's signals, and pass the others on.

    Handlers instead of SIG_IGN: the child begins with the default actions, because exec(2) resets handlers only.
    """
    passer = _Passer()
    with handlers({**dict.fromkeys(_WAITED_OUT, lambda *_: None), **dict.fromkeys(_PASSED_ON, passer.pass_on)}):
        yield passer


# -- the terminal ---------------------------------------------------------------------------------
class _Terminal:
    """The terminal on standard input, which a command may leave in another mode, or to another process group."""

    def __init__(self) -> None:
        self._mode = None
        self._was_ours = False
        with contextlib.suppress(OSError, termios.error):
            self._mode = termios.tcgetattr(0)
            self._was_ours = os.tcgetpgrp(0) == os.getpgrp()
        self.exists = _has_terminal()

    def take_back(self, *, is_killed: bool) -> None:
        """Take the terminal back if it was ours; restore its mode if the command was killed before it could."""
        if not self._was_ours:
            return
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a background process stops here
        try:
            with contextlib.suppress(OSError, termios.error):
                os.tcsetpgrp(0, os.getpgrp())
                if is_killed and self._mode is not None:
                    termios.tcsetattr(0, termios.TCSADRAIN, self._mode)
        finally:
            signal.signal(signal.SIGTTOU, before)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
