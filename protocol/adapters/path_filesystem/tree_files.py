"""TreeFiles: the files of a `Tree`, for reading and searching as a Filesystem; every change is refused.

With it, a long read of an agent can run in a worker thread, on a state that does not change meanwhile.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NoReturn

from protocol.adapters.path_filesystem.files import OpenFile, Status
from protocol.errors import os_error
from protocol.tree import TYPE_MASK, Tree, TreeEntry


class TreeFiles:
    """Nodes are numbers assigned to paths when they are looked up.  One thread at a time, as for the tree.

    `keep_going` is called at each lookup and read; an exception from it ends the current call.
    """

    read_only: Final = True

    def __init__(self, tree: Tree, *, root: str = "/", keep_going: Callable[[], None] = lambda: None) -> None:
        self.tree = tree
        self.root = root
        self.keep_going = keep_going
        self._paths: dict[int, bytes] = {}
        self._numbers = itertools.count(1)

    def top(self, *, begins: bool = False) -> int:  # noqa: ARG002 a tree cannot be gone
        return self._hold(b"")

    def child(self, node: int, name: bytes) -> int:
        self.keep_going()
        path = self._below(node, name)
        self.tree.entry(path)  # raises if it does not exist
        return self._hold(path)

    def release(self, node: int) -> None:
        self._paths.pop(node, None)

    def _hold(self, path: bytes) -> int:
        node = next(self._numbers)
        self._paths[node] = path
        return node

    def _below(self, node: int, name: bytes) -> bytes:
        above = self._paths[node]
        return above + b"/" + name if above else name

    # -- what there is ---------------------------------------------------------------------------
    def status(self, node: int) -> Status:
        return _status(self.tree.entry(self._paths[node]))

    def status_of(self, node: int, name: bytes) -> Status:
        return _status(self.tree.entry(self._below(node, name)))

    def readlink(self, node: int) -> bytes:
        entry = self.tree.entry(self._paths[node])
        if not entry.is_symlink:
            raise os_error(errno.EINVAL)
        return entry.target

    def names(self, node: int) -> list[tuple[bytes, int]]:
        names = self.tree.children(self._paths[node])
        return [(name, self.tree.entry(self._below(node, name)).mode & TYPE_MASK) for name in names]

    def xattrs(self, node: int) -> Mapping[bytes, bytes]:
        return self.tree.entry(self._paths[node]).xattrs

    def open(self, node: int, mode: Literal["read", "append"]) -> OpenFile:
        if mode != "read":
            raise os_error(errno.EROFS)
        return TreeFile(self, node, self._paths[node])

    # -- changes ---------------------------------------------------------------------------------
    def _refuse(self, *_args: Any) -> NoReturn:
        raise os_error(errno.EROFS)

    create = mkdir = symlink = link = mknod = unlink = rmdir = rename = locked = sync_names = _refuse
    set_mode = set_owner = set_mtime = set_xattrs = _refuse


class TreeFile:
    """A file of a tree, open for reading."""

    def __init__(self, store: TreeFiles, node: int, path: bytes) -> None:
        self._store = store
        self._path = path
        self.node = node

    def size(self) -> int:
        return self._store.tree.entry(self._path).size

    def read(self, offset: int, size: int) -> bytes:
        self._store.keep_going()
        return self._store.tree.read(self._path, offset, size)

    def write(self, *_args: Any) -> NoReturn:
        raise os_error(errno.EROFS)

    def sync(self) -> None:
        pass  # nothing was written

    def close(self) -> None:
        self._store.release(self.node)


def _status(entry: TreeEntry) -> Status:
    return Status(entry.mode, entry.size, entry.mtime_ns, entry.uid, entry.gid, entry.nlink, entry.inode, entry.rdev)
