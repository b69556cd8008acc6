"""Files: the requests for a volume's operations, which `HostFiles` executes with the system calls of this container.

Each operation takes the numbers and then the strings of its request, and returns those of its reply (see `wire.Op`).
`Trees` gives entries by path, many in one reply, for reading a whole workspace.  A path is opened step by step below
the root, never through a symlink and never by "..".

Threading: operations may run on several threads.
"""

import errno
import os
import resource
import stat
import threading
from collections import OrderedDict
from typing import Any, Callable, NamedTuple, Tuple

from protocol.backends.container.helper.wire import (
    CHUNK_BYTES,
    ENTRY,
    FORGET,
    HEADER,
    KILL_PRIVILEGES,
    KNOWN,
    NAME_MAX,
    SECOND_NS,
    SET_ATIME,
    SET_GID,
    SET_MODE,
    SET_MTIME,
    SET_SIZE,
    SET_UID,
    TREE_ENTRY,
    VERSION,
    XATTR,
    Op,
    Operation,
    Reply,
    unpack,
)
from protocol.backends.host.descriptors import open_name
from protocol.backends.host.files import HostFiles, check_name
from protocol.backends.host.inode_table import HostInode
from protocol.linux.portable import Handle, hole_bytes, os_error

_MOST_COUNT = 1 << 62
_NOTHING: Reply = ((), ())

Numbers = Tuple[int, ...]  # as `wire` has the attributes of an inode


class Caller(NamedTuple):
    """The process that calls, which will own the new inode."""

    uid: int
    gid: int
    umask: int = 0


class Changes(NamedTuple):
    """The attributes to set; None leaves one alone."""

    mode: "int | None"
    uid: "int | None"
    gid: "int | None"
    size: "int | None"
    atime_ns: "int | None"
    mtime_ns: "int | None"
    kill_privileges: bool


