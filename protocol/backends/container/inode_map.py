"""The translations between the kernel and a container: of inode numbers (`InodeMap`), and of ids (`IdMap`).

`InodeMap` has the inodes that a kernel holds while the mount's volume is replaced, and the names they were seen by.  A
`File` has a number, which the kernel keeps while it holds the inode, and an `inner` number, which is the present
volume's for the same file.  Until the first replacement the two are equal.

Invariants: a number means one file until its last lookup is forgotten, and is not reused before.  `_by_inner` has
exactly the files whose `inner` is not 0, each once, and `_renumbered` those whose `inner` is not their number.  `_at`
maps a dentry to the file last seen there, and a file's `dentries` are exactly the keys that lead to it.  Every file but
the root has lookups.

A handover (`ContainerGiving`, `ContainerTaking`) passes the map to a successor, under the same kernel and in the
same run of the container.  Invariants: the predecessor gives the state of the volume that it serves.  If the container
stops meanwhile, `files` and `rest` raise OSError, so the predecessor goes on.  The kernel has numbers of this run only,
so the numbers of the map are those of the volume.

Threading: the serving loop in the predecessor; the successor uses the volume in one thread at a time.

Source of the ids: user_namespaces(7), /proc/PID/uid_map.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from protocol.errors import os_error
from protocol.values import Value
from protocol.volume import ROOT_INODE
from protocol.volume_durability import GivenState, JournalEnd, TakenState

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
        """Whether the kernel has a file's number that differs from the present volume's, or that the volume lacks."""
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
        """The file that the kernel knows by `number` from the predecessor, which the present volume numbers alike."""
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


class _Rest(Value):
    """The rest of the volume's state, and the inodes of the map: number, type bits, lookups, held, dentries."""

    volume: bytes
    inodes: list[tuple[int, int, int, int, list[DentryKey]]]


class ContainerGiving(GivenState):
    """The state `given` of the volume of one run.

    `is_served`: whether that volume is still connected.
    """

    def __init__(self, given: GivenState, run: str, inode_map: InodeMap, is_served: Callable[[], bool]) -> None:
        self.start: JournalEnd = given.start
        self.below = _in_run(run, given.below)
        self._given = given
        self._map = inode_map
        self._is_served = is_served

    def log_fd(self) -> int:
        return self._given.log_fd()

    def position(self) -> JournalEnd:
        return self._given.position()

    def files(self) -> Iterator[tuple[int, int]]:
        self._check()
        for each in self._given.files():
            self._check()  # the loop may have run since the last one
            yield each

    def rest(self) -> bytes:
        self._check()
        files = (file for file in self._map if file is not self._map.root)
        inodes = [(file.number, file.kind, file.lookups, file.held, file.dentries) for file in files]
        return msgspec.msgpack.encode(_Rest(self._given.rest(), inodes))

    def end(self) -> None:
        self._given.end()

    def _check(self) -> None:
        if not self._is_served():
            raise OSError(errno.EIO, "the container stopped during the upgrade, which was given up: try again")


class ContainerTaking(TakenState):
    """The successor's side, over that of the volume."""

    def __init__(self, taken: TakenState, run: str, inode_map: InodeMap) -> None:
        self.below = _in_run(run, taken.below)
        self._taken = taken
        self._map = inode_map

    def read(self, image_fd: int, log_fd: int, start: JournalEnd) -> None:
        self._taken.read(image_fd, log_fd, start)

    def follow(self, end: int) -> None:
        self._taken.follow(end)

    def take_files(self, files: Mapping[int, int]) -> None:
        self._taken.take_files(files)

    def complete(self, rest: bytes) -> None:
        found = msgspec.msgpack.decode(rest, type=_Rest)
        self._taken.complete(found.volume)
        for number, kind, lookups, held, dentries in found.inodes:
            file = self._map.resume(number, kind, lookups, held)
            for dentry in dentries:
                self._map.put(file, dentry)


def _in_run(run: str, below: str) -> str:
    """Identify the directory `below` in the run `run` of a container."""
    return f"container {run}, {below}"


_OVERFLOW_ID: Final = 65534  # the kernel shows this for an unmapped id
_KEEP: Final = 0xFFFFFFFF  # (uid_t) -1: chown(2) keeps the id


@dataclass(frozen=True, slots=True)
class Ids:
    """The ranges (first inside, first outside, count) of users or of groups; the first one that has an id counts."""

    ranges: tuple[tuple[int, int, int], ...]

    @property
    def is_identity(self) -> bool:
        return all(inside == outside for inside, outside, _ in self.ranges)

    def inside(self, outside: int) -> int:
        """The container's id of a host id."""
        for first, start, count in self.ranges:
            if start <= outside < start + count:
                return first + outside - start
        return _OVERFLOW_ID

    def outside(self, inside: int) -> int:
        """The host's id of a container id.  EOVERFLOW if it is not mapped."""
        if inside == _KEEP:
            return inside
        for first, start, count in self.ranges:
            if first <= inside < first + count:
                return start + inside - first
        raise os_error(errno.EOVERFLOW, f"id {inside} is not mapped in the container")


_EVERY_ID: Final = (0, 0, 1 << 32)


@dataclass(frozen=True, slots=True)
class IdMap:
    """The users and groups of a container."""

    users: Ids = Ids((_EVERY_ID,))
    groups: Ids = Ids((_EVERY_ID,))

    @property
    def is_identity(self) -> bool:
        return self.users.is_identity and self.groups.is_identity


IDENTITY: Final = IdMap()


def swapped(one: int, other: int) -> Ids:
    """A map that exchanges two ids and keeps all others."""
    return Ids(((one, other, 1), (other, one, 1), _EVERY_ID))


def parse_map(text: str) -> Ids:
    """The map of /proc/PID/uid_map or gid_map: lines of first inside, first outside, count."""
    rows = [tuple(map(int, line.split())) for line in text.splitlines()]
    return Ids(tuple((row[0], row[1], row[2]) for row in rows))
