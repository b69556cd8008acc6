"""Files: a volume's operations, done with the system calls of this container.

Each operation takes the numbers and then the strings of its request, and returns those of its reply (see `wire.Op`).
A name is one step in one directory; a name with a slash, and "..", are refused.

Threading: operations may run on several threads and hold the table's lock while they use the table.
"""

import errno
import os
import stat
import threading
from bisect import bisect_right
from typing import Iterable, Tuple

from protocol.backends.container.helper.inode_table import AgentInode, AgentInodeTable
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
    SET_CTIME,
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
from protocol.linux.portable import (
    HASHED_COOKIES,
    Handle,
    append,
    birth_ns,
    copy_range,
    fallocate,
    hashed_cookies,
    kill_privileges,
    os_error,
    renameat2,
    set_times,
)

_SCANS_KEPT = 256
_FIRST_COOKIE = 3  # 1 and 2 are the dots
_O_CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_O_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_SET_ID_BITS = 0o6000
_NOT_MAPPED = (errno.EINVAL, errno.EPERM)
_MOST_COUNT = 1 << 62
_ACL_ACCESS = "system.posix_acl_access"
_RENAME_EXCHANGE = 2
_RENAME_WHITEOUT = 4

_NOTHING: Reply = ((), ())


class Scan:
    """The names of one directory, each with a cookie that stays valid while a listing continues from it.

    At first each name gets a cookie that depends on the name only, and names that are new later get lower ones.
    """

    def __init__(self) -> None:
        self._cookies: "dict[bytes, int]" = {}
        self._order: "list[int]" = []
        self._names: "list[bytes]" = []
        self._lowest = HASHED_COOKIES
        self.is_partial = True  # there may be more names

    def refresh(self, directory: int) -> None:
        """Read the directory again: known names keep their cookies, new names come first."""
        found = {os.fsencode(name) for name in os.listdir(directory)}
        new = sorted(found.difference(self._cookies))
        if not self.is_partial and self._lowest - len(new) < _FIRST_COOKIE:
            self.evict(0)  # after 2**30 new names listings begin anew
            new = sorted(found)
        kept = {name: cookie for name, cookie in self._cookies.items() if name in found}
        if self.is_partial:
            kept.update(hashed_cookies(new, kept.values()))
            self.is_partial = False
        else:
            self._lowest -= len(new)
            kept.update(zip(new, range(self._lowest, self._lowest + len(new))))  # noqa: B905 (newer than Python 3.6)
        self._set(kept.items())

    def _set(self, pairs: "Iterable[Tuple[bytes, int]]") -> None:
        ordered = sorted((cookie, name) for name, cookie in pairs)
        self._cookies = {name: cookie for cookie, name in ordered}
        self._order = [cookie for cookie, _ in ordered]
        self._names = [name for _, name in ordered]

    def evict(self, below: int = HASHED_COOKIES) -> bool:
        """Drop the names that would get the same cookies again; return whether some are left."""
        self._set([(name, cookie) for name, cookie in self._cookies.items() if cookie < below])
        self.is_partial = True
        if not self._cookies:
            self._lowest = HASHED_COOKIES
        return bool(self._cookies)

    def after(self, cookie: int, most: int) -> "list[tuple[int, bytes]]":
        """The cookies and names of the next `most` entries."""
        at = bisect_right(self._order, cookie)
        return list(zip(self._order[at : at + most], self._names[at : at + most]))  # noqa: B905


