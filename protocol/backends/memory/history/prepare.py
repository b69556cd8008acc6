"""Preparation: builds the new files of an import in small steps, before the one step that makes them visible.

Converging with a tree of 100,000 new files takes a second, during which the loop answers no request.  `steps` builds
the new files and directories with their content in small steps, as inodes of the live state that no path leads to yet.
`Preparation.run` then gives them their names and converges the rest.  It is one step, and spends most of its time on
files that existed before.

The prepared inodes form islands: the topmost inode of an island has no link, is kept alive by a lookup, and leads to
all others.  The counters of the state leave islands out until they are linked.  No snapshot may be taken while there is
an island; a view may be opened.

If a prepared name is created by someone else meanwhile, or its directory is removed, `is_valid` becomes False.  Then
`discard` removes the islands, and a `Converger` does the whole import.

If the tree is a view of a volume that was filled for this one (`SnapshotHistory.fill`), its inodes are taken over, not
copied: each already has the number that it will have here.  `discard` gives them back unchanged.  The tree must not be
used after `run`.

Files that already equal the tree are recorded by `steps`, and `run` skips them if they did not change since.  To make
changes visible, the caller keeps a view of the volume open: then a change makes a new version.

Threading: the serving loop only.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from protocol.backends.memory import xattrs
from protocol.backends.memory.content import BLOCK_BYTES, Content
from protocol.backends.memory.history.converge import Converger, Extent, metadata
from protocol.backends.memory.ledger import RECORD_BYTES, SLACK_BYTES, live_bytes, xattrs_bytes
from protocol.diff.tree_diff import entry_or_none
from protocol.errors import os_error
from protocol.tree import names_in
from protocol.volume import NAME_MAX

if TYPE_CHECKING:
    from protocol.backends.memory.blocks import Block
    from protocol.backends.memory.inode import Inode, Links
    from protocol.backends.memory.journaling.recorder import Recorder
    from protocol.backends.memory.state import MemoryState
    from protocol.tree import Chunk, Tree, TreeEntry

_TAKEN_AT_ONCE: Final = 64  # inodes in a step


class Preparation(Converger):
    """A `Converger` whose new entries are made before it runs."""

    def __init__(
        self,
        state: MemoryState,
        tree: Tree,
        extent: Extent,
        *,
        replace: bool,
        check_quota: Callable[[int, int, int], None],
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(state, tree, extent, replace=replace, check_quota=check_quota)
        self._tops: dict[bytes, int] = {}  # path -> inode
        self._subdirectories: dict[int, int] = {}  # topmost directory -> number of its subdirectories
        self._same: dict[bytes, Inode] = {}  # path -> live version that equals the tree
        self._recorder = recorder
        self._differing: list[Inode] = []  # versions in the tree of files whose live version differs
        self._numbers: list[range] = []  # of the inodes on the islands
        self._counted = (0, 0, 0)  # files, directories and bytes on the islands
        self._moving = self._view.inodes_for(state) if self._view is not None else None
        self._moved: list[tuple[Inode, Links, int]] = []  # tops that were taken over, with links and nlink before

    def steps(self) -> Iterator[int]:
        """Build the islands; each step yields the number of entries that it handled.  ENOSPC, ENAMETOOLONG.

        The loop may do other work between two steps.
        With a journal, the content and the new inodes are recorded, too.
        """
        for scope in self._paths:
            for top in self._new_tops(scope):
                if top is None:
                    yield 1
                elif len(top.name) > NAME_MAX:
                    raise os_error(errno.ENAMETOOLONG, top.name.decode("utf-8", "backslashreplace"))
                elif self._moving is not None:
                    yield from self._taken_over(top, self._moving)
                else:
                    yield from self._built(top)
        if self._recorder is not None:
            for _ in self._recorder.ahead.store(self._new_blocks()):
                yield 0
            for _ in self._recorder.ahead.store_inodes(self._complete_inodes(), set(self._tops.values())):
                yield 0

    def _complete_inodes(self) -> Iterator[Inode]:
        """Yield the inodes on the islands, without files that `run` may link to further names."""
        linked = set(self._linked.values())
        for number in chain.from_iterable(self._numbers):
            if number not in linked:
                yield self._inode(number)

    def _new_blocks(self) -> Iterator[Block]:
        """Yield the blocks that the import adds to the state."""
        inodes = self._state.inodes
        for node in chain((inodes[number] for numbers in self._numbers for number in numbers), self._differing):
            if node.content is not None:
                yield from node.content.blocks.values()

    @property
    def is_valid(self) -> bool:
        """Whether every prepared name is still free."""
        places: dict[bytes, int] = {}
        return all(self._place(path, places) is not None for path in self._tops)

    def run(self) -> None:
        """See `Converger.run`.  The caller's transaction undoes the islands too."""
        self._join()
        super().run()

    def discard(self) -> Iterator[None]:
        """Remove the islands, in steps.  Until the last step the counters of the state are too high."""
        if self._recorder is not None:
            self._recorder.ahead.clear()
        if self._moving is not None:
            yield from self._given_back()
            return
        state = self._state
        self._count_islands()
        tops, self._tops, self._numbers, self._counted = self._tops, {}, [], (0, 0, 0)
        for number in tops.values():
            for name in list(state.inodes[number].children or ()):
                self._remove(state.inodes[number], name)
                state.own(state.inodes[number]).nlink = 0
                yield
            top = state.own(state.inodes[number])
            self._let_go(top)
            state.release(top)

    # -- islands ---------------------------------------------------------------------------------
    def _new_tops(self, scope: bytes) -> Iterator[TreeEntry | None]:
        """Yield the topmost entries of the tree below `scope` that do not exist in a live directory.

        Yields None for each other entry that was compared.
        """
        entry = entry_or_none(self._tree, scope)
        if entry is None:
            return
        if scope and self._place(scope, {}) is not None:
            yield entry
            return
        top = self._live_directory(scope)
        waiting = [(scope, top.inode)] if entry.is_dir and top is not None else []
        while waiting:
            at, number = waiting.pop()
            for below in self._tree.entries(at):
                live = self._state.inodes.get(number)  # anew at each step: the loop does other work between them
                if live is None or live.children is None:
                    break
                found = self._child(live, below.name)
                if found is None:
                    yield below
                    continue
                if below.is_dir:
                    waiting.append((below.path, found.inode))
                elif self._is_same(found, below):
                    self._same[below.path] = found
                elif self._recorder is not None and self._view is not None and below.is_file:
                    version = self._view.version(below.inode)
                    if version is not None:
                        self._differing.append(version)
                yield None

    def _is_same(self, node: Inode, entry: TreeEntry) -> bool:
        """Return whether `node` already equals `entry`."""
        if entry.nlink != 1 or node.nlink != 1 or self._view is None:
            return False
        version = self._view.version(entry.inode)
        return (
            version is not None
            and metadata(version) == metadata(node)
            and version.pages == node.pages
            and version.same_content(node)
        )

    def _walk(self, path: bytes) -> Iterator[TreeEntry]:
        """See `Converger._walk`.  Skips the islands, and files that were equal and did not change since."""
        inodes = self._state.inodes
        waiting = [path] if path not in self._tops else []
        while waiting:
            at = waiting.pop()
            entry = self._tree.entry(at)
            yield entry
            if not entry.is_dir:
                continue
            directory = self._directories[at]
            prefix = at + b"/" if at else b""
            for name in reversed(names_in(self._tree, at) if self._view is None else self._view.children(at)):
                below = prefix + name
                same = self._same.get(below)
                # The first change after a view was opened puts another version in its place.
                if same is not None and inodes.get(same.inode) is same and same.parent_link == (directory, name):
                    continue
                if below not in self._tops:
                    waiting.append(below)

    def _taken_over(self, top: TreeEntry, nodes: Mapping[int, Inode]) -> Iterator[int]:
        """Make `top` and everything below it an island of the view's inodes, whose numbers are consecutive."""
        node = last = nodes[top.inode]
        while last.children:
            *_, number = last.children.values()
            last = nodes[number]
        self._moved.append((node, node.links, node.nlink))
        if node.children is not None:
            self._subdirectories[node.inode] = node.nlink - 2
        node.links, node.nlink = (), 0
        self._hold(node)
        self._tops[top.path] = node.inode
        end = last.inode + 1
        for first in range(node.inode, end, _TAKEN_AT_ONCE):
            numbers = range(first, min(first + _TAKEN_AT_ONCE, end))
            self._take_over([nodes[number] for number in numbers])
            self._numbers.append(numbers)
            yield len(numbers)

    def _take_over(self, nodes: Sequence[Inode]) -> None:
        state = self._state
        ledger = state.ledger
        pages = sum(node.pages for node in nodes)
        self._check_growth(pages, len(nodes), sum(map(live_bytes, nodes)))
        before = self._counters()
        for node in nodes:
            state.inodes[node.inode] = node
            ledger.enter_new(node)
            if node.content is not None:
                node.content.ledger = ledger
            if node.nlink:  # the topmost inode is counted when it gets its name
                state.count(node, +1)
        state.pages += pages
        self._count_apart(before)

    def _given_back(self) -> Iterator[None]:
        """Undo `_taken_over`."""
        assert self._view is not None
        state = self._state
        numbers, self._numbers = self._numbers, []
        for each in numbers:
            for number in each:
                node = state.inodes.pop(number)
                state.pages -= node.pages
                state.ledger.leave(node)
                if node.content is not None:
                    node.content.ledger = self._view.ledger
            yield
        for node, links, nlink in self._moved:
            node.links, node.nlink = links, nlink
            self._let_go(node)
        self._tops, self._moved, self._counted = {}, [], (0, 0, 0)

    def _built(self, top: TreeEntry) -> Iterator[int]:
        """Build the island of `top`, one entry in each step."""
        if top.inode in self._linked and top.nlink > 1:
            return  # another name of a file on an island
        directories: dict[bytes, int] = {}
        finished = []
        for entry in self._tree.walk(top.path):
            before, first = self._counters(), self._state.next_inode
            if entry.path == top.path:
                node = self._new(top)
                self._hold(node)
                self._tops[top.path] = island = node.inode
                if not top.is_dir:
                    self._complete(node, top)
            else:
                above = self._inode(directories[entry.path.rpartition(b"/")[0]])
                if not entry.is_dir:
                    self._leaf(above, entry)
                else:
                    node = self._make(above, entry.name, entry)
                    if above.inode == island:
                        self._subdirectories[island] = self._subdirectories.get(island, 0) + 1
                        self._inode(island).nlink = 0  # without a name it has no links, whatever it contains
            if entry.is_dir:
                directories[entry.path] = node.inode
                finished.append(entry)
            self._ended(first, before)
            yield 1
        for entry in reversed(finished):
            self._set_metadata(self._inode(directories[entry.path]), entry)
            yield 1

    def _join(self) -> None:
        """Give the islands their names.  Their inodes exist in no snapshot."""
        state = self._state
        newest = state.log.newest
        assert newest is not None, "in a transaction"
        for numbers in self._numbers:
            newest.inodes.update(dict.fromkeys(numbers))
            state.ledger.kept += RECORD_BYTES * len(numbers)
            for number in numbers:
                node = state.inodes[number]
                node.epoch = node.born = state.epoch
        self._count_islands()
        places: dict[bytes, int] = {}
        for path, number in self._tops.items():
            directory = self._place(path, places)
            assert directory is not None, "is_valid"
            node = self._link_filled(directory, path.rpartition(b"/")[2], state.inodes[number])
            self._let_go(node)

    def _hold(self, top: Inode) -> None:
        """Keep the topmost inode of an island, which has no name yet, as if the kernel had looked it up."""
        self._state.lookups[top.inode] = 1
        self._state.orphans.add(top.inode)

    def _let_go(self, top: Inode) -> None:
        """End `_hold`."""
        del self._state.lookups[top.inode]
        self._state.orphans.discard(top.inode)

    def _link_filled(self, directory: Inode, name: bytes, node: Inode) -> Inode:
        """Link an inode, which may be a directory with entries."""
        children = node.children
        if not children:
            return self._link(directory, name, node)
        node.children = {}
        node = self._link(directory, name, node)
        node.children = children
        node.nlink += self._subdirectories.get(node.inode, 0)
        return node

    # -- live places -----------------------------------------------------------------------------
    def _live_directory(self, path: bytes) -> Inode | None:
        try:
            node = self._state.inode_at(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return node if node.is_dir else None

    def _place(self, path: bytes, directories: dict[bytes, int]) -> Inode | None:
        """Return the live directory that `path` can be made in; None if it does not exist or the name is taken.

        `directories` caches the directories that were found, for the next call.
        """
        above, _, name = path.rpartition(b"/")
        if above not in directories:
            found = self._live_directory(above)
            directories[above] = 0 if found is None else found.inode
        directory = self._state.inodes.get(directories[above])  # the first name in it makes a new version
        return directory if directory is not None and self._child(directory, name) is None else None

    # -- counters --------------------------------------------------------------------------------
    def _counters(self) -> tuple[int, int, int]:
        return self._state.files, self._state.directories, self._state.size_bytes

    def _count_apart(self, before: tuple[int, int, int]) -> None:
        """Set the counters of the state back to `before`, and add the difference to those of the islands."""
        state = self._state
        self._count_islands()
        files, directories, size = self._counters()
        self._counted = (files - before[0], directories - before[1], size - before[2])
        state.files, state.directories, state.size_bytes = before

    def _ended(self, first: int, before: tuple[int, int, int]) -> None:
        """Record the inodes made from `first` on, and set the counters back to `before`."""
        self._count_apart(before)
        end = self._state.next_inode
        if self._numbers and self._numbers[-1].stop == first:
            self._numbers[-1] = range(self._numbers[-1].start, end)
        elif end > first:
            self._numbers.append(range(first, end))

    def _count_islands(self) -> None:
        files, directories, size = self._counted
        self._state.files += files
        self._state.directories += directories
        self._state.size_bytes += size


class Filler:
    """Copies a tree into an empty state (a root directory without entries) in one pass.

    `Converger` takes three times as long, because it compares each entry with the live state.  Inodes are numbered in
    the order of `Tree.walk`, so the inodes of a subtree have consecutive numbers.  Nothing else uses the state.  After
    an error it is incomplete and the caller discards it.

    `check_quota` is as in `Converger`; `has_links` says whether some file has two names.
    """

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
