"""Descriptors: a bounded number of open descriptors of nodes, each verified to be of the node's inode.

Safety: a node is opened from its parent's descriptor by one name, through no symlink (`open_name`).  The opened inode
must have the node's (st_dev, st_ino), else it is closed again.  Operations on an inode use the descriptor, or its link
in /proc/self/fd, which leads to that inode even if its names changed.

A directory descriptor follows a directory that another program moves out of the tree.  So it is used for RECHECK_S
at most before its dentry, and the dentries above it, are checked again.

A descriptor is closed when the last reference to its `Handle` goes, so the caller of a method can use one while another
call, or another thread, evicts it.

This module also runs in containers (`protocol.backends.container.helper`), so it is written for Python 3.6.

Threading: every method is called with the table's lock held, except `with_room`, `directory`, `handle` and `file`.  The
last three take it only if they open or check something, because each request needs them.
"""

import errno
import os
import resource
import stat
from time import monotonic
from typing import Callable, Iterable

from protocol.backends.host.inode_table import HostInode, HostInodeTable
from protocol.linux.portable import RECHECK_S, Handle, os_error

_ANY_EXECUTE = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_FEWEST = 16
_MOST = 8192
_MOST_PINS = 65536
_UNLIMITED = 1 << 20
_SPARE = 64  # for everything else that the process has open
_O_PATH_DIRECTORY = os.O_PATH | os.O_DIRECTORY
# The file may have become a FIFO or a device: opening it must neither wait nor take a terminal.
_O_CAREFUL = os.O_NONBLOCK | os.O_NOCTTY
_DENIED = (errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
_ATTEMPTS = 16  # each after half of the descriptors were closed; there are never more than 2**16
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)

OpenName = Callable[[int, bytes, int], int]  # opens a name in the directory of a descriptor, with flags


