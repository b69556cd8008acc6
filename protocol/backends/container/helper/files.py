"""Files: what a kernel asks of a volume, done with the system calls of this container.

Each operation takes the numbers and strings of its request and returns those of its reply (see `wire.Op`).
A name is one step in one directory: with a slash, or as "..", it is refused.

Threading: operations may run on several threads; what one looks up or enters in the table, it does under the lock.
"""

import errno
import os
import stat
import threading
import time
from bisect import bisect_right

from protocol.backends.container.helper.inode_table import AgentInode, AgentInodeTable, Handle
from protocol.backends.container.helper.syscalls import born_ns_of, copy_range, fallocate, os_error, renameat2
from protocol.backends.container.helper.wire import (
    ENTRY,
    FORGET,
    KILL_PRIVILEGES,
    SECOND_NS,
    SET_ATIME,
    SET_CTIME,
    SET_GID,
    SET_MODE,
    SET_MTIME,
    SET_SIZE,
    SET_UID,
    VERSION,
    Op,
    Reply,
)

_SCANS_KEPT = 256
_FIRST_COOKIE = 3  # 1 and 2 are the dots
_O_CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_O_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_SET_ID_BITS = 0o6000
_NOT_MAPPED = (errno.EINVAL, errno.EPERM)
_NOW_NS = 1000000000
_MOST_COUNT = 1 << 62
_ACL_ACCESS = "system.posix_acl_access"
_RENAME_EXCHANGE = 2
_RENAME_WHITEOUT = 4

_NOTHING: Reply = ((), ())


class Scan:
    """The names of one directory, each with a cookie that stays while somebody goes on from it."""

    def __init__(self) -> None:
        self._cookies: "dict[bytes, int]" = {}
        self._order: "list[int]" = []
        self._names: "list[bytes]" = []
        self._next = _FIRST_COOKIE

    def refresh(self, directory: int) -> None:
        """Read the directory anew: who was there keeps his cookie, who is new comes last."""
        found = {os.fsencode(name) for name in os.listdir(directory)}
        kept = [(cookie, name) for name, cookie in self._cookies.items() if name in found]
        new = sorted(found.difference(self._cookies))
        kept += zip(range(self._next, self._next + len(new)), new)  # noqa: B905 (newer than Python 3.6)
        self._next += len(new)
        self._cookies = {name: cookie for cookie, name in kept}
        self._order = [cookie for cookie, _ in kept]
        self._names = [name for _, name in kept]

    def after(self, cookie: int, most: int) -> "list[tuple[int, bytes]]":
        """Cookies and names of the next entries."""
        at = bisect_right(self._order, cookie)
        return list(zip(self._order[at : at + most], self._names[at : at + most]))  # noqa: B905


