"""Descriptors: a bounded number of open descriptors of nodes, each verified to be of the node's inode.

Safety: a node is opened from its parent's descriptor by one name, through no symlink and into no other mount
(`open_beneath`).  The opened inode must have the node's (st_dev, st_ino), else it is closed again.  Operations on an
inode use the descriptor, or its link in /proc/self/fd, which leads to that inode even if its names changed.

A directory descriptor follows a directory that another program moves out of the tree.  So it is used for RECHECK_S
at most before its dentry, and the dentries above it, are checked again.

The last close of a file without a name frees its blocks.  On ext4 this was measured to take a millisecond for each of
thousands of files, and almost no time if the file that was unlinked last is closed first.  So `BackgroundCloser`
collects the descriptors of such files and closes them in that order.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Final

from protocol.backends.host.inode_table import HostInode, HostInodeTable
from protocol.errors import os_error
from protocol.linux.beneath import RECHECK_S, open_beneath
from protocol.linux.portable import proc_path

_ANY_EXECUTE: Final = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_FEWEST: Final = 16
_MOST: Final = 8192
_MOST_PINS: Final = 65536
_UNLIMITED: Final = 1 << 20
_SPARE: Final = 64  # for everything else that the process has open
_O_PATH_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY
# The file may have become a FIFO or a device: opening it must neither wait nor take a terminal.
_O_CAREFUL: Final = os.O_NONBLOCK | os.O_NOCTTY
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})
_ATTEMPTS: Final = 16  # each after half of the descriptors were closed; there are never more than 2**16
_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})


class Descriptors:
    """Opens nodes, and closes those used least recently if there are too many."""

    def __init__(self, root: int, table: HostInodeTable, most: int | None = None) -> None:
        """`root` is an O_PATH descriptor, which `close` closes; at most `most` others stay open."""
        self._root = root
        self._table = table
        table.root.fd = root
        table.root.checked_s = float("inf")
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft == resource.RLIM_INFINITY:
            soft = _UNLIMITED
        # Half of the limit; the other half is for pins and for the rest of the process.
        self.most: Final = most or max(_FEWEST, min(_MOST, (soft - _SPARE) // 2))
        # A restore may pin this many; as many are left for files that programs remove.
        self.most_pins: Final = min(_MOST_PINS, max(0, (soft - _SPARE - self.most) // 2))
        self._open: dict[HostInode, None] = {}
        self._writable: dict[HostInode, None] = {}
        self.on_writer: Callable[[], None] | None = None  # called when a file was opened for writing
        self._is_deferring = False
        self._to_close: list[int] = []
        # Files that lost their names in a restore, maybe thousands; they are closed in the background.
        self.nameless: set[HostInode] = set()
        self._closer = BackgroundCloser()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep descriptors that are returned inside the block valid until its end, for calls that take two.

        Outside such a block, a descriptor is valid until the next call, which may close it to make room.
        """
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
            for descriptor in self._to_close:
                os.close(descriptor)
            self._to_close.clear()

    def _close(self, descriptor: int, *, in_background: bool = False) -> None:
        if in_background:
            self._closer.add(descriptor)
        elif self._is_deferring:
            self._to_close.append(descriptor)
        else:
            os.close(descriptor)

    # -- directories -------------------------------------------------------------------------
    def directory(self, node: HostInode) -> int:
        """An O_PATH descriptor of a directory.  ENOTDIR, ENOENT (removed), ESTALE (no longer at its dentry)."""
        if node.fd >= 0 and monotonic() - node.checked_s < RECHECK_S:
            node.used = True
            return node.fd
        if not node.is_dir:
            raise os_error(errno.ENOTDIR)
        self._check_above(node)
        return self._directory(node)

    def _check_above(self, node: HostInode) -> None:
        """Check the directories above from the top down; from the bottom up, the recursion could be a thousand deep."""
        above = []
        newest_s = monotonic() - RECHECK_S
        at = node.parent
        while at is not None and (at.fd < 0 or at.checked_s < newest_s):
            above.append(at)
            at = at.parent
        with suppress(OSError):  # the caller meets the error again
            for each in reversed(above):
                self._directory(each)

    def _directory(self, node: HostInode) -> int:
        if node.pin >= 0:
            return node.pin
        if node.fd >= 0:
            return self._recheck(node)
        node.fd = self._open_by_name(node, _O_PATH_DIRECTORY)
        node.checked_s = monotonic()
        self._admit(node)
        return node.fd

    def _recheck(self, node: HostInode) -> int:
        parent = node.parent
        if parent is not None:
            try:
                seen = os.stat(node.name, dir_fd=self.directory(parent), follow_symlinks=False)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            else:
                if node.is_shown(seen):
                    node.checked_s = monotonic()
                    node.used = True
                    return node.fd
        if os.fstat(node.fd).st_nlink == 0:
            # Removed: it stays valid, empty, and takes no new entries.
            node.pin, node.fd = node.fd, -1
            self._open.pop(node, None)
            return node.pin
        if self._find_moved(node):
            return node.fd
        self.release(node)
        raise os_error(errno.ESTALE)

    def _find_moved(self, node: HostInode) -> bool:
        """Find a directory that another program moved: False if it is no longer below the root."""
        path = os.readlink(proc_path(node.fd))
        top = os.readlink(proc_path(self._root)).rstrip(b"/") + b"/"
        if not path.startswith(top):
            return False
        at, names = self._table.root, path[len(top) :].split(b"/")
        try:
            for name in names:
                seen = os.stat(name, dir_fd=self.directory(at), follow_symlinks=False)
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
    def path(self, node: HostInode) -> tuple[int, bool]:
        """A descriptor of an inode of any type, for use with `proc_path`, and whether the caller must close it."""
        if node.pin >= 0:
            return node.pin, False
        if node.is_dir:
            return self.directory(node), False
        if node.fd >= 0:
            node.used = True
            return node.fd, False
        return self._open_by_name(node, os.O_PATH), True

    @contextmanager
    def of(self, node: HostInode) -> Iterator[int]:
        """The descriptor of `path`, inside a block."""
        descriptor, close = self.path(node)
        try:
            yield descriptor
        finally:
            if close:
                os.close(descriptor)

    def _open_by_name(self, node: HostInode, flags: int) -> int:
        """Open `node` by one of its names, the last seen first.  ESTALE if it is at none of them."""
        if node.lost:
            raise os_error(errno.ESTALE)
        for parent, name in tuple(node.dentries()):
            try:
                descriptor = self._opened(parent, name, flags)
            except OSError as error:
                if error.errno not in _GONE or (error.errno == errno.EXDEV and node.is_dir):
                    raise
                continue
            if node.is_shown(os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)
        raise os_error(errno.ESTALE)

    def _opened(self, parent: HostInode, name: bytes, flags: int) -> int:
        return self.with_room(lambda: open_beneath(self.directory(parent), name, flags, same_mount=True))

    def with_room(self, opens: Callable[[], int]) -> int:
        """Return what `opens` returns; if the process has no descriptor left, close some of the nodes' and repeat.

        `opens` takes the descriptors that it uses from this object each time.
        """
        for _ in range(_ATTEMPTS):
            try:
                return opens()
            except OSError as error:
                if error.errno not in _NONE_LEFT or not self._open:
                    raise
                self._evict((len(self._open) + 1) // 2)
        # Each closed descriptor made room only for the directory above, so stop here.
        return opens()

    # -- content -----------------------------------------------------------------------------
    def file(self, node: HostInode, *, write: bool = False) -> int:
        """A descriptor to read a regular file, or to read and write it.  EISDIR, EINVAL for other types."""
        if node.fd >= 0 and (node.writable or not write) and node.kind == stat.S_IFREG:
            node.used = True
            return node.fd
        if node.kind != stat.S_IFREG:
            raise os_error(errno.EISDIR if node.is_dir else errno.EINVAL)
        flags = (os.O_RDWR if write else os.O_RDONLY) | _O_CAREFUL
        descriptor = self._reopened(node, flags)
        if node.fd >= 0:
            self._close(node.fd)
            self._open.pop(node, None)
        self.keep_file(node, descriptor, writable=write)
        return descriptor

    def keep_file(self, node: HostInode, descriptor: int, *, writable: bool) -> None:
        """Keep an open descriptor of a regular file that has none yet."""
        node.fd, node.writable = descriptor, writable
        if writable:
            self._writable[node] = None
            if self.on_writer is not None:
                self.on_writer()
        self._admit(node)

    def _reopened(self, node: HostInode, flags: int) -> int:
        try:
            if node.pin >= 0 or node.fd >= 0:
                return os.open(proc_path(node.pin if node.pin >= 0 else node.fd), flags | os.O_CLOEXEC)
            return self._open_by_name(node, flags)
        except OSError as error:
            if error.errno not in _DENIED:
                raise
            return self._opened_against_mode(node, flags, error)

    def _opened_against_mode(self, node: HostInode, flags: int, denied: OSError) -> int:
        """Open a file although its mode denies that to its owner, because a program opened it before a chmod.

        The kernel has checked that the program may do what it asks for, but does not name the program's open file.
        """
        with self.of(node) as held:
            seen = os.fstat(held)
            if seen.st_uid != os.geteuid():
                raise denied
            path = proc_path(held)
            os.chmod(path, stat.S_IMODE(seen.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
            try:
                return os.open(path, flags | os.O_CLOEXEC)
            finally:
                os.chmod(path, stat.S_IMODE(seen.st_mode))

    # -- limits ------------------------------------------------------------------------------
    def pin(self, node: HostInode) -> bool:
        """Keep an inode open that is about to lose its last name.  False if it is already gone."""
        if node.pin >= 0:
            return True
        try:
            descriptor, is_new = self.path(node)
        except OSError:
            return False
        if not is_new:
            descriptor = os.open(proc_path(descriptor), os.O_PATH | os.O_CLOEXEC)
        node.pin = descriptor
        return True

    def unpin(self, node: HostInode) -> None:
        """Close the pin: the inode has a name, or nothing needs it."""
        if node.pin >= 0:
            self._close(node.pin, in_background=node in self.nameless)
            node.pin = -1

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
        if node.fd >= 0 and node.fd != self._root:
            self._close(node.fd, in_background=node in self.nameless)
            node.fd = -1
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
            try:
                reader = os.open(proc_path(node.fd), os.O_RDONLY | _O_CAREFUL | os.O_CLOEXEC)
            except OSError:  # the mode allows writing but not reading, or there are too many descriptors
                self.release_file(node)
                continue
            self._close(node.fd)
            node.fd, node.writable = reader, False
            del self._writable[node]

    def close_idle_writers(self) -> None:
        """Close executables that were opened to write and not used since the last call.

        Programs outside the mount could not execute them (ETXTBSY).
        """
        for node in tuple(self._writable):
            if node.used:
                node.used = False
            elif os.fstat(node.fd).st_mode & _ANY_EXECUTE:
                self.release_file(node)

    def check_invariants(self) -> None:
        """AssertionError if the open descriptors and the nodes contradict each other."""
        for node in self._table:
            if node is not self._table.root:
                assert (node.fd >= 0) == (node in self._open), (node.name, node.fd)
        assert len(self._open) <= self.most
        assert self._writable.keys() <= self._open.keys()
        assert not self._to_close

    def close(self) -> None:
        """Close everything, including the root."""
        for node in self._table:
            if node is not self._table.root:
                self.release(node)
        self._closer.stop()
        if self._root >= 0:
            os.close(self._root)
            self._root = self._table.root.fd = -1


_QUIET_S: Final = 0.1  # the thread starts to close when no descriptor was added for this long


class BackgroundCloser:
    """Closes the descriptors that it is given, soon.  Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._descriptors: list[int] = []
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def add(self, descriptor: int) -> None:
        """Close `descriptor` soon."""
        with self._changed:
            self._descriptors.append(descriptor)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="vfsd closing", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Close all descriptors and return when that is done."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            for descriptor in reversed(taken):
                os.close(descriptor)

    def _take(self) -> list[int] | None:
        """Wait until no more descriptors come and return them; None, which ends the thread, if there are none."""
        with self._changed:
            while not self._is_stopping and self._changed.wait(_QUIET_S):
                pass
            taken, self._descriptors = self._descriptors, []
            if not taken:
                self._thread = None
                return None
            return taken
