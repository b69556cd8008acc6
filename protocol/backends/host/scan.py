"""Scan: the entries of one directory in an order that stays, while whoever lists it goes on from a cookie.

The host has an order of its own, but Python's os cannot go on in the middle of it.  So the names are read when a
scan begins, and the cookies of those that were there before stay what they were: a second reader who begins
anew does not disturb the first.  What is changed through the mount meanwhile is entered and taken out at once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from protocol.directory_cookies import DirectoryCookies

if TYPE_CHECKING:
    from os import stat_result

__all__ = ["HostEntry", "Scan"]


class HostEntry(NamedTuple):
    """What a directory says of a name: the inode's number on the host, and its type (0: it does not say)."""

    inode: int
    kind: int


class Scan:
    """The names of one directory with their cookies."""

    __slots__ = ("_entries", "_listing")

    def __init__(self) -> None:
        self._entries: dict[bytes, HostEntry] = {}
        self._listing: Final = DirectoryCookies(())

    def refresh(self, descriptor: int) -> None:
        """Read the directory of a readable descriptor anew."""
        entries = {os.fsencode(entry.name): HostEntry(entry.inode(), _kind(entry)) for entry in os.scandir(descriptor)}
        for name in self._entries.keys() - entries.keys():
            self._listing.remove(name)
        for name in entries:
            if name not in self._entries:
                self._listing.add(name)
        self._entries = entries

    def add(self, name: bytes, seen: stat_result) -> None:
        """`name` was made, or stands for something else now."""
        if name not in self._entries:
            self._listing.add(name)
        self._entries[name] = HostEntry(seen.st_ino, stat.S_IFMT(seen.st_mode))

    def remove(self, name: bytes) -> None:
        """`name` was removed, if it was here."""
        if self._entries.pop(name, None) is not None:
            self._listing.remove(name)

    def after(self, cookie: int) -> Iterator[tuple[int, bytes, HostEntry]]:
        """Cookie, name and entry of all that come after `cookie`."""
        for at, name in self._listing.after(cookie):
            yield at, name, self._entries[name]


def _kind(entry: os.DirEntry[str]) -> int:
    """The type bits.  What is neither of the three kinds that the directory tells apart has to be asked."""
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
