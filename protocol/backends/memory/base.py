"""Base: what all parts of a volume in memory stand on: its state, its limits, and the checks that they share.

Two limits.  `max_bytes` bounds the live content, in whole pages as tmpfs counts them, and the metadata beyond
FREE_METADATA_BYTES.  `max_memory` bounds all that the state takes, snapshots too (`ledger.Ledger.total`).  When it is
reached, in this order:

1. automatic snapshots (every kind but "user") are dropped, oldest first, as long as that is needed;
2. new snapshots are refused, SNAPSHOT_MARGIN_BYTES before the limit;
3. what needs memory, the old version of an inode that a snapshot holds included, fails with ENOSPC.

Removing, shortening, dropping and restoring never ask (see `ledger`).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.history.snapshots import Snapshots
from protocol.backends.memory.inode import Inode
from protocol.backends.memory.ledger import RESERVE_BYTES, SLACK_BYTES, UNLIMITED, version_bytes, xattrs_bytes
from protocol.backends.memory.state import MemoryState
from protocol.errors import os_error
from protocol.volume import NAME_MAX

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import Epoch
    from protocol.volume import CacheInvalidation

__all__ = ["PAGE_BYTES", "Base", "missing", "shown"]

PAGE_BYTES: Final = 4096
FREE_METADATA_BYTES: Final = 4 << 20  # so that a small quota holds just as many pages as with tmpfs
# What has to be free so that this much metadata, and half of it in content and an eighth more, need no check.
_FAR_BYTES: Final = 512 * 1024
_UNCHECKED_METADATA_BYTES: Final = 128 * 1024
# Pages: of a write within one block, of metadata made without a check, and what both are rounded up by.
_FAR_PAGES: Final = 32 + (_UNCHECKED_METADATA_BYTES + SLACK_BYTES) // PAGE_BYTES + 3
_PAGE_SHIFT: Final = PAGE_BYTES.bit_length() - 1


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
        state: MemoryState | None = None,
        max_memory: int | None = None,
    ) -> None:
        owner = os.getuid() if uid is None else uid
        group = os.getgid() if gid is None else gid
        super().__init__(state or MemoryState(clock, owner, group))
        self._inodes = self._state.inodes
        self._ledger = self._state.ledger
        self._ledger.set_limit(max_memory)
        self._clock = clock
        self.max_bytes = max_bytes
        self.max_inodes = max_inodes
        self.read_only = read_only
        # Up to these figures nothing has to be checked: set where it was, so that most calls compare one number or two.
        self._checked_metadata = self._checked_content = self._checked_pages = 0
        self._max_pages = UNLIMITED if max_bytes is None else max_bytes // PAGE_BYTES

    def getattr(self, inode: int) -> Inode:
        try:
            return self._inodes[inode]
        except KeyError:
            raise os_error(errno.ENOENT, f"inode {inode}") from None

    def _directory(self, inode: int) -> Inode:
        try:
            node = self._inodes[inode]
        except KeyError:
            raise os_error(errno.ENOENT, f"inode {inode}") from None
        if node.children is None:
            raise os_error(errno.ENOTDIR, f"inode {inode}")
        return node

    def _parent(self, directory: Inode) -> Inode:
        return self._inodes[directory.links[0][0]] if directory.links else directory

    def _check_writable(self) -> None:
        if self.read_only:
            raise os_error(errno.EROFS)

    # -- limits --------------------------------------------------------------------------------------
    @property
    def max_memory(self) -> int | None:
        """What content, metadata and snapshots may take together, in bytes."""
        return self._ledger.bound

    def _metadata_pages(self) -> int:
        """The pages that metadata takes of `max_bytes`."""
        over = self._ledger.metadata - RESERVE_BYTES * len(self._inodes) - FREE_METADATA_BYTES
        return (over + PAGE_BYTES - 1) >> _PAGE_SHIFT if over > 0 else 0

    def _page_room(self) -> int:
        """How many pages content may take in all."""
        return self._max_pages - self._metadata_pages()

    def _check_quota(self, pages: int, inodes: int, memory: int) -> None:
        if pages > 0 and pages > self._page_room():
            raise os_error(errno.ENOSPC)
        if self.max_inodes is not None and inodes > self.max_inodes:
            raise os_error(errno.ENOSPC)
        if memory:
            self._require(memory)
        self._checked_content = 0

    def _check_room(self, pages: int, inodes: int) -> None:
        """ENOSPC where `pages` and `inodes` more are over the quota, or the metadata is."""
        state = self._state
        if pages > 0 and state.pages + pages > self._page_room():
            raise os_error(errno.ENOSPC)
        if inodes > 0 and self.max_inodes is not None and len(self._inodes) + inodes > self.max_inodes:
            raise os_error(errno.ENOSPC)
        metadata_pages = self._metadata_pages()
        if metadata_pages and state.pages + metadata_pages >= self._max_pages:
            raise os_error(errno.ENOSPC)

    def _restore_epoch(self, target: Epoch, paths: Sequence[bytes]) -> CacheInvalidation:
        self._checked_content = 0
        return super()._restore_epoch(target, paths)

    def _check_entry(self) -> None:
        """ENOSPC where there is no room for one more entry; else there is for some more, which need no check."""
        self._check_room(0, 0)
        ledger = self._ledger
        unchecked = _UNCHECKED_METADATA_BYTES
        if ledger.used + _FAR_BYTES > ledger.ceiling or self._state.pages + _FAR_PAGES > self._page_room():
            unchecked = SLACK_BYTES
            self._require(2 * SLACK_BYTES)
        self._checked_metadata = ledger.metadata + unchecked
        self._checked_content = 0  # what was free for content then may be taken by metadata now

    def _has_room_for(self, length: int) -> bool:
        """Whether `length` bytes of content fit, in a block, and some more, which need no check."""
        ledger = self._ledger
        pages = self._page_room() - _FAR_PAGES
        if ledger.used + length + _FAR_BYTES > ledger.ceiling or self._state.pages > pages:
            return False
        self._checked_pages = pages
        self._checked_content = ledger.content + length + _FAR_BYTES // 2
        return True

    def _require(self, count: int) -> None:
        """ENOSPC where there is no memory for `count` bytes more, whatever automatic snapshots are dropped."""
        ledger = self._ledger
        if ledger.used + count > ledger.ceiling and not self._make_room(count):
            raise os_error(errno.ENOSPC)

    def _changeable(self, node: Inode, extra: int = 0) -> Inode:
        """The version of `node` that may be changed now.  ENOSPC: no memory for its old one and `extra` bytes."""
        state = self._state
        if extra:
            self._check_room(0, 0)
            self._checked_content = 0
        if node.epoch != state.epoch and node.nlink and state.log.newest is not None:
            extra += version_bytes(node)
        if extra:
            if node.xattrs is not None:
                extra += xattrs_bytes(node.xattrs)  # other attributes are another dict
            self._require(extra)
        return state.own(node)


def missing(name: bytes) -> OSError:
    """The error for an entry that is not there, or whose name can be none."""
    return os_error(errno.ENAMETOOLONG if len(name) > NAME_MAX else errno.ENOENT, shown(name))


def shown(name: bytes) -> str:
    """A name as an error can say it."""
    return name.decode("utf-8", "backslashreplace")
