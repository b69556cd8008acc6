"""Ledger: how much memory a volume's state takes, so that a limit can bound it.

Four running totals in bytes, which `check_ledger` recomputes from scratch:

- `content`: the blocks of live files, as allocated (a sparse block has only its written pages), and the pages promised
  by fallocate.  A block that two live files share counts twice;
- `metadata`: live inodes, names, symlink targets and extended attributes.  The charge of an inode is its own size plus
  RESERVE_BYTES;
- `kept`: objects that only snapshots hold: old versions of inodes, blocks and attributes that no live file has, records
  of names, and the snapshots themselves.  So `content + metadata + kept` counts each object once, even if versions
  share it;
- `overhead`: an overlay's records of its lower directory, and memory lent to an import that is being unpacked.
  `ceiling` is the limit minus the overhead, so that a check on the hot path adds up three figures only.

Versions share blocks.  `shared` maps the id of every shared block (or dict of attributes) to the number of versions
that hold it.  `Content.owned` lists the blocks that only this content has; all others are in `shared`.  An object
leaves `shared` when its last holder releases it, so an id in `shared` always belongs to an existing object.

Why removing always succeeds: an operation that removes or shortens never asks the ledger.  Under a snapshot a removal
needs memory for the old version of the inode and for a record of its name.  Both were charged when the inode and the
name were made, as RESERVE_BYTES and within ENTRY_BYTES; the content moves from live to kept.  A restore shares the
blocks of the snapshot and needs one more version of each inode that it changes: the same reserve.  Shortening a file to
a part of a block copies at most one block.

The charges are for CPython 3.11 to 3.13 on 64 bits with glibc, measured as growth of the resident set over 50,000
objects, and set above it because dicts double and integers differ:

    empty file with a name of 8 bytes      585     INODE_BYTES + ENTRY_BYTES + 8 = 968
    a further name of 7 bytes              223     ENTRY_BYTES + 7 = 327; listed, and some removed: 125 more
    directory                              650     as a file, and DIRECTORY_BYTES
    content of 1 byte                      353     CONTENT_BYTES + 193
    one attribute, 12 and 9 bytes          370     XATTRS_BYTES + XATTR_BYTES + 21 = 469
    version of an empty file               387     VERSION_BYTES = 448; of a file of one block: 692
    file removed under a snapshot          183     RECORD_BYTES and the version replace the live inode
    snapshot                               570     SNAPSHOT_BYTES = 6,144: listing it takes 4 KiB more for a while

The holes that small files leave in the heap are too small for the blocks of larger files: the resident set would grow
by what was freed.  So each time that `freed` reaches a _RETURNED_SHARE of the limit, a process that takes more than the
limit returns the free pages of its heap to the system.

Threading: the serving loop, or the one thread that unpacks an import, changes the totals.  `borrow` and `give_back`
change `ceiling` and `overhead` of another thread's ledger, under a lock.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.xattrs import content_bytes
from protocol.errors import os_error
from protocol.linux.syscalls import resident_bytes, trim_heap

if TYPE_CHECKING:
    from protocol.backends.memory.blocks import Block
    from protocol.backends.memory.content import Content
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.xattrs import Xattrs
    from protocol.volume_extensions import SharedLimit

UNLIMITED: Final = 1 << 62
RESERVE_BYTES: Final = 448  # of each live inode, for one old version of it
INODE_BYTES: Final = 640 + RESERVE_BYTES
DIRECTORY_BYTES: Final = 320
ENTRY_BYTES: Final = 320  # of each name without its length, including its cookie and a record of it
CONTENT_BYTES: Final = 352
XATTRS_BYTES: Final = 288
XATTR_BYTES: Final = 160  # of each attribute, without its name and value
VERSION_BYTES: Final = 448
VERSION_LINK_BYTES: Final = 64
VERSION_BLOCK_BYTES: Final = 256  # of each block of a version: its entries in two dicts
RECORD_BYTES: Final = 160  # of a name without its length, or of an inode that did not exist
NAMES_BYTES: Final = 320  # of the records of one directory
SNAPSHOT_BYTES: Final = 6 * 1024
# More than one entry takes, and more than a block that becomes a bytearray grows beyond the written data.
SLACK_BYTES: Final = 16 * 1024
_LOAN_BYTES: Final = 1 << 20
_RETURNED_SHARE: Final = 16
_RETURNED_LEAST_BYTES: Final = 4 << 20


def xattrs_bytes(xattrs: Xattrs) -> int:
    """Return the charge of one dict of extended attributes."""
    return XATTRS_BYTES + XATTR_BYTES * len(xattrs) + content_bytes(xattrs)


def metadata_bytes(inode: Inode) -> int:
    """Return the charge of a live inode without its extended attributes and blocks."""
    charge = INODE_BYTES
    for _, name in inode.links:
        charge += ENTRY_BYTES + len(name)
    if inode.children is not None:
        charge += DIRECTORY_BYTES
    elif inode.target is not None:
        charge += len(inode.target)
    elif inode.content is not None:
        charge += CONTENT_BYTES
    return charge


def live_bytes(inode: Inode) -> int:
    """Return the charge of a live inode that shares no object with a snapshot."""
    charge = metadata_bytes(inode)
    if inode.content is not None:
        charge += inode.content.charge
    return charge if inode.xattrs is None else charge + xattrs_bytes(inode.xattrs)


def version_bytes(version: Inode) -> int:
    """Return the charge of an old version of an inode, without the objects that it may share with other versions."""
    charge = VERSION_BYTES + VERSION_LINK_BYTES * len(version.links)
    if version.target is not None:
        charge += len(version.target)
    elif version.content is not None:
        charge += CONTENT_BYTES + VERSION_BLOCK_BYTES * len(version.content.blocks)
    return charge


class Ledger:
    """The memory totals of one volume's state, and their limit."""

    __slots__ = (
        "_lender", "_loan", "_lock", "ceiling", "content", "freed", "kept", "lent", "limit", "metadata", "overhead",
        "return_at", "shared", "shared_limit",
    )  # fmt: skip

    def __init__(self) -> None:
        self.content = 0
        self.metadata = 0
        self.kept = 0
        self.overhead = 0
        self.lent = 0  # the part of `overhead` that imports in threads give back
        self.limit: int | None = None
        self.freed = 0  # since memory was last returned to the system
        self.return_at = UNLIMITED  # as `freed`
        self.ceiling = UNLIMITED  # for content, metadata and kept together
        self.shared: dict[int, int] = {}
        self.shared_limit: SharedLimit | None = None
        self._lock = threading.Lock()
        self._lender: Ledger | None = None
        self._loan = 0

    @property
    def used(self) -> int:
        """The bytes that `ceiling` bounds."""
        return self.content + self.metadata + self.kept

    @property
    def total(self) -> int:
        """The bytes that `limit` bounds."""
        return self.content + self.metadata + self.kept + self.overhead

    @property
    def bound(self) -> int | None:
        """The limit of this ledger, or of its lender."""
        return self.limit if self._lender is None else self._lender.limit

    def set_limit(self, limit: int | None) -> None:
        """Bound `total`, in bytes; None removes the limit."""
        self.limit = limit
        self.ceiling = UNLIMITED if limit is None else limit - self.overhead
        if limit is None or self._lender is not None:
            self.return_at = UNLIMITED
        else:
            self.return_at = max(limit // _RETURNED_SHARE, _RETURNED_LEAST_BYTES)

    def note_freed(self, count: int) -> None:
        """Count `count` bytes of content or attributes as freed, and return memory to the system when it is time."""
        self.freed += count
        if self.freed >= self.return_at:
            self.return_memory()

    def return_memory(self) -> None:
        """Return the free pages of the heap to the system if the process takes more than the limit."""
        self.freed = 0
        if self.limit is not None and resident_bytes() > self.limit:
            trim_heap()

    def has_room(self, count: int) -> bool:
        """Whether `count` more bytes fit in the limit that this volume shares with its forks, if there is one."""
        return self.shared_limit is None or self.shared_limit.has_room(self.total, count)

    @property
    def room(self) -> int:
        """How many more bytes fit in the limits, at least 0."""
        own = self.ceiling - self.used
        shared = None if self.shared_limit is None else self.shared_limit.room(self.total)
        return max(0, own if shared is None else min(own, shared))

    def charge_overhead(self, count: int) -> None:
        """Add `count` bytes, which may be negative, to the overhead.  Any thread."""
        with self._lock:
            self.overhead += count
            if self.limit is not None:
                self.ceiling -= count

    @contextmanager
    def forking(self) -> Iterator[None]:
        """A block in which no other thread changes `overhead` or asks for memory."""
        with self.shared_limit.forking() if self.shared_limit is not None else nullcontext(), self._lock:
            yield

    def forked(self) -> None:
        """Take back the loans: the new process does not have the threads that would repay them."""
        self.charge_overhead(-self.lent)
        self.lent = 0
        if self.shared_limit is not None:
            self.shared_limit.forked()

    def _lend(self, count: int) -> None:
        """Charge `count` bytes, which may be negative, that are given back later.  Any thread."""
        with self._lock:
            self.overhead += count
            self.lent += count
            if self.limit is not None:
                self.ceiling -= count

    # -- memory lent to an import that a thread unpacks ------------------------------------------
    def borrow_from(self, lender: Ledger) -> None:
        """Start without memory and borrow it from `lender`, whose limit then bounds both.  Used in another thread."""
        if lender.limit is not None:
            self._lender = lender
            self.set_limit(0)

    def borrow(self, count: int) -> bool:
        """Borrow at least `count` bytes; return whether the lender had them."""
        lender = self._lender
        if lender is None:
            return False
        for loan in (max(count, _LOAN_BYTES), count):
            if lender.used + loan <= lender.ceiling and lender.has_room(loan):
                lender._lend(loan)  # noqa: SLF001 (of this class)
                self._loan += loan
                self.set_limit(self._loan)
                return True
        return False

    def repay(self, count: int) -> None:
        """Return up to `count` bytes of the loan: the lender now charges that much unpacked content itself."""
        if self._lender is not None:
            count = min(count, self._loan)
            self._lender._lend(-count)  # noqa: SLF001 (of this class)
            self._loan -= count

    @contextmanager
    def reserving(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves a number of bytes until the context ends, or raises OSError (ENOSPC)."""
        reserved = 0

        def reserve(count: int) -> None:
            nonlocal reserved
            missing = self.used + count - self.ceiling
            if missing > 0 and not self.borrow(missing):
                raise os_error(errno.ENOSPC)
            self._lend(count)
            reserved += count

        try:
            yield reserve
        finally:
            self._lend(-reserved)
            if self._lender is not None:
                self.repay(min(reserved, self.ceiling - self.used))
                self.set_limit(self._loan)

    def give_back(self) -> None:
        """End the loan: the unpacked content was discarded, or the lender charges it."""
        if self._lender is not None:
            self._lender._lend(-self._loan)  # noqa: SLF001 (of this class)
            self._loan = 0
            self._lender = None
            self.set_limit(None)

    # -- shared objects --------------------------------------------------------------------------
    def hold(self, thing: Block | Xattrs, holders: int = 1) -> int:
        """Add holders of a shared object; return how many there were."""
        key = id(thing)
        before = self.shared.get(key, 0)
        self.shared[key] = before + holders
        return before

    def let_go(self, thing: Block | Xattrs) -> bool:
        """Remove one holder of a shared object; return whether others remain."""
        key = id(thing)
        left = self.shared[key] - 1
        if left:
            self.shared[key] = left
        else:
            del self.shared[key]
        return left > 0

    def share_xattrs(self, xattrs: Xattrs | None) -> None:
        """Add a version as a holder of this dict."""
        if xattrs is not None and not self.hold(xattrs):
            self.hold(xattrs)  # the version that had it alone before

    # -- live inodes -----------------------------------------------------------------------------
    def enter(self, inode: Inode) -> None:
        """Charge a live inode that was just cloned from a version; the version still holds the shared objects."""
        self.enter_new(inode)
        if inode.content is not None:
            self.kept -= inode.content.allocated
        if inode.xattrs is not None:
            self.kept -= xattrs_bytes(inode.xattrs)

    def enter_new(self, inode: Inode) -> None:
        """Charge a live inode that shares no object."""
        self.metadata += metadata_bytes(inode)
        if inode.content is not None:
            self.content += inode.content.charge
        if inode.xattrs is not None:
            self.metadata += xattrs_bytes(inode.xattrs)

    def leave(self, inode: Inode) -> None:
        """Remove the charge of a live inode; objects that it shared with snapshots become kept."""
        self.metadata -= metadata_bytes(inode)
        if inode.content is not None:
            self.drop_content(inode.content)
        if inode.xattrs is not None:
            self.drop_xattrs(inode.xattrs)

    def drop_content(self, content: Content) -> None:
        """Remove the charge of a live inode's content."""
        self.content -= content.charge
        if content.owned is not None:
            content.let_go_shared()
        self.note_freed(content.allocated)

    def drop_xattrs(self, xattrs: Xattrs) -> None:
        """Remove the charge of a live inode's extended attributes."""
        charge = xattrs_bytes(xattrs)
        self.metadata -= charge
        if id(xattrs) in self.shared and self.let_go(xattrs):
            self.kept += charge
        self.note_freed(charge)

    def set_xattrs(self, inode: Inode, xattrs: Xattrs | None) -> None:
        """Replace the extended attributes of a live inode by a new, unshared dict, or keep the same one."""
        old = inode.xattrs
        if old is xattrs:
            return
        if old is not None:
            self.drop_xattrs(old)
        if xattrs is not None:
            self.metadata += xattrs_bytes(xattrs)
        inode.xattrs = xattrs

    # -- old versions ----------------------------------------------------------------------------
    def enter_old(self, version: Inode) -> None:
        """Charge a pre-image that shares no object."""
        self.kept += version_bytes(version)
        if version.xattrs is not None:
            self.kept += xattrs_bytes(version.xattrs)

    def leave_old(self, version: Inode | None) -> None:
        """Remove the charge of a pre-image: an old version, or None for the record that there was no inode."""
        if version is None:
            self.kept -= RECORD_BYTES
            return
        self.kept -= version_bytes(version)
        if version.content is not None:
            freed = version.content.free_unshared()
            self.kept -= freed
            self.note_freed(freed)
        xattrs = version.xattrs
        if xattrs is not None and not (id(xattrs) in self.shared and self.let_go(xattrs)):
            self.kept -= xattrs_bytes(xattrs)
