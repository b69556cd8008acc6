"""AuditFile: keeps every entry of the log in a file, one JSON object per line (--audit FILE).

The loop only puts entries into a bounded queue; a worker thread encodes and writes them.  A file that cannot be written
stops nothing: what does not fit is counted, and the next line that can be written says how many entries are missing and
why.  A line that was written only in part, because the disk is full, is removed again.  If the file is renamed or
removed, the next entries begin another one of its name.

Threading: `attend` runs on the serving loop.  `_append` runs in a worker thread, one call at a time, and alone uses the
descriptor.
"""

from __future__ import annotations

import contextlib
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
from vfsd.operations.log import MissingLine, Overflow

_QUEUE_BYTES: Final = 4 << 20
_LAST_S: Final = 5.0  # at the end of the workspace, for what still waits
_logger = logging.getLogger(__name__)


class AuditFile:
    """The file at `path`, which is created with mode 0600, or continued.  OSError if it cannot be opened.

    `missing` counts the entries that it lacks; `problem` is why the last write failed, None if it did not.
    """

    def __init__(self, path: str, log: AuditLog) -> None:
        self._path = path
        directory, self._name = os.path.split(path)
        # A path could lead into the workspace if a directory above was replaced.
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._open()
        except BaseException:
            os.close(self._directory)
            raise
        self._log = log
        self._follower = log.follow(limit_bytes=_QUEUE_BYTES)
        self._unsaid = 0  # missing entries that no line of the file mentions yet
        self.missing = 0
        self.problem: str | None = None

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        try:
            self._descriptor = open_regular(self._name, flags, dir_fd=self._directory)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Not the advice of `open_regular` to remove it: it may be a device.
            reason = "the audit file is not a regular file; name another one with --audit"
            raise OSError(errno.EINVAL, reason, self._path) from None
        size = os.fstat(self._descriptor).st_size
        # An interrupted program may have left the beginning of a line.
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def _follow_name(self) -> None:
        """Begin another file if the one that is open was renamed or removed, as programs that rotate logs do."""
        with contextlib.suppress(FileNotFoundError):
            there = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
            if os.path.samestat(there, os.fstat(self._descriptor)):
                return
        old = self._descriptor
        self._open()
        os.close(old)

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
            os.close(self._directory)

    def _append(self, found: Sequence[Entry | Overflow]) -> None:
        pending = [one.missing for one in found if isinstance(one, Overflow)]
        entries = [one for one in found if isinstance(one, Entry)]
        self._miss(sum(pending), "entries arrived faster than they could be written")
        for entry in entries:
            data = msgspec.json.encode(entry.record()) + b"\n"
            if self._unsaid:
                data = msgspec.json.encode(MissingLine(self._unsaid, self.problem or "")) + b"\n" + data
            try:
                if entry is entries[0]:
                    self._follow_name()
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
        if self._is_torn:
            data = b"\n" + data
        size = os.fstat(self._descriptor).st_size
        written = os.write(self._descriptor, data)
        if written < len(data):
            if os.fstat(self._descriptor).st_size == size + written:
                os.ftruncate(self._descriptor, size)
            else:  # another program has appended to the file, too
                self._is_torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._is_torn = False
