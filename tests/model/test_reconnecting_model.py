"""ReconnectingVolume against a model: each number that the kernel holds, and the names by which it saw that file.

The volume beneath is replaced now and then by another one, in which files have other numbers, are gone, are new, or
are of another kind.  What the model says of a number then: the file at a place where it was seen, if it is of the same
kind and no other number was there first; else ESTALE, for as long as it is held.

Or the volume beneath is the same one, which was only not reached for a while.  Then every number means what it meant,
and the volume beneath has no lookups but those of the kernel.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import trio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.backends.container.reconnecting_volume import ReconnectingVolume
from protocol.backends.memory import MemoryVolume
from protocol.volume import RENAME_EXCHANGE, ROOT_INODE, Caller

T = TypeVar("T")
ME = Caller(0, 0)
NAMES = st.sampled_from([b"a", b"b", b"c", b"d"])
DIRECTORY, FILE = stat.S_IFDIR, stat.S_IFREG
Path = tuple[bytes, ...]
PATHS = st.lists(NAMES, max_size=2).map(tuple)


def asked(call: Callable[..., T], *args: Any) -> tuple[T | None, int]:
    """What a call answers, and its errno: one of both."""
    try:
        return call(*args), 0
    except OSError as error:
        return None, error.errno or errno.EIO


class Owned:
    """A volume with a helper: it says which inodes it has lookups of, as `AgentVolume` does."""

    def __init__(self, beneath: MemoryVolume) -> None:
        self._beneath = beneath

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beneath, name)

    def known_inodes(self) -> Iterator[tuple[int, int, int, int, list[tuple[int, bytes]]]]:
        for inode, lookups in self._beneath.lookup_counts().items():
            if inode != ROOT_INODE:
                yield inode, stat.S_IFMT(self._beneath.getattr(inode).mode), 1, lookups, []

    def answering(self, unique: int) -> None:
        pass


class Replaced(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.volume = ReconnectingVolume()
        self.beneath = MemoryVolume(1 << 20)
        self.held: dict[int, int] = {}  # lookups by number
        self.identity: dict[int, int | None] = {}  # number -> inode of `beneath`; None: stale
        self.connected = False
        self.helpers = 0

    def _connect(self, beneath: MemoryVolume, *, is_same: bool = False) -> None:
        self.helpers += not is_same
        self.connected, self.beneath = True, beneath
        trio.run(self.volume.connect, Owned(beneath), "", b"%d" % self.helpers)

    # -- what the kernel does ----------------------------------------------------------------
    def _hold(self, number: int, inode: int) -> None:
        known = self.identity.get(number)
        assert known is None or known == inode, "a number means two files"
        assert number not in self.identity or known is not None, "a stale number was given again"
        others = [other for other, seen in self.identity.items() if seen == inode and other != number]
        assert not others, "a file has two numbers"
        self.held[number] = self.held.get(number, 0) + 1
        self.identity[number] = inode

    def _walk(self, path: Path) -> tuple[int, int] | None:
        """The number and the inode at `path`, looked up as a kernel does; None where there is none."""
        number = inode = ROOT_INODE
        for name in path:
            there, code = asked(self.beneath.lookup, inode, name)
            here, our_code = asked(self.volume.lookup, number, name)
            assert our_code == code
            if there is None or here is None:
                return None
            inode, number = there.inode, here.inode
            self.beneath.forget(inode, 1)
            self._hold(number, inode)
        return number, inode

    @initialize()
    def connect_first(self) -> None:
        self._connect(self.beneath)

    @precondition(lambda self: self.connected)
    @rule(path=PATHS)
    def look_up(self, path: Path) -> None:
        self._walk(path)

    @precondition(lambda self: self.connected)
    @rule(path=PATHS, name=NAMES, kind=st.sampled_from([DIRECTORY, FILE]))
    def make(self, path: Path, name: bytes, kind: int) -> None:
        found = self._walk(path)
        if found is None:
            return
        if kind == DIRECTORY:
            made, code = asked(self.volume.mkdir, found[0], name, 0o755, ME)
        else:
            made, code = asked(self.volume.mknod, found[0], name, FILE | 0o644, 0, ME)
        assert code in {0, errno.EEXIST, errno.ENOTDIR}
        if made is None:
            return
        inode = self.beneath.lookup(found[1], name).inode
        self.beneath.forget(inode, 1)
        self._hold(made.inode, inode)

    @precondition(lambda self: self.connected)
    @rule(path=PATHS, name=NAMES, new_path=PATHS, new_name=NAMES)
    def link(self, path: Path, name: bytes, new_path: Path, new_name: bytes) -> None:
        found, directory = self._walk((*path, name)), self._walk(new_path)
        if found is None or directory is None:
            return
        made, code = asked(self.volume.link, found[0], directory[0], new_name)
        assert code in {0, errno.EEXIST, errno.ENOTDIR, errno.EPERM}
        if made is not None:
            assert made.inode == found[0]
            self._hold(made.inode, found[1])

    @precondition(lambda self: self.connected)
    @rule(path=PATHS, name=NAMES)
    def remove(self, path: Path, name: bytes) -> None:
        directory = self._walk(path)
        if directory is None:
            return
        for call in (self.volume.unlink, self.volume.rmdir):
            _, code = asked(call, directory[0], name)
            assert code in {0, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY}

    @precondition(lambda self: self.connected)
    @rule(path=PATHS, name=NAMES, new_path=PATHS, new_name=NAMES, flags=st.sampled_from([0, RENAME_EXCHANGE]))
    def rename(self, path: Path, name: bytes, new_path: Path, new_name: bytes, flags: int) -> None:
        old, new = self._walk(path), self._walk(new_path)
        moved = self._walk((*path, name))
        if old is None or new is None or moved is None:
            return
        source, target = (*path, name), (*new_path, new_name)
        if source[: len(target)] == target or target[: len(source)] == source:
            return  # into itself: the kernel refuses that before it asks
        _, code = asked(self.volume.rename, old[0], name, new[0], new_name, flags)
        assert code in {0, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.EINVAL}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        # Children first, as a kernel does, whose names hold their directories.
        number = data.draw(st.sampled_from(sorted(self.held)))
        count = data.draw(st.integers(1, self.held[number]))
        if count == self.held[number] and self._is_a_parent(number):
            return
        self.volume.forget(number, count)
        self.held[number] -= count
        if not self.held[number]:
            del self.held[number], self.identity[number]

    def _is_a_parent(self, number: int) -> bool:
        return any(place[0] == number for file in self.volume._map for place in file.dentries)

    # -- the volume beneath is replaced --------------------------------------------------------
    @precondition(lambda self: self.connected)
    @rule()
    def lose(self) -> None:
        told = self.volume.disconnect()
        self.connected = False
        assert {change.inode for change in told.inodes} == {ROOT_INODE, *self.held}

    @precondition(lambda self: not self.connected)
    @rule(
        kept=st.sets(st.tuples(NAMES, NAMES), max_size=6),
        kinds=st.dictionaries(NAMES, st.sampled_from([DIRECTORY, FILE]), max_size=4),
        shift=st.integers(0, 5),
    )
    def find_another(self, kept: set[tuple[bytes, bytes]], kinds: dict[bytes, int], shift: int) -> None:
        fresh = MemoryVolume(1 << 20)
        for number in range(shift):
            fresh.mknod(ROOT_INODE, b"filler%d" % number, FILE | 0o644, 0, ME)
        for name, kind in kinds.items():
            if kind == FILE:
                fresh.mknod(ROOT_INODE, name, FILE | 0o644, 0, ME)
                continue
            directory = fresh.mkdir(ROOT_INODE, name, 0o755, ME).inode
            for below in sorted(below for above, below in kept if above == name):
                fresh.mknod(directory, below, FILE | 0o644, 0, ME)
        places = {file.number: (file.kind, list(file.dentries)) for file in self.volume._map}

        self._connect(fresh)

        for number in self.held:
            self.identity[number] = self._now(number, *places[number])
        served = [inode for inode in self.identity.values() if inode is not None]
        assert len(served) == len(set(served))

    @precondition(lambda self: not self.connected)
    @rule(paths=st.lists(st.tuples(NAMES, NAMES), max_size=4))
    def find_the_same_again(self, paths: list[tuple[bytes, bytes]]) -> None:
        for first, second in paths:  # lookups whose answers were lost
            found, _ = asked(self.beneath.lookup, ROOT_INODE, first)
            if found is not None:
                asked(self.beneath.lookup, found.inode, second)
        self._connect(self.beneath, is_same=True)
        known = {inode for inode in self.identity.values() if inode is not None}
        assert set(self.beneath.lookup_counts()) == {ROOT_INODE, *known}

    def _now(self, number: int, kind: int, seen: list[tuple[int, bytes]]) -> int | None:
        """What a number stands for: looked at from outside, and it must be at one of its places, of its kind."""
        shown, code = asked(self.volume.getattr, number)
        assert code in {0, errno.ESTALE}
        if shown is None:
            return None
        assert shown.inode == number
        assert stat.S_IFMT(shown.mode) == kind
        found = [asked(self.volume.lookup, parent, name)[0] for parent, name in seen]
        at = [one.inode for one in found if one is not None]
        for one in at:
            self.volume.forget(one, 1)
        assert number in at
        file = next(one for one in self.volume._map if one.number == number)
        return file.inner

    @invariant()
    def what_is_held_is_what_it_was(self) -> None:
        self.volume.check_invariants()
        for number, inode in self.identity.items():
            shown, code = asked(self.volume.getattr, number)
            if not self.connected:
                assert code == errno.EIO
            elif inode is None:
                assert code == errno.ESTALE
            else:
                assert shown is not None
                assert shown.inode == number
                assert stat.S_IFMT(shown.mode) == stat.S_IFMT(self.beneath.getattr(inode).mode)


TestReplaced = Replaced.TestCase
