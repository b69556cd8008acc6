"""Converger: makes the live state equal to a tree, changing only what differs.

Used to restore single paths of a snapshot and to import an archive.  If the tree is a view of a memory volume, blocks
are shared, and if it is a view of this one, inodes keep their numbers; otherwise content is compared, and written where
it differs.  Trees may be deep: nothing here recurses.

It does not use `protocol.diff.plan`, which decides by paths.  Here an inode of the same volume is the same file even if
it was renamed since, or is revived with its old number; and the plan's second walk over the live state, in one step of
the serving loop, would double the time during which the loop answers no request (see `prepare`).

Threading: the serving loop only; the caller's transaction undoes all changes if this raises.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from protocol.backends.memory import xattrs
from protocol.backends.memory.content import BLOCK_BYTES, SECTORS_PER_PAGE, Content
from protocol.backends.memory.history.undo import SnapshotTree
from protocol.backends.memory.ledger import SLACK_BYTES, xattrs_bytes
from protocol.diff.tree_diff import PathScope, entry_or_none, same_bytes
from protocol.errors import os_error
from protocol.tree import names_in
from protocol.values import Value
from protocol.volume import NAME_MAX

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import MemoryState
    from protocol.tree import Tree, TreeEntry


def metadata(of: Inode | TreeEntry) -> tuple[int, int, int, int, dict[bytes, bytes], int]:
    """Return mode, uid, gid, mtime, xattrs and rdev."""
    return of.mode, of.uid, of.gid, of.mtime_ns, dict(of.xattrs or {}), of.rdev


class Extent(Value):
    """The part of a state that is made equal to a tree: all at and below `paths`, the metadata of `directories`."""

    paths: Sequence[bytes]
    directories: Sequence[bytes] = ()

    @classmethod
    def of(cls, paths: Sequence[bytes], directories: Sequence[bytes] | None) -> Extent:
        """The extent of an import; without any argument, everything."""
        return cls(paths or (b"",)) if directories is None else cls(paths, directories)


class Converger:
    """Makes `extent` of the live state equal to `tree`.

    `check_quota(pages, inodes, memory)` raises ENOSPC if so many pages and inodes in total, or `memory` more bytes,
    exceed the quota.  Blocks shared with a view of the same volume take no memory.

    The quota applies to the state at the end, because space may be freed after it is used.  Before that, only changes
    are refused that could not fit even if everything else was removed.
    """

    def __init__(
        self,
        state: MemoryState,
        tree: Tree,
        extent: Extent,
        *,
        replace: bool,
        check_quota: Callable[[int, int, int], None],
    ) -> None:
        self._state = state
        self._tree = tree
        self._paths = extent.paths
        self._scope = PathScope(extent.paths)
        self._alone = extent.directories
        self._replace = replace
        self._check_quota = check_quota
        self._pages, self._inodes = state.pages, len(state.inodes)  # before the run
        self._view = tree if isinstance(tree, SnapshotTree) else None
        self._own_view = self._view if self._view is not None and self._view.belongs_to(state) else None
        self._linked: dict[int, int] = {}  # inode in the tree -> live inode: hard links
        self._directories: dict[bytes, int] = {}  # path -> live inode of the directories of this run
        self._cookie: int | None = None  # of the name that is being replaced

    def run(self) -> None:
        """Make the changes.  ENOENT or ENOTDIR for a path in neither; ENOSPC."""
        for path in self._paths:
            self._run(path)
        for path in sorted(self._alone, reverse=True):
            self._set_metadata(self._state.inode_at(path), self._tree.entry(path))
        pages, inodes = self._state.pages, len(self._state.inodes)
        # A state over its quota, which a restored one may be, does not refuse changes that add nothing.
        self._check_quota(pages if pages > self._pages else 0, inodes if inodes > self._inodes else 0, 0)

    def _check_growth(self, pages: int, inodes: int = 0, memory: int = 0) -> None:
        """Raise ENOSPC if `pages` and `inodes` more cannot fit even if everything that was there before is removed.

        Also if `memory` more bytes do not fit now, because replaced content stays until the end.
        """
        state = self._state
        if self._own_view is not None:
            memory = 0
        self._check_quota(state.pages - self._pages + pages, len(state.inodes) - self._inodes + inodes, memory)

    def _run(self, path: bytes) -> None:
        if entry_or_none(self._tree, path) is None:
            self._state.inode_at(path)  # ENOENT, ENOTDIR
            if self._replace:
                self._remove(self._state.inode_at(_above(path)), path.rpartition(b"/")[2])
            return
        parent = self._parents(path)
        directories = self._directories = {}
        finished: list[tuple[int, TreeEntry]] = []
        for each in self._walk(path):
            above = parent if each.path == path else self._state.inodes[directories[_above(each.path)]]
            if each.is_dir:
                node = self._directory(above, each)
                directories[each.path] = node.inode
                finished.append((node.inode, each))
            else:
                assert above is not None
                self._leaf(above, each)
        for number, each in reversed(finished):
            self._set_metadata(self._state.inodes[number], each)

    def _walk(self, path: bytes) -> Iterator[TreeEntry]:
        """Yield the entries to work on: each directory before its entries."""
        return self._tree.walk(path)

    # -- paths -----------------------------------------------------------------------------------
    def _parents(self, path: bytes) -> Inode | None:
        """Return the live directory that will contain `path`; None for the root itself.

        Makes missing directories, also in place of a file or link.
        """
        if not path:
            return None
        directory = self._state.root_inode
        parts = path.split(b"/")
        for end in range(1, len(parts)):
            above = b"/".join(parts[:end])
            number = (directory.children or {}).get(parts[end - 1])
            if number is not None and not self._state.inodes[number].is_dir:
                self._remove(directory, parts[end - 1])
                directory, number = self._state.inodes[directory.inode], None
            if number is None:
                entry = self._tree.entry(above)
                directory = self._make(directory, parts[end - 1], entry)
                self._set_metadata(directory, entry)
                directory = self._state.inodes[directory.inode]
            else:
                directory = self._state.inodes[number]
        return directory

    # -- one entry ---------------------------------------------------------------------------------
    def _directory(self, above: Inode | None, entry: TreeEntry) -> Inode:
        """Return the live directory for `entry`, without entries that the tree lacks.  `_run` sets its metadata."""
        if above is None:
            node = self._state.root_inode
        else:
            found = self._child(above, entry.name)
            if found is None or not found.is_dir:
                if found is not None:
                    self._vacate(above, entry.name)
                return self._make(self._state.inodes[above.inode], entry.name, entry)
            node = found
        if self._replace:
            assert node.children is not None
            for name in sorted(node.children.keys() - set(names_in(self._tree, entry.path))):
                self._remove(self._state.inodes[node.inode], name)
        return self._state.inodes[node.inode]

    def _leaf(self, above: Inode, entry: TreeEntry) -> None:
        """Make the file, symlink or special file `entry`."""
        name = entry.name
        node = self._child(above, name)
        wanted = self._wanted(entry, node)
        if node is not None and node.inode != wanted:
            self._vacate(above, name)
            node = None
        if node is None:
            above = self._state.inodes[above.inode]
            node = self._make(above, name, entry) if wanted is None else self._link(above, name, self._inode(wanted))
        self._complete(node, entry)

    def _complete(self, node: Inode, entry: TreeEntry) -> None:
        """Give the leaf `node` the content and the metadata of `entry`."""
        if entry.inode and entry.nlink > 1:
            self._linked[entry.inode] = node.inode
        self._set_content(node, entry)
        self._set_metadata(self._inode(node.inode), entry)

    def _wanted(self, entry: TreeEntry, node: Inode | None) -> int | None:
        """Return the live inode that becomes `entry`, where `node` is now; None if a new one must be made."""
        if entry.nlink > 1 and entry.inode in self._linked:
            return self._linked[entry.inode]
        if self._own_view is not None and entry.inode:
            live = self._state.inodes.get(entry.inode)
            if live is None or not live.nlink:
                return None  # it will be revived
            if self._can_become(live, entry):
                return live.inode
        return node.inode if node is not None and self._serves(node, entry) else None

    def _can_become(self, live: Inode, entry: TreeEntry) -> bool:
        """Whether `live`, the inode of `entry`, can become `entry` again without a change outside of the extent.

        It was not moved away: it still has one of the paths of `entry`.  If it has names outside of the extent, it must
        equal `entry` already, and these must be names of `entry`.
        """
        assert self._own_view is not None
        if live.nlink > 1:
            self._state.find_links([live.inode])
        now = set(map(self._state.link_path, live.links))
        then = {entry.path} if entry.nlink == 1 else set(self._own_view.names_of(entry.inode))
        if now.isdisjoint(then):
            return False
        outside = {path for path in now if not self._scope.covers(path)}
        if not outside:
            return True
        version = self._own_view.version(entry.inode)
        assert version is not None
        # Not `pages`: an overlay may have the same file once in memory and once in the lower layer.
        is_as_large = _disk_pages(version) == _disk_pages(live)
        is_equal = is_as_large and metadata(live) == metadata(entry) and version.same_content(live)
        return outside <= then and is_equal

    def _serves(self, node: Inode, entry: TreeEntry) -> bool:
        """Return whether `node` can be changed in place to become `entry`: all its names become that file."""
        # The kernel reads the device number of an inode only once.
        if stat.S_IFMT(node.mode) != stat.S_IFMT(entry.mode) or node.rdev != entry.rdev:
            return False
        if node.nlink == 1:
            return True
        self._state.find_links([node.inode])
        return all(self._is_linked(path, entry) for path in map(self._state.link_path, node.links))

    def _is_linked(self, path: bytes, entry: TreeEntry) -> bool:
        """Return whether `path` becomes the same file as `entry`."""
        if path == entry.path:
            return True
        if not entry.inode or not self._scope.covers(path):
            return False
        other = entry_or_none(self._tree, path)
        return other is not None and other.inode == entry.inode

    def _inode(self, number: int) -> Inode:
        return self._state.inodes[number]

    def _child(self, directory: Inode, name: bytes) -> Inode | None:
        children = self._state.inodes[directory.inode].children
        assert children is not None
        number = children.get(name)
        return self._state.inodes[number] if number is not None else None

    # -- making and removing -------------------------------------------------------------------------
    def _make(self, directory: Inode, name: bytes, entry: TreeEntry) -> Inode:
        """Make the entry: with its old inode if that is free, else with a new one."""
        if len(name) > NAME_MAX:
            raise os_error(errno.ENAMETOOLONG, os.fsdecode(entry.path))
        return self._link(directory, name, self._revived(entry) or self._new(entry))

    def _new(self, entry: TreeEntry) -> Inode:
        """Make a new inode for `entry`, without a name."""
        state = self._state
        self._check_growth(0, 1, SLACK_BYTES)
        node = state.create(entry.mode, entry.uid, entry.gid)
        if entry.is_symlink:
            state.set_target(node, entry.target)
        node.rdev = entry.rdev
        return node

    def _revived(self, entry: TreeEntry) -> Inode | None:
        if self._own_view is None or not entry.inode:
            return None
        live = self._state.inodes.get(entry.inode)
        if live is not None and live.nlink:
            return None
        version = self._own_view.version(entry.inode)
        assert version is not None
        if self._state.is_dead(entry.inode):
            self._check_growth(0, 1, SLACK_BYTES)
            return self._state.copy_directory(version)
        self._check_growth(version.pages)
        return self._state.revive(version)

    def _link(self, directory: Inode, name: bytes, node: Inode) -> Inode:
        state = self._state
        directory, node = state.own(directory), state.own(node)
        state.add_entry(directory, name, node)
        if self._cookie is not None and directory.cookies is not None:
            directory.cookies.put_back(name, self._cookie)
            self._cookie = None
        directory.mtime_ns = directory.ctime_ns = node.ctime_ns = state.clock()
        return node

    def _vacate(self, directory: Inode, name: bytes) -> None:
        """Remove `name`, which `_link` gives to another inode next: a listing that is in progress lists it once."""
        cookies = self._state.inodes[directory.inode].cookies
        self._cookie = None if cookies is None or cookies.ascends else cookies.cookie(name)
        self._remove(directory, name)

    def _remove(self, directory: Inode, name: bytes) -> None:
        """Remove `name` and everything below it."""
        state = self._state
        todo = [(directory.inode, name)]
        while todo:
            number, each = todo[-1]
            above = state.inodes[number]
            assert above.children is not None
            node = state.inodes[above.children[each]]
            if node.children:
                todo += [(node.inode, below) for below in node.children]
                continue
            todo.pop()
            above, node = state.own(above), state.own(node)
            state.drop_entry(above, each, node)
            above.mtime_ns = above.ctime_ns = node.ctime_ns = state.clock()
            state.release(node)

    # -- content and metadata --------------------------------------------------------------------------
    def _set_content(self, node: Inode, entry: TreeEntry) -> None:
        if entry.is_symlink and node.target != entry.target:
            node = self._state.own(node)
            self._state.set_target(node, entry.target)
        elif entry.is_file and self._view is not None:
            self._share_content(node, entry)
        elif entry.is_file and not self._equal(node, entry):
            self._write_content(node, entry)

    def _share_content(self, node: Inode, entry: TreeEntry) -> None:
        assert self._view is not None
        version = self._view.version(entry.inode)
        assert version is not None
        if version.same_content(node) and version.pages == node.pages:
            return
        needed = version.content.allocated if version.content is not None else 0
        if self._own_view is None:
            # Charged to this volume from now on; the rest of a loan is repaid at the end.
            self._view.ledger.repay(needed)
        self._check_growth(version.pages - node.pages, memory=needed + SLACK_BYTES)
        content = version.content.share() if version.content else None
        if content is not None and self._own_view is None:
            content.adopt(self._state.ledger)
        self._swap_content(node, content, version.size, shared=self._own_view is not None)

    def _equal(self, node: Inode, entry: TreeEntry) -> bool:
        if node.size != entry.size:
            return False
        content = node.content or Content()
        return same_bytes(content.chunks(node.size, BLOCK_BYTES), self._tree.chunks(entry.path, BLOCK_BYTES))

    def _write_content(self, node: Inode, entry: TreeEntry) -> None:
        content, size = Content.of_chunks(
            self._state.ledger,
            self._tree.chunks(entry.path, BLOCK_BYTES),
            lambda pages, memory: self._check_growth(pages - node.pages, memory=memory),
        )
        self._swap_content(node, content, size, shared=False)

    def _swap_content(self, node: Inode, content: Content | None, size: int, *, shared: bool) -> None:
        state = self._state
        node = state.own(node)
        state.swap_content(node, content, shared=shared)
        state.resize(node, size)
        node.mtime_ns = node.ctime_ns = state.clock()

    def _set_metadata(self, node: Inode, entry: TreeEntry) -> None:
        wanted = metadata(entry)
        if metadata(node) == wanted:
            return
        if entry.xattrs:
            xattrs.check_imported(entry.xattrs)
            self._check_growth(0, memory=xattrs_bytes(dict(entry.xattrs)))
        state = self._state
        node = state.own(node)
        node.mode, node.uid, node.gid, node.mtime_ns, kept, node.rdev = wanted
        if (node.xattrs or {}) != kept:
            state.ledger.set_xattrs(node, kept or None)
        node.ctime_ns = state.clock()
        if self._own_view is not None:
            version = self._own_view.version(entry.inode)
            if version is not None and version.inode == node.inode and set(version.links) == set(node.links):
                node.ctime_ns = version.ctime_ns


def _disk_pages(node: Inode) -> int:
    """The size by st_blocks, in whole pages: a lower layer counts the sectors of a file's last page."""
    return -(-node.blocks // SECTORS_PER_PAGE)


def _above(path: bytes) -> bytes:
    return path.rpartition(b"/")[0]
