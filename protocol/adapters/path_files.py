"""PathFiles: the few operations on files that `PathFilesystem` needs of a backend.

A *node* is a number for a file, directory or symlink, held until `release`: an inode number with a lookup, or a file
descriptor.  It stays the same file whatever is renamed or deleted meanwhile, and names are always looked up in a
directory that is held: no path is passed to a kernel, which would follow symlinks in it.

`resolve` follows symlinks and never leaves the root.  It looks up one name at a time: if another program replaces a
directory by a symlink meanwhile, the lookup fails instead of leading outside.
`PathFilesTree` is the tree of the files; it follows no symlink.

Names are bytes without "/".  Errors are OSError with the errno of the system call.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, NamedTuple, Protocol, Self

from protocol.errors import os_error
from protocol.paths import decode, encode, located, normalise
from protocol.streams import SeekableContent
from protocol.tree import CHUNK_BYTES, Chunk, LookupTree, TreeEntry, sparse


class Status(NamedTuple):
    """The stat(2) data of a node.  `birth_ns` is None if unknown, and `ctime_ns` 0."""

    mode: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    nlink: int
    inode: int
    rdev: int = 0
    birth_ns: int | None = None
    ctime_ns: int = 0


class OpenFile(SeekableContent, Protocol):
    """A regular file open for reading or writing.  `close` releases `node`."""

    @property
    def node(self) -> int: ...

    def sync(self) -> None:
        """Make the content durable, if the backend has durable storage and is asked to make every write durable."""
        ...


class PathFiles(Protocol):
    """A backend's files, by node."""

    @property
    def root(self) -> str:
        """The path of the root, for messages and for absolute symlinks: those below it stay inside."""
        ...

    @property
    def read_only(self) -> bool: ...

    # -- nodes -------------------------------------------------------------------------------
    def top(self, *, begins: bool = False) -> int:
        """A node of the root directory.  NotMountedError if something else is at its path now.

        With `begins`, for the first step of a call, it is also checked that the files are still served.
        """
        ...

    def child(self, node: int, name: bytes) -> int:
        """A node of `name` in directory `node`; of a symlink itself.  ENOENT, ENOTDIR."""
        ...

    def release(self, node: int) -> None: ...

    def status(self, node: int) -> Status: ...

    def status_of(self, node: int, name: bytes) -> Status:
        """The status of `child(node, name)`, without holding a node."""
        ...

    def readlink(self, node: int) -> bytes: ...

    def names(self, node: int) -> list[tuple[bytes, int]]:
        """The entries of a directory, in any order: name and type (the S_IFMT bits of its mode)."""
        ...

    def xattrs(self, node: int) -> Mapping[bytes, bytes]: ...

    # -- content -----------------------------------------------------------------------------
    def open(self, node: int, mode: Literal["read", "append"]) -> OpenFile:
        """Open a regular file.  The file takes over `node`; if this raises, the caller keeps it."""
        ...

    def create(self, node: int, name: bytes, mode: int | None) -> OpenFile:
        """Make a new regular file in directory `node`, open for writing.  EEXIST.

        `mode` None means 0666 less the caller's umask.
        """
        ...

    # -- entries -----------------------------------------------------------------------------
    def mkdir(self, node: int, name: bytes) -> None:
        """Make a directory with mode 0777 less the caller's umask."""
        ...

    def symlink(self, node: int, name: bytes, target: bytes) -> None: ...

    def link(self, source: int, node: int, name: bytes) -> None:
        """Make a further name for the file of node `source`."""
        ...

    def mknod(self, node: int, name: bytes, mode: int, rdev: int) -> None: ...

    def unlink(self, node: int, name: bytes) -> None: ...

    def rmdir(self, node: int, name: bytes) -> None: ...

    def rename(self, node: int, name: bytes, new_node: int, new_name: bytes) -> None:
        """Rename, replacing `new_name` in directory `new_node`."""
        ...

    def locked(self, node: int) -> AbstractContextManager[None]:
        """Exclude other calls that replace files in directory `node`, in any process, for the block."""
        ...

    def sync_names(self, node: int) -> None:
        """Make the entries of directory `node` durable, under the same condition as `OpenFile.sync`."""
        ...

    # -- attributes --------------------------------------------------------------------------
    def set_mode(self, node: int, mode: int) -> None: ...

    def set_owner(self, node: int, uid: int, gid: int) -> None: ...

    def set_mtime(self, node: int, mtime_ns: int) -> None: ...

    def set_xattrs(self, node: int, xattrs: Mapping[bytes, bytes]) -> None:
        """Make `xattrs` the only attributes."""
        ...


