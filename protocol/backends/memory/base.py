"""Base: what all parts of a volume in memory stand on: its state, its limits, and the checks that they share."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Final

from protocol.backends.memory.inode import Inode
from protocol.backends.memory.snapshots import Snapshots
from protocol.backends.memory.state import State
from protocol.errors import fail
from protocol.volume import NAME_MAX

__all__ = ["PAGE_BYTES", "Base", "missing", "shown"]

PAGE_BYTES: Final = 4096


class Base(Snapshots):
    """The state of a `MemoryVolume`, whose docstring says what the arguments are."""

    def __init__(
        self,
        max_bytes: int | None = None,
        max_inodes: int | None = None,
        read_only: bool = False,
        *,
        clock: Callable[[], int] = time.time_ns,
        uid: int | None = None,
        gid: int | None = None,
        state: State | None = None,
    ) -> None:
        owner = os.getuid() if uid is None else uid
        group = os.getgid() if gid is None else gid
        super().__init__(state or State(clock, owner, group))
        self._inodes = self._state.inodes
        self._clock = clock
        self.max_bytes = max_bytes
        self.max_inodes = max_inodes
        self.read_only = read_only
        self._max_pages = None if max_bytes is None else max_bytes // PAGE_BYTES

    def getattr(self, inode: int) -> Inode:
        try:
            return self._inodes[inode]
        except KeyError:
            raise fail(errno.ENOENT, f"inode {inode}") from None

    def _directory(self, inode: int) -> Inode:
        try:
            node = self._inodes[inode]
        except KeyError:
            raise fail(errno.ENOENT, f"inode {inode}") from None
        if node.children is None:
            raise fail(errno.ENOTDIR, f"inode {inode}")
        return node

    def _parent(self, directory: Inode) -> Inode:
        return self._inodes[directory.links[0][0]] if directory.links else directory

    def _check_writable(self) -> None:
        if self.read_only:
            raise fail(errno.EROFS)

    def _check_quota(self, pages: int, inodes: int) -> None:
        if self._max_pages is not None and pages > self._max_pages:
            raise fail(errno.ENOSPC)
        if self.max_inodes is not None and inodes > self.max_inodes:
            raise fail(errno.ENOSPC)

    def _check_room(self, pages: int, inodes: int) -> None:
        """ENOSPC where `pages` and `inodes` more are over the quota."""
        if pages > 0 and self._max_pages is not None and self._state.pages + pages > self._max_pages:
            raise fail(errno.ENOSPC)
        if inodes > 0 and self.max_inodes is not None and len(self._inodes) + inodes > self.max_inodes:
            raise fail(errno.ENOSPC)


def missing(name: bytes) -> OSError:
    """The error for an entry that is not there, or whose name can be none."""
    return fail(errno.ENAMETOOLONG if len(name) > NAME_MAX else errno.ENOENT, shown(name))


def shown(name: bytes) -> str:
    """A name as an error can say it."""
    return name.decode("utf-8", "backslashreplace")