class Files:
    """The operations on the inodes below the directory `root`."""

    def __init__(self, root: bytes, most_open: int = 0) -> None:
        self.table = AgentInodeTable(root, most_open)
        self._uid = os.geteuid()
        self._gid = os.getegid()
        self._making = threading.Lock()  # the umask is the process's
        self._scans: "dict[AgentInode, None]" = {}
        os.umask(0)
        self._umask = 0
        self.operations = {
            Op.HELLO: self.hello, Op.LOOKUP: self.lookup, Op.FORGET: self.forget, Op.GETATTR: self.getattr,
            Op.SETATTR: self.setattr, Op.READLINK: self.readlink, Op.MKNOD: self.mknod, Op.MKDIR: self.mkdir,
            Op.SYMLINK: self.symlink, Op.LINK: self.link, Op.UNLINK: self.unlink, Op.RMDIR: self.rmdir,
            Op.RENAME: self.rename, Op.READDIR: self.readdir, Op.READ: self.read, Op.WRITE: self.write,
            Op.FALLOCATE: self.fallocate, Op.SEEK: self.seek, Op.COPY: self.copy, Op.FSYNC: self.fsync,
            Op.STATFS: self.statfs, Op.GETXATTR: self.getxattr, Op.SETXATTR: self.setxattr,
            Op.LISTXATTR: self.listxattr, Op.REMOVEXATTR: self.removexattr, Op.TMPFILE: self.tmpfile,
        }  # fmt: skip

    # -- inodes --------------------------------------------------------------------------------
    def hello(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        try:
            os.getxattr(self.table.root.handle.path, _ACL_ACCESS)  # type: ignore[union-attr]
            acl = 1
        except OSError as error:
            acl = int(error.errno == errno.ENODATA)
        return (VERSION, self._uid, self._gid, acl, *first_process()), ()

    def lookup(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        (number,), (name,) = numbers, strings
        with self.table.lock:
            parent = self.table.node(number)
            above = self.table.directory(parent)
        if name in (b".", b".."):
            node = parent if name == b"." else parent.parent or parent
            seen = self._stat(node)
            with self.table.lock:
                self.table.look_up(node)
            return _attributes(node, seen), ()
        seen = os.stat(_checked(name), dir_fd=above.fd, follow_symlinks=False)
        with self.table.lock:
            node = self.table.enter(parent, name, seen)
        return _attributes(node, seen), ()

    def forget(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        with self.table.lock:
            for number, count in FORGET.iter_unpack(strings[0]):
                self.table.forget(number, count)
        return _NOTHING

    def getattr(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        with self.table.lock:
            node = self.table.node(numbers[0])
        return self._shown(node), ()

    def setattr(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, bits, mode, uid, gid, size, *times = numbers
        atime_s, atime_ns, mtime_s, mtime_ns = times
        with self.table.lock:
            node = self.table.node(number)
            if bits & SET_SIZE and node.kind != stat.S_IFREG:
                raise os_error(errno.EISDIR if node.kind == stat.S_IFDIR else errno.EINVAL)
            handle = self.table.handle(node)
        path = handle.path
        if bits & SET_SIZE:
            # truncate(2), not ftruncate: that would set mtime also where the size stays.
            os.truncate(path, size)
        if bits & (SET_UID | SET_GID) or _is_touch(bits, handle):
            _chown(path, uid if bits & SET_UID else -1, gid if bits & SET_GID else -1)
        if bits & KILL_PRIVILEGES and node.kind != stat.S_IFDIR:
            _kill_privileges(path, handle.fd)
        if bits & SET_MODE:
            os.chmod(path, mode & 0o7777)
            if mode & 0o111:
                with self.table.lock:
                    self._stop_writing(node)
        if bits & (SET_ATIME | SET_MTIME):
            _set_times(
                path,
                handle.fd,
                atime_s * SECOND_NS + atime_ns if bits & SET_ATIME else None,
                mtime_s * SECOND_NS + mtime_ns if bits & SET_MTIME else None,
            )
        return self._shown(node), ()

    def _stop_writing(self, node: AgentInode) -> None:
        """Nobody could execute it (ETXTBSY)."""
        if node.writable:
            node.file, node.writable = None, False

    def readlink(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        with self.table.lock:
            node = self.table.node(numbers[0])
            if node.kind != stat.S_IFLNK:
                raise os_error(errno.EINVAL)
            handle = self.table.handle(node)
        return (), (os.readlink(b"", dir_fd=handle.fd),)

    def _shown(self, node: AgentInode) -> "tuple[int, ...]":
        """The attributes of a node, with its birth."""
        seen = self._stat(node)
        handle = node.handle or node.file
        return _attributes(node, seen, born_ns_of(handle.fd) if handle else self._birth(node))

    def _birth(self, node: AgentInode) -> int:
        try:
            with self.table.lock:
                handle = self.table.handle(node)
            return born_ns_of(handle.fd)
        except OSError:
            return 0

    def _stat(self, node: AgentInode) -> "os.stat_result":
        handle = node.handle or node.file
        if handle is None:
            with self.table.lock:
                handle = self.table.handle(node)
        return os.fstat(handle.fd)

    # -- making --------------------------------------------------------------------------------
    def mknod(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, mode, rdev, uid, gid, umask = numbers
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        if kind in (stat.S_IFDIR, stat.S_IFLNK):
            raise os_error(errno.EPERM)
        parent, above, name = self._room(number, strings[0])
        if kind == stat.S_IFREG:
            return self._made_file(parent, above, name, _O_CREATE, mode, (uid, gid, umask))
        with self._making:
            self._mask(umask)
            os.mknod(name, kind | mode & 0o1777, rdev, dir_fd=above.fd)
        return self._made(parent, above, name, kind, mode, uid, gid)

    def _made_file(
        self,
        parent: "AgentInode",
        above: Handle,
        name: bytes,
        flags: int,
        mode: int,
        owner: "tuple[int, int, int]",
    ) -> Reply:
        uid, gid, umask = owner
        with self._making:
            self._mask(umask)
            handle = Handle(os.open(name, flags, mode & 0o1777, dir_fd=above.fd))
        seen = self._hand_over(above, handle, mode, uid, gid)
        with self.table.lock:
            if flags is _O_CREATE:
                node = self.table.enter(parent, name, seen, is_new=True)
            else:
                node = self.table.enter(None, b"", seen, is_new=True)
                node.pinned = True
                node.handle = Handle(os.open(handle.path, os.O_PATH | os.O_CLOEXEC))
            self.table.keep_file(node, handle, True)
        return _attributes(node, seen), ()

    def mkdir(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, mode, uid, gid, umask = numbers
        parent, above, name = self._room(number, strings[0])
        with self._making:
            self._mask(umask)
            os.mkdir(name, mode & 0o1777, dir_fd=above.fd)
        return self._made(parent, above, name, stat.S_IFDIR, mode, uid, gid)

    def symlink(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, uid, gid = numbers
        parent, above, name = self._room(number, strings[0])
        os.symlink(strings[1], name, dir_fd=above.fd)
        return self._made(parent, above, name, stat.S_IFLNK, 0, uid, gid)

    def tmpfile(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, mode, uid, gid, umask = numbers
        with self.table.lock:
            parent = self.table.node(number)
            above = self.table.directory(parent)
        return self._made_file(parent, above, b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode, (uid, gid, umask))

    def link(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        with self.table.lock:
            node = self.table.node(numbers[0])
            if node.kind == stat.S_IFDIR:
                raise os_error(errno.EPERM)
            handle = self.table.handle(node)
        parent, above, name = self._room(numbers[1], strings[0])
        os.link(handle.path, name, dst_dir_fd=above.fd, follow_symlinks=True)
        with self.table.lock:
            self.table.place(node, parent, name)
            self.table.look_up(node)
        return _attributes(node, os.fstat(handle.fd)), ()

    def _room(self, number: int, name: bytes) -> "tuple[AgentInode, Handle, bytes]":
        """The directory in which `name` is to be made."""
        if name in (b".", b".."):
            raise os_error(errno.EEXIST)
        with self.table.lock:
            parent = self.table.node(number)
            return parent, self.table.directory(parent), _checked(name)

    def _mask(self, umask: int) -> None:
        if umask != self._umask:
            os.umask(umask & 0o777)
            self._umask = umask

    def _made(self, parent: AgentInode, above: Handle, name: bytes, kind: int, mode: int, uid: int, gid: int) -> Reply:
        handle = Handle(os.open(name, _O_PATH, dir_fd=above.fd))
        seen = os.fstat(handle.fd)
        if stat.S_IFMT(seen.st_mode) != kind or seen.st_uid != self._uid:
            raise os_error(errno.ESTALE)  # somebody has replaced what was just made
        seen = self._hand_over(above, handle, mode, uid, gid)
        with self.table.lock:
            node = self.table.enter(parent, name, seen, is_new=True)
        return _attributes(node, seen), ()

    def _hand_over(self, above: Handle, handle: Handle, mode: int, uid: int, gid: int) -> "os.stat_result":
        """Give what was made to whom it is for, with its set-id bits.  Made by root, without them, for a moment."""
        seen = os.fstat(handle.fd)
        changed = False
        if self._uid == 0:
            if os.fstat(above.fd).st_mode & stat.S_ISGID or seen.st_gid != self._gid:
                gid = seen.st_gid
            if (uid, gid) != (seen.st_uid, seen.st_gid):
                try:
                    os.chown(handle.path, uid, gid)
                    changed = True
                except OSError as error:
                    # An id that this user namespace has no number for: it stays the helper's.
                    if error.errno not in _NOT_MAPPED:
                        raise
        bits = mode & _SET_ID_BITS
        if bits and seen.st_mode & bits != bits:
            os.chmod(handle.path, stat.S_IMODE(seen.st_mode) | bits)
            changed = True
        return os.fstat(handle.fd) if changed else seen

    # -- removing and renaming -----------------------------------------------------------------
    def unlink(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        self._remove(numbers[0], strings[0], False)
        return _NOTHING

    def rmdir(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        if strings[0] == b".":
            raise os_error(errno.EINVAL)
        if strings[0] == b"..":
            raise os_error(errno.ENOTEMPTY)
        self._remove(numbers[0], strings[0], True)
        return _NOTHING

    def _remove(self, number: int, name: bytes, is_dir: bool) -> None:
        with self.table.lock:
            parent = self.table.node(number)
            above = self.table.directory(parent)
        node = self._held(above, _checked(name))
        (os.rmdir if is_dir else os.unlink)(name, dir_fd=above.fd)
        if node is not None:
            with self.table.lock:
                self.table.unplace(node, parent, name)

    def _held(self, above: Handle, name: bytes) -> "AgentInode | None":
        """The known node that is about to lose a name; open from now on."""
        seen = os.stat(name, dir_fd=above.fd, follow_symlinks=False)
        with self.table.lock:
            node = self.table.at(seen)
            if node is not None:
                try:
                    self.table.handle(node)
                except OSError:
                    self.table.lose(node)
                    return None
            return node

    def rename(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, new_number, flags, uid, gid = numbers
        name, new_name = _checked(strings[0]), _checked(strings[1])
        with self.table.lock:
            source, target = self.table.node(number), self.table.node(new_number)
            old, new = self.table.directory(source), self.table.directory(target)
        moved = os.stat(name, dir_fd=old.fd, follow_symlinks=False)
        try:
            victim = self._held(new, new_name)
        except FileNotFoundError:
            victim = None
        if flags:
            renameat2(old.fd, name, new.fd, new_name, flags)
        else:
            os.rename(name, new_name, src_dir_fd=old.fd, dst_dir_fd=new.fd)
        if flags & _RENAME_WHITEOUT and self._uid == 0:
            os.chown(name, uid, gid, dir_fd=old.fd, follow_symlinks=False)
        with self.table.lock:
            node = self.table.at(moved)
            if node is victim and node is not None:
                return _NOTHING  # two names of one file: rename(2) does nothing
            if node is not None:
                self.table.place(node, target, new_name)
            if victim is not None:
                if flags & _RENAME_EXCHANGE:
                    self.table.place(victim, source, name)
                else:
                    self.table.unplace(victim, target, new_name)
        return _NOTHING

    # -- directories ---------------------------------------------------------------------------
    def readdir(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, cookie, most = numbers
        with self.table.lock:
            node = self.table.node(number)
            above = self.table.directory(node)
            scan = self._scan(node)
        if not cookie or not scan.after(0, 1):
            readable = Handle(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above.fd))
            with self.table.lock:
                scan.refresh(readable.fd)
        parts = []
        if cookie < 1:
            parts.append(ENTRY.pack(1, number, stat.S_IFDIR, *[0] * 14, 1) + b".")
        if cookie < 2:
            parts.append(ENTRY.pack(2, (node.parent or node).number, stat.S_IFDIR, *[0] * 14, 2) + b"..")
        with self.table.lock:
            wanted = scan.after(cookie, most)
            # Gone since: as long as anything follows, there must be an entry.
            while wanted and not self._entries(node, above, wanted, parts):
                wanted = scan.after(wanted[-1][0], most)
        return (), (b"".join(parts),)

    def _entries(
        self, node: AgentInode, above: Handle, wanted: "list[tuple[int, bytes]]", parts: "list[bytes]"
    ) -> bool:
        for at, name in wanted:
            try:
                seen = os.stat(name, dir_fd=above.fd, follow_symlinks=False)
            except OSError:
                continue
            child = self.table.enter(node, name, seen)
            parts.append(ENTRY.pack(at, *_attributes(child, seen), len(name)) + name)
        return bool(parts)

    def _scan(self, node: AgentInode) -> Scan:
        scan = node.scan
        if not isinstance(scan, Scan):
            scan = node.scan = Scan()
            if len(self._scans) >= _SCANS_KEPT:
                oldest = next(iter(self._scans))
                oldest.scan = None
                del self._scans[oldest]
        self._scans.pop(node, None)
        self._scans[node] = None
        return scan

    # -- content -------------------------------------------------------------------------------
    def _file(self, number: int, write: bool = False) -> Handle:
        with self.table.lock:
            return self.table.file(self.table.node(number), write)

    def read(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, offset, size = numbers
        return (), (os.pread(self._file(number).fd, size, offset),)

    def write(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, offset, kill = numbers
        with self.table.lock:
            node = self.table.node(number)
            handle = node.file if node.writable and node.file else self._to_write(node)
        written = os.pwrite(handle.fd, strings[0], offset)
        if kill:
            _kill_privileges(handle.path, handle.fd)
        return (written,), ()

    def _to_write(self, node: AgentInode) -> Handle:
        """A descriptor to write a file, kept unless it is a program."""
        if node.kind != stat.S_IFREG:
            raise os_error(errno.EISDIR if node.kind == stat.S_IFDIR else errno.EINVAL)
        handle = Handle(os.open(self.table.handle(node).path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
        self.table.keep_file(node, handle, True)
        return handle

    def fallocate(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, mode, offset, length = numbers
        with self.table.lock:
            handle = self._to_write(self.table.node(number))
        fallocate(handle.fd, mode, offset, length)
        return _NOTHING

    def seek(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        number, offset, whence = numbers
        return (os.lseek(self._file(number).fd, offset, whence),), ()

    def copy(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        source, source_offset, target, target_offset, length = numbers
        with self.table.lock:
            new = self._to_write(self.table.node(target))
            old = self._file(source)
        return (copy_range(old.fd, source_offset, new.fd, target_offset, length),), ()

    def fsync(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        with self.table.lock:
            node = self.table.node(numbers[0])
            if node.kind == stat.S_IFREG:
                handle = self.table.file(node, False)
            elif node.kind == stat.S_IFDIR:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                handle = Handle(os.open(b".", flags, dir_fd=self.table.directory(node).fd))
            else:
                return _NOTHING
        (os.fdatasync if numbers[1] else os.fsync)(handle.fd)
        return _NOTHING

    # -- the rest ------------------------------------------------------------------------------
    def statfs(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        shown = os.fstatvfs(self.table.root.handle.fd)  # type: ignore[union-attr]
        counts = (shown.f_frsize, shown.f_blocks, shown.f_bavail, shown.f_files, shown.f_favail, shown.f_namemax)
        return tuple(min(count, _MOST_COUNT) for count in counts), ()  # some say 2**64 - 1 for "without limit"

    def _path(self, number: int) -> Handle:
        with self.table.lock:
            return self.table.handle(self.table.node(number))

    def getxattr(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        return (), (os.getxattr(self._path(numbers[0]).path, strings[0]),)

    def setxattr(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        os.setxattr(self._path(numbers[0]).path, strings[0], strings[1], numbers[1])
        return _NOTHING

    def listxattr(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        names = os.listxattr(self._path(numbers[0]).path)
        return (), (b"".join(os.fsencode(name) + b"\0" for name in names),)

    def removexattr(self, numbers: "tuple[int, ...]", strings: "list[bytes]") -> Reply:
        os.removexattr(self._path(numbers[0]).path, strings[0])
        return _NOTHING


def _checked(name: bytes) -> bytes:
    if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise os_error(errno.EINVAL)
    return name


def _attributes(node: AgentInode, seen: "os.stat_result", born_ns: int = 0) -> "tuple[int, ...]":
    atime_s, atime_ns = divmod(seen.st_atime_ns, SECOND_NS)
    mtime_s, mtime_ns = divmod(seen.st_mtime_ns, SECOND_NS)
    ctime_s, ctime_ns = divmod(seen.st_ctime_ns, SECOND_NS)
    birth_s, birth_ns = divmod(born_ns, SECOND_NS) if born_ns else (0, 0)
    return (
        node.number, seen.st_mode, seen.st_nlink, seen.st_uid, seen.st_gid, seen.st_rdev, seen.st_size,
        seen.st_blocks, atime_s, mtime_s, ctime_s, birth_s, atime_ns, mtime_ns, ctime_ns, birth_ns,
    )  # fmt: skip


def first_process() -> "tuple[int, int]":
    """The user and group of the container's own: its first process."""
    try:
        with open("/proc/1/status", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file if b":" in line)
        return int(fields[b"Uid"].split()[1]), int(fields[b"Gid"].split()[1])
    except (OSError, LookupError, ValueError):
        return 0, 0


def _chown(path: bytes, uid: int, gid: int) -> None:
    try:
        os.chown(path, uid, gid)
    except OSError as error:
        # An id that this user namespace has no number for: as the kernel has it where a mount's ids are mapped.
        raise os_error(errno.EOVERFLOW) if error.errno == errno.EINVAL else error from None


def _is_touch(bits: int, handle: Handle) -> bool:
    """Whether ctime is all that changes: chown(2) to (-1, -1) does that, but takes set-id bits away too."""
    if bits & ~(SET_CTIME | KILL_PRIVILEGES):
        return False
    return bool(bits & KILL_PRIVILEGES) or not os.fstat(handle.fd).st_mode & _SET_ID_BITS


def _kill_privileges(path: bytes, descriptor: int) -> None:
    """Without suid, and without sgid where it is one (with group execute): fs/attr.c."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    kept = mode & ~stat.S_ISUID
    if mode & stat.S_IXGRP:
        kept &= ~stat.S_ISGID
    if kept != mode:
        os.chmod(path, kept)


def _set_times(path: bytes, descriptor: int, atime_ns: "int | None", mtime_ns: "int | None") -> None:
    seen = os.fstat(descriptor)
    atime_ns = seen.st_atime_ns if atime_ns is None else atime_ns
    mtime_ns = seen.st_mtime_ns if mtime_ns is None else mtime_ns
    try:
        os.utime(path, ns=(atime_ns, mtime_ns))
    except PermissionError:
        # Whoever may write to a file that is not his own may set its times to now, and to nothing else.
        now = int(time.time() * SECOND_NS)
        if abs(now - atime_ns) > _NOW_NS or abs(now - mtime_ns) > _NOW_NS:
            raise
        os.utime(path)
