"""Publish an event for each file that programs write through the mount.

Threading: a thread of its own reads the workspace's log and calls the subscribers.  `close` may be called by any other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from types import TracebackType
from typing import Final, Self

from protocol.tools.events import FileWritten, Subscriber, deliver
from vfsd.client.connection import ControlClient
from vfsd.client.log_results import LoggedChange, watched_changes
from vfsd.client.requests import AnyWorkspace, Requests

_RECENT: Final = 256  # files whose number of bytes is kept for a rename
_JOIN_S: Final = 5.0
_logger = logging.getLogger(__name__)


class MountEvents:
    """Calls `subscriber` with a `FileWritten` for each file that another process writes.  A context manager.

    `workspace` is mounted at `mountpoint`.  A program that writes a new file and renames it over the old one has
    written both names.  What this process writes is left out: its tools and its `filesystem` publish their own events.
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
