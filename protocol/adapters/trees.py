"""Trees of other objects, and parts of trees.

    FilesystemTree    any `Filesystem` as a tree
    FilteredTree      a tree without the paths that a rule hides
    changed_tree      the entries of a tree that differ from a base
    TreeFiles         the files of a tree as `PathFiles`, over which a filesystem can read and search

With `TreeFiles` a long read of an agent can run in a worker thread, on a state that does not change meanwhile.
"""

from __future__ import annotations

import errno
import itertools
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Literal, NoReturn

from protocol.adapters.path_files import OpenFile, Status
from protocol.diff.tree_diff import ComparesContent, changes
from protocol.errors import os_error
from protocol.filesystem import Filesystem
from protocol.paths import decode, encode
from protocol.tree import CHUNK_BYTES, TYPE_MASK, Chunk, LookupTree, Tree, TreeEntry, unfiltered

Hides = Callable[[bytes, bool], bool]
"""Called with (path, whether it is a directory) where nothing above the path is hidden: whether the path is."""


class FilteredTree(LookupTree):
    """`tree` without the paths that `hides` hides and everything below them; hidden directories are not walked."""

    def __init__(self, tree: Tree, hides: Hides) -> None:
        self._tree = tree
        self._hides = hides

    @property
    def unfiltered(self) -> Tree:
        """See `protocol.tree.Filtered`."""
        return self._tree

    def entry(self, path: bytes) -> TreeEntry:
        entry = self._tree.entry(path)
        ends = [at for at in range(len(path)) if path[at : at + 1] == b"/"]
        if path and (any(self._hides(path[:end], True) for end in ends) or self._hides(path, entry.is_dir)):
            raise os_error(errno.ENOENT, path.decode("utf-8", "backslashreplace"))
        return entry

    def entries(self, path: bytes) -> Iterator[TreeEntry]:
        self.entry(path)
        return filter(self._shows, self._tree.entries(path))

    def _shows(self, entry: TreeEntry) -> bool:
        """Whether an entry of a directory that is shown is shown, too."""
        return not self._hides(entry.path, entry.is_dir)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        self.entry(path)
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        self.entry(path)
        return self._tree.chunks(path, size)

    def touched(self, other: Tree) -> Collection[bytes] | None:
        """See `protocol.tree.Tree`; both trees must have the same rule."""
        return self._tree.touched(unfiltered(other))

    def same_content(self, path: bytes, other: Tree, other_path: bytes | None = None) -> bool | None:
        """See `protocol.diff.tree_diff.ComparesContent`."""
        if not isinstance(self._tree, ComparesContent):
            return None
        return self._tree.same_content(path, unfiltered(other), other_path)


def changed_tree(base: Tree, tree: Tree, keep_going: Callable[[], None] = lambda: None) -> Tree:
    """The entries of `tree` that differ from `base`, and the directories above them; removals are not shown."""
    shown = {b""}
    for change in changes(base, tree, keep_going=keep_going):
        path = change.path if change.new is not None else b""
        while path not in shown:
            shown.add(path)
            path = path.rpartition(b"/")[0]
    return _ChangedTree(tree, lambda path, _is_directory: path not in shown)


class _ChangedTree(FilteredTree):
    def touched(self, other: Tree) -> None:
        """Unknown: the rule depends on the base, so another tree hides other paths."""


class FilesystemTree(LookupTree):
    """The live files of a `Filesystem` as a `protocol.tree.Tree`; a walk sees changes made meanwhile.

    A symlink appears as the file or directory that it leads to, and anything else raises EINVAL: an archive must not
    omit entries silently.  With `for_search`, symlinks below the top are omitted, and special files appear as fifos,
    which a search passes over.
    """

    def __init__(self, filesystem: Filesystem, *, for_search: bool = False) -> None:
        self._filesystem = filesystem
        self._for_search = for_search

    def entry(self, path: bytes) -> TreeEntry:
        found = self._filesystem.stat(decode(path))
        if not (found.is_file or found.is_directory or self._for_search):
            raise OSError(errno.EINVAL, "neither a file nor a directory", found.path)
        kind = stat.S_IFDIR if found.is_directory else stat.S_IFREG if found.is_file else stat.S_IFIFO
        permissions = stat.S_IMODE(found.mode) or (0o755 if found.is_directory else 0o644)
        mtime_ns = round(found.modified_at.timestamp() * 1e6) * 1000 if found.modified_at else 0
        return TreeEntry(path, kind | permissions, 0 if found.is_directory else found.size_bytes, mtime_ns)

    def children(self, path: bytes) -> list[bytes]:
        entries = self._filesystem.list(decode(path))
        return sorted(encode(entry.name) for entry in entries if not (self._for_search and entry.is_symlink))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        with self._filesystem.open_read(decode(path)) as reader:
            reader.seek(offset)
            return reader.read(size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        with self._filesystem.open_read(decode(path)) as reader:
            yield from reader.chunks(size)


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
        return [(entry.name, entry.mode & TYPE_MASK) for entry in self.tree.entries(self._paths[node])]

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
