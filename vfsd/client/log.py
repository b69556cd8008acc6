"""The workspace's log: `Workspace.log` and `Workspace.follow`, and an event for each file that programs write.

Paths are `str` from `os.fsdecode`, relative to the workspace's root, and so are the words of command lines.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from protocol.tools.base import FileWritten, Subscriber, deliver
from vfsd.client.connection import ControlClient
from vfsd.client.requests import AnyWorkspace, RemoteCall, Requests
from vfsd.machine.runtime import WorkspaceRecord, read_record
from vfsd.operations.workspace import LogEntry, Overflow, ProcessRecord, UpgradeResult, WatchParams
from vfsd.wire.messages import ControlError, LineBuffer, from_wire_path
from vfsd.wire.options import Ready


@dataclass(frozen=True, slots=True)
class LoggedProcess:
    """A process.  `command` is () if its command line could not be read; `truncated` says that its end is missing."""

    pid: int
    name: str
    command: tuple[str, ...]
    truncated: bool
    uid: int | None


@dataclass(frozen=True, slots=True)
class LoggedChange:
    """One change, or consecutive writes to one file by one process.

    `number` counts the changes of the workspace in the order in which they were made.  `change` is the kind, such as
    "create", "write" (of `bytes_written` bytes from `time` to `until`), "rename" (`to` is the new name), "link" (`of`
    is an older name), or the call that did not go through the mount, such as "restore".  "denied" is a change that the
    policy refused: `attempt` says which.

    `path`: None for a file without a name, and for `count` changes at once; `paths` then has the first 100.  `links`:
    how many names the file has; `path` is one of them.  `process`: None if it is not known: the kernel wrote pages
    back, or the process is in another pid namespace.  `ancestors`: its parent, the parent of that, and so on.
    `container`: the first 12 digits of its container's id.  `label`: what it belongs to, such as a tool call.
    """

    number: int
    time: datetime
    until: datetime
    change: str
    path: str | None
    to: str | None
    of: str | None
    links: int
    bytes_written: int | None
    paths: tuple[str, ...]
    count: int
    process: LoggedProcess | None
    ancestors: tuple[LoggedProcess, ...]
    container: str | None
    label: str | None
    attempt: str | None = None


@dataclass(frozen=True, slots=True)
class Missed:
    """In place of changes that this program read too slowly: how many are missing here.

    0: the daemon died and was replaced, and changes of its last seconds may be missing.
    """

    count: int


_entries = msgspec.json.Decoder(LogEntry)


def logged_changes(lines: bytes) -> list[LoggedChange]:
    """Decode the output of the method `log`."""
    return [_change(entry) for entry in _entries.decode_lines(lines)]


class WatchedLines:
    """Decodes the output of the method `watch`."""

    def __init__(self) -> None:
        self._buffer = LineBuffer()

    def feed(self, piece: bytes) -> Iterator[LogEntry | Overflow | None]:
        """Yield the records that are complete with `piece`; None when the watch begins."""
        self._buffer.feed(piece)
        while (line := self._buffer.next_line()) is not None:
            # Not as a union, which would need a tag in each entry.
            is_overflow = line.startswith(b'{"missing":')
            yield (msgspec.json.decode(line, type=Overflow) if is_overflow else _entries.decode(line)) if line else None


def watched_change(record: LogEntry | Overflow | None) -> LoggedChange | Missed:
    """Convert a record of `WatchedLines`; None, where another daemon went on, is `Missed(0)`."""
    if isinstance(record, LogEntry):
        return _change(record)
    return Missed(0 if record is None else record.missing)


def watched_changes(pieces: Iterable[bytes]) -> Iterator[LoggedChange | Missed]:
    """Decode the output of one call of `watch`."""
    records = itertools.chain.from_iterable(map(WatchedLines().feed, pieces))
    return (watched_change(record) for record in records if record is not None)


def _change(entry: LogEntry) -> LoggedChange:
    time = datetime.fromisoformat(entry.time)
    return LoggedChange(
        number=entry.number,
        time=time,
        until=time if entry.until is None else datetime.fromisoformat(entry.until),
        change=entry.change,
        path=_path(entry.path),
        to=_path(entry.to),
        of=_path(entry.of),
        links=entry.links,
        bytes_written=entry.bytes,
        paths=tuple(map(_text, entry.paths)),
        count=entry.count,
        process=None if entry.process is None else _process(entry.process),
        ancestors=tuple(map(_process, entry.ancestors)),
        container=entry.container,
        label=entry.label,
        attempt=entry.attempt,
    )


def _text(wire: str) -> str:
    return os.fsdecode(from_wire_path(wire))


def _path(wire: str | None) -> str | None:
    return None if wire is None else _text(wire)


def _process(record: ProcessRecord) -> LoggedProcess:
    command = tuple(map(_text, record.command))
    return LoggedProcess(record.pid, _text(record.name), command, record.truncated, record.uid)


# -- the daemon after one that ended ---------------------------------------------------------------
_RESTART_S: Final = 15.0  # for a keeper to start another daemon
_UPGRADED_S: Final = 5.0  # for the new daemon of an upgrade to serve, once the old one has died
_POLL_S: Final = 0.05


def next_daemon(name: str, mountpoint: str, pid: int, least_s: float = 0.0) -> WorkspaceRecord | None:
    """Wait until the daemon `pid` of a workspace, which ended, was replaced; None if the workspace was unmounted.

    ConnectionError if the daemon died and no replacement starts, also without a keeper within `least_s`.
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
            raise ConnectionResetError(errno.ECONNRESET, f"the daemon of {name} has stopped sending changes")
        time.sleep(_POLL_S)


