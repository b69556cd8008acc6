"""HostInodeTable: maps inode numbers to inodes of the host, and to the names that lead to them.

The host identifies an inode by (st_dev, st_ino).  Its number is st_ino if that is free, so the kernel sees the same
number again after it forgot the inode: hard links and `git status` depend on that.

A node stays in the table while the kernel has lookups of it, while it is the parent of a node in the table, and for
some time after that, among a bounded number of idle nodes.

This module also runs in containers (`protocol.backends.container.helper`), so it is written for Python 3.6.

Threading: every method is called with `lock` held.

Invariants:
- `_by_number` and `_by_key` hold the same nodes, except for `lost` nodes (the host's inode is gone), which have only a
  number.
- `children` of a node counts the dentries of nodes in the table whose parent it is.
- A node is in `_idle` if and only if it is in the table, has no lookups and no children, and is not the root.
"""

import os
import stat
import threading
from typing import Any, Callable, Iterator, Tuple

from protocol.linux.portable import Handle, InodeNumbers

ROOT_INODE = 1
IDLE_NODES = 8192

Key = Tuple[int, int]  # st_dev, st_ino
HostDentry = Tuple["HostInode", bytes]


class HostInode:
    """An inode of the host that the kernel knows, or knew a moment ago.

    `handle`: for a directory an O_PATH descriptor, for a regular file one to read (with `writable`, also to write);
    else None.  `pin`: an O_PATH descriptor of an inode without a name; else None.
    `parent` and `name` are the dentry that was seen last, `more_dentries` are others.
    `checked_s` is when a directory's `handle` was last found at its dentry (time.monotonic()).
    `entries` are those of a directory that is listed (`protocol.backends.host.listings`).
    """

    __slots__ = (
        "checked_s", "children", "entries", "handle", "is_recorded", "key", "kind", "lookups", "lost", "more_dentries",
        "name", "number", "parent", "pin", "used", "writable",
    )  # fmt: skip

    def __init__(self, number: int, key: Key, kind: int, parent: "HostInode | None" = None, name: bytes = b"") -> None:
        self.number = number
        self.key = key
        self.kind = kind
        self.parent = parent
        self.name = name
        self.more_dentries: "list[HostDentry] | None" = None
        self.lookups = 0
        self.children = 0
        self.handle: "Handle | None" = None
        self.pin: "Handle | None" = None
        self.writable = False
        self.used = False
        self.lost = False
        self.is_recorded = False  # see `protocol.backends.host.known_inodes`
        self.checked_s = 0.0
        self.entries: Any = None

    @property
    def is_dir(self) -> bool:
        return self.kind == stat.S_IFDIR

    def is_shown(self, seen: os.stat_result) -> bool:
        """Whether `seen` is of this inode, or of a later inode of the same type that got its number."""
        return (seen.st_dev, seen.st_ino) == self.key and stat.S_IFMT(seen.st_mode) == self.kind

    def dentries(self) -> "Iterator[HostDentry]":
        """The dentries at which it was seen, the last one first."""
        if self.parent is not None:
            yield self.parent, self.name
        yield from self.more_dentries or ()