@contextmanager
def held(store: PathFiles, node: int) -> Iterator[int]:
    """Release `node` at the end."""
    try:
        yield node
    finally:
        store.release(node)


# -- resolving paths -------------------------------------------------------------------------------
_LINKS_MAX: Final = 40  # MAXSYMLINKS, linux/namei.h


@dataclass(slots=True)
class ResolvedPath:
    """The result of resolving a path: `names` from the root, without symlinks; a context that releases `node`.

    `missing` are the names after them that do not exist; `names` and `node` are then those of the last directory that
    does. `is_symlink`: the last part of the path itself is a symlink.
    """

    store: PathFiles
    names: tuple[bytes, ...]
    node: int
    status: Status
    missing: tuple[bytes, ...] = ()
    is_symlink: bool = False

    @property
    def is_dir(self) -> bool:
        return not self.missing and stat.S_ISDIR(self.status.mode)

    @property
    def is_file(self) -> bool:
        return not self.missing and stat.S_ISREG(self.status.mode)

    def take_node(self) -> int:
        """Hand `node` over to the caller, who releases it."""
        node, self.node = self.node, -1
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.node >= 0:
            self.store.release(self.take_node())


def enter(store: PathFiles, names: Sequence[bytes]) -> int:
    """Return a node of the entry at `names` below the root, following no symlink."""
    node = store.top()
    for name in names:
        try:
            below = store.child(node, name)
        finally:
            store.release(node)
        node = below
    return node


def resolve(store: PathFiles, path: bytes, *, follow: bool = True, may_miss: bool = False) -> ResolvedPath:
    """Resolve `path`; a symlink in its last part is followed only with `follow`.

    FileNotFoundError if nothing is there, unless `may_miss`.  NotADirectoryError below a file; PermissionError if a
    symlink leads outside; ELOOP.
    """
    return _Walk(store, path, follow).place(may_miss)


def search_start(store: PathFiles, path: str) -> tuple[bytes, Callable[[bytes], str]]:
    """Return the path without symlinks at which a search of `path` begins, because trees do not follow symlinks.

    The returned function converts a path that was found there to a path that begins with `path`.  Raises the errors of
    `resolve`, which name `path`.
    """
    normal = normalise(path)
    asked = encode(normal)
    with located(normal), resolve(store, asked) as place:
        real = b"/".join(place.names)

    def shown(found: bytes) -> str:
        rest = found[len(real) :].lstrip(b"/")
        return decode(asked + b"/" + rest if asked and rest else asked or rest)

    return real, shown


