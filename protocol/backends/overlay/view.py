"""OverlayTree: one state of an overlay as a read-only tree.

In the live state and in the base, a file without changes in the overlay is read as it is below now, from its beginning.
If it changes between two pieces, or the overlay holds parts of it, reading fails with ESTALE and names the file.

A snapshot is immutable.  It has no copy of the files below, so a file that another program changed there after the
snapshot was taken is *lost* in it: reading it fails with ESTALE, and it differs from every state in which it is not
lost.  `LowerFile.changed_ns` and `gone_ns` say when it changed.  It has the attributes that it had then, if this
process saw them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from protocol.backends.memory.history.undo import SnapshotTree
from protocol.backends.overlay.inode import LowerContent
from protocol.backends.overlay.lower import LOST_NS, ChangedBelowError, EarlierState
from protocol.tree import CHUNK_BYTES, LOST, Chunk, Tree, TreeEntry, losing

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.inode import Inode
    from protocol.backends.overlay.state import OverlayState


class OverlayTree(SnapshotTree):
    """See `SnapshotTree`.  `recheck` and `unchanged_from` are those of `OverlayVolume`."""

    def __init__(
        self,
        recheck: Callable[[int, bytes], tuple[bool, bool]],
        unchanged_from: Callable[[Inode], int | None],
        state: OverlayState,
        epoch: Epoch,
        pinned: Epoch,
    ) -> None:
        super().__init__(state, epoch, pinned)
        self._recheck = recheck
        self._unchanged_from = unchanged_from
        self._overlay = state
        self.taken_ns = LOST_NS - 1 if epoch.info is None else epoch.info.created_ns

    def follow(self) -> None:
        """Show files that other programs changed below as they are now, also in a snapshot."""
        self.taken_ns = LOST_NS - 1

    # -- protocol.tree.LosingTree --------------------------------------------------------------
    def is_lost(self, path: bytes) -> bool:
        try:
            return self.is_lost_node(self.find(path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def is_lost_node(self, node: Inode) -> bool:
        """Return whether the content of a version is lost in this tree."""
        content = node.content
        if not isinstance(content, LowerContent) or content.lower.kept is not None:
            return False
        file = content.lower
        if file.changed_ns > self.taken_ns:
            # A file that was lost before it became live can be written again.
            return content.limit > 0 or file.changed_ns != LOST_NS
        return file.gone_ns > self.taken_ns and content.needs_lower

    def earlier(self, node: Inode) -> EarlierState | None:
        """Return the state in which the tree has a file that is lost; None if it is that of the file, or not known."""
        assert isinstance(node.content, LowerContent)
        states = [state for state in node.content.lower.earlier if state.file.changed_ns <= self.taken_ns]
        return states[-1] if states and node.content.lower.changed_ns > self.taken_ns else None

    def _entry(self, path: bytes, inode: Inode) -> TreeEntry:
        entry = super()._entry(path, inode)
        if inode.content is not None:
            below = self._unchanged_from(inode)
            if below is not None and inode.mtime_ns != below:
                entry = replace(entry, mtime_ns=below)  # touched, which is no change over the directory below
        if not self.is_lost_node(inode):
            return entry
        was = self.earlier(inode)
        if was is not None:
            _, _, size, mtime_ns, ctime_ns = was.file.identity
            entry = replace(
                entry,
                mode=was.mode,
                uid=was.uid,
                gid=was.gid,
                xattrs=was.xattrs,
                size=size,
                mtime_ns=mtime_ns,
                ctime_ns=ctime_ns,
            )
        # A kernel reads no file that is empty, and would not meet ESTALE.
        return entry if entry.size else replace(entry, size=1)

    def lost_paths(self, other: Tree) -> list[bytes]:
        theirs = losing(other)
        return sorted(
            path
            for path in self.touched(other) or ()
            if self.is_lost(path) and not (theirs is not None and theirs.is_lost(path))
        )

    def touched(self, other: Tree) -> Collection[bytes] | None:
        found = super().touched(other)
        if found is None or not isinstance(other, OverlayTree):
            return found
        since = min(self.taken_ns, other.taken_ns)
        numbers = () if since == LOST_NS - 1 else self._overlay.changed_since(since)
        return {*found, *(path for number in numbers for tree in (self, other) for path in tree.paths_of(number))}

    def same_content(self, path: bytes, other: Tree, other_path: bytes | None = None) -> bool | None:
        if isinstance(other, OverlayTree):
            mine, theirs = self.find(path), other.find(path if other_path is None else other_path)
            is_lost = self.is_lost_node(mine), other.is_lost_node(theirs)
            if all(is_lost):
                was, there = self.earlier(mine), other.earlier(theirs)
                return was is None or there is None or was.file is there.file
            if any(is_lost):
                return False
        else:
            content = self.find(path).content
            if isinstance(content, LowerContent) and content.is_pristine:
                return content.lower.same_content(other, path if other_path is None else other_path)
        return super().same_content(path, other, other_path)

    # -- content -------------------------------------------------------------------------------

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        node = self._file(path)
        self._check(node)
        try:
            return super().read(path, offset, size)
        except ChangedBelowError as error:
            follows, _ = self._recheck(node.inode, error.path)
            self._check(node)
            if not follows:
                raise
            return super().read(path, offset, size)

    def _check(self, node: Inode) -> None:
        """Raise ChangedBelowError if the content of a file is lost."""
        if self.is_lost_node(node):
            assert isinstance(node.content, LowerContent)
            raise ChangedBelowError(node.content.lower.path, LOST)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        self.read(path, 0, 1)
        return super().chunks(path, size)
