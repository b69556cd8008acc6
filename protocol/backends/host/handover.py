"""Handover of a host volume to another process, under the same kernel.  The content stays where it is.

What the kernel knows is in the log of `KnownInodes`: the new process reads it as the old one continues it.  At the end
the old process gives the counts of lookups, and the descriptors of files that no name leads to.

Invariant of the old process: while a handover is in progress, the log only grows.

Threading: the serving loop in the old process; the new one uses the volume in one thread at a time.
"""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.backends.host.known_inodes import KnownInodes, KnownNodes
from protocol.linux.portable import proc_path
from protocol.linux.shared_log import SharedLog, written_records
from protocol.values import Value
from protocol.volume_durability import JournalEnd

if TYPE_CHECKING:
    from protocol.backends.host.inode_table import HostInode, HostInodeTable
    from protocol.backends.host.listings import Listings

_NUMBERS: Final = "Q"  # of an array: 64 bits, in the order of bytes of this machine


class _Rest(Value):
    """What the log does not have: the inodes with lookups, and how many."""

    inodes: bytes
    counts: bytes


class HostGiving:
    """The old process's side.  See `protocol.volume_extensions.GivenState`."""

    has_image = False
    lock_fd = None

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

    def write_image(self, descriptor: int) -> None:
        """Nothing: the log has everything."""

    def files(self) -> Iterator[tuple[int, int]]:
        for node in self._table:
            if not node.lookups:
                continue
            if node.pin >= 0:
                yield node.number, node.pin
            elif node.fd >= 0 and os.fstat(node.fd).st_nlink == 0 and node is not self._table.root:
                yield node.number, node.fd  # another program removed it

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


class HostTaking:
    """The new process's side.  See `protocol.volume_extensions.TakenState`."""

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
        for node in self._table:
            if node.parent is None and node.pin < 0 and node is not self._table.root:
                self._known.lose(node)
        for node in self._table:
            self._table.forget(node.number, node.lookups - counts.get(node.number, 0))
        self._listings.resume(self._known.listings())

    def _pin(self, node: HostInode | None, descriptor: int) -> None:
        """Keep the inode open that `descriptor` is of."""
        seen = os.fstat(descriptor)
        if node is None or node.pin >= 0 or not node.is_shown(seen):
            os.close(descriptor)
            return
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH:
            opened, descriptor = descriptor, os.open(proc_path(descriptor), os.O_PATH | os.O_CLOEXEC)
            os.close(opened)
        node.pin = descriptor


def _identity(table: HostInodeTable) -> str:
    return "directory {}:{}".format(*table.root.key)
