"""HostFiles: the operations of a volume on the inodes below a host directory.

The host's kernel does what it can: modes, ACLs, xattrs, links, sparse files, atime, clearing of suid and sgid for an
unprivileged process.  This class adds what the host's kernel cannot know: who the caller is, which inode a number
means, and that no path may lead out of the directory (see `protocol.backends.host.descriptors`).

It runs in the daemon (`protocol.backends.host.volume`), and as source at the other end of a helper's stream
(`protocol.backends.container.helper.files`), so it is written for Python 3.6.

The host has no call that sets several attributes at once.  A kernel asks for one at a time, with its times; if it asks
for more, the order is such that no step undoes another, and the first step that can fail comes first.

An unprivileged process creates files of its own user.  Root creates them as root, without suid and sgid bits, and then
changes the owner.  It cannot act as the caller (setfsuid(2)), because a kernel's request does not name the caller's
supplementary groups.  The umask belongs to the process; during a call that creates something, it is the caller's.

Threading: any thread.  Operations hold the table's lock while they use the table, and not during slow system calls.
"""

import errno
import fcntl
import os
import stat
import threading
from contextlib import contextmanager
from typing import Any, Generic, Iterator, TypeVar

from protocol.backends.host.descriptors import Descriptors, OpenName, open_name
from protocol.backends.host.inode_table import HostInode, HostInodeTable
from protocol.backends.host.listings import Listed, Listings
from protocol.linux.portable import (
    Handle,
    append,
    birth_ns,
    copy_range,
    fallocate,
    os_error,
    renameat2,
    set_times,
)
from protocol.linux.portable import (
    kill_privileges as clear_set_id_bits,
)

A = TypeVar("A")  # attributes, as a subclass shows them

MAX_FILE_BYTES = 2**63 - 1  # off_t of the kernel
_DOTS = (b".", b"..")
_RENAME_EXCHANGE = 2
_RENAME_WHITEOUT = 4
_O_CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_O_UNNAMED = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
_O_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PERMISSIONS = 0o1777
_SPECIAL_BITS = 0o6000
_DENIED = (errno.EACCES, errno.EPERM)
_NOT_MAPPED = (errno.EINVAL, errno.EPERM)


