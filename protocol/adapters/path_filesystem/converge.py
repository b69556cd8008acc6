"""Make the files of a store those of a tree, changing only what differs.

What is equal keeps its inode and its times.  Not atomic by itself: see `archives`, which puts the state
before back when this fails.
"""

from __future__ import annotations

import errno
import stat
from typing import Final

from protocol.adapters.path_filesystem.files import OpenFile, PathFiles, Status, held
from protocol.adapters.path_filesystem.resolve import enter
from protocol.adapters.path_filesystem.writing import remove, temporary_name
from protocol.paths import decode, located
from protocol.tree import Tree, TreeEntry

__all__ = ["converge"]

_CHUNK_BYTES: Final = 256 * 1024
_USER_ALL: Final = stat.S_IRWXU


def converge(store: PathFiles, tree: Tree) -> None:
    """Make the state of `store` that of `tree`.  Owners are set where that is allowed."""
    _Converging(store, tree).run()


class _Converging:
    """Two steps: new content is written beside the state, which may need room; then names are changed, which does not.

    So a full disk is noticed before anything has changed.
    """

    def __init__(self, store: PathFiles, tree: Tree) -> None:
        self._store = store
        self._tree = tree
        self._firsts: dict[int, bytes] = {}  # the path of the first name of each file with several
        self._stage = temporary_name()  # a directory in the root
        self._staged: dict[bytes, bytes] = {}  # path to the name of its new content in there

    def run(self) -> None:
        store = self._store
        with held(store, store.top()) as root:
            store.mkdir(root, self._stage)
            try:
                with held(store, store.child(root, self._stage)) as stage:
                    store.set_mode(stage, _USER_ALL)
                    self._write_new(stage)
                    self._change_names(stage)
            finally:
                remove(store, (self._stage,), recursive=True)
            self._attributes(root, self._tree.entry(b""), store.status(root))

    def _write_new(self, stage: int) -> None:
        claimed: set[int] = set()  # inodes that are a file of the tree already
        seen: set[int] = set()
        for entry in self._tree.walk():
            if not entry.is_file or (entry.nlink > 1 and entry.inode and entry.inode in seen):
                continue
            seen.add(entry.inode)
            with located(decode(entry.path)):
                old = self._old(_names(entry.path))
                if self._is_equal(entry, old, claimed):
                    assert old is not None
                    claimed.add(old.inode)
                else:
                    self._staged[entry.path] = self._write(stage, entry)

    def _write(self, stage: int, entry: TreeEntry) -> bytes:
        name = b"%d" % len(self._staged)
        file = self._store.create(stage, name, 0o600)
        try:
            self._fill(file, entry)
            self._attributes(file.node, entry, self._store.status(file.node))
        finally:
            file.close()
        return name

    def _change_names(self, stage: int) -> None:
        directories: list[TreeEntry] = []
        for entry in self._tree.walk():
            names = _names(entry.path)
            with located(decode(entry.path)):
                if entry.is_dir:
                    self._directory(names)
                    directories.append(entry)
                else:
                    self._leaf(names, entry, stage)
        for entry in reversed(directories):  # children first: each change in a directory changes its mtime
            with held(self._store, enter(self._store, _names(entry.path))) as node:
                self._attributes(node, entry, self._store.status(node))

    def _directory(self, names: tuple[bytes, ...]) -> None:
        """Make it a directory, and remove from it what the tree does not have."""
        store = self._store
        if names:
            old = self._old(names)
            if old is None or not stat.S_ISDIR(old.mode):
                self._clear(names, old)
                with held(store, enter(store, names[:-1])) as parent:
                    store.mkdir(parent, names[-1])
        with held(store, enter(store, names)) as node:
            mode = store.status(node).mode
            if mode & _USER_ALL != _USER_ALL:
                store.set_mode(node, mode | _USER_ALL)  # until its content is there
            present = {name for name, _ in store.names(node)}
        for name in present.difference(self._tree.children(b"/".join(names)), () if names else (self._stage,)):
            remove(store, (*names, name), recursive=True)

    def _leaf(self, names: tuple[bytes, ...], entry: TreeEntry, stage: int) -> None:
        store = self._store
        old = self._old(names)
        first = self._firsts.get(entry.inode) if entry.nlink > 1 else None
        if first is not None:
            self._link(names, old, _names(first))
            return
        if old is not None and stat.S_ISDIR(old.mode):
            self._clear(names, old)
            old = None
        staged = self._staged.get(entry.path)
        if staged is not None:
            with held(store, enter(store, names[:-1])) as parent:
                store.rename(stage, staged, parent, names[-1])
        elif entry.is_file:
            assert old is not None
            with held(store, enter(store, names)) as node:
                self._attributes(node, entry, old)
        else:
            self._special(names, entry, old)
        if entry.nlink > 1 and entry.inode:
            self._firsts[entry.inode] = entry.path

    def _fill(self, file: OpenFile, entry: TreeEntry) -> None:
        offset = 0
        for chunk in self._tree.chunks(entry.path, _CHUNK_BYTES):
            view = memoryview(chunk)
            while view:
                written = file.write(offset, view)
                offset += written
                view = view[written:]

    def _is_equal(self, entry: TreeEntry, old: Status | None, claimed: set[int]) -> bool:
        """Whether the file that is there is one of its own, with as many names and the same content."""
        if old is None or not stat.S_ISREG(old.mode) or old.size != entry.size:
            return False
        if old.nlink != max(1, entry.nlink) or old.inode in claimed:
            return False
        node = enter(self._store, _names(entry.path))
        try:
            file = self._store.open(node, "read")
        except PermissionError:
            self._store.release(node)
            return False
        try:
            offset = 0
            for chunk in self._tree.chunks(entry.path, _CHUNK_BYTES):
                if file.read(offset, len(chunk)) != chunk:
                    return False
                offset += len(chunk)
        finally:
            file.close()
        return True

    def _special(self, names: tuple[bytes, ...], entry: TreeEntry, old: Status | None) -> None:
        """A symlink, fifo, socket or device node."""
        store = self._store
        same = old is not None and (stat.S_IFMT(old.mode), old.rdev) == (stat.S_IFMT(entry.mode), entry.rdev)
        if same and entry.is_symlink:
            with held(store, enter(store, names)) as node:
                same = store.readlink(node) == entry.target
        if not same:
            self._clear(names, old)
            with held(store, enter(store, names[:-1])) as parent:
                if entry.is_symlink:
                    store.symlink(parent, names[-1], entry.target)
                else:
                    store.mknod(parent, names[-1], entry.mode, entry.rdev)
        with held(store, enter(store, names)) as node:
            self._attributes(node, entry, store.status(node))

    def _link(self, names: tuple[bytes, ...], old: Status | None, first: tuple[bytes, ...]) -> None:
        store = self._store
        with held(store, enter(store, first)) as source:
            if old is not None and old.inode == store.status(source).inode:
                return
            self._clear(names, old)
            with held(store, enter(store, names[:-1])) as parent:
                store.link(source, parent, names[-1])

    def _attributes(self, node: int, entry: TreeEntry, old: Status) -> None:
        store = self._store
        if (old.uid, old.gid) != (entry.uid, entry.gid):
            try:
                store.set_owner(node, entry.uid, entry.gid)
            except PermissionError:
                pass  # another's file in an archive becomes ours, as with tar(1)
            old = store.status(node)
        if not entry.is_symlink:
            if stat.S_IMODE(old.mode) != stat.S_IMODE(entry.mode):
                store.set_mode(node, entry.mode)
            self._xattrs(node, entry)
        if old.mtime_ns != entry.mtime_ns:
            store.set_mtime(node, entry.mtime_ns)

    def _xattrs(self, node: int, entry: TreeEntry) -> None:
        try:
            if dict(self._store.xattrs(node)) != dict(entry.xattrs):
                self._store.set_xattrs(node, entry.xattrs)
        except OSError as error:
            # Another file system, another set of attributes: what it cannot have, or we may not set.
            if error.errno not in {errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL}:
                raise

    def _old(self, names: tuple[bytes, ...]) -> Status | None:
        try:
            with held(self._store, enter(self._store, names[:-1])) as parent:
                return self._store.status_of(parent, names[-1])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _clear(self, names: tuple[bytes, ...], old: Status | None) -> None:
        if old is not None:
            remove(self._store, names, recursive=True)


def _names(path: bytes) -> tuple[bytes, ...]:
    return tuple(path.split(b"/")) if path else ()
