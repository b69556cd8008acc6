"""InodeMap: the inodes that a kernel holds while the mount's volume is replaced, and the names they were seen by.

A `File` has a number, which the kernel keeps while it holds the inode, and an `inner` number, which is the present
volume's for the same file.  Until the first replacement the two are equal.

Invariants: a number means one file until its last lookup is forgotten, and is not reused before.  `_by_inner` has
exactly the files whose `inner` is not 0, each once, and `_renumbered` those whose `inner` is not their number.  `_at`
maps a dentry to the file last seen there, and a file's `dentries` are exactly the keys that lead to it.  Every file but
the root has lookups.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import Final, TypeAlias

from protocol.volume import ROOT_INODE

DentryKey: TypeAlias = tuple[int, bytes]  # a directory's number and a name in it
# Numbers that no file system uses, nor `protocol.linux.portable`, for files whose own number is taken by another file
# here.  Numbers from `_END` on are those of snapshots (`protocol.adapters.snapshot_directory`).
_FIRST_SPARE: Final = 1 << 59
_END: Final = 1 << 62


class File:
    """One inode that the kernel holds.  `held` is the lookup count that the present volume has for it."""

    __slots__ = ("dentries", "held", "inner", "kind", "lookups", "number")

    def __init__(self, number: int, inner: int, kind: int) -> None:
        self.number = number
        self.inner = inner
        self.kind = kind
        self.lookups = 0
        self.held = 0
        self.dentries: list[DentryKey] = []  # the last seen one last


class InodeMap:
    """The files by number, by the present volume's number, and by dentry."""

    def __init__(self) -> None:
        self.root: Final = File(ROOT_INODE, ROOT_INODE, stat.S_IFDIR)
        self._by_number = {ROOT_INODE: self.root}
        self._by_inner = {ROOT_INODE: self.root}
        self._renumbered: set[File] = set()
        self._at: dict[DentryKey, File] = {}
        self._next_spare = _FIRST_SPARE
        self.get: Final = self._by_number.get

    def __iter__(self) -> Iterator[File]:
        return iter(tuple(self._by_number.values()))

    def number_of(self, inner: int) -> int:
        """The number of the present volume's inode `inner`; for an unknown file, the number that it would get."""
        file = self._by_inner.get(inner)
        if file is not None:
            return file.number
        return inner if inner not in self._by_number else inner ^ _FIRST_SPARE

    def inner_of(self, number: int) -> int:
        """The present volume's number for the number of a file that the kernel does not hold; 0 for none."""
        inner = number & ~_FIRST_SPARE
        return inner if self.number_of(inner) == number else 0

    @property
    def is_renumbered(self) -> bool:
        """Whether the kernel holds a file by another number than the present volume's, or one that this lacks."""
        return bool(self._renumbered)

    def misnumbered(self) -> list[File]:
        """The files that got another number than the present volume's while that was taken, and it is free now."""
        return [file for file in self._renumbered if file.inner and file.inner not in self._by_number]

    # -- lookups ---------------------------------------------------------------------
    def enter(self, inner: int, mode: int) -> File:
        """The file of the present volume's inode `inner`, with one more lookup, here and in the volume."""
        file = self._by_inner.get(inner)
        if file is None:
            file = File(self._free_number(inner), inner, stat.S_IFMT(mode))
            self._by_number[file.number] = self._by_inner[inner] = file
            if file.number != inner:
                self._renumbered.add(file)
        file.lookups += 1
        file.held += 1
        return file

    def resume(self, number: int, kind: int, lookups: int, held: int) -> File:
        """The file that the kernel knows by `number` from another process, which the present volume numbers alike."""
        file = self._by_number.get(number)
        if file is None:
            file = self._by_number[number] = self._by_inner[number] = File(number, number, kind)
            file.lookups, file.held = lookups, held
        return file

    def _free_number(self, inner: int) -> int:
        number = self.number_of(inner)
        while number in self._by_number:
            number = self._next_spare
            self._next_spare += 1
        return number

    def forget(self, file: File, count: int) -> bool:
        """Subtract lookups.  Returns whether none is left, which removes the file from the map."""
        file.lookups -= count
        if file.lookups > 0 or file is self.root:
            return False
        del self._by_number[file.number]
        self._renumbered.discard(file)
        if file.inner:
            del self._by_inner[file.inner]
        for dentry in file.dentries:
            del self._at[dentry]
        return True

    # -- names ---------------------------------------------------------------------------------
    def put(self, file: File, dentry: DentryKey) -> None:
        """Record that `file` was seen at `dentry`.  A directory has one name; other files keep their other names."""
        at = self._at.get(dentry)
        if at is file and file.dentries[-1] is dentry:
            return
        if at is not None:
            at.dentries.remove(dentry)
        if file.kind == stat.S_IFDIR:
            for former in file.dentries:
                del self._at[former]
            file.dentries.clear()
        self._at[dentry] = file
        file.dentries.append(dentry)

    def take(self, dentry: DentryKey) -> File | None:
        """Record that `dentry` was removed; return the file that was there, if known."""
        file = self._at.pop(dentry, None)
        if file is not None:
            file.dentries.remove(dentry)
        return file

    # -- another volume ------------------------------------------------------------------------
    def detach(self) -> dict[int, File]:
        """Drop the inner numbers, because the volume is gone.  Return the files by these numbers."""
        before, self._by_inner = self._by_inner, {}
        for file in self._by_number.values():
            file.inner = file.held = 0
        self._renumbered = set(self._by_number.values())
        return before

    def attach(self, file: File, inner: int, held: int) -> bool:
        """Record that `inner` is the present volume's number of `file`.

        Returns False if another file has that number already, or if `file` was forgotten meanwhile.
        """
        if inner in self._by_inner or self._by_number.get(file.number) is not file:
            return False
        file.inner, file.held = inner, held
        self._by_inner[inner] = file
        if file.number == inner:
            self._renumbered.discard(file)
        else:
            self._renumbered.add(file)
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        dentries = {dentry: file for file in self._by_number.values() for dentry in file.dentries}
        assert dentries == self._at, (dentries, self._at)
        assert sum(len(file.dentries) for file in self._by_number.values()) == len(dentries)
        named = {file.inner: file for file in self._by_number.values() if file.inner}
        assert named == self._by_inner, (named, self._by_inner)
        assert self._renumbered == {file for file in self._by_number.values() if file.inner != file.number}
        for number, file in self._by_number.items():
            assert file.number == number < _END
            assert file.lookups > 0 or file is self.root, number
