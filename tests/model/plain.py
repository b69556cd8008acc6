"""A plain model of a volume: nodes that hold bytes and dicts, copied whole for every snapshot.

Nothing here is clever, so that it can be believed.  A node's `number` is the inode number that the real
volume gave it; `orphans` are nodes without names that somebody has open.
"""

from __future__ import annotations

import copy
import errno
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from protocol.errors import os_error
from protocol.volume import RENAME_EXCHANGE, RENAME_NOREPLACE

PAGE = 4096


@dataclass(eq=False)
class Node:
    number: int
    mode: int
    mtime: int
    ctime: int
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    target: bytes = b""
    data: bytes = b""
    written: frozenset[int] = frozenset()
    reserved: frozenset[int] = frozenset()
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    entries: dict[bytes, Node] = field(default_factory=dict)

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def pages(self) -> int:
        return len(self.written) + len(self.reserved)

    @property
    def size(self) -> int:
        return len(self.data) if self.is_file else len(self.target)

    @property
    def is_met(self) -> bool:
        """Whether the number is known."""
        return True

    def renumber(self, number: int) -> None:
        self.number = number

    def __deepcopy__(self, memo: dict[int, Node]) -> Node:
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.xattrs = dict(self.xattrs)
        twin.entries = {name: copy.deepcopy(node, memo) for name, node in self.entries.items()}
        return twin