class Inodes(HostFiles[Numbers]):
    """The inodes below the directory `root`, with their attributes as numbers."""

    def __init__(self, root: bytes, descriptors: int = 0) -> None:
        directory = Handle(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        super().__init__(directory, descriptors=descriptors)
        # While a program is open for writing, execve(2) of it fails with ETXTBSY.
        self.descriptors.on_writer = self.close_program

    def close_program(self, node: HostInode) -> None:
        """Close a program that is open for writing."""
        with self.table.lock:
            self.descriptors.close_programs([node])

    def shown(self, node: HostInode, seen: os.stat_result) -> Numbers:
        """Return the attributes of an inode, without its birth time."""
        atime_s, atime_ns = divmod(seen.st_atime_ns, SECOND_NS)
        mtime_s, mtime_ns = divmod(seen.st_mtime_ns, SECOND_NS)
        ctime_s, ctime_ns = divmod(seen.st_ctime_ns, SECOND_NS)
        return (
            node.number, seen.st_mode, seen.st_nlink, seen.st_uid, seen.st_gid, seen.st_rdev, seen.st_size,
            seen.st_blocks, atime_s, mtime_s, ctime_s, 0, atime_ns, mtime_ns, ctime_ns, 0,
        )  # fmt: skip


def _nothing(call: "Callable[..., None]") -> Operation:
    def operation(*arguments: Any) -> Reply:
        call(*arguments)
        return _NOTHING

    return operation


def _number(call: "Callable[..., int]") -> Operation:
    return lambda *arguments: ((call(*arguments),), ())


def _numbers(call: "Callable[..., Numbers]") -> Operation:
    return lambda *arguments: (call(*arguments), ())


def _string(call: "Callable[..., bytes]") -> Operation:
    return lambda *arguments: ((), (call(*arguments),))


class Files:
    """The operations on the inodes below the directory `root`."""

    def __init__(self, root: bytes, descriptors: int = 0) -> None:
        _raise_limit()
        self.inodes = inodes = Inodes(root, descriptors)
        self.table = self.inodes.table
        self.operations: "dict[int, Operation]" = {
            Op.HELLO: self.hello, Op.LOOKUP: _numbers(inodes.lookup), Op.FORGET: self.forget,
            Op.GETATTR: self.getattr, Op.SETATTR: self.setattr, Op.READLINK: _string(inodes.readlink),
            Op.MKNOD: self.mknod, Op.MKDIR: self.mkdir, Op.SYMLINK: self.symlink, Op.TMPFILE: self.tmpfile,
            Op.LINK: _numbers(inodes.link), Op.UNLINK: _nothing(inodes.unlink), Op.RMDIR: _nothing(inodes.rmdir),
            Op.RENAME: self.rename, Op.READDIR: self.readdir, Op.READ: _string(inodes.read), Op.WRITE: self.write,
            Op.APPEND: self.append, Op.FALLOCATE: _nothing(inodes.fallocate), Op.SEEK: _number(inodes.seek),
            Op.COPY: _number(inodes.copy_range), Op.FSYNC: self.fsync, Op.STATFS: self.statfs,
            Op.GETXATTR: _string(inodes.getxattr), Op.SETXATTR: self.setxattr, Op.LISTXATTR: self.listxattr,
            Op.REMOVEXATTR: _nothing(inodes.removexattr), Op.KNOWN: self.known, Op.LOCK: _nothing(inodes.lock),
            Op.UNLOCK: _nothing(inodes.unlock),
        }  # fmt: skip

    # -- inodes --------------------------------------------------------------------------------
    def hello(self) -> Reply:
        return (VERSION, os.geteuid(), os.getegid(), int(self.inodes.has_acls()), *first_process()), ()

    def look_up_again(self, reply: bytes) -> None:
        """Add a lookup of the inode in the reply of an operation that made one."""
        numbers, _ = unpack(reply[HEADER.size :])
        if not numbers:
            return  # it failed
        with self.table.lock:
            node = self.table.get(numbers[0])
            if node is not None:
                self.table.look_up(node)

    def known(self, after: int) -> Reply:
        """The inodes with lookups, by number."""
        with self.table.lock:
            nodes = [node for node in self.table if node.number > after and node.lookups > 0]
            parts, size = [], 0
            for node in sorted(nodes, key=lambda node: node.number):
                if node is self.table.root:
                    continue
                parent, name = (node.parent.number, node.name) if node.parent is not None else (0, b"")
                parts.append(KNOWN.pack(node.number, node.kind, node.lookups, parent, len(name)) + name)
                size += len(parts[-1])
                if size > CHUNK_BYTES - KNOWN.size - NAME_MAX:
                    return (1,), (b"".join(parts),)
        return (0,), (b"".join(parts),)

    def forget(self, lookups: bytes) -> Reply:
        for inode, count in FORGET.iter_unpack(lookups):
            self.inodes.forget(inode, count)
        return _NOTHING

    def getattr(self, inode: int) -> Reply:
        return self._with_birth(self.inodes.getattr(inode))

    def setattr(
        self,
        inode: int,
        bits: int,
        mode: int,
        uid: int,
        gid: int,
        size: int,
        atime_s: int,
        atime_ns: int,
        mtime_s: int,
        mtime_ns: int,
    ) -> Reply:
        changes = Changes(
            mode if bits & SET_MODE else None,
            uid if bits & SET_UID else None,
            gid if bits & SET_GID else None,
            size if bits & SET_SIZE else None,
            atime_s * SECOND_NS + atime_ns if bits & SET_ATIME else None,
            mtime_s * SECOND_NS + mtime_ns if bits & SET_MTIME else None,
            bool(bits & KILL_PRIVILEGES),
        )
        shown = self.inodes.setattr(inode, changes)
        if bits & SET_MODE:
            with self.table.lock:
                self.inodes.close_program(self.inodes.node(inode))
        return self._with_birth(shown)

    def _with_birth(self, shown: Numbers) -> Reply:
        with self.table.lock:
            node = self.inodes.node(shown[0])
        birth_s, birth_ns = divmod(self.inodes.birth_ns(node), SECOND_NS)
        return (*shown[:11], birth_s, *shown[12:15], birth_ns), ()

    # -- making, removing and renaming ---------------------------------------------------------
    def mknod(self, parent: int, mode: int, rdev: int, uid: int, gid: int, umask: int, name: bytes) -> Reply:
        return self.inodes.mknod(parent, name, mode, rdev, Caller(uid, gid, umask)), ()

    def mkdir(self, parent: int, mode: int, uid: int, gid: int, umask: int, name: bytes) -> Reply:
        return self.inodes.mkdir(parent, name, mode, Caller(uid, gid, umask)), ()

    def symlink(self, parent: int, uid: int, gid: int, name: bytes, target: bytes) -> Reply:
        return self.inodes.symlink(parent, name, target, Caller(uid, gid)), ()

    def tmpfile(self, parent: int, mode: int, uid: int, gid: int, umask: int) -> Reply:
        return self.inodes.tmpfile(parent, mode, Caller(uid, gid, umask)), ()

    def rename(
        self, parent: int, new_parent: int, flags: int, uid: int, gid: int, name: bytes, new_name: bytes
    ) -> Reply:
        self.inodes.rename(parent, name, new_parent, new_name, flags, Caller(uid, gid))
        return _NOTHING

    # -- directories ---------------------------------------------------------------------------
    def readdir(self, inode: int, cookie: int, most: int) -> Reply:
        """Entries with their attributes: at least one, if one follows after `cookie`."""
        parts, count = [], 0
        with self.table.lock:
            node = self.inodes.node(inode)
            above = self.inodes.descriptors.directory(node)
            for name, number, kind, at in self.inodes.listed(inode, cookie):
                if name in (b".", b".."):
                    parts.append(ENTRY.pack(at, number, kind, *[0] * 14, len(name)) + name)
                    continue
                if count == most:
                    break
                try:
                    seen = os.stat(name, dir_fd=above.fd, follow_symlinks=False)
                except OSError:
                    continue  # removed meanwhile
                child = self.table.enter(node, name, seen)
                self.table.look_up(child)
                parts.append(ENTRY.pack(at, *self.inodes.shown(child, seen), len(name)) + name)
                count += 1
        return (), (b"".join(parts),)

    # -- content -------------------------------------------------------------------------------
    def write(self, inode: int, offset: int, kill: int, data: bytes) -> Reply:
        return (self.inodes.write(inode, offset, data, kill_privileges=bool(kill)),), ()

    def append(self, inode: int, kill: int, data: bytes) -> Reply:
        return self.inodes.append(inode, data, kill_privileges=bool(kill)), ()

    def fsync(self, inode: int, data_only: int) -> Reply:
        self.inodes.fsync(inode, data_only=bool(data_only))
        return _NOTHING

    # -- the rest ------------------------------------------------------------------------------
    def statfs(self) -> Reply:
        shown = os.fstatvfs(self.inodes.descriptors.root.fd)
        counts = (shown.f_frsize, shown.f_blocks, shown.f_bavail, shown.f_files, shown.f_favail, shown.f_namemax)
        return tuple(min(count, _MOST_COUNT) for count in counts), ()  # 2**64 - 1 may stand for "unlimited"

    def setxattr(self, inode: int, flags: int, name: bytes, value: bytes) -> Reply:
        self.inodes.setxattr(inode, name, value, flags)
        return _NOTHING

    def listxattr(self, inode: int) -> Reply:
        return (), (b"".join(name + b"\0" for name in self.inodes.listxattr(inode)),)


def first_process() -> "tuple[int, int]":
    """The user and group of the container's first process."""
    try:
        with open("/proc/1/status", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file if b":" in line)
        return int(fields[b"Uid"].split()[1]), int(fields[b"Gid"].split()[1])
    except (OSError, LookupError, ValueError):
        return 0, 0


def _raise_limit() -> None:
    """Raise the limit of open files as far as possible."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass


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
