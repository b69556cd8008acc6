"""release_monitor: let Podman's monitor of an ended command clean up now instead of in five minutes.

conmon waits that long before it removes Podman's record of the command (containers.conf(5), exit_command_delay), so
that clients can still ask for the exit status: two processes for each command, hundreds while an agent works.  SIGTERM
only ends the wait: the command has ended, and conmon then runs the same clean-up (conmon, src/ctr_exit.c).

Works for monitors on this machine that this process may signal; the others wait.  Blocks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

_PROGRAM: Final = b"conmon"
# conmon reports the command's end before it begins to wait; the gap can be seconds. The pauses between the
# tries double from the first to the longest, and add up to about ten seconds.
_TRIES: Final = 17
_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 1.0


def release_monitor(exec_id: str) -> None:
    """End the wait for the ended command `exec_id`, whose exit status nobody will read (again); else a no-op."""
    pause_s = _FIRST_PAUSE_S
    for _ in range(_TRIES):
        monitors = _monitors(exec_id.encode())
        # There are two; the waiting one is the child of the other.
        waiting = [pid for pid, parent in monitors.items() if parent in monitors]
        for pid in waiting:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        if waiting or not monitors:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _monitors(exec_id: bytes) -> dict[int, int]:
    """The monitors of the command, with their parents."""
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
