"""Wait for forks: until the mount of a new one answers, and until one has ended, by the record of its daemon.

A fork that is upgraded has not ended: another daemon serves it, under the same name and with the same ancestors.

Threading: the serving loop.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Final

import trio

from protocol.errors import shown
from vfsd.machine import mounts
from vfsd.machine.mountinfo import mount_at
from vfsd.machine.mounts import is_dead
from vfsd.machine.runtime import WorkspaceRecord, read_record, read_records, remove_record
from vfsd.wire.options import Failed, Ready, decode_report

START_TIMEOUT_S: Final = 60.0
_REPORT_BYTES: Final = 1 << 20


# -- the start --------------------------------------------------------------------------------------
class StartedFork:
    """A process that does not serve yet.

    It reports on `report_fd` and logs to the file `log`; `pidfd` is a descriptor of it.
    """

    def __init__(self, report_fd: int, pidfd: int, pid: int, mountpoint: str, log: str) -> None:
        self._report_fd = report_fd
        self._pidfd = pidfd
        self._pid = pid
        self._mountpoint = mountpoint
        self._log = log

    async def ready(self) -> Ready:
        """Wait until the fork's mount answers.  If this is cancelled, the fork undoes its start and ends.

        OSError with the fork's message if it failed; EIO if it died; TimeoutError if it takes too long.
        """
        os.set_blocking(self._report_fd, False)
        received = b""
        try:
            with trio.move_on_after(START_TIMEOUT_S) as waiting:
                while not received.endswith(b"\n"):
                    await trio.lowlevel.wait_readable(self._report_fd)
                    piece = os.read(self._report_fd, _REPORT_BYTES)
                    if not piece:
                        await self._clear()
                        raise OSError(
                            errno.EIO, f"the fork's daemon died while starting: see {shown(os.fsencode(self._log))}"
                        )
                    received += piece
            if waiting.cancelled_caught:
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
                raise TimeoutError(errno.ETIMEDOUT, f"the fork did not start within {START_TIMEOUT_S:g} s")
        finally:
            os.close(self._report_fd)
            os.close(self._pidfd)
        report = decode_report(received)
        if isinstance(report, Failed):
            raise report.error()
        return report

    async def _clear(self) -> None:
        """Remove the mount and the record of a fork that died before it could undo its start."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(START_TIMEOUT_S):
                await trio.lowlevel.wait_readable(self._pidfd)  # it has closed all its descriptors
            await trio.to_thread.run_sync(_clear_dead, self._pid, self._mountpoint)


def _clear_dead(pid: int, mountpoint: str) -> None:
    mount = mount_at(mountpoint)
    if mount is not None and mount.is_vfsd and is_dead(mountpoint, timeout_s=START_TIMEOUT_S):
        mounts.clear_dead_mount(mountpoint, timeout_s=START_TIMEOUT_S)
    for record in read_records():
        if record.pid == pid and record.mountpoint == mountpoint and not record.alive:
            remove_record(record)


# -- the end ----------------------------------------------------------------------------------------
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
