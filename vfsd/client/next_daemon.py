"""Wait for the daemon that a keeper starts in place of one that died.

Threading: any thread; the call blocks.
"""

from __future__ import annotations

import errno
import time
from typing import Final

from vfsd.machine.runtime import WorkspaceRecord, read_record

_RESTART_S: Final = 15.0  # for a keeper to start another daemon
_POLL_S: Final = 0.05


def next_daemon(name: str, mountpoint: str, pid: int) -> WorkspaceRecord | None:
    """Wait until the daemon `pid` of a workspace, which ended, was replaced; None if the workspace was unmounted.

    ConnectionError if the daemon died and no other one starts.
    """
    deadline = time.monotonic() + _RESTART_S
    while True:
        found = read_record(name)
        if found is None or found.mountpoint != mountpoint:
            return None
        if found.pid != pid and found.alive:
            return found
        if time.monotonic() > deadline or not (found.alive or found.is_kept):
            found.check_alive()
            raise ConnectionResetError(errno.ECONNRESET, f"the daemon of {name} sends no changes any more")
        time.sleep(_POLL_S)