class HostInodeTable:
    """The nodes by number and by the host's key.  `release` closes the descriptors of a node."""

    def __init__(self, root: os.stat_result, release: "Callable[[HostInode], None]") -> None:
        self.lock = threading.RLock()
        self.root = HostInode(ROOT_INODE, (root.st_dev, root.st_ino), stat.S_IFDIR)
        self._numbers = InodeNumbers(root.st_dev)
        self._release = release
        self._by_number = {ROOT_INODE: self.root}
        self._by_key = {self.root.key: self.root}
        self._idle: "dict[HostInode, None]" = {}
        self.known: Any = None  # a `KnownInodes` has each inode that the kernel looked up
        self.get = self._by_number.get

    def __iter__(self) -> "Iterator[HostInode]":
        return iter(tuple(self._by_number.values()))

    def at(self, seen: os.stat_result) -> "HostInode | None":
        """The node of an inode with this stat data, if it is in the table."""
        return self._by_key.get((seen.st_dev, seen.st_ino))

    def by_key(self, key: Key) -> "HostInode | None":
        """The node of an inode of the host, if it is in the table."""
        return self._by_key.get(key)

    def enter(self, parent: HostInode, name: bytes, seen: os.stat_result) -> HostInode:
        """The node of `name` in `parent`, whose stat data is `seen`; it is added if it is new."""
        node = self.at(seen)
        if node is None or node.kind != stat.S_IFMT(seen.st_mode):
            return self.enter_new(parent, name, seen)
        if node.parent is not parent or node.name != name:
            self.add_dentry(node, parent, name)
        return node

    def enter_new(self, parent: "HostInode | None", name: bytes, seen: os.stat_result) -> HostInode:
        """Add a node for a new inode, which is `name` in `parent`, or has no name."""
        key = (seen.st_dev, seen.st_ino)
        earlier = self._by_key.get(key)
        if earlier is not None:
            self.lose(earlier)  # the host reused the number of an inode that is gone
        node = HostInode(self._numbers.free(key, self._by_number), key, stat.S_IFMT(seen.st_mode), parent, name)
        self._by_number[node.number] = self._by_key[key] = node
        if parent is not None:
            self._add_child(parent)
        self._make_idle(node)
        return node

    # -- numbers -----------------------------------------------------------------------------
    def number_of(self, key: Key) -> int:
        """The number that an inode has, or would get; for readdir."""
        node = self._by_key.get(key)
        return node.number if node is not None else self._numbers.usual(key)

    # -- lifetime ----------------------------------------------------------------------------
    def look_up(self, node: HostInode) -> None:
        """Count a lookup."""
        if not node.lookups:
            self._idle.pop(node, None)
        node.lookups += 1
        if self.known is not None and not node.is_recorded:
            self.known.record(node)

    def resume(self, number: int, key: Key, kind: int) -> HostInode:
        """Add a node that the kernel knows by `number` from the predecessor; it has no name yet."""
        self._numbers.resume(key, number)
        node = self._by_number[number] = self._by_key[key] = HostInode(number, key, kind)
        node.lookups = 1
        return node

    def resume_lost(self, number: int, key: Key, kind: int) -> None:
        """Add a node as `resume` does whose inode is gone: no other gets its number until the kernel forgets it."""
        self._numbers.resume(key, number)
        node = self._by_number.get(number)
        if node is None:
            node = self._by_number[number] = HostInode(number, key, kind)
        node.lookups, node.lost = 1, True
        if self.known is not None:
            self.known.record(node)

    def forget(self, number: int, count: int) -> None:
        """Subtract lookups; a node without a name is dropped with the last one."""
        node = self._by_number.get(number)
        if node is None:
            return
        node.lookups = max(0, node.lookups - count)
        self._release_if_unused(node)

    def _add_child(self, node: HostInode) -> None:
        node.children += 1
        self._idle.pop(node, None)

    def _make_idle(self, node: HostInode) -> None:
        self._idle[node] = None
        if len(self._idle) > IDLE_NODES:
            self._drop(next(iter(self._idle)))

    def _release_if_unused(self, node: HostInode) -> None:
        """Make a node idle that nothing holds, or drop it if no name leads to it."""
        if node.lookups or node.children or node is self.root:
            return
        self._release(node)
        if node.parent is None or node.lost:
            self._drop(node)
        else:
            self._make_idle(node)

    def _drop(self, node: HostInode) -> None:
        self._idle.pop(node, None)
        if self._by_number.pop(node.number, None) is None:
            return
        if self._by_key.get(node.key) is node:
            del self._by_key[node.key]
        self._unrecord(node)
        self._release(node)
        for parent, _ in tuple(node.dentries()):
            self._drop_child(parent)
        node.parent, node.more_dentries = None, None

    def _drop_child(self, parent: HostInode) -> None:
        parent.children -= 1
        self._release_if_unused(parent)

    def path(self, node: HostInode) -> "bytes | None":
        """The path of the dentry at which `node` was seen last; None if it has no name."""
        names = []
        while node is not self.root:
            if node.parent is None:
                return None
            names.append(node.name)
            node = node.parent
        return b"/".join(reversed(names))

    # -- names -------------------------------------------------------------------------------
    def add_dentry(self, node: HostInode, parent: HostInode, name: bytes) -> None:
        """Record that `node` is `name` in `parent`.  A directory has one dentry, other inodes may have several."""
        if node is self.root:
            return
        former, dentry = node.parent, (parent, name)
        if former is not None and not node.is_dir:
            if node.more_dentries is None:
                node.more_dentries = []
            if dentry in node.more_dentries:
                node.more_dentries.remove(dentry)
                parent.children -= 1  # counted again below
            node.more_dentries.insert(0, (former, node.name))
        node.parent, node.name = dentry
        self._add_child(parent)
        self._record_names(node)
        if former is not None and node.is_dir:
            self._drop_child(former)

    def remove_dentry(self, node: HostInode, parent: HostInode, name: bytes) -> None:
        """Record that `node` is no longer `name` in `parent`."""
        if node.parent is parent and node.name == name:
            if node.more_dentries:
                node.parent, node.name = node.more_dentries.pop(0)
            else:
                node.parent, node.name = None, b""
        elif node.more_dentries and (parent, name) in node.more_dentries:
            node.more_dentries.remove((parent, name))
        else:
            return
        self._record_names(node)
        self._drop_child(parent)
        if node.parent is None:
            self._release_if_unused(node)

    def move_dentry(self, node: "HostInode | None", old: HostDentry, new: HostDentry) -> None:
        """Record that `node`, if it is known, was renamed from `old` to `new`."""
        if node is not None:
            self.add_dentry(node, *new)
            if old != new:
                self.remove_dentry(node, *old)

    def lose(self, node: HostInode) -> None:
        """Record that the host's inode of `node` is gone: operations on its number fail with ESTALE."""
        if self._by_key.get(node.key) is node:
            del self._by_key[node.key]
        node.lost = True
        self._record_names(node)
        self._release_if_unused(node)

    def _unrecord(self, node: HostInode) -> None:
        if self.known is not None and node.is_recorded:
            self.known.remove(node)

    def _record_names(self, node: HostInode) -> None:
        if self.known is not None and node.is_recorded:
            self.known.record(node)

    def check_invariants(self) -> None:
        """AssertionError if the table contradicts itself."""
        children: "dict[HostInode, int]" = {}
        for node in self._by_number.values():
            assert self._by_number[node.number] is node
            assert node.lost or self._by_key[node.key] is node, (node.number, node.name)
            assert node.lookups >= 0
            for parent, _ in node.dentries():
                children[parent] = children.get(parent, 0) + 1
                assert self._by_number.get(parent.number) is parent, (node.name, parent.name)
            idle = not node.lookups and not node.children and node is not self.root
            assert idle == (node in self._idle), (node.number, node.name, node.lookups, node.children)
        for node in self._by_number.values():
            assert node.children == children.get(node, 0), (node.name, node.children, children.get(node, 0))
        assert all(self._by_number[node.number] is node for node in self._by_key.values())
        assert len(self._idle) <= IDLE_NODES
