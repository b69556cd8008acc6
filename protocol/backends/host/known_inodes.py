"""The inodes of a host volume that the kernel knows, for the next process that serves it: in a log, and in a handover.

A kernel refers to an inode by its number.  `KnownInodes` keeps a `SharedLog`, which has, for each number that was
looked up, the inode of the host and the names at which it was seen; and for each directory that programs list, the
cookies of its names.  The next process opens an inode by these names when it is used, and verifies it as always: it
fails with ESTALE if another program has removed it, or moved it where no name leads.  So does an inode that has no
name, which ended with the process that had it open.  The number of an inode that is gone stays taken until the kernel
forgets it: the host gives an inode number again, and a file that is open would become the new one.

The counts of lookups are not recorded.  An inode from the log has one more than is known, and a FORGET of all takes it.

Invariant: a node is in the log if and only if `is_recorded`; so are the directories above it.

In an upgrade (`HostGiving`, `HostTaking`) the successor reads the log as the predecessor continues it.  At the end the
predecessor gives the counts of lookups, and the descriptors of files that no name leads to.  Invariant of the
predecessor: while a handover is in progress, the log only grows.

Threading: the serving loop, as the volume; in an upgrade the successor uses the volume in one thread at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from protocol.backends.host.listings import DirectoryEntries
from protocol.directory_cookies import ALL
from protocol.linux.portable import Handle
from protocol.linux.shared_log import SharedLog, written_records
from protocol.values import Value
from protocol.volume import ROOT_INODE
from protocol.volume_durability import GivenState, JournalEnd, TakenState

if TYPE_CHECKING:
    from protocol.backends.host.inode_table import HostInode, HostInodeTable
    from protocol.backends.host.listings import Listings
    from protocol.linux.shared_log import SharedLog

# The codes of records. A record is [code, number, value].
_NODE: Final = 1  # an inode: `_Node`; the last record of a number counts
_GONE: Final = 2  # the number is free
_LISTED: Final = 3  # names of a directory have got cookies: [[name, cookie]]
_NOT_LISTED: Final = 4  # nobody lists the directory any more
_LOST: Final = 5  # the number refers to an inode that is gone; the kernel may know it, so no other inode gets it

_Node: TypeAlias = tuple[int, int, int, list[tuple[int, bytes]]]  # device, inode, type bits, names
_Pairs: TypeAlias = list[tuple[bytes, int]]
_Record: TypeAlias = tuple[int, int, msgspec.Raw]


class KnownInodes:
    """Keeps the record of `table` in `log`.  `is_handed_over`: a successor reads the log, so it only grows."""

    def __init__(self, table: HostInodeTable, log: SharedLog) -> None:
        self._table = table
        self.log = log
        self.is_handed_over = False

    def load(self) -> Iterator[tuple[HostInode, DirectoryEntries]]:
        """Enter the records of the dead daemon; return the directories that programs list.

        OSError (ESTALE) if that daemon served another directory.
        """
        nodes = KnownNodes(self._table)
        nodes.take(self.log.records())
        nodes.lose_unnamed()
        return nodes.listings()

    def record(self, node: HostInode) -> None:
        """Record a node as it is now, and the directories above it."""
        todo = [node]
        while todo:
            at = todo.pop()
            at.is_recorded = True
            self.log.append(_packed(at))
            todo += [parent for parent, _ in at.dentries() if not parent.is_recorded]

    def remove(self, node: HostInode) -> None:
        """Record that the number of `node` does not lead to its inode any more."""
        node.is_recorded = False
        self._append(_GONE, node.number, None)

    def listed(self, directory: HostInode, entries: DirectoryEntries) -> None:
        """Record the cookies that names have got since the last call."""
        pairs = entries.unrecorded()
        if pairs:
            if not directory.is_recorded:
                self.record(directory)
            self._append(_LISTED, directory.number, pairs)

    def not_listed(self, directory: HostInode) -> None:
        """Record that a directory has no cookies any more."""
        self._append(_NOT_LISTED, directory.number, None)

    def _append(self, code: int, number: int, value: object) -> None:
        self.log.append(msgspec.msgpack.encode((code, number, value)))

    def tidy(self) -> None:
        """Write the log anew if it has grown too much."""
        if self.log.is_large and not self.is_handed_over:
            self.rewrite()

    def rewrite(self) -> None:
        """Replace the log by what the table has."""
        self._table.root.is_recorded = True
        self.log.replace(self._records())

    def _records(self) -> Iterator[bytes]:
        for node in self._table:
            if node.is_recorded:
                yield _packed(node)
                if node.entries is not None:
                    node.entries.recorded_to = ALL
                    yield msgspec.msgpack.encode((_LISTED, node.number, node.entries.unrecorded()))


def _packed(node: HostInode) -> bytes:
    code = _LOST if node.lost else _NODE
    names = [(parent.number, name) for parent, name in node.dentries()]
    return msgspec.msgpack.encode((code, node.number, (*node.key, node.kind, names)))


class KnownNodes:
    """Enters into `table` the records of the predecessor, which may still run.

    Nodes that were entered have one lookup, so that none is dropped before the predecessor has given the counts.
    """

    def __init__(self, table: HostInodeTable) -> None:
        self._table = table
        self._pairs: dict[int, _Pairs] = {}

    def take(self, records: Iterable[bytes]) -> None:
        """Enter further records: all those of some calls.  OSError (ESTALE) if they are of another directory."""
        nodes: dict[int, _Node] = {}
        gone: set[int] = set()
        lost: dict[int, _Node] = {}
        for record in records:
            code, number, value = msgspec.msgpack.decode(record, type=_Record)
            if code == _NODE:
                nodes[number] = msgspec.msgpack.decode(value, type=_Node)
            elif code == _LISTED:
                self._pairs.setdefault(number, []).extend(msgspec.msgpack.decode(value, type=_Pairs))
            else:
                self._pairs.pop(number, None)
                if code in (_GONE, _LOST):
                    nodes.pop(number, None)
                    gone.add(number)
                    lost.pop(number, None)
                if code == _LOST:
                    lost[number] = msgspec.msgpack.decode(value, type=_Node)
        root = nodes.pop(ROOT_INODE, None)
        if root is not None and root[:2] != self._table.root.key:
            raise OSError(
                errno.ESTALE,
                "another directory has taken the place of the one that is mounted: `vfsd unmount`, and mount it again",
            )
        self._enter(nodes, gone)
        for number, (device, inode, kind, _) in lost.items():
            self._table.resume_lost(number, (device, inode), kind)

    def _enter(self, nodes: dict[int, _Node], gone: set[int]) -> None:
        table = self._table
        for number in gone.union(nodes):
            node = table.get(number)
            if node is not None and (number in gone or (*node.key, node.kind) != nodes[number][:3]):
                self.lose(node)
        for number, (device, inode, kind, _) in nodes.items():
            if table.get(number) is None:
                before = table.by_key((device, inode))
                if before is not None:
                    self.lose(before)
                table.resume(number, (device, inode), kind)
        for number, (_, _, _, names) in nodes.items():
            self._set_names(number, names)

    def _set_names(self, number: int, names: list[tuple[int, bytes]]) -> None:
        table = self._table
        node = table.get(number)
        if node is None:
            return
        if [(parent.number, name) for parent, name in node.dentries()] != names:
            for parent, name in list(node.dentries()):
                table.remove_dentry(node, parent, name)
            for above, name in reversed(names):
                directory = table.get(above)
                if directory is not None and not directory.lost:
                    table.add_dentry(node, directory, name)
        if table.known is not None:
            table.known.record(node)

    def lose(self, node: HostInode) -> None:
        """Drop a node, whose number leads to no inode any more."""
        node.lookups = 0
        self._table.lose(node)

    def lose_unnamed(self) -> None:
        """Lose the nodes that no name leads to and no descriptor keeps."""
        for node in self._table:
            if node.parent is None and node.pin is None and node is not self._table.root and not node.lost:
                self._table.lose(node)

    def listings(self) -> Iterator[tuple[HostInode, DirectoryEntries]]:
        """Yield the directories that programs list."""
        for number, pairs in self._pairs.items():
            directory = self._table.get(number)
            if directory is not None:
                yield directory, DirectoryEntries(pairs)


_NUMBERS: Final = "Q"  # of an array: 64 bits, in the order of bytes of this machine


class _Rest(Value):
    """The inodes with lookups and their counts, which the log does not have."""

    inodes: bytes
    counts: bytes


class HostGiving(GivenState):
    """The predecessor's side."""

    def __init__(self, table: HostInodeTable) -> None:
        self.below = _identity(table)
        self._table = table
        self._own = table.known
        if table.known is None:
            for node in table:
                node.is_recorded = True
            table.known = KnownInodes(table, SharedLog.create())
            table.known.rewrite()
        self._known = table.known
        self._known.is_handed_over = True
        self._log = self._known.log
        self.start = self._end(self._log.start)

    def _end(self, offset: int) -> JournalEnd:
        return JournalEnd(0, offset, 0, 0, 0, 0)

    def log_fd(self) -> int:
        return os.dup(self._log.descriptor)

    def position(self) -> JournalEnd:
        return self._end(self._log.end)

    def files(self) -> Iterator[tuple[int, int]]:
        for node in self._table:
            if not node.lookups:
                continue
            if node.pin is not None:
                yield node.number, node.pin.fd
            elif node.handle is not None and node is not self._table.root and os.fstat(node.handle.fd).st_nlink == 0:
                yield node.number, node.handle.fd  # another program removed it

    def rest(self) -> bytes:
        counts = {node.number: node.lookups for node in self._table if node.lookups}
        encoded = (array(_NUMBERS, each).tobytes() for each in (counts.keys(), counts.values()))
        return msgspec.msgpack.encode(_Rest(*encoded))

    def end(self) -> None:
        self._known.is_handed_over = False
        if self._own is None:
            self._table.known = None
            for node in self._table:
                node.is_recorded = False
            os.close(self._log.descriptor)


