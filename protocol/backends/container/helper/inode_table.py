"""The table of the inodes that vfsd knows, with their open descriptors.

A node is an inode by (st_dev, st_ino), with the directory and name at which it was last seen.  A node lives while vfsd
has lookups of it; a node with a name is kept longer, among a bounded number of idle ones.  Its number is st_ino if that
is free, so that the number is the same in the next helper.

Every access to an inode uses a descriptor, opened from the parent's descriptor by one name, never through a symlink,
and checked to be that inode.  A bounded number of descriptors stays open.  The descriptor of a node whose last name was
removed stays open as well (`pinned`), because no path leads to the inode.  A descriptor is closed when the last
reference to its `Handle` goes, so a thread can use one while another thread evicts it.

Threading: every method is called with `lock` held; slow operations do not hold it.
"""

import errno
import os
import resource
import stat
import threading
from collections import OrderedDict

from protocol.linux.portable import Handle, InodeNumbers, os_error

ROOT = 1
_FEWEST = 16
_MOST = 8192
_SPARE_DESCRIPTORS = 64
_IDLE_NODES = 8192
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
_O_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# The file may be a fifo or a device by now: opening must not block or take a controlling terminal.
_O_CAREFUL = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class AgentInode:
    """An inode that vfsd knows.  `handle` is an O_PATH descriptor, `file` one of its content; both may be None."""

    __slots__ = ("file", "handle", "key", "kind", "lookups", "name", "number", "parent", "pinned", "scan", "writable")

    def __init__(
        self, number: int, key: "tuple[int, int]", kind: int, parent: "AgentInode | None" = None, name: bytes = b""
    ) -> None:
        self.number = number
        self.key = key
        self.kind = kind
        self.parent = parent
        self.name = name
        self.lookups = 0
        self.handle: "Handle | None" = None
        self.file: "Handle | None" = None
        self.writable = False
        self.pinned = False
        self.scan: "object" = None

    def is_shown(self, seen: "os.stat_result") -> bool:
        """Whether `seen` shows this inode."""
        return (seen.st_dev, seen.st_ino) == self.key and stat.S_IFMT(seen.st_mode) == self.kind


