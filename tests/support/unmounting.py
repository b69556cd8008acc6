"""Unmount at the end of a test, although a program outside the tests looks at the mount."""

from __future__ import annotations

import errno
import time

from vfsd.client.workspace import Workspace

__all__ = ["unmount_when_idle"]

# How long a foreign process may have a mount open before the test is to blame.
_STRANGERS_LEAVE_S = 3.0


def unmount_when_idle(workspace: Workspace) -> None:
    """Unmount; if a program has the mount open, wait a moment for it to leave.

    A program outside the tests that walks /proc/mounts (a monitor, an indexer) opens every mount for some
    milliseconds.  If a program of the test stays, leaving the `with` block of the workspace warns of it.
    """
    give_up_s = time.monotonic() + _STRANGERS_LEAVE_S
    while True:
        try:
            workspace.unmount()
        except OSError as error:  # also ConnectionError: the test has ended the daemon
            if error.errno != errno.EBUSY or time.monotonic() > give_up_s:
                return
            time.sleep(0.02)
        else:
            return
