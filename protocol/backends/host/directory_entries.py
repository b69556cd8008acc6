"""DirectoryEntries: the entries of one host directory in an order that stays while readers continue from a cookie.

The host has an order of its own, but Python's os module cannot continue in the middle of it.  So the names are read
when a reader begins, and the names that were there before keep their cookies: a second reader does not disturb the
first.  Changes through the mount are added and removed at once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from protocol.directory_cookies import DirectoryCookies

if TYPE_CHECKING:
    from os import stat_result


HostEntry: TypeAlias = tuple[int, int]  # as readdir(3) shows it: the inode's number on the host, its type (0: unknown)


class DirectoryEntries:
    """The names of one directory with their cookies."""

    __slots__ = ("_cookies", "_entries")

    def __init__(self) -> None:
        self._entries: dict[bytes, HostEntry] = {}
        self._cookies: Final = DirectoryCookies(())

    def refresh(self, descriptor: int) -> None:
        """Read the directory of a readable descriptor again."""
        entries = {os.fsencode(entry.name): (entry.inode(), _type_of(entry)) for entry in os.scandir(descriptor)}
        for name in self._entries.keys() - entries.keys():
            self._cookies.remove(name)
        for name in entries:
            if name not in self._entries:
                self._cookies.add(name)
        self._entries = entries

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
