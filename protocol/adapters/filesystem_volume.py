"""FilesystemVolume: any object with the Filesystem methods as a Volume, so that third-party filesystems can be mounted.

State that the Filesystem contract lacks lives only as long as the mount knows the inode: modes, owners and times that
were set, and files that were removed while open.  Unsupported operations are refused: links, special files, xattrs
(EPERM, EOPNOTSUPP), and renaming directories (EXDEV, after which mv copies).

A file is read whole when it is first written to, truncated or removed, kept in memory while it changes, and written
back by `flush` (at each close), `fsync`, the last forget and `write_back_all`.  Readers of the Filesystem see the
content of the last close.  A file over MAX_FILE_BYTES is not kept: it cannot be changed, and a program that has it open
when it is removed gets ESTALE.

Threading: the serving loop, which waits for the Filesystem's methods: run a filesystem on slow media in a process of
its own.

Invariants (`check_invariants`): a node with a path is the one that its path leads to; a node without a path is a
removed file with lookups; only files have content; dirty files have it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final, NoReturn

from protocol.directory_cookies import DirectoryCookies, downward
from protocol.errors import errno_of, os_error
from protocol.linux.portable import without_privileges
from protocol.volume import (
    NAME_MAX,
    RENAME_NOREPLACE,
    ROOT_INODE,
    AttributeChanges,
    Caller,
    DirectoryEntry,
    PlainAttributes,
    StatFs,
    VolumeCapabilities,
)

if TYPE_CHECKING:
    from protocol.filesystem import Filesystem
    from protocol.types import FileStat
    from protocol.volume import Buffer

_PAGE: Final = 4096
_FILE_MODE: Final = 0o644
_DIRECTORY_MODE: Final = 0o755
_MANY: Final = 2**31 - 1  # inodes and pages: a Filesystem does not report its capacity
MAX_FILE_BYTES: Final = 1 << 30  # a changing file is held in memory


@dataclass(slots=True, eq=False)
class _Node:
    """A file or directory that the kernel has looked up.  `path` is None after it was removed."""

    inode: int
    path: str | None
    is_dir: bool
    lookups: int = 0
    data: bytearray | None = None
    dirty: bool = False
    mode: int | None = None
    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    mtime_ns: int | None = None  # valid while the Filesystem still reports this `modified_at`
    mtime_is_set: bool = False  # by utimensat(2), not by writing
    modified_at: datetime | None = None
    cookies: DirectoryCookies | None = None


class FilesystemVolume:
    """The volume of `filesystem`; it wants a request for each close(2)."""

    capabilities: Final = VolumeCapabilities(flush=True, self_check=True)

    def __init__(self, filesystem: Filesystem, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._filesystem = filesystem
        self._clock = clock
        self._started_ns = clock()
        root = _Node(ROOT_INODE, ".", is_dir=True)
        root.lookups = 1
        self._nodes = {ROOT_INODE: root}
        self._by_path = {".": root}
        self._next_inode = ROOT_INODE + 1

    @property
    def read_only(self) -> bool:
        """Whether every changing call fails with EROFS."""
        return self._filesystem.read_only

    def check_invariants(self) -> None:
        """Raise AssertionError if an invariant of the module's docstring does not hold."""
        for number, node in self._nodes.items():
            assert node.inode == number
            if node.path is not None:
                assert self._by_path[node.path] is node, node.path
            else:
                assert node.lookups > 0
            assert not (node.is_dir and node.data is not None)
            assert not node.dirty or node.data is not None
        assert all(node.path == path for path, node in self._by_path.items())

    # -- inodes --------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> PlainAttributes:
        directory = self._directory(parent)
        if name in (b".", b".."):
            node = directory if name == b"." else self._parent(directory)
        else:
            path = self._below(directory, name)
            with _as_errno():
                found = self._filesystem.stat(path)
            node = self._node_at(path, is_dir=found.is_directory)
        node.lookups += 1
        return self._attributes(node)

    def forget(self, inode: int, count: int) -> None:
        node = self._nodes.get(inode)
        if node is None or inode == ROOT_INODE:
            return
        node.lookups -= count
        if node.lookups <= 0:
            try:
                self._write_back(node)
            finally:  # unwritten content is lost; close and fsync have reported that
                del self._nodes[inode]
                if node.path is not None:
                    del self._by_path[node.path]

    def getattr(self, inode: int) -> PlainAttributes:
        return self._attributes(self._node(inode))

    def setattr(self, inode: int, changes: AttributeChanges) -> PlainAttributes:
        self._check_writable()
        node = self._node(inode)
        if changes.size is not None:
            self._resize(node, changes.size)
        if changes.kill_privileges:
            _clear_privileges(node)
        if changes.mode is not None:
            node.mode = changes.mode & 0o7777
        if changes.uid is not None:
            node.uid = changes.uid
        if changes.gid is not None:
            node.gid = changes.gid
        if changes.mtime_ns is not None:
            node.mtime_ns, node.mtime_is_set = changes.mtime_ns, True
            node.modified_at = self._modified_at(node)
        return self._attributes(node)

    def readlink(self, inode: int) -> bytes:
        self._node(inode)
        raise os_error(errno.EINVAL)

    # -- entries -------------------------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, _rdev: int, caller: Caller) -> PlainAttributes:
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise os_error(errno.EPERM)
        path = self._new_path(parent, name)
        with _as_errno():
            self._filesystem.write_bytes(path, b"", mode="create", create_parents=False)
        return self._made(path, mode, caller, is_dir=False)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> PlainAttributes:
        path = self._new_path(parent, name)
        with _as_errno():
            self._filesystem.mkdir(path, parents=False, exist_ok=False)
        return self._made(path, mode, caller, is_dir=True)

    def symlink(self, *_: object) -> PlainAttributes:
        raise os_error(errno.EPERM)

    link = symlink

    def tmpfile(self, *_: object) -> PlainAttributes:
        raise os_error(errno.EOPNOTSUPP)

    def unlink(self, parent: int, name: bytes) -> None:
        path, found = self._existing(parent, name)
        if found.is_directory:
            raise os_error(errno.EISDIR)
        with self._removing(path), _as_errno():
            self._filesystem.delete(path)

    def rmdir(self, parent: int, name: bytes) -> None:
        path, found = self._existing(parent, name)
        if not found.is_directory:
            raise os_error(errno.ENOTDIR)
        with _as_errno():
            if self._filesystem.list(path):
                raise os_error(errno.ENOTEMPTY)
            self._filesystem.delete(path)
        self._detach(path)

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        _caller: Caller | None = None,
    ) -> None:
        if flags & ~RENAME_NOREPLACE:
            raise os_error(errno.EINVAL)
        path, found = self._existing(parent, name)
        new_path = self._below(self._directory(new_parent), new_name)
        if path == new_path:
            return
        if found.is_directory:
            raise os_error(errno.EXDEV)
        with _as_errno():
            if self._filesystem.is_dir(new_path):
                raise os_error(errno.EISDIR)
            if flags & RENAME_NOREPLACE and self._filesystem.exists(new_path):
                raise os_error(errno.EEXIST)
        node = self._by_path.get(path)
        with self._removing(new_path):
            self._copy(path, new_path)
        if node is not None:
            del self._by_path[path]
            node.path = new_path
            node.dirty = False
            node.mode = found.mode & 0o7777 if node.mode is None and found.mode else node.mode
            node.modified_at = self._modified_at(node)
            self._by_path[new_path] = node
        with _as_errno():
            self._filesystem.delete(path)

    def readdir(self, inode: int, cookie: int) -> Iterator[DirectoryEntry]:
        directory = self._directory(inode)
        with _as_errno():
            entries = self._filesystem.list(self._path(directory))
        found = {name: entry.is_directory for entry in entries if (name := _encoded(entry.name))}
        cookies = directory.cookies
        if cookies is None:
            cookies = directory.cookies = downward(None, found)
        else:
            for name in [name for _, name in cookies.after(0) if name not in found]:
                cookies.remove(name)
            for name in sorted(name for name in found if name not in cookies):
                cookies.add(name)
        return self._entries(directory, found, cookies, cookie)

    def _entries(
        self, directory: _Node, found: dict[bytes, bool], cookies: DirectoryCookies, cookie: int
    ) -> Iterator[DirectoryEntry]:
        for dot, above, name in ((1, directory, b"."), (2, self._parent(directory), b"..")):
            if dot > cookie:
                yield DirectoryEntry(name, above.inode, stat.S_IFDIR, dot)
        for at, name in cookies.after(cookie):
            path = self._below(directory, name)
            node = self._by_path.get(path)
            # A separate inode number for each name, also before the kernel looks it up.
            number = node.inode if node is not None else _MANY + at
            yield DirectoryEntry(name, number, stat.S_IFDIR if found.get(name) else stat.S_IFREG, at)

    # -- content -------------------------------------------------------------------------------
    def read(self, inode: int, offset: int, size: int) -> Buffer:
        node = self._file(inode)
        if node.data is not None:
            return bytes(node.data[offset : offset + size])
        if node.path is None:
            raise os_error(errno.ESTALE)  # removed, and too large to keep or unreadable
        with _as_errno():
            return self._filesystem.read_bytes(node.path, offset=offset, limit=size).content

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        self._check_writable()
        node = self._file(inode)
        if not len(data):  # an empty write does not extend the file
            return 0
        end = offset + len(data)
        if end > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        content = self._loaded(node)
        if offset > len(content):
            content.extend(bytes(offset - len(content)))
        content[offset:end] = data
        self._changed(node)
        if kill_privileges:
            _clear_privileges(node)
        return len(data)

    def flush(self, inode: int) -> None:
        """Write `inode` back; the kernel calls this at each close of a descriptor."""
        self._write_back(self._node(inode))

    def fsync(self, inode: int, *, data_only: bool) -> None:  # noqa: ARG002 -- the contract's
        self.flush(inode)

    def write_back_all(self) -> list[tuple[str, OSError]]:
        """Write back, at the end of a mount, all files that were not closed; return the errors by path."""
        failed: list[tuple[str, OSError]] = []
        for node in list(self._nodes.values()):
            try:
                self._write_back(node)
            except Exception as error:  # noqa: BLE001 -- the others are written all the same
                cause = error if isinstance(error, OSError) else OSError(errno.EIO, repr(error))
                failed.append((node.path or "", cause))
        return failed

    def fallocate(self, *_: object) -> None:
        raise os_error(errno.EOPNOTSUPP)

    def seek(self, inode: int, offset: int, whence: int) -> int:
        size = self._size(self._file(inode))
        if offset >= size:
            raise os_error(errno.ENXIO)
        return offset if whence == os.SEEK_DATA else size

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        return self.write(target, target_offset, self.read(source, source_offset, length))

    # -- the rest ------------------------------------------------------------------------------
    def statfs(self) -> StatFs:
        return StatFs(_PAGE, _MANY, _MANY, _MANY, _MANY)

    def getxattr(self, inode: int, *_: object) -> NoReturn:
        self._node(inode)
        raise os_error(errno.EOPNOTSUPP)

    setxattr = removexattr = getxattr

    def listxattr(self, inode: int) -> Sequence[bytes]:
        self._node(inode)
        return ()

    # -- helpers -------------------------------------------------------------------------------
    def _node(self, inode: int) -> _Node:
        try:
            return self._nodes[inode]
        except KeyError:
            raise os_error(errno.ENOENT, f"inode {inode}") from None

    def _directory(self, inode: int) -> _Node:
        node = self._node(inode)
        if not node.is_dir:
            raise os_error(errno.ENOTDIR)
        return node

    def _file(self, inode: int) -> _Node:
        node = self._node(inode)
        if node.is_dir:
            raise os_error(errno.EISDIR)
        return node

    def _path(self, node: _Node) -> str:
        if node.path is None:
            raise os_error(errno.ENOENT)
        return node.path

    def _parent(self, directory: _Node) -> _Node:
        above = self._path(directory).rpartition("/")[0] or "."
        return self._by_path.get(above, self._nodes[ROOT_INODE])

    def _below(self, directory: _Node, name: bytes) -> str:
        if len(name) > NAME_MAX:
            raise os_error(errno.ENAMETOOLONG)
        path = self._path(directory)
        text = os.fsdecode(name)
        return text if path == "." else f"{path}/{text}"

    def _new_path(self, parent: int, name: bytes) -> str:
        self._check_writable()
        path = self._below(self._directory(parent), name)
        with _as_errno():
            if self._filesystem.exists(path):
                raise os_error(errno.EEXIST)
        return path

    def _existing(self, parent: int, name: bytes) -> tuple[str, FileStat]:
        self._check_writable()
        path = self._below(self._directory(parent), name)
        with _as_errno():
            return path, self._filesystem.stat(path)

    def _node_at(self, path: str, *, is_dir: bool) -> _Node:
        node = self._by_path.get(path)
        if node is not None and node.is_dir != is_dir:
            self._detach(path)  # replaced by something else behind the mount; its content is gone
            node = None
        if node is None:
            node = _Node(self._next_inode, path, is_dir=is_dir)
            self._next_inode += 1
            self._nodes[node.inode] = self._by_path[path] = node
        return node

    def _made(self, path: str, mode: int, caller: Caller, *, is_dir: bool) -> PlainAttributes:
        node = self._node_at(path, is_dir=is_dir)
        node.mode = mode & 0o7777
        node.uid, node.gid = caller.uid, caller.gid
        node.lookups += 1
        return self._attributes(node)

    @contextmanager
    def _removing(self, path: str) -> Iterator[None]:
        """Delete the entry at `path` inside the block; programs that have it open keep its content."""
        node = self._by_path.get(path)
        if node is None or node.is_dir or node.data is not None:
            yield
        else:
            with suppress(OSError, MemoryError):  # a file that cannot be read can still be removed
                node.data = bytearray(self._load(path))
            try:
                yield
            except BaseException:
                node.data = None
                raise
        self._detach(path)

    def _detach(self, path: str) -> None:
        """Forget the node at `path`."""
        node = self._by_path.pop(path, None)
        if node is not None:
            node.dirty = False
            node.path = None

    def _copy(self, path: str, new_path: str) -> None:
        """Copy the content of file `path`, as programs see it, to `new_path`: all of it or nothing."""
        node = self._by_path.get(path)
        with _as_errno(), ExitStack() as stack:
            pieces: Iterable[bytes]
            if node is not None and node.data is not None:
                pieces = [bytes(node.data)]
            else:
                pieces = stack.enter_context(self._filesystem.open_read(path)).chunks()
            writer = stack.enter_context(self._filesystem.open_write(new_path, create_parents=False))
            writer.write_all(pieces)

    def _load(self, path: str) -> bytes:
        with _as_errno():
            if self._filesystem.stat(path).size_bytes > MAX_FILE_BYTES:
                raise os_error(errno.EFBIG)
            with self._filesystem.open_read(path) as reader:
                return b"".join(reader.chunks())

    def _loaded(self, node: _Node) -> bytearray:
        if node.data is None:
            if node.path is None:
                raise os_error(errno.ESTALE)
            node.data = bytearray(self._load(node.path))
        return node.data

    def _changed(self, node: _Node) -> None:
        node.dirty = True
        node.mtime_ns, node.mtime_is_set = self._clock(), False

    def _write_back(self, node: _Node) -> None:
        if node.path is None or node.data is None:
            return
        if node.dirty:
            with _as_errno(), self._filesystem.open_write(node.path, create_parents=False) as writer:
                writer.write_all([bytes(node.data)])
            node.dirty = False
            node.modified_at = self._modified_at(node)
            if node.modified_at is not None and not node.mtime_is_set:
                node.mtime_ns = None
        node.data = None  # later reads go to the Filesystem

    def _resize(self, node: _Node, size: int) -> None:
        if node.is_dir:
            raise os_error(errno.EISDIR)
        if size > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        content = self._loaded(node)
        del content[size:]
        content.extend(bytes(size - len(content)))
        self._changed(node)

    def _modified_at(self, node: _Node) -> datetime | None:
        with suppress(Exception):  # the caller has changed the file already, and must not fail
            return self._filesystem.stat(self._path(node)).modified_at
        return None

    def _size(self, node: _Node) -> int:
        if node.data is not None:
            return len(node.data)
        with _as_errno():
            return self._filesystem.stat(self._path(node)).size_bytes

    def _attributes(self, node: _Node) -> PlainAttributes:
        size, mtime_ns, mode = 0, self._started_ns, 0
        if node.path is not None:
            with _as_errno():
                found = self._filesystem.stat(node.path)
            size, mode = found.size_bytes, found.mode & 0o7777
            if found.modified_at is not None:
                mtime_ns = int(found.modified_at.timestamp() * 1e9)
            if found.modified_at != node.modified_at and not node.dirty:
                node.mtime_ns = None  # changed behind the mount
        if node.data is not None:
            size = len(node.data)
        size = 0 if node.is_dir else size
        kind, usual = (stat.S_IFDIR, _DIRECTORY_MODE) if node.is_dir else (stat.S_IFREG, _FILE_MODE)
        mtime_ns = mtime_ns if node.mtime_ns is None else node.mtime_ns
        return PlainAttributes(
            inode=node.inode,
            mode=kind | (node.mode if node.mode is not None else mode or usual),
            nlink=(2 if node.is_dir else 1) if node.path is not None else 0,
            uid=node.uid,
            gid=node.gid,
            size=size,
            blocks=-(-size // _PAGE) * (_PAGE // 512),
            atime_ns=mtime_ns,
            mtime_ns=mtime_ns,
            ctime_ns=mtime_ns,
            birth_ns=self._started_ns,
        )

    def _check_writable(self) -> None:
        if self.read_only:
            raise os_error(errno.EROFS)


def _clear_privileges(node: _Node) -> None:
    if node.mode is not None and not node.is_dir:
        node.mode = without_privileges(node.mode)


def _encoded(name: str) -> bytes:
    """Encode a name for the kernel; empty for a name that the kernel cannot have."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return b""
    return b"" if encoded in (b".", b"..") or len(encoded) > NAME_MAX or set(encoded) & set(b"/\0") else encoded


@contextmanager
def _as_errno() -> Iterator[None]:
    """Convert a Filesystem's errors to errnos for the kernel; ValueError (a limit, a refused name) becomes EINVAL."""
    try:
        yield
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    except OSError as error:
        if errno_of(error) is None:
            raise OSError(errno.EIO, str(error)) from error
        raise
