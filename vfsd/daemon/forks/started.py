"""Wait for the daemon of a fork, which the source's daemon has started."""

from __future__ import annotations

import errno
import os
import signal
from typing import Final

import trio

from protocol.errors import shown
from vfsd.machine import mounts
from vfsd.machine.dead_mounts import is_dead
from vfsd.machine.mountinfo import mount_at
from vfsd.machine.runtime import read_records, remove_record
from vfsd.wire.handshake import Failed, Ready, decode_report

START_TIMEOUT_S: Final = 60.0
_REPORT_BYTES: Final = 1 << 20


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
