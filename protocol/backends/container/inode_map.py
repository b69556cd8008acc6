"""InodeMap: the inodes that a kernel holds of a volume that is replaced now and then, and the names they were seen by.

A `File` has a number, which is the kernel's for as long as that holds it, and an `inner` number, which is what the
present volume calls the same file.  Until the first replacement the two are equal.

Invariants: a number means one file until its last lookup is forgotten, and none is given twice meanwhile.
`_by_inner` has exactly the files whose `inner` is not 0, each once.  `_at` maps a place to the file seen there last,
and a file's `places` are exactly the keys that lead to it.  Every file but the root has lookups.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import Final, TypeAlias

from protocol.volume import ROOT_INODE

__all__ = ["DentryKey", "File", "InodeMap"]

DentryKey: TypeAlias = tuple[int, bytes]  # the number of a directory, and a name in it
# Numbers that no volume gives: for files whose own number stands for another file here.
_FIRST_SPARE: Final = 1 << 62


class File:
    """One inode that the kernel holds.  `held` counts the lookups that the present volume has counted for it."""

    __slots__ = ("held", "inner", "kind", "lookups", "number", "places")

    def __init__(self, number: int, inner: int, kind: int) -> None:
        self.number = number
        self.inner = inner
        self.kind = kind
        self.lookups = 0
        self.held = 0
        self.places: list[DentryKey] = []  # the one seen last comes last


class InodeMap:
    """The files by number, by the present volume's number, and by place."""

    def __init__(self) -> None:
        self.root: Final = File(ROOT_INODE, ROOT_INODE, stat.S_IFDIR)
        self._by_number = {ROOT_INODE: self.root}
        self._by_inner = {ROOT_INODE: self.root}
        self._at: dict[DentryKey, File] = {}
        self._next_spare = _FIRST_SPARE
        self.get: Final = self._by_number.get

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[File]:
        return iter(tuple(self._by_number.values()))

    def number_of(self, inner: int) -> int:
        """The number of what the present volume calls `inner`; of a file that is not known, what it would get."""
        file = self._by_inner.get(inner)
        if file is not None:
            return file.number
        return inner if inner not in self._by_number else inner ^ _FIRST_SPARE

    def inner_of(self, number: int) -> int:
        """The other way round, for the number of a file that is not held, which lives while it has a name."""
        inner = number & ~_FIRST_SPARE
        return inner if self.number_of(inner) == number else 0

    # -- files come and go ---------------------------------------------------------------------
    def enter(self, inner: int, mode: int) -> File:
        """The file that the present volume calls `inner`, with one lookup more; both here and there."""
        file = self._by_inner.get(inner)
        if file is None:
            file = File(self._free_number(inner), inner, stat.S_IFMT(mode))
            self._by_number[file.number] = self._by_inner[inner] = file
        file.lookups += 1
        file.held += 1
        return file

    def _free_number(self, inner: int) -> int:
        number = self.number_of(inner)
        while number in self._by_number:
            number = self._next_spare
            self._next_spare += 1
        return number

    def forget(self, file: File, count: int) -> bool:
        """Take lookups away; whether that was the last, after which the file is not known any more."""
        file.lookups -= count
        if file.lookups > 0 or file is self.root:
            return False
        del self._by_number[file.number]
        if file.inner:
            del self._by_inner[file.inner]
        for place in file.places:
            del self._at[place]
        return True

    # -- names ---------------------------------------------------------------------------------
    def put(self, file: File, place: DentryKey) -> None:
        """`file` was seen at `place`, which says nothing of its other names; but a directory has only one."""
        at = self._at.get(place)
        if at is file and file.places[-1] is place:
            return
        if at is not None:
            at.places.remove(place)
        if file.kind == stat.S_IFDIR:
            for former in file.places:
                del self._at[former]
            file.places.clear()
        self._at[place] = file
        file.places.append(place)

    def take(self, place: DentryKey) -> File | None:
        """Nothing is at `place` any more; what was, if that is known."""
        file = self._at.pop(place, None)
        if file is not None:
            file.places.remove(place)
        return file

    # -- another volume ------------------------------------------------------------------------
    def detach(self) -> None:
        """The volume is gone: what it called the files means nothing any more."""
        self._by_inner.clear()
        for file in self._by_number.values():
            file.inner = file.held = 0

    def attach(self, file: File, inner: int, held: int) -> bool:
        """The present volume calls `file` `inner`.

        False where it calls another file so, which was there first, and where `file` was forgotten meanwhile.
        """
        if inner in self._by_inner or self._by_number.get(file.number) is not file:
            return False
        file.inner, file.held = inner, held
        self._by_inner[inner] = file
        return True

    def check_invariants(self) -> None:
        """AssertionError where the table contradicts itself."""
        places = {place: file for file in self._by_number.values() for place in file.places}
        assert places == self._at, (places, self._at)
        assert sum(len(file.places) for file in self._by_number.values()) == len(places)
        named = {file.inner: file for file in self._by_number.values() if file.inner}
        assert named == self._by_inner, (named, self._by_inner)
        for number, file in self._by_number.items():
            assert file.number == number
            assert file.lookups > 0 or file is self.root, number
