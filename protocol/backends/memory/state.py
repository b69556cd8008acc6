"""MemoryState: the live inodes of a memory volume, and the primitives that change them and can be undone.

Every change goes through here, so that the undo log, the counters and the links agree.  What POSIX
says of an operation is the volume's business, not this module's.

Threading: the serving loop only.  Nothing here awaits; an operation is atomic because of that.

Invariants (see `invariants.check`): a directory entry points to a live inode that lists it among its
`links`; `nlink` is the number of links (of a directory: 2 and one for each directory in it, 0 when it
was removed); an inode without links has lookups; the counters are the sums over the live inodes.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.content import Content
from protocol.backends.memory.history.undo import Epoch, UndoLog
from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES, DIRECTORY_ENTRY_BYTES, Inode, Link
from protocol.backends.memory.ledger import (
    CONTENT_BYTES,
    DIRECTORY_BYTES,
    ENTRY_BYTES,
    INODE_BYTES,
    NAMES_BYTES,
    RECORD_BYTES,
    Ledger,
    version_bytes,
)
from protocol.volume import ROOT_INODE

if TYPE_CHECKING:
    from protocol.volume import SnapshotInfo

__all__ = ["MemoryState"]

_KIND: Final = 0o170000  # S_IFMT as a mask
_DIRECTORY: Final = stat.S_IFDIR
_REGULAR: Final = stat.S_IFREG
_DIRECTORY_MODE: Final = _DIRECTORY | 0o755


class MemoryState:
    """The live inodes, their counters and the undo log."""

    def __init__(self, clock: Callable[[], int], uid: int, gid: int) -> None:
        self.clock = clock
        self.inodes: dict[int, Inode] = {}
        self.ledger = Ledger()
        self.log = UndoLog(self.ledger)
        self.epoch = 0  # serial of the newest epoch: what an inode must be stamped with to be changed
        self.changed_at = 0  # the newest epoch in which anything that has a name was changed
        self.next_inode = ROOT_INODE
        self.pages = 0  # of all live inodes, unlinked ones too
        self.files = 0  # with links, no directories
        self.directories = 0  # with links
        self.size_bytes = 0  # of regular files with links
        self.destination: MemoryState | None = (
            None  # whose inode numbers the inodes here have, so that they can go there
        )
        self.revived: dict[int, Inode] = {}  # in this transaction, though still open: what they were before it
        root = self.create(_DIRECTORY_MODE, uid, gid)
        root.lookups = 1  # the kernel's, never forgotten
        root.nlink = 2
        self.count(root, +1)

    @property
    def root_inode(self) -> Inode:
        """The live version of the root."""
        return self.inodes[ROOT_INODE]

    # -- versions ------------------------------------------------------------------------------
    def own(self, inode: Inode) -> Inode:
        """The version of `inode` that may be changed now; its pre-image is kept if a snapshot needs it."""
        if inode.epoch == self.epoch:
            return inode
        assert self.inodes[inode.inode] is inode, "an old version is not to be changed"
        if inode.nlink:
            # Here, where an inode comes once in each epoch: an entry is made or removed in a directory that is owned.
            self.changed_at = self.epoch
        newest = self.log.newest
        if newest is None or inode.nlink == 0:
            # Nobody else has this version: there is no snapshot, or a snapshot does not hold it.
            if newest is not None:
                self._record_none(newest, inode.inode)
            inode.epoch = self.epoch
            return inode
        if newest.inodes.setdefault(inode.inode, inode) is not inode:
            # An epoch was dropped, and the older one that is the newest now has a version from before this one.
            inode.epoch = self.epoch
            return inode
        self.ledger.kept += version_bytes(inode)
        clone = self._clone(inode)
        self.inodes[inode.inode] = clone
        return clone

    def _clone(self, version: Inode) -> Inode:
        """A version for the present epoch; the caller charges it."""
        twin = version.clone(self.epoch)
        self.ledger.share_xattrs(version.xattrs)
        return twin

    def _record_none(self, epoch: Epoch, number: int) -> Inode | None:
        """What `epoch` has of an inode; from here on at least that there was none."""
        if number not in epoch.inodes:
            epoch.inodes[number] = None
            self.ledger.kept += RECORD_BYTES
        return epoch.inodes[number]

    def create(self, mode: int, uid: int, gid: int) -> Inode:
        """A new inode without links."""
        number = self.next_inode
        self.next_inode += 1
        inode = Inode(number, mode, uid, gid, self.clock(), self.epoch)
        if mode & _KIND == _DIRECTORY:
            inode.children = {}
            inode.size = DIRECTORY_BASE_BYTES
            self.ledger.metadata += DIRECTORY_BYTES
        self.ledger.metadata += INODE_BYTES
        newest = self.log.newest
        if newest is not None:
            newest.inodes[number] = None
            self.ledger.kept += RECORD_BYTES
        self.inodes[number] = inode
        return inode

    def revive(self, version: Inode) -> Inode:
        """Make an inode that has no links live again, with the content and attributes of `version`, still unlinked.

        It may still be open; then it goes on with the version's content.  The newest epoch must be a
        transaction's.  A directory that was removed before it, and that the kernel still holds, is marked
        dead there for good, so it comes back as another generation.
        """
        number = version.inode
        live = self.inodes.get(number)
        newest = self.log.newest
        assert newest is not None
        before = self._record_none(newest, number)
        inode = self._clone(version)
        inode.nlink = 0
        inode.links = ()
        inode.lookups = inode.generation = 0
        inode.listing = None
        if live is not None:
            assert live.nlink == 0
            if before is not None or number in self.revived:
                self.ledger.leave(live)
            else:
                self.revived[number] = live  # charged until the transaction ends
            self.pages -= live.pages
            inherit(inode, live)
            if inode.is_dir and before is None:
                inode.generation += 1
        if inode.is_dir:
            inode.size = DIRECTORY_BASE_BYTES
        self.inodes[number] = inode
        self.pages += inode.pages
        self.ledger.enter(inode)
        return inode

    def forget_revived(self) -> None:
        """The transaction has succeeded: what inodes were before `revive` is gone."""
        for orphan in self.revived.values():
            self.ledger.leave(orphan)
        self.revived.clear()

    def replace(self, live: Inode, version: Inode) -> Inode:
        """Put `version` in place of `live`, links and all; entries are the caller's business."""
        live = self.own(live)
        if live.nlink:
            self.count(live, -1)
        self.pages -= live.pages
        inode = self._clone(version)
        inherit(inode, live)
        self.ledger.leave(live)
        self.ledger.enter(inode)
        self.inodes[inode.inode] = inode
        self.pages += inode.pages
        if inode.nlink:
            self.count(inode, +1)
        return inode

    def bury_again(self, orphan: Inode) -> None:
        """Undo `revive`: an inode that lost its links once more is what it was, for those who have it open."""
        live = self.inodes[orphan.inode]
        assert live.nlink == 0
        self.ledger.leave(live)
        self.pages += orphan.pages - live.pages
        self.inodes[orphan.inode] = orphan

    def orphan(self, inode: Inode) -> Inode:
        """Take all links from an inode at once; entries are the caller's business."""
        inode = self.own(inode)
        self.count(inode, -1)
        inode.nlink = 0
        self.set_links(inode, ())
        return inode

    def set_links(self, inode: Inode, links: tuple[Link, ...]) -> None:
        """Give a live inode (owned) other names; entries and counts are the caller's business."""
        before, after = (sum(ENTRY_BYTES + len(name) for _, name in each) for each in (inode.links, links))
        self.ledger.metadata += after - before
        inode.links = links

    def release(self, inode: Inode) -> None:
        """Free `inode` if it has neither links nor lookups left."""
        if inode.nlink == 0 and inode.lookups <= 0:
            number = inode.inode
            del self.inodes[number]
            content = inode.content
            ledger = self.ledger
            if content is not None:
                self.pages -= content.pages
            # As `Ledger.leave`, spelled out for most inodes: 6 % of what forgetting a removed file takes.
            if inode.xattrs is not None or (content is not None and (content.owned is not None or content.reserved)):
                ledger.leave(inode)
            elif content is not None:
                ledger.metadata -= INODE_BYTES + CONTENT_BYTES
                ledger.content -= content.allocated
            elif inode.children is not None:
                ledger.metadata -= INODE_BYTES + DIRECTORY_BYTES
            else:
                ledger.metadata -= INODE_BYTES if inode.target is None else INODE_BYTES + len(inode.target)
            newest = self.log.newest
            # What came and went within an epoch leaves no trace.
            if newest is not None and not self.log.pins and newest.inodes.get(number, inode) is None:
                del newest.inodes[number]
                ledger.kept -= RECORD_BYTES

    def open_epoch(self, info: SnapshotInfo | None) -> Epoch:
        """Begin an epoch: from now on the first change of an inode works on a clone."""
        epoch = self.log.open(info)
        self.epoch = epoch.serial
        return epoch

    def moment(self) -> int:
        """A number for the present state: it was changed after that where `changed_at` is no smaller."""
        epoch = self.open_epoch(None)
        self.log.close(epoch)
        return epoch.serial

    # -- counters ------------------------------------------------------------------------------
    def count(self, inode: Inode, sign: int) -> None:
        """Add a linked inode to the counters (+1), or take it out (-1)."""
        if inode.children is not None:
            self.directories += sign
        else:
            self.files += sign
            if inode.mode & _KIND == _REGULAR:
                self.size_bytes += sign * inode.size

    def resize(self, inode: Inode, size: int) -> None:
        """Set the size of a regular file (owned); its content is the caller's business."""
        if inode.nlink:
            self.size_bytes += size - inode.size
        inode.size = size

    # -- entries -------------------------------------------------------------------------------
    def set_name(self, directory: Inode, name: bytes, number: int) -> None:
        """Make `name` in `directory` stand for inode `number` (0: nothing), and touch nothing else."""
        children = directory.children
        assert children is not None
        old = children.get(name, 0)
        if self.log.newest is not None:
            self._record(directory, name, old, number)
        listing = directory.listing
        if number:
            children[name] = number
            if listing is not None and not old:
                listing.add(name)  # a name that only stands for something else keeps its place
        elif old:
            del children[name]
            if listing is not None:
                listing.remove(name)

    def add_entry(self, directory: Inode, name: bytes, inode: Inode) -> None:
        """Make `name` in `directory` (both owned) stand for `inode`; there is no such name yet."""
        assert directory.children is not None
        if self.log.newest is not None:
            self._record(directory, name, 0, inode.inode)
        directory.children[name] = inode.inode
        if directory.listing is not None:
            directory.listing.add(name)
        directory.size += DIRECTORY_ENTRY_BYTES
        link = (directory.inode, name)
        inode.links = (*inode.links, link) if inode.links else (link,)
        self.ledger.metadata += ENTRY_BYTES + len(name)
        if inode.nlink == 0:
            self.count(inode, +1)
        if inode.children is not None:
            assert not inode.children, "a directory is linked while it is empty, or moved"
            directory.nlink += 1
            inode.nlink = 2
        else:
            inode.nlink += 1

    def drop_entry(self, directory: Inode, name: bytes, inode: Inode) -> None:
        """Take `name` out of `directory` (both owned).  The caller releases `inode`."""
        self.set_name(directory, name, 0)
        directory.size -= DIRECTORY_ENTRY_BYTES
        inode.links = _without(inode.links, (directory.inode, name))
        self.ledger.metadata -= ENTRY_BYTES + len(name)
        if inode.children is not None:
            directory.nlink -= 1
            inode.nlink = 0
        else:
            inode.nlink -= 1
        if inode.nlink == 0:
            self.count(inode, -1)

    def move_entry(self, old: Inode, old_name: bytes, new: Inode, new_name: bytes, inode: Inode) -> None:
        """Give `inode` another name (all owned); there is no such name yet."""
        self.set_name(old, old_name, 0)
        self.set_name(new, new_name, inode.inode)
        old.size -= DIRECTORY_ENTRY_BYTES
        new.size += DIRECTORY_ENTRY_BYTES
        link = (new.inode, new_name)
        inode.links = (link,) if len(inode.links) == 1 else (*_without(inode.links, (old.inode, old_name)), link)
        self.ledger.metadata += len(new_name) - len(old_name)
        if inode.children is not None:
            old.nlink -= 1
            new.nlink += 1

    def exchange_entries(self, a: Inode, a_name: bytes, a_node: Inode, b: Inode, b_name: bytes, b_node: Inode) -> None:
        """Let two names change what they stand for (all owned; the nodes differ)."""
        self.set_name(a, a_name, b_node.inode)
        self.set_name(b, b_name, a_node.inode)
        a_node.links = (*_without(a_node.links, (a.inode, a_name)), (b.inode, b_name))
        b_node.links = (*_without(b_node.links, (b.inode, b_name)), (a.inode, a_name))
        moved = int(b_node.is_dir) - int(a_node.is_dir)
        a.nlink += moved
        b.nlink -= moved

    def _record(self, directory: Inode, name: bytes, old: int, new: int) -> None:
        """Keep what `name` stood for, for the newest snapshot, unless that never saw the directory."""
        newest = self.log.newest
        if newest is None or directory.born == self.epoch:
            return
        names = newest.names.get(directory.inode)
        if names is None:
            names = newest.names[directory.inode] = {}
            self.ledger.kept += NAMES_BYTES
        if name not in names:
            self.ledger.kept += RECORD_BYTES + len(name)
        kept = names.setdefault(name, old)
        if kept == new and not self.log.pins:
            del names[name]
            self.ledger.kept -= RECORD_BYTES + len(name)

    # -- content -------------------------------------------------------------------------------
    def content(self, inode: Inode) -> Content:
        """The content of an owned regular file, to be written to."""
        if inode.content is None:
            ledger = self.ledger
            inode.content = Content(ledger)
            ledger.metadata += CONTENT_BYTES
        return inode.content

    def swap_content(self, inode: Inode, content: Content | None, *, shared: bool) -> None:
        """Give a regular file (owned) another content: a new one, or one that it shares with a version (`shared`)."""
        ledger = self.ledger
        if inode.content is not None:
            self.pages -= inode.content.pages
            ledger.metadata -= CONTENT_BYTES
            ledger.drop_content(inode.content)
        inode.content = content
        if content is not None:
            self.pages += content.pages
            ledger.metadata += CONTENT_BYTES
            ledger.content += content.charge
            if shared:
                ledger.kept -= content.allocated

    def set_target(self, inode: Inode, target: bytes) -> None:
        """Set what a symlink (owned) points to."""
        self.ledger.metadata += len(target) - len(inode.target or b"")
        inode.target = target
        inode.size = len(target)

    def find_links(self, numbers: Iterable[int]) -> None:
        """Make sure that `links` names all names of these inodes.  Any thread.  Here it always does."""

    # -- paths ---------------------------------------------------------------------------------
    def path(self, inode: Inode) -> bytes | None:
        """One path of a live inode, or None when it has none."""
        if inode.inode == ROOT_INODE:
            return b""
        return self.link_path(inode.links[0]) if inode.links else None

    def link_path(self, link: Link) -> bytes:
        """The path of one name of a live inode."""
        directory, name = link
        names = [name]
        while directory != ROOT_INODE:
            directory, name = self.inodes[directory].links[0]
            names.append(name)
        return b"/".join(reversed(names))


def inherit(inode: Inode, live: Inode) -> None:
    """Hand on what belongs to the live inode and not to its versions."""
    inode.lookups = live.lookups
    inode.generation = live.generation
    inode.listing = live.listing
    inode.atime_ns = live.atime_ns


def _without(links: tuple[Link, ...], link: Link) -> tuple[Link, ...]:
    if len(links) == 1:
        return ()
    at = links.index(link)
    return links[:at] + links[at + 1 :]