def page_up(offset: int) -> int:
    return -(-offset // PAGE)


def span(offset: int, length: int) -> frozenset[int]:
    return frozenset(range(offset // PAGE, page_up(offset + length)))


def walk(node: Node, path: bytes = b"") -> Iterator[tuple[bytes, Node]]:
    yield path, node
    for name in sorted(node.entries):
        yield from walk(node.entries[name], path + b"/" + name if path else name)


def groups(root: Node) -> dict[Node, list[bytes]]:
    """Every node below `root`, with all its paths."""
    found: dict[Node, list[bytes]] = {}
    for path, node in walk(root):
        found.setdefault(node, []).append(path)
    return found


class Plain:
    """The live state, the open orphans, the lookup counts and the snapshots."""

    def __init__(self, root: Node, max_pages: int | None = None, max_inodes: int | None = None) -> None:
        self.root = root
        self.orphans: dict[int, Node] = {}
        self.lookups: dict[int, int] = {}
        self.snapshots: dict[str, Node] = {}
        self.max_pages = max_pages
        self.max_inodes = max_inodes
        self.now = 0

    # -- looking -------------------------------------------------------------------------------
    def nodes(self) -> list[Node]:
        return list(groups(self.root))

    def every(self) -> list[Node]:
        return [*self.nodes(), *self.orphans.values()]

    def nlink(self, node: Node) -> int:
        if node.is_dir:
            linked = node is self.root or node in self.nodes()
            return 2 + sum(child.is_dir for child in node.entries.values()) if linked else 0
        return len(groups(self.root).get(node, []))

    def pages(self) -> int:
        return sum(node.pages for node in self.every())

    # -- bookkeeping ---------------------------------------------------------------------------
    def hold(self, node: Node, count: int = 1) -> None:
        self.lookups[node.number] = self.lookups.get(node.number, 0) + count

    def forget(self, number: int, count: int) -> None:
        self.lookups[number] -= count
        if not self.lookups[number]:
            del self.lookups[number]
            self.orphans.pop(number, None)

    def _unlinked(self, node: Node) -> None:
        if node not in self.nodes() and node.number in self.lookups:
            self.orphans[node.number] = node

    def check_room(self, pages: int, inodes: int) -> None:
        if pages and self.max_pages is not None and self.pages() + pages > self.max_pages:
            raise os_error(errno.ENOSPC)
        if inodes and self.max_inodes is not None and len(self.every()) + inodes > self.max_inodes:
            raise os_error(errno.ENOSPC)

    def touch(self, *nodes: Node) -> None:
        for node in nodes:
            node.mtime = node.ctime = self.now

    # -- entries -------------------------------------------------------------------------------
    def make(self, parent: Node, name: bytes, node: Node) -> None:
        if name in parent.entries:
            raise os_error(errno.EEXIST)
        self.check_room(0, 1)
        if parent.mode & stat.S_ISGID:
            node.gid = parent.gid
            if node.is_dir:
                node.mode |= stat.S_ISGID
        parent.entries[name] = node
        self.touch(parent, node)

    def link(self, node: Node, parent: Node, name: bytes) -> None:
        if node.is_dir:
            raise os_error(errno.EPERM)
        if name in parent.entries:
            raise os_error(errno.EEXIST)
        parent.entries[name] = node
        self.orphans.pop(node.number, None)
        self.touch(parent)
        node.ctime = self.now

    def remove(self, parent: Node, name: bytes, *, directory: bool) -> None:
        node = parent.entries.get(name)
        if node is None:
            raise os_error(errno.ENOENT)
        if directory and not node.is_dir:
            raise os_error(errno.ENOTDIR)
        if directory and node.entries:
            raise os_error(errno.ENOTEMPTY)
        if not directory and node.is_dir:
            raise os_error(errno.EISDIR)
        del parent.entries[name]
        self._unlinked(node)
        self.touch(parent)
        node.ctime = self.now

    def rename(self, source: Node, name: bytes, target: Node, new_name: bytes, flags: int) -> None:
        node, victim = source.entries.get(name), target.entries.get(new_name)
        if node is None:
            raise os_error(errno.ENOENT)
        if flags == RENAME_EXCHANGE:
            self._exchange(source, name, target, new_name)
            return
        if victim is not None and flags == RENAME_NOREPLACE:
            raise os_error(errno.EEXIST)
        if target in [n for _, n in walk(node)]:
            raise os_error(errno.EINVAL)
        if victim is node:
            return
        if victim is not None:
            if victim.is_dir and not node.is_dir:
                raise os_error(errno.EISDIR)
            if victim.entries:
                raise os_error(errno.ENOTEMPTY)
            if node.is_dir and not victim.is_dir:
                raise os_error(errno.ENOTDIR)
            victim.ctime = self.now
        del source.entries[name]
        target.entries[new_name] = node
        if victim is not None:
            self._unlinked(victim)
        self.touch(source, target)
        node.ctime = self.now

    def _exchange(self, source: Node, name: bytes, target: Node, new_name: bytes) -> None:
        node, other = source.entries[name], target.entries.get(new_name)
        if other is None:
            raise os_error(errno.ENOENT)
        if target in [n for _, n in walk(node)] or source in [n for _, n in walk(other)]:
            raise os_error(errno.EINVAL)
        if node is other:
            return
        source.entries[name], target.entries[new_name] = other, node
        self.touch(source, target)
        node.ctime = other.ctime = self.now

    # -- content -------------------------------------------------------------------------------
    def write(self, node: Node, offset: int, data: bytes) -> int:
        new = span(offset, len(data)) - node.written - node.reserved
        if new and self.max_pages is not None:
            room = self.max_pages - self.pages()
            while data and len(span(offset, len(data)) - node.written - node.reserved) > room:
                cut = ((offset + len(data) - 1) // PAGE) * PAGE  # give up the last page
                data = data[: max(0, cut - offset)]
            if not data:
                raise os_error(errno.ENOSPC)
        grown = node.data.ljust(offset + len(data), b"\0")
        node.data = grown[:offset] + data + grown[offset + len(data) :]
        node.written |= span(offset, len(data))
        node.reserved -= node.written
        self.touch(node)
        return len(data)

    def truncate(self, node: Node, size: int) -> None:
        if size != len(node.data) or node.pages:  # as tmpfs has it
            self.touch(node)
        if size <= len(node.data):
            node.written = frozenset(page for page in node.written if page < page_up(size))
            node.reserved = frozenset(page for page in node.reserved if page < page_up(size))
        node.data = node.data[:size].ljust(size, b"\0")

    def punch(self, node: Node, offset: int, length: int) -> None:
        end = min(offset + length, len(node.data))
        if end > offset:
            node.data = node.data[:offset] + bytes(end - offset) + node.data[end:]
        gone = frozenset(range(page_up(offset), (offset + length) // PAGE))
        node.written -= gone
        node.reserved -= gone
        self.touch(node)

    def allocate(self, node: Node, offset: int, length: int, *, keep_size: bool) -> None:
        new = span(offset, length) - node.written - node.reserved
        self.check_room(len(new), 0)
        node.written |= span(offset, length) & node.reserved  # a second call fills it with zeros
        node.reserved = (node.reserved | new) - node.written
        if not keep_size:
            node.data = node.data.ljust(offset + length, b"\0")
        self.touch(node)

    # -- snapshots -----------------------------------------------------------------------------
    def become(self, root: Node) -> None:
        """Put another root in place; what is open and has no name in it goes on as an orphan."""
        before = {node.number: node for node in self.every()}
        self.root = root
        linked = {node.number for node in self.nodes()}
        self.orphans = {number: before[number] for number in self.lookups if number not in linked}
        for node in self.orphans.values():
            node.entries = {}

    # -- putting a part of another tree in place -------------------------------------------------
    def converge(self, source: Node, paths: list[bytes], *, replace: bool, same: Callable[[Node], Node | None]) -> None:
        """Lay `source` (below `paths`) over a copy of the live tree.

        `same` gives the live node that a node of `source` still is, if any.  Whatever is made has number 0.
        """
        made: dict[Node, Node] = {}
        for path in paths or [b""]:
            there = find(source, path)
            if there is None:
                parent, name = self._split(path)
                if name not in parent.entries:
                    raise os_error(errno.ENOENT)
                if replace:
                    del parent.entries[name]
                    self.touch(parent)
            elif not path:
                self._fill(self.root, there, made, same, replace=replace)
            else:
                self._place(*self._split(path, source), there, made, same, replace=replace)

    def _split(self, path: bytes, source: Node | None = None) -> tuple[Node, bytes]:
        """The directory that `path` is in, made like that of `source` where it is missing or is something else."""
        *parts, name = path.split(b"/")
        node, above = self.root, b""
        for part in parts:
            above = above + b"/" + part if above else part
            there = node.entries.get(part)
            if there is None or (source is not None and not there.is_dir):
                like = find(source, above) if source is not None else None
                if like is None:
                    raise os_error(errno.ENOENT)
                child = Node(0, like.mode, self.now, self.now, like.uid, like.gid, xattrs=dict(like.xattrs))
                node.entries[part] = child
                self.touch(node)
            node = node.entries[part]
            if not node.is_dir:
                raise os_error(errno.ENOTDIR)
        return node, name

    def _place(
        self,
        parent: Node,
        name: bytes,
        like: Node,
        made: dict[Node, Node],
        same: Callable[[Node], Node | None],
        *,
        replace: bool,
    ) -> None:
        there = parent.entries.get(name)
        if like.is_dir:
            if there is None or not there.is_dir:
                there = parent.entries[name] = Node(0, like.mode, 0, 0)
                self.touch(parent)
            self._fill(there, like, made, same, replace=replace)
            return
        node = made.get(like) or same(like) or Node(0, like.mode, 0, 0)
        made[like] = node
        if there is not node:
            parent.entries[name] = node
            self.touch(parent)
        node.mode, node.uid, node.gid, node.rdev = like.mode, like.uid, like.gid, like.rdev
        node.target, node.data, node.xattrs, node.mtime = like.target, like.data, dict(like.xattrs), like.mtime
        node.written, node.reserved = like.written, like.reserved

    def _fill(
        self,
        node: Node,
        like: Node,
        made: dict[Node, Node],
        same: Callable[[Node], Node | None],
        *,
        replace: bool,
    ) -> None:
        if replace:
            node.entries = {name: child for name, child in node.entries.items() if name in like.entries}
        for name, child in sorted(like.entries.items()):
            self._place(node, name, child, made, same, replace=replace)
        node.mode, node.uid, node.gid, node.xattrs = like.mode, like.uid, like.gid, dict(like.xattrs)
        node.mtime = like.mtime


def find(root: Node | None, path: bytes) -> Node | None:
    node = root
    for part in path.split(b"/") if path else ():
        node = node.entries.get(part) if node is not None else None
    return node