class HostFiles(Generic[A]):
    """The operations below the directory of `root`, which `close` closes.

    `opens` opens a name in a directory.  At most `descriptors` files and directories are open at a time (0: a default).
    Arguments are those of `protocol.volume.Volume`; `caller` is a `Caller`, and `changes` an `AttributeChanges`.
    """

    def __init__(
        self, root: Handle, opens: OpenName = open_name, read_only: bool = False, descriptors: int = 0
    ) -> None:
        self.read_only = read_only
        self.table = HostInodeTable(os.fstat(root.fd), self._release)
        self.descriptors = Descriptors(root, self.table, opens, descriptors)
        self.listings = Listings(self.table, self.descriptors)
        self.unknown_errno = errno.ENOENT  # for a number of no inode
        self._lock = self.table.lock
        self._opens = opens
        self._uid = os.geteuid()
        self._gid = os.getegid()
        self._creating = threading.Lock()  # the umask belongs to the process
        self._locked: "Handle | None" = None

    def shown(self, node: HostInode, seen: os.stat_result) -> A:
        """Show the attributes of an inode."""
        raise NotImplementedError

    def outside(self, caller: Any) -> Any:
        """Return the caller with the ids of this process's user namespace."""
        return caller

    # -- inodes ----------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> A:
        """See `protocol.volume.Volume`."""
        directory = self.node(parent)
        above = self.descriptors.directory(directory)
        if name in _DOTS:
            node = directory if name == b"." else directory.parent or directory
            seen = self.stat(node)
        else:
            check_name(name)
            seen = os.stat(name, dir_fd=above.fd, follow_symlinks=False)
            if seen.st_dev != directory.key[0]:
                # Either a mount point, which `opens` may refuse, or a subvolume, which is part of the same mount.
                os.close(self._opens(above.fd, name, os.O_PATH))
            with self._lock:
                node = self.table.enter(directory, name, seen)
                self.table.look_up(node)
            return self.shown(node, seen)
        with self._lock:
            self.table.look_up(node)
        return self.shown(node, seen)

    def forget(self, inode: int, count: int) -> None:
        with self._lock:
            self.table.forget(inode, count)

    def getattr(self, inode: int) -> A:
        node = self.node(inode)
        return self.shown(node, self.stat(node))

    def setattr(self, inode: int, changes: Any) -> A:
        self.check_writable()
        node = self.node(inode)
        if changes.size is not None:
            _check_size(node, changes.size)
        handle = self.descriptors.handle(node)
        path = handle.path
        if changes.size is not None:
            self._truncate(node, path, changes.size)
        if changes.uid is not None or changes.gid is not None or _is_touch(changes, handle):
            _chown(path, -1 if changes.uid is None else changes.uid, -1 if changes.gid is None else changes.gid)
        if changes.kill_privileges and not node.is_dir:
            clear_set_id_bits(handle.fd)
        if changes.mode is not None:
            os.chmod(path, changes.mode & 0o7777)
        if changes.atime_ns is not None or changes.mtime_ns is not None:
            set_times(handle.fd, changes.atime_ns, changes.mtime_ns)
        return self.shown(node, self.stat(node))

    def _truncate(self, node: HostInode, path: bytes, size: int) -> None:
        """Truncate with truncate(2); ftruncate(2) would set mtime even if the size stays the same."""
        try:
            os.truncate(path, size)
        except OSError as error:
            if error.errno not in _DENIED:
                raise
            # The program opened the file before its mode denied that.
            handle = self.descriptors.file(node, True)
            os.ftruncate(handle.fd, size)

    def readlink(self, inode: int) -> bytes:
        node = self.node(inode)
        if node.kind != stat.S_IFLNK:
            raise os_error(errno.EINVAL)
        handle = self.descriptors.handle(node)
        return os.readlink(b"", dir_fd=handle.fd)

    # -- creating entries --------------------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Any) -> A:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        if kind in (stat.S_IFDIR, stat.S_IFLNK):
            raise os_error(errno.EPERM)
        directory, above = self._new_entry(parent, name)
        caller = self.outside(caller)
        if kind == stat.S_IFREG:
            return self._created_file(directory, above, name, mode, caller)
        with self._as(caller):
            os.mknod(name, kind | mode & _PERMISSIONS, rdev, dir_fd=above.fd)
        return self._created(directory, name, self._finish(above, name, mode, caller))

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Any) -> A:
        directory, above = self._new_entry(parent, name)
        caller = self.outside(caller)
        with self._as(caller):
            os.mkdir(name, mode & _PERMISSIONS, dir_fd=above.fd)
        return self._created(directory, name, self._finish(above, name, stat.S_IFDIR | mode, caller))

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Any) -> A:
        directory, above = self._new_entry(parent, name)
        caller = self.outside(caller)
        os.symlink(target, name, dir_fd=above.fd)
        return self._created(directory, name, self._finish(above, name, stat.S_IFLNK, caller))

    def tmpfile(self, parent: int, mode: int, caller: Any) -> A:
        self.check_writable()
        directory = self.node(parent)
        above = self.descriptors.directory(directory)
        return self._created_file(directory, above, None, mode, self.outside(caller))

    def link(self, inode: int, parent: int, name: bytes) -> A:
        node = self.node(inode)
        if node.is_dir:
            raise os_error(errno.EPERM)
        directory, above = self._new_entry(parent, name)
        handle = self.descriptors.handle(node)
        os.link(handle.path, name, dst_dir_fd=above.fd, follow_symlinks=True)
        seen = os.fstat(handle.fd)
        with self._lock:
            self.table.add_dentry(node, directory, name)
            self.table.look_up(node)
            self.descriptors.unpin(node)
            if directory.entries is not None:
                directory.entries.add(name, seen)
        return self.shown(node, seen)

    def _new_entry(self, parent: int, name: bytes) -> "tuple[HostInode, Handle]":
        """The directory for a new entry `name`, and its descriptor."""
        self.check_writable()
        if name in _DOTS:
            raise os_error(errno.EEXIST)
        check_name(name)
        directory = self.node(parent)
        return directory, self.descriptors.directory(directory)

    @contextmanager
    def _as(self, caller: Any) -> "Iterator[None]":
        """Create with the caller's umask inside the block."""
        with self._creating:
            umask = os.umask(caller.umask & 0o777)
            try:
                yield
            finally:
                os.umask(umask)

    def _created_file(self, directory: HostInode, above: Handle, name: "bytes | None", mode: int, caller: Any) -> A:
        """Create a regular file, without a name if `name` is None."""
        flags = _O_UNNAMED if name is None else _O_CREATE
        with self._as(caller):
            handle = self.descriptors.with_room(
                lambda: os.open(name or b".", flags, mode & _PERMISSIONS, dir_fd=above.fd)
            )
        seen = self._give_to_caller(above, handle, mode, caller)
        return self._created(None if name is None else directory, name or b"", seen, handle)

    def _created(
        self, directory: "HostInode | None", name: bytes, seen: os.stat_result, file: "Handle | None" = None
    ) -> A:
        """Enter a new inode; `file` is open for writing."""
        with self._lock:
            node = self.table.enter_new(directory, name, seen)
            self.table.look_up(node)
            if file is not None:
                if directory is None:
                    node.pin = Handle(os.open(file.path, os.O_PATH | os.O_CLOEXEC))
                self.descriptors.keep_file(node, file, True)
            if directory is not None and directory.entries is not None:
                directory.entries.add(name, seen)
        return self.shown(node, seen)

    def _finish(self, above: Handle, name: bytes, mode: int, caller: Any) -> os.stat_result:
        """Give the new inode `name` to the caller.  ESTALE if another program has replaced it."""
        kind = stat.S_IFMT(mode)
        if not self._needs_chown(caller) and not mode & _SPECIAL_BITS:
            seen = os.stat(name, dir_fd=above.fd, follow_symlinks=False)
            self._check_own(seen, kind)
            return seen
        handle = self.descriptors.with_room(lambda: self._opens(above.fd, name, os.O_PATH))
        self._check_own(os.fstat(handle.fd), kind)
        return self._give_to_caller(above, handle, mode, caller)

    def finish_interrupted(self, above: Handle, handle: Handle, mode: int, caller: Any) -> None:
        """Give an inode to the caller, unless the process that made it has done that."""
        if os.fstat(handle.fd).st_uid == self._uid:
            self._give_to_caller(above, handle, mode, self.outside(caller))

    def _needs_chown(self, caller: Any) -> bool:
        return self._uid == 0 and (caller.uid != 0 or caller.gid != self._gid)

    def _give_to_caller(self, above: Handle, handle: Handle, mode: int, caller: Any) -> os.stat_result:
        """Set the owner and the set-id bits of a new inode."""
        seen = os.fstat(handle.fd)
        changed = False
        if self._needs_chown(caller):
            inherits = os.fstat(above.fd).st_mode & stat.S_ISGID
            gid = seen.st_gid if inherits or seen.st_gid != self._gid else caller.gid
            if (caller.uid, gid) != (seen.st_uid, seen.st_gid):
                try:
                    os.chown(handle.path, caller.uid, gid)
                    changed = True
                except OSError as error:
                    # This user namespace does not map the id: the inode stays this process's.
                    if error.errno not in _NOT_MAPPED:
                        raise
        bits = mode & _SPECIAL_BITS
        if bits and stat.S_IMODE(seen.st_mode) & bits != bits:
            os.chmod(handle.path, stat.S_IMODE(seen.st_mode) | bits)
            changed = True
        return os.fstat(handle.fd) if changed else seen

    def _check_own(self, seen: os.stat_result, kind: int) -> None:
        links = seen.st_nlink if kind != stat.S_IFDIR else 1
        if stat.S_IFMT(seen.st_mode) != kind or seen.st_uid != self._uid or links != 1:
            raise os_error(errno.ESTALE)

    # -- removing and renaming ---------------------------------------------------------------------
    def unlink(self, parent: int, name: bytes) -> None:
        self._remove(parent, name, False)

    def rmdir(self, parent: int, name: bytes) -> None:
        if name in _DOTS:
            raise os_error(errno.EINVAL if name == b"." else errno.ENOTEMPTY)
        self._remove(parent, name, True)

    def _remove(self, parent: int, name: bytes, is_dir: bool) -> None:
        self.check_writable()
        check_name(name)
        directory = self.node(parent)
        above = self.descriptors.directory(directory)
        node = self._pinned(above, name)
        try:
            (os.rmdir if is_dir else os.unlink)(name, dir_fd=above.fd)
        except BaseException:
            with self._lock:
                self._unpin_if_named(node)
            raise
        with self._lock:
            if directory.entries is not None:
                directory.entries.remove(name)
            self._removed(node, directory, name)

    def _pinned(self, above: Handle, name: bytes) -> "HostInode | None":
        """The node of a name that is about to be removed or replaced; pinned if the kernel has lookups of it."""
        seen = os.stat(name, dir_fd=above.fd, follow_symlinks=False)
        with self._lock:
            node = self.table.at(seen)
            if node is not None and node.lookups and not self.descriptors.pin(node):
                self.table.lose(node)
                return None
            return node

    def _unpin_if_named(self, node: "HostInode | None") -> None:
        if node is not None and node.parent is not None:
            self.descriptors.unpin(node)

    def _removed(self, node: "HostInode | None", directory: HostInode, name: bytes) -> None:
        if node is not None:
            if node.is_dir:
                self.listings.end(node)
            self.table.remove_dentry(node, directory, name)
            self._unpin_if_named(node)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Any) -> None:
        self.check_writable()
        check_name(name)
        check_name(new_name)
        caller = self.outside(caller)
        source, target = self.node(parent), self.node(new_parent)
        old, new = self.descriptors.directory(source), self.descriptors.directory(target)
        moved = os.stat(name, dir_fd=old.fd, follow_symlinks=False)
        try:
            victim = self._pinned(new, new_name)
        except FileNotFoundError:
            victim = None
        try:
            if flags:
                renameat2(old.fd, name, new.fd, new_name, flags)
            else:
                os.rename(name, new_name, src_dir_fd=old.fd, dst_dir_fd=new.fd)
        except BaseException:
            with self._lock:
                self._unpin_if_named(victim)
            raise
        with self._lock:
            node = self.table.at(moved)
            if victim is not None and victim is node:
                self._unpin_if_named(victim)  # two names of one file, for which rename(2) does nothing
                return
        if flags & _RENAME_WHITEOUT:
            self._finish(old, name, stat.S_IFCHR, caller)
        with self._lock:
            if source.entries is not None:
                source.entries.remove(name)
                if flags & (_RENAME_EXCHANGE | _RENAME_WHITEOUT):
                    source.entries.add(name, os.stat(name, dir_fd=old.fd, follow_symlinks=False))
            if target.entries is not None:
                target.entries.add(new_name, moved)
            self.table.move_dentry(node, (source, name), (target, new_name))
            if flags & _RENAME_EXCHANGE:
                self.table.move_dentry(victim, (target, new_name), (source, name))
                self._unpin_if_named(victim)
            else:
                self._removed(victim, target, new_name)

    def lock(self, inode: int) -> None:
        """See `protocol.volume.ExtendedVolume`."""
        self.unlock()
        above = self.descriptors.directory(self.node(inode))
        handle = Handle(os.open(b".", _O_LIST, dir_fd=above.fd))
        fcntl.flock(handle.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._locked = handle

    def unlock(self) -> None:
        handle, self._locked = self._locked, None
        if handle is not None:
            fcntl.flock(handle.fd, fcntl.LOCK_UN)  # a process that was forked meanwhile may have the descriptor, too

    # -- directories and content -------------------------------------------------------------------
    def listed(self, inode: int, cookie: int) -> "Iterator[Listed]":
        """The entries of a directory after `cookie`, with the lock held."""
        return self.listings.after(self.node(inode), cookie)

    def _file(self, inode: int, write: bool = False) -> Handle:
        """A descriptor of a file's content.  The caller keeps the Handle until it has used the descriptor."""
        if write:
            self.check_writable()
        return self.descriptors.file(self.node(inode), write)

    def read(self, inode: int, offset: int, size: int) -> bytes:
        handle = self._file(inode)
        return os.pread(handle.fd, size, offset)

    def write(self, inode: int, offset: int, data: Any, *, kill_privileges: bool = False) -> int:
        handle = self._file(inode, True)
        if offset + len(data) > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        written = os.pwrite(handle.fd, data, offset)
        if kill_privileges:
            clear_set_id_bits(handle.fd)
        return written

    def append(self, inode: int, data: Any, *, kill_privileges: bool = False) -> "tuple[int, int]":
        handle = self._file(inode, True)
        written = append(handle.fd, data)
        if kill_privileges:
            clear_set_id_bits(handle.fd)
        return written, os.fstat(handle.fd).st_size

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        handle = self._file(inode, True)
        if offset < 0 or length <= 0:
            raise os_error(errno.EINVAL)
        if offset + length > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        fallocate(handle.fd, mode, offset, length)

    def seek(self, inode: int, offset: int, whence: int) -> int:
        handle = self._file(inode)
        return os.lseek(handle.fd, offset, whence)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        # In this order: if both are the same file, the second call returns the descriptor of the first.
        new = self._file(target, True)
        old = self._file(source)
        return copy_range(old.fd, source_offset, new.fd, target_offset, length)

    def fsync(self, inode: int, *, data_only: bool) -> None:
        node = self.node(inode)
        if node.kind == stat.S_IFREG:
            handle = self.descriptors.file(node)
        elif node.is_dir:
            data_only = False
            above = self.descriptors.directory(node)
            handle = Handle(os.open(b".", _O_LIST, dir_fd=above.fd))
        else:
            return
        (os.fdatasync if data_only else os.fsync)(handle.fd)

    # -- extended attributes -----------------------------------------------------------------------
    def _handle(self, inode: int) -> Handle:
        """A descriptor of an inode.  The caller keeps the Handle until it has used its path."""
        return self.descriptors.handle(self.node(inode))

    def getxattr(self, inode: int, name: bytes) -> bytes:
        handle = self._handle(inode)
        return os.getxattr(handle.path, name)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        self.check_writable()
        handle = self._handle(inode)
        os.setxattr(handle.path, name, value, flags)

    def listxattr(self, inode: int) -> "tuple[bytes, ...]":
        handle = self._handle(inode)
        return tuple(os.fsencode(name) for name in os.listxattr(handle.path))

    def removexattr(self, inode: int, name: bytes) -> None:
        self.check_writable()
        handle = self._handle(inode)
        os.removexattr(handle.path, name)

    # -- helpers -----------------------------------------------------------------------------------
    def node(self, inode: int) -> HostInode:
        """The node with this number.  OSError (`unknown_errno`)."""
        node = self.table.get(inode)
        if node is None:
            raise os_error(self.unknown_errno)
        return node

    def stat(self, node: HostInode) -> os.stat_result:
        """The stat data of `node`; ESTALE if no name leads to its inode."""
        handle = node.pin or node.handle
        if handle is not None:
            node.used = True
            return os.fstat(handle.fd)
        with self._lock:
            parent, name = node.parent, node.name
        if parent is not None and not node.lost:
            above = self.descriptors.directory(parent)
            try:
                seen = os.stat(name, dir_fd=above.fd, follow_symlinks=False)
            except FileNotFoundError:
                pass
            else:
                if node.is_shown(seen):
                    return seen
        handle = self.descriptors.handle(node)  # by its other names
        return os.fstat(handle.fd)

    def birth_ns(self, node: HostInode) -> int:
        """When an inode was made; 0 if that is not known."""
        try:
            handle = self.descriptors.handle(node)
            return birth_ns(handle.fd)
        except OSError:
            return 0

    def has_acls(self) -> bool:
        """Whether the file system has ACLs."""
        try:
            os.getxattr(self.descriptors.root.path, "system.posix_acl_access")
        except OSError as error:
            return error.errno == errno.ENODATA
        return True

    def check_writable(self) -> None:
        """EROFS for a volume that may not be changed."""
        if self.read_only:
            raise os_error(errno.EROFS)

    def _release(self, node: HostInode) -> None:
        self.descriptors.release(node)
        # A reader may still continue in a directory that is only idle.
        if node.entries is not None and self.table.get(node.number) is not node:
            self.listings.end(node)


def check_name(name: bytes) -> None:
    """EINVAL for a name that could lead out of its directory."""
    if not name or b"/" in name or b"\0" in name or name in _DOTS:
        raise os_error(errno.EINVAL)


def _check_size(node: HostInode, size: int) -> None:
    if node.kind != stat.S_IFREG:
        raise os_error(errno.EISDIR if node.is_dir else errno.EINVAL)
    if size < 0:
        raise os_error(errno.EINVAL)
    if size > MAX_FILE_BYTES:
        raise os_error(errno.EFBIG)


def _chown(path: bytes, uid: int, gid: int) -> None:
    try:
        os.chown(path, uid, gid)
    except OSError as error:
        # This user namespace does not map the id; the kernel reports EOVERFLOW for an idmapped mount.
        raise os_error(errno.EOVERFLOW) if error.errno == errno.EINVAL else error from None


def _is_touch(changes: Any, handle: Handle) -> bool:
    """Whether only ctime changes: chown(2) to (-1, -1) does that, but also clears set-id bits."""
    given = (changes.mode, changes.uid, changes.gid, changes.size, changes.atime_ns, changes.mtime_ns)
    if any(value is not None for value in given):
        return False
    return changes.kill_privileges or not os.fstat(handle.fd).st_mode & _SPECIAL_BITS
