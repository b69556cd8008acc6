"""let_go: have Podman's monitor of a command that has ended clean up now, rather than in five minutes.

conmon waits that long before it removes what Podman knows of the command (containers.conf(5), exit_command_delay),
for those who have yet to ask for its exit status: two processes for each command, hundreds beside an agent that is
at work.  SIGTERM ends the wait, and nothing else: the command has ended, and what conmon runs then is what it
would have run (conmon, src/ctr_exit.c).

Only for monitors on this machine that this process may signal; the others wait.  Blocks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

__all__ = ["let_go"]

_PROGRAM: Final = b"conmon"
# It says that the command has ended before it begins to wait.
_TRIES: Final = 10
_PAUSE_S: Final = 0.01


def let_go(exec_id: str) -> None:
    """See above; `exec_id` is of a command that has ended, and whose exit status nobody will ask for any more."""
    for _ in range(_TRIES):
        monitors = _monitors(exec_id.encode())
        # The one that waits is a child of the other.
        waiting = [pid for pid, parent in monitors.items() if parent in monitors]
        for pid in waiting:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        if waiting or not monitors:
            return
        time.sleep(_PAUSE_S)


def _monitors(exec_id: bytes) -> dict[int, int]:
    """The monitors of that command, each with its parent."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            if os.path.basename(words[0]) == _PROGRAM and exec_id in words:
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return found
