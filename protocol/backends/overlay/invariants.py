"""Check the invariants of an overlay that hold between two calls.  O(what was loaded): for tests and bug reports.

Uses the checks of `memory.invariants` that load nothing from the lower layer; directories and inodes that are not
loaded are not checked.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES, DIRECTORY_ENTRY_BYTES
from protocol.backends.memory.invariants import check_inode, check_ledger, check_log
from protocol.backends.overlay.children import UnfilledChildren
from protocol.backends.overlay.inode import OverlayInode
from protocol.tree import TYPE_MASK
from protocol.volume import ROOT_INODE

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.overlay.state import OverlayState

__all__ = ["check"]


def check(state: OverlayState) -> None:
    """Raise AssertionError if an invariant does not hold."""
    known = dict(state.table.items())
    for number, inode in known.items():
        assert inode.inode == number
        assert 0 < number < state.next_inode
        assert inode.epoch <= state.epoch
        check_inode(inode)
        _check_links(known, inode)
        _check_base(state, inode)
        if inode.children is not None and not isinstance(inode.children, UnfilledChildren):
            _check_directory(state, known, inode)
    linked = [inode for inode in known.values() if inode.nlink]
    assert state.pages == sum(inode.pages for inode in known.values()), "pages"
    assert state.directories == sum(inode.is_dir for inode in linked), "directories"
    assert state.files == sum(not inode.is_dir for inode in linked), "files"
    assert state.size_bytes == sum(inode.size for inode in linked if inode.is_file), "size_bytes"
    below = sum(isinstance(inode, OverlayInode) for inode in known.values()) - 1
    assert state.table.below == below, "inodes from below"
    check_log(state)
    check_ledger(state, known.values())


def _check_base(state: OverlayState, inode: Inode) -> None:
    """Check that all versions of an inode have one lower identity: the one that the live version showed last.

    Then the base records what the workspace had seen of a file when it first changed it, and `apply` can compare.
    """
    if isinstance(inode, OverlayInode):
        for version in state.versions(inode.inode):
            if isinstance(version, OverlayInode):
                assert version.lower.identity == inode.lower.identity, f"inode {inode.inode}: identities below"


def _check_links(known: dict[int, Inode], inode: Inode) -> None:
    assert len(set(inode.links)) == len(inode.links)
    for directory, name in inode.links:
        children = known[directory].children
        assert children is not None
        assert children[name] == inode.inode, f"inode {inode.inode}: a link that its directory does not have"
    if inode.inode == ROOT_INODE:
        assert not inode.links
    elif inode.children is not None:
        assert len(inode.links) == (1 if inode.nlink else 0)
    elif isinstance(inode, OverlayInode):
        assert inode.nlink >= len(inode.links)
    else:
        assert inode.nlink == len(inode.links), f"inode {inode.inode}: nlink {inode.nlink}, links {inode.links}"


def _check_directory(state: OverlayState, known: dict[int, Inode], directory: Inode) -> None:
    children = directory.children
    assert children is not None
    subdirectories = 0
    for name, number in children.items():
        child = known.get(number)
        if child is not None:
            assert (directory.inode, name) in child.links, f"an entry {name!r} that its inode does not know"
        subdirectories += state.kind(number) & TYPE_MASK == 0o040000
    if directory.nlink:
        assert directory.nlink == 2 + subdirectories, f"inode {directory.inode}: nlink of a directory"
    else:
        assert not children, "a removed directory with entries"
    if not isinstance(directory, OverlayInode) or directory.size != directory.lower.size:
        assert directory.size == DIRECTORY_BASE_BYTES + DIRECTORY_ENTRY_BYTES * len(children), directory.inode
    if directory.cookies is not None:
        listed = list(directory.cookies.after(0))
        assert sorted(name for _, name in listed) == sorted(children)
        assert all(a[0] < b[0] for a, b in itertools.pairwise(listed))
