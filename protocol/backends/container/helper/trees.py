"""Trees: entries by path, many in one reply, for reading a whole workspace.

A path is opened step by step below the root, never through a symlink and never by "..".
"""

import errno
import os
import stat
import threading
from collections import OrderedDict

from protocol.backends.container.helper.files import Files
from protocol.backends.container.helper.wire import CHUNK_BYTES, SECOND_NS, TREE_ENTRY, XATTR, Op, Operation, Reply
from protocol.backends.host.descriptors import open_name
from protocol.backends.host.files import check_name
from protocol.linux.portable import Handle, hole_bytes, os_error

_WALKS_KEPT = 16
_O_STEP = os.O_PATH
_O_LIST = os.O_RDONLY | os.O_DIRECTORY
_O_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_MOST_XATTR_BYTES = 256 * 1024
_LEAST_HOLE_BYTES = 64 * 1024  # smaller holes are read, because each one costs a round trip


class Trees:
    """The operations on paths below the root of `files`."""

    def __init__(self, files: Files) -> None:
        self._table = files.table
        self._root = files.inodes.descriptors.root
        self._walks: "OrderedDict[int, Walk]" = OrderedDict()
        self._last = 0
        self._lock = threading.Lock()
        self.operations: "dict[int, Operation]" = {
            Op.TREE_ENTRY: self.entry,
            Op.TREE_CHILDREN: self.children,
            Op.TREE_READ: self.read,
            Op.TREE_WALK: self.walk,
            Op.TREE_NEXT: self.next,
            Op.TREE_END: self.end,
        }

    def entry(self, path: bytes) -> Reply:
        return (), (self.packed(path, self._opened(path, _O_STEP)),)

    def children(self, path: bytes, after: bytes) -> Reply:
        names = [name for name in _names(self._opened(path, _O_LIST)) if name > after]
        size = 0
        for count, name in enumerate(names):
            size += len(name) + 1
            if size > CHUNK_BYTES:
                return (1,), (b"".join(name + b"\0" for name in names[:count]),)
        return (0,), (b"".join(name + b"\0" for name in names),)

    def read(self, offset: int, size: int, path: bytes) -> Reply:
        handle = self._opened(path, _O_READ)
        kind = stat.S_IFMT(os.fstat(handle.fd).st_mode)
        if kind != stat.S_IFREG:
            raise os_error(errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL)
        hole = hole_bytes(handle.fd, offset)
        if hole >= _LEAST_HOLE_BYTES:
            return (hole,), (b"",)
        return (0,), (os.pread(handle.fd, min(size, CHUNK_BYTES), offset),)

    # -- walking -------------------------------------------------------------------------------
    def walk(self, path: bytes) -> Reply:
        walk = Walk(self, path, self._opened(path, _O_STEP))
        with self._lock:
            self._last += 1
            self._walks[self._last] = walk
            if len(self._walks) > _WALKS_KEPT:
                self._walks.popitem(last=False)
            return (self._last,), ()

    def next(self, number: int, most: int) -> Reply:
        with self._lock:
            walk = self._walks.get(number)
        if walk is None:
            raise os_error(errno.ESTALE)
        more, page = walk.page(min(most, CHUNK_BYTES))
        return (int(more),), (page,)

    def end(self, number: int) -> Reply:
        with self._lock:
            self._walks.pop(number, None)
        return (), ()

    # -- helpers -------------------------------------------------------------------------------
    def _opened(self, path: bytes, flags: int) -> Handle:
        handle = self._root
        *above, name = path.split(b"/") if path else [b"."]
        for part in above:
            handle = step(handle, part, _O_STEP)
        if path:
            return step(handle, name, flags)
        return Handle(open_name(handle.fd, b".", flags))

    def packed(self, path: bytes, handle: Handle) -> bytes:
        """A TREE_ENTRY with its path, symlink target and xattrs."""
        seen = os.fstat(handle.fd)
        kind = stat.S_IFMT(seen.st_mode)
        target = os.readlink(b"", dir_fd=handle.fd) if kind == stat.S_IFLNK else b""
        size = seen.st_size if kind == stat.S_IFREG else len(target)
        with self._table.lock:
            number = self._table.number_of((seen.st_dev, seen.st_ino))
        xattrs = _xattrs(handle)
        mtime_s, mtime_ns = divmod(seen.st_mtime_ns, SECOND_NS)
        ctime_s, ctime_ns = divmod(seen.st_ctime_ns, SECOND_NS)
        return (
            TREE_ENTRY.pack(
                seen.st_mode, size, mtime_s, mtime_ns, ctime_s, ctime_ns,
                seen.st_uid, seen.st_gid, seen.st_nlink, number, seen.st_rdev,
                len(path), len(target), len(xattrs),
            )
            + path + target + xattrs
        )  # fmt: skip


class Walk:
    """A walk over a path and everything below it, depth first, siblings sorted, in pages."""

    def __init__(self, trees: Trees, path: bytes, handle: Handle) -> None:
        self._trees = trees
        self._lock = threading.Lock()
        self._next_entry = trees.packed(path, handle)
        # Open directories: path, descriptor, and the remaining names, the next one last.
        self._stack: "list[tuple[bytes, Handle, list[bytes]]]" = []
        self._descend(path, handle)

    def page(self, most: int) -> "tuple[bool, bytes]":
        """The next entries, at most `most` bytes or a single entry, and whether more follow."""
        with self._lock:
            parts, size = [self._next_entry], len(self._next_entry)
            self._next_entry = b""
            while self._stack:
                entry = self._next()
                if size and size + len(entry) > most:
                    self._next_entry = entry
                    return True, b"".join(parts)
                parts.append(entry)
                size += len(entry)
            return False, b"".join(parts)

    def _next(self) -> bytes:
        """The next entry; b"" at the end of a directory, and for an entry that was removed."""
        above, directory, names = self._stack[-1]
        if not names:
            self._stack.pop()
            return b""
        name = names.pop()
        path = above + b"/" + name if above else name
        try:
            handle = step(directory, name, _O_STEP)
            entry = self._trees.packed(path, handle)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return b""
            raise
        self._descend(path, handle)
        return entry

    def _descend(self, path: bytes, handle: Handle) -> None:
        if stat.S_ISDIR(os.fstat(handle.fd).st_mode):
            directory = Handle(open_name(handle.fd, b".", _O_LIST))
            names = _names(directory)
            names.reverse()
            self._stack.append((path, directory, names))


def step(above: Handle, name: bytes, flags: int) -> Handle:
    """Open the entry `name` of a directory.  ELOOP, ENOTDIR, ENOENT."""
    check_name(name)
    return Handle(open_name(above.fd, name, flags))


def _names(directory: Handle) -> "list[bytes]":
    return sorted(os.fsencode(name) for name in os.listdir(directory.fd))


def _xattrs(handle: Handle) -> bytes:
    parts = []
    try:
        for text in os.listxattr(handle.path):
            name, value = os.fsencode(text), os.getxattr(handle.path, text)
            parts.append(XATTR.pack(len(name), len(value)) + name + value)
    except OSError:
        pass  # a file system without xattrs, or an xattr that was removed meanwhile
    found = b"".join(parts)
    return found if len(found) <= _MOST_XATTR_BYTES else b""
