"""HostFilesystem: the agent's view of a directory of the host, which may be a mount."""

from __future__ import annotations

import os

from protocol.adapters.path_filesystem.filesystem import PathFilesystem
from protocol.adapters.path_filesystem.host_files import HostFiles
from protocol.linux.syscalls import MountId
from protocol.paths import DEFAULT_LIMITS, CallLimits

__all__ = ["HostFilesystem"]


class HostFilesystem(PathFilesystem):
    """Implements `protocol.filesystem.SnapshotableFilesystem` over the directory `root`.

    No path leads outside `root`, even while other programs rename things; absolute symlinks to paths below it stay
    inside.  Snapshots are archives in a temporary directory that is removed with this object.

    With `durable` each write is on the disk when it returns: the file and its name are synced (fsync(2)).  Without, the
    kernel writes it back later, as for most programs; a reader still sees either the old file or the new one.

    All calls raise NotMountedError, a ConnectionError, once `root` is on another mount than `mount` (None: the mount
    that it is on now).

    FileNotFoundError, NotADirectoryError if `root` is not a directory.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        read_only: bool = False,
        durable: bool = False,
        limits: CallLimits = DEFAULT_LIMITS,
        mount: MountId | None = None,
    ) -> None:
        super().__init__(HostFiles(root, read_only=read_only, durable=durable, mount=mount), limits=limits)