class _Walk:
    """One resolution: `todo` is a stack of the remaining parts, `done` the names that led to `node`."""

    def __init__(self, store: PathFiles, path: bytes, follow: bool) -> None:
        self._store = store
        self._follow = follow
        self._todo = path.split(b"/")[::-1]
        self._done: list[bytes] = []
        self._links = 0
        self._is_symlink = False
        self._own = len(self._todo)  # this many of `todo`, from its start, are from the path; the others from symlinks

    def place(self, may_miss: bool) -> ResolvedPath:
        self._node = self._store.top(begins=True)
        try:
            while self._todo:
                part = self._todo.pop()
                is_own = len(self._todo) < self._own
                self._own = min(self._own, len(self._todo))
                if part == b"..":
                    self._go_up()
                elif part not in {b"", b"."} and not self._go_down(part, is_last=is_own and not self._todo):
                    return self._missing(part, may_miss)
            status = self._store.status(self._node)
        except BaseException:
            self._store.release(self._node)
            raise
        return ResolvedPath(self._store, tuple(self._done), self._node, status, is_symlink=self._is_symlink)

    def _go_down(self, name: bytes, *, is_last: bool) -> bool:
        """Go to entry `name`, or where its symlink leads; return whether it exists.

        `is_last`: it is the last part of the path itself.
        """
        store = self._store
        try:
            node = store.child(self._node, name)
        except FileNotFoundError:
            return False
        try:
            is_link = stat.S_ISLNK(store.status(node).mode)
            target = store.readlink(node) if is_link else b""
        except BaseException:
            store.release(node)
            raise
        self._is_symlink |= is_last and is_link
        if not is_link or (is_last and not self._follow):
            store.release(self._node)
            self._node = node
            self._done.append(name)
            return True
        store.release(node)
        self._follow_link(target)
        return True

    def _follow_link(self, target: bytes) -> None:
        self._links += 1
        if self._links > _LINKS_MAX:
            raise os_error(errno.ELOOP)
        if target.startswith(b"/"):
            root = os.fsencode(self._store.root).rstrip(b"/")
            if target != root and not target.startswith(root + b"/"):
                raise _outside()
            target = target[len(root) :]
            self._restart([])
        self._todo += target.split(b"/")[::-1]

    def _go_up(self) -> None:
        if not self._done:
            raise _outside()
        self._restart(self._done[:-1])

    def _restart(self, names: list[bytes]) -> None:
        node = enter(self._store, names)
        self._store.release(self._node)
        self._node = node
        self._done = names

    def _missing(self, name: bytes, may_miss: bool) -> ResolvedPath:
        rest = [part for part in reversed(self._todo) if part not in {b"", b"."}]
        if not may_miss or b".." in rest:
            raise os_error(errno.ENOENT)
        status = self._store.status(self._node)
        missing = (name, *rest)
        return ResolvedPath(self._store, tuple(self._done), self._node, status, missing, is_symlink=self._is_symlink)


def _outside() -> PermissionError:
    return PermissionError(errno.EACCES, "symlink leads outside the root")


# -- the files as a tree ---------------------------------------------------------------------------
class PathFilesTree(LookupTree):
    """Implements `protocol.tree.Tree`.  `with_xattrs=False` omits xattrs from entries, for a search."""

    def __init__(self, store: PathFiles, *, with_xattrs: bool = True) -> None:
        self._store = store
        self._with_xattrs = with_xattrs

    def entry(self, path: bytes) -> TreeEntry:
        with held(self._store, self._node(path)) as node, located(decode(path)):
            return self._entry(path, node, self._store.status(node))

    def entries(self, path: bytes) -> list[TreeEntry]:
        prefix = path + b"/" if path else b""
        found = []
        with held(self._store, self._node(path)) as directory, located(decode(path)):
            for name, _ in sorted(self._store.names(directory)):
                with suppress(FileNotFoundError):  # removed since the directory was read
                    found.append(self._entry_in(directory, name, prefix + name))
        return found

    def _entry_in(self, directory: int, name: bytes, path: bytes) -> TreeEntry:
        seen = self._store.status_of(directory, name)
        if not self._with_xattrs and not stat.S_ISLNK(seen.mode):
            return self._entry(path, 0, seen)
        with held(self._store, self._store.child(directory, name)) as node:
            return self._entry(path, node, self._store.status(node))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        with located(decode(path)), closing(self._open(path)) as file:
            return file.read(offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        offset = 0
        with located(decode(path)), closing(self._open(path)) as file:
            while chunk := file.read(offset, size):
                yield from sparse(chunk)
                offset += len(chunk)

    def _node(self, path: bytes) -> int:
        with located(decode(path)):
            return enter(self._store, path.split(b"/") if path else ())

    def _open(self, path: bytes) -> OpenFile:
        node = self._node(path)
        try:
            _check_regular(self._store.status(node).mode)
            return self._store.open(node, "read")
        except BaseException:
            self._store.release(node)
            raise

    def _entry(self, path: bytes, node: int, seen: Status) -> TreeEntry:
        return TreeEntry(
            path=path,
            mode=seen.mode,
            size=0 if stat.S_ISDIR(seen.mode) else seen.size,
            mtime_ns=seen.mtime_ns,
            uid=seen.uid,
            gid=seen.gid,
            nlink=seen.nlink,
            inode=seen.inode,
            rdev=seen.rdev,
            target=self._store.readlink(node) if stat.S_ISLNK(seen.mode) else b"",
            xattrs=self._store.xattrs(node) if self._with_xattrs else {},
        )


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise os_error(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL)
