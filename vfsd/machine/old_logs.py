"""Removal of the logs of workspaces that ended long ago from the runtime directory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from typing import Final

from protocol.linux.regular_file import open_regular
from vfsd.machine.runtime import read_records

KEPT_DAYS: Final = 7
_SUFFIXES: Final = (".log", ".log.1")  # of the last daemon with the name, and of the one before it
_DAY_S: Final = 24 * 60 * 60

_logger = logging.getLogger(__name__)


def remove_old_logs(directory: str) -> None:
    """Remove the logs in `directory` that were last written more than KEPT_DAYS ago.

    Keeps the logs of running workspaces, which may have written nothing for a long time.  Raises no OSError: the logs
    must not keep a workspace from starting.
    """
    oldest = time.time() - KEPT_DAYS * _DAY_S
    try:
        with os.scandir(directory) as entries:
            old = [entry for entry in entries if entry.name.endswith(_SUFFIXES) and _written(entry) < oldest]
        running = {record.name for record in read_records() if record.alive} if old else set()
        for entry in old:
            if entry.name.rpartition(".log")[0] not in running:
                with contextlib.suppress(OSError):  # removed or replaced meanwhile
                    _remove(entry.path, oldest)
    except OSError as error:
        _logger.warning("cannot remove old logs: %s", error)


def _written(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return float("inf")


def _remove(path: str, oldest: float) -> None:
    """Remove a log, unless a daemon has it locked (`vfsd.client.launch`) or has written to it meanwhile."""
    descriptor = open_regular(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        if found.st_mtime < oldest and os.path.samestat(found, os.lstat(path)):
            os.unlink(path)
    finally:
        os.close(descriptor)