class HostTaking(TakenState):
    """The successor's side."""

    def __init__(self, table: HostInodeTable, listings: Listings) -> None:
        self.below = _identity(table)
        self._listings = listings
        self._table = table
        self._known = KnownNodes(table)
        self._log_fd = self._at = -1
        self._files: dict[int, int] = {}

    def read(self, _image_fd: int, log_fd: int, start: JournalEnd) -> None:
        self._log_fd, self._at = log_fd, start.offset

    def follow(self, end: int) -> None:
        self._known.take(written_records(self._log_fd, self._at, end))
        self._at = end

    def take_files(self, files: Mapping[int, int]) -> None:
        self._files.update(files)

    def complete(self, rest: bytes) -> None:
        os.close(self._log_fd)
        found = msgspec.msgpack.decode(rest, type=_Rest)
        counts = dict(zip(array(_NUMBERS, found.inodes), array(_NUMBERS, found.counts), strict=True))
        for number, descriptor in self._files.items():
            self._pin(self._table.get(number), descriptor)
        self._known.lose_unnamed()
        for node in self._table:
            self._table.forget(node.number, node.lookups - counts.get(node.number, 0))
        self._listings.resume(self._known.listings())

    def _pin(self, node: HostInode | None, descriptor: int) -> None:
        """Keep the inode open that `descriptor` is of."""
        handle = Handle(descriptor)
        if node is None or node.pin is not None or not node.is_shown(os.fstat(descriptor)):
            return
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH:
            handle = Handle(os.open(handle.path, os.O_PATH | os.O_CLOEXEC))
        node.pin = handle


def _identity(table: HostInodeTable) -> str:
    return "directory {}:{}".format(*table.root.key)
