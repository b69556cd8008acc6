"""Checks of a memory volume's invariants between two calls.  O(everything): for tests and bug reports."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING

from protocol.backends.memory.blocks import block_bytes
from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES, DIRECTORY_ENTRY_BYTES
from protocol.backends.memory.ledger import (
    NAMES_BYTES,
    RECORD_BYTES,
    metadata_bytes,
    version_bytes,
    xattrs_bytes,
)
from protocol.volume import ROOT_INODE

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import MemoryState


class Invariants:
    """The invariants of `state`, `content`, `directory_cookies`, `undo` and `ledger`.

    A subclass for a state that loads inodes and entries on demand replaces the methods after `check`.
    """

    def __init__(self, state: MemoryState) -> None:
        self._state = state
        self._inodes = dict(state.inodes.items())

    def check(self) -> None:
        """Raise AssertionError if an invariant fails."""
        for number, inode in self._inodes.items():
            assert inode.inode == number
            assert 0 < number < self._state.next_inode
            assert inode.epoch <= self._state.epoch
            self.check_inode(inode)
            self._check_links(inode)
            children = self.entries(inode)
            if children is not None:
                self._check_directory(inode, children)
        self._check_lookups()
        self._check_reachable()
        self._check_counters()
        _check_log(self._state)
        _check_ledger(self._state, list(self._inodes.values()))

    # -- one inode, as a subclass may see it -------------------------------------------------------
    def check_inode(self, inode: Inode) -> None:
        """Check an inode by itself."""
        _check_version(inode)

    def entries(self, directory: Inode) -> Mapping[bytes, int] | None:
        """Return the entries of a directory; None for other inodes, and for entries that are not loaded."""
        return directory.children

    def named(self, directory: Inode) -> Mapping[bytes, int]:
        """Return the entries of a directory that are known."""
        return self.entries(directory) or {}

    def may_miss_links(self, file: Inode) -> bool:  # noqa: ARG002
        """Return whether `file` may have names that are not among its links."""
        return False

    def unloaded(self) -> set[int]:
        """Return the inodes that the kernel may know although they are not loaded."""
        return set()

    def sizes(self, directory: Inode, count: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the sizes that a directory with `count` entries may have."""
        return (DIRECTORY_BASE_BYTES + DIRECTORY_ENTRY_BYTES * count,)

    # -- between inodes ----------------------------------------------------------------------------
    def _check_links(self, inode: Inode) -> None:
        assert len(set(inode.links)) == len(inode.links)
        for directory, name in inode.links:
            found = self.named(self._inodes[directory]).get(name)
            assert found == inode.inode, f"inode {inode.inode}: a link that its directory does not have"
        if inode.inode == ROOT_INODE:
            assert not inode.links
        elif inode.children is not None:
            assert len(inode.links) == (1 if inode.nlink else 0)
        else:
            missing = inode.nlink - len(inode.links)
            is_right = missing == 0 or (missing > 0 and self.may_miss_links(inode))
            assert is_right, f"inode {inode.inode}: nlink {inode.nlink}, links {inode.links}"

    def _check_directory(self, directory: Inode, children: Mapping[bytes, int]) -> None:
        for name, number in children.items():
            child = self._inodes.get(number)
            if child is not None:
                assert (directory.inode, name) in child.links, f"entry {name!r}: its inode lists no such link"
        if directory.nlink:
            subdirectories = sum(map(stat.S_ISDIR, self._state.modes(list(children.values()))))
            assert directory.nlink == 2 + subdirectories, f"inode {directory.inode}: nlink of a directory"
        else:
            assert not children, "a removed directory with entries"
        assert directory.size in self.sizes(directory, len(children)), directory.inode
        if directory.cookies is not None:
            listed = list(directory.cookies.after(0))
            assert sorted(name for _, name in listed) == sorted(children)
            assert all(a[0] < b[0] for a, b in itertools.pairwise(listed))

    def _check_reachable(self) -> None:
        """Check that the root reaches every inode with a name: no cycle, no island."""
        seen = {ROOT_INODE}
        todo = [ROOT_INODE]
        while todo:
            found = set(self.named(self._inodes[todo.pop()]).values()) & self._inodes.keys() - seen
            seen |= found
            todo += found
        named = {ROOT_INODE, *(number for number, inode in self._inodes.items() if inode.links)}
        assert named == seen, named ^ seen

    def _check_lookups(self) -> None:
        state = self._state
        assert state.lookups.keys() <= self._inodes.keys() | self.unloaded(), "lookups of inodes that do not exist"
        for number, count in state.lookups.items():
            assert count > 0, f"inode {number}: forgotten more often than looked up"
        orphans = {number for number, inode in self._inodes.items() if inode.nlink == 0}
        assert orphans == state.orphans, "orphans"
        assert orphans <= state.lookups.keys(), "neither links nor lookups"

    def _check_counters(self) -> None:
        state, inodes = self._state, self._inodes.values()
        linked = [inode for inode in inodes if inode.nlink]
        assert state.pages == sum(inode.pages for inode in inodes), "pages"
        assert state.directories == sum(inode.is_dir for inode in linked), "directories"
        assert state.files == sum(not inode.is_dir for inode in linked), "files"
        assert state.size_bytes == sum(inode.size for inode in linked if inode.is_file), "size_bytes"


