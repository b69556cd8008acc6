"""HostFiles: the files below a host directory, reached through directory descriptors.

Names are opened one by one below their directory (`protocol.linux.beneath`).  The content of a node is opened through
/proc/self/fd, which leads to the same file even if it was renamed.  `top` opens the root anew for each call, because
a descriptor that stays open would keep a mount from being unmounted.  It compares the mount that it opened, so that no
call works on the directory below a mount that is gone, whenever that goes.
"""

from __future__ import annotations

import fcntl
import io
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Final, Literal

from protocol.adapters.path_files import Status
from protocol.linux import posix_acl
from protocol.linux.beneath import open_beneath
from protocol.linux.portable import Handle, proc_path
from protocol.linux.regular_file import read_xattrs
from protocol.linux.syscalls import MountId, mount_of, open_mount

_PIECE_BYTES: Final = 1 << 20  # of one read: os.pread allocates the requested size before it reads
_LOCK_S: Final = 5.0
_LOCK_POLL_S: Final = 0.001
_FILE: Final = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class HostFiles:
    """Nodes are file descriptors.  `read_only` follows the file system's mount; `durable` syncs each write.

    `umask` is that of the caller, if it is not this process.

    `mount` is the mount whose files these are, at `root`; None: the one that is there now, without a check that its
    daemon lives.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        read_only: bool = False,
        durable: bool = False,
        umask: int | None = None,
        mount: MountId | None = None,
    ) -> None:
        self._umask = umask
        self.root = os.path.realpath(root)
        self._durable = durable
        self._is_served = mount is not None
        directory = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        node = os.open(self.root, directory) if mount is None else open_mount(self.root, mount, asks=True)
        try:
            self._mount = mount or mount_of(node)
            is_read_only = os.fstatvfs(node).f_flag & os.ST_RDONLY
        finally:
            os.close(node)
        self.read_only = read_only or bool(is_read_only)

    def top(self, *, begins: bool = False) -> int:
        return open_mount(self.root, self._mount, asks=begins and self._is_served)

    def child(self, node: int, name: bytes) -> int:
        return open_beneath(node, name, os.O_PATH)

    def release(self, node: int) -> None:
        os.close(node)

    def status(self, node: int) -> Status:
        return _status(os.fstat(node))

    def status_of(self, node: int, name: bytes) -> Status:
        return _status(os.stat(name, dir_fd=node, follow_symlinks=False))

    def readlink(self, node: int) -> bytes:
        return os.readlink(b"", dir_fd=node)  # of the descriptor itself, readlink(2)

    def names(self, node: int) -> list[tuple[bytes, int]]:
        directory = readable(node)
        try:
            with os.scandir(directory) as entries:
                return [(os.fsencode(entry.name), _kind(entry)) for entry in entries]
        finally:
            os.close(directory)

    def xattrs(self, node: int) -> Mapping[bytes, bytes]:
        # User attributes are for files and directories only, xattr(7).
        return {} if stat.S_ISLNK(os.fstat(node).st_mode) else read_xattrs(proc_path(node))

    # -- content -----------------------------------------------------------------------------
    def open(self, node: int, mode: Literal["read", "append"]) -> HostFile:
        how = os.O_RDONLY if mode == "read" else os.O_WRONLY | os.O_APPEND
        file = HostFile(os.open(proc_path(node), how | _FILE), durable=self._durable)
        os.close(node)
        return file

    def create(self, node: int, name: bytes, mode: int | None) -> HostFile:
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        final = self._masked(node, 0o666) if mode is None else None
        first = 0o600 if final is not None else 0o666 if mode is None else mode
        descriptor = os.open(name, how, first, dir_fd=node)
        if final is not None:
            os.fchmod(descriptor, final)
        return HostFile(descriptor, durable=self._durable)

    def _masked(self, node: int, mode: int) -> int | None:
        """The mode of a new entry of directory `node`; None if the system finds it: from a default ACL, for example."""
        if self._umask is None or posix_acl.DEFAULT in self.xattrs(node):
            return None
        return mode & ~self._umask

    # -- entries -----------------------------------------------------------------------------
    def mkdir(self, node: int, name: bytes) -> None:
        final = self._masked(node, 0o777)
        os.mkdir(name, 0o777 if final is None else 0o700, dir_fd=node)
        if final is not None:
            with closing(Handle(self.child(node, name))) as made:
                self.set_mode(made.fd, os.fstat(made.fd).st_mode & stat.S_ISGID | final)

    def symlink(self, node: int, name: bytes, target: bytes) -> None:
        os.symlink(target, name, dir_fd=node)

    def link(self, source: int, node: int, name: bytes) -> None:
        os.link(proc_path(source), name, dst_dir_fd=node, follow_symlinks=True)

    def mknod(self, node: int, name: bytes, mode: int, rdev: int) -> None:
        os.mknod(name, mode, rdev, dir_fd=node)

    def unlink(self, node: int, name: bytes) -> None:
        os.unlink(name, dir_fd=node)

    def rmdir(self, node: int, name: bytes) -> None:
        os.rmdir(name, dir_fd=node)

    def rename(self, node: int, name: bytes, new_node: int, new_name: bytes) -> None:
        os.rename(name, new_name, src_dir_fd=node, dst_dir_fd=new_node)

    @contextmanager
    def locked(self, node: int) -> Iterator[None]:
        directory = -1
        try:
            with suppress(OSError):  # the directory may not be readable, or its file system has no locks
                directory = readable(node)
                wait_for_lock(lambda: fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB))
            yield
        finally:
            if directory >= 0:
                os.close(directory)

    def sync_names(self, node: int) -> None:
        if self._durable:
            directory = readable(node)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    # -- attributes --------------------------------------------------------------------------
    def set_mode(self, node: int, mode: int) -> None:
        os.chmod(proc_path(node), stat.S_IMODE(mode))

    def set_owner(self, node: int, uid: int, gid: int) -> None:
        os.chown(proc_path(node), uid, gid)

    def set_mtime(self, node: int, mtime_ns: int) -> None:
        os.utime(proc_path(node), ns=(os.fstat(node).st_atime_ns, mtime_ns))

    def set_xattrs(self, node: int, xattrs: Mapping[bytes, bytes]) -> None:
        present = self.xattrs(node)
        for name in present:
            if name not in xattrs:
                os.removexattr(proc_path(node), name)
        for name, value in xattrs.items():
            if present.get(name) != value:
                os.setxattr(proc_path(node), name, value)


class HostFile:
    """An open file.  Like Python's own files, it is closed with a ResourceWarning if nobody closes it."""

    def __init__(self, descriptor: int, *, durable: bool) -> None:
        self._durable = durable
        self._file = io.FileIO(descriptor, "rb")  # opened only for the descriptor; the mode does not matter
        self.node = descriptor

    def size(self) -> int:
        return os.fstat(self.node).st_size

    def read(self, offset: int, size: int) -> bytes:
        pieces: list[bytes] = []
        while size > 0:
            piece = os.pread(self.node, min(size, _PIECE_BYTES), offset)
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
            size -= len(piece)
        return b"".join(pieces)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> int:
        return os.pwrite(self.node, data, offset)  # O_APPEND writes at the end, whatever `offset`, pwrite(2)

    def sync(self) -> None:
        if self._durable:
            os.fsync(self.node)

    def close(self) -> None:
        self._file.close()


def readable(node: int) -> int:
    """Open directory `node`, a descriptor with O_PATH, for reading."""
    return os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=node)


def _kind(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFREG if entry.is_file(follow_symlinks=False) else 0


def _status(seen: os.stat_result) -> Status:
    return Status(
        seen.st_mode,
        seen.st_size,
        seen.st_mtime_ns,
        seen.st_uid,
        seen.st_gid,
        seen.st_nlink,
        seen.st_ino,
        seen.st_rdev,
    )


def wait_for_lock(attempt: Callable[[], object]) -> None:
    """Call `attempt` until it raises no BlockingIOError, or for some seconds: a program may hold the lock for hours."""
    end_s = time.monotonic() + _LOCK_S
    while True:
        try:
            attempt()
        except BlockingIOError:
            if time.monotonic() >= end_s:
                return
            time.sleep(_LOCK_POLL_S)
        else:
            return