class AgentInodeTable:
    """The nodes by number and by (st_dev, st_ino)."""

    def __init__(self, root: bytes, most: int = 0) -> None:
        handle = Handle(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        seen = os.fstat(handle.fd)
        self.lock = threading.RLock()
        self.root = AgentInode(ROOT, (seen.st_dev, seen.st_ino), stat.S_IFDIR)
        self.root.handle, self.root.pinned, self.root.lookups = handle, True, 1
        self.by_number = {ROOT: self.root}
        self._by_key = {self.root.key: self.root}
        self._open: "OrderedDict[AgentInode, None]" = OrderedDict()
        self._idle: "OrderedDict[AgentInode, None]" = OrderedDict()
        self._numbers = InodeNumbers(seen.st_dev)
        self._most = most or _most_open_nodes()

    def node(self, number: int) -> AgentInode:
        """The node with a number.  ENOENT."""
        node = self.by_number.get(number)
        if node is None:
            raise os_error(errno.ENOENT)
        if node in self._idle:
            self._idle.move_to_end(node)
        return node

    def at(self, seen: "os.stat_result") -> "AgentInode | None":
        """The known node of an inode, or None."""
        return self._by_key.get((seen.st_dev, seen.st_ino))

    def enter(
        self, parent: "AgentInode | None", name: bytes, seen: "os.stat_result", is_new: bool = False
    ) -> AgentInode:
        """The node of the inode `seen`, which is `name` in `parent` (None: no name), with one more lookup."""
        key, kind = (seen.st_dev, seen.st_ino), stat.S_IFMT(seen.st_mode)
        node = self._by_key.get(key)
        if node is not None and (is_new or node.kind != kind):
            self.lose(node)  # the inode number of a removed file was reused
            node = None
        if node is None:
            node = AgentInode(self._numbers.free(key, self.by_number), key, kind)
            self.by_number[node.number] = self._by_key[key] = node
        if parent is not None and node is not self.root:
            self.set_dentry(node, parent, name)
        self.look_up(node)
        return node

    def look_up(self, node: AgentInode) -> None:
        """Add a lookup."""
        node.lookups += 1
        self._idle.pop(node, None)

    def set_dentry(self, node: AgentInode, parent: AgentInode, name: bytes) -> None:
        """Record that `node` is `name` in `parent`."""
        node.parent, node.name = parent, name
        if node.pinned:
            node.pinned = False
            self._admit(node)

    def lose(self, node: AgentInode) -> None:
        """Forget the inode of a node: requests with the node's number fail with ESTALE."""
        if self._by_key.get(node.key) is node:
            del self._by_key[node.key]
        node.parent = None
        self._release(node)
        if node.lookups <= 0:
            self._drop(node)

    def remove_dentry(self, node: AgentInode, parent: AgentInode, name: bytes) -> None:
        """Record that `node` is no longer `name` in `parent`; `handle` must have been called before."""
        if node.parent is parent and node.name == name:
            node.parent = None
            node.pinned = True
            self._open.pop(node, None)
            if node.lookups <= 0 and not (node.handle and os.fstat(node.handle.fd).st_nlink):
                self._drop(node)

    def forget(self, number: int, count: int) -> None:
        """Subtract lookups.  A node without a name goes with its last lookup."""
        node = self.by_number.get(number)
        if node is None or node is self.root or node.lookups <= 0:
            return
        node.lookups -= count
        if node.lookups > 0:
            return
        node.lookups = 0
        if node.parent is None:
            self._drop(node)
            return
        self._release(node)
        self._idle[node] = None
        if len(self._idle) > _IDLE_NODES:
            self._drop(next(iter(self._idle)))

    def _drop(self, node: AgentInode) -> None:
        self._idle.pop(node, None)
        self.by_number.pop(node.number, None)
        if self._by_key.get(node.key) is node:
            del self._by_key[node.key]
        self._release(node)
        node.scan = None

    def number_of(self, seen: "os.stat_result") -> int:
        """The number that an inode has or would get."""
        node = self.at(seen)
        return node.number if node is not None else self._numbers.usual((seen.st_dev, seen.st_ino))

    # -- descriptors ---------------------------------------------------------------------------
    def directory(self, node: AgentInode) -> Handle:
        """An O_PATH descriptor of a directory.  ENOTDIR."""
        if node.kind != stat.S_IFDIR:
            raise os_error(errno.ENOTDIR)
        return node.handle or self.handle(node)

    def handle(self, node: AgentInode) -> Handle:
        """An O_PATH descriptor of a node of any kind.  ESTALE if the inode is no longer at its place."""
        if node.handle is not None:
            return node.handle
        if node.parent is None:
            raise os_error(errno.ESTALE)
        above = self.handle(node.parent)
        try:
            handle = Handle(self._opened(node.name, _O_PATH, above))
        except OSError as error:
            raise os_error(errno.ESTALE) if error.errno in _GONE else error from None
        if not node.is_shown(os.fstat(handle.fd)):
            raise os_error(errno.ESTALE)
        node.handle = handle
        self._admit(node)
        return handle

    def file(self, node: AgentInode, write: bool) -> Handle:
        """A descriptor to read a regular file, or to read and write it.  EISDIR, EINVAL for other kinds."""
        if node.file is not None and (node.writable or not write):
            return node.file
        if node.kind != stat.S_IFREG:
            raise os_error(errno.EISDIR if node.kind == stat.S_IFDIR else errno.EINVAL)
        flags = (os.O_RDWR if write else os.O_RDONLY) | _O_CAREFUL
        handle = Handle(self._opened(self.handle(node).path, flags, None))
        self.keep_file(node, handle, write)
        return handle

    def keep_file(self, node: AgentInode, handle: Handle, writable: bool) -> None:
        """Keep a descriptor of a file's content, except one for writing to a program.

        While such a descriptor is open, execve(2) of the program fails with ETXTBSY.
        """
        if writable and os.fstat(handle.fd).st_mode & 0o111:
            node.file, node.writable = None, False
            return
        node.file, node.writable = handle, writable
        if not node.pinned:
            self._admit(node)

    def _opened(self, path: bytes, flags: int, above: "Handle | None") -> int:
        """Open a path; close half of the kept descriptors and retry while the process has none left."""
        while True:
            try:
                return os.open(path, flags, dir_fd=above.fd if above else None)
            except OSError as error:
                if error.errno not in _NONE_LEFT or not self._open:
                    raise
                self._make_room(len(self._open) // 2)

    def _admit(self, node: AgentInode) -> None:
        self._open[node] = None
        self._open.move_to_end(node)
        self._make_room(self._most)

    def _make_room(self, most: int) -> None:
        while len(self._open) > most:
            node, _ = self._open.popitem(last=False)
            node.handle = node.file = None
            node.writable = False

    def _release(self, node: AgentInode) -> None:
        self._open.pop(node, None)
        node.handle = node.file = None
        node.writable = node.pinned = False


def _most_open_nodes() -> int:
    """The number of nodes that may have open descriptors: with two each, half of the process's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError):
        pass
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_FEWEST, min(_MOST, (soft - _SPARE_DESCRIPTORS) // 4))
