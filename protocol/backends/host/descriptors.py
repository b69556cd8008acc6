"""Descriptors: the open files behind nodes, few of them at a time, each proved to be the node's inode.

How nothing leads outside: a node is opened from its parent's descriptor by one name, never through a symlink and
never into another mount (`open_beneath`), and what was opened must have the node's (st_dev, st_ino), or it is
closed again.  What is then done to an inode goes by the descriptor: by itself, or by its link in /proc/self/fd,
which leads to that inode whatever its names have become.

A directory's descriptor goes where the directory goes, so that one moved out of the tree by somebody else
would lead outside.  So it is used for RECHECK_S at most before its place is looked at again, and those above it.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Final

from protocol.backends.host.closing import Closing
from protocol.backends.host.nodes import HostInode, HostInodeTable
from protocol.errors import os_error
from protocol.linux.beneath import RECHECK_S, open_beneath, proc_path

__all__ = ["Descriptors"]

_ANY_EXECUTE: Final = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_FEWEST: Final = 16
_MOST: Final = 8192
_MOST_PINS: Final = 65536
_UNLIMITED: Final = 1 << 20
_SPARE: Final = 64  # for everything else that the process has open
_O_PATH_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY
# A file may have become a fifo or a device since: to open it must neither wait nor take a terminal.
_O_CAREFUL: Final = os.O_NONBLOCK | os.O_NOCTTY
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})
_ATTEMPTS: Final = 16  # to open something, each after half of the rest was closed: 2**16 are more than there can be
_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})


class Descriptors:
    """Opens nodes, and closes those not used lately when there are too many."""

    def __init__(self, root: int, most: int | None = None) -> None:
        """`root` is an O_PATH descriptor, to be closed by `close`; at most `most` others are kept."""
        self._root = root
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft == resource.RLIM_INFINITY:
            soft = _UNLIMITED
        # Half of them: pins, and what the process does beside, have the other half.
        self.most: Final = most or max(_FEWEST, min(_MOST, (soft - _SPARE) // 2))
        # What a restore may pin beside them, so that as many are left for what programs remove.
        self.most_pins: Final = min(_MOST_PINS, max(0, (soft - _SPARE - self.most) // 2))
        self._open: dict[HostInode, None] = {}
        self._writable: dict[HostInode, None] = {}
        self._table: HostInodeTable
        self._holding = False
        self._doomed: list[int] = []
        # Of many files that lost their names at once; the last to let go of them shall not wait for each.
        self.nameless: set[HostInode] = set()
        self._closing = Closing()

    def bind(self, table: HostInodeTable) -> None:
        """The table whose nodes these are."""
        self._table = table
        table.root.fd = self._root
        table.root.checked_s = float("inf")

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Descriptors got in this block stay good until its end: for calls that take two.

        Elsewhere a descriptor is good until the next one is asked for, which may close it to make room.
        """
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            for descriptor in self._doomed:
                os.close(descriptor)
            self._doomed.clear()

    def _close(self, descriptor: int, *, soon: bool = False) -> None:
        if soon:
            self._closing.soon(descriptor)
        elif self._holding:
            self._doomed.append(descriptor)
        else:
            os.close(descriptor)

    # -- directories -------------------------------------------------------------------------
    def directory(self, node: HostInode) -> int:
        """An O_PATH descriptor of a directory.  ENOTDIR, ENOENT (removed), ESTALE (not where it was any more)."""
        if node.fd >= 0 and monotonic() - node.checked_s < RECHECK_S:
            node.used = True
            return node.fd
        if not node.is_dir:
            raise os_error(errno.ENOTDIR)
        self._check_above(node)
        return self._directory(node)

    def _check_above(self, node: HostInode) -> None:
        """Look at the places above from the top down: each would ask for the one above it, a thousand times maybe."""
        above = []
        newest_s = monotonic() - RECHECK_S
        at = node.parent
        while at is not None and (at.fd < 0 or at.checked_s < newest_s):
            above.append(at)
            at = at.parent
        with suppress(OSError):  # raised once more where it matters
            for each in reversed(above):
                self._directory(each)

    def _directory(self, node: HostInode) -> int:
        if node.pin >= 0:
            return node.pin
        if node.fd >= 0:
            return self._recheck(node)
        node.fd = self._open_at_place(node, _O_PATH_DIRECTORY)
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
            # Removed: it stays what it is, empty, and takes nothing new.
            node.pin, node.fd = node.fd, -1
            self._open.pop(node, None)
            return node.pin
        if self._found_again(node):
            return node.fd
        self.release(node)
        raise os_error(errno.ESTALE)

    def _found_again(self, node: HostInode) -> bool:
        """Whether a directory that somebody moved is still below the root; its place is entered then."""
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
                    self._table.add_place(node, at, name)
                    node.checked_s = monotonic()
                    return True
                at = self._table.enter(at, name, seen)
        except OSError:
            pass
        return False

    # -- any inode ---------------------------------------------------------------------------
    def path(self, node: HostInode) -> tuple[int, bool]:
        """A descriptor of any kind of inode, good for /proc/self/fd, and whether the caller must close it."""
        if node.pin >= 0:
            return node.pin, False
        if node.is_dir:
            return self.directory(node), False
        if node.fd >= 0:
            node.used = True
            return node.fd, False
        return self._open_at_place(node, os.O_PATH), True

    @contextmanager
    def of(self, node: HostInode) -> Iterator[int]:
        """As `path`, for the length of a block."""
        descriptor, close = self.path(node)
        try:
            yield descriptor
        finally:
            if close:
                os.close(descriptor)

    def _open_at_place(self, node: HostInode, flags: int) -> int:
        """A descriptor of `node` by one of its names, the last seen first.  ESTALE where it is at none of them."""
        if node.lost:
            raise os_error(errno.ESTALE)
        for parent, name in tuple(node.places()):
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
        for _ in range(_ATTEMPTS):
            try:
                return open_beneath(self.directory(parent), name, flags, same_mount=True)
            except OSError as error:
                if error.errno not in _NONE_LEFT or not self._open:
                    raise
                self._evict((len(self._open) + 1) // 2)
        # The last one that was closed made room for the directory above, and so on for ever.
        return open_beneath(self.directory(parent), name, flags, same_mount=True)

    # -- content -----------------------------------------------------------------------------
    def file(self, node: HostInode, *, write: bool = False) -> int:
        """A descriptor to read a regular file, or to read and write it.  EISDIR, EINVAL for other kinds."""
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
        self._admit(node)

    def _reopened(self, node: HostInode, flags: int) -> int:
        try:
            if node.pin >= 0 or node.fd >= 0:
                return os.open(proc_path(node.pin if node.pin >= 0 else node.fd), flags | os.O_CLOEXEC)
            return self._open_at_place(node, flags)
        except OSError as error:
            if error.errno not in _DENIED:
                raise
            return self._opened_against_mode(node, flags, error)

    def _opened_against_mode(self, node: HostInode, flags: int, denied: OSError) -> int:
        """Open for the owner what its mode denies him, as whoever opened it before the chmod may go on.

        The kernel has asked for nothing but what its caller may; which descriptor it is for it does not say.
        """
        held, close = self.path(node)
        try:
            seen = os.fstat(held)
            if seen.st_uid != os.geteuid():
                raise denied
            path = proc_path(held)
            os.chmod(path, stat.S_IMODE(seen.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
            try:
                return os.open(path, flags | os.O_CLOEXEC)
            finally:
                os.chmod(path, stat.S_IMODE(seen.st_mode))
        finally:
            if close:
                os.close(held)

    # -- keeping few of them -----------------------------------------------------------------
    def pin(self, node: HostInode) -> bool:
        """Hold on to an inode that is about to lose its last name.  False where it is not there any more."""
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
        """It has a name (again)."""
        if node.pin >= 0:
            self._close(node.pin)
            node.pin = -1

    def _admit(self, node: HostInode) -> None:
        node.used = True
        self._open[node] = None
        if len(self._open) > self.most:
            self._evict(1)

    def _evict(self, count: int) -> None:
        """Close `count` of them, those first that were not used since they were last passed by."""
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
        """Close the descriptor for content, or of a directory; the root keeps its."""
        if node.fd >= 0 and node.fd != self._root:
            self._close(node.fd, soon=node in self.nameless)
            node.fd = -1
            node.writable = False
            self._open.pop(node, None)
            self._writable.pop(node, None)

    def release(self, node: HostInode) -> None:
        """Close all that is open for `node`."""
        self.release_file(node)
        if node in self.nameless:
            self.nameless.remove(node)
            if node.pin >= 0:
                self._close(node.pin, soon=True)
                node.pin = -1
        self.unpin(node)

    def close_writers(self) -> None:
        """Keep open only to read what was opened to write, executable or not: whoever makes it so may execute it."""
        for node in tuple(self._writable):
            try:
                reader = os.open(proc_path(node.fd), os.O_RDONLY | _O_CAREFUL | os.O_CLOEXEC)
            except OSError:  # may be written, but not read, by its mode; or there is no room for one more
                self.release_file(node)
                continue
            self._close(node.fd)
            node.fd, node.writable = reader, False
            del self._writable[node]

    def close_idle_writers(self) -> None:
        """Close executables that were opened to write and not used since the last call.

        Beside the mount nobody could execute them (ETXTBSY).
        """
        for node in tuple(self._writable):
            if node.used:
                node.used = False
            elif os.fstat(node.fd).st_mode & _ANY_EXECUTE:
                self.release_file(node)

    def check_invariants(self) -> None:
        """AssertionError where what is open and what is known to be open differ."""
        for node in self._table:
            if node is not self._table.root:
                assert (node.fd >= 0) == (node in self._open), (node.name, node.fd)
        assert len(self._open) <= self.most
        assert self._writable.keys() <= self._open.keys()
        assert not self._doomed

    def close(self) -> None:
        """Close everything, the root too."""
        for node in self._table:
            if node is not self._table.root:
                self.release(node)
        self._closing.end()
        if self._root >= 0:
            os.close(self._root)
            self._root = self._table.root.fd = -1
