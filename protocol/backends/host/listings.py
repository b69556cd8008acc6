"""Listings: the directories that programs list, with the cookies of their entries.

The host has an order of entries of its own, but Python's os module cannot continue in the middle of it.  So the names
are read when a reader begins.  At first each gets a cookie that depends on the name only.  Names that are added later,
through the mount or by the time another reader begins, get lower ones, so a reader does not meet what it adds itself.
`DirectoryEntries.evict` keeps only these: all others get the same cookies again.

This module also runs in containers (`protocol.backends.container.helper`), so it is written for Python 3.6.

Invariant (`check_invariants`): a node of the table is in `_read` if and only if it has `entries` that are complete, or
came from a predecessor; `_read` has at most MOST_READ_DIRECTORIES.  Those of other nodes are what `evict` has left.

Threading: every method is called with the table's lock held.
"""

import os
import stat
from bisect import bisect_left, bisect_right
from typing import Iterable, Iterator, Tuple

from protocol.backends.host.descriptors import Descriptors
from protocol.backends.host.inode_table import HostInode, HostInodeTable
from protocol.linux.portable import HASHED_COOKIES, Handle, hashed_cookies

MOST_READ_DIRECTORIES = 256
_FIRST_COOKIE = 3  # 1 and 2 are "." and ".."
_ALL = 1 << 62  # larger than any cookie
_GAPS_KEPT = 32

Pair = Tuple[bytes, int]  # a name and its cookie
Listed = Tuple[bytes, int, int, int]  # a name, the inode's number, its type (0: unknown), the cookie


class DirectoryEntries:
    """The names of one directory with their cookies; until the first `refresh`, those of `pairs`.

    `is_partial`: there may be more names, and `refresh` finds them and what the names lead to.

    Invariant: `_order` has the negated cookies of `_names`, ascending, so that a new name is appended.  An entry is
    (cookie, the inode's number on the host, type); a name without an entry of its cookie is a gap.
    """

    __slots__ = ("_entries", "_lowest", "_names", "_order", "is_partial", "recorded_to")

    def __init__(self, pairs: "Iterable[Pair]" = ()) -> None:
        self._begin(pairs)

    def _begin(self, pairs: "Iterable[Pair]" = ()) -> None:
        # A name that was removed and made again has two pairs; the later one counts.
        self._set({name: (cookie, 0, 0) for name, cookie in pairs})
        self._lowest = min(HASHED_COOKIES, -self._order[-1] if self._order else HASHED_COOKIES)  # ever given
        self.is_partial = True
        self.recorded_to = _ALL  # the names with cookies from this one on are in the log of known inodes

    def _set(self, entries: "dict[bytes, tuple[int, int, int]]") -> None:
        self._entries = entries
        ordered = sorted((-entry[0], name) for name, entry in entries.items())
        self._order = [order for order, _ in ordered]
        self._names = [name for _, name in ordered]

    def _pairs(self, below: int = _ALL) -> "list[Pair]":
        """The names with cookies below `below`."""
        start = bisect_right(self._order, -below)
        found = zip(self._names[start:], self._order[start:])  # noqa: B905 (newer than Python 3.6)
        return [(name, -order) for name, order in found if self._has(name, -order)]

    def _has(self, name: bytes, cookie: int) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry[0] == cookie

    def unrecorded(self) -> "list[Pair]":
        """Return the names with cookies below `recorded_to`, and move that before them."""
        found = self._pairs(self.recorded_to)
        self.recorded_to = self._lowest
        return found

    def refresh(self, directory: Handle) -> None:
        """Read the directory again: known names keep their cookies, new names come first."""
        with os.scandir(directory.path) as listed:
            found = {entry.name: (entry.inode(), _type_of(entry)) for entry in listed}
        if not self.is_partial and self._lowest - len(found) < _FIRST_COOKIE:
            self._begin()  # after 2**30 new names
        cookies = {name: entry[0] for name, entry in self._entries.items() if name in found}
        new = sorted(name for name in found if name not in cookies)
        if self.is_partial:
            cookies.update(hashed_cookies(new, cookies.values()))
            self.is_partial = False
            self.recorded_to = _ALL
        else:
            self._lowest -= len(new)
            cookies.update((name, self._lowest + at) for at, name in enumerate(new))
        self._set({name: (cookies[name], *entry) for name, entry in found.items()})

    def evict(self) -> bool:
        """Drop all names that would get the same cookies again; return whether others have got some."""
        self._set({name: self._entries[name] for name, _ in self._pairs(HASHED_COOKIES)})
        self.is_partial = True
        self.recorded_to = _ALL
        return self._lowest < HASHED_COOKIES

    def add(self, name: bytes, seen: os.stat_result) -> None:
        """Add `name`, or give it another inode."""
        entry = self._entries.get(name)
        if entry is None:
            if self.is_partial:
                return
            self._lowest -= 1
            self._order.append(-self._lowest)
            self._names.append(name)
        cookie = self._lowest if entry is None else entry[0]
        self._entries[name] = (cookie, seen.st_ino, stat.S_IFMT(seen.st_mode))

    def remove(self, name: bytes) -> None:
        """Remove `name`, if it is there."""
        if self._entries.pop(name, None) is not None and len(self._names) > 2 * len(self._entries) + _GAPS_KEPT:
            self._set(self._entries)

    def after(self, cookie: int) -> "Iterator[tuple[int, bytes, int, int]]":
        """Cookie, name, number on the host and type of all entries after `cookie`; changes between two are seen."""
        order, names = self._order, self._names
        for at in range(bisect_left(order, -cookie) - 1, -1, -1):
            if self._has(names[at], -order[at]):
                _, inode, kind = self._entries[names[at]]
                yield -order[at], names[at], inode, kind


