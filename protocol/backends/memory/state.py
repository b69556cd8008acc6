"""MemoryState: the inode table of a memory volume, and the primitive changes that the undo log records.

Every change goes through this module, so the undo log, the counters, the links and the memory ledger agree.  The POSIX
rules of an operation belong to the parts of the volume (`entries`, `files`, `attributes`).

Threading: the serving loop only.  Nothing here awaits, so each operation is atomic.

Invariants (checked by `invariants.check`): a directory entry points to a live inode that has it among its `links`;
`nlink` is the number of links (for a directory 2 plus the number of its subdirectories, or 0 after its removal); an
inode without links has lookups; `orphans` are the inodes without links; the counters are the sums over the live inodes.

Lookup counts are apart from the inodes, so that a process that was forked starts with none and writes to no inode: a
page that is not written to stays shared.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.content import Content
from protocol.backends.memory.history.undo import Epoch, UndoLog
from protocol.backends.memory.inode import (
    DIRECTORY_BASE_BYTES,
    DIRECTORY_ENTRY_BYTES,
    Inode,
    Link,
    Links,
    with_link,
    without_link,
)
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
from protocol.compiled import mypyc_attr
from protocol.errors import os_error
from protocol.tree import TYPE_MASK
from protocol.volume import ROOT_INODE

if TYPE_CHECKING:
    from protocol.volume_extensions import SnapshotInfo

_DIRECTORY: Final = stat.S_IFDIR
_REGULAR: Final = stat.S_IFREG
_DIRECTORY_MODE: Final = _DIRECTORY | 0o755
_DAY_NS: Final = 24 * 3600 * 10**9


@mypyc_attr(allow_interpreted_subclasses=True)
class MemoryState:
    """The live inodes with their counters, undo log and memory ledger.

    A subclass over another source of inodes replaces `lock`, which the caller of a changing operation holds, and
    `check_new_name`, which refuses a name in a directory, for a directory or for something else (None: every valid name
    is allowed).
    """

    def __init__(self, clock: Callable[[], int], uid: int, gid: int) -> None:
        self.clock = clock
        self.read_only = False
        self.lock: AbstractContextManager[object] = nullcontext()
        self.check_new_name: Callable[[Inode, bytes, bool], None] | None = None
        self.inodes: MutableMapping[int, Inode] = {}  # not `dict`: see `protocol.compiled`
        self.lookups: dict[int, int] = {}  # of each inode that has any
        self.orphans: set[int] = set()
        self._inherited: list[object] = []  # lookups of the processes that this one was forked from
        self.ledger = Ledger()
        self.log = UndoLog(self.ledger)
        self.epoch = 0  # serial of the newest epoch; an inode with another stamp must not be changed
        self.changed_at = 0  # the newest epoch in which an inode with a name was changed
        self.next_inode = ROOT_INODE
        self.pages = 0  # of all live inodes, unlinked ones included
        self.files = 0  # with links, without directories
        self.directories = 0  # with links
        self.size_bytes = 0  # of regular files with links
        self.destination: MemoryState | None = None  # the state that can take these inodes over with their numbers
        self.revived: dict[int, Inode] = {}  # unlinked inodes that this transaction revived, as they were before
        root = self.create(_DIRECTORY_MODE, uid, gid)
        self.lookups[ROOT_INODE] = 1  # the kernel never forgets the root
        root.nlink = 2
        self.count(root, +1)

    @property
    def root_inode(self) -> Inode:
        """The live version of the root."""
        return self.inodes[ROOT_INODE]

    # -- inodes --------------------------------------------------------------------------------
    def directory(self, inode: int) -> Inode:
        """Return the live version of a directory.  ENOENT, ENOTDIR."""
        try:
            node = self.inodes[inode]
        except KeyError:
            raise os_error(errno.ENOENT, f"inode {inode}") from None
        if node.children is None:
            raise os_error(errno.ENOTDIR, f"inode {inode}")
        return node

    def parent(self, directory: Inode) -> Inode:
        """Return the directory that `directory` is in; the root, or a removed directory, is its own parent."""
        for number, _ in directory.links:
            return self.inodes[number]
        return directory

    def modes(self, numbers: list[int]) -> list[int]:
        """Return the modes of inodes; only the type bits are meaningful."""
        inodes = self.inodes
        return [inodes[number].mode for number in numbers]

    def drop_lookups(self) -> None:
        """Forget everything that a kernel looked up, as a process that was forked does, and free the orphans."""
        # Freeing the dict would write to each number in it, and so copy the pages that these are in.
        self._inherited.append(self.lookups)
        self.lookups = {ROOT_INODE: 1}
        for number in list(self.orphans):
            self.release(self.inodes[number])

    def update_atime(self, inode: Inode) -> None:
        """Update the access time as relatime does (mount(8)).  Snapshots do not keep access times."""
        atime = inode.atime_ns
        if atime <= inode.mtime_ns or atime <= inode.ctime_ns or self.clock() - atime > _DAY_NS:
            inode.atime_ns = atime if self.read_only else self.clock()

    def create(self, mode: int, uid: int, gid: int) -> Inode:
        """Make a new inode without links."""
        number = self.next_inode
        self.next_inode += 1
        inode = Inode(number, mode, uid, gid, self.clock(), self.epoch)
        if mode & TYPE_MASK == _DIRECTORY:
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

    def release(self, inode: Inode) -> None:
        """Free `inode` if it has neither links nor lookups."""
        number = inode.inode
        if inode.nlink == 0 and number not in self.lookups:
            del self.inodes[number]
            self.orphans.discard(number)
            content = inode.content
            ledger = self.ledger
            if content is not None:
                self.pages -= content.pages
            # `Ledger.leave`, inline for most inodes: 6 % of the time to forget a removed file.
            if inode.xattrs is not None or (content is not None and (content.owned is not None or content.reserved)):
                ledger.leave(inode)
            elif content is not None:
                ledger.metadata -= INODE_BYTES + CONTENT_BYTES
                ledger.content -= content.allocated
                ledger.freed += content.allocated
                if ledger.freed >= ledger.return_at:
                    ledger.return_memory()
            elif inode.children is not None:
                ledger.metadata -= INODE_BYTES + DIRECTORY_BYTES
            else:
                ledger.metadata -= INODE_BYTES if inode.target is None else INODE_BYTES + len(inode.target)
                ledger.note_freed(len(inode.target or b""))
            newest = self.log.newest
            # An inode made and freed within one epoch leaves no record.
            if newest is not None and not self.log.pins and newest.inodes.get(number, inode) is None:
                del newest.inodes[number]
                ledger.kept -= RECORD_BYTES
                if inode.children is not None:
                    self.log.free_names(newest, number)

    # -- handover ----------------------------------------------------------------------------------
    def sums(self) -> dict[str, int]:
        """Return numbers that are equal in two processes that have the same state."""
        return {
            "inodes": len(self.inodes),
            "files": self.files,
            "directories": self.directories,
            "bytes": self.size_bytes,
            "pages": self.pages,
            "open files without a name": len(self.orphans),
            "snapshots": len(self.log.infos()),
            # Without the records of inodes that did not exist: those of inodes made and freed while a view was open
            # stay.
            "changes of snapshots": sum(
                version is not None for epoch in self.log.epochs() for version in epoch.inodes.values()
            ),
        }

    def set_atime(self, number: int, atime_ns: int) -> None:
        """Set the access time of an inode."""
        self.inodes[number].atime_ns = atime_ns

    # -- versions ------------------------------------------------------------------------------
    def own(self, inode: Inode) -> Inode:
        """Return the version of `inode` that may be changed now; keep its pre-image if a snapshot needs it."""
        if inode.epoch == self.epoch:
            return inode
        assert self.inodes[inode.inode] is inode, "an old version must not be changed"
        if inode.nlink:
            # Each changed inode passes here once in an epoch; entries change only in a directory that is owned.
            self.changed_at = self.epoch
        newest = self.log.newest
        if newest is None or inode.nlink == 0:
            # No snapshot holds this version.
            if newest is not None:
                self._record_none(newest, inode.inode)
            inode.epoch = self.epoch
            return inode
        if newest.inodes.setdefault(inode.inode, inode) is not inode:
            # An epoch was dropped, and the older epoch that is now the newest has an earlier version.
            inode.epoch = self.epoch
            return inode
        self.ledger.kept += version_bytes(inode)
        clone = self._clone(inode)
        self.inodes[inode.inode] = clone
        return clone

    def _clone(self, version: Inode) -> Inode:
        """Return a version for the present epoch; the caller charges it."""
        twin = version.clone(self.epoch)
        self.ledger.share_xattrs(version.xattrs)
        return twin

    def record_new(self, number: int) -> None:
        """Record that inode `number`, which is about to be made, did not exist at the beginning of the epoch."""
        newest = self.log.newest
        if newest is not None:
            self._record_none(newest, number)

    def _record_none(self, epoch: Epoch, number: int) -> Inode | None:
        """Return the pre-image of an inode in `epoch`; record that the inode did not exist if there is none."""
        if number not in epoch.inodes:
            epoch.inodes[number] = None
            self.ledger.kept += RECORD_BYTES
        return epoch.inodes[number]

    def open_epoch(self, info: SnapshotInfo | None) -> Epoch:
        """Begin an epoch: from now on the first change of an inode works on a clone."""
        epoch = self.log.open(info)
        self.epoch = epoch.serial
        return epoch

    def moment(self) -> int:
        """Return a number for the present state; the state changed since then if `changed_at` is at least as large."""
        epoch = self.open_epoch(None)
        self.log.close(epoch)
        return epoch.serial

    # -- restoring -----------------------------------------------------------------------------
    def replace(self, live: Inode, version: Inode) -> Inode:
        """Replace `live` by `version` with its links; the caller sets the entries."""
        live = self.own(live)
        if live.nlink:
            self.count(live, -1)
        else:
            self.orphans.discard(live.inode)
        self.pages -= live.pages
        inode = self._clone(version)
        _inherit(inode, live)
        self.ledger.leave(live)
        self.ledger.enter(inode)
        self.inodes[inode.inode] = inode
        self.pages += inode.pages
        if inode.nlink:
            self.count(inode, +1)
        return inode

    def revive(self, version: Inode) -> Inode:
        """Make an inode without links live again, still unlinked, with the content and attributes of `version`.

        If the inode is still open, its users continue with the content of `version`.  The newest epoch must be a
        transaction's.  A directory that `is_dead` is not revived: see `copy_directory`.
        """
        number = version.inode
        live = self.inodes.get(number)
        newest = self.log.newest
        assert newest is not None
        before = self._record_none(newest, number)
        inode = self._clone(version)
        inode.nlink = 0
        inode.links = ()
        inode.generation = 0
        inode.cookies = None
        if live is not None:
            assert live.nlink == 0
            if before is not None or number in self.revived:
                self.ledger.leave(live)
            else:
                self.revived[number] = live  # stays charged until the transaction ends
            self.pages -= live.pages
            _inherit(inode, live)
        if inode.is_dir:
            inode.size = DIRECTORY_BASE_BYTES
        self.inodes[number] = inode
        self.orphans.add(number)
        self.pages += inode.pages
        self.ledger.enter(inode)
        return inode

    def is_dead(self, number: int) -> bool:
        """Return whether a directory was removed before this transaction, and the kernel still holds it.

        The kernel marks such an inode as dead for good (S_DEAD).  If another directory got its number, every call of a
        program that works in it would fail with EIO.
        """
        live, newest = self.inodes.get(number), self.log.newest
        if live is None or live.children is None or live.nlink:
            return False
        return newest is None or newest.inodes.get(number) is None

    def copy_directory(self, version: Inode) -> Inode:
        """Make a new directory, still empty and unlinked, with the attributes of `version`, whose inode `is_dead`."""
        inode = self.create(version.mode, version.uid, version.gid)
        inode.atime_ns, inode.mtime_ns, inode.ctime_ns = version.atime_ns, version.mtime_ns, version.ctime_ns
        inode.birth_ns = version.birth_ns
        self.ledger.set_xattrs(inode, None if version.xattrs is None else dict(version.xattrs))
        return inode

    def end_revived(self) -> None:
        """End a successful transaction: free the revived inodes' earlier versions."""
        for orphan in self.revived.values():
            self.ledger.leave(orphan)
        self.revived.clear()

    def undo_revived(self) -> None:
        """Give each revived inode that has lost its links again its earlier version back, and free the others'."""
        for number, orphan in self.revived.items():
            live = self.inodes[number]
            if live.nlink:
                self.ledger.leave(orphan)
                continue
            self.ledger.leave(live)
            self.pages += orphan.pages - live.pages
            self.inodes[number] = orphan
            self.orphans.add(number)
        self.revived.clear()

    def orphan(self, inode: Inode) -> Inode:
        """Take all links from an inode; the caller removes the entries."""
        inode = self.own(inode)
        self.count(inode, -1)
        inode.nlink = 0
        self.orphans.add(inode.inode)
        self.set_links(inode, ())
        return inode

    def set_links(self, inode: Inode, links: Links) -> None:
        """Replace the links of a live inode (owned); the caller changes entries and counts."""
        before, after = (sum(ENTRY_BYTES + len(name) for _, name in each) for each in (inode.links, links))
        self.ledger.metadata += after - before
        inode.links = links if isinstance(links, tuple) else links.copy()

    # -- counters ------------------------------------------------------------------------------
    def count(self, inode: Inode, sign: int) -> None:
        """Add a linked inode to the counters (+1) or take it out (-1)."""
        if inode.children is not None:
            self.directories += sign
        else:
            self.files += sign
            if inode.mode & TYPE_MASK == _REGULAR:
                self.size_bytes += sign * inode.size

    def resize(self, inode: Inode, size: int) -> None:
        """Set the size of a regular file (owned); the caller changes the content."""
        if inode.nlink:
            self.size_bytes += size - inode.size
        inode.size = size

    # -- entries -------------------------------------------------------------------------------
    def set_name(self, directory: Inode, name: bytes, number: int) -> None:
        """Make `name` in `directory` stand for inode `number` (0: nothing); change neither inode."""
        children = directory.children
        assert children is not None
        old = children.get(name, 0)
        if self.log.newest is not None:
            self._record(directory, name, old, number)
        cookies = directory.cookies
        if number:
            children[name] = number
            if cookies is not None and not old:
                cookies.add(name)  # a name that gets another inode keeps its cookie
        elif old:
            del children[name]
            if cookies is not None:
                cookies.remove(name)

    def add_entry(self, directory: Inode, name: bytes, inode: Inode) -> None:
        """Add `name`, which does not exist yet, for `inode` to `directory` (both owned)."""
        assert directory.children is not None
        if self.log.newest is not None:
            self._record(directory, name, 0, inode.inode)
        directory.children[name] = inode.inode
        if directory.cookies is not None:
            directory.cookies.add(name)
        directory.size += DIRECTORY_ENTRY_BYTES
        link = (directory.inode, name)
        inode.links = with_link(inode.links, link) if inode.links else (link,)
        self.ledger.metadata += ENTRY_BYTES + len(name)
        if inode.nlink == 0:
            self.count(inode, +1)
            if self.orphans:
                self.orphans.discard(inode.inode)
        if inode.children is not None:
            assert not inode.children, "only an empty directory is linked; others are moved"
            directory.nlink += 1
            inode.nlink = 2
        else:
            inode.nlink += 1

    def drop_entry(self, directory: Inode, name: bytes, inode: Inode) -> None:
        """Remove `name` of `inode` from `directory` (both owned).  The caller releases `inode`."""
        self.set_name(directory, name, 0)
        directory.size -= DIRECTORY_ENTRY_BYTES
        self._drop_link(directory, name, inode)

    def _drop_link(self, directory: Inode, name: bytes, inode: Inode) -> None:
        inode.links = without_link(inode.links, (directory.inode, name))
        self.ledger.metadata -= ENTRY_BYTES + len(name)
        if inode.children is not None:
            directory.nlink -= 1
            inode.nlink = 0
        else:
            inode.nlink -= 1
        if inode.nlink == 0:
            self.count(inode, -1)
            self.orphans.add(inode.inode)

    def move_entry(
        self, old: Inode, old_name: bytes, new: Inode, new_name: bytes, inode: Inode, victim: Inode | None
    ) -> None:
        """Rename `inode` to a name that `victim` has, or that does not exist yet (all owned)."""
        self.set_name(old, old_name, 0)
        self.set_name(new, new_name, inode.inode)
        old.size -= DIRECTORY_ENTRY_BYTES
        if victim is None:
            new.size += DIRECTORY_ENTRY_BYTES
        else:
            self._drop_link(new, new_name, victim)
        link = (new.inode, new_name)
        if len(inode.links) == 1:
            inode.links = (link,)
        else:
            inode.links = with_link(without_link(inode.links, (old.inode, old_name)), link)
        self.ledger.metadata += len(new_name) - len(old_name)
        if inode.children is not None:
            old.nlink -= 1
            new.nlink += 1

    def exchange_entries(self, a: Inode, a_name: bytes, a_node: Inode, b: Inode, b_name: bytes, b_node: Inode) -> None:
        """Exchange the inodes of two names (all owned; the inodes differ)."""
        self.set_name(a, a_name, b_node.inode)
        self.set_name(b, b_name, a_node.inode)
        a_node.links = with_link(without_link(a_node.links, (a.inode, a_name)), (b.inode, b_name))
        b_node.links = with_link(without_link(b_node.links, (b.inode, b_name)), (a.inode, a_name))
        moved = int(b_node.is_dir) - int(a_node.is_dir)
        a.nlink += moved
        b.nlink -= moved

    def _record(self, directory: Inode, name: bytes, old: int, new: int) -> None:
        """Keep the old inode of `name` for the newest snapshot, unless the directory is younger than it."""
        newest = self.log.newest
        # Not `born == self.epoch`: the epoch that it was made in may have been merged into an older one since.
        if newest is None or directory.born >= newest.serial:
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
        """Return the content of a regular file (owned) for writing."""
        if inode.content is None:
            ledger = self.ledger
            inode.content = Content(ledger)
            ledger.metadata += CONTENT_BYTES
        return inode.content

    def swap_content(self, inode: Inode, content: Content | None, *, shared: bool) -> None:
        """Replace the content of a regular file (owned) by a new one, or by one `shared` with an old version."""
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
        """Set the target of a symlink (owned)."""
        self.ledger.metadata += len(target) - len(inode.target or b"")
        inode.target = target
        inode.size = len(target)

    # -- paths ---------------------------------------------------------------------------------
    def find_links(self, numbers: Iterable[int]) -> None:
        """Complete the `links` of these inodes.  Any thread.  In memory they are always complete."""

    def inode_at(self, path: bytes) -> Inode:
        """Return the live inode at `path`.  ENOENT, ENOTDIR."""
        node = self.root_inode
        for name in path.split(b"/") if path else ():
            if node.children is None:
                raise os_error(errno.ENOTDIR, os.fsdecode(path))
            number = node.children.get(name)
            if number is None:
                raise os_error(errno.ENOENT, os.fsdecode(path))
            node = self.inodes[number]
        return node

    def path(self, inode: Inode) -> bytes | None:
        """Return one path of a live inode, or None if it has no name."""
        for link in inode.links:
            return self.link_path(link)
        return b"" if inode.inode == ROOT_INODE else None

    def path_of(self, number: int) -> bytes | None:
        """See `protocol.volume.ExtendedVolume`."""
        inode = self.inodes.get(number)
        return None if inode is None else self.path(inode)

    def link_path(self, link: Link) -> bytes:
        """Return the path of one name of a live inode."""
        number, name = link
        if number == ROOT_INODE:
            return name
        names = [name]
        while number != ROOT_INODE:
            number, name = self.inodes[number].parent_link
            names.append(name)
        return b"/".join(reversed(names))


def _inherit(inode: Inode, live: Inode) -> None:
    """Copy the fields that belong to the live inode and not to its versions."""
    inode.generation = live.generation
    inode.cookies = live.cookies
    inode.atime_ns = live.atime_ns
