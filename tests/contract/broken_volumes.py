"""Volumes that break their contract, each in one way."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from protocol.backends.memory import MemoryVolume
from protocol.errors import os_error
from protocol.volume import AttributeChanges


class BrokenVolume:
    """A memory volume; a subclass replaces single calls."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.memory_volume = MemoryVolume(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory_volume, name)


class WritesPastHolesWithJunk(BrokenVolume):
    def write(self, inode: int, offset: int, data: Any, *, kill_privileges: bool = False) -> int:
        size = self.getattr(inode).size
        if offset > size:
            self.memory_volume.write(inode, size, b"?" * min(offset - size, 4096))
        return self.memory_volume.write(inode, offset, data, kill_privileges=kill_privileges)


class KeepsSetuidWhateverIsWritten(BrokenVolume):
    def write(self, inode: int, offset: int, data: Any, *, kill_privileges: bool = False) -> int:
        return self.memory_volume.write(inode, offset, data)


class RenamesOverWhatItMustNotReplace(BrokenVolume):
    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0, *rest: Any) -> None:
        self.memory_volume.rename(parent, name, new_parent, new_name, flags & ~1, *rest)


class SaysEpermForWhatIsMissing(BrokenVolume):
    def lookup(self, parent: int, name: bytes) -> Any:
        try:
            return self.memory_volume.lookup(parent, name)
        except FileNotFoundError:
            raise os_error(errno.EPERM) from None


class ListsWithoutTheDots(BrokenVolume):
    def readdir(self, inode: int, cookie: int) -> Any:
        return (entry for entry in self.memory_volume.readdir(inode, cookie) if entry.name not in (b".", b".."))


class CountsItsCookiesFromWhereItWasAsked(BrokenVolume):
    def readdir(self, inode: int, cookie: int) -> Any:
        for at, entry in enumerate(self.memory_volume.readdir(inode, 0), 1):
            if at > cookie:
                yield entry._replace(cookie=at)


class ListsNewNamesLast(BrokenVolume):
    def readdir(self, inode: int, cookie: int) -> Any:
        found = sorted(self.memory_volume.readdir(inode, 0), key=lambda entry: (entry.cookie > 2, entry.inode))
        for entry in found:
            at = entry.cookie if entry.cookie <= 2 else entry.inode + 2
            if at > cookie:
                yield entry._replace(cookie=at)


class ForgetsThatItForgets(BrokenVolume):
    def forget(self, inode: int, count: int) -> None:
        del inode, count


class ShrinksNothing(BrokenVolume):
    def setattr(self, inode: int, changes: AttributeChanges) -> Any:
        if changes.size is not None and changes.size < self.getattr(inode).size:
            changes = changes._replace(size=None)
        return self.memory_volume.setattr(inode, changes)


class HasNoQuota(BrokenVolume):
    def __init__(self, _max_bytes: int | None = None, _max_inodes: int | None = None, **options: Any) -> None:
        super().__init__(None, None, **options)


class TakesNamesOfAnyLength(BrokenVolume):
    def mknod(self, parent: int, name: bytes, *rest: Any) -> Any:
        return self.memory_volume.mknod(parent, name[:255], *rest)


class ReplacesXattrsThatMustBeNew(BrokenVolume):
    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        self.memory_volume.setxattr(inode, name, value, 0)


BROKEN: Sequence[type[BrokenVolume]] = [
    WritesPastHolesWithJunk,
    KeepsSetuidWhateverIsWritten,
    RenamesOverWhatItMustNotReplace,
    SaysEpermForWhatIsMissing,
    ListsWithoutTheDots,
    CountsItsCookiesFromWhereItWasAsked,
    ListsNewNamesLast,
    ForgetsThatItForgets,
    ShrinksNothing,
    HasNoQuota,
    TakesNamesOfAnyLength,
    ReplacesXattrsThatMustBeNew,
]
