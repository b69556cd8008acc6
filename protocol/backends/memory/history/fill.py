"""Copy a tree into an empty state (a root directory without entries) in one pass.

`Converger` takes three times as long, because it compares each entry with the live state.  Inodes are numbered in the
order of `Tree.walk`, so the inodes of a subtree have consecutive numbers.

Threading: nothing else uses the state.  After an error the state is incomplete and the caller discards it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from protocol.backends.memory import xattrs
from protocol.backends.memory.content import BLOCK_BYTES, Content
from protocol.backends.memory.ledger import SLACK_BYTES, xattrs_bytes
from protocol.errors import os_error
from protocol.volume import NAME_MAX

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import MemoryState
    from protocol.tree import Chunk, Tree, TreeEntry


class Filler:
    """One copy of a tree.  `check_quota` is as in `Converger`; `has_links` says whether some file has two names."""

    def __init__(self, state: MemoryState, check_quota: Callable[[int, int, int], None]) -> None:
        self._state = state
        self._check_quota = check_quota
        self._linked: dict[int, Inode] = {}  # inode in the tree -> live inode: hard links
        self.has_links = False

    def run(self, tree: Tree) -> None:
        """Copy all of `tree` into the state.  ENOSPC, ENAMETOOLONG, and the errors of the tree."""
        state = self._state
        assert state.log.newest is None, "the state has snapshots"
        assert not state.root_inode.children, "the state is not empty"
        entries = tree.walk()
        self._set_metadata(state.root_inode, next(entries))
        parents = [(b"", state.root_inode)]  # from the root to the directory of the previous entry
        for entry in entries:
            above, _, name = entry.path.rpartition(b"/")
            while parents[-1][0] != above:
                parents.pop()
            if len(name) > NAME_MAX:
                raise os_error(errno.ENAMETOOLONG, name.decode("utf-8", "backslashreplace"))
            node = self._inode(entry)
            state.add_entry(parents[-1][1], name, node)
            if node.children is not None:
                parents.append((entry.path, node))
            elif entry.is_file and entry.size and node.content is None:
                self._write(node, tree.chunks(entry.path, BLOCK_BYTES))

    def _inode(self, entry: TreeEntry) -> Inode:
        """Return the inode for `entry`: a new one, or that of an earlier name of the same file."""
        is_linked = entry.nlink > 1 and entry.inode and not entry.is_dir
        if is_linked and entry.inode in self._linked:
            self.has_links = True
            return self._linked[entry.inode]
        state = self._state
        self._check_quota(0, len(state.inodes) + 1, SLACK_BYTES)
        node = state.create(entry.mode, entry.uid, entry.gid)
        if entry.is_symlink:
            state.set_target(node, entry.target)
        self._set_metadata(node, entry)
        if is_linked:
            self._linked[entry.inode] = node
        return node

    def _set_metadata(self, node: Inode, entry: TreeEntry) -> None:
        node.mode = node.mode & ~0o7777 | entry.mode & 0o7777
        node.uid, node.gid, node.mtime_ns, node.rdev = entry.uid, entry.gid, entry.mtime_ns, entry.rdev
        if entry.xattrs:
            xattrs.check_imported(entry.xattrs)
            kept = dict(entry.xattrs)
            self._check_quota(0, 0, xattrs_bytes(kept))
            self._state.ledger.set_xattrs(node, kept)

    def _write(self, node: Inode, chunks: Iterator[Chunk]) -> None:
        """Write the content of a new file."""
        state = self._state
        content, size = Content.of_chunks(
            state.ledger, chunks, lambda pages, memory: self._check_quota(state.pages + pages, 0, memory)
        )
        state.swap_content(node, content, shared=False)
        state.resize(node, size)
