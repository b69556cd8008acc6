"""The trees of a merge.

`LayeredTree` is a state of this workspace with the changes of another workspace on top.

Inode numbers: an inode that both workspaces have in their common state keeps the number that it has here.  The numbers
of all others begin at NEW_INODES, so that they are never mistaken for inodes of this workspace.

`touched` names the changed paths of all layers, so work on two such trees is proportional to the changes.  Without a
delta, a LayeredTree is a state that can be compared with one that has some.

`EmptyTree` is the base of two workspaces that have no state in common, `PartialTree` the part of a tree that an import
needs.  `SourceStates` has the states of the source of a fork over a stored snapshot, from before the fork.  The fork's
volume has none of them as a snapshot.  They are in the store, and differ from the snapshot below the fork by the
changes that the source made until then.  So such a state is that snapshot, as the fork has it, with these changes on
top, and its inodes are those of the fork.

Threading: worker threads, apart from entering and leaving `SourceStates.tree`.
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Final

from msgspec.structs import replace

from protocol.diff.tree_diff import comparer, entry_or_none, is_at_or_below
from protocol.errors import os_error, shown
from protocol.tree import CHUNK_BYTES, Chunk, Hole, LookupTree, Tree, TreeEntry, names_in
from protocol.volume import Volume
from vfsd.daemon.merging.delta import Buffer, Delta, DeltaReader, Entry, Extent, buffer_in_memory, write_delta
from vfsd.daemon.snapshots.base import in_answer_thread, in_thread
from vfsd.operations.forks import StateId
from vfsd.wire.options import StoredOrigin

NEW_INODES: Final = 1 << 63
ReadAt = Callable[[int, int], bytes]  # (offset, size) of the buffer with the delta's content


class LayeredTree(LookupTree):
    """`below` with `delta`, whose content `read_at` reads.

    OSError (ESTALE) if `below` lacks what `delta` refers to.
    """

    def __init__(self, below: Tree, delta: Delta | None = None, read_at: ReadAt = lambda _at, _size: b"") -> None:
        self._below = below
        self._delta = delta or Delta()
        self._read_at = read_at
        self._entries = {path: self._made(entry) for path, entry in self._delta.entries.items()}
        self._gone = self._delta.gone
        # Below these paths there is nothing of `below`.
        self._ends = self._gone | {path for path, entry in self._entries.items() if not entry.is_dir}
        self._names: dict[bytes, dict[bytes, bool]] = {}  # directory -> name -> whether it exists
        for path in self._delta.paths():
            if path:
                above, _, name = path.rpartition(b"/")
                self._names.setdefault(above, {})[name] = path in self._entries

    def _made(self, sent: Entry) -> TreeEntry:
        entry, origin = sent.entry, sent.origin
        inode = entry.inode and NEW_INODES | entry.inode
        if origin is not None:
            old = entry_or_none(self._below, origin)
            if old is None or stat.S_IFMT(old.mode) != stat.S_IFMT(entry.mode):
                if sent.is_same:
                    raise _stale(origin)
            else:
                inode = old.inode or inode  # a stored snapshot has no number for a file with one name
                if sent.is_same and old.size != entry.size:
                    raise _stale(origin)
        return replace(entry, inode=inode)

    # -- protocol.tree.Tree ------------------------------------------------------------------
    def entry(self, path: bytes) -> TreeEntry:
        found = self._entries.get(path)
        if found is not None:
            return found
        self._check_reaches(path)
        return self._below.entry(path)

    def _check_reaches(self, path: bytes) -> None:
        """FileNotFoundError, NotADirectoryError if `path`, which has no entry of its own, is not that of `below`."""
        if not self._ends:
            return
        at = path
        while at:
            if at in self._ends:
                missing = at in self._gone
                raise os_error(errno.ENOENT if missing else errno.ENOTDIR, os.fsdecode(path))
            at = at.rpartition(b"/")[0]

    def children(self, path: bytes) -> list[bytes]:
        own = self._entries.get(path)
        if own is not None and not own.is_dir:
            raise os_error(errno.ENOTDIR, os.fsdecode(path))
        changed = self._names.get(path)
        if own is None:
            self._check_reaches(path)
            names = names_in(self._below, path)
        else:
            try:
                names = names_in(self._below, path)
            except (FileNotFoundError, NotADirectoryError):  # a new directory
                names = []
        if not changed:
            return names
        kept = [name for name in names if name not in changed]
        return sorted([*kept, *(name for name, exists in changed.items() if exists)])

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        tree, at, extents = self._source(path)
        if extents is None:
            return tree.read(at, offset, size)
        end = min(offset + size, self._entries[path].size)
        return self._sent(extents, offset, end)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        tree, source, extents = self._source(path)
        if extents is None:
            yield from tree.chunks(source, size)
            return
        done, whole = 0, self._entries[path].size
        for extent in extents:
            if extent.offset > done:
                yield Hole(extent.offset - done)
            done = extent.offset + extent.size
            for start in range(0, extent.size, size):
                yield self._read_at(extent.at + start, min(size, extent.size - start))
        if done < whole:
            yield Hole(whole - done)

    def touched(self, other: Tree) -> Collection[bytes] | None:
        bottom, own = self.layers()
        other_bottom, others = other.layers() if isinstance(other, LayeredTree) else (other, [])
        while own and others and own[0] is others[0]:  # layers that both have
            own, others = own[1:], others[1:]
        paths = {path for delta in (*own, *others) for path in delta.paths()}
        if bottom is other_bottom:
            return paths
        touched = bottom.touched(other_bottom)
        return None if touched is None else paths.union(touched)

    def layers(self) -> tuple[Tree, list[Delta]]:
        """Return the lowest tree, and the deltas on top of it, the lowest first."""
        if isinstance(self._below, LayeredTree):
            bottom, deltas = self._below.layers()
        else:
            bottom, deltas = self._below, []
        return bottom, [*deltas, self._delta]

    # -- content -------------------------------------------------------------------------------
    def _source(self, path: bytes) -> tuple[Tree, bytes, list[Extent] | None]:
        """The tree and the path that have the content of the regular file at `path`, or the extents if it was sent."""
        found = self._entries.get(path)
        if found is None:
            self._check_reaches(path)
            return self._below, path, None
        if not found.is_file:
            raise os_error(errno.EISDIR if found.is_dir else errno.EINVAL, os.fsdecode(path))
        entry = self._delta.entries[path]
        if entry.is_same:
            assert entry.origin is not None
            return self._below, entry.origin, None
        return self, path, self._delta.content[path]

    def _sent(self, extents: list[Extent], start: int, end: int) -> bytes:
        """The bytes from `start` to `end` of a file; what has no extent is zero."""
        if start >= end:
            return b""
        if len(extents) == 1 and extents[0].offset == 0 and end <= extents[0].size:
            return self._read_at(extents[0].at + start, end - start)
        content = bytearray(end - start)
        for extent in _overlapping(extents, start, end):
            first, last = max(start, extent.offset), min(end, extent.offset + extent.size)
            content[first - start : last - start] = self._read_at(extent.at + first - extent.offset, last - first)
        return bytes(content)

    # -- protocol.diff.tree_diff.ComparesContent ---------------------------------------------------
    def same_content(self, path: bytes, other: Tree, other_path: bytes | None = None) -> bool | None:
        if other is self._below and other_path in (None, path):
            sent = self._delta.entries.get(path)
            if sent is not None and sent.origin == path:
                return sent.is_same  # the sender has compared them
        tree, at, extents = self.bottom_source(path)
        other_at = path if other_path is None else other_path
        others = None
        if isinstance(other, LayeredTree):
            other, other_at, others = other.bottom_source(other_at)
        if extents is not None or others is not None:
            return True if extents is others else None
        if tree is other and at == other_at:
            return True
        comparing = comparer(tree)
        return None if comparing is None else comparing.same_content(at, other, other_at)

    def bottom_source(self, path: bytes) -> tuple[Tree, bytes, list[Extent] | None]:
        """As `_source`; the tree is the lowest one, or has received the content."""
        tree, at, extents = self._source(path)
        if extents is None and isinstance(tree, LayeredTree):
            return tree.bottom_source(at)
        return tree, at, extents


def _overlapping(extents: list[Extent], start: int, end: int) -> Iterator[Extent]:
    """The extents, which are sorted by offset, that overlap `start` to `end`."""
    low = bisect_right(extents, start, key=lambda extent: extent.offset + extent.size)  # the first that ends after it
    for extent in extents[low:]:
        if extent.offset >= end:
            return
        yield extent


def _stale(path: bytes) -> OSError:
    reason = "the directory below was changed by another program since the fork; nothing was changed"
    return OSError(errno.ESTALE, reason, shown(path))


_NOBODY = 0xFFFFFFFF  # no user has this number: so each real root directory differs from that of an EmptyTree


class EmptyTree(LookupTree):
    """A tree that has only its root."""

    def entry(self, path: bytes) -> TreeEntry:
        if path:
            raise os_error(errno.ENOENT, os.fsdecode(path))
        return TreeEntry(b"", stat.S_IFDIR, uid=_NOBODY, gid=_NOBODY)

    def children(self, path: bytes) -> list[bytes]:
        self.entry(path)
        return []

    def read(self, path: bytes, offset: int, size: int) -> bytes:  # noqa: ARG002
        raise os_error(errno.ENOENT, os.fsdecode(path))

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:  # noqa: ARG002
        raise os_error(errno.ENOENT, os.fsdecode(path))


class PartialTree(LookupTree):
    """The part of `tree` at and below `paths`, with `directories` and the directories above, without the rest in them.

    Takes as long as `paths` are many, however many names the directories above have.
    """

    def __init__(self, tree: Tree, paths: Collection[bytes], directories: Collection[bytes]) -> None:
        self._tree = tree
        self._whole = frozenset(paths)
        self._names: dict[bytes, set[bytes]] = {b"": set()}  # of directories that are shown in part
        for path in (*paths, *directories):
            at = path
            while at:
                above, _, name = at.rpartition(b"/")
                names = self._names.setdefault(above, set())
                if name in names:
                    break  # so are the directories above
                names.add(name)
                at = above
        for path in directories:
            self._names.setdefault(path, set())

    def _is_whole(self, path: bytes) -> bool:
        return is_at_or_below(path, self._whole)

    def entry(self, path: bytes) -> TreeEntry:
        if path not in self._names and not self._is_whole(path):
            raise os_error(errno.ENOENT, os.fsdecode(path))
        return self._tree.entry(path)

    def children(self, path: bytes) -> list[bytes]:
        if self._is_whole(path):
            return names_in(self._tree, path)
        if path not in self._names:
            raise os_error(errno.ENOENT, os.fsdecode(path))
        top = path + b"/" if path else b""
        # A path that does not exist is to be removed.
        return [name for name in sorted(self._names[path]) if entry_or_none(self._tree, top + name) is not None]

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        return self._tree.chunks(path, size)


class SourceStates:
    """The states of the workspace that `origin` names, in the store at `directory` (None: the user's).

    They are trees over the volume of the fork.
    """

    def __init__(self, origin: StoredOrigin, directory: str | None, volume: Volume) -> None:
        self._volume = volume
        self._key = origin.workspace
        self._base = origin.source.left_at
        self._directory = directory

    async def identities(self) -> list[StateId]:
        """Return the states that are in the store, the one below the fork among them if it is still there."""
        return await in_thread(self._identities)

    def _identities(self) -> list[StateId]:
        from protocol.store import Store  # noqa: PLC0415 (start-up: few forks are over a store)

        with Store(self._directory) as store:
            found = map(StateId.of, store.snapshots(self._key))
            return [each for each in found if each.serial <= self._base.serial]

    @asynccontextmanager
    async def tree(self, state: StateId, below: Tree) -> AsyncIterator[LayeredTree]:
        """Open `state` as a tree over `below`, the state that was forked.  SnapshotNotFoundError."""
        async with AsyncExitStack() as stack:
            buffer = buffer_in_memory(self._volume, stack)
            delta = await in_answer_thread(self._delta, state, buffer)
            yield await in_thread(LayeredTree, below, delta, buffer.read)

    def _delta(self, state: StateId, buffer: Buffer) -> Delta:
        from protocol.store import Store  # noqa: PLC0415 (as above)

        reader = DeltaReader(buffer.store, buffer.reserve)
        with ExitStack() as stack:
            store = stack.enter_context(Store(self._directory))
            below = stack.enter_context(store.tree(self._key, self._base.name))
            wanted = stack.enter_context(store.tree(self._key, state.name))
            write_delta(below, wanted, reader.feed, lambda: None)
        return reader.finish()
