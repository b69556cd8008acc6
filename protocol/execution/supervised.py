"""Supervised: a command on this host under its supervisor, its three streams left to whoever starts it.

Threading: `kill` and `signal` may be called from any thread; the rest is one thread's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from errno import EIO
from typing import Final

from protocol.errors import os_error
from protocol.execution import supervisor

__all__ = ["Supervised"]

# What systemd tells a service, and not what that runs: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3).
_OUR_OWN: Final = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"})
# The supervisor kills what is left in milliseconds; longer, and the kernel itself holds a process back.
_END_S: Final = 10.0


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OUR_OWN}


class Supervised:
    """A command that was started.  `status` is readable to its end when all is over, and is for `exit_status`."""

    def __init__(
        self, argv: Sequence[str], directory: str, env: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
    ) -> None:
        """The streams are as `subprocess.Popen` takes them; OSError where not even the supervisor starts."""
        self._argv = argv
        self._directory = directory
        self._control_lock = threading.Lock()
        control, self._control = os.pipe()
        self.status, status = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, directory, str(control), str(status), *argv],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(control, status),
                cwd="/",  # not `directory`: see `protocol.execution.supervisor`
                start_new_session=True,
                env={**_inherited(), **env},
            )
        except BaseException:
            os.close(self.status)
            os.close(self._control)
            raise
        finally:
            os.close(control)
            os.close(status)

    def kill(self) -> None:
        """Have the command, and all that it started, killed.  Idempotent."""
        with self._control_lock:
            if self._control >= 0:
                os.close(self._control)
                self._control = -1

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group; nothing when it has ended."""
        with self._control_lock, contextlib.suppress(OSError):
            if self._control >= 0:
                os.write(self._control, bytes([number]))

    def reap(self) -> None:
        """Kill it, wait for the supervisor's end and let go of all that is ours."""
        self.kill()
        process = self.process
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        os.close(self.status)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def exit_status(self, said: bytes) -> int:
        """What `status` said, as `subprocess` counts.  OSError where the command could not be started.

        Looks at the command's directory then.
        """
        kind, _, number = said.decode().strip().partition(" ")
        if kind == "error":
            raise os_error(int(number), self._argv[0] if os.path.isdir(self._directory) else self._directory)
        if kind != "exit":
            raise os_error(EIO, "the command's supervisor was killed")
        return int(number)