def _type_of(entry: "os.DirEntry[bytes]") -> int:
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


class Listings:
    """Lists directories of `table`, and keeps the entries of those that were read last."""

    def __init__(self, table: HostInodeTable, descriptors: Descriptors) -> None:
        self._table = table
        self._descriptors = descriptors
        self._read: "dict[HostInode, None]" = {}  # those with `entries`, the one read last at the end

    def after(self, directory: HostInode, cookie: int) -> "Iterator[Listed]":
        """Return the entries of a directory after `cookie`.  Reads it when a reader begins."""
        entries = self._entries_of(directory)
        if not cookie or entries.is_partial:
            entries.refresh(self._descriptors.directory(directory))
            if self._table.known is not None:
                self._table.known.listed(directory, entries)
        return self._listed(directory, entries, cookie)

    def _listed(self, directory: HostInode, entries: DirectoryEntries, cookie: int) -> "Iterator[Listed]":
        if cookie < 1:
            yield b".", directory.number, stat.S_IFDIR, 1
        if cookie < 2:
            yield b"..", (directory.parent or directory).number, stat.S_IFDIR, 2
        device, number_of = directory.key[0], self._table.number_of
        for at, name, host_inode, kind in entries.after(cookie):
            yield name, number_of((device, host_inode)), kind, at

    def _entries_of(self, directory: HostInode) -> DirectoryEntries:
        if directory.entries is None:
            directory.entries = DirectoryEntries()
        if directory in self._read:
            del self._read[directory]
        elif len(self._read) >= MOST_READ_DIRECTORIES:
            self._evict(next(iter(self._read)))
        self._read[directory] = None
        entries: DirectoryEntries = directory.entries
        return entries

    def _evict(self, directory: HostInode) -> None:
        entries, known = directory.entries, self._table.known
        self.end(directory)
        if entries.evict():
            directory.entries = entries
            if known is not None:
                known.listed(directory, entries)

    def resume(self, listings: "Iterable[tuple[HostInode, DirectoryEntries]]") -> None:
        """Continue listings of directories that programs have begun with the predecessor."""
        for directory, entries in listings:
            directory.entries = entries
            self._read[directory] = None
            if self._table.known is not None:
                entries.recorded_to = _ALL
                self._table.known.listed(directory, entries)

    def end(self, directory: HostInode) -> None:
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
