"""The inode table: which inode of the host a number stands for, and by which names it is reached.

An inode is identified by (st_dev, st_ino).  Its number is st_ino wherever that is free, so that it is the same
each time the kernel asks, after it forgot the inode too: hard links and `git status` go by it.

A node stays in the table while the kernel holds it (lookups), while it is the parent of a node that stays, and
for some time after, among a bounded number of idle ones.

Invariants: `_by_number` and `_by_key` hold the same nodes, but for those of which the host has lost the inode
(`lost`), which have a number only.  `kids` counts the places of nodes in the table whose parent it is.  A node
is in `_idle` if and only if it is in the table, has neither lookups nor kids, and is not the root.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from protocol.volume import ROOT_INODE

if TYPE_CHECKING:
    from os import stat_result

    from protocol.backends.host.scan import Scan

__all__ = ["HostDentry", "HostInode", "HostInodeTable", "Key"]

Key: TypeAlias = tuple[int, int]  # st_dev, st_ino

IDLE_NODES: Final = 8192
_KIND: Final = 0o170000  # S_IFMT as a mask
# Numbers that no file system gives: for inodes of a further device, and for those whose number is taken.
_FURTHER_DEVICES: Final = 1 << 56
_DEVICE_BITS: Final = 48
_FIRST_SPARE: Final = 1 << 61


class HostInode:
    """An inode of the host that the kernel knows, or knew a moment ago.

    `fd`: of a directory an O_PATH descriptor, of a regular file one to read (and with `writable`, to write);
    -1 where none is open.  `pin`: an O_PATH descriptor of what has no name any more; -1.
    `parent` and `name` are the place at which it was seen last, `more` are further places.
    `checked_s` is when a directory's `fd` was last seen to be at its place (a monotonic clock's seconds).
    """

    __slots__ = (
        "checked_s", "fd", "key", "kids", "kind", "lookups", "lost", "more", "name", "number", "parent", "pin",
        "scan", "used", "writable",
    )  # fmt: skip

    def __init__(self, number: int, key: Key, kind: int, parent: HostInode | None, name: bytes) -> None:
        self.number = number
        self.key = key
        self.kind = kind
        self.parent = parent
        self.name = name
        self.more: list[HostDentry] | None = None
        self.lookups = 0
        self.kids = 0
        self.fd = -1
        self.pin = -1
        self.writable = False
        self.used = False
        self.lost = False
        self.checked_s = 0.0
        self.scan: Scan | None = None

    @property
    def is_dir(self) -> bool:
        return self.kind == stat.S_IFDIR

    def is_shown(self, seen: stat_result) -> bool:
        """Whether `seen` is of this inode: or of one to which the host gave the number again, of the same kind."""
        return (seen.st_dev, seen.st_ino) == self.key and seen.st_mode & _KIND == self.kind

    def places(self) -> Iterator[HostDentry]:
        """Where it was seen, the last one first."""
        if self.parent is not None:
            yield self.parent, self.name
        yield from self.more or ()


HostDentry: TypeAlias = tuple[HostInode, bytes]


class HostInodeTable:
    """The nodes by number and by what the host knows them by.  `release` closes what a node has open."""

    def __init__(self, root: stat_result, release: Callable[[HostInode], None]) -> None:
        self.root = HostInode(ROOT_INODE, (root.st_dev, root.st_ino), stat.S_IFDIR, None, b"")
        self._device = root.st_dev
        self._release = release
        self._by_number = {ROOT_INODE: self.root}
        self._by_key = {self.root.key: self.root}
        self._idle: dict[HostInode, None] = {}
        self._devices: list[int] = []
        self._next_spare = _FIRST_SPARE
        self.get: Final = self._by_number.get

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[HostInode]:
        return iter(tuple(self._by_number.values()))

    def at(self, seen: stat_result) -> HostInode | None:
        """The node of an inode that the host showed, if it is known."""
        return self._by_key.get((seen.st_dev, seen.st_ino))

    def enter(self, parent: HostInode, name: bytes, seen: stat_result) -> HostInode:
        """The node of what the host showed as `name` in `parent`."""
        key = (seen.st_dev, seen.st_ino)
        node = self._by_key.get(key)
        if node is not None:
            if node.kind == seen.st_mode & _KIND:
                if node.parent is not parent or node.name != name:
                    self.add_place(node, parent, name)
                return node
            self.lose(node)  # the host gave the number of a removed inode to another one
        node = HostInode(self._free_number(key), key, seen.st_mode & _KIND, parent, name)
        self._by_number[node.number] = self._by_key[key] = node
        self._hold(parent)
        self._idle[node] = None
        if len(self._idle) > IDLE_NODES:
            self._drop(next(iter(self._idle)))
        return node

    def enter_unnamed(self, seen: stat_result) -> HostInode:
        """The node of what the host made without a name."""
        key = (seen.st_dev, seen.st_ino)
        known = self._by_key.get(key)
        if known is not None:
            self.lose(known)
        node = HostInode(self._free_number(key), key, seen.st_mode & _KIND, None, b"")
        self._by_number[node.number] = self._by_key[key] = node
        self._idle[node] = None
        return node

    # -- numbers -----------------------------------------------------------------------------
    def number_of(self, key: Key) -> int:
        """The number that an inode has, or would have: what readdir shows."""
        node = self._by_key.get(key)
        return node.number if node is not None else self._usual_number(key)

    def _usual_number(self, key: Key) -> int:
        device, inode = key
        if device == self._device and ROOT_INODE < inode < _FURTHER_DEVICES:
            return inode
        # A subvolume, say.  The device's place in the order of their discovery makes the number unique.
        if device not in self._devices:
            self._devices.append(device)
        return _FURTHER_DEVICES + (self._devices.index(device) << _DEVICE_BITS) + inode % (1 << _DEVICE_BITS)

    def _free_number(self, key: Key) -> int:
        number = self._usual_number(key)
        if number in self._by_number:
            number = self._next_spare
            self._next_spare += 1
        return number

    # -- lifetime ----------------------------------------------------------------------------
    def look_up(self, node: HostInode) -> None:
        """Add a lookup."""
        if not node.lookups:
            self._idle.pop(node, None)
        node.lookups += 1

    def forget(self, number: int, count: int) -> None:
        """Take lookups away; what has no name goes with the last."""
        node = self._by_number.get(number)
        if node is None:
            return
        node.lookups = max(0, node.lookups - count)
        self._settle(node)

    def _hold(self, node: HostInode) -> None:
        node.kids += 1
        self._idle.pop(node, None)

    def _settle(self, node: HostInode) -> None:
        """Make a node that nothing holds idle, or drop it when it can be reached by no name any more."""
        if node.lookups or node.kids or node is self.root:
            return
        self._release(node)
        if node.parent is None or node.lost:
            self._drop(node)
            return
        self._idle[node] = None
        if len(self._idle) > IDLE_NODES:
            self._drop(next(iter(self._idle)))

    def _drop(self, node: HostInode) -> None:
        self._idle.pop(node, None)
        if self._by_number.pop(node.number, None) is None:
            return
        if self._by_key.get(node.key) is node:
            del self._by_key[node.key]
        self._release(node)
        for parent, _ in tuple(node.places()):
            self._let_go(parent)
        node.parent, node.more = None, None

    def _let_go(self, parent: HostInode) -> None:
        parent.kids -= 1
        self._settle(parent)

    # -- names -------------------------------------------------------------------------------
    def add_place(self, node: HostInode, parent: HostInode, name: bytes) -> None:
        """`node` was seen as `name` in `parent`.  A directory is at one place, other inodes have links."""
        if node is self.root:
            return
        former, place = node.parent, (parent, name)
        if former is None:
            node.parent, node.name = place
            self._hold(parent)
            return
        if node.is_dir:
            node.parent, node.name = place
            self._hold(parent)
            self._let_go(former)
            return
        if node.more is None:
            node.more = []
        if place in node.more:
            node.more.remove(place)
        else:
            self._hold(parent)
        node.more.insert(0, (former, node.name))
        node.parent, node.name = place

    def remove_place(self, node: HostInode, parent: HostInode, name: bytes) -> None:
        """`node` is not `name` in `parent` any more."""
        if node.parent is parent and node.name == name:
            if node.more:
                node.parent, node.name = node.more.pop(0)
            else:
                node.parent, node.name = None, b""
        elif node.more and (parent, name) in node.more:
            node.more.remove((parent, name))
        else:
            return
        self._let_go(parent)
        if node.parent is None:
            self._settle(node)

    def lose(self, node: HostInode) -> None:
        """The host's inode of `node` is gone: whoever still holds the number is told so."""
        if self._by_key.get(node.key) is node:
            del self._by_key[node.key]
        node.lost = True
        self._settle(node)

    def check_invariants(self) -> None:
        """AssertionError where the table contradicts itself."""
        kids: dict[HostInode, int] = {}
        for node in self._by_number.values():
            assert self._by_number[node.number] is node
            assert node.lost or self._by_key[node.key] is node, (node.number, node.name)
            assert node.lookups >= 0
            for parent, _ in node.places():
                kids[parent] = kids.get(parent, 0) + 1
                assert self._by_number.get(parent.number) is parent, (node.name, parent.name)
            idle = not node.lookups and not node.kids and node is not self.root
            assert idle == (node in self._idle), (node.number, node.name, node.lookups, node.kids)
        for node in self._by_number.values():
            assert node.kids == kids.get(node, 0), (node.name, node.kids, kids.get(node, 0))
        assert all(self._by_number[node.number] is node for node in self._by_key.values())
        assert len(self._idle) <= IDLE_NODES