class Files:
    """The operations on the inodes below the directory `root`."""

    def __init__(self, root: bytes, most_open: int = 0) -> None:
        self.table = AgentInodeTable(root, most_open)
        self._uid = os.geteuid()
        self._gid = os.getegid()
        self._making = threading.Lock()  # the umask belongs to the process
        self._scans: "dict[AgentInode, None]" = {}
        os.umask(0)
        self._umask = 0
        self.operations: "dict[int, Operation]" = {
            Op.HELLO: self.hello, Op.LOOKUP: self.lookup, Op.FORGET: self.forget, Op.GETATTR: self.getattr,
            Op.SETATTR: self.setattr, Op.READLINK: self.readlink, Op.MKNOD: self.mknod, Op.MKDIR: self.mkdir,
            Op.SYMLINK: self.symlink, Op.LINK: self.link, Op.UNLINK: self.unlink, Op.RMDIR: self.rmdir,
            Op.RENAME: self.rename, Op.READDIR: self.readdir, Op.READ: self.read, Op.WRITE: self.write,
            Op.APPEND: self.append, Op.FALLOCATE: self.fallocate, Op.SEEK: self.seek, Op.COPY: self.copy,
            Op.FSYNC: self.fsync,
            Op.STATFS: self.statfs, Op.GETXATTR: self.getxattr, Op.SETXATTR: self.setxattr,
            Op.LISTXATTR: self.listxattr, Op.REMOVEXATTR: self.removexattr, Op.TMPFILE: self.tmpfile,
            Op.KNOWN: self.known,
        }  # fmt: skip

    # -- inodes --------------------------------------------------------------------------------
    def hello(self) -> Reply:
        try:
            os.getxattr(self.table.root.handle.path, _ACL_ACCESS)  # type: ignore[union-attr]
            acl = 1
        except OSError as error:
            acl = int(error.errno == errno.ENODATA)
        return (VERSION, self._uid, self._gid, acl, *first_process()), ()

    def lookup(self, number: int, name: bytes) -> Reply:
        with self.table.lock:
            parent = self.table.node(number)
            above = self.table.directory(parent)
        if name in (b".", b".."):
            node = parent if name == b"." else parent.parent or parent
            seen = os.fstat(self._any_handle(node).fd)
            with self.table.lock:
                self.table.look_up(node)
            return _attributes(node, seen), ()
        seen = os.stat(_checked(name), dir_fd=above.fd, follow_symlinks=False)
        with self.table.lock:
            node = self.table.enter(parent, name, seen)
        return _attributes(node, seen), ()

    def look_up_again(self, reply: bytes) -> None:
        """Add a lookup of the inode in the reply of an operation that made one."""
        numbers, _ = unpack(reply[HEADER.size :])
        if not numbers:
            return  # it failed
        with self.table.lock:
            node = self.table.by_number.get(numbers[0])
            if node is not None:
                self.table.look_up(node)

    def known(self, after: int) -> Reply:
        """The inodes with lookups, by number."""
        with self.table.lock:
            numbers = sorted(number for number in self.table.by_number if number > after)
            parts, size = [], 0
            for number in numbers:
                node = self.table.by_number[number]
                if node.lookups <= 0 or node is self.table.root:
                    continue
                parent, name = (node.parent.number, node.name) if node.parent is not None else (0, b"")
                parts.append(KNOWN.pack(number, node.kind, node.lookups, parent, len(name)) + name)
                size += len(parts[-1])
                if size > CHUNK_BYTES - KNOWN.size - NAME_MAX:
                    return (1,), (b"".join(parts),)
        return (0,), (b"".join(parts),)

    def forget(self, lookups: bytes) -> Reply:
        with self.table.lock:
            for number, count in FORGET.iter_unpack(lookups):
                self.table.forget(number, count)
        return _NOTHING

    def getattr(self, number: int) -> Reply:
        with self.table.lock:
            node = self.table.node(number)
        return self._shown(node), ()

    def setattr(
        self,
        number: int,
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
        with self.table.lock:
            node = self.table.node(number)
            if bits & SET_SIZE and node.kind != stat.S_IFREG:
                raise os_error(errno.EISDIR if node.kind == stat.S_IFDIR else errno.EINVAL)
            handle = self.table.handle(node)
        path = handle.path
        if bits & SET_SIZE:
            # truncate(2), because ftruncate(2) would set mtime even if the size stays.
            os.truncate(path, size)
        if bits & (SET_UID | SET_GID) or _is_touch(bits, handle):
            _chown(path, uid if bits & SET_UID else -1, gid if bits & SET_GID else -1)
        if bits & KILL_PRIVILEGES and node.kind != stat.S_IFDIR:
            kill_privileges(handle.fd)
        if bits & SET_MODE:
            os.chmod(path, mode & 0o7777)
            if mode & 0o111:
                with self.table.lock:
                    self._stop_writing(node)
        if bits & (SET_ATIME | SET_MTIME):
            set_times(
                handle.fd,
                atime_s * SECOND_NS + atime_ns if bits & SET_ATIME else None,
                mtime_s * SECOND_NS + mtime_ns if bits & SET_MTIME else None,
            )
        return self._shown(node), ()

    def _stop_writing(self, node: AgentInode) -> None:
        """Drop a descriptor for writing: with one open, execve(2) fails with ETXTBSY."""
        if node.writable:
            node.file, node.writable = None, False

    def readlink(self, number: int) -> Reply:
        with self.table.lock:
            node = self.table.node(number)
            if node.kind != stat.S_IFLNK:
                raise os_error(errno.EINVAL)
            handle = self.table.handle(node)
        return (), (os.readlink(b"", dir_fd=handle.fd),)

    def _shown(self, node: AgentInode) -> "tuple[int, ...]":
        """The attributes of a node, including its birth time."""
        handle = self._any_handle(node)
        return _attributes(node, os.fstat(handle.fd), birth_ns(handle.fd))

    def _any_handle(self, node: AgentInode) -> Handle:
        """A descriptor of a node that is good for fstat(2)."""
        handle = node.handle or node.file
        if handle is None:
            with self.table.lock:
                handle = self.table.handle(node)
        return handle

    # -- making --------------------------------------------------------------------------------
    def mknod(self, number: int, mode: int, rdev: int, uid: int, gid: int, umask: int, name: bytes) -> Reply:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        if kind in (stat.S_IFDIR, stat.S_IFLNK):
            raise os_error(errno.EPERM)
        parent, above, name = self._new_entry(number, name)
        if kind == stat.S_IFREG:
            return self._made_file(parent, above, name, _O_CREATE, mode, uid, gid, umask)
        with self._making:
            self._mask(umask)
            os.mknod(name, kind | mode & 0o1777, rdev, dir_fd=above.fd)
        return self._made(parent, above, name, kind, mode, uid, gid)

    def _made_file(
        self, parent: AgentInode, above: Handle, name: bytes, flags: int, mode: int, uid: int, gid: int, umask: int
    ) -> Reply:
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

    def mkdir(self, number: int, mode: int, uid: int, gid: int, umask: int, name: bytes) -> Reply:
        parent, above, name = self._new_entry(number, name)
        with self._making:
            self._mask(umask)
            os.mkdir(name, mode & 0o1777, dir_fd=above.fd)
        return self._made(parent, above, name, stat.S_IFDIR, mode, uid, gid)

    def symlink(self, number: int, uid: int, gid: int, name: bytes, target: bytes) -> Reply:
        parent, above, name = self._new_entry(number, name)
        os.symlink(target, name, dir_fd=above.fd)
        return self._made(parent, above, name, stat.S_IFLNK, 0, uid, gid)

    def tmpfile(self, number: int, mode: int, uid: int, gid: int, umask: int) -> Reply:
        with self.table.lock:
            parent = self.table.node(number)
            above = self.table.directory(parent)
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        return self._made_file(parent, above, b".", flags, mode, uid, gid, umask)

    def link(self, number: int, parent_number: int, name: bytes) -> Reply:
        with self.table.lock:
            node = self.table.node(number)
            if node.kind == stat.S_IFDIR:
                raise os_error(errno.EPERM)
            handle = self.table.handle(node)
        parent, above, name = self._new_entry(parent_number, name)
        os.link(handle.path, name, dst_dir_fd=above.fd, follow_symlinks=True)
        with self.table.lock:
            self.table.set_dentry(node, parent, name)
            self.table.look_up(node)
        return _attributes(node, os.fstat(handle.fd)), ()

    def _new_entry(self, number: int, name: bytes) -> "tuple[AgentInode, Handle, bytes]":
        """The directory for a new entry `name`, its descriptor, and the checked name."""
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
            raise os_error(errno.ESTALE)  # another process has replaced the new entry
        seen = self._hand_over(above, handle, mode, uid, gid)
        with self.table.lock:
            node = self.table.enter(parent, name, seen, is_new=True)
        return _attributes(node, seen), ()

    def _hand_over(self, above: Handle, handle: Handle, mode: int, uid: int, gid: int) -> "os.stat_result":
        """Give a new inode its owner and set-id bits.  Until then it belongs to root and has no set-id bits."""
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
                    # This user namespace does not map the id: the inode stays the helper's.
                    if error.errno not in _NOT_MAPPED:
                        raise
        bits = mode & _SET_ID_BITS
        if bits and seen.st_mode & bits != bits:
            os.chmod(handle.path, stat.S_IMODE(seen.st_mode) | bits)
            changed = True
        return os.fstat(handle.fd) if changed else seen

    # -- removing and renaming -----------------------------------------------------------------
    def unlink(self, number: int, name: bytes) -> Reply:
        self._remove(number, name, False)
        return _NOTHING

    def rmdir(self, number: int, name: bytes) -> Reply:
        if name == b".":
            raise os_error(errno.EINVAL)
        if name == b"..":
            raise os_error(errno.ENOTEMPTY)
        self._remove(number, name, True)
        return _NOTHING

    def _remove(self, number: int, name: bytes, is_dir: bool) -> None:
        with self.table.lock:
            parent = self.table.node(number)
            above = self.table.directory(parent)
        node = self._held(above, _checked(name))
        (os.rmdir if is_dir else os.unlink)(name, dir_fd=above.fd)
        if node is not None:
            with self.table.lock:
                self.table.remove_dentry(node, parent, name)

    def _held(self, above: Handle, name: bytes) -> "AgentInode | None":
        """The known node that is about to lose a name, opened so that it stays reachable."""
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

    def rename(
        self, number: int, new_number: int, flags: int, uid: int, gid: int, name: bytes, new_name: bytes
    ) -> Reply:
        _checked(name)
        _checked(new_name)
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
                return _NOTHING  # two names of one file: rename(2) changes nothing
            if node is not None:
                self.table.set_dentry(node, target, new_name)
            if victim is not None:
                if flags & _RENAME_EXCHANGE:
                    self.table.set_dentry(victim, source, name)
                else:
                    self.table.remove_dentry(victim, target, new_name)
        return _NOTHING

    # -- directories ---------------------------------------------------------------------------
    def readdir(self, number: int, cookie: int, most: int) -> Reply:
        with self.table.lock:
            node = self.table.node(number)
            above = self.table.directory(node)
            scan = self._scan(node)
        if not cookie or scan.is_partial:
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
            # All were removed meanwhile: while more entries follow, a reply must have at least one.
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
        self._scans.pop(node, None)
        if len(self._scans) >= _SCANS_KEPT:
            oldest = next(iter(self._scans))
            del self._scans[oldest]
            if isinstance(oldest.scan, Scan) and not oldest.scan.evict():
                oldest.scan = None
        self._scans[node] = None
        return scan

    # -- content -------------------------------------------------------------------------------
    def _file(self, number: int, write: bool = False) -> Handle:
        """A descriptor of a file's content.  The caller keeps the Handle until it has used the descriptor."""
        with self.table.lock:
            return self.table.file(self.table.node(number), write)

    def read(self, number: int, offset: int, size: int) -> Reply:
        handle = self._file(number)
        return (), (os.pread(handle.fd, size, offset),)

    def write(self, number: int, offset: int, kill: int, data: bytes) -> Reply:
        handle = self._file(number, write=True)
        written = os.pwrite(handle.fd, data, offset)
        if kill:
            kill_privileges(handle.fd)
        return (written,), ()

    def append(self, number: int, kill: int, data: bytes) -> Reply:
        handle = self._file(number, write=True)
        written = append(handle.fd, data)
        if kill:
            kill_privileges(handle.fd)
        return (written, os.fstat(handle.fd).st_size), ()

    def fallocate(self, number: int, mode: int, offset: int, length: int) -> Reply:
        handle = self._file(number, write=True)
        fallocate(handle.fd, mode, offset, length)
        return _NOTHING

    def seek(self, number: int, offset: int, whence: int) -> Reply:
        handle = self._file(number)
        return (os.lseek(handle.fd, offset, whence),), ()

    def copy(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> Reply:
        new, old = self._file(target, write=True), self._file(source)
        return (copy_range(old.fd, source_offset, new.fd, target_offset, length),), ()

    def fsync(self, number: int, data_only: int) -> Reply:
        with self.table.lock:
            node = self.table.node(number)
            if node.kind == stat.S_IFREG:
                handle = self.table.file(node, False)
            elif node.kind == stat.S_IFDIR:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                handle = Handle(os.open(b".", flags, dir_fd=self.table.directory(node).fd))
            else:
                return _NOTHING
        (os.fdatasync if data_only else os.fsync)(handle.fd)
        return _NOTHING

    # -- the rest ------------------------------------------------------------------------------
    def statfs(self) -> Reply:
        shown = os.fstatvfs(self.table.root.handle.fd)  # type: ignore[union-attr]
        counts = (shown.f_frsize, shown.f_blocks, shown.f_bavail, shown.f_files, shown.f_favail, shown.f_namemax)
        return tuple(min(count, _MOST_COUNT) for count in counts), ()  # 2**64 - 1 may stand for "unlimited"

    def _path(self, number: int) -> Handle:
        """A descriptor of an inode.  The caller keeps the Handle until it has used its path."""
        with self.table.lock:
            return self.table.handle(self.table.node(number))

    def getxattr(self, number: int, name: bytes) -> Reply:
        handle = self._path(number)
        return (), (os.getxattr(handle.path, name),)

    def setxattr(self, number: int, flags: int, name: bytes, value: bytes) -> Reply:
        handle = self._path(number)
        os.setxattr(handle.path, name, value, flags)
        return _NOTHING

    def listxattr(self, number: int) -> Reply:
        handle = self._path(number)
        names = os.listxattr(handle.path)
        return (), (b"".join(os.fsencode(name) + b"\0" for name in names),)

    def removexattr(self, number: int, name: bytes) -> Reply:
        handle = self._path(number)
        os.removexattr(handle.path, name)
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
    """The user and group of the container's first process."""
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
        # This user namespace does not map the id; the kernel reports EOVERFLOW for an idmapped mount.
        raise os_error(errno.EOVERFLOW) if error.errno == errno.EINVAL else error from None


def _is_touch(bits: int, handle: Handle) -> bool:
    """Whether only ctime changes: chown(2) to (-1, -1) does that, but also clears set-id bits."""
    if bits & ~(SET_CTIME | KILL_PRIVILEGES):
        return False
    return bool(bits & KILL_PRIVILEGES) or not os.fstat(handle.fd).st_mode & _SET_ID_BITS
