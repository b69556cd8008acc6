"""Volumes that break their contract, each in one way."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from protocol.backends.memory import MemoryVolume
from protocol.errors import os_error
from protocol.volume import AttributeChanges


class WritesPastHolesWithJunk(MemoryVolume):
    def write(self, inode: int, offset: int, data: Any, *, kill_privileges: bool = False) -> int:
        size = self.getattr(inode).size
        if offset > size:
            super().write(inode, size, b"?" * min(offset - size, 4096))
        return super().write(inode, offset, data, kill_privileges=kill_privileges)


class KeepsSetuidWhateverIsWritten(MemoryVolume):
    def write(self, inode: int, offset: int, data: Any, *, kill_privileges: bool = False) -> int:
        return super().write(inode, offset, data)


class RenamesOverWhatItMustNotReplace(MemoryVolume):
    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0, *rest: Any) -> None:
        super().rename(parent, name, new_parent, new_name, flags & ~1, *rest)


class SaysEpermForWhatIsMissing(MemoryVolume):
    def lookup(self, parent: int, name: bytes) -> Any:
        try:
            return super().lookup(parent, name)
        except FileNotFoundError:
            raise os_error(errno.EPERM) from None


class ListsWithoutTheDots(MemoryVolume):
    def readdir(self, inode: int, cookie: int) -> Any:
        return (entry for entry in super().readdir(inode, cookie) if entry.name not in (b".", b".."))


class CountsItsCookiesFromWhereItWasAsked(MemoryVolume):
    def readdir(self, inode: int, cookie: int) -> Any:
        for at, entry in enumerate(super().readdir(inode, 0), 1):
            if at > cookie:
                yield entry._replace(cookie=at)


class ForgetsThatItForgets(MemoryVolume):
    def forget(self, inode: int, count: int) -> None:
        del inode, count


class ShrinksNothing(MemoryVolume):
    def setattr(self, inode: int, changes: AttributeChanges) -> Any:
        if changes.size is not None and changes.size < self.getattr(inode).size:
            changes = replace(changes, size=None)
        return super().setattr(inode, changes)


class HasNoQuota(MemoryVolume):
    def __init__(self, _max_bytes: int | None = None, _max_inodes: int | None = None, **options: Any) -> None:
        super().__init__(None, None, **options)


class TakesNamesOfAnyLength(MemoryVolume):
    def mknod(self, parent: int, name: bytes, *rest: Any) -> Any:
        return super().mknod(parent, name[:255], *rest)


class ReplacesXattrsThatMustBeNew(MemoryVolume):
    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        super().setxattr(inode, name, value, 0)


BROKEN: Sequence[type[MemoryVolume]] = [
    WritesPastHolesWithJunk,
    KeepsSetuidWhateverIsWritten,
    RenamesOverWhatItMustNotReplace,
    SaysEpermForWhatIsMissing,
    ListsWithoutTheDots,
    CountsItsCookiesFromWhereItWasAsked,
    ForgetsThatItForgets,
    ShrinksNothing,
    HasNoQuota,
    TakesNamesOfAnyLength,
    ReplacesXattrsThatMustBeNew,
]
