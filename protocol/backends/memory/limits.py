"""Limits of a memory volume: live content in pages, live inodes, and memory in bytes.

`max_bytes` bounds the live content, in whole pages as tmpfs counts them, plus the metadata beyond FREE_METADATA_BYTES.
`max_memory` bounds everything that the state takes, snapshots included (`ledger.Ledger.total`).  When `max_memory` is
reached, the volume reacts in this order:

1. It drops automatic snapshots (every kind but "user"), oldest first, until the request fits.
2. It refuses new snapshots, SNAPSHOT_MARGIN_BYTES before the limit.
3. It refuses with ENOSPC every change that needs memory, including memory for the old version that a snapshot holds.

Removing, truncating, dropping and restoring are never refused (`ledger` explains why).

Most requests are checked by comparing one or two numbers: `checked_metadata`, `checked_content` and `checked_pages` are
figures up to which a complete check has already found room.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.blocks import PAGE_BYTES
from protocol.backends.memory.ledger import (
    RESERVE_BYTES,
    SLACK_BYTES,
    SNAPSHOT_BYTES,
    UNLIMITED,
    version_bytes,
    xattrs_bytes,
)
from protocol.compiled import mypyc_attr
from protocol.errors import os_error

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.journaling.recorder import Recorder
    from protocol.backends.memory.state import MemoryState
    from protocol.volume_extensions import SnapshotInfo, SnapshotKind

FREE_METADATA_BYTES: Final = 4 << 20  # so that a small quota holds as many pages as with tmpfs
SNAPSHOT_MARGIN_BYTES: Final = 8 << 20  # at most; otherwise a sixteenth of the limit
# Free memory at which _UNCHECKED_METADATA_BYTES of metadata, and half of _FAR_BYTES of content, need no further check.
_FAR_BYTES: Final = 512 * 1024
_UNCHECKED_METADATA_BYTES: Final = 128 * 1024
# Pages: of a write within one block, of metadata made without a check, and of rounding both up.
_FAR_PAGES: Final = 32 + (_UNCHECKED_METADATA_BYTES + SLACK_BYTES) // PAGE_BYTES + 3
_PAGE_SHIFT: Final = PAGE_BYTES.bit_length() - 1


def _full(limit: int | None, unit: str) -> OSError:
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: the workspace may hold {limit or 0:,} {unit}")


class MemoryLimits:
    """The limits of one volume and the figures up to which they were checked.

    `on_pruned` is called for each automatic snapshot dropped to free memory; `pruned` counts these snapshots.
    """

    __slots__ = (
        "_inodes",
        "_ledger",
        "_max_pages",
        "_state",
        "_unprunable",
        "checked_content",
        "checked_metadata",
        "checked_pages",
        "max_bytes",
        "max_inodes",
        "on_pruned",
        "pruned",
    )

    def __init__(
        self, state: MemoryState, max_bytes: int | None, max_inodes: int | None, max_memory: int | None
    ) -> None:
        state.ledger.set_limit(max_memory)
        self._state = state
        self._inodes = state.inodes
        self._ledger = state.ledger
        self.max_bytes = max_bytes
        self.max_inodes = max_inodes
        self._max_pages = UNLIMITED if max_bytes is None else max_bytes // PAGE_BYTES
        self.checked_metadata = self.checked_content = self.checked_pages = 0
        self.on_pruned: Callable[[SnapshotInfo], None] | None = None
        self.pruned = 0
        self._unprunable: frozenset[str] = frozenset()

    # -- pages and inodes ------------------------------------------------------------------------
    def metadata_pages(self) -> int:
        """Return how many pages of `max_bytes` the metadata takes."""
        over = self._ledger.metadata - RESERVE_BYTES * len(self._inodes) - FREE_METADATA_BYTES
        return (over + PAGE_BYTES - 1) >> _PAGE_SHIFT if over > 0 else 0

    def page_room(self) -> int:
        """Return how many pages all content together may take."""
        return self._max_pages - self.metadata_pages()

    def check_quota(self, pages: int, inodes: int, memory: int) -> None:
        """Raise ENOSPC if a total of `pages` or `inodes` exceeds the quota, or `memory` more bytes do not fit."""
        if pages > 0 and pages > self.page_room():
            raise _full(self.max_bytes, "bytes (--max-bytes)")
        if self.max_inodes is not None and inodes > self.max_inodes:
            raise _full(self.max_inodes, "inodes (--max-inodes)")
        if memory:
            self.require(memory)
        self.checked_content = 0

    def check_room(self, pages: int, inodes: int) -> None:
        """Raise ENOSPC if `pages` or `inodes` more exceed the quota, or the metadata already does."""
        state = self._state
        if pages > 0 and state.pages + pages > self.page_room():
            raise os_error(errno.ENOSPC)
        if inodes > 0 and self.max_inodes is not None and len(self._inodes) + inodes > self.max_inodes:
            raise os_error(errno.ENOSPC)
        metadata_pages = self.metadata_pages()
        if metadata_pages and state.pages + metadata_pages >= self._max_pages:
            raise os_error(errno.ENOSPC)

    def check_entry(self) -> None:
        """Raise ENOSPC if there is no room for one more entry; otherwise allow some more entries without a check."""
        self.check_room(0, 0)
        ledger = self._ledger
        unchecked = _UNCHECKED_METADATA_BYTES
        if ledger.used + _FAR_BYTES > ledger.ceiling or self._state.pages + _FAR_PAGES > self.page_room():
            unchecked = SLACK_BYTES
            self.require(2 * SLACK_BYTES)
        elif ledger.shared_limit is not None:
            self.require(unchecked)
        self.checked_metadata = ledger.metadata + unchecked
        self.checked_content = 0  # metadata may now take the room that was free for content

    def has_room_for(self, length: int) -> bool:
        """Return whether `length` bytes of content fit in a block; then some more content needs no check."""
        ledger = self._ledger
        pages = self.page_room() - _FAR_PAGES
        if ledger.used + length + _FAR_BYTES > ledger.ceiling or self._state.pages > pages:
            return False
        self.checked_pages = pages
        self.checked_content = ledger.content + length + _FAR_BYTES // 2
        return True

    # -- memory ----------------------------------------------------------------------------------
    def require(self, count: int) -> None:
        """Raise ENOSPC if there is no memory for `count` more bytes, even after dropping automatic snapshots."""
        ledger = self._ledger
        if (ledger.used + count > ledger.ceiling or not ledger.has_room(count)) and not self.make_room(count):
            related = "" if ledger.shared_limit is None else ", with its forks"
            raise _full(ledger.bound, f"bytes of memory (--max-memory{related})")

    def changeable(self, inode: Inode, extra: int = 0) -> Inode:
        """Return the version of `inode` that may be changed now.

        Raises ENOSPC if there is no memory for its old version and for `extra` bytes.
        """
        state = self._state
        if extra:
            self.check_room(0, 0)
            self.checked_content = 0
        if inode.epoch != state.epoch and inode.nlink and state.log.newest is not None:
            extra += version_bytes(inode)
        if extra:
            if inode.xattrs is not None:
                extra += xattrs_bytes(inode.xattrs)  # changed attributes are a new dict
            self.require(extra)
        return state.own(inode)

    def require_snapshot(self, name: str, characters: int, kind: SnapshotKind) -> None:
        """Raise ENOSPC if there is no memory for a snapshot whose name and tag have so many `characters`.

        A safety snapshot is never refused: without it the following restore could not be undone.
        """
        ledger = self._ledger
        if ledger.limit is None:
            return
        need = SNAPSHOT_BYTES + 4 * characters + min(ledger.limit // 16, SNAPSHOT_MARGIN_BYTES)
        if ledger.used + need <= ledger.ceiling or self.make_room(need) or kind == "safety":
            return
        reason = (
            f"No memory left for a snapshot: {ledger.total:,} of {ledger.limit:,} bytes are taken,"
            f" {max(0, ledger.kept):,} of them by snapshots.  Drop snapshots (`vfsd drop NAME`), remove files, or mount"
            " with a larger --max-memory"
        )
        raise OSError(errno.ENOSPC, reason, name)

    def make_room(self, count: int) -> bool:
        """Drop automatic snapshots, oldest first, until `count` more bytes fit; return whether they fit."""
        ledger, log = self._ledger, self._state.log
        if ledger.borrow(ledger.used + count - ledger.ceiling):
            return True

        def fits() -> bool:
            return ledger.used + count <= ledger.ceiling and ledger.has_room(count)

        shared_only = ledger.used + count <= ledger.ceiling  # the limit that forks share is reached
        kept = ledger.shared_limit.bases if shared_only and ledger.shared_limit is not None else ()
        if not log.pins and not (shared_only and ledger.kept < count):  # else dropping a snapshot frees nothing
            for info in log.infos():
                if info.kind == "user" or info.name in self._unprunable or info.name in kept:
                    continue
                log.close(log.find(info.name))
                self.pruned += 1
                if self.on_pruned is not None:
                    self.on_pruned(info)
                if fits():
                    return True
        return fits()

    @contextmanager
    def keeping(self, *names: str) -> Iterator[None]:
        """Protect these snapshots from `make_room` in this context."""
        before = self._unprunable
        self._unprunable = before.union(names)
        try:
            yield
        finally:
            self._unprunable = before


@mypyc_attr(allow_interpreted_subclasses=True)
class VolumePart:
    """The base of the parts of a `MemoryVolume`: its state, and the limits of that.

    `recorder` records the changes in a journal.  `repeats` has the recorded results of requests that may come again, by
    request, oldest first: such a request is answered and not executed again.
    """

    recorder: Recorder | None = None
    repeats: dict[int, list[int]] | None = None

    def __init__(self, state: MemoryState, limits: MemoryLimits) -> None:
        self._state = state
        self._limits = limits
        self._inodes = state.inodes
        self._ledger = state.ledger
        self._clock = state.clock
        self._lock = state.lock

    def getattr(self, inode: int) -> Inode:
        """See `protocol.volume.Volume`."""
        try:
            return self._inodes[inode]
        except KeyError:
            raise os_error(errno.ENOENT, f"inode {inode}") from None

    def _repeated(self) -> int | None:
        """Return the recorded result of the call that the request makes; None if it was not executed before."""
        assert self.recorder is not None
        assert self.repeats is not None
        results = self.repeats.get(self.recorder.request)
        return results.pop(0) if results else None

    def _looked_up(self, inode: int) -> Inode:
        """Return an inode that exists, for an answer with which the kernel counts a lookup."""
        self._state.lookups[inode] = self._state.lookups.get(inode, 0) + 1
        return self.getattr(inode)
