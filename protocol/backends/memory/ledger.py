"""Ledger: how much memory a volume's state takes, so that a limit can bound it.

Four figures, in bytes, each a running total that `check_ledger` recomputes from scratch:

- `content`: the blocks of live files, as allocated (a sparse block has only its written pages), and the pages that
  fallocate promised.  A block that two live files share counts twice;
- `metadata`: live inodes, names, symlink targets and extended attributes.  Each inode's charge has two parts: what it
  takes, and RESERVE_BYTES;
- `kept`: what only snapshots hold: old versions of inodes, the blocks and attributes that no live file has, records of
  names, the snapshots themselves.  So `content + metadata + kept` counts each object once, even if versions share it;
- `overhead`: what is neither: what an overlay remembers of the directory below, and memory lent to an import that is
  being unpacked.  It is taken off `ceiling`, so that a check on the hot path adds up three figures only.

Blocks are shared between versions.  `shared` maps the id of every shared block (or dict of attributes) to the number of
versions that hold it.  A content knows which of its blocks only it has (`Content.owned`); all others are in `shared`.
An object leaves `shared` when its last holder lets it go, so an id in `shared` is always that of a living object.

Why removing always works: nothing that removes or shortens asks the ledger.  What a removal needs under a snapshot (the
old version of the inode, a record of its name) was charged when the inode and the name were made, as RESERVE_BYTES
and within ENTRY_BYTES; the content moves from live to kept.  A restore shares the blocks of the snapshot, and needs for
each inode that it changes one version more: the same reserve.  Shortening a file to a part of a block copies one
block at most.

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

Threading: the serving loop (or the one thread that unpacks an import) changes the figures.  `borrow` and `give_back`
change `ceiling` and `overhead` of another thread's ledger, under a lock.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Final

from protocol.errors import os_error

if TYPE_CHECKING:
    from protocol.backends.memory.content import Block, Content
    from protocol.backends.memory.inode import Inode

__all__ = [
    "CONTENT_BYTES",
    "DIRECTORY_BYTES",
    "ENTRY_BYTES",
    "INODE_BYTES",
    "NAMES_BYTES",
    "RECORD_BYTES",
    "RESERVE_BYTES",
    "SLACK_BYTES",
    "SNAPSHOT_BYTES",
    "UNLIMITED",
    "VERSION_BYTES",
    "VERSION_LINK_BYTES",
    "Ledger",
    "live_bytes",
    "metadata_bytes",
    "version_bytes",
    "xattrs_bytes",
]

UNLIMITED: Final = 1 << 62
RESERVE_BYTES: Final = 448  # of each live inode: for one old version of it
INODE_BYTES: Final = 640 + RESERVE_BYTES
DIRECTORY_BYTES: Final = 320
ENTRY_BYTES: Final = 320  # of each name, without its length; with its place in a listing, and a record of it
CONTENT_BYTES: Final = 352
XATTRS_BYTES: Final = 288
XATTR_BYTES: Final = 160  # of each attribute, without its name and value
VERSION_BYTES: Final = 448
VERSION_LINK_BYTES: Final = 64
VERSION_BLOCK_BYTES: Final = 256  # of each block of a version: its place in two dicts
RECORD_BYTES: Final = 160  # of a name, without its length, or of an inode that did not exist
NAMES_BYTES: Final = 320  # of the records of one directory
SNAPSHOT_BYTES: Final = 6 * 1024
# More than making one entry takes, and more than a block that becomes a bytearray grows by beyond what is written.
SLACK_BYTES: Final = 16 * 1024
_LOAN_BYTES: Final = 1 << 20

Xattrs = dict[bytes, bytes]


def xattrs_bytes(xattrs: Xattrs) -> int:
    """The charge of one dict of attributes."""
    return XATTRS_BYTES + sum(XATTR_BYTES + len(name) + len(value) for name, value in xattrs.items())


def metadata_bytes(inode: Inode) -> int:
    """The charge of a live inode without its attributes and its blocks."""
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
    """The charge of a live inode that shares nothing."""
    charge = metadata_bytes(inode)
    if inode.content is not None:
        charge += inode.content.charge
    return charge if inode.xattrs is None else charge + xattrs_bytes(inode.xattrs)


def version_bytes(version: Inode) -> int:
    """The charge of an old version of an inode, without what it may share with others."""
    charge = VERSION_BYTES + VERSION_LINK_BYTES * len(version.links)
    if version.target is not None:
        charge += len(version.target)
    elif version.content is not None:
        charge += CONTENT_BYTES + VERSION_BLOCK_BYTES * len(version.content.blocks)
    return charge


class Ledger:
    """The figures of one volume's state, and its limit."""

    __slots__ = ("_lender", "_loan", "_lock", "ceiling", "content", "kept", "limit", "metadata", "overhead", "shared")

    def __init__(self) -> None:
        self.content = 0
        self.metadata = 0
        self.kept = 0
        self.overhead = 0
        self.limit: int | None = None
        self.ceiling = UNLIMITED  # for content, metadata and kept together
        self.shared: dict[int, int] = {}
        self._lock = threading.Lock()
        self._lender: Ledger | None = None
        self._loan = 0

    @property
    def used(self) -> int:
        """What `ceiling` bounds."""
        return self.content + self.metadata + self.kept

    @property
    def total(self) -> int:
        """What `limit` bounds."""
        return self.content + self.metadata + self.kept + self.overhead

    @property
    def bound(self) -> int | None:
        """The limit, or that of the lender."""
        return self.limit if self._lender is None else self._lender.limit

    def set_limit(self, limit: int | None) -> None:
        """Bound `total`, in bytes; None: no bound."""
        self.limit = limit
        self.ceiling = UNLIMITED if limit is None else limit - self.overhead

    def charge_overhead(self, count: int) -> None:
        """Add `count` bytes to the overhead; negative: take them off.  Any thread."""
        with self._lock:
            self.overhead += count
            if self.limit is not None:
                self.ceiling -= count

    # -- what is lent to an import that is unpacked in a thread ----------------------------------
    def borrow_from(self, lender: Ledger) -> None:
        """Have no memory of one's own, but only what `lender` has left; in a thread of its own."""
        if lender.limit is not None:
            self._lender = lender
            self.set_limit(0)

    def borrow(self, count: int) -> bool:
        """Whether `count` more bytes could be borrowed."""
        lender = self._lender
        if lender is None:
            return False
        for loan in (max(count, _LOAN_BYTES), count):
            if lender.used + loan <= lender.ceiling:
                lender.charge_overhead(loan)
                self._loan += loan
                self.set_limit(self._loan)
                return True
        return False

    def repay(self, count: int) -> None:
        """Give back a part of the loan, at most all: so much of what was unpacked becomes the lender's own."""
        if self._lender is not None:
            count = min(count, self._loan)
            self._lender.charge_overhead(-count)
            self._loan -= count

    def reserve(self, count: int) -> None:
        """Charge `count` bytes of overhead, borrowed where there is a lender.  OSError (ENOSPC)."""
        missing = self.used + count - self.ceiling
        if missing > 0 and not self.borrow(missing):
            raise os_error(errno.ENOSPC)
        self.charge_overhead(count)

    def release(self, count: int) -> None:
        """Take off `count` bytes that were reserved; a lender gets back what they leave unused."""
        self.charge_overhead(-count)
        if self._lender is not None:
            self.repay(min(count, self.ceiling - self.used))
            self.set_limit(self._loan)

    def give_back(self) -> None:
        """End the loan: what was unpacked is gone, or is charged to the lender as its own."""
        if self._lender is not None:
            self._lender.charge_overhead(-self._loan)
            self._loan = 0
            self._lender = None
            self.set_limit(None)

    # -- what is shared --------------------------------------------------------------------------
    def hold(self, thing: Block | Xattrs, holders: int = 1) -> int:
        """Add holders of a shared object; how many there were."""
        key = id(thing)
        before = self.shared.get(key, 0)
        self.shared[key] = before + holders
        return before

    def let_go(self, thing: Block | Xattrs) -> bool:
        """Take one holder from a shared object; whether there are others."""
        key = id(thing)
        left = self.shared[key] - 1
        if left:
            self.shared[key] = left
        else:
            del self.shared[key]
        return left > 0

    def share_xattrs(self, xattrs: Xattrs | None) -> None:
        """One version more holds this dict."""
        if xattrs is not None and not self.hold(xattrs):
            self.hold(xattrs)  # the one that had it alone

    # -- live inodes -----------------------------------------------------------------------------
    def enter(self, inode: Inode) -> None:
        """Charge a live inode that was just cloned from a version, which goes on to hold what they share."""
        self.metadata += metadata_bytes(inode)
        content = inode.content
        if content is not None:
            self.content += content.charge
            self.kept -= content.allocated
        if inode.xattrs is not None:
            charge = xattrs_bytes(inode.xattrs)
            self.metadata += charge
            self.kept -= charge

    def enter_new(self, inode: Inode) -> None:
        """Charge a live inode that shares nothing."""
        self.metadata += metadata_bytes(inode)
        if inode.content is not None:
            self.content += inode.content.charge
        if inode.xattrs is not None:
            self.metadata += xattrs_bytes(inode.xattrs)

    def leave(self, inode: Inode) -> None:
        """Take off a live inode; what it shared with snapshots is theirs from here on."""
        self.metadata -= metadata_bytes(inode)
        if inode.content is not None:
            self.drop_content(inode.content)
        if inode.xattrs is not None:
            self.drop_xattrs(inode.xattrs)

    def drop_content(self, content: Content) -> None:
        """Take off the content of a live inode."""
        self.content -= content.charge
        if content.owned is not None:
            content.let_go_shared()

    def drop_xattrs(self, xattrs: Xattrs) -> None:
        """Take off the attributes of a live inode."""
        charge = xattrs_bytes(xattrs)
        self.metadata -= charge
        if id(xattrs) in self.shared and self.let_go(xattrs):
            self.kept += charge

    def set_xattrs(self, inode: Inode, xattrs: Xattrs | None) -> None:
        """Give a live inode other attributes: a dict that nobody else has, or the one that it has."""
        old = inode.xattrs
        if old is xattrs:
            return
        if old is not None:
            self.drop_xattrs(old)
        if xattrs is not None:
            self.metadata += xattrs_bytes(xattrs)
        inode.xattrs = xattrs

    # -- old versions ----------------------------------------------------------------------------
    def forget(self, version: Inode | None) -> None:
        """Take off a pre-image: an old version, or None for the record that there was no inode."""
        if version is None:
            self.kept -= RECORD_BYTES
            return
        self.kept -= version_bytes(version)
        if version.content is not None:
            self.kept -= version.content.free_unshared()
        xattrs = version.xattrs
        if xattrs is not None and not (id(xattrs) in self.shared and self.let_go(xattrs)):
            self.kept -= xattrs_bytes(xattrs)