def open_name(directory: int, name: bytes, flags: int) -> int:
    """Open the entry `name` of a directory, but not through a symlink.  ELOOP, ENOTDIR, ENOENT."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)


def _ignore(_node: HostInode) -> None:
    pass


class Descriptors:
    """Opens nodes, and closes those used least recently if there are too many."""

    def __init__(self, root: Handle, table: HostInodeTable, opens: OpenName = open_name, most: int = 0) -> None:
        """`root` is an O_PATH descriptor, which `close` closes; at most `most` others stay open (0: a default)."""
        self.root = root
        self._table = table
        self._open_name = opens
        table.root.handle = root
        table.root.checked_s = float("inf")
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft == resource.RLIM_INFINITY:
            soft = _UNLIMITED
        # Half of the limit; the other half is for pins and for the rest of the process.
        self.most = most or max(_FEWEST, min(_MOST, (soft - _SPARE) // 2))
        # A restore may pin this many; as many are left for files that programs remove.
        self.most_pins = min(_MOST_PINS, max(0, (soft - _SPARE - self.most) // 2))
        self._open: "dict[HostInode, None]" = {}
        self._writable: "dict[HostInode, None]" = {}
        self.on_writer: "Callable[[HostInode], None]" = _ignore  # called when a file was opened for writing
        # Files that lost their names in a restore, maybe thousands; their last descriptors are closed by `close_later`.
        self.nameless: "set[HostInode]" = set()
        self.close_later: "Callable[[Handle], None]" = Handle.close

    def _close(self, node: HostInode, handle: Handle) -> None:
        if node in self.nameless:
            self.close_later(handle)

    # -- directories -------------------------------------------------------------------------
    def directory(self, node: HostInode) -> Handle:
        """An O_PATH descriptor of a directory.  ENOTDIR, ENOENT (removed), ESTALE (no longer at its dentry)."""
        handle = node.handle
        if handle is not None and monotonic() - node.checked_s < RECHECK_S:
            node.used = True
            return handle
        if not node.is_dir:
            raise os_error(errno.ENOTDIR)
        with self._table.lock:
            self._check_above(node)
            return self._directory(node)

    def _check_above(self, node: HostInode) -> None:
        """Check the directories above from the top down; from the bottom up, the recursion could be a thousand deep."""
        above = []
        newest_s = monotonic() - RECHECK_S
        at = node.parent
        while at is not None and (at.handle is None or at.checked_s < newest_s):
            above.append(at)
            at = at.parent
        try:
            for each in reversed(above):
                self._directory(each)
        except OSError:
            pass  # the caller meets the error again

    def _directory(self, node: HostInode) -> Handle:
        if node.pin is not None:
            return node.pin
        if node.handle is not None:
            return self._rechecked(node, node.handle)
        node.handle = handle = self._open_by_name(node, _O_PATH_DIRECTORY)
        node.checked_s = monotonic()
        self._admit(node)
        return handle

    def _rechecked(self, node: HostInode, handle: Handle) -> Handle:
        if node.parent is not None:
            try:
                seen = os.stat(node.name, dir_fd=self.directory(node.parent).fd, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            else:
                if node.is_shown(seen):
                    node.checked_s = monotonic()
                    node.used = True
                    return handle
        if os.fstat(handle.fd).st_nlink == 0:
            # Removed: it stays valid, empty, and takes no new entries.
            node.pin, node.handle = handle, None
            self._open.pop(node, None)
            return handle
        if self._find_moved(node, handle):
            return handle
        self.release(node)
        raise os_error(errno.ESTALE)

    def _find_moved(self, node: HostInode, handle: Handle) -> bool:
        """Find a directory that another program moved: False if it is no longer below the root."""
        path = os.readlink(handle.path)
        top = os.readlink(self.root.path).rstrip(b"/") + b"/"
        if not path.startswith(top):
            return False
        at, names = self._table.root, path[len(top) :].split(b"/")
        try:
            for name in names:
                seen = os.stat(name, dir_fd=self.directory(at).fd, follow_symlinks=False)
                if not stat.S_ISDIR(seen.st_mode) or ((seen.st_dev, seen.st_ino) == node.key) != (name is names[-1]):
                    return False
                if name is names[-1]:
                    self._table.add_dentry(node, at, name)
                    node.checked_s = monotonic()
                    return True
                at = self._table.enter(at, name, seen)
        except OSError:
            pass
        return False

    # -- any inode ---------------------------------------------------------------------------
    def handle(self, node: HostInode) -> Handle:
        """A descriptor of an inode of any type, for use with its `path`.  ESTALE if it is at none of its names."""
        pin, handle = node.pin, node.handle
        if pin is not None:
            return pin
        if node.is_dir:
            return self.directory(node)
        if handle is not None:
            node.used = True
            return handle
        with self._table.lock:
            return self._open_by_name(node, os.O_PATH)

    def _open_by_name(self, node: HostInode, flags: int) -> Handle:
        """Open `node` by one of its names, the last seen first.  ESTALE if it is at none of them."""
        if node.lost:
            raise os_error(errno.ESTALE)
        for parent, name in tuple(node.dentries()):
            try:
                handle = self.opened(parent, name, flags)
            except OSError as error:
                if error.errno not in _GONE or (error.errno == errno.EXDEV and node.is_dir):
                    raise
                continue
            if node.is_shown(os.fstat(handle.fd)):
                return handle
        raise os_error(errno.ESTALE)

    def opened(self, parent: HostInode, name: bytes, flags: int) -> Handle:
        """Open the entry `name` of a directory."""
        return self.with_room(lambda: self._open_name(self.directory(parent).fd, name, flags))

    def with_room(self, opens: "Callable[[], int]") -> Handle:
        """Return what `opens` opens; if the process has no descriptor left, close some of the nodes' and repeat.

        `opens` takes the descriptors that it uses from this object each time.
        """
        for _ in range(_ATTEMPTS):
            try:
                return Handle(opens())
            except OSError as error:
                if error.errno not in _NONE_LEFT or not self._open:
                    raise
                with self._table.lock:
                    self._evict((len(self._open) + 1) // 2)
        # Each closed descriptor made room only for the directory above, so stop here.
        return Handle(opens())

    # -- content -----------------------------------------------------------------------------
    def file(self, node: HostInode, write: bool = False) -> Handle:
        """A descriptor to read a regular file, or to read and write it.  EISDIR, EINVAL for other types."""
        handle = node.handle
        if handle is not None and (node.writable or not write) and node.kind == stat.S_IFREG:
            node.used = True
            return handle
        if node.kind != stat.S_IFREG:
            raise os_error(errno.EISDIR if node.is_dir else errno.EINVAL)
        with self._table.lock:
            handle = self._reopened(node, (os.O_RDWR if write else os.O_RDONLY) | _O_CAREFUL)
            self.release_file(node)
            self.keep_file(node, handle, write)
        return handle

    def keep_file(self, node: HostInode, handle: Handle, writable: bool) -> None:
        """Keep an open descriptor of a regular file that has none yet."""
        node.handle, node.writable = handle, writable
        self._admit(node)
        if writable:
            self._writable[node] = None
            self.on_writer(node)

    def _reopened(self, node: HostInode, flags: int) -> Handle:
        held = node.pin or node.handle
        try:
            if held is not None:
                return Handle(os.open(held.path, flags | os.O_CLOEXEC))
            return self._open_by_name(node, flags)
        except OSError as error:
            if error.errno not in _DENIED:
                raise
            return self._opened_against_mode(node, flags, error)

    def _opened_against_mode(self, node: HostInode, flags: int, denied: OSError) -> Handle:
        """Open a file although its mode denies that to its owner, because a program opened it before a chmod.

        The kernel has checked that the program may do what it asks for, but does not name the program's open file.
        """
        held = self.handle(node)
        seen = os.fstat(held.fd)
        if seen.st_uid != os.geteuid():
            raise denied
        os.chmod(held.path, stat.S_IMODE(seen.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
        try:
            return Handle(os.open(held.path, flags | os.O_CLOEXEC))
        finally:
            os.chmod(held.path, stat.S_IMODE(seen.st_mode))

    # -- limits ------------------------------------------------------------------------------
    def pin(self, node: HostInode) -> bool:
        """Keep an inode open that is about to lose its last name.  False if it is already gone."""
        if node.pin is not None:
            return True
        try:
            handle = self.handle(node)
        except OSError:
            return False
        if handle is node.handle:
            handle = Handle(os.open(handle.path, os.O_PATH | os.O_CLOEXEC))
        node.pin = handle
        return True

    def unpin(self, node: HostInode) -> None:
        """Close the pin: the inode has a name, or nothing needs it."""
        if node.pin is not None:
            self._close(node, node.pin)
            node.pin = None

    def _admit(self, node: HostInode) -> None:
        node.used = True
        self._open[node] = None
        if len(self._open) > self.most:
            self._evict(1)

    def _evict(self, count: int) -> None:
        """Close `count` descriptors; a used one gets a second chance (the clock algorithm)."""
        while count and self._open:
            node = next(iter(self._open))
            del self._open[node]
            if node.used:
                node.used = False
                self._open[node] = None
                continue
            self.release_file(node)
            count -= 1

    def release_file(self, node: HostInode) -> None:
        """Close the descriptor of a directory or for a file's content; not the root's."""
        handle = node.handle
        if handle is not None and handle is not self.root:
            self._close(node, handle)
            node.handle = None
            node.writable = False
            self._open.pop(node, None)
            self._writable.pop(node, None)

    def release(self, node: HostInode) -> None:
        """Close all descriptors of `node`."""
        self.release_file(node)
        self.unpin(node)
        self.nameless.discard(node)

    def close_writers(self) -> None:
        """Reopen written files for reading only, so that they can be executed (ETXTBSY), also after a later chmod."""
        for node in tuple(self._writable):
            assert node.handle is not None
            try:
                reader = os.open(node.handle.path, os.O_RDONLY | _O_CAREFUL | os.O_CLOEXEC)
            except OSError:  # the mode allows writing but not reading, or there are too many descriptors
                self.release_file(node)
                continue
            self._close(node, node.handle)
            node.writable = False  # first: `file` looks without the lock
            node.handle = Handle(reader)
            del self._writable[node]

    def close_programs(self, nodes: "Iterable[HostInode]") -> None:
        """Close those of `nodes` that are open for writing and can be executed: else execve(2) fails with ETXTBSY."""
        for node in nodes:
            if node.writable and node.handle is not None and os.fstat(node.handle.fd).st_mode & _ANY_EXECUTE:
                self.release_file(node)

    def close_idle_writers(self) -> None:
        """Close executables that were opened to write and not used since the last call.

        Programs outside the mount could not execute them (ETXTBSY).
        """
        idle = [node for node in self._writable if not node.used]
        for node in self._writable:
            node.used = False
        self.close_programs(idle)

    def check_invariants(self) -> None:
        """AssertionError if the open descriptors and the nodes contradict each other."""
        for node in self._table:
            if node is not self._table.root:
                assert (node.handle is not None) == (node in self._open), (node.name, node.handle)
        assert len(self._open) <= self.most
        assert self._writable.keys() <= self._open.keys()

    def close(self) -> None:
        """Close everything, including the root."""
        for node in self._table:
            if node is not self._table.root:
                self.release(node)
        self.root.close()
        self._table.root.handle = None
