"""DirectoryEntries: the entries of one host directory in an order that stays while readers continue from a cookie.

The host has an order of its own, but Python's os module cannot continue in the middle of it.  So the names are read
when a reader begins, and the names that were there before keep their cookies: a second reader does not disturb the
first.  Changes through the mount are added and removed at once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Self, TypeAlias

from protocol.directory_cookies import FIRST_COOKIE, DirectoryCookies

if TYPE_CHECKING:
    from os import stat_result


HostEntry: TypeAlias = tuple[int, int]  # as readdir(3) shows it: the inode's number on the host, its type (0: unknown)


class DirectoryEntries:
    """The names of one directory with their cookies."""

    __slots__ = ("_cookies", "_entries", "is_from_log", "recorded_to")

    def __init__(self) -> None:
        self._entries: dict[bytes, HostEntry] = {}
        self._cookies = DirectoryCookies(())
        self.is_from_log = False  # to be refreshed before use
        self.recorded_to = 0  # the cookies before this one are in the log of known inodes

    @classmethod
    def of(cls, pairs: Iterable[tuple[bytes, int]]) -> Self:
        """Return names with the cookies that they had in another process; `refresh` finds what they lead to."""
        made = cls()
        cookies = dict(pairs)  # a name that was removed and made again has two; the later one counts
        made.recorded_to = max(cookies.values(), default=FIRST_COOKIE - 1) + 1
        made._cookies = DirectoryCookies.of(cookies.items(), made.recorded_to)
        made._entries = dict.fromkeys(cookies, (0, 0))
        made.is_from_log = True
        return made

    def unrecorded(self) -> list[tuple[bytes, int]]:
        """Return the names with cookies from `recorded_to` on, and move that behind them."""
        found = [(name, cookie) for cookie, name in self._cookies.after(self.recorded_to - 1)]
        self.recorded_to = self._cookies.following
        return found

    def refresh(self, descriptor: int) -> None:
        """Read the directory of a readable descriptor again."""
        entries = {os.fsencode(entry.name): (entry.inode(), _type_of(entry)) for entry in os.scandir(descriptor)}
        for name in self._entries.keys() - entries.keys():
            self._cookies.remove(name)
        for name in entries:
            if name not in self._entries:
                self._cookies.add(name)
        self._entries = entries
        self.is_from_log = False

    def add(self, name: bytes, seen: stat_result) -> None:
        """Add `name`, or give it another inode."""
        if name not in self._entries:
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
