"""Files: the requests for a volume's operations, which `HostFiles` executes with the system calls of this container.

Each operation takes the numbers and then the strings of its request, and returns those of its reply (see `wire.Op`).

Threading: operations may run on several threads.
"""

import os
import resource
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
    VERSION,
    Op,
    Operation,
    Reply,
    unpack,
)
from protocol.backends.host.files import HostFiles
from protocol.backends.host.inode_table import HostInode
from protocol.linux.portable import Handle

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
            Op.REMOVEXATTR: _nothing(inodes.removexattr), Op.KNOWN: self.known,
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
