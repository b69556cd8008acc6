"""Inode rows: the inode number and the ctime of each entry of a state, in listings of their own.

A program such as git recognises an unchanged file by its stat data, so a state that is resumed elsewhere shows the
same.  These values are not in the rows of the content: two states with the same content have the same root, whatever
their inodes are.

An inode row has the form of a `Row`, so everything that follows listings follows these, too: `mtime_ns` is the ctime,
`size` the inode number (0: number and ctime are unknown), and `content` the digest of a directory's inode listing (b""
for other files).
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Final

from protocol.errors import shown
from protocol.linux.statx import numbers_and_ctimes
from protocol.store.format.rows import Row, encode_listing

if TYPE_CHECKING:
    from protocol.store.directory.statcache import CachedDirectory
    from protocol.store.format.blobs import Sink

_NUMBERS_END: Final = 1 << 63  # as in the rows of content
_EMPTY: Final = encode_listing([])


def inode_row(name: bytes, mode: int, number: int, ctime_ns: int, below: bytes = b"") -> Row:
    """The inode row of an entry; `below` is the digest of a directory's inode listing."""
    return Row(name, stat.S_IFMT(mode), 0, 0, ctime_ns, number if number < _NUMBERS_END else 0, below)


def inodes_lost(path: bytes, damage: str) -> str:
    """Say that a mount has no inode numbers and ctimes of what is below `path`."""
    return (
        f"the inode numbers and ctimes below {shown(path) or '.'} are lost ({damage}), so git reads files again;"
        " the contents are whole"
    )


def scanned_inodes(sink: Sink, record: bytes, root: CachedDirectory, *, trusted: bool) -> Row:
    """Give the inode listings of a scanned host directory to `sink`; return the inode row of the root.

    `record` is the statx record of the root.  `trusted`: the store has everything below each listing that it has.
    """
    ((mode, number, ctime_ns),) = numbers_and_ctimes(record)
    return inode_row(b"", mode, number, ctime_ns, _listing(sink, root, trusted=trusted))


def _listing(sink: Sink, directory: CachedDirectory, *, trusted: bool) -> bytes:
    digest = directory.inodes
    if trusted and digest is not None and sink.keeps(digest):
        return digest
    rows = []
    for name, (mode, number, ctime_ns) in zip(directory.names, numbers_and_ctimes(directory.records), strict=True):
        below = b""
        if stat.S_ISDIR(mode):
            child = directory.children.get(name)
            below = sink.listing(_EMPTY) if child is None else _listing(sink, child, trusted=trusted)
        # Stat data must never be older than the content: a program would take the file for an earlier one.
        rows.append(inode_row(name, mode, 0 if name in directory.outdated else number, ctime_ns, below))
    directory.inodes = digest = sink.listing(encode_listing(rows))
    return digest