class Following:
    """A `watch` that goes on with the daemon that replaces one which ended.  The caller sends `call` to `socket`."""

    def __init__(self, daemon: Ready | WorkspaceRecord, params: WatchParams) -> None:
        self._daemon = daemon
        self._params = params
        self._lines = WatchedLines()
        self.is_unmounted = False

    @property
    def socket(self) -> str:
        return self._daemon.socket

    @property
    def call(self) -> RemoteCall[Any]:
        """The call to stream from the present daemon."""
        return RemoteCall("watch", self._params)

    def feed(self, piece: bytes) -> Iterator[LogEntry | Overflow | None]:
        """As `WatchedLines.feed`: None when a daemon begins to send."""
        return self._lines.feed(piece)

    def goes_on_after(self, error: OSError) -> bool:
        """Wait for the next daemon after `error` ended the call; False if there is none to wait for.  Blocks.

        ConnectionError if the daemon died and no replacement starts.
        """
        is_gone = isinstance(error, ConnectionResetError | ConnectionRefusedError | FileNotFoundError)
        if isinstance(error, ControlError) or not is_gone:
            return False
        found = next_daemon(self._daemon.name, self._daemon.mountpoint, self._daemon.pid)
        self.is_unmounted = found is None
        if found is not None:
            self._daemon, self._lines = found, WatchedLines()
            self._params = msgspec.structs.replace(self._params, since=None, since_ns=0)  # all that its log has
        return found is not None


def followed(
    following: Following, opened: Callable[[Following], AbstractContextManager[Iterable[bytes]]]
) -> Generator[LogEntry | Overflow | None]:
    """Yield what `following` receives; `opened` sends its call, and returns the output."""
    while True:
        try:
            with opened(following) as pieces:
                for piece in pieces:
                    yield from following.feed(piece)
        except OSError as error:
            if not following.goes_on_after(error):
                raise
        else:
            return


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


# -- events of the mount ---------------------------------------------------------------------------
_RECENT: Final = 256  # files whose number of bytes is kept for a rename
_JOIN_S: Final = 5.0
_logger = logging.getLogger(__name__)


class MountEvents:
    """Calls `subscriber` with a `FileWritten` for each file that another process writes.  A context manager.

    `workspace` is mounted at `mountpoint`.  A program that writes a new file and renames it over the old one has
    written both names.  Writes of this process are left out: its tools and its `filesystem` publish their own events.
    An event comes a second or two after the last write to its file, and `FileWritten.bytes_written` is what was written
    until then.  If programs write faster than the subscriber returns, events are missing, which is logged.

    OSError (EOPNOTSUPP) if the workspace keeps no log.
    """

    def __init__(self, workspace: AnyWorkspace, mountpoint: str, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._client = ControlClient(workspace.socket)
        self._pieces = self._client.stream(Requests(mountpoint).watch())
        next(self._pieces)  # the watch has begun
        self._recent: OrderedDict[str, int] = OrderedDict()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="vfsd mount events", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Publish nothing any more."""
        self._is_closed = True
        self._client.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            for change in watched_changes(self._pieces):
                if self._is_closed:
                    break
                if isinstance(change, LoggedChange):
                    self._publish(change)
                else:
                    _logger.warning("%d changes of the workspace came too fast for events", change.count)
        except OSError as error:  # cancelled, or the workspace was unmounted
            if not self._is_closed:
                _logger.info("no more events of the mount: %s", error)
        finally:
            self._pieces.close()

    def _publish(self, change: LoggedChange) -> None:
        if change.path is None or (change.process is not None and change.process.pid == os.getpid()):
            return
        if change.change == "write":
            self._recent[change.path] = change.bytes_written or 0
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
            deliver(FileWritten(change.path, change.bytes_written or 0), self._subscriber)
        elif change.change == "rename" and change.to is not None and change.path in self._recent:
            deliver(FileWritten(change.to, self._recent.pop(change.path)), self._subscriber)
