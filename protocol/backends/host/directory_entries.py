"""DirectoryEntries: the entries of one host directory in an order that stays while readers continue from a cookie.

The host has an order of its own, but Python's os module cannot continue in the middle of it.  So the names are read
when a reader begins.  At first each gets a cookie that depends on the name only.  Names that are added later, through
the mount or by the time another reader begins, get lower ones, so a reader does not meet what it adds itself
(`protocol.directory_cookies`).  `evict` keeps only these: all others get the same cookies again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from protocol.directory_cookies import ALL, DirectoryCookies
from protocol.linux.portable import HASHED_COOKIES, hashed_cookies

if TYPE_CHECKING:
    from os import stat_result


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
