"""Audit: the log of a workspace and its file, as the options of the mount ask for them.

Threading: the serving loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vfsd.daemon.audit.file import AuditFile
from vfsd.daemon.audit.log import AuditLog
from vfsd.kernel.engines.base import ObservableEngine

if TYPE_CHECKING:
    from protocol.volume import Volume
    from vfsd.daemon.audit.processes import GivenLabel
    from vfsd.kernel.engines.base import Engine
    from vfsd.wire.options import MountOptions


class Audit:
    """`log` is None with --no-audit, `file` without --audit FILE.

    Each fork has a log of its own, and a file next to that of its source: FILE.jsonl becomes FILE.NAME.jsonl.
    `starter` is the id of the process that started the daemon.  OSError if the file cannot be opened.
    """

    def __init__(self, options: MountOptions, volume: Volume, *, starter: int, is_fork: bool) -> None:
        self.log = AuditLog(volume, starter=starter) if options.audit.audit else None
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
        """Begin with the labels of the daemon before; call `note` with all labels when one changes."""
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
