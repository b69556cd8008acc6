"""Wait for the end of a workspace's forks, by the records of their daemons.

A fork that is upgraded has not ended: another daemon serves it, under the same name and with the same ancestors.

Threading: the serving loop.
"""

from __future__ import annotations

import os

import trio

from vfsd.machine.runtime import WorkspaceRecord, read_record


def is_below(record: WorkspaceRecord, instance: str) -> bool:
    """Whether the workspace of a record runs, and descends from `instance`."""
    return record.alive and any(each.instance == instance for each in record.ancestors)


def _upgraded(name: str, pid: int, instance: str) -> WorkspaceRecord | None:
    """Return the record of the fork `name` of `instance` if its daemon `pid` ended in an upgrade."""
    record = read_record(name)
    return None if record is None or record.pid == pid or not is_below(record, instance) else record


async def wait_upgraded(name: str, pid: int, instance: str) -> bool:
    """Wait for the end of the fork `name` of `instance` if its daemon `pid` ended in an upgrade; else return False."""
    record = _upgraded(name, pid, instance)
    if record is None:
        return False
    await wait_ended(record, instance)
    return True


async def wait_ended(record: WorkspaceRecord, instance: str) -> None:
    """Wait until the fork of a record has ended, which descends from `instance`, also if it is upgraded."""
    following: WorkspaceRecord | None = record
    while following is not None:
        record = following
        await _wait_daemon_ended(record)
        following = _upgraded(record.name, record.pid, instance)


async def _wait_daemon_ended(record: WorkspaceRecord) -> None:
    """Wait until the daemon of a record has ended."""
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if record.alive:  # it is not another process with the same number
            await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
