"""AuditFile: keeps every entry of the log in a file, one JSON object per line (--audit FILE).

The loop only puts entries into a bounded queue; a worker thread encodes and writes them.  A file that cannot be written
stops nothing: what does not fit is counted, and the next line that can be written says how many entries are missing and
why.  A line that was written only in part, because the disk is full, is removed again.

Threading: `attend` runs on the serving loop.  `_append` runs in a worker thread, one call at a time, and alone uses the
descriptor.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from typing import Final

import msgspec
import trio

from protocol.linux.regular_file import open_regular
from vfsd.daemon.audit.entries import Entry
from vfsd.daemon.audit.log import AuditLog
from vfsd.machine.logs import log_failure
from vfsd.wire.audit_messages import MissingLine, Overflow

_QUEUE_BYTES: Final = 4 << 20
_LAST_S: Final = 5.0  # at the end of the workspace, for what still waits
_logger = logging.getLogger(__name__)


class AuditFile:
    """The file at `path`, which is created with mode 0600, or continued.  OSError if it cannot be opened.

    `missing` counts the entries that it lacks; `problem` is why the last write failed, None if it did not.
    """

    def __init__(self, path: str, log: AuditLog) -> None:
        self._path = path
        self._descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._log = log
        self._follower = log.follow(limit_bytes=_QUEUE_BYTES)
        self._unsaid = 0  # missing entries that no line of the file mentions yet
        self.missing = 0
        self.problem: str | None = None

    async def attend(self) -> None:
        """Write entries until cancelled, and then those that still wait."""
        try:
            while True:
                # Taken and written as one step, so that a cancelled daemon does not lose what it took.
                found = await self._follower.take()
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._append, found)
        finally:
            self._log.close_writes()
            with trio.move_on_after(_LAST_S, shield=True):
                await trio.to_thread.run_sync(self._append, self._follower.take_nowait(), abandon_on_cancel=True)
            self._log.unfollow(self._follower)
            os.close(self._descriptor)

    def _append(self, found: Sequence[Entry | Overflow]) -> None:
        pending = [one.missing for one in found if isinstance(one, Overflow)]
        entries = [one for one in found if isinstance(one, Entry)]
        self._miss(sum(pending), "entries arrived faster than they could be written")
        for entry in entries:
            data = msgspec.json.encode(entry.record()) + b"\n"
            if self._unsaid:
                data = msgspec.json.encode(MissingLine(self._unsaid, self.problem or "")) + b"\n" + data
            try:
                self._write(data)
            except OSError as error:
                if self.problem is None:
                    log_failure(_logger, "audit file", error, path=self._path, level=logging.WARNING)
                self._miss(1, error.strerror or str(error))
            else:
                self._unsaid = 0
                self.problem = None

    def _miss(self, count: int, reason: str) -> None:
        if count:
            self.missing += count
            self._unsaid += count
            self.problem = reason

    def _write(self, data: bytes) -> None:
        """Write `data`, whole or not at all.  OSError."""
        size = os.fstat(self._descriptor).st_size
        written = os.write(self._descriptor, data)
        if written < len(data):
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
