"""Wait for the daemon that replaces one that died: a keeper starts it, or an upgrade has.

Threading: any thread; the call blocks.
"""

from __future__ import annotations

import errno
import time
from typing import Final

from vfsd.machine.runtime import WorkspaceRecord, read_record
from vfsd.operations.workspace import UpgradeResult

_RESTART_S: Final = 15.0  # for a keeper to start another daemon
_UPGRADED_S: Final = 5.0  # for the new daemon of an upgrade to serve, once the old one has died
_POLL_S: Final = 0.05


def next_daemon(name: str, mountpoint: str, pid: int, least_s: float = 0.0) -> WorkspaceRecord | None:
    """Wait until the daemon `pid` of a workspace, which ended, was replaced; None if the workspace was unmounted.

    ConnectionError if the daemon died and no other one starts, also without a keeper within `least_s`.
    """
    began = time.monotonic()
    deadline = began + _RESTART_S
    while True:
        found = read_record(name)
        if found is None or found.mountpoint != mountpoint:
            return None
        if found.pid != pid and found.alive:
            return found
        is_expected = found.alive or found.is_kept or time.monotonic() < began + least_s
        if time.monotonic() > deadline or not is_expected:
            found.check_alive()
            raise ConnectionResetError(errno.ECONNRESET, f"the daemon of {name} sends no changes any more")
        time.sleep(_POLL_S)


def after_lost_upgrade(name: str, mountpoint: str, pid: int) -> UpgradeResult:
    """Find out which daemon serves a workspace after the daemon `pid` died during an upgrade.

    Return the result if it is the new one.  ConnectionError, with what happened, if it is not, or if none serves.
    """
    died = f"the daemon of {name} (process {pid}) died during the upgrade"
    found = next_daemon(name, mountpoint, pid, least_s=_UPGRADED_S)
    if found is None:
        raise ConnectionResetError(errno.ECONNRESET, f"{died}, and the workspace was unmounted")
    if found.replaces == pid:
        return UpgradeResult(name, found.upgraded_from, found.version, found.pid, 0.0, old_died=True)
    raise ConnectionResetError(
        errno.ECONNRESET,
        f"{died}, and its keeper restarted it: process {found.pid}, of version {found.version}, serves, and nothing"
        f" that was answered is lost; its log may say why, and `vfsd upgrade {name}` tries again",
    )