def _check_version(inode: Inode) -> None:
    """Check the invariants of one inode, or of one old version, by itself."""
    kind = stat.S_IFMT(inode.mode)
    assert (inode.children is not None) == (kind == stat.S_IFDIR)
    assert (inode.target is not None) == (kind == stat.S_IFLNK)
    if inode.content is not None:
        assert kind == stat.S_IFREG
        inode.content.check(inode.size)


def _check_log(state: MemoryState) -> None:
    log = state.log
    epochs = log.epochs()
    assert all(a.serial < b.serial for a, b in itertools.pairwise(epochs))
    assert [a.next for a in epochs] == [*epochs[1:], None][: len(epochs)]
    assert [b.previous for b in epochs] == [None, *epochs[:-1]][: len(epochs)]
    assert log.newest is (epochs[-1] if epochs else None)
    assert state.epoch == log.serial
    names = [epoch.info.name for epoch in epochs if epoch.info is not None]
    assert len(set(names)) == len(names)
    for name in names:
        assert log.find(name).info is not None
    for epoch in epochs:
        _check_epoch(state, epoch)


def _check_epoch(state: MemoryState, epoch: Epoch) -> None:
    for number, version in epoch.inodes.items():
        if version is not None:
            assert version.inode == number
            assert version.nlink > 0, "a snapshot holds an inode without links"
            assert version is not state.inodes.get(number), f"inode {number}: a pre-image that is live"
            _check_version(version)
    if epoch is state.log.newest:
        for number, inode in state.inodes.items():
            if inode.epoch < epoch.serial and inode.nlink:
                assert number not in epoch.inodes, f"inode {number} was changed but has an old stamp"
    for directory, names in epoch.names.items():
        assert directory in epoch.inodes, f"inode {directory}: names of a directory that did not change"
        if epoch.inodes[directory] is None:
            assert not any(names.values()), f"inode {directory}: entries of a directory before it was made"


def _check_ledger(state: MemoryState, live: list[Inode]) -> None:
    """Check the totals of the ledger against the `live` inodes and the pre-images of the epochs."""
    ledger = state.ledger
    versions = [version for epoch in state.log.epochs() for version in epoch.inodes.values() if version is not None]
    content = sum(inode.content.charge for inode in live if inode.content is not None)
    assert ledger.content == content, f"content: {ledger.content}, of inodes {content}"
    xattrs = sum(xattrs_bytes(inode.xattrs) for inode in live if inode.xattrs is not None)
    metadata = sum(map(metadata_bytes, live)) + xattrs
    assert ledger.metadata == metadata, f"metadata: {ledger.metadata}, of inodes {metadata}"
    holders, distinct = _shared([*live, *versions], ledger.shared)
    assert ledger.shared == holders, "holders of shared objects"
    blocks = sum(inode.content.allocated for inode in live if inode.content is not None)
    kept = distinct - blocks - xattrs + sum(map(version_bytes, versions)) + _record_bytes(state)
    assert ledger.kept == kept, f"kept by snapshots: {ledger.kept}, found {kept}"


def _shared(inodes: list[Inode], recorded: dict[int, int]) -> tuple[dict[int, int], int]:
    """Return the holders of each shared block and dict of attributes, and the charge of all objects, each once.

    A dict with one holder may be among those `recorded` as shared, if it had more holders before.
    """
    holders: dict[int, int] = {}
    sizes: dict[int, int] = {}
    alone = 0
    for inode in inodes:
        content = inode.content
        if content is not None:
            for index, block in content.blocks.items():
                if content.owned is None or index in content.owned:
                    alone += block_bytes(block)
                else:
                    holders[id(block)] = holders.get(id(block), 0) + 1
                    sizes[id(block)] = block_bytes(block)
        kept = inode.xattrs
        if kept is not None:
            if id(kept) in recorded:
                holders[id(kept)] = holders.get(id(kept), 0) + 1
                sizes[id(kept)] = xattrs_bytes(kept)
            else:
                alone += xattrs_bytes(kept)
    return holders, alone + sum(sizes.values())


def _record_bytes(state: MemoryState) -> int:
    """Return the charge of the epochs and of all pre-images that are not versions of inodes."""
    charge = 0
    for epoch in state.log.epochs():
        charge += epoch.charge + RECORD_BYTES * sum(version is None for version in epoch.inodes.values())
        charge += sum(NAMES_BYTES + sum(RECORD_BYTES + len(name) for name in names) for names in epoch.names.values())
    return charge
