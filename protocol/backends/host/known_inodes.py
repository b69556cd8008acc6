"""KnownInodes: the inodes of a host volume that the kernel knows, in a `SharedLog`, for the next process.

A kernel refers to an inode by its number.  The log has, for each number that was looked up, the inode of the host and
the names at which it was seen; and for each directory that programs list, the cookies of its names.  The next process
opens an inode by these names when it is used, and verifies it as always: it fails with ESTALE if another program has
removed it, or moved it where no name leads.  So does an inode that has no name, which ended with the process that had
it open.

The counts of lookups are not recorded.  An inode from the log has one more than is known, and a FORGET of all takes it.

Invariant: a node is in the log if and only if `is_recorded`; so are the directories above it.

Threading: the serving loop, as the volume.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from protocol.backends.host.directory_entries import DirectoryEntries
from protocol.directory_cookies import ALL
from protocol.volume import ROOT_INODE

if TYPE_CHECKING:
    from protocol.backends.host.inode_table import HostInode, HostInodeTable
    from protocol.linux.shared_log import SharedLog

# The codes of records. A record is [code, number, value].
_NODE: Final = 1  # an inode: `_Node`; the last record of a number counts
_GONE: Final = 2  # the number is free, or refers to an inode that is gone
_LISTED: Final = 3  # names of a directory have got cookies: [[name, cookie]]
_NOT_LISTED: Final = 4  # nobody lists the directory any more

_Node: TypeAlias = tuple[int, int, int, list[tuple[int, bytes]]]  # device, inode, type bits, names
_Pairs: TypeAlias = list[tuple[bytes, int]]
_Record: TypeAlias = tuple[int, int, msgspec.Raw]


class KnownInodes:
    """Keeps the record of `table` in `log`.  `is_handed_over`: another process reads the log, so it only grows."""

    def __init__(self, table: HostInodeTable, log: SharedLog) -> None:
        self._table = table
        self.log = log
        self.is_handed_over = False

    # -- the process before --------------------------------------------------------------------------
    def load(self) -> Iterator[tuple[HostInode, DirectoryEntries]]:
        """Enter what the process before recorded; yield the directories that programs list.

        OSError (ESTALE) if that process served another directory.
        """
        nodes: dict[int, _Node] = {}
        listings: dict[int, _Pairs] = {}
        for record in self.log.records():
            code, number, value = msgspec.msgpack.decode(record, type=_Record)
            if code == _NODE:
                nodes[number] = msgspec.msgpack.decode(value, type=_Node)
            elif code == _LISTED:
                listings.setdefault(number, []).extend(msgspec.msgpack.decode(value, type=_Pairs))
            else:
                listings.pop(number, None)
                if code == _GONE:
                    nodes.pop(number, None)
        root = nodes.pop(ROOT_INODE)
        if root[:2] != self._table.root.key:
            raise OSError(
                errno.ESTALE,
                "another directory has taken the place of the one that is mounted: `vfsd unmount`, and mount it again",
            )
        self._enter(nodes)
        for number, pairs in listings.items():
            directory = self._table.get(number)
            if directory is not None:
                yield directory, DirectoryEntries(pairs)

    def _enter(self, nodes: dict[int, _Node]) -> None:
        table = self._table
        for number, (device, inode, kind, names) in nodes.items():
            if names:
                table.resume(number, (device, inode), kind)
        for number, (_, _, _, names) in nodes.items():
            node = table.get(number)
            for above, name in reversed(names):
                parent = table.get(above)
                if node is not None and parent is not None:
                    table.add_dentry(node, parent, name)

    # -- this process --------------------------------------------------------------------------------
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
    names = [(parent.number, name) for parent, name in node.dentries()]
    return msgspec.msgpack.encode((_NODE, node.number, (*node.key, node.kind, names)))


class KnownNodes:
    """Enters into `table` what another process, which still runs, records in its log.

    Nodes that were entered have one lookup, so that none is dropped before the other process has given the counts.
    """

    def __init__(self, table: HostInodeTable) -> None:
        self._table = table
        self._pairs: dict[int, _Pairs] = {}

    def take(self, records: Iterable[bytes]) -> None:
        """Enter further records: all that the other process has made in some calls."""
        nodes: dict[int, _Node] = {}
        gone: set[int] = set()
        for record in records:
            code, number, value = msgspec.msgpack.decode(record, type=_Record)
            if code == _NODE:
                nodes[number] = msgspec.msgpack.decode(value, type=_Node)
            elif code == _LISTED:
                self._pairs.setdefault(number, []).extend(msgspec.msgpack.decode(value, type=_Pairs))
            else:
                self._pairs.pop(number, None)
                if code == _GONE:
                    nodes.pop(number, None)
                    gone.add(number)
        nodes.pop(ROOT_INODE, None)
        self._enter(nodes, gone)

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
                if directory is not None:
                    table.add_dentry(node, directory, name)
        if table.known is not None:
            table.known.record(node)

    def lose(self, node: HostInode) -> None:
        """Drop a node, whose number leads to no inode any more."""
        node.lookups = 0
        self._table.lose(node)

    def listings(self) -> Iterator[tuple[HostInode, DirectoryEntries]]:
        """Yield the directories that programs list."""
        for number, pairs in self._pairs.items():
            directory = self._table.get(number)
            if directory is not None:
                yield directory, DirectoryEntries(pairs)
