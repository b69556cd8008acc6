"""Listings: the directories that programs list, with the cookies of their entries.

Invariant (`check_invariants`): a node of the table is in `_read` if and only if it has `entries` that are complete, or
came from another process; `_read` has at most MOST_READ_DIRECTORIES.  Those of other nodes are what `evict` has left.

Threading: the serving loop only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from protocol.backends.host.directory_entries import DirectoryEntries
from protocol.directory_cookies import ALL
from protocol.volume import DirectoryEntry

if TYPE_CHECKING:
    from protocol.backends.host.descriptors import Descriptors
    from protocol.backends.host.inode_table import HostInode, HostInodeTable

MOST_READ_DIRECTORIES: Final = 256
_DOT: Final = b"."
_DOT_DOT: Final = b".."


class Listings:
    """Lists directories of `table`, and keeps the entries of those that were read last."""

    def __init__(self, table: HostInodeTable, descriptors: Descriptors) -> None:
        self._table = table
        self._descriptors = descriptors
        self._read: dict[HostInode, None] = {}  # those with `entries`, the one read last at the end

    def after(self, directory: HostInode, cookie: int) -> Iterator[DirectoryEntry]:
        """Return the entries of a directory after `cookie`.  Reads it when a reader begins."""
        entries = self._entries_of(directory)
        if not cookie or entries.is_partial:
            above = self._descriptors.directory(directory)
            descriptor = os.open(_DOT, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
            try:
                entries.refresh(descriptor)
            finally:
                os.close(descriptor)
            if self._table.known is not None:
                self._table.known.listed(directory, entries)
        return self._listed(directory, entries, cookie)

    def _listed(self, directory: HostInode, entries: DirectoryEntries, cookie: int) -> Iterator[DirectoryEntry]:
        if cookie < 1:
            yield DirectoryEntry(_DOT, directory.number, stat.S_IFDIR, 1)
        if cookie < 2:
            yield DirectoryEntry(_DOT_DOT, (directory.parent or directory).number, stat.S_IFDIR, 2)
        device, number_of = directory.key[0], self._table.number_of
        for at, name, (host_inode, kind) in entries.after(cookie):
            yield DirectoryEntry(name, number_of((device, host_inode)), kind, at)

    def _entries_of(self, directory: HostInode) -> DirectoryEntries:
        if directory.entries is None:
            directory.entries = DirectoryEntries()
        if directory in self._read:
            del self._read[directory]
        elif len(self._read) >= MOST_READ_DIRECTORIES:
            self._evict(next(iter(self._read)))
        self._read[directory] = None
        return directory.entries

    def _evict(self, directory: HostInode) -> None:
        entries, known = directory.entries, self._table.known
        self.forget(directory)
        if entries is not None and entries.evict():
            directory.entries = entries
            if known is not None:
                known.listed(directory, entries)

    def resume(self, listings: Iterable[tuple[HostInode, DirectoryEntries]]) -> None:
        """Continue listings of directories that programs have begun with another process."""
        for directory, entries in listings:
            directory.entries = entries
            self._read[directory] = None
            if self._table.known is not None:
                entries.recorded_to = ALL
                self._table.known.listed(directory, entries)

    def forget(self, directory: HostInode) -> None:
        """End the listing of a directory: the next reader begins again."""
        if directory.entries is not None and self._table.known is not None:
            self._table.known.not_listed(directory)
        directory.entries = None
        self._read.pop(directory, None)

    def check_invariants(self) -> None:
        """AssertionError if the invariant of the module's docstring does not hold."""
        assert len(self._read) <= MOST_READ_DIRECTORIES
        assert all(node.entries is not None for node in self._read)
        assert all(node in self._read or node.entries.is_partial for node in self._table if node.entries is not None)
        assert all(self._table.get(node.number) is node for node in self._read), "a listing of a node that is gone"
