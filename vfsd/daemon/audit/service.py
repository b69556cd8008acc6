"""Audit: the log of a workspace as the options of the mount ask for it, its file, and the calls that it names.

`AuditFile` keeps every entry in a file, one JSON object per line (--audit FILE).  The loop only puts entries into a
bounded queue; a worker thread encodes and writes them.  A file that cannot be written stops nothing: what does not fit
is counted, and the next line that can be written says how many entries are missing and why.  A line that was written
only in part, because the disk is full, is removed again.  If the file is renamed or removed, the next entries begin
another one of its name.

`working_for` attributes changes of the current task to the client of a call of the control socket.  A worker thread
that trio starts for a call works for that call, too.

Threading: the serving loop.  `AuditFile._append` runs in a worker thread, one call at a time, and alone uses the
descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from protocol.errors import DeniedByPolicyError
from protocol.linux.regular_file import open_regular
from vfsd.daemon.attached import needs_mount
from vfsd.daemon.audit.log import AuditLog, Entry
from vfsd.kernel.engines.base import ObservableEngine
from vfsd.machine.logs import log_failure
from vfsd.operations.workspace import MissingLine, Overflow

if TYPE_CHECKING:
    from protocol.volume import Volume
    from vfsd.daemon.audit.processes import GivenLabel, Process
    from vfsd.kernel.engines.base import Engine
    from vfsd.wire.options import MountOptions


class Audit:
    """`log` is None with --no-audit, `file` without --audit FILE.

    Each fork has a log of its own, and a file next to that of its source: FILE.jsonl becomes FILE.NAME.jsonl.
    `starter` is the id of the process that started the daemon.  OSError if the file cannot be opened.
    """

    def __init__(self, options: MountOptions, volume: Volume, *, starter: int, is_fork: bool) -> None:
        self._is_attached = options.is_attached
        self.log = AuditLog(volume, starter=starter) if options.audit.audit and not options.is_attached else None
        self.file: AuditFile | None = None
        self._note_labels: Callable[[list[GivenLabel]], object] = lambda _labels: None
        path = options.audit.audit_file
        if self.log is not None and path is not None:
            if is_fork:
                stem, suffix = os.path.splitext(path)
                path = f"{stem}.{options.workspace.name}{suffix}"
            self.file = AuditFile(path, self.log)

    @property
    def labels(self) -> list[GivenLabel]:
        """The labels that processes were given."""
        return [] if self.log is None else self.log.processes.given_labels()

    def keep_labels(self, given: Iterable[GivenLabel], note: Callable[[list[GivenLabel]], object]) -> None:
        """Begin with the labels that the predecessor had; call `note` with all labels whenever one changes."""
        if self.log is not None:
            self.log.processes.give_again(given)
        self._note_labels = note
        note(self.labels)

    def set_label(self, pid: int, label: str | None) -> None:
        """As `Processes.set_label`.  OSError (EOPNOTSUPP) if there is no log."""
        self.kept_log().processes.set_label(pid, label)
        self._note_labels(self.labels)

    def kept_log(self) -> AuditLog:
        """Return the log.  OSError (EOPNOTSUPP) if there is none."""
        if self.log is None and self._is_attached:
            raise needs_mount("a log of changes", "`vfsd diff` and `vfsd timeline` compare its snapshots")
        if self.log is None:
            raise OSError(errno.EOPNOTSUPP, "this workspace keeps no log: it was mounted with --no-audit")
        return self.log

    def observe(self, engine: Engine) -> None:
        """Have `engine` report the changes of its mount.  An engine of another package may not be able to."""
        if self.log is not None and isinstance(engine, ObservableEngine):
            engine.observe(self.log)

    async def attend(self) -> None:
        """Write the file until cancelled."""
        if self.file is not None:
            await self.file.attend()

    def tidy(self) -> None:
        """End the entries of writes that no further write has followed.  To be called every second."""
        if self.log is not None:
            self.log.close_quiet()

    def close(self) -> None:
        """Release the log's descriptors."""
        if self.log is not None:
            self.log.close()


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


class _Call:
    """A running call: its method, its client, and the log."""

    def __init__(self, log: AuditLog, method: str, client: Process) -> None:
        self.log = log
        self.method = method
        self.client = client


_current: ContextVar[_Call | None] = ContextVar("audited call", default=None)


@contextlib.contextmanager
def working_for(log: AuditLog, method: str, caller: Hashable) -> Iterator[None]:
    """Inside the block, attribute changes to the client `caller` (a pid, if it is known), which called `method`."""
    client = log.processes.find_client(caller) if isinstance(caller, int) else log.processes.unknown
    token = _current.set(_Call(log, method, client))
    try:
        with log.names.suspended():
            yield
    except DeniedByPolicyError as error:
        log.denied_call(method, client, error.path)
        raise
    finally:
        _current.reset(token)


def record(paths: Iterable[bytes]) -> None:
    """Add an entry for the running call, which changed `paths` and did not go through the mount."""
    call = _current.get()
    if call is not None:
        call.log.applied(call.method, call.client, paths)


@contextlib.contextmanager
def acting_through_mount() -> Iterator[None]:
    """Inside the block, attribute what this worker thread changes through the mount to the call that it works for."""
    call = _current.get()
    if call is None:
        yield
        return
    thread = threading.get_native_id()
    trio.from_thread.run_sync(call.log.set_acting, thread, (f"vfsd {call.method}", call.client))
    try:
        yield
    finally:
        trio.from_thread.run_sync(call.log.set_acting, thread, None)
