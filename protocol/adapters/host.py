"""HostFilesystem: the agent's view of a directory of the host, a mount among them."""

from __future__ import annotations

import errno
import os

from protocol.adapters.path_filesystem.filesystem import StoreFilesystem
from protocol.adapters.path_filesystem.host_files import HostStore
from protocol.errors import fail
from protocol.paths import DEFAULT_LIMITS, Limits

__all__ = ["HostFilesystem"]


class HostFilesystem(StoreFilesystem):
    """Implements `protocol.filesystem.SnapshotableFilesystem` over the directory `root`.

    Nothing leads outside it, whoever changes it meanwhile; absolute symlinks to something below it stay
    inside.  Snapshots are archives in a temporary directory, and gone with this object.
    FileNotFoundError, NotADirectoryError where `root` is no directory.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, read_only: bool = False, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        if not os.path.isdir(root):
            raise fail(errno.ENOTDIR if os.path.lexists(root) else errno.ENOENT, os.fspath(root))
        super().__init__(HostStore(root, read_only=read_only), limits=limits)
