"""Listings: the directories that programs list, with the cookies of their entries.

The host has an order of entries of its own, but Python's os module cannot continue in the middle of it.  So the names
are read when a reader begins.  At first each gets a cookie that depends on the name only.  Names that are added later,
through the mount or by the time another reader begins, get lower ones, so a reader does not meet what it adds itself
(`protocol.directory_cookies`).  `DirectoryEntries.evict` keeps only these: all others get the same cookies again.

Invariant (`check_invariants`): a node of the table is in `_read` if and only if it has `entries` that are complete, or
came from another process; `_read` has at most MOST_READ_DIRECTORIES.  Those of other nodes are what `evict` has left.

Threading: the serving loop only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from protocol.directory_cookies import ALL, DirectoryCookies
from protocol.linux.portable import HASHED_COOKIES, hashed_cookies
from protocol.volume import DirectoryEntry

if TYPE_CHECKING:
    from os import stat_result

    from protocol.backends.host.descriptors import Descriptors
    from protocol.backends.host.inode_table import HostInode, HostInodeTable


HostEntry: TypeAlias = tuple[int, int]  # as readdir(3) shows it: the inode's number on the host, its type (0: unknown)


class DirectoryEntries:
    """The names of one directory with their cookies; until the first `refresh`, those of `pairs`.

    `is_partial`: there may be more names, and `refresh` finds them and what the names lead to.
    """

    __slots__ = ("_cookies", "_entries", "is_partial", "recorded_to")

    def __init__(self, pairs: Iterable[tuple[bytes, int]] = ()) -> None:
        cookies = dict(pairs)  # a name that was removed and made again has two; the later one counts
        lowest = min(cookies.values(), default=HASHED_COOKIES)
        self._entries: dict[bytes, HostEntry] = dict.fromkeys(cookies, (0, 0))
        self._cookies = DirectoryCookies.of(cookies.items(), min(lowest, HASHED_COOKIES) - 1)
        self.is_partial = True
        self.recorded_to = ALL  # the names with cookies from this one on are in the log of known inodes

    def unrecorded(self) -> list[tuple[bytes, int]]:
        """Return the names with cookies below `recorded_to`, and move that before them."""
        found = list(self._cookies.pairs(below=self.recorded_to))
        self.recorded_to = self._cookies.following + 1
        return found

    def refresh(self, descriptor: int) -> None:
        """Read the directory of a readable descriptor again."""
        entries = {os.fsencode(entry.name): (entry.inode(), _type_of(entry)) for entry in os.scandir(descriptor)}
        for name in self._entries.keys() - entries.keys():
            self._cookies.remove(name)
        new = [name for name in entries if name not in self._entries]
        if self.is_partial:
            pairs = list(self._cookies.pairs())
            pairs += hashed_cookies(new, [cookie for _, cookie in pairs])
            self._cookies = DirectoryCookies.of(pairs, self._cookies.following)
            self.is_partial = False
            self.recorded_to = ALL
        else:
            for name in new:
                self._cookies.add(name)
        self._entries = entries

    def evict(self) -> bool:
        """Drop all names that would get the same cookies again; return whether others have got some."""
        pairs = list(self._cookies.pairs(below=HASHED_COOKIES))
        self._cookies = DirectoryCookies.of(pairs, self._cookies.following)
        self._entries = {name: self._entries[name] for name, _ in pairs}
        self.is_partial = True
        self.recorded_to = ALL
        return self._cookies.following < HASHED_COOKIES - 1

    def add(self, name: bytes, seen: stat_result) -> None:
        """Add `name`, or give it another inode."""
        if name not in self._entries:
            if self.is_partial:
                return
            self._cookies.add(name)
        self._entries[name] = (seen.st_ino, stat.S_IFMT(seen.st_mode))

    def remove(self, name: bytes) -> None:
        """Remove `name`, if it is there."""
        if self._entries.pop(name, None) is not None:
            self._cookies.remove(name)

    def after(self, cookie: int) -> Iterator[tuple[int, bytes, HostEntry]]:
        """Cookie, name and entry of all entries after `cookie`."""
        for at, name in self._cookies.after(cookie):
            yield at, name, self._entries[name]


def _type_of(entry: os.DirEntry[str]) -> int:
    """The type bits; 0: unknown.  A stat is needed for the types that scandir does not distinguish."""
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    try:
        return stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
    except OSError:
        return 0


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
